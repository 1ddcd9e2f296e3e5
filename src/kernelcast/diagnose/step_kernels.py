"""Kernels of an engine's steps, as a profiler saw them, beside those that are forecast: time by what they compute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from kernelcast.diagnose.kernel_names import EnginePart, engine_part, is_launch, runs_on_gpu
from kernelcast.forecast.calls import Launch
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict_table import Times
from kernelcast.inference.batch import Batch, BatchColumns
from kernelcast.inference.forward import Deployment
from kernelcast.inference.pass_times import POWER_LIMIT, PassKernels, kernel_tables
from kernelcast.models.layers import Experts
from kernelcast.ops.base import kernel_class
from kernelcast.serving.step_table import ProfiledStep

PARTS: tuple[str, ...] = (*get_args(EnginePart), POWER_LIMIT)
# Families of forecast kernels; of all others the part is elementwise. What an engine runs around a product or an
# attention (quantised inputs, the KV cache's write) was measured with it, and is in its time.
_OF_FAMILY: dict[str, EnginePart] = {
    "gemm": "gemm", "grouped_mm": "gemm", "attention": "attention", "masked_attention": "attention",
    "sparse_attention": "attention", "mla": "attention", "mla_layer": "attention", "linear_attention": "attention",
    "mamba2": "attention", "moe": "moe", "moe_gemm": "moe", "deepep": "moe", "collective": "collectives",
}  # fmt: skip
_SAMPLING = ("softmax", "argmax")  # by their names; what copies, divides and draws is elementwise


@dataclass(frozen=True)
class StepKernels:
    """One step: seconds by part, measured and forecast; ``launches``: calls that launched its kernels or graphs."""

    step: ProfiledStep
    measured_s: dict[str, float]
    predicted_s: dict[str, float]
    kernels: float
    launches: float

    @property
    def parts(self) -> list[str]:
        """Those with any time, in the order of ``PARTS``."""
        return [part for part in PARTS if self.measured_s.get(part) or self.predicted_s.get(part)]


def step_kernels(steps: Iterable[ProfiledStep], deployment: Deployment, conditions: Conditions) -> list[StepKernels]:
    """Every profiled step with its forecast; all of them are predicted at once."""
    profiled = list(steps)
    if not profiled:
        return []
    batches = BatchColumns.of([_batch(step) for step in profiled])
    table = kernel_tables(deployment, [("", batches)], Times(deployment.gpu, conditions))[0]
    experts = any(isinstance(run.layer.mlp, Experts) for run in deployment.model.distinct_layers)
    return [_of(step, _predicted(table, row), experts) for row, step in enumerate(profiled)]


def _of(step: ProfiledStep, predicted_s: dict[str, float], experts: bool) -> StepKernels:
    """``experts``: the activation of a layer of experts is measured with it; those of others are compiled."""
    measured_s: dict[str, float] = {}
    kernels = launches = 0.0
    for name, (count, seconds) in step.events.items():
        if runs_on_gpu(name):
            part = "moe" if experts and "act_and_mul" in name else engine_part(name)
            kernels, measured_s[part] = kernels + count, measured_s.get(part, 0.0) + seconds
        elif is_launch(name):
            launches += count
    return StepKernels(step, measured_s, predicted_s, kernels, launches)


def _batch(step: ProfiledStep) -> Batch:
    each = step.prompt_tokens // step.prompts if step.prompts else 0
    new = (*(step.decodes * (1,)), *(step.prompts * (each,)))
    return Batch(new, (*(step.decodes * (round(step.context),)), *(step.prompts * (round(step.past),))))


def _predicted(table: PassKernels, row: int) -> dict[str, float]:
    parts: dict[str, float] = {}
    for launch, _, call in table.launches(row):
        share = float(table.visible[launch.overlaps][row]) if launch.overlaps else 1.0
        part = _part(launch)
        parts[part] = parts.get(part, 0.0) + float(table.times.times_s[0, call]) * launch.count * share
    throttled_s = float(table.throttled_s[row])
    return parts | ({POWER_LIMIT: throttled_s} if throttled_s else {})


def _part(launch: Launch) -> EnginePart:
    if launch.part == "sampling" and launch.op in _SAMPLING:
        return "sampling"
    return _OF_FAMILY.get(kernel_class(launch.op).family, "elementwise")
