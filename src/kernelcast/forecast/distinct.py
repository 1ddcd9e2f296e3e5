"""Calls that stand in a table more than once: each is predicted once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kernelcast.ops.base import Calls
from kernelcast.ops.work import Number

Rows = NDArray[np.intp]
_WORTH = 0.9  # of the calls are different: then finding the others costs more than they do
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, its bits well mixed (Knuth's multiplicative hashing)


def different(calls: Calls, beside: Sequence[Number] = ()) -> tuple[Rows | None, Rows]:
    """One row of each different call (None: of all), and for every call its place among them.

    ``beside``: what else must be the same.
    """
    everyone = np.arange(calls.count)
    if calls.count < 2 or calls.lists:  # batches of lists of lengths are seldom the same
        return None, everyone
    given = [*calls.numbers.values(), *(column for column in beside if isinstance(column, np.ndarray))]
    bits = [np.ascontiguousarray(column, dtype=np.float64).view(np.uint64) for column in given]  # NaN is like NaN
    varying = [column for column in bits if (column != column[0]).any()]
    code = np.zeros(calls.count, dtype=np.uint64)
    for column in varying:
        code = (code ^ column) * _FACTOR
        code ^= code >> np.uint64(32)
    ordered = np.sort(code)  # a tenth of the price of sorting rows
    if np.count_nonzero(ordered[1:] != ordered[:-1]) + 1 > _WORTH * calls.count:
        return None, everyone
    _, first, alike = np.unique(code, return_index=True, return_inverse=True)
    if any((column != column[first][alike]).any() for column in varying):  # two calls have one code: never seen
        return None, everyone
    return first, alike
