"""Which shapes a fit may see: a tenth of all, by a hash of the shape alone, is kept to score shipped weights on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

AT_LEAST = "at_least"  # a column: the time of this row is a lower limit
TEST_FOLD, FOLDS = 0, 10
_NOT_SHAPE = ("latency_us", "rotation", "input_rotation", AT_LEAST)


def shape_fold(columns: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
    """A fold from 0 to 9 by the numbers of a call alone: one shape is in one fold on every GPU and stack."""
    count = len(columns["op"])
    key = np.zeros(count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for name in sorted(columns):
            column = columns[name]
            if column.dtype == object or name in _NOT_SHAPE:
                continue
            cell = np.where(np.isnan(column), 0.0, np.asarray(column, dtype=np.float64) + 1)
            part = cell.view(np.uint64) * np.uint64(
                int.from_bytes(hashlib.md5(name.encode()).digest()[:8], "little") | 1
            )
            key += (part ^ (part >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
        key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((key ^ (key >> np.uint64(31))) % np.uint64(FOLDS)).astype(np.int64)
