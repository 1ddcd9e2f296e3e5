"""Which shapes a fit may see: a tenth of all, by a hash of the shape alone, is kept to score shipped weights on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

AT_LEAST = "at_least"  # a column: the time of this row is a lower limit
TEST_FOLD, FOLDS = 0, 10
_NOT_SHAPE = ("latency_us", "rotation", "input_rotation", AT_LEAST)
_LENGTHS = ("q_lens", "kv_lens")  # of ragged batches: a shape too, though not one number


def shape_fold(columns: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
    """A fold from 0 to 9 by the numbers of a call alone: one shape is in one fold on every GPU and stack."""
    count = len(columns["op"])
    key = np.zeros(count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for name in sorted(columns):
            column = columns[name]
            if name in _LENGTHS:
                cell = _of_lists(column)
            elif column.dtype == object or name in _NOT_SHAPE:
                continue
            else:
                cell = np.where(np.isnan(column), 0.0, np.asarray(column, dtype=np.float64) + 1).view(np.uint64)
            part = cell * np.uint64(_text_hash(name) | 1)
            key += (part ^ (part >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
        key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((key ^ (key >> np.uint64(31))) % np.uint64(FOLDS)).astype(np.int64)


def _of_lists(column: NDArray[Any]) -> NDArray[np.uint64]:
    """A number for each list, by its members alone (a table has lists as JSON); 0 where there is none."""
    result = np.zeros(len(column), dtype=np.uint64)
    for row, cell in enumerate(column):
        if cell is not None and cell == cell:
            members = json.loads(cell) if isinstance(cell, str) else cell
            result[row] = _text_hash(",".join(str(int(member)) for member in members))
    return result


def _text_hash(text: str) -> int:
    return int.from_bytes(hashlib.md5(text.encode()).digest()[:8], "little")
