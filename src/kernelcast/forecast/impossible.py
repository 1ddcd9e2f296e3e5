"""Measurements that cannot be: faster than the hardware allows. Mostly of another unit, GPU or shape than is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.forecast.call import ROTATIONS
from kernelcast.forecast.call_table import BadRows
from kernelcast.forecast.predict import Conditions
from kernelcast.forecast.predict_table import predict_columns
from kernelcast.hardware import Gpu

FACTOR = 0.5  # bounds are good to a few per cent; a factor of two is a wrong shape or a broken timer
_WARM = Conditions(rotation=1, predictor="generic")  # the most that L2 can do: no L2 effect counts as impossible
_UNITS = {"milliseconds": 1e3, "seconds": 1e6}
_WITHIN = 30.0  # kernels take 1 to 30 times their bound: a unit explains a time that is right but for its factor


def add_too_fast(columns: Mapping[str, NDArray[Any]], latency_us: NDArray[np.float64], chip: Gpu, bad: BadRows) -> None:
    """Name the rows whose time is below half of their bound with all of L2 warm, each with the likely reason."""
    plain = {name: column for name, column in columns.items() if name not in ROTATIONS}
    results, _ = predict_columns(plain, chip, _WARM)
    with np.errstate(invalid="ignore"):  # rows that are no calls have no bound
        found = latency_us < FACTOR * results["bound_us"]
    most = bool(found.mean() > 0.5)
    for row in np.flatnonzero(found):
        bad.add([int(row)], _message(float(latency_us[row]), float(results["bound_us"][row]), most))


def _message(latency_us: float, bound_us: float, most: bool) -> str:
    """One text for rows of one reason, so that they are told of together."""
    for unit, factor in _UNITS.items():
        if most and bound_us <= latency_us * factor <= bound_us * _WITHIN:
            return f"measured in {unit}? times are microseconds, and these are below what the hardware allows"
    return "measured time is less than half of what the hardware allows: another GPU, shape or number format?"
