"""Curves, what fits, ways from page to page, baselines, sorted tables, files to keep, and what is drawn of too much."""

from __future__ import annotations

import json
import re
import shlex
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from browser.visits import REFUSED, Visit

Run = Callable[..., tuple[int, str, str]]


def answered(run: Run, command: str) -> dict[str, float]:
    code, out, err = run(*shlex.split(command)[1:], "--json")
    assert code == 0, err
    found: dict[str, float] = json.loads(out)
    return found


def test_curves_over_batch_are_what_the_commands_answer(visit: Visit, run: Run) -> None:
    visit.open("/model?model=llama-3.1-8b&gpu=h200_sxm&batch=8&input_len=512&output_len=64")
    visit.find("#sweep-batch").click()
    points = visit.find("#curves .point")
    expect(points.first).to_be_visible()
    visit.query_has("sweep=batch")
    expect(visit.find("#curves .legend li").first).to_have_text("TP 1")
    expect(visit.find("#curves .point-label")).to_have_text("batch 8")  # where the answer above is
    point = visit.page.locator('#curves .point[data-name="TP 2, batch 32"]')
    point.hover()
    expect(visit.find("#curves .curve-shown")).to_contain_text("TP 2, batch 32")
    visit.find("#copy-curves-command").click()
    expect(visit.find("#copy-curves-command")).to_have_text("Copied")
    loop = next(line for line in visit.clipboard().splitlines() if "--tp 2" in line)
    command = re.sub(r"^for n in .*?; do (.*) --batch \$n; done$", r"\1 --batch 32", loop)
    answer = answered(run, command)
    assert answer["layout"]["tp"] == 2  # type: ignore[index]
    rates = [f"{1 / answer['tpot_s']:.3g}", f"{answer['tokens_per_s_per_gpu']:.4g}"[:3]]
    text = (point.get_attribute("aria-label") or "").replace(",", "")
    assert all(rate.split(".")[0] in text for rate in rates), (text, rates)
    visit.find("#sweep-input_len").click()
    expect(visit.find("#curves .point-label")).to_have_text("prompt length 512")


def test_what_fits_and_what_would(visit: Visit, run: Run) -> None:
    visit.allow(REFUSED)
    visit.open("/model?model=llama-3.1-8b&gpu=l40s&input_len=2048&output_len=256&batch=4")
    most = int(visit.value("largest_batch"))
    longest = int(visit.value("largest_input_len"))
    base = "infer llama-3.1-8b --gpu l40s --output-len 256"
    for batch, length, fits in (
        (most, 2048, True),
        (most + 1, 2048, False),
        (4, longest, True),
        (4, longest + 1, False),
    ):
        code, _, _ = run(*shlex.split(f"{base} --batch {batch} --input-len {length}"))
        assert (code == 0) is fits, (batch, length)
    visit.open("/model?model=llama-3.1-70b&gpu=h200_sxm")
    expect(visit.find("#problem")).to_be_visible()
    visit.find("#use-tp").click()
    visit.shows_command("kernelcast infer llama-3.1-70b --gpu h200_sxm --tp 2")


def test_a_part_opens_its_kernel_and_a_kernel_its_evidence(visit: Visit) -> None:
    visit.open("/model?model=llama-3.1-8b&gpu=h200_sxm&batch=8")
    row = visit.page.locator("#breakdown-table tr", has=visit.page.get_by_text("mlp", exact=True))
    row.get_by_role("link").last.click()
    command = visit.page.locator("#command", has_text="kernelcast kernel gemm")
    expect(command).to_contain_text("--m 8")  # of decode: a token of each request
    expect(command).to_contain_text("--gpu h200_sxm")
    assert visit.value("time_s") > 0
    visit.find("#evidence a").click()
    expect(visit.page).to_have_url(re.compile(r"/evidence\?cell=gemm\+h200_sxm"))
    expect(visit.find("#kinds")).to_be_visible()


def test_a_row_of_a_comparison_opens_its_batch(visit: Visit) -> None:
    visit.open("/compare?model=llama-3.1-70b&gpus=h200_sxm&batch=8")
    expect(visit.find("#compare-table tbody tr th + td").first).to_have_text("H200")
    tpot = float(visit.page.locator("#compare-table tbody tr").first.get_attribute("data-tpot") or "nan")
    visit.page.locator("#compare-table").get_by_role("link", name="Model of").first.click()
    expect(visit.page.locator("#command", has_text="kernelcast infer llama-3.1-70b --gpu h200_sxm")).to_be_visible()
    assert visit.value("tpot_s") == pytest.approx(tpot, rel=0.02)
    visit.page.go_back()
    visit.page.locator("#compare-table").get_by_role("link", name="Serve of").first.click()
    expect(visit.find("#request_rate")).to_be_visible()
    assert float(visit.find("#request_rate").input_value()) > 0


