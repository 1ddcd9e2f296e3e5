"""How far predictions are from what was measured: the one place where errors are counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Times = NDArray[Any] | Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Errors:
    """In percent of the measured time. ``mean``, ``median`` and ``p90`` are of its size; above 0 is too slow.

    ``bias``: the mean error, ``median_bias``: the median one. ``coverage``: share of the times inside the interval.
    """

    rows: int
    mean: float
    median: float
    p90: float
    bias: float
    median_bias: float | None = None
    coverage: float | None = None

    @classmethod
    def of(
        cls, measured: Times, predicted: Times, low: Times | None = None, high: Times | None = None, **told: Any
    ) -> Self:
        """``told``: the other fields of a class that says whose errors these are."""
        truth = np.asarray(measured, dtype=np.float64)
        error = (np.asarray(predicted) / truth - 1) * 100
        size = np.abs(error)
        inside = None if low is None or high is None else (truth >= low) & (truth <= high)
        return cls(
            rows=len(truth),
            mean=float(np.mean(size)),
            median=float(np.median(size)),
            p90=float(np.quantile(size, 0.9)),
            bias=float(np.mean(error)),
            median_bias=float(np.median(error)),
            coverage=None if inside is None else float(np.mean(inside)),
            **told,
        )
