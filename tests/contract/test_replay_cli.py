"""``kernelcast replay``: a benchmark's own results beside their simulation, and what they teach of a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import pytest
from running import Run, strict

LLAMA = ("--gpu", "h100_sxm", "--max-num-seqs", "64", "--max-num-batched-tokens", "2048")
ASKED = ("simulate", "llama-3.1-8b", *LLAMA, "--request-rate", "10", "--num-prompts", "60", "--input-len", "700",
         "--output-len", "60", "--random-range-ratio", "0.9", "--no-intervals")  # fmt: skip


@pytest.fixture
def served(run: Run, tmp_path: Path) -> Path:
    """Requests that a simulation served, as a table."""
    path = tmp_path / "served.parquet"
    assert run(*ASKED, "--requests-out", path)[0] == 0
    return path


@pytest.fixture
def slow(run: Run, tmp_path: Path) -> Path:
    """The same of a slow server."""
    server, path = tmp_path / "slow.json", tmp_path / "slow.parquet"
    terms = {"request_s": 0.06, "step_s": 2e-3, "decode_factor": 1.2, "prompt_factor": 1.2}
    server.write_text(json.dumps({"kind": "kernelcast server", "stack": "vllm", "terms": terms}))
    assert run(*ASKED, "--server", server, "--requests-out", path)[0] == 0
    return path


def vllm_result(table: Path, path: Path, **more: Any) -> Path:
    """What `vllm bench serve --save-detailed` would have written of these requests."""
    names = "arrival_s, first_token_s, last_token_s, input_tokens, output_tokens"
    with duckdb.connect() as connection:
        rows = connection.execute(f"SELECT {names} FROM '{table}'").fetchall()
    sent, first, last, inputs, outputs = (list(column) for column in zip(*rows, strict=True))
    gaps = [[(b - a) / (n - 1)] * (n - 1) for a, b, n in zip(first, last, outputs, strict=True)]
    found = {
        "backend": "vllm", "model_id": "meta-llama/Llama-3.1-8B-Instruct", "request_rate": 10.0, "completed": len(sent),
        "request_throughput": 9.0, "input_lens": inputs, "output_lens": outputs, "itls": gaps, "start_times": sent,
        "ttfts": [b - a for a, b in zip(sent, first, strict=True)], "errors": [""] * len(sent),
    }  # fmt: skip
    path.write_text(json.dumps({**found, **more}))
    return path


def test_a_simulation_replayed_is_itself(run: Run, served: Path) -> None:
    code, out, err = run("replay", served, "--model", "llama-3.1-8b", *LLAMA)
    assert (code, err) == (0, "") and "figures are off by 0% (median); 15 of 15 lie" in out
    assert "what prompts share" in out and "does not say what served it" in out
    assert max(map(len, out.splitlines())) <= 100


def test_model_and_stack_are_those_of_the_file(run: Run, served: Path, tmp_path: Path) -> None:
    bench = vllm_result(served, tmp_path / "bench.json", tensor_parallel_size=2)
    found = strict(run("replay", bench, "--gpu", "h100_sxm", "--no-intervals", "--json")[1])
    assert (found["model"], found["stack"], found["layout"]["tp"]) == ("llama-3.1-8b", "vllm", 2)
    assert any("max_num_seqs and max_num_batched_tokens" in line for line in found["assumed"])
    given = strict(run("replay", bench, *LLAMA, "--tp", "1", "--stack", "sglang", "--no-intervals", "--json")[1])
    assert (given["stack"], given["layout"]["tp"], given["settings"]["max_num_seqs"]) == ("sglang", 1, 64)
    own = strict(run("replay", bench, *LLAMA, "--tp", "1", "--json")[1])["figures"]
    assert all(abs(own[f"{at}_{name}_ms"]["error"]) < 1e-6 for at in ("mean", "p99") for name in ("ttft", "e2el"))
    assert own["mean_ttft_ms"]["inside"] and own["mean_ttft_ms"]["low"] < own["mean_ttft_ms"]["measured"]


@pytest.mark.slow
def test_what_is_learnt_of_a_server_goes_into_simulate(run: Run, slow: Path, tmp_path: Path) -> None:
    server, picture = tmp_path / "server.json", tmp_path / "picture.png"
    code, out, err = run("replay", slow, "--model", "llama-3.1-8b", *LLAMA, "--calibrate-on", "30", "-o", server,
                         "--plot", picture)  # fmt: skip
    assert (code, err) == (0, "") and "the other 30:" in out and "decode_factor" in out and picture.stat().st_size > 0
    assert max(map(len, out.splitlines())) <= 100
    told = json.loads(server.read_text())
    assert told["about"]["model"] == "llama-3.1-8b" and told["about"]["on"] == "first 30 requests"
    measured = strict(run("replay", slow, "--model", "llama-3.1-8b", *LLAMA, "--server", server, "--json")[1])
    assert all(abs(measured["figures"][f"mean_{name}_ms"]["error"]) < 0.02 for name in ("ttft", "tpot", "e2el"))
    predicted = strict(run(*ASKED, "--server", server, "--json")[1])
    assert predicted["mean_e2el_ms"] == pytest.approx(measured["figures"]["mean_e2el_ms"]["measured"], rel=0.02)
    assert run(*ASKED, "--stack", "sglang", "--server", server)[0] == 2


def test_calibration_as_data(run: Run, slow: Path) -> None:
    found = strict(run("replay", slow, "--model", "llama-3.1-8b", *LLAMA, "--calibrate-on", "10", "--json")[1])
    fitted = found["calibration"]
    assert fitted["requests"] == 10 and fitted["error"] < fitted["error_before"] and 0 < fitted["terms"]["spread"] < 0.2
    assert [part["requests"] for part in found["parts"]] == [10, 50]
    figure = found["parts"][1]["figures"]["mean_tpot_ms"]
    assert abs(figure["error"]) < abs(figure["uncalibrated_error"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("no.json",), "no file no.json"),
        (("{other}",), "is no result of a benchmark"),
        (("{bench}", "--model", "lama"), "unknown model 'lama'"),
        (("{bench}", "--output", "x.json"), "give --calibrate too"),
        (("{bench}", "--calibrate", "-o", "/nowhere/x.json"), "there is no folder /nowhere"),
        (("{bench}", "--calibrate", "-o", "{bench}"), "is the input"),
        (("{bench}", "--calibrate-on", "some"), "takes a number of requests or stage:N"),
        (("{bench}", "--calibrate-on", "stage:0"), "has no stages"),
        (("{unnamed}",), "does not name its model: give --model"),
        (("{stranger}",), "calls its model 'my-model', which is not known"),
        (("{bench}", "--server", "{other}"), "is not a file of `kernelcast replay --calibrate`"),
    ],
)
def test_refusals_are_one_line(run: Run, tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    summary = {"backend": "vllm", "request_rate": 4, "completed": 10, "request_throughput": 4.0, "mean_ttft_ms": 50.0,
               "total_input_tokens": 1000, "total_output_tokens": 100}  # fmt: skip
    files = {"other": {"a": 1}, "unnamed": summary, "stranger": {**summary, "model_id": "my-model"},
             "bench": {**summary, "model_id": "meta-llama/Llama-3.1-8B"}}  # fmt: skip
    paths = {name: tmp_path / f"{name}.json" for name in files}
    for name, found in files.items():
        paths[name].write_text(json.dumps(found))
    code, out, err = run("replay", *(word.format(**paths) for word in arguments), "--gpu", "h100_sxm")
    assert code == 2 and out == "" and said in err and err.count("\n") == 1


def test_a_gpu_must_be_named(run: Run, served: Path) -> None:
    code, _, err = run("replay", served, "--model", "llama-3.1-8b")
    assert code == 2 and "which GPU?" in err
