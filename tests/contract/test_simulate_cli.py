"""``kernelcast simulate`` as a user runs it: vLLM's keys, a row a request, and errors in one line."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path

import pytest
from running import Run

from kernelcast.files import open_table

SMALL = ("llama-3.1-8b", "--gpu", "h100_sxm", "--request-rate", "8", "--num-prompts", "60", "--input-len", "512",
         "--output-len", "64")  # fmt: skip
KEYS = ("request_throughput", "output_throughput", "total_token_throughput", "completed", "duration")


def told(run: Run, *words: str, code: int = 0) -> dict[str, object]:
    ended, out, err = run("simulate", *words, "--json")
    assert ended == code, err
    return json.loads(out)


def test_keys_are_those_of_vllm_bench_serve(run: Run) -> None:
    found = told(run, *SMALL, "--goodput", "ttft:500", "--goodput", "tpot:30")
    for key in KEYS:
        assert found[key] > 0  # type: ignore[operator]
    for name in ("ttft", "tpot", "itl", "e2el"):
        for stat in ("mean", "median", "p90", "p99"):
            key = f"{stat}_{name}_ms"
            assert 0 < found[f"{key}_low"] <= found[key] <= found[f"{key}_high"], key  # type: ignore[operator]
    assert found["request_goodput"] <= found["request_throughput"]  # type: ignore[operator]
    assert found["completed"] == 60
    assert found["support"] in ("seen", "near", "extrapolated")
    assert found["evidence"]["calls"] > 0  # type: ignore[index]


def test_one_row_a_request_which_can_be_sent_again(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "requests.parquet"
    first = told(run, *SMALL, "--requests-out", str(out))
    with open_table(out) as table:
        assert table.count == 60
        columns = table.named("request_id", "arrival_s", "scheduled_s", "first_token_s", "last_token_s")
    assert (columns["arrival_s"] <= columns["scheduled_s"]).all()
    assert (columns["first_token_s"] < columns["last_token_s"]).all()
    again = told(run, *SMALL[:3], "--trace", str(out))
    assert again["mean_e2el_ms"] == pytest.approx(first["mean_e2el_ms"])


def test_the_same_seed_gives_the_same_answer_and_another_does_not(run: Run) -> None:
    first, second, other = (told(run, *SMALL, "--seed", seed, "--no-intervals") for seed in ("1", "1", "2"))
    assert first == second
    assert first["p99_ttft_ms"] != other["p99_ttft_ms"]


@pytest.mark.parametrize("stack", ["vllm", "sglang", "trtllm"])
def test_every_engine_is_shown_with_its_verdict(run: Run, stack: str) -> None:
    code, out, _ = run("simulate", *SMALL, "--stack", stack, "--no-intervals")
    assert code == 0
    assert "holds the load" in out
    assert "time to first token" in out


def test_engines_flags_have_their_names(run: Run) -> None:
    one = told(run, *SMALL, "--max-num-seqs", "4", "--no-intervals", code=3)  # it cannot hold the load
    for flag in ("--max-running-requests", "--max-batch-size"):
        assert told(run, *SMALL, flag, "4", "--no-intervals", code=3)["mean_ttft_ms"] == one["mean_ttft_ms"]
    assert one["settings"]["max_num_seqs"] == 4  # type: ignore[index]
    assert one["binding"] == "max_num_seqs"


def test_replicas_disaggregation_and_stages(run: Run) -> None:
    split = told(run, *SMALL, "--prefill-replicas", "1", "--replicas", "2", "--no-intervals")
    assert split["gpus"] == 3
    staged = told(
        run, *SMALL[:3], "--stages", "2x10,8x10", "--input-len", "256", "--output-len", "32", "--no-intervals"
    )
    assert len(staged["stages"]) == 2  # type: ignore[arg-type]
    assert staged["stages"][0]["completed"] < staged["stages"][1]["completed"]  # type: ignore[index]


def test_pictures_and_timelines_are_written(run: Run, tmp_path: Path) -> None:
    plot, line = tmp_path / "load.png", tmp_path / "load.json"
    code, _, _ = run(
        "simulate", *SMALL, "--plot", str(plot), "--timeline", str(line), "--window", "1:3", "--no-intervals"
    )
    assert code == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    events = json.loads(line.read_text())["traceEvents"]
    assert any(event["name"].startswith("decode") for event in events)


def test_a_load_that_is_too_much_is_an_answer(run: Run) -> None:
    found = told(run, "llama-3.1-70b", "--gpu", "h100_sxm", "--tp", "4", "--request-rate", "60", "--num-prompts", "300",
                 "--input-len", "3000", "--output-len", "100", "--no-intervals", code=3)  # fmt: skip
    assert found["saturated"] is True and found["meets"] is False
    assert str(found["verdict"]).startswith("cannot hold this load: at most ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("llama-3.1-8b", "--request-rate", "2"), "which GPU?"),
        (("llama-3.1-8b", "--gpu", "h100_sxm"), "which load?"),
        (("llama-3.1-8b", "--gpu", "h100_sxm", "--request-rate", "0"), "rate"),
        (("llama-3.1-8b", "--gpu", "h100_sxm", "--request-rate", "2", "--goodput", "ttft"), "--goodput takes NAME:MS"),
        (("llama-3.1-8b", "--gpu", "h100_sxm", "--request-rate", "2", "--window", "5"), "--window takes FROM:TO"),
        (("llama-3.1-8b", "--gpu", "h100_sxm", "--request-rate", "2", "--router", "dice"), "a router is one of"),
        (("llama-3.1-8b", "--gpu", "h100_sxm", "--request-rate", "2", "--stack", "torch"), "has no scheduler"),
        (("llama-3.1-8b", "--gpu", "h100_sxm", "--request-rate", "2", "--prefill-tp", "2"), "--prefill-replicas"),
        (("llama-3.1-8b", "--gpu", "h100_sxm", "--request-rate", "2", "--requests-out", "x.txt"), "ending"),
        (("llama-3.1-8b", "--gpu", "h100_sxm", "--request-rate", "2", "--server", "none.json"), "no file none.json"),
        (("bert-base", "--gpu", "h100_sxm", "--request-rate", "2", "--input-len", "100"), "encoder"),
        (("llama-2-7b", "--gpu", "h100_sxm", "--request-rate", "2", "--input-len", "5000"), "takes 4096"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(run: Run, words: tuple[str, ...], said: str) -> None:
    code, _, err = run("simulate", *words)
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("llama-3.1-70b",), "leaves no memory for a KV cache"),
        (("llama-3.1-8b", "--input-len", "9000", "--num-gpu-blocks-override", "100"), "exceeds the KV cache of 1,600"),
    ],
)
def test_what_does_not_fit_is_an_answer_of_its_own(run: Run, words: tuple[str, ...], said: str) -> None:
    code, out, err = run("simulate", *words, "--gpu", "h100_sxm", "--request-rate", "2")
    assert (code, out) == (3, "") and said in err and err.count("\n") == 1


def test_goals_decide_the_exit_code(run: Run) -> None:
    found = told(run, *SMALL, "--ttft-p99", "1s", "--tpot-mean", "50ms", "--no-intervals")
    assert found["meets"] is True and [goal["met"] for goal in found["goals"]] == [True, True]  # type: ignore[attr-defined]
    missed = told(run, *SMALL, "--ttft-p99", "1s", "--tpot-mean", "1ms", "--no-intervals", code=3)
    assert missed["meets"] is False and [goal["met"] for goal in missed["goals"]] == [True, False]  # type: ignore[attr-defined]
    code, out, _ = run("simulate", *SMALL, "--tpot-mean", "1ms", "--no-intervals")
    assert code == 3 and "goals not met: TPOT mean" in out and "of 1.000 ms (missed)" in out
    few = told(run, *SMALL, "--goodput", "ttft:1", "--no-intervals", code=3)
    assert few["goodput_share"] == 0.0


def test_the_verdict_is_of_capacity_and_throughput_has_its_interval(run: Run) -> None:
    found, (_, out, _) = told(run, *SMALL), run("simulate", *SMALL)
    most = found["capacity_requests_per_s"]
    assert found["capacity_share"] == pytest.approx(8 / most, rel=0.35)  # type: ignore[operator]
    idle = 1 - found["engine_busy"]  # type: ignore[operator]
    how = "never idle" if idle < 0.01 else f"idle {idle:.0%} of the time"
    assert f"holds the load; {how}, {found['capacity_share']:.0%} of capacity ({most:.1f} requests/s" in out
    low, high = found["request_throughput_low"], found["request_throughput_high"]
    assert f"({low:.2f} to {high:.2f}) requests/s" in out


def test_a_service_holds_loads_below_its_capacity_only(run: Run) -> None:
    words = (*SMALL[:3], "--input-len", "512", "--output-len", "64", "--num-prompts", "1500", "--no-intervals")
    most = told(run, *words, "--request-rate", "4")["capacity_requests_per_s"]
    assert told(run, *words, "--request-rate", str(0.75 * most))["saturated"] is False  # type: ignore[operator]
    beyond = told(run, *words, "--request-rate", str(1.3 * most), code=3)  # type: ignore[operator]
    assert beyond["saturated"] is True
    twice = told(run, *words, "--request-rate", "4", "--replicas", "2")["capacity_requests_per_s"]
    assert twice == pytest.approx(2 * most, rel=0.05)  # type: ignore[operator]


def test_too_few_requests_to_fill_an_engine_do_not_hold_a_rate_beyond_its_capacity(run: Run) -> None:
    # the queue of 300 requests at 1.3 times the rate that an L40S carries is short: it would grow with more of them
    words = ("llama-3.1-8b", "--gpu", "l40s", "--num-prompts", "300", "--no-intervals", "--request-rate", "12")
    found = told(run, *words, code=3)
    assert found["capacity_share"] > 1 and found["saturated"] is True and found["meets"] is False  # type: ignore[operator]
    assert f"at most {found['capacity_requests_per_s']:.2f} requests/s" in str(found["verdict"])


def test_a_bad_trace_is_named_by_line_or_skipped(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,100,10\n1,0,10\n2,100,-3\n3,90,10\n")
    code, _, err = run("simulate", *SMALL[:3], "--trace", str(trace))
    assert code == 2
    assert "3" in err
    kept = told(run, *SMALL[:3], "--trace", str(trace), "--skip-bad", "--no-intervals")
    assert kept["completed"] == 2
    assert math.isfinite(kept["mean_e2el_ms"])  # type: ignore[arg-type]


def test_a_burst_does_not_show_that_a_rate_lasts(run: Run) -> None:
    code, out, _ = run("simulate", *SMALL[:3], *shlex.split("--request-rate 1e9 --num-prompts 20 --no-intervals"))
    assert code == 0 and "holds the load" not in out
    assert "all 20 requests arrived before one was done" in out