def test_curves_of_a_comparison(visit: Visit) -> None:
    visit.open("/compare?model=llama-3.1-8b&gpus=h200_sxm&gpus=l40s&batch=8&sweep=batch")
    expect(visit.find("#curves .legend li")).to_have_text([re.compile("H200|L40S")] * 2)


def test_a_baseline_is_what_later_answers_are_held_against(visit: Visit) -> None:
    visit.open("/model?model=llama-3.1-8b&gpu=h200_sxm&batch=8")
    before = visit.value("tpot_s")
    visit.find("#pin").click()
    expect(visit.find("#baseline")).to_contain_text("kernelcast infer llama-3.1-8b --gpu h200_sxm --batch 8")
    visit.pick("gpu", "h100_sxm")
    visit.shows_command("kernelcast infer llama-3.1-8b --gpu h100_sxm --batch 8")
    delta = visit.find('[data-delta="tpot_s"]')
    expect(delta).to_contain_text("of the baseline")
    assert float(delta.get_attribute("data-value") or "nan") == pytest.approx(visit.value("tpot_s") / before - 1)
    visit.find("#unpin").click()
    expect(visit.find(".delta")).to_have_count(0)


def test_a_table_is_sorted_by_its_columns(visit: Visit) -> None:
    visit.open("/model?model=mixtral-8x7b&gpu=h200_sxm&tp=2&batch=8")
    head = visit.page.locator("#breakdown-table thead th", has_text="decode")
    head.get_by_role("button").click()
    expect(head).to_have_attribute("aria-sort", "ascending")
    scale = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}

    def seconds() -> list[float]:
        texts = [row[4] for row in visit.cells("#breakdown-table") if row[4]]
        return [float(text.split()[0].replace(",", "")) * scale[text.split()[1]] for text in texts]

    assert len(seconds()) > 5 and seconds() == sorted(seconds())
    head.get_by_role("button").click()
    expect(head).to_have_attribute("aria-sort", "descending")
    assert seconds() == sorted(seconds(), reverse=True)


