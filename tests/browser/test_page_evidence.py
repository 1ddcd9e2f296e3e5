"""The Evidence page beside ``kernelcast evidence``."""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

from browser.visits import Visit, columns

Run = Callable[..., tuple[int, str, str]]
_CELLS = "all => all.map((one) => ({...one.dataset, text: one.textContent}))"


def kinds(run: Run, *words: str) -> Any:
    code, out, err = run("evidence", *words, "--json")
    assert code == 0, err
    return json.loads(out)


def test_the_map_has_the_command_s_numbers(visit: Visit, run: Run) -> None:
    visit.open("/evidence")
    found = kinds(run)
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for kind in found["evidence"]:
        groups[kind["op"], kind["gpu"]].append(kind)
    cells = visit.page.locator("#grid button.cell").evaluate_all(_CELLS)
    assert {(cell["op"], cell["gpu"]) for cell in cells} == set(groups)
    for cell in cells:
        own = groups[cell["op"], cell["gpu"]]
        assert int(cell["calls"]) == sum(kind["calls"] for kind in own)
        tested = [kind for kind in own if kind["error"] is not None]
        if not tested:
            assert cell["text"] == "—"
            continue
        mean = sum(kind["error"] * kind["tested"] for kind in tested) / sum(kind["tested"] for kind in tested)
        assert float(cell["error"]) == pytest.approx(mean, rel=1e-9)
        assert abs(float(cell["text"]) - 100 * mean) <= (0.5 if mean >= 0.0995 else 0.05) + 1e-9
    assert visit.value("calls") == found["calls"]
    expect(visit.figure("calls")).to_have_text(f"{found['calls']:,}")


def test_a_row_of_the_map_is_the_command_by_op(visit: Visit, run: Run) -> None:
    visit.open("/evidence?op=gemm")
    for entry in kinds(run, "--by", "op", "--gpu", "h200_sxm")["evidence"]:
        if "gemm" not in entry["op"]:
            continue
        cell = visit.find(f'#grid button[data-op="{entry["op"]}"][data-gpu="h200_sxm"]')
        assert float(cell.get_attribute("data-error") or 0) == pytest.approx(entry["error"], rel=1e-9)
        assert float(cell.get_attribute("data-inside") or 0) == pytest.approx(entry["inside"], rel=1e-9)


def test_a_cell_opens_its_kinds_by_keyboard(visit: Visit, run: Run) -> None:
    visit.open("/evidence")
    first = visit.find("#grid button[tabindex='0']")
    first.focus()
    visit.page.keyboard.press("ArrowDown")
    visit.page.keyboard.press("ArrowUp")
    expect(first).to_be_focused()
    expect(visit.find("#told")).to_contain_text("calls of")
    visit.page.keyboard.press("Enter")
    command = "kernelcast evidence --op gemm --gpu h200_sxm"
    visit.shows_command(command)
    expect(visit.find("#kinds")).to_be_visible()
    _, out, _ = run(*shlex.split(command)[1:])
    expect(visit.find("#kinds-told")).to_have_text(out.splitlines()[0])
    printed = {tuple(columns(line, "gemm", 6)[2:]) for line in out.splitlines() if line.startswith("gemm ")}
    assert {tuple(row[:4]) for row in visit.cells("#kinds")} == printed

    visit.query_has("cell=gemm+h200_sxm")
    visit.page.reload()
    expect(visit.find("#kinds")).to_be_visible()
    visit.page.go_back()
    expect(visit.find("#kinds")).to_have_count(0)


def test_a_stack_alone(visit: Visit, run: Run) -> None:
    visit.open("/evidence")
    visit.find("#stack").select_option("vllm")
    visit.query_has("stack=vllm")
    found = kinds(run, "--stack", "vllm")
    expect(visit.figure("calls")).to_have_text(f"{found['calls']:,}")
    visit.shows_command("kernelcast evidence --stack vllm --by op")
    visit.find("#op").fill("no such op")
    expect(visit.find("#map")).to_contain_text("Nothing was measured")


def published(by: str) -> dict[str, Any]:
    """What the server might say of two results a group, made up."""
    line = {"source": "served", "title": "served benchmarks", "quantity": "mean ttft", "rows": 1234, "mean": 12.34,
            "median": 9.0, "bias": -4.4, "coverage": 0.8, "held_out": 617}  # fmt: skip
    if by == "model":
        errors = [{**line, "model": f"model-{at}", "coverage": None} for at in range(40)]
    else:
        errors = [{**line, by: name} for name in ("seen", "near")]
    return {"by": by, "about": {"made": "2026-01-01", "version": "1.0"}, "errors": errors}


CELLS = ["mean ttft", "1,234", "12.3%", "9.00%", "-4%", "80% of 617"]


def test_published_results_by_what_is_chosen(visit: Visit) -> None:
    visit.page.route(
        "**/evidence/published?by=*", lambda route: route.fulfill(json=published(route.request.url.split("=")[-1]))
    )
    visit.open("/evidence?by=support")
    expect(visit.find("#published-table tbody tr")).to_have_count(2)
    assert visit.cells("#published-table") == [[level, "served benchmarks", *CELLS] for level in ("seen", "near")]
    expect(visit.find("#published")).to_contain_text("Made on 2026-01-01 with kernelcast 1.0")
    visit.find("#by").select_option("model")
    visit.query_has("by=model")
    expect(visit.find("#published-table tbody tr:visible")).to_have_count(25)
    visit.find("#published-table-all").click()
    expect(visit.find("#published-table tbody tr:visible")).to_have_count(40)
    assert visit.cells("#published-table")[0] == ["model-0", "served benchmarks", *CELLS[:-1], "—"]
    visit.page.go_back()
    expect(visit.find("#by")).to_have_value("support")
    expect(visit.find("#published-table tbody tr")).to_have_count(2)


def test_published_results_are_the_command_s(visit: Visit, run: Run) -> None:
    lines = kinds(run, "--published")["errors"]
    visit.open("/evidence")
    if not lines:
        expect(visit.find("#published-errors")).to_have_text("No published result was scored.")
        return
    expect(visit.find("#published-table tbody tr")).to_have_count(len(lines))
    assert [row[0] for row in visit.cells("#published-table")] == [line["title"] for line in lines]
    _, out, _ = run("evidence", "--published")
    printed = [re.split(r"\s{2,}", line)[1:] for line in out.splitlines()[1 : len(lines) + 1]]
    assert [row[1:] for row in visit.cells("#published-table")] == printed
