"""The Serve page beside ``kernelcast simulate`` and ``kernelcast plan``."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from browser.visits import REFUSED, Visit, columns, problem_text

Run = Callable[..., tuple[int, str, str]]
LOAD = "model=llama-3.1-8b&gpu=h100_sxm&request_rate=4&num_prompts=40&input_len=256&output_len=16"
COMMAND = (
    "kernelcast simulate llama-3.1-8b --gpu h100_sxm --request-rate 4 --num-prompts 40 --input-len 256 --output-len 16"
)
LABELS = ("time to first token", "time per output token", "between tokens", "end to end")


def same_as_printed(visit: Visit, run: Run, command: str) -> str:
    """Wait for the command's answer; hold all its percentiles beside what the command prints."""
    visit.shows_command(command)
    code, out, err = run(*shlex.split(command)[1:])
    assert code in (0, 3), err  # 3: goals are not met
    lines = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()]
    shown = visit.cells("#percentiles")
    assert [row[0].lower() for row in shown] == list(LABELS)
    for label, row in zip(LABELS, shown, strict=True):
        first = next(at for at, line in enumerate(lines) if line[0] == label)
        told = [lines[first][1:4], *(lines[first + more][:3] for more in (1, 2, 3))]
        assert [place for _, _, place in told] == ["mean", "p50", "p90", "p99"]
        assert row[1:] == [f"{time} {interval}" for time, interval, _ in told]
    expect(visit.figure("p99_ttft_ms")).to_have_text(shown[0][4].split(" ms ")[0] + " ms")
    assert f"throughput {(visit.figure('request_throughput').text_content() or '').split()[0]} (" in out
    expect(visit.find("#verdict")).to_contain_text(out.splitlines()[2])
    return out


def test_a_load_by_address_is_simulated_as_the_command_does(visit: Visit, run: Run) -> None:
    visit.open(f"/serve?{LOAD}")
    same_as_printed(visit, run, COMMAND)
    answer = json.loads(run(*shlex.split(COMMAND)[1:], "--json")[1])
    shown = visit.page.locator("#percentiles [data-figure]").evaluate_all(
        "all => Object.fromEntries(all.map((one) => [one.dataset.figure, Number(one.dataset.value)]))"
    )
    assert shown["mean_ttft_ms"] == answer["mean_ttft_ms"] and len(shown) == 16
    assert shown == {name: answer[name] for name in shown}
    expect(visit.find("#requests-over-time svg")).to_be_visible()
    expect(visit.find("#kv-over-time svg")).to_be_visible()
    expect(visit.find("#evidence .badge")).to_have_text(answer["support"])
    expect(visit.find("#aspects li")).to_have_text([" ".join(of) for of in answer["support_by"].items()])


def test_the_button_asks_and_the_address_follows(visit: Visit, run: Run) -> None:
    visit.open(f"/serve?{LOAD}")
    visit.shows_command(COMMAND)
    visit.pick("gpu", "h200_sxm")
    visit.find("#goodput").fill("ttft:500 tpot:5.7")
    visit.find("label[for=arrive-clients]").click()
    visit.find("#max_concurrency").fill("4")
    expect(visit.find(".results")).to_have_class(re.compile("stale"))  # the answer in sight is of another question
    visit.find("#ask").focus()
    visit.page.keyboard.press("Enter")
    command = (
        "kernelcast simulate llama-3.1-8b --gpu h200_sxm --num-prompts 40 --input-len 256 --output-len 16"
        " --max-concurrency 4 --goodput ttft:500 --goodput tpot:5.7"
    )
    shown = visit.page.locator("#command", has_text="--max-concurrency 4")
    expect(shown).to_be_visible()
    assert sorted(shlex.split(shown.text_content() or "")) == sorted(shlex.split(command))
    out = same_as_printed(visit, run, shown.text_content() or "")
    done, kept = re.findall(r"throughput ([\d.,]+) .*requests/s, ([\d.,]+) within goals", out)[0]
    assert kept != done  # some requests miss the second goal
    expect(visit.figure("request_goodput")).to_have_text(f"{kept} requests/s")
    visit.query_has("max_concurrency=4", "goodput=ttft%3A500", "goodput=tpot%3A5.7", "gpu=h200_sxm")
    visit.page.reload()
    expect(visit.find("#max_concurrency")).to_have_value("4")
    expect(visit.find("#goodput")).to_have_value("ttft:500 tpot:5.7")
    visit.shows_command(shown.text_content() or "")


def test_a_long_question_can_be_stopped(visit: Visit) -> None:
    visit.open(f"/serve?{LOAD}")
    if not visit.find("#num_prompts").is_visible():
        visit.page.get_by_text("More of the load").click()
    visit.find("#num_prompts").fill("100000")
    visit.find("#ask").click()
    expect(visit.find("#waiting")).to_be_visible()
    visit.find("#stop").click()
    expect(visit.find("#waiting")).to_be_hidden()
    expect(visit.find("#ask")).to_have_text("Simulate")
    visit.find("#num_prompts").fill("40")  # and the answer from before is in sight again
    expect(visit.find(".results")).not_to_have_class(re.compile("stale"))
    visit.shows_command(COMMAND)


def test_a_model_that_does_not_fit_is_told(visit: Visit, run: Run) -> None:
    visit.allow(REFUSED)
    visit.open("/serve?model=llama-3.1-70b&gpu=l40s&request_rate=1&num_prompts=10&input_len=64&output_len=8")
    _, _, err = run(*shlex.split("simulate llama-3.1-70b --gpu l40s --request-rate 1 --num-prompts 10 --input-len 64"
                                 " --output-len 8"))  # fmt: skip
    expect(visit.find("#problem")).to_have_text(problem_text(err))
    visit.find("#tp").fill("4")
    visit.find("#ask").click()
    expect(visit.find("#percentiles")).to_be_visible()


@pytest.mark.slow
def test_a_plan_is_the_command_s(visit: Visit, run: Run) -> None:
    words = "model=llama-3.1-8b&gpus=l40s&max_gpus=1&request_rate=2&num_prompts=40&input_len=256&output_len=16"
    visit.open(f"/serve?section=plan&{words}&ttft_p99=1s&tpot_p99=60ms&dtype=fp8&tp=1&pp=1&disaggregated=no")
    shown = visit.page.locator("#command", has_text="kernelcast plan")
    expect(shown).to_be_visible(timeout=120_000)
    code, out, err = run(*shlex.split(shown.text_content() or "")[1:])
    assert code == 0, err
    _, gpus, cost, tokens = columns(out, "cheapest", 4)
    expect(visit.figure("usd_per_hour")).to_have_text(cost)
    expect(visit.figure("usd_per_million_output_tokens")).to_have_text(tokens.split(" per ")[0])
    assert gpus == "1 x NVIDIA L40S"
    assert (visit.figure("choice_gpu").text_content() or "").replace("\xa0", " ") == "1 x l40s"
    goals = {row[0]: row[1:] for row in visit.cells("#goals-table")}
    assert goals == {name: columns(out, name, 4)[1:] for name in ("TTFT p99", "TPOT p99")}
    visit.find("#copy-launch").click()
    expect(visit.find("#copy-launch")).to_have_text("Copied")
    assert visit.clipboard().splitlines()[-1] in out
