"""Results of servers' own benchmarks: the load that was sent, and what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernelcast.errors import KernelcastError
from kernelcast.serving.bench import read_bench
from kernelcast.serving.load import arrivals, vllm_draws

VLLM: dict[str, Any] = {  # the keys that `vllm bench serve --save-result` writes
    "date": "20261101-120000", "endpoint_type": "vllm", "backend": "vllm", "label": None,
    "model_id": "meta-llama/Llama-3.1-8B", "tokenizer_id": "meta-llama/Llama-3.1-8B", "num_prompts": 4,
    "tensor_parallel_size": "2", "request_rate": 2.0, "burstiness": 1.0, "max_concurrency": None,
    "duration": 3.0, "completed": 4, "failed": 0, "total_input_tokens": 4098, "total_output_tokens": 40,
    "request_throughput": 1.33, "request_goodput": None, "output_throughput": 13.3, "total_token_throughput": 1379.0,
    "mean_ttft_ms": 31.0, "median_ttft_ms": 30.0, "std_ttft_ms": 2.0, "p99_ttft_ms": 40.0,
    "mean_tpot_ms": 10.0, "median_tpot_ms": 10.0, "std_tpot_ms": 0.1, "p99_tpot_ms": 11.0,
    "mean_itl_ms": 10.0, "median_itl_ms": 10.0, "std_itl_ms": 0.1, "p99_itl_ms": 11.0,
}  # fmt: skip
DETAIL: dict[str, Any] = {
    "input_lens": [100, 200, 300, 400], "output_lens": [3, 3, 0, 2], "ttfts": [0.1, 0.2, 0.0, 0.4],
    "itls": [[0.01, 0.02], [0.03, 0.01], [], [0.05]], "start_times": [50.0, 51.0, 51.5, 50.5],
    "errors": ["", "", "Service Unavailable", ""], "generated_texts": ["", "", "", ""],
}  # fmt: skip


def write(path: Path, found: Any) -> Path:
    path.write_text(json.dumps(found))
    return path


def refused(path: Path) -> str:
    with pytest.raises(KernelcastError) as caught:
        read_bench(path)
    line = str(caught.value)
    assert "\n" not in line and path.name in line
    return line


# ---- vLLM ----


def test_a_detailed_result_has_the_load_that_was_sent(tmp_path: Path) -> None:
    bench = read_bench(write(tmp_path / "r.json", {**VLLM, **DETAIL}))
    assert (bench.benchmark, bench.exact) == ("vllm", True)
    assert bench.load.arrivals_s.tolist() == [0, 0.5, 1]  # in order, without the one that failed
    assert (bench.load.inputs.tolist(), bench.load.outputs.tolist()) == ([100, 400, 200], [3, 2, 3])
    assert bench.ttft_s is not None and bench.ttft_s.tolist() == [0.1, 0.4, 0.2]
    assert bench.e2el_s is not None and bench.e2el_s == pytest.approx([0.13, 0.45, 0.24])
    assert [gaps.tolist() for gaps in bench.itls] == [[0.01, 0.02], [0.05], [0.03, 0.01]]
    assert bench.notes == ("1 of 4 requests failed and are left out",)
    assert bench.metrics["mean_ttft_ms"] == 31.0  # what the file says goes before what we work out
    assert bench.metrics["p90_ttft_ms"] == pytest.approx(np.percentile([100, 400, 200], 90))
    assert bench.metrics["mean_e2el_ms"] == pytest.approx(1000 * (0.13 + 0.45 + 0.24) / 3)
    assert bench.server == {
        "model": "meta-llama/Llama-3.1-8B", "tokenizer": "meta-llama/Llama-3.1-8B", "tp": 2, "backend": "vllm",
    }  # fmt: skip


def test_a_short_result_is_made_again_from_its_rate_and_means(tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", VLLM)
    bench, again, other = read_bench(path), read_bench(path), read_bench(path, seed=1)
    assert not bench.exact and "made again" in bench.notes[0]
    assert np.array_equal(bench.load.arrivals_s, again.load.arrivals_s)
    assert not np.array_equal(bench.load.arrivals_s, other.load.arrivals_s)
    assert bench.load.arrivals_s == pytest.approx(arrivals(4, 2.0, vllm_draws(0)))
    assert (bench.load.input_tokens, bench.load.output_tokens) == (4098, 40)
    assert bench.load.inputs.tolist() == [1024, 1025, 1024, 1025]
    assert bench.ttft_s is None and bench.itls == ()
    assert bench.metrics["p99_tpot_ms"] == 11.0 and "request_goodput" not in bench.metrics


def test_latencies_may_be_all_that_is_left_of_requests(tmp_path: Path) -> None:
    bench = read_bench(
        write(tmp_path / "r.json", {**VLLM, "latencies": [0.1, 0.3, 0.0, 0.2], "queue_times": [0, 0, 0, 0]})
    )
    assert not bench.exact and bench.metrics["mean_e2el_ms"] == pytest.approx(200)


def test_all_at_once_a_ramp_and_burstiness(tmp_path: Path) -> None:
    at_once = read_bench(write(tmp_path / "i.json", {**VLLM, "request_rate": "inf", "max_concurrency": 2}))
    assert at_once.load.arrivals_s.tolist() == [0, 0, 0, 0] and at_once.load.max_concurrency == 2
    words = {"request_rate": "inf", "ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 5}
    assert read_bench(write(tmp_path / "r.json", {**VLLM, **words})).load.duration_s > 0
    bursty = read_bench(write(tmp_path / "b.json", {**VLLM, "burstiness": 0.5}))
    expected = arrivals(4, 2.0, vllm_draws(0), "gamma", burstiness=0.5)
    assert bursty.load.arrivals_s == pytest.approx(expected)


def test_a_client_that_held_requests_back(tmp_path: Path) -> None:
    held = {**VLLM, **DETAIL, "max_concurrency": 1}
    # newer vLLM says how long: they were due at 50, 50.5, 50.6 and 50.2
    queued = read_bench(write(tmp_path / "q.json", {**held, "queue_times": [0, 0.5, 0.9, 0.3]}))
    assert queued.exact and queued.load.arrivals_s == pytest.approx([0, 0.2, 0.5])
    unknown = read_bench(write(tmp_path / "u.json", held))
    assert not unknown.exact and "held requests back" in unknown.notes[0]
    at_once = read_bench(write(tmp_path / "a.json", {**held, "request_rate": "inf"}))
    assert at_once.exact and at_once.load.arrivals_s.tolist() == [0, 0, 0] and at_once.load.max_concurrency == 1


def test_of_several_runs_the_last_counts(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(VLLM) + "\n" + json.dumps({**VLLM, "mean_ttft_ms": 7.0}))
    bench = read_bench(path)
    assert bench.metrics["mean_ttft_ms"] == 7.0 and "has 2 runs" in bench.notes[0]


# ---- SGLang ----

SGLANG: dict[str, Any] = {  # what bench_serving appends to its --output-file
    "tag": None, "backend": "sglang", "dataset_name": "random", "request_rate": 4.0, "max_concurrency": 8,
    "sharegpt_output_len": None, "random_input_len": 1000, "random_output_len": 100, "random_range_ratio": 0.5,
    "server_info": {"model_path": "Qwen/Qwen3-8B", "tp_size": 1, "max_running_requests": 64, "version": "0.5.4"},
    "duration": 10.0, "completed": 20, "total_input_tokens": 15000, "total_output_tokens": 1500,
    "request_throughput": 2.0, "input_throughput": 1500.0, "output_throughput": 150.0, "total_throughput": 1650.0,
    "mean_e2e_latency_ms": 900.0, "median_e2e_latency_ms": 880.0, "p99_e2e_latency_ms": 1200.0,
    "mean_ttft_ms": 50.0, "median_ttft_ms": 49.0, "p99_ttft_ms": 80.0, "concurrency": 1.8, "accept_length": None,
}  # fmt: skip


def test_sglang_has_other_names_for_the_same(tmp_path: Path) -> None:
    path = tmp_path / "sglang_1101_20_1000_100.jsonl"
    path.write_text(json.dumps(SGLANG) + "\n")
    bench = read_bench(path)
    assert (bench.benchmark, bench.exact, bench.load.max_concurrency) == ("sglang", False, 8)
    assert (bench.metrics["mean_e2el_ms"], bench.metrics["p99_e2el_ms"]) == (900.0, 1200.0)
    assert bench.metrics["total_token_throughput"] == 1650.0
    assert bench.server["model"] == "Qwen/Qwen3-8B" and bench.server["max_num_seqs"] == 64
    assert bench.load.input_tokens == 15000 and bench.load.inputs.std() > 50  # spread as its random dataset is


def test_sglang_in_detail(tmp_path: Path) -> None:
    detail = {name: value for name, value in DETAIL.items() if name != "start_times"}
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({**SGLANG, "request_rate": float("inf"), **detail}) + "\n")
    at_once = read_bench(path)
    assert at_once.exact and at_once.load.inputs.tolist() == [100, 200, 400]
    path.write_text(json.dumps({**SGLANG, **detail}) + "\n")
    bench = read_bench(path)
    assert not bench.exact and "no start_times" in bench.notes[0] and len(bench.load) == 3
    path.write_text(json.dumps({**SGLANG, "request_rate": "trace"}) + "\n")
    assert "at the times of a trace" in refused(path)


# ---- inference-perf ----


def report(count: int, rate: float, ttft_s: float) -> dict[str, Any]:
    return {
        "benchmark_time_seconds": 11.0,
        "load_summary": {"count": count, "send_duration": count / rate, "requested_rate": rate},
        "successes": {
            "count": count,
            "latency": {
                "request_latency": {"mean": 1.5, "median": 1.4, "p90": 2.0, "min": 0.1, "max": 3.0},
                "time_to_first_token": {"mean": ttft_s, "median": ttft_s, "p99": 0.3},
                "inter_token_latency": {"mean": 0.01, "p99.9": 0.05},
                "time_per_output_token": None,
            },
            "throughput": {"requests_per_sec": rate, "output_tokens_per_sec": 99.0, "total_tokens_per_sec": 500.0},
            "prompt_len": {"mean": 200.4},
            "output_len": {"mean": 10.0},
        },
        "failures": {"count": 1},
    }


def request(start_s: float, prompt: str, *, error: Any = None, newer: bool = False) -> dict[str, Any]:
    times = [start_s + 0.1, start_s + 0.12, start_s + 0.15]
    info: dict[str, Any] = {"input_tokens": len(prompt) // 4, "output_tokens": 3, "output_token_times": times}
    if newer:
        info = {
            "request_metrics": {"text": {"input_tokens": len(prompt) // 4}},
            "response_metrics": {
                "output_tokens": 4,
                "server_usage": {"completion_tokens": 3},
                "output_token_times": times,
            },
        }
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 3})
    return {
        "start_time": start_s,
        "end_time": start_s + 0.15,
        "request": body,
        "response": "",
        "info": info,
        "error": error,
    }


def folder_of_reports(folder: Path) -> Path:
    write(folder / "summary_lifecycle_metrics.json", report(6, 2, 0.2))
    write(folder / "stage_0_lifecycle_metrics.json", report(2, 1, 0.15))
    write(folder / "stage_1_lifecycle_metrics.json", report(4, 4, 0.25))
    (folder / "config.yaml").write_text("server:\n  model_name: org/model\nload:\n  interval: 1\n  type: constant\n")
    return folder


def test_reports_without_requests_are_made_again_by_stage(tmp_path: Path) -> None:
    bench = read_bench(folder_of_reports(tmp_path))
    assert (bench.benchmark, bench.exact, bench.server) == ("inference-perf", False, {"model": "org/model"})
    assert bench.load.arrivals_s.tolist() == [0, 1, 2, 2.25, 2.5, 2.75]
    assert bench.load.stages is not None and bench.load.stages.tolist() == [0, 0, 1, 1, 1, 1]
    assert set(bench.load.inputs) == {200} and set(bench.load.outputs) == {10}
    assert bench.metrics["mean_ttft_ms"] == 200 and bench.metrics["p90_e2el_ms"] == 2000
    assert bench.metrics["p99.9_itl_ms"] == 50 and bench.metrics["request_throughput"] == 2
    assert [stage["mean_ttft_ms"] for stage in bench.stages] == [150, 250]
    alone = read_bench(tmp_path / "stage_1_lifecycle_metrics.json")
    assert len(alone.load) == 4 and alone.metrics["mean_ttft_ms"] == 250
    (tmp_path / "stage_0_lifecycle_metrics.json").unlink()
    (tmp_path / "stage_1_lifecycle_metrics.json").unlink()
    assert len(read_bench(tmp_path / "summary_lifecycle_metrics.json").load) == 6


def test_its_configuration_tells_of_shared_prompts(tmp_path: Path) -> None:
    words = "num_groups: 2\n  num_prompts_per_group: 1\n  system_prompt_len: 150\n"
    (folder_of_reports(tmp_path) / "config.yaml").write_text(f"data:\n  {words}")
    load = read_bench(tmp_path).load
    assert set(load.inputs) == {200} and sorted(pieces[0] for pieces in load.shared[:2]) == [(0, 150), (1, 150)]


@pytest.mark.parametrize("newer", [False, True])
def test_requests_one_by_one(tmp_path: Path, newer: bool) -> None:
    folder = folder_of_reports(tmp_path)
    system = "A system prompt that all of them begin with, long enough. " * 10
    rows = [request(100 + at, f"{system}{at}{'?' * 40}", newer=newer) for at in (0.0, 1.0, 2.0, 2.5, 3.0, 4.0)]
    rows[1]["error"] = {"error_type": "TimeoutError", "error_msg": "late"}
    write(folder / "per_request_lifecycle_metrics.json", rows[::-1])
    bench = read_bench(folder)
    assert bench.exact and bench.load.arrivals_s.tolist() == [0, 2, 2.5, 3, 4]
    assert bench.load.stages is not None and bench.load.stages.tolist() == [0, 1, 1, 1, 1]
    assert bench.ttft_s == pytest.approx(np.full(5, 0.1)) and bench.e2el_s == pytest.approx(np.full(5, 0.15))
    assert set(bench.load.outputs) == {3} and bench.itls[0] == pytest.approx([0.02, 0.03])
    ((stream, tokens),) = set().union(*bench.load.shared)  # the system prompt, in all of them
    assert stream == 0 and tokens == pytest.approx(len(system) / 4, abs=1)
    assert bench.notes[0] == "1 of 6 requests failed and are left out"
    assert bench.metrics["p90_ttft_ms"] == pytest.approx(100) and bench.metrics["mean_ttft_ms"] == 200
    stage = read_bench(folder / "stage_1_lifecycle_metrics.json")
    assert stage.load.arrivals_s.tolist() == [0, 0.5, 1, 2] and stage.metrics["mean_ttft_ms"] == 250
    assert len(read_bench(folder / "per_request_lifecycle_metrics.json").load) == 5


# ---- tables ----

SERVED = "request_id,input_toks,output_toks,arrival_s,first_token_s,last_token_s\n"


def test_a_table_of_served_requests(tmp_path: Path) -> None:
    path = tmp_path / "run_requests.csv"
    path.write_text(f"{SERVED}b,20,5,1.0,1.5,2.5\na,10,1,0.0,0.25,0.25\n")
    engine = {"model": "org/m", "tensor_parallel_size": 4, "max_num_seqs": 128, "max_model_len": None}
    write(tmp_path / "run_meta.json", {"model": "org/m", "vllm_version": "0.19.0", "engine_kwargs": engine})
    bench = read_bench(path)
    assert (bench.benchmark, bench.exact, bench.load.ids) == ("requests", True, ("a", "b"))
    assert bench.ttft_s is not None and bench.ttft_s.tolist() == [0.25, 0.5]
    assert bench.e2el_s is not None and bench.e2el_s.tolist() == [0.25, 1.5]
    assert bench.metrics["mean_ttft_ms"] == 375 and bench.metrics["mean_tpot_ms"] == 250  # of those with more than one
    assert bench.metrics["duration"] == 2.5 and bench.metrics["output_throughput"] == 6 / 2.5
    lines = tmp_path / "other.jsonl"
    lines.write_text('{"input_tokens": 9, "output_tokens": 2, "arrival_s": 0, "first_token_s": 1, "last_token_s": 2}\n')
    assert read_bench(lines).load.inputs.tolist() == [9]
    assert bench.server == {"model": "org/m", "tp": 4, "max_num_seqs": 128, "version": "0.19.0"}


def test_bad_tables_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text(f"{SERVED}a,10,1,0,0.25,0.5\nb,20,5,1.0,0.5,2.5\n")
    assert "line 3: arrival_s, first_token_s, last_token_s must follow one another, not 1.0, 0.5, 2.5" in refused(path)
    path.write_text(f"{SERVED}a,10,1,0,,0.5\n")
    assert "line 2: arrival_s" in refused(path)
    path.write_text("arrival_s,input_tokens,output_tokens\n0,1,1\n")
    assert "first_token_s, last_token_s not found" in refused(path)
    path.write_text(f"{SERVED}a,0,1,0,0.25,0.5\n")
    assert "input_toks must be a whole number" in refused(path)


# ---- other files ----


def test_files_of_no_known_kind(tmp_path: Path) -> None:
    assert "is no result of a benchmark that kernelcast knows" in refused(write(tmp_path / "a.json", {"a": 1}))
    assert "is no result" in refused(write(tmp_path / "b.json", [1, 2]))
    broken = tmp_path / "c.json"
    broken.write_text('{"a": \n')
    assert "is not JSON: line 2" in refused(broken)
    broken.write_text("")
    assert "is not JSON: it is empty" in refused(broken)
    assert "no file" in refused(tmp_path / "d.json")
    (tmp_path / "none").mkdir()
    assert "has no reports of inference-perf" in refused(tmp_path / "none")
    binary = tmp_path / "e.json"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "is not text" in refused(binary)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"request_rate": "fast"}, "request_rate must be a number of requests per second or inf, not 'fast'"),
        ({"request_rate": 0}, "request_rate must be"),
        ({"completed": 0, "num_prompts": 0}, "says too little of its load"),
        ({**DETAIL, "output_lens": [1, 2]}, "output_lens has 2 entries"),
        ({**DETAIL, "input_lens": ["a", 2, 3, 4]}, "input_lens must be a list of token counts"),
        ({**DETAIL, "ttfts": [0.1]}, "ttfts must have a number for each of 4 requests"),
        ({**DETAIL, "itls": [[]]}, "itls has 1 entries for 4 requests"),
        ({**DETAIL, "output_lens": [0, 0, 0, 0]}, "none of its 4 requests completed"),
        ({**DETAIL, "itls": [["x"], [], [], []]}, "is not as its benchmark writes it"),
    ],
)
def test_broken_results_are_one_line(tmp_path: Path, words: dict[str, Any], said: str) -> None:
    assert said in refused(write(tmp_path / "r.json", {**VLLM, **words}))
