"""Which calls to measure: for each family realistic and space-filling ones, in an order that any prefix is useful.

Choosing needs no GPU and no PyTorch. The same seed gives the same calls.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.collect.calibrate import Selection, next_calls
from kernelcast.collect.families import FAMILIES, SHARES
from kernelcast.collect.sampling import Draw
from kernelcast.errors import KernelcastError, unknown
from kernelcast.forecast import Calibration
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict import predict_many
from kernelcast.hardware import Gpu
from kernelcast.ops import Kernel, kernel, parameters_of

LONGEST_S = 8e-3  # longer calls add little information for their time
_TRIES = 20  # draws for one call, before a family is taken to be exhausted


@dataclass(frozen=True)
class PlannedCall:
    """A call to measure. ``warm``: with operands in L2 from the same call, rather than from DRAM."""

    family: str
    call: Kernel
    warm: bool = False

    @property
    def parameters(self) -> dict[str, Any]:
        """The given parameters, op first."""
        values = {name: getattr(self.call, name) for name in parameters_of(type(self.call))}
        return {"op": self.call.op, **{name: value for name, value in values.items() if value is not None}}

    @property
    def key(self) -> str:
        """The key of the call in result files."""
        identity = json.dumps([self.parameters, self.warm], sort_keys=True, default=str)
        return hashlib.sha256(identity.encode()).hexdigest()[:20]

    @property
    def record(self) -> dict[str, Any]:
        """Its fields in a line of results."""
        return {"key": self.key, "family": self.family, "warm": self.warm, "call": self.parameters}


def choose(
    target: Gpu,
    calls: int,
    *,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    warm_share: float = 0.0,
    seed: int = 0,
) -> list[PlannedCall]:
    """``calls`` different calls for this GPU, families mixed throughout by their shares."""
    for name in (*only, *without):
        if name not in FAMILIES:
            raise unknown("family", name, FAMILIES)
    names = [name for name in FAMILIES if (not only or name in only) and name not in without]
    if not names:
        raise KernelcastError("no family is left to measure")
    total = sum(SHARES[name] for name in names)
    ordered = _mixed([_drawn(name, target, max(1, round(calls * SHARES[name] / total)), seed) for name in names])
    rng = np.random.default_rng(seed)
    again = [replace(planned, warm=True) for planned in ordered if rng.random() < warm_share]
    return ordered[:calls] + again


def most_informative(
    candidates: Sequence[PlannedCall], target: Gpu, count: int, calibration: Calibration | None = None
) -> tuple[list[PlannedCall], Selection]:
    """The ``count`` most informative candidates, the best first, given the calls of an existing
    calibration; and the error that is expected before and after they are measured."""
    names = list(dict.fromkeys(name for planned in candidates for name in planned.parameters))
    columns = {name: _column([planned.parameters.get(name) for planned in candidates]) for name in names}
    selection = next_calls(columns, count, target, calibration=calibration)
    return [candidates[at] for at in selection.rows], selection


def _column(cells: Sequence[Any]) -> NDArray[Any]:
    """Cells of a table: numbers as numbers, empty cells as None."""
    if all(cell is None or (isinstance(cell, int | float) and not isinstance(cell, bool)) for cell in cells):
        return np.array([np.nan if cell is None else cell for cell in cells], dtype=np.float64)
    texts = [cell if cell is None or isinstance(cell, str) else json.dumps(cell) for cell in cells]
    column = np.empty(len(cells), dtype=object)
    column[:] = texts
    return column


def _mixed(families: Sequence[Sequence[PlannedCall]]) -> list[PlannedCall]:
    """Interleave the families evenly, each in its order, so that a prefix has every family by its share."""
    placed = [((at + 0.5) / len(each), planned) for each in families for at, planned in enumerate(each)]
    return [planned for _, planned in sorted(placed, key=lambda pair: (pair[0], pair[1].family))]


def _drawn(name: str, target: Gpu, count: int, seed: int) -> list[PlannedCall]:
    """Different calls of one family that this GPU can run, in random order."""
    draw = Draw(int(hashlib.sha256(f"{seed} {name}".encode()).hexdigest()[:8], 16))
    calls: dict[str, PlannedCall] = {}
    misses = 0
    while len(calls) < count and misses < _TRIES * count:
        batch = []
        for _ in range(min(256, count)):
            try:
                batch.append(PlannedCall(name, kernel(**FAMILIES[name](draw))))
            except KernelcastError:
                misses += 1  # inconsistent sizes
        fits = _runnable([planned.call for planned in batch], target)
        for planned, good in zip(batch, fits, strict=True):
            if good and planned.key not in calls:
                calls[planned.key] = planned
            else:
                misses += 1
    return list(calls.values())[:count]


def _runnable(calls: Sequence[Kernel], target: Gpu) -> list[bool]:
    """Whether each call fits this GPU's memory, formats and the time limit of a call."""
    conditions = Conditions(predictor="generic")
    try:
        return [forecast.time_s <= LONGEST_S for forecast in predict_many(calls, target, conditions)]
    except KernelcastError:  # of one of them
        if len(calls) == 1:
            return [False]
        half = len(calls) // 2
        return _runnable(calls[:half], target) + _runnable(calls[half:], target)
