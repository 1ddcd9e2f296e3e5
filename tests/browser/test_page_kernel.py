"""The Kernel page beside ``kernelcast kernel``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from browser.visits import REFUSED, Visit, columns

Run = Callable[..., tuple[int, str, str]]
GEMM = "kernelcast kernel gemm --m 4096 --n 4096 --k 4096 --gpu h200_sxm"


def same_as_printed(visit: Visit, run: Run, command: str) -> None:
    """Wait for the command's answer; hold its headline and its limits beside what the command prints."""
    visit.shows_command(command)
    code, out, err = run(*shlex.split(command)[1:])
    assert code == 0, err
    _, predicted, interval = columns(out, "predicted ", 3)
    expect(visit.figure("time_s")).to_have_text(predicted)
    low, high = interval.removeprefix("interval ").split(" – ")
    expect(visit.find(".interval-text").first).to_have_text(f"{low} to {high}")
    expect(visit.figure("ceiling_s")).to_have_text(columns(out, "ceiling ")[1])
    expect(visit.figure("efficiency")).to_have_text(columns(out, "efficiency ")[1])
    _, bound, why = columns(out, "bound ", 3)
    expect(visit.figure("bound_s")).to_have_text(bound)
    expect(visit.find('.figure:has([data-figure="bound_s"])')).to_contain_text(why)
    limits = visit.cells("#limits table")
    assert limits
    for pipeline, *numbers in limits:
        assert columns(out, f"{pipeline} ", 4) == [pipeline, *numbers]


@pytest.mark.parametrize(
    ("query", "command"),
    [
        (
            "op=gemm&gpu=b200_sxm&m=64&n=8192&k=4096&dtype=fp8",
            "kernel gemm --m 64 --n 8192 --k 4096 --dtype fp8 --gpu b200_sxm",
        ),
        (
            "op=attention&gpu=h100_sxm&batch=4&q_len=1&kv_len=4096&q_heads=32&kv_heads=8&head_dim=128",
            "kernel attention --batch 4 --q-len 1 --kv-len 4096 --q-heads 32 --kv-heads 8 --head-dim 128"
            " --gpu h100_sxm",
        ),
        ("op=rmsnorm&gpu=l40s&rows=2048&cols=4096", "kernel rmsnorm --rows 2048 --cols 4096 --gpu l40s"),
        ("op=gemm&gpu=rtx_4090&m=64&n=8192&k=4096", "kernel gemm --m 64 --n 8192 --k 4096 --gpu rtx_4090"),
    ],
)
def test_a_call_by_address_is_answered_as_the_command_answers_it(
    visit: Visit, run: Run, query: str, command: str
) -> None:
    visit.open(f"/kernel?{query}")
    same_as_printed(visit, run, f"kernelcast {command}")


@pytest.mark.parametrize(("gpu", "peak"), [("rtx_4090", "203.5"), ("l40s", "366.4")])
def test_the_roof_is_what_the_bound_is_at(visit: Visit, gpu: str, peak: str) -> None:
    """165.2 TFLOP/s at 2.52 GHz, and the card reaches 3.105; an L40S has no clock of its own for matrix products."""
    visit.open(f"/kernel?op=gemm&gpu={gpu}&m=4096&n=4096&k=4096&dtype=bf16")
    expect(visit.find("#roofline")).to_contain_text(f"tensor bf16 {peak}")


def test_controls_move_the_answer_and_the_address(visit: Visit, run: Run) -> None:
    visit.open("/kernel")
    same_as_printed(visit, run, GEMM)
    answer = json.loads(run(*shlex.split(GEMM)[1:], "--json")[1])
    for name in ("time_s", "ceiling_s", "bound_s", "efficiency"):
        assert visit.value(name) == answer[name], name

    visit.find("#m").fill("100")
    visit.find("#dtype").select_option("fp8")
    visit.query_has("m=100", "dtype=fp8")
    same_as_printed(visit, run, "kernelcast kernel gemm --m 100 --n 4096 --k 4096 --dtype fp8 --gpu h200_sxm")
    visit.page.reload()
    expect(visit.find("#m")).to_have_value("100")
    expect(visit.find("#dtype")).to_have_value("fp8")
    expect(visit.figure("time_s")).to_be_visible()

    visit.pick("op", "softmax")  # the parameters of the op become the controls
    expect(visit.find("#m")).to_have_count(0)
    expect(visit.find("#rows")).to_be_visible()
    command = visit.page.locator("#command", has_text="kernelcast kernel softmax --rows")
    expect(command).to_be_visible()
    same_as_printed(visit, run, command.text_content() or "")
    visit.query_has("op=softmax")  # the address settles a little after the answer
    visit.page.go_back()
    expect(visit.find("#m")).to_have_value("100")


def test_what_would_bind_next_is_the_command_without_it(visit: Visit, run: Run) -> None:
    visit.open("/kernel?op=gemm&gpu=h200_sxm&m=4096&n=4096&k=4096")
    answer = json.loads(run(*shlex.split(GEMM)[1:], "--without", "tensor", "--json")[1])
    expect(visit.figure("next_bound_by")).to_have_text(answer["bound_by"])
    assert visit.value("next_time_s") == answer["time_s"]
    assert visit.value("next_bound_s") == answer["bound_s"]


def test_a_what_if_by_keyboard_is_the_command_with_set(visit: Visit, run: Run) -> None:
    visit.open("/kernel?op=gemm&gpu=h200_sxm&m=1&n=8192&k=8192")
    before = visit.figure("time_s").text_content() or ""
    visit.find("#set-add").focus()
    visit.page.keyboard.press("Enter")  # DRAM bandwidth times 1.5 is the first that is offered
    visit.find("input[aria-label='Change 1: number']").fill("2")
    visit.query_has("set=dram_bytes_per_s*2")
    same_as_printed(
        visit, run, "kernelcast kernel gemm --m 1 --n 8192 --k 8192 --set 'dram_bytes_per_s*2' --gpu h200_sxm"
    )
    expect(visit.figure("time_s")).not_to_have_text(before)
    expect(visit.find("#answer")).to_contain_text("Not a product that exists")


def test_a_wrong_size_is_told_and_the_page_goes_on(visit: Visit, run: Run) -> None:
    visit.allow(REFUSED)
    visit.open("/kernel?op=gemm&gpu=h200_sxm&m=64&n=64&k=64")
    visit.find("#m").fill("0")
    expect(visit.find("#problem")).to_contain_text("m")
    assert visit.find("#problem").text_content()
    visit.find("#m").fill("128")
    same_as_printed(visit, run, "kernelcast kernel gemm --m 128 --n 64 --k 64 --gpu h200_sxm")
    expect(visit.find("#problem")).to_have_count(0)
