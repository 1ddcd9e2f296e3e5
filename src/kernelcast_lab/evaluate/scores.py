"""Errors of predictions by group, and the file that keeps them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kernelcast.files import complete

Columns = Mapping[str, NDArray[Any]]
REGIMES = {"under 10 µs": (0.0, 10.0), "10-100 µs": (10.0, 100.0), "over 100 µs": (100.0, np.inf)}
Times = NDArray[Any] | Sequence[float]


@dataclass(frozen=True, kw_only=True)
class ErrorSummary:
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
        cls, measured: Times, predicted: Times, low: Times | None = None, high: Times | None = None, **values: Any
    ) -> Self:
        """``values``: the further fields of a subclass, which say whose errors these are."""
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
            **values,
        )


@dataclass(frozen=True, kw_only=True)
class Score(ErrorSummary):
    """One line of the evaluation."""

    protocol: str
    split: str
    left_out: str
    task: str
    predictor: str
    group: str  # what the rows have in common: all, dtype=…, gpu=…, op=…, regime=…


def scores(labels: Mapping[str, Any], columns: Columns, results: Columns, intervals: bool) -> Iterator[Score]:
    """Scores of one predictor's results: over all rows, and by dtype, GPU, regime, and op where there are several."""
    truth = np.asarray(columns["latency_us"], dtype=np.float64)
    names = ("predicted_us", "low_us", "high_us") if intervals else ("predicted_us",)
    for group, rows in _groups(columns, truth).items():
        if rows.any():
            yield Score.of(truth[rows], *(results[name][rows] for name in names), **labels, group=group)


def _groups(columns: Columns, truth: NDArray[np.float64]) -> dict[str, NDArray[np.bool_]]:
    result = {"all": np.ones(len(truth), dtype=bool)}
    for name in ("dtype", "gpu", *(["op"] if len(set(columns["op"])) > 1 else [])):
        values = columns[name].astype(str)
        result |= {f"{name}={value}": values == value for value in np.unique(values)}
    result |= {f"regime={name}": (truth >= low) & (truth < high) for name, (low, high) in REGIMES.items()}
    return result


def read_kept(path: Path, default: Any) -> Any:
    return json.loads(path.read_text()) if path.exists() else default


def write_kept(path: Path, value: Any) -> None:
    """A file is whole or not there: a run may be interrupted at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with complete(path) as part:
        part.write_text(json.dumps(value, indent=0))
