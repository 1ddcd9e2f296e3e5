"""The Compare page beside ``kernelcast compare``."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable

from playwright.sync_api import expect

from browser.visits import REFUSED, Visit

Run = Callable[..., tuple[int, str, str]]


def printed_lines(out: str) -> list[str]:
    """The table's lines with one space between words, from under its head to the next empty line."""
    lines = [" ".join(line.split()) for line in out.splitlines()]
    head = next(at for at, line in enumerate(lines) if line.startswith("GPU "))
    return lines[head + 1 : lines.index("", head)]


def same_as_printed(visit: Visit, run: Run, command: str) -> list[str]:
    """Wait for the command's answer; hold its order beside what the command prints. Returns the names in order."""
    visit.shows_command(command)
    code, out, err = run(*shlex.split(command)[1:])
    assert code == 0, err
    shown = visit.cells("#compare-table")
    ids: list[str] = visit.page.locator("#compare-table tbody tr").evaluate_all(
        "rows => rows.map(row => row.dataset.gpu)"
    )
    for row, gpu in zip(shown, ids, strict=True):  # the page has the names of their makers, and links at the end
        assert row.pop().startswith("Model") and row[1]
        row[1] = row[1].replace(row[1].partition(" [")[0].removeprefix("✕ misses a limit: "), gpu)
    # the page numbers the rows, and has the format in every row; the command line where it differs
    assert [" ".join([*row[1:3], *row[4:]]) for row in shown] == printed_lines(out)
    assert [row[0] for row in shown] == [str(at + 1) for at in range(len(shown))]
    best = re.search(r"^best +(.*?)(?=^measured|^near|^\[1\]|^$)", out, re.MULTILINE | re.DOTALL)
    assert best
    expect(visit.find("#best")).to_contain_text(f"Best: {' '.join(best[1].split())}")
    return [row[1] for row in shown]


def test_the_order_is_the_command_s(visit: Visit, run: Run) -> None:
    visit.open("/compare?model=llama-3.1-8b&gpus=h100_sxm&gpus=h200_sxm&gpus=l40s&batch=8")
    command = "kernelcast compare llama-3.1-8b --batch 8 --gpus h100_sxm,h200_sxm,l40s"
    names = same_as_printed(visit, run, command)
    rows = json.loads(run(*shlex.split(command)[1:], "--json")[1])["rows"]
    assert [row["gpu"] for row in rows] == names
    assert visit.value("tpot_s") == rows[0]["tpot_s"]
    assert visit.value("usd_per_million_tokens") == rows[0]["usd_per_million_tokens"]

    visit.page.get_by_role("button", name="Remove NVIDIA L40S").click()
    visit.find("#by").select_option("latency")
    visit.query_has("gpus=h200_sxm", "by=latency", "batch=8")
    same_as_printed(visit, run, "kernelcast compare llama-3.1-8b --batch 8 --gpus h100_sxm,h200_sxm --by latency")
    visit.pick("gpus", "a100_sxm")
    command = "kernelcast compare llama-3.1-8b --batch 8 --gpus h100_sxm,h200_sxm,a100_sxm --by latency"
    same_as_printed(visit, run, command)
    visit.page.reload()
    visit.shows_command(command)
    expect(visit.find("#by")).to_have_value("latency")
    expect(visit.find("#batch")).to_have_value("8")


def test_a_what_if_slider_is_the_command_with_what_if(visit: Visit, run: Run) -> None:
    visit.open("/compare?model=llama-3.1-8b&gpus=h100_sxm&gpus=h200_sxm&batch=8")
    visit.find("#dram_bytes_per_s").focus()
    for _ in range(10):  # steps of 0.05
        visit.page.keyboard.press("ArrowRight")
    expect(visit.find("#dram_bytes_per_s-told")).to_have_text("× 1.5")
    command = "kernelcast compare llama-3.1-8b --batch 8 --gpus h100_sxm,h200_sxm --what-if 'dram_bytes_per_s*1.5'"
    names = same_as_printed(visit, run, command)
    assert sorted(names) == ["h100_sxm", "h100_sxm [1]", "h200_sxm", "h200_sxm [1]"]
    visit.query_has("what_if=dram_bytes_per_s*1.5")
    visit.page.go_back()
    visit.shows_command("kernelcast compare llama-3.1-8b --batch 8 --gpus h100_sxm,h200_sxm")
    expect(visit.find("#dram_bytes_per_s-told")).to_have_text("× 1")


def test_what_does_not_fit_and_what_is_not_known_are_told(visit: Visit) -> None:
    visit.allow(REFUSED)
    visit.open("/compare?model=llama-3.1-70b&gpus=l4&gpus=h200_sxm&max_gpus=2&batch=1")
    assert [row[0] for row in visit.cells("#unfit-table")] == ["L4"]
    visit.find("#tpot").fill("many")
    expect(visit.find("#problem")).to_contain_text("many")
    visit.find("#tpot").fill("50ms")
    expect(visit.find("#compare-table")).to_be_visible()
    expect(visit.find("#problem")).to_have_count(0)
    visit.find("#gpus-none").click()
    expect(visit.find("#answer")).to_have_text("Choose GPUs to compare.")


def test_the_chart_is_walked_by_keyboard(visit: Visit) -> None:
    visit.open("/compare?model=llama-3.1-8b&gpus=h100_sxm&gpus=h200_sxm&batch=8")
    visit.find("#against").last.select_option("tokens_per_s_per_gpu")
    visit.find("#pareto svg [tabindex='0'], #pareto svg[tabindex='0']").first.focus()
    visit.page.keyboard.press("ArrowRight")
    expect(visit.find("#shown")).to_contain_text("per output token")
    expect(visit.find("#compare-table tr.shown-row")).to_have_count(1)
