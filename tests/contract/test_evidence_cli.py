"""``kernelcast evidence`` and what other commands tell of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from running import Run

from kernelcast.forecast.end_to_end import FILE, TITLES, EndToEnd

ATTENTION = ("kernel", "attention", "--batch", "8", "--q-len", "1", "--kv-len", "2048", "--q-heads", "32", "--kv-heads",
             "8", "--head-dim", "128", "--gpu", "h200_sxm")  # fmt: skip


def told(run: Run, *arguments: str) -> str:
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    return out


def test_a_summary_by_op_without_arguments(run: Run) -> None:
    out = told(run, "evidence")
    assert "configurations" in out and "attention" in out and "gemm" in out and max(map(len, out.splitlines())) <= 100


def test_kinds_that_were_asked_for(run: Run) -> None:
    out = told(run, "evidence", "--op", "attention", "--gpu", "NVIDIA B200", "--stack", "vllm")
    assert "vllm trtllm bf16 decode causal paged" in out and "h200" not in out


def test_as_data(run: Run) -> None:
    found = json.loads(told(run, "evidence", "--op", "gemm", "--where", "dtype=fp8", "--json"))
    assert found["kinds"] == len(found["evidence"]) > 10
    assert found["calls"] == sum(line["calls"] for line in found["evidence"])
    line = found["evidence"][0]
    assert {line["op"], line["words"]["dtype"]} == {"gemm", "fp8"} and line["ranges"]["m"][0] >= 1
    summed = json.loads(told(run, "evidence", "--by", "stack", "--op", "gemm", "--json"))
    assert {line["stack"] for line in summed["evidence"]} >= {"vllm", "sglang", "trtllm", "torch"}


def test_one_kind_in_full(run: Run) -> None:
    out = told(run, "evidence", "--op", "gemm", "--gpu", "a40")
    assert "gemm a40 torch fp16: m 1 to" in out


def test_which_kernel_runs(run: Run) -> None:
    out = told(run, "evidence", "--runs", "--gpu", "rtx_5090", "--stack", "vllm")
    assert "NVIDIA GeForce RTX 5090 (rtx_5090): mma.sync, compute capability 12.0" in out and "b200" not in out
    assert re.search(r"vllm +attention +any +fa2 +fa2 +inherited", out) and max(map(len, out.splitlines())) <= 100
    assert "…" not in out.partition("[1]")[0].replace("masked_attention_ba…", "")
    whole = json.loads(told(run, "evidence", "--runs", "--stack", "sglang", "--op", "moe", "--json"))["runs"]
    assert {line["stack"] for line in whole} == {"sglang"} and all(line["sources"] for line in whole)
    on = json.loads(told(run, "evidence", "--runs", "--stack", "sglang", "--op", "moe", "--gpu", "b200_sxm", "--json"))
    any_format = next(line for line in on["runs"] if line["dtype"] == "*")
    assert any_format["backend"] == "triton" and list(any_format["measured"])[:2] == ["trtllm", "triton"]


@pytest.fixture
def scored(tmp_path: Path) -> str:
    """A folder with errors of whole answers, made up."""
    line = {"source": "served", "of": "mean_ttft_ms", "rows": 1234, "mean": 12.34, "median": 9.0, "p90": 30.0,
            "bias": -4.4, "median_bias": -2.0, "coverage": 0.8, "held_out": 617}  # fmt: skip
    by_gpu = [{**line, "gpu": name, "coverage": None} for name in ("l40s", "h200_sxm")]
    errors = {"sources": [line], "by_gpu": by_gpu}
    EndToEnd({}, (), errors, {"made": "2026-01-01"}).write(tmp_path / FILE.name)
    return str(tmp_path)


def test_errors_on_published_results(run: Run, scored: str) -> None:
    out = told(run, "evidence", "--published", "--weights", scored)
    assert re.search(r"^served +mean ttft +1,234 +12\.3% +9\.00% +-4% +80% of 617$", out, re.MULTILINE)
    assert TITLES["served"] in out and max(map(len, out.splitlines())) <= 100
    by_gpu = told(run, "evidence", "--published", "--weights", scored, "--by", "gpu")
    assert re.findall(r"^(\w+) +served.*-4% +—$", by_gpu, re.MULTILINE) == ["h200_sxm", "l40s"]
    found = json.loads(told(run, "evidence", "--published", "--weights", scored, "--by", "gpu", "--json"))
    assert (found["by"], found["about"], len(found["errors"])) == ("gpu", {"made": "2026-01-01"}, 2)
    assert found["errors"][0]["title"] == TITLES["served"] and found["errors"][0]["mean"] == 12.34


def test_no_published_result_was_scored(run: Run, tmp_path: Path) -> None:
    assert told(run, "evidence", "--published", "--weights", str(tmp_path)) == "No published result was scored.\n"
    found = json.loads(told(run, "evidence", "--published", "--weights", str(tmp_path), "--json"))
    assert found == {"by": "source", "about": {}, "errors": []}


def test_a_call_tells_which_kernel_it_is_taken_to_run(run: Run) -> None:
    assert "fa3 by wgmma (the file names it for this GPU)" in told(run, *ATTENTION, "--stack", "vllm")
    runs = json.loads(told(run, *ATTENTION, "--stack", "vllm", "--json"))["runs"]
    assert {**runs, "sources": ()} == {
        "family": "fa3", "backend": "fa3", "path": "wgmma", "path_inherited": False, "how": "named",
        "tiles": "flash.tiling", "sources": (),
    }  # fmt: skip
    assert runs["sources"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpu", "h300"), "unknown gpu 'h300'"),
        (("--op", "gem"), "unknown op 'gem' (did you mean gemm"),
        (("--stack", "vlm"), "unknown stack 'vlm' (did you mean vllm"),
        (("--where", "dtype"), "give NAME=VALUE"),
        (("--where", "dtpe=fp8"), "unknown name 'dtpe' (did you mean dtype"),
        (("--by", "colour"), "unknown --by 'colour'"),
        (("--by", "support"), "unknown --by 'support'"),
        (("--published", "--by", "op"), "unknown --by 'op'; known: gpu, model, source, stack, support"),
        (("--published", "--gpu", "h200_sxm"), "leave out --gpu"),
        (("--runs", "--gpu", "h300"), "unknown gpu 'h300'"),
        (("--weights", "/nowhere"), "/nowhere"),
    ],
)
def test_refusals_are_one_line(run: Run, arguments: tuple[str, ...], said: str) -> None:
    code, out, err = run("evidence", *arguments)
    assert code == 2 and out == "" and said in err and err.count("\n") == 1


def test_a_kernel_tells_what_it_rests_on(run: Run) -> None:
    out = told(run, *ATTENTION, "--stack", "vllm")
    assert "calls of this configuration on h200_sxm" in out and "answered as  backend fa3, paged yes" in out
    found = json.loads(told(run, *ATTENTION, "--stack", "flashinfer", "--backend", "fa2", "--json"))
    assert found["answered_as"]["backend"] == {"asked": "fa2", "answered": "flashinfer"}
    assert found["evidence"]["calls"] > 1000 and found["evidence"]["words"]["phase"] == "decode"


def test_a_model_tells_what_it_rests_on(run: Run) -> None:
    asked = ("infer", "llama-3.1-8b", "--gpu", "h100_sxm", "--batch", "4", "--input-len", "512", "--output-len", "32")
    found = json.loads(told(run, *asked, "--json"))["evidence"]
    assert found["calls"] > 10_000 and 0 < found["error"] < 0.1 and found["kinds"][0]["share"] > 0.3
    assert sum(found["support"].values()) == pytest.approx(1)
    assert "evidence   " in told(run, *asked)


def test_an_empty_answer_says_why(run: Run) -> None:
    out = told(run, "evidence", "--gpu", "4090")
    assert "nothing was measured on NVIDIA GeForce RTX 4090" in out
    assert "l40s" in out  # of its compute capability
    found = json.loads(told(run, "evidence", "--gpu", "h200_sxm", "--op", "conv2d", "--stack", "trtllm", "--json"))
    assert found["kinds"] == 0
    assert "without op" in found["reason"]
    assert "reason" not in json.loads(told(run, "evidence", "--gpu", "h200_sxm", "--op", "gemm", "--json"))
