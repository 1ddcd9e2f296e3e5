"""Errors of predictions, in percent of the measured time, by group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

REGIMES = {"under 10 µs": (0.0, 10.0), "10-100 µs": (10.0, 100.0), "over 100 µs": (100.0, np.inf)}


@dataclass(frozen=True)
class Score:
    """One line of the evaluation."""

    protocol: str
    split: str
    left_out: str
    task: str
    predictor: str
    group: str  # what the rows have in common: all, dtype=…, gpu=…, regime=…
    rows: int
    mean: float
    median: float
    p90: float
    bias: float
    coverage: float | None


def scores(
    told: Mapping[str, str],
    columns: Mapping[str, NDArray[Any]],
    results: Mapping[str, NDArray[Any]],
    intervals: bool,
) -> Iterator[Score]:
    """Scores of one predictor's results: over all rows, and by dtype, GPU, regime."""
    truth = np.asarray(columns["latency_us"], dtype=np.float64)
    for group, rows in _groups(columns, truth).items():
        if not rows.any():
            continue
        ratio = results["predicted_us"][rows] / truth[rows]
        error = np.abs(ratio - 1) * 100
        inside = (truth[rows] >= results["low_us"][rows]) & (truth[rows] <= results["high_us"][rows])
        yield Score(
            **told,
            group=group,
            rows=int(rows.sum()),
            mean=float(np.mean(error)),
            median=float(np.median(error)),
            p90=float(np.quantile(error, 0.9)),
            bias=float(np.mean(ratio - 1) * 100),
            coverage=float(np.mean(inside)) if intervals else None,
        )


def _groups(columns: Mapping[str, NDArray[Any]], truth: NDArray[np.float64]) -> dict[str, NDArray[np.bool_]]:
    found = {"all": np.ones(len(truth), dtype=bool)}
    for name in ("dtype", "gpu"):
        words = columns[name].astype(str)
        found |= {f"{name}={word}": words == word for word in np.unique(words)}
    found |= {f"regime={name}": (truth >= low) & (truth < high) for name, (low, high) in REGIMES.items()}
    return found
