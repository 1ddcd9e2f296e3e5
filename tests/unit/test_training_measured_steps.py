"""Training steps of Hugging Face models that this project measured on an H200, asked as training jobs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kernelcast.hardware import gpu
from kernelcast.models import Architecture
from kernelcast.models.catalogue import model
from kernelcast.models.config import parse
from kernelcast.schedule import host
from kernelcast.stacks.training_stack import training_stack
from kernelcast.training.job import TrainingJob, precision
from kernelcast.training.job_memory import memory
from kernelcast.training.layout import TrainingLayout
from kernelcast.training.passes import Builder
from kernelcast.training.step import LAUNCH_BOUND
from kernelcast.training.training_forecast import TrainingForecast
from kernelcast.training.transformer_step import forecast, forecast_many
from kernelcast_lab.collect.store import MeasuredCase, load_cases
from kernelcast_lab.evaluate.public import digest

MEASURED = Path(__file__).parents[2] / "validation" / "models_h200_sxm.json.gz"
_FP32 = precision("fp32")
PRECISIONS = {
    "bf16": precision("bf16_pure"),
    "tf32": _FP32,
    "fp32": replace(_FP32, forward="fp32", dgrad="fp32", wgrad="fp32"),
}


def job(architecture: Architecture, batch: int = 1, seq: int = 512, dtype: str = "bf16") -> TrainingJob:
    # timed for 0.8 s with the GPU idle before each step: not the clock that minutes settle at
    bursts = replace(gpu("h200_sxm"), sustained_flops_per_j=None)
    return TrainingJob(
        model=architecture, gpu=bursts, layout=TrainingLayout(), seq=seq, micro_batch=batch,
        precision=PRECISIONS[dtype], stack=training_stack("huggingface"),
    )  # fmt: skip


@dataclass(frozen=True)
class Step:
    measured: MeasuredCase
    forecast: TrainingForecast

    @property
    def error(self) -> float:
        return self.forecast.time_s * 1e3 / self.measured.wall_ms - 1

    @property
    def kernel_error(self) -> float:
        parts = self.forecast.parts_s
        return (parts["compute"] + parts["optimizer"]) * 1e3 / self.measured.kernel_sum_ms - 1

    @property
    def inside(self) -> bool:
        return self.forecast.low_s * 1e3 <= self.measured.wall_ms <= self.forecast.high_s * 1e3

    @property
    def launch_bound(self) -> bool:
        """As measured: the GPU was idle for more than gaps between kernels explain."""
        gaps_ms = host("server").gap_s * 1e3 * self.measured.measured.profile.kernel_calls
        idle_ms = self.measured.wall_ms - self.measured.kernel_sum_ms - gaps_ms
        return idle_ms / self.measured.wall_ms > LAUNCH_BOUND

    @property
    def development(self) -> bool:
        """One of two halves, by a hash of the case."""
        return digest(f"half {self.measured.case.id}") % 2 == 0


@cache
def steps() -> tuple[Step, ...]:
    cases = [case for case in load_cases(MEASURED) if case.case.mode == "training"]
    asked = [job(parse(x.config, x.case.model), x.case.batch, x.case.seq, x.case.dtype) for x in cases]
    return tuple(map(Step, cases, forecast_many(asked)))


@pytest.mark.parametrize("development", [True, False])
def test_steps_of_both_halves(development: bool) -> None:
    mine = [step for step in steps() if step.development == development]
    assert len(mine) == (13 if development else 9)
    assert max(abs(step.error) for step in mine if not step.launch_bound) < 0.08
    # the host drifts by as much: GPT-2 XL with a batch of four took 8% less than with one
    assert np.mean([abs(step.error) for step in mine if step.launch_bound]) < 0.20
    assert np.mean([step.inside for step in mine]) >= 0.8


def test_kernels_of_measured_steps() -> None:
    assert np.mean([abs(step.kernel_error) for step in steps()]) < 0.05


def test_waiting_for_the_host_is_told() -> None:
    told = [
        step.launch_bound == (step.forecast.parts_s["host"] > LAUNCH_BOUND * step.forecast.time_s) for step in steps()
    ]
    assert np.mean(told) >= 0.9


def test_ops_of_an_eager_layer() -> None:
    layers = {
        name: Builder(job(model(name))).layer(model(name).layers[0].layer) for name in ("llama-3.1-8b", "gpt2-xl")
    }
    launches = {name: sum(kernel.launches for kernel in unit.forward.kernels) for name, unit in layers.items()}
    # seven linear layers, two norms of 8, rotations of q and k of 5, attention, two sums, silu and its product
    assert launches["llama-3.1-8b"] == 7 + 2 * 8 + 2 * 5 + 1 + 2 + 2
    # four, two norms, attention, dropout and sum twice, GELU of 8
    assert launches["gpt2-xl"] == 4 + 2 + 1 + 2 * 2 + 8
    # weights, two norms; a bias each, and two tensors a norm
    assert (layers["llama-3.1-8b"].tensors, layers["gpt2-xl"].tensors) == (7 + 2, 4 * 2 + 2 * 2)


def test_a_launch_bound_step_takes_what_the_host_takes() -> None:
    """One token: kernels take next to nothing, so that the step is its host's work."""
    small, server = forecast(job(model("gpt2-xl"), seq=1)), host("server")
    units, stack = small.plan.units, small.job.stack
    ops = {
        name: [sum(kernel.launches for kernel in one.kernels) for one in (unit.forward, unit.backward, unit.wgrad)]
        for name, unit in units.items()
    }
    layer = next(name for name in units if isinstance(name, int))
    counts = {layer: 48, "embedding": 1, "head": 1}
    least_s = 0.0
    for name, count in counts.items():
        forward, *backward = ops[name]
        least_s += count * (
            forward * (server.launch_s + server.recorded_s)
            + sum(backward) * (server.launch_s + server.backward_s)
            + units[name].linears * (stack.linear_views[0] * server.view_s + stack.linear_calls * server.python_s)
            + units[name].linears * stack.linear_views[1] * server.backward_view_s
            + units[name].tensors * (server.parameter_s + stack.parameter_calls * server.python_s)
        )
    waited_s = small.time_s - small.parts_s["optimizer"]
    assert least_s < waited_s < 1.15 * least_s  # some ops have more than one kernel
    assert small.high_s / small.time_s - 1 > 0.8 * server.slower


def test_pure_bf16_updates_weights_in_16_bits() -> None:
    assert precision("pure_bf16") == precision("bf16-true") == precision("bf16_pure")
    given = forecast(job(model("gpt2-xl"))).plan.work.update_calls[0].arguments
    assert (given["op"], given["dtype"], given["state_dtype"]) == ("adamw", "bf16", "bf16")
    pure, mixed = (replace(job(model("gpt2-xl")), precision=precision(name)) for name in ("bf16_pure", "bf16"))
    optimizer_s = [forecast(each).parts_s["optimizer"] for each in (pure, mixed)]
    # 14 bytes a weight against 28 and the 6 of a cast; narrow accesses reach less
    assert optimizer_s[0] < 0.75 * optimizer_s[1]


def test_peak_memory_of_measured_steps() -> None:
    """Tensors that eager modules keep: ReLU's result alone, four of GPT-2's GELU, masks of dropout, a norm's input."""
    errors = np.array([memory(x.forecast.job).peak_bytes / x.measured.measured.peak_memory_bytes - 1 for x in steps()])
    assert np.abs(errors).mean() < 0.015
    assert np.abs(errors).max() < 0.03
