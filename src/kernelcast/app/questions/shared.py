"""Words that several questions share, and what they mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kernelcast.app.questions.words import flag
from kernelcast.errors import KernelcastError, unknown
from kernelcast.forecast import PREDICTORS, Calibration, learned_from
from kernelcast.forecast.conditions import Conditions
from kernelcast.hardware import Gpu, changed, gpu
from kernelcast.machine.analyse import PIPELINES

if TYPE_CHECKING:
    from kernelcast.models.architecture import Architecture

# How many sets of weights, and of activations, pass between two uses of one
ROTATIONS = {"model": (math.inf, 1.0), "cold": (math.inf, math.inf), "warm": (1.0, 1.0)}

ModelName = Annotated[
    Any,
    flag(metavar="MODEL", help="a name of `kernelcast models`, or a config.json", typed=str,
         python="str | Path | Architecture"),
]  # fmt: skip
GpuName = Annotated[
    str | Path | Gpu | None,
    flag("--gpu", metavar="ID", help="GPU: an id or name from `kernelcast gpus`, or a TOML file (required)",
         typed=str | None),
]  # fmt: skip
Changes = Annotated[
    Sequence[str] | None,
    flag("--set", metavar="FIELD=VALUE", help="what if: a GPU's field, or FIELD*FACTOR; may be repeated",
         typed=list[str] | None),
]  # fmt: skip
Without = Annotated[
    Sequence[str] | None,
    flag("--without", metavar="LIMIT", help=f"leave a limit out: {', '.join(PIPELINES)}; may be repeated",
         typed=list[str] | None),
]  # fmt: skip
Cache = Annotated[
    str,
    flag(
        "--cache",
        metavar="model|cold|warm",
        help="model: weights from DRAM, activations as the kernel before left them; cold: all from DRAM; warm: L2 "
        "holds what the same call left",
    ),
]
PredictorName = Annotated[
    str, flag("--predictor", metavar="NAME", help=f"what turns limits into times: {', '.join(PREDICTORS)}")
]
CalibrationFile = Annotated[
    Path | Calibration | None,
    flag("--calibration", metavar="FILE", help="measurements of this GPU, from `kernelcast calibrate`",
         typed=Path | None),
]  # fmt: skip
WeightsFolder = Annotated[
    Path | None,
    flag(
        "--weights",
        metavar="DIR",
        help="fitted weights, from `kernelcast fit`, instead of those that ship; what it lacks rests on physics alone",
    ),
]
PowerCap = Annotated[
    float | None, flag("--power-cap", metavar="WATTS", help="a lower power limit than the board's, a GPU")
]
Tp = Annotated[int, flag("--tp", help="GPUs that cut every layer")]
Pp = Annotated[int, flag("--pp", help="pipeline stages")]
SequenceParallel = Annotated[bool, flag("--sequence-parallel", help="keep activations between cut layers in parts")]
Seed = Annotated[int, flag("--seed", help="of all that is random")]


def chosen_model(name: str | Path | Architecture) -> Architecture:
    """The model that is named."""
    from kernelcast import models
    from kernelcast.models.architecture import Architecture

    return name if isinstance(name, Architecture) else models.model(name)


def chosen_gpu(
    name: str | Path | Gpu | None, changes: Sequence[str] | None = None, power_cap: float | None = None
) -> Gpu:
    """The GPU that is named, with its changes."""
    if name is None:
        raise KernelcastError("which GPU? give --gpu, as in --gpu h200_sxm")
    found = changed(gpu(name), changes or ())
    if power_cap is None:
        return found
    from kernelcast.energy.power import with_cap

    return with_cap(found, power_cap)


def chosen_conditions(
    without: Sequence[str] | None = None,
    cache: str = "model",
    predictor: str = "learned",
    calibration: Path | Calibration | None = None,
    weights: Path | None = None,
) -> Conditions:
    """What holds around a call."""
    names = [name for text in without or () for name in text.split(",")]
    if weights is not None and (predictor != "learned" or names):
        raise KernelcastError("--weights are those of the predictor learned: leave out --predictor and --without")
    if cache not in ROTATIONS:
        raise unknown("cache", cache, ROTATIONS)
    return Conditions(
        rotation=ROTATIONS[cache][0],
        input_rotation=ROTATIONS[cache][1],
        without=tuple(dict.fromkeys(names)),
        predictor=predictor if weights is None else learned_from(weights),
        calibration=calibration,
    )