def test_answers_tables_and_charts_as_files(visit: Visit, tmp_path: Path) -> None:
    visit.open("/model?model=llama-3.1-8b&gpu=h200_sxm&batch=8")
    visit.find(".downloads summary").click()
    kept = {}
    for name in ("JSON", "CSV: Time", "PNG: Time"):
        with visit.page.expect_download() as waited:
            visit.find(".downloads").get_by_role("button", name=re.compile(f"^{name}")).click()
        kept[name[:4].strip(":")] = Path(waited.value.path()).read_bytes()
    assert json.loads(kept["JSON"])["ttft_s"] == visit.value("ttft_s")
    lines = kept["CSV"].decode().splitlines()
    assert lines[0].startswith("part,prefill,share") and len(lines) == 1 + len(visit.cells("#breakdown-table"))
    assert kept["PNG"][:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", kept["PNG"][16:24])
    box = visit.find("#breakdown svg.chart").bounding_box()
    assert box and (width, height) == pytest.approx((2 * box["width"], 2 * box["height"]), abs=4)


def test_a_sample_trace_and_idle_time_first(visit: Visit, profile: Path) -> None:
    visit.open("/diagnose")
    visit.find("#sample").click()
    expect(visit.find("#ranking")).to_be_visible()
    expect(visit.find(".figure-label").first).to_have_text("GPU idle")
    shown = visit.find("#command").text_content() or ""
    assert shown.startswith("kernelcast diagnose sample_trace.json.gz")
    visit.page.locator("#ranking").get_by_role("link").first.click()
    expect(visit.page.locator("#command", has_text="kernelcast kernel")).to_be_visible()


def test_a_gpu_of_a_hundred_thousand_sms_does_not_hold_the_page(visit: Visit) -> None:
    visit.open("/kernel?op=gemm&gpu=h200_sxm&m=4096&n=4096&k=4096&set=sm_count*900")
    expect(visit.find("#waves")).to_contain_text("The first 1,024 SMs are drawn.")
    drawn = visit.page.evaluate("document.querySelectorAll('#waves rect').length")
    assert drawn <= 1100
    expect(visit.find(".note-warn")).to_contain_text("SMs 118,800, +89900%")


def test_a_table_of_thousands_of_rows_is_drawn_in_part(visit: Visit, tmp_path: Path) -> None:
    rows = [{"op": "rmsnorm", "rows": 64 + at, "cols": 4096, "dtype": "bf16", "measured_us": 40} for at in range(2500)]
    (tmp_path / "calls.jsonl").write_text("\n".join(map(json.dumps, rows)))
    visit.open("/diagnose?gpu=h200_sxm")
    visit.find("#file").set_input_files(tmp_path / "calls.jsonl")
    expect(visit.find("#order .beyond")).to_have_text("The first 1,000 of 2,500 rows; the JSON has all.")
    assert visit.page.locator("#ranking tbody tr").count() == 1000


def test_a_what_if_is_readable(visit: Visit) -> None:
    visit.open("/model?model=llama-3.1-8b&gpu=h200_sxm&set=dram_bytes_per_s*1.5")
    expect(visit.find("#what-if")).to_have_text("What if: DRAM bandwidth 7.2 TB/s, +50%. Not a product that exists.")


def test_no_flags_in_the_text_of_the_page(visit: Visit) -> None:
    for page in ("/model", "/kernel", "/compare?gpus=h200_sxm&batch=2", "/serve?section=plan", "/diagnose"):
        visit.page.goto(visit.url + page)
        expect(visit.find("form.controls")).to_be_visible()
        if "plan" not in page:  # which takes long
            visit.settled()
        script = """() => [...document.querySelectorAll('main *')]
            .filter((node) => !node.closest('.share, pre, code, #start'))
            .flatMap((node) => [...node.childNodes].filter((child) => child.nodeType === 3)
                .map((child) => child.textContent).concat(node.title ?? ''))
            .filter((text) => /(^|\\s)--[a-z]/.test(text))"""
        assert visit.page.evaluate(script) == [], page


def test_a_wrong_address_says_so(visit: Visit) -> None:
    visit.allow(r"status (of )?404")
    visit.page.goto(f"{visit.url}/no/such/page")
    expect(visit.page.get_by_role("heading", level=1)).to_have_text("No such page")


@pytest.mark.parametrize("width", [320, 390, 820, 1024, 1440, 2560])
def test_no_page_scrolls_sideways(visit: Visit, width: int) -> None:
    visit.page.set_viewport_size({"width": width, "height": 900})
    for page in ("/model?model=mixtral-8x7b&gpu=h200_sxm&tp=2&batch=8&sweep=batch", "/kernel",
                 "/compare?model=llama-3.1-8b&gpus=h100_sxm&gpus=h200_sxm&batch=8&sweep=batch",
                 "/serve?model=llama-3.1-8b&gpu=h100_sxm&num_prompts=20&output_len=16", "/diagnose",
                 "/evidence"):  # fmt: skip
        visit.open(page)
        over = visit.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert over <= 0, (page, width, over)


def test_a_chart_reads_out_what_is_under_the_pointer(visit: Visit) -> None:
    visit.open("/serve?model=llama-3.1-8b&gpu=h100_sxm&request_rate=8&num_prompts=40&input_len=256&output_len=32")
    chart = visit.page.locator("svg.chart:has(.catcher)").first
    chart.locator(".catcher").hover()
    expect(chart.locator(".readout text")).to_have_text(re.compile(r"^[\d.]+ seconds: .*\d"))
    box = chart.locator(".catcher").bounding_box()
    assert box
    visit.page.mouse.move(box["x"] + box["width"] + 40, box["y"] - 40)
    expect(chart.locator(".readout")).to_be_hidden()


def test_terms_say_what_they_mean(visit: Visit) -> None:
    visit.open("/model?model=llama-3.1-8b&gpu=h200_sxm")
    expect(visit.page.locator("abbr", has_text="MFU").first).to_have_attribute("title", re.compile("FLOPs utilization"))
    expect(visit.page.locator(".field:has(#tp)")).to_have_attribute("title", re.compile("tensor parallel"))
    expect(visit.find("#evidence .badge")).to_have_attribute("title", re.compile("measured"))
    expect(visit.find("#breakdown-table .level").first).to_have_attribute("title", re.compile("measured"))


def test_a_part_keeps_its_colour(visit: Visit) -> None:
    colours = []
    for model in ("llama-3.1-8b", "mixtral-8x7b&tp=2", "llama-3.1-70b&tp=4"):
        visit.open(f"/model?gpu=h200_sxm&model={model}")
        script = "row => row.querySelector('.swatch').className"
        row = visit.page.locator("#breakdown-table tr", has=visit.page.get_by_text("attention", exact=True))
        colours.append(row.evaluate(script))
    assert len(set(colours)) == 1
