"""One kernel call: its time, what limits it, and what the best kernel would reach."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from kernelcast.app.questions.shared import (
    Cache,
    CalibrationFile,
    Changes,
    GpuName,
    PowerCap,
    PredictorName,
    WeightsFolder,
    Without,
    chosen_conditions,
    chosen_gpu,
)
from kernelcast.app.questions.words import flag
from kernelcast.energy.power import lasting
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict import Prediction, predict
from kernelcast.hardware import Gpu
from kernelcast.ops import kernel

if TYPE_CHECKING:
    from kernelcast.energy.power import Energy


@dataclass(frozen=True, kw_only=True)
class KernelQuestion:
    """A call on a GPU, and what holds around it."""

    command: ClassVar[str] = "kernel"

    op: Annotated[str, flag(metavar="OP", help="an op of `kernelcast ops`")]
    parameters: Annotated[Mapping[str, Any], flag(metavar="PARAMETERS", help="of the op")] = field(default_factory=dict)
    gpu: GpuName = None
    set: Changes = None
    power_cap: PowerCap = None
    without: Without = None
    cache: Cache = "model"
    predictor: PredictorName = "learned"
    calibration: CalibrationFile = None
    weights: WeightsFolder = None

    @cached_property
    def chip(self) -> Gpu:
        return chosen_gpu(self.gpu, self.set, self.power_cap)

    @cached_property
    def conditions(self) -> Conditions:
        """Made once: a calibration of other weights warns when it is read."""
        return chosen_conditions(self.without, self.cache, self.predictor, self.calibration, self.weights)

    def answer(self) -> tuple[Prediction, Energy | None]:
        """The call's time, and what it draws where that is known."""
        chip, conditions = self.chip, self.conditions
        return lasting(predict(kernel(self.op, **self.parameters), chip, conditions), chip, conditions)


def typed_parameters(parameters: Mapping[str, Any]) -> list[str]:
    """Parameters of an op as they are typed."""
    options = []
    for name, value in parameters.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            options.append(f"--{option}" if value else f"--no-{option}")
        else:
            text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            options.append(f"--{option} {shlex.quote(text)}")
    return options
