"""A traced step on many kinds of GPU: what a whole training takes of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from small_traces import mlp

import kernelcast as kc
from kernelcast.app.report.compare_training import fields
from kernelcast.errors import KernelcastError
from kernelcast.search.compare.training import TrainingComparison, TrainingForecast
from kernelcast.tracing.traced import Footprint
from kernelcast.training.layout import TrainingLayout
from kernelcast.training.scale import scale
from kernelcast.training.step import Step, run_step


def best(found: TrainingComparison, name: str) -> TrainingForecast:
    return next(one for one in found.fitting if one.gpu.id == name)


def test_a_step_is_what_trace_says_and_a_training_is_many() -> None:
    trace = mlp()
    one = best(kc.compare_training(trace, "h100_sxm", max_gpus=1, tokens=1e9, price=["h100_sxm=3.6"]), "h100_sxm")
    told = run_step(trace, kc.gpu("h100_sxm"))
    assert one.step.time_s == told.time_s and isinstance(one.step, Step)
    steps = 1e9 / trace.tokens
    assert one.hours == pytest.approx(steps * told.time_s / 3600)
    assert one.usd == pytest.approx(steps * told.time_s * 0.001)  # 3.6 USD an hour


def test_samples_are_an_epoch() -> None:
    trace = replace(mlp(), samples=4)
    one = best(kc.compare_training(trace, "h100_sxm", max_gpus=1, samples=1000), "h100_sxm")
    assert one.hours == pytest.approx(250 * one.step.time_s / 3600)


def test_ranks_share_the_optimizer_where_that_is_cheaper() -> None:
    trace = mlp(layers=8)
    found = kc.compare_training(trace, "h100_sxm", max_gpus=8, by="throughput")
    one = best(found, "h100_sxm")
    assert one.layout == TrainingLayout(dp=8, zero=1) and one.gpus == 8
    told = scale(trace, kc.gpu("h100_sxm"), one.layout)
    assert one.units_per_s == pytest.approx(told.tokens_per_s)


def test_a_layout_that_is_given_is_taken() -> None:
    found = kc.compare_training(mlp(), "h100_sxm,a100_sxm", layout=TrainingLayout(tp=2))
    assert {one.gpus for one in found.fitting} == {2}


def test_what_does_not_fit_is_a_row_and_everywhere_an_error() -> None:
    large = replace(mlp(), footprint=Footprint(parameters=100 * 2**30))
    found = kc.compare_training(large, "h200_sxm,a100_sxm", max_gpus=1)
    assert [row.gpu.id for row in found.rows] == ["h200_sxm", "a100_sxm"]
    # 100 GiB, a twentieth that the allocator cannot use, 1.2 GB of context
    assert found.rows[1].why == f"needs {105 + 1.2e9 / 2**30:.1f} GiB a GPU on 1 of them, has 80.0"
    with pytest.raises(KernelcastError, match=r"fits on no GPU of 1: a100_sxm needs 106\.1 GiB"):
        kc.compare_training(large, "a100_sxm", max_gpus=1)


def test_what_ifs_and_order() -> None:
    found = kc.compare_training(mlp(), "h100_sxm", max_gpus=1, by="latency", what_if=["dram_bytes_per_s*2"])
    assert [bool(row.gpu.changes) for row in found.rows] == [True, False]
    told = fields(found, "on_demand")
    assert told["rows"][0]["name"] == "h100_sxm dram_bytes_per_s*2" and told["rows"][0]["rank"] == 1
    assert told["rows"][0]["joules"] is None or told["rows"][0]["joules"] > 0


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"tokens": 1e9, "samples": 5}, "not both"),
        ({"tokens": 0}, "`tokens` is a number above 0"),
        ({"by": "luck"}, "unknown `by`"),
        ({"gpus": ()}, "no GPU to compare"),
        ({"max_gpus": 0}, "`max_gpus` is 1 or more"),
    ],
)
def test_what_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(KernelcastError, match=said):
        kc.compare_training(mlp(), **{"gpus": "h100_sxm", **asked})
    with pytest.raises(KernelcastError, match="no trace of a training step"):
        kc.compare_training(replace(mlp(), mode="inference"), "h100_sxm")
