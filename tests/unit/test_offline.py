"""Offline runs: all requests at once, given to the engine in the process that runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deployments import deployed

from kernelcast.app.questions.simulate import SimulateQuestion
from kernelcast.app.report.simulate import fields, verdict
from kernelcast.errors import KernelcastError
from kernelcast.serving.simulate import Simulation
from kernelcast.stacks import stack

GIVEN: dict[str, Any] = {"model": "llama-3.1-8b", "gpu": "h100_sxm", "num_prompts": 60, "input_len": 512,
                         "output_len": 64, "intervals": False}  # fmt: skip


def simulated(**more: Any) -> Simulation:
    return SimulateQuestion(**{**GIVEN, **more}).answer()


@pytest.mark.parametrize("name", ["vllm", "sglang", "trtllm"])
def test_nothing_of_a_server_is_left(name: str) -> None:
    """Its first step begins at once: no HTTP request passes a front end, and no token is sent."""
    found, served = simulated(stack=name, offline=True), simulated(stack=name, request_rate=float("inf"))
    assert found.request_times.scheduled_s.min() == found.request_times.arrival_s.max() == 0.0
    read = len(served.load) if stack(name).front_rounds else 1  # before the first of them goes on
    assert served.request_times.scheduled_s.min() == pytest.approx(
        stack(name).request_s + read * stack(name).front_s + 512 * stack(name).token_s
    )
    assert found.metrics["output_throughput"] > served.metrics["output_throughput"]
    assert found.metrics["duration"] < served.metrics["duration"]


def test_the_answer_has_the_keys_of_vllm_bench_throughput() -> None:
    record = fields(simulated(offline=True))
    assert record["num_requests"] == 60 and record["total_num_tokens"] == 60 * (512 + 64)
    assert record["elapsed_time"] == record["duration"] > 0
    assert record["requests_per_second"] == pytest.approx(60 / record["elapsed_time"])
    assert record["tokens_per_second"] == pytest.approx(60 * 576 / record["elapsed_time"])
    assert "elapsed_time" not in fields(simulated(request_rate=float("inf")))


def test_a_run_that_ends_is_not_overloaded() -> None:
    found = simulated(offline=True, num_prompts=400, input_len=2000)
    assert not found.saturated
    assert verdict(found).startswith("all done in ")


def test_defaults_are_those_of_offline_runs() -> None:
    """vLLM's LLM class takes twice the tokens a step on large GPUs, four times on others. trtllm-bench makes room for
    the longest prompt beside max_batch_size sequences; chunked, or told a number, it does not."""

    def tokens(**more: Any) -> int:
        return simulated(offline=True, num_prompts=2, output_len=2, **more).service.pool.settings.max_num_batched_tokens

    assert tokens() == 16384
    assert tokens(gpu="l40s") == 8192
    assert simulated(num_prompts=2).service.pool.settings.max_num_batched_tokens == 8192
    trtllm: dict[str, Any] = {"stack": "trtllm", "input_len": 8192}
    assert tokens(**trtllm) == 8192 + 2048
    assert tokens(**trtllm, max_num_seqs=512) == 8192 + 512
    assert tokens(stack="trtllm", input_len=1000) == 8192
    assert tokens(**trtllm, enable_chunked_prefill=True) == 8192
    assert tokens(**trtllm, max_num_batched_tokens=9000) == 9000


def test_a_trace_gives_its_lengths_alone(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("arrival_s,input_tokens,output_tokens\n0,100,5\n50,200,6\n90,300,7\n")
    lengths = {"num_prompts": None, "input_len": None, "output_len": None}
    found = simulated(offline=True, trace=file, **lengths)
    assert found.load.inputs.tolist() == [100, 200, 300]
    assert found.load.arrivals_s.tolist() == [0.0, 0.0, 0.0]
    assert len(simulated(offline=True, trace=file, **{**lengths, "limit": 2}).load) == 2


@pytest.mark.parametrize(
    "more", [{"request_rate": 4.0}, {"stages": "1x10"}, {"arrivals": "poisson"}, {"burstiness": 0.5}]
)
def test_times_of_arrival_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(KernelcastError, match="`offline` has all requests at once: leave out"):
        simulated(offline=True, **more)


def test_there_is_no_server_to_send_caches_to() -> None:
    with pytest.raises(KernelcastError, match="leave out `prefill_replicas`"):
        simulated(offline=True, prefill_replicas=1)


def test_host_times_of_steps_stay() -> None:
    engine, known = deployed().stack.without_server(), stack("vllm")
    assert engine.overlapped_step_s == known.overlapped_step_s > 0 and engine.launch_s == known.launch_s
    assert engine.request_s == engine.front_s == engine.token_s == engine.sequence_s == 0.0
