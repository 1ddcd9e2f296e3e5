"""Cells of a table as a file has them: empty ones, numbers, words that mean yes or no."""

from __future__ import annotations

from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NUMBERS = {int, float, NoneType}
_WORDS_TRUE, _WORDS_FALSE = ("true", "t", "yes", "1", "1.0"), ("false", "f", "no", "0", "0.0")


def missing(values: NDArray[Any]) -> NDArray[np.bool_]:
    if isinstance(values, np.ma.MaskedArray):
        return np.ma.getmaskarray(values).copy()
    if values.dtype.kind == "f":
        return np.isnan(values)
    if values.dtype.kind != "O":
        return np.zeros(len(values), dtype=bool)
    cells = values.tolist()
    if _NUMBERS.issuperset(map(type, cells)):
        return np.fromiter([cell is None or cell != cell for cell in cells], dtype=bool, count=len(cells))
    return np.fromiter(map(_empty, cells), dtype=bool, count=len(cells))


def _empty(value: Any) -> bool:
    """None, NaN or blank text."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and value != value)


def numbers_in(part: NDArray[Any], empty: NDArray[np.bool_], *, flag: bool) -> NDArray[np.float64]:
    """Numbers as they are, words as numbers where they are some; NaN where not."""
    if isinstance(part, np.ma.MaskedArray):
        part = part.filled(0)
    if part.dtype.kind in "biuf":
        return part.astype(np.float64)
    values = np.full(len(part), np.nan)
    cells = part[~empty].tolist()
    if {int, float}.issuperset(map(type, cells)):
        values[~empty] = cells
        return values
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


def plain(value: Any) -> Any:
    """One cell as a plain value: None where it is empty, a whole number as such, a list as a tuple."""
    value = value.tolist() if isinstance(value, np.generic | np.ndarray) else value
    if value is np.ma.masked or _empty(value):
        return None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return tuple(value) if isinstance(value, list) else value
