"""Cells of a table as a file has them: empty ones, numbers, words that mean yes or no."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_WORDS_TRUE, _WORDS_FALSE = ("true", "t", "yes", "1", "1.0"), ("false", "f", "no", "0", "0.0")


def missing(values: NDArray[Any]) -> NDArray[np.bool_]:
    if isinstance(values, np.ma.MaskedArray):
        return np.ma.getmaskarray(values).copy()
    if values.dtype.kind == "f":
        return np.isnan(values)
    if values.dtype.kind != "O":
        return np.zeros(len(values), dtype=bool)
    blank = (v is None or (isinstance(v, float) and v != v) or (isinstance(v, str) and not v.strip()) for v in values)
    return np.fromiter(blank, dtype=bool, count=len(values))


def numbers_in(part: NDArray[Any], empty: NDArray[np.bool_], *, flag: bool) -> NDArray[np.float64]:
    """Numbers as they are, words as numbers where they are some; NaN where not."""
    if isinstance(part, np.ma.MaskedArray):
        part = part.filled(0)
    if part.dtype.kind in "biuf":
        return part.astype(np.float64)
    values = np.full(len(part), np.nan)
    for at in np.flatnonzero(~empty):
        values[at] = _cell(part[at], flag=flag)
    return values


def _cell(value: Any, *, flag: bool) -> float:
    if flag and isinstance(value, str):
        word = value.strip().lower()
        return 1.0 if word in _WORDS_TRUE else 0.0 if word in _WORDS_FALSE else np.nan
    if isinstance(value, bool) and not flag:
        return np.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return np.nan
