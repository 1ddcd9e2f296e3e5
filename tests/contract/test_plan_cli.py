"""``kernelcast plan``: what it tells, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import Run, instead, strict

from kernelcast.app.report.plan import reason
from kernelcast.search.plan.search import MET

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


def test_lines_of_a_narrow_terminal_end_at_their_words(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long GPU name puts USD per million tokens on a line of its own; no blank line ends the answer."""
    monkeypatch.setenv("COLUMNS", "60")
    out = run(*instead(SMALL, *GOALS, "--gpus", "l40s"))[1]
    lines = out.splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith("cheapest "))
    assert lines[at].endswith(" USD/h") and lines[at + 1].endswith(" USD per million tokens out")
    assert lines[at + 1].startswith(11 * " ") and lines[-1]


def test_reasons_agree_with_their_number() -> None:
    assert reason("does not fit in memory", 1) == "does not fit in memory"
    assert reason("does not fit in memory", 2) == "do not fit in memory"
    assert reason(MET, 3) == "meet the goals, but are no cheaper than the choice"


def test_gpus_without_a_price_are_told(run: Run) -> None:
    code, out, _ = run(*instead(SMALL, *GOALS, "--gpus", "l40s,mi355x"))
    assert code == 0 and "no price   mi355x: left out (--price mi355x=USD adds one)" in out


def test_a_load_that_nothing_carries_is_an_answer(run: Run) -> None:
    code, out, err = run(*instead(SMALL, *GOALS, "--request-rate", "3000"))
    words = " ".join(out.split())
    assert (code, err) == (3, "") and "no setting within 2 GPUs holds this: at most" in words and "binds" in words
    found = strict(run(*instead(SMALL, *GOALS, "--request-rate", "3000", "--json"))[1])
    assert found["choice"] is None and found["most"]["request_rate"] > 1 and found["commands"] == []


def test_a_budget_limits_the_cost(run: Run) -> None:
    found = strict(run(*SMALL, *GOALS, "--json")[1])
    cost = found["choice"]["usd_per_hour"]
    enough = strict(run(*SMALL, *GOALS, "--budget", str(cost), "--json")[1])
    assert enough["choice"]["usd_per_hour"] == cost and enough["searched"]["budget_usd_per_hour"] == cost
    code, out, _ = run(*SMALL, *GOALS, "--budget", str(cost - 0.01))
    words = " ".join(out.split())
    assert code == 3 and f"no setting within 2 GPUs and {cost - 0.01:.2f} USD/h holds" in words
    short = strict(run(*SMALL, *GOALS, "--budget", str(cost - 0.01), "--json")[1])
    assert short["searched"]["fell_out"]["dearer than the budget"] > 0
    assert short["searched"]["settings"] == sum(short["searched"]["fell_out"].values())
    assert short["most"]["setting"] is None or short["most"]["setting"]["usd_per_hour"] < cost


def test_goals_at_every_percentile_and_by_the_usual_name(run: Run) -> None:
    for flag in ("--ttft-p95", "--ttft-p50", "--tpot-mean", "--e2e-p95", "--e2el-p90"):
        found = strict(run(*SMALL, flag, "3s", "--json")[1])
        assert found["choice"]["meets"] and len(found["goals"]) == 1
        metric, statistic = flag.strip("-").replace("e2e-", "e2el-").split("-")
        assert found["goals"][0] == {"key": f"{statistic}_{metric}_ms", "limit_ms": 3000}


@pytest.mark.parametrize("columns", [80, 100])
def test_nothing_is_cut_off_and_tpot_is_shown(run: Run, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = run(*SMALL, "--ttft-p99", "500ms", "--stack", "vllm,sglang")
    shown = out.partition("start it")[0]
    assert "TPOT mean" in shown and "…" not in shown
    assert max(map(len, shown.splitlines())) <= columns


def test_what_was_not_measured_is_not_chosen_silently(run: Run) -> None:
    words = (*instead((*SMALL, *GOALS), "--gpus", "l40,h200_sxm"), "--price", "l40=0.5", "--price", "h200_sxm=4")
    found = strict(run(*words, "--json")[1])
    assert found["choice"]["gpu"] == "l40" and found["choice"]["support"] != "seen"
    assert found["measured"]["gpu"] == "h200_sxm" and found["measured"]["support"] == "seen"
    assert found["measured"]["meets"] and found["measured"]["usd_per_hour"] > found["choice"]["usd_per_hour"]
    out = " ".join(run(*words)[1].split())
    assert "support extrapolated, by " in out and "measured 1 x h200_sxm, 4.00 USD/h" in out
    assert "nothing measured on L40; borrowed from" in out
    alone = " ".join(run(*instead(words, "--gpus", "l40"))[1].split())
    assert "measured no setting that was measured end to end on its GPU" in alone


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
        ((*GOALS, "--budget", "0"), "--budget is USD per hour, above 0, not 0"),
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
