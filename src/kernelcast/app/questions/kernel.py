"""Kernel calls: one, or those of a table; their times, what limits them, and what the best kernel would reach."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from kernelcast.app.questions import shared
from kernelcast.app.questions.parameters import argument, option
from kernelcast.energy.power import lasting
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict import Prediction, predict
from kernelcast.hardware import Gpu
from kernelcast.ops import kernel

if TYPE_CHECKING:
    from kernelcast.energy.power import Energy


@dataclass(frozen=True)
class CallConditions(shared.PredictorParameters):
    """The conditions of a kernel call."""

    set: shared.Changes = None
    without: shared.Without = None
    cache: shared.Cache = "model"

    @cached_property
    def conditions(self) -> Conditions:
        """Made once: a calibration of other weights warns when it is read."""
        return shared.resolve_conditions(self.without, self.cache, self.predictor, self.calibration, self.weights)


@dataclass(frozen=True, kw_only=True)
class KernelQuestion(CallConditions):
    """A kernel call on a GPU."""

    command: ClassVar[str] = "kernel"

    op: Annotated[str, argument("OP", "an op of `kernelcast ops`", values=shared.op_names)]
    parameters: Annotated[Mapping[str, Any], argument("PARAMETERS", "of the op")] = field(default_factory=dict)
    gpu: shared.GpuName = None
    power_cap: shared.PowerCap = None

    @cached_property
    def resolved_gpu(self) -> Gpu:
        return shared.resolve_gpu(self.gpu, self.set, self.power_cap)

    def answer(self) -> tuple[Prediction, Energy | None]:
        """The call's time, and its energy where the GPU's power is known."""
        gpu, conditions = self.resolved_gpu, self.conditions
        return lasting(predict(kernel(self.op, **self.parameters), gpu, conditions), gpu, conditions)


@dataclass(frozen=True, kw_only=True)
class KernelsQuestion(CallConditions):
    """Every call of a table."""

    command: ClassVar[str] = "kernels"

    table: Annotated[Path, argument("TABLE", "a .csv, .parquet or .jsonl file with a column op and its parameters")]
    gpu: Annotated[
        str | None,
        option(metavar="ID", help="GPU of every row; default: the table's gpu column", values=shared.gpu_names),
    ] = None
    output: Annotated[
        Path | None, option("-o", metavar="FILE", help="where to write the table with the results (same endings)")
    ] = None
    skip_bad: shared.SkipBad = False


def op_options(parameters: Mapping[str, Any]) -> list[str]:
    """Parameters of an op as options."""
    options = []
    for name, value in parameters.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            options.append(f"--{option}" if value else f"--no-{option}")
        else:
            text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            options.append(f"--{option} {shlex.quote(text)}")
    return options
