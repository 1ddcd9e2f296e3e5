"""Options that several commands share, and what they mean."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kernelcast.efficiency import PREDICTORS, learned_from
from kernelcast.errors import KernelcastError, unknown
from kernelcast.hardware import Gpu, changed, gpu
from kernelcast.machine.analyse import PIPELINES
from kernelcast.predict import Conditions

# How many sets of weights, and of activations, pass between two uses of one
ROTATIONS = {"model": (math.inf, 1.0), "cold": (math.inf, math.inf), "warm": (1.0, 1.0)}

GpuName = Annotated[
    str | None,
    typer.Option("--gpu", metavar="ID", help="GPU: an id or name from `kernelcast gpus`, or a TOML file (required)"),
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="what if: a GPU's field, or FIELD*FACTOR; may be repeated"),
]
Without = Annotated[
    list[str] | None,
    typer.Option("--without", metavar="LIMIT", help=f"leave a limit out: {', '.join(PIPELINES)}; may be repeated"),
]
Cache = Annotated[
    str,
    typer.Option(
        "--cache",
        metavar="model|cold|warm",
        help="model: weights from DRAM, activations as the kernel before left them; cold: all from DRAM; warm: L2 "
        "holds what the same call left",
    ),
]
TimelineFile = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE.json", help="timeline of one step, for Perfetto")
]
PredictorName = Annotated[
    str,
    typer.Option("--predictor", metavar="NAME", help=f"what turns limits into times: {', '.join(PREDICTORS)}"),
]
CalibrationFile = Annotated[
    Path | None,
    typer.Option("--calibration", metavar="FILE", help="measurements of this GPU, from `kernelcast calibrate`"),
]
WeightsFolder = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        metavar="DIR",
        help="fitted weights, from `kernelcast fit`, instead of those that ship; what it lacks rests on physics alone",
    ),
]
PowerCap = Annotated[
    float | None, typer.Option("--power-cap", metavar="WATTS", help="a lower power limit than the board's, a GPU")
]
Tp = Annotated[int, typer.Option("--tp", help="GPUs that cut every layer")]
Pp = Annotated[int, typer.Option("--pp", help="pipeline stages")]
SequenceParallel = Annotated[
    bool, typer.Option("--sequence-parallel", help="keep activations between cut layers in parts")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


def parse_number(text: str) -> Any:
    """An int, a float, or the text itself when it is neither."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def chosen_gpu(name: str, changes: Sequence[str] | None, power_cap: float | None = None) -> Gpu:
    found = changed(gpu(name), changes or ())
    if power_cap is None:
        return found
    from kernelcast.timeline.power import with_cap

    return with_cap(found, power_cap)


def chosen_conditions(
    without: Sequence[str] | None,
    cache: str,
    predictor: str = "learned",
    calibration: Path | None = None,
    weights: Path | None = None,
) -> Conditions:
    names = [name for text in without or () for name in text.split(",")]
    if weights is not None and (predictor != "learned" or names):
        raise KernelcastError("--weights are those of the predictor learned: leave out --predictor and --without")
    if cache not in ROTATIONS:
        raise unknown("cache", cache, ROTATIONS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        found = Conditions(
            rotation=ROTATIONS[cache][0],
            input_rotation=ROTATIONS[cache][1],
            without=tuple(dict.fromkeys(names)),
            predictor=predictor if weights is None else learned_from(weights),
            calibration=calibration,
        )
    for warning in caught:
        print("kernelcast: warning:", warning.message, file=sys.stderr)
    return found
