"""``kernelcast plan``: what it tells, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import Run, instead, strict

SMALL = ("plan", "llama-3.1-8b", "--request-rate", "6", "--num-prompts", "150", "--input-len", "512", "--output-len",
         "32", "--gpus", "l40s,h100_sxm", "--max-gpus", "2", "--tp", "1", "--pp", "1", "--dtype", "bf16",
         "--max-num-seqs", "256", "--max-num-batched-tokens", "8192")  # fmt: skip
GOALS = ("--ttft-p99", "500ms", "--tpot-p99", "0.04s")


def test_the_answer_comes_first(run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    code, out, err = run(*SMALL, *GOALS, "--plot", picture)
    assert (code, err) == (0, "") and picture.stat().st_size > 10_000
    lines = out.splitlines()
    assert "TTFT p99 500.0 ms, TPOT p99 40.00 ms" in lines[1] and lines[3].startswith("cheapest")
    for told in ("USD/h", "more load  holds up to", "cost against latency", "vllm serve meta-llama/Llama-3.1-8B",
                 "searched   ", "price      l40s 0.79 USD a GPU-hour, 2026-03-10"):  # fmt: skip
        assert told in out, told
    assert max(len(line) for line in lines if not line.startswith("  vllm")) <= 100


def test_as_data(run: Run) -> None:
    code, out, _ = run(*SMALL, *GOALS, "--stack", "vllm,sglang", "--json")
    found = strict(out)
    choice = found["choice"]
    assert code == 0 and found["complete"] and choice["meets"] and choice["gpu"] == "l40s"
    assert choice["usd_per_hour"] == pytest.approx(choice["gpus"] * choice["price"]["usd_per_hour"])
    assert choice["metrics"]["p99_ttft_ms_low"] <= choice["metrics"]["p99_ttft_ms"] <= 500
    assert choice["price"]["date"] and choice["price"]["source"]
    assert found["growth"]["holds"] >= 5 and found["growth"]["binds"] in ("compute", "KV cache", "max_num_seqs")
    assert found["searched"]["settings"] == sum(found["searched"]["fell_out"].values()) >= 8
    assert found["front"] and found["commands"] and found["evidence"]["calls"] > 1000


def test_a_price_changes_the_choice(run: Run) -> None:
    found = strict(run(*SMALL, *GOALS, "--price", "h100_sxm=0.1", "--json")[1])
    assert found["choice"]["gpu"] == "h100_sxm" and found["choice"]["price"]["source"] == "given with --price"


def test_gpus_without_a_price_are_told(run: Run) -> None:
    code, out, _ = run(*instead(SMALL, *GOALS, "--gpus", "l40s,mi355x"))
    assert code == 0 and "no price   mi355x: left out (--price mi355x=USD adds one)" in out


def test_a_load_that_nothing_carries_is_an_answer(run: Run) -> None:
    code, out, err = run(*instead(SMALL, *GOALS, "--request-rate", "3000"))
    words = " ".join(out.split())
    assert (code, err) == (0, "") and "no setting within 2 GPUs holds this: at most" in words and "binds" in words
    found = strict(run(*instead(SMALL, *GOALS, "--request-rate", "3000", "--json"))[1])
    assert found["choice"] is None and found["most"]["request_rate"] > 1 and found["commands"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "which goal? give a latency to keep"),
        (("--ttft-p99", "quick"), "--ttft-p99 takes a time above 0, as in 500ms, 0.5s or 500 (milliseconds)"),
        ((*GOALS, "--gpus", "h300"), "unknown gpu 'h300'"),
        ((*GOALS, "--gpus", "mi355x"), "no price of mi355x: give --price mi355x=USD per GPU-hour"),
        ((*GOALS, "--stack", "vlm"), "unknown stack 'vlm' (did you mean vllm"),
        ((*GOALS, "--stack", "torch"), "PyTorch has no scheduler"),
        ((*GOALS, "--dtype", "fp9"), "unknown number format of weights 'fp9'"),
        ((*GOALS, "--tp", "two"), "--tp takes whole numbers from 1 with commas, not 'two'"),
        ((*GOALS, "--max-gpus", "0"), "--max-gpus is 1 or more, not 0"),
        ((*GOALS, "--price", "h100_sxm"), "--price takes GPU=USD per hour, as in h100_sxm=2.5"),
        ((*GOALS, "--prices", "/nowhere.toml"), "no file /nowhere.toml"),
        ((*GOALS, "--disaggregated", "maybe"), "unknown --disaggregated 'maybe'"),
        ((*GOALS, "--input-len", "200000"), "the model takes 131072"),
    ],
)
def test_refusals_are_one_line(run: Run, arguments: tuple[str, ...], said: str) -> None:
    code, out, err = run(*instead(SMALL, *arguments))
    assert code == 2 and out == "" and said in err and err.count("\n") == 1


def test_a_load_is_needed(run: Run) -> None:
    code, _, err = run("plan", "llama-3.1-8b", *GOALS)
    assert code == 2 and "which load?" in err
