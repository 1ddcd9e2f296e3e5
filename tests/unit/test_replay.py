"""A benchmark beside its simulation, and what it teaches of the server."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kernelcast as kc
from kernelcast import models
from kernelcast.errors import KernelcastError, KernelcastWarning
from kernelcast.inference.forward import Deployment
from kernelcast.serving.calibrate import calibrate, calibration_requests
from kernelcast.serving.load import Load
from kernelcast.serving.metrics import BenchResult, metrics
from kernelcast.serving.replay import MetricComparison, SimulatedRuns, replay
from kernelcast.serving.service import OVERHEADS, EnginePool, Service, engine_settings, read_overheads, write_overheads
from kernelcast.serving.step_times import StepTimeTables, step_time_tables
from kernelcast.stacks import Stack, stack

SLOW: dict[str, Any] = {"request_s": 0.05, "step_s": 1.5e-3, "sequence_s": 2e-5, "decode_factor": 1.15,
                        "prompt_factor": 1.3}  # fmt: skip


def served_by(server: Stack, most: int = 64) -> Service:
    place = Deployment(models.model("llama-3.1-8b"), kc.gpu("h100_sxm"), server)
    return Service(EnginePool(place, engine_settings(place, {"max_num_seqs": most, "max_num_batched_tokens": 2048})))


def load_of(count: int = 120, rate: float = 8.0, stages: int = 0) -> Load:
    draw = np.random.default_rng(3)
    arrivals = np.cumsum(draw.exponential(1 / rate, count))
    numbers = np.arange(count) * stages // count if stages else None
    return Load(arrivals, draw.integers(64, 2000, count), draw.integers(8, 200, count), stages=numbers)


def measured(server: Stack, tables: StepTimeTables, load: Load, *, one_by_one: bool = True) -> BenchResult:
    """The results of a benchmark of a server that runs as we simulate it."""
    runs = SimulatedRuns.of(served_by(server), load, tables, intervals=False)
    served, notes = runs.served["likely"], runs.notes["likely"]
    stages = [] if load.stages is None else [metrics(served, notes, load.stages == number)
                                             for number in range(int(load.stages.max()) + 1)]  # fmt: skip
    ttft, e2el = (served.ttft_s, served.e2el_s) if one_by_one else (None, None)
    return BenchResult(
        Path("bench.json"), "vllm", load, one_by_one, metrics(served, notes), {}, ttft, e2el, (), tuple(stages)
    )


@pytest.fixture(scope="module")
def tables() -> StepTimeTables:
    return step_time_tables()


@pytest.fixture(scope="module")
def slow() -> Stack:
    return replace(stack("vllm"), **SLOW)


def test_a_figure_knows_its_error_and_whether_it_was_forecast() -> None:
    figure = MetricComparison("mean_ttft_ms", measured=100.0, predicted=90.0, low=80.0, high=95.0)
    assert figure.error == pytest.approx(-0.1) and figure.inside is False
    assert MetricComparison("mean_ttft_ms", 100.0, 90.0).inside is None
    assert MetricComparison("mean_ttft_ms", 95.0, 90.0, 80.0, 95.0).inside is True


def test_a_simulation_replayed_is_itself(tables: StepTimeTables) -> None:
    bench = measured(stack("vllm"), tables, load_of())
    found = replay(bench, served_by(stack("vllm")), tables)
    assert {figure.name for figure in found.whole.figures} >= {"p99_ttft_ms", "mean_itl_ms", "output_throughput"}
    assert all(abs(figure.error) < 1e-9 and figure.inside for figure in found.whole.figures)


def test_a_stage_is_scored_by_itself(tables: StepTimeTables, slow: Stack) -> None:
    bench = measured(slow, tables, load_of(stages=3))
    parts = replay(bench, served_by(slow), tables, intervals=False).parts
    assert [(part.name, part.requests) for part in parts] == [("stage 0", 40), ("stage 1", 40), ("stage 2", 40)]
    assert all(abs(figure.error) < 1e-9 for part in parts for figure in part.figures)


def test_what_a_file_leaves_open_is_told(tables: StepTimeTables) -> None:
    exact = measured(stack("vllm"), tables, load_of(20))
    told = replay(exact, served_by(stack("vllm")), tables, intervals=False).assumed
    assert told == ("the file does not say what prompts share: nothing, it is assumed",)
    made = replace(exact, exact=False, notes=("made again",))
    told = replay(made, served_by(stack("vllm")), tables, intervals=False).assumed
    assert told[0] == "made again" and "whole distributions are compared" in told[1]


def test_tables_are_not_predicted_again_for_other_terms(tables: StepTimeTables, slow: Stack) -> None:
    load, first, other = load_of(20), served_by(stack("vllm")), served_by(slow)
    place = replace(first.pool.deployment, stack=slow)
    known = tables.of(first.pool, load)
    again = tables.of(replace(first.pool, deployment=place), load)
    assert again._prompt is known._prompt and again.deployment.stack == slow.captured(again.limits.sequences)
    assert again.decode(8, 8000) == pytest.approx(1.15 * known.decode(8, 8000))
    alone = step_time_tables().of(other.pool, load)
    assert again.mixed(8, 8000, 512, 0.0, 9) == pytest.approx(alone.mixed(8, 8000, 512, 0.0, 9))


@pytest.mark.slow
@pytest.mark.parametrize("one_by_one", [True, False])
def test_a_slow_server_is_learnt_back(tables: StepTimeTables, slow: Stack, one_by_one: bool) -> None:
    bench = measured(slow, tables, load_of(), one_by_one=one_by_one)
    fitted = calibrate(bench, served_by(stack("vllm")), calibration_requests(bench, None), tables)
    assert fitted.by_request is one_by_one and fitted.error_before > 0.1 and fitted.error < 0.02
    most = 0.03 if one_by_one else 0.06
    # Another load: what was learnt is the server, not the load
    other = load_of(100, rate=5.0)
    told = replay(measured(slow, tables, other), fitted.service, tables).whole
    for name in ("ttft", "tpot", "e2el"):
        assert abs(told[f"mean_{name}_ms"].error) < most, name


@pytest.mark.slow
def test_the_fit_is_the_same_each_time_and_keeps_what_fits(tables: StepTimeTables) -> None:
    bench = measured(stack("vllm"), tables, load_of(40))
    one, two = (calibrate(bench, served_by(stack("vllm")), calibration_requests(bench, None), tables) for _ in range(2))
    assert one.stack == two.stack
    for name in OVERHEADS:
        assert getattr(one.stack, name) == pytest.approx(getattr(stack("vllm"), name), rel=1e-3, abs=1e-9), name
    assert one.stack.spread == 0.02


@pytest.mark.slow
def test_the_first_requests_teach_about_the_rest(tables: StepTimeTables, slow: Stack) -> None:
    bench = measured(slow, tables, load_of())
    part = calibration_requests(bench, "40")
    assert part.rows.sum() == 40
    fitted = calibrate(bench, served_by(stack("vllm")), part, tables)
    before, after = (
        replay(bench, service, tables, intervals=False, parts=[("rest", ~part.rows)]).parts[0]
        for service in (served_by(stack("vllm")), fitted.service)
    )
    for name in ("mean_ttft_ms", "mean_tpot_ms", "p90_e2el_ms"):
        assert abs(after[name].error) < min(0.04, abs(before[name].error) / 3), name


@pytest.mark.slow
def test_a_stage_teaches_without_single_requests(tables: StepTimeTables, slow: Stack) -> None:
    bench = measured(slow, tables, load_of(stages=2), one_by_one=False)
    fitted = calibrate(bench, served_by(stack("vllm")), calibration_requests(bench, "stage:0"), tables)
    rest = replay(bench, fitted.service, tables, intervals=False).parts[1]
    assert abs(rest["mean_tpot_ms"].error) < 0.05 and abs(rest["mean_e2el_ms"].error) < 0.05


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("many", "takes a number of requests or stage:N"),
        ("-3", "takes a number of requests or stage:N"),
        ("0", "has 20 requests"),
        ("21", "has 20 requests"),
        ("stage:0", "has no stages"),
    ],
)
def test_parts_that_are_not_there_are_refused(tables: StepTimeTables, asked: str, said: str) -> None:
    bench = measured(stack("vllm"), tables, load_of(20))
    with pytest.raises(KernelcastError, match=said):
        calibration_requests(bench, asked)


def test_first_requests_need_latencies_of_each(tables: StepTimeTables) -> None:
    bench = measured(stack("vllm"), tables, load_of(20, stages=2), one_by_one=False)
    with pytest.raises(KernelcastError, match="one by one"):
        calibration_requests(bench, "10")
    with pytest.raises(KernelcastError, match="has stages 0 to 1"):
        calibration_requests(bench, "stage:2")
    none = replace(bench, metrics={"request_throughput": 2.0})
    with pytest.raises(KernelcastError, match="no latencies to learn from"):
        calibrate(none, served_by(stack("vllm")), calibration_requests(none, None), tables)


def test_a_measured_server_has_the_spread_of_its_own_steps(tables: StepTimeTables) -> None:
    load = load_of(40)
    bench = measured(stack("vllm"), tables, load)
    wide = replay(bench, served_by(stack("vllm")), tables).whole["mean_tpot_ms"]
    narrow = replay(bench, served_by(replace(stack("vllm"), spread=0.02)), tables).whole["mean_tpot_ms"]
    assert wide.low is not None and narrow.low is not None and narrow.high is not None
    assert narrow.predicted == wide.predicted and wide.low < narrow.low
    assert narrow.high / narrow.predicted == pytest.approx(1.02, abs=0.01)


def test_terms_go_through_a_file(tmp_path: Path, slow: Stack) -> None:
    file = tmp_path / "server.json"
    write_overheads(file, replace(slow, spread=0.03), {"model": "llama-3.1-8b", "gpu": "NVIDIA H200"})
    assert read_overheads(file, stack("vllm"), {"NVIDIA H200"}) == replace(slow, spread=0.03)
    with pytest.warns(KernelcastWarning, match="fitted on NVIDIA H200: for other GPUs only its host times are used"):
        other = read_overheads(file, stack("vllm"), {"NVIDIA H200", "NVIDIA L4"})
    assert other == replace(slow, spread=0.0, prompt_factor=1.0, decode_factor=1.0)
    with pytest.raises(KernelcastError, match="a server of vllm, not of sglang"):
        read_overheads(file, stack("sglang"), {"NVIDIA H200"})
    told = json.loads(file.read_text())
    for name, value in (("step_s", -1.0), ("spread", 1.5), ("speed", 1.0), ("step_s", "2"), ("step_s", True),
                        ("decode_factor", 0)):  # fmt: skip
        file.write_text(json.dumps({**told, "terms": {**told["terms"], name: value}}))
        with pytest.raises(KernelcastError, match=name):
            read_overheads(file, stack("vllm"), {"NVIDIA H200"})
