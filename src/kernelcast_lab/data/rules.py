"""Why a measured row is left out: each rule has a name and a reason, and every row it takes is counted."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict_table import FACTOR, predict_columns
from kernelcast_lab.data.measurements import Columns

RULES: dict[str, str] = {
    "no_kernel_family": "measures something that no kernel family computes",
    "unknown_gpu": "the GPU is not in the catalogue",
    "backfill": "shapes that only an older version of the stack measured; one stack a GPU",
    "older_version": "measured again, in full, by a newer version of the same stack",
    "suspect": "marked as impossible or as a bug of the collector by those who cleaned the data",
    "eager": "timed without a CUDA graph: Python's launch time is inside (floors of 40 to 280 us)",
    "difference_of_timings": "the difference of two timings, not a time",
    "not_one_kernel": "a chain of kernels of which the op is only one",
    "part_of_op": "leaves out a part of what the op does, or of what it reads and writes",
    "timed_alone": "the launch is inside: twice the time of the same kernel in a graph",
    "disturbed": "repeats lie up to three times apart, and another GPU's same kernel takes a fifth",
    "older_kernels": "of a release whose kernels were replaced since",
    "reference_code": "plain code of the engine that stands in for a kernel that it lacks there",
    "prefill_of_one": "one new token by the kernels of a prefill, where an engine decodes",
    "degenerate_values": "all values alike, the worst case of a kernel whose time depends on them",
    "other_shape": "the collector ran another shape than it wrote down",
    "unknown_distribution": "a routing of tokens to experts that the moe op does not describe",
    "between_nodes": "crosses nodes over a network that the source does not name",
    "unclear_fabric": "uses several types of links, or is far slower than the one that is named",
    "copied": "the same numbers stand under another GPU's name",
    "unknown_dtype": "a number format that the op does not have",
    "bad_latency": "the time is missing, zero, negative or not finite",
    "duplicate": "the same call of the same campaign and kernel again; the median is kept",
    "missing_parameter": "a parameter that the op needs is not given",
    "out_of_range": "a parameter is outside the range of the op",
    "conflict": "parameters contradict each other",
    "not_on_gpu": "the GPU has no arithmetic of this format",
    "too_large": "does not fit into the GPU's memory by our count",
    "faster_than_physics": "less than half of the bound, with all of L2 warm",
}


def rule_of(message: str) -> str:
    """The rule that a message of the table reader falls under."""
    if " GiB, but " in message:
        return "too_large"
    if " matrix arithmetic" in message:
        return "not_on_gpu"
    if " needs " in message:
        return "missing_parameter"
    if message.startswith("unknown dtype"):
        return "unknown_dtype"
    return "out_of_range" if " must be " in message else "conflict"


def ordered(counts: Mapping[str, int]) -> dict[str, int]:
    return {rule: int(counts[rule]) for rule in RULES if counts.get(rule)}


# ---- Rows that physics and the table reader allow, and a name for a set of rows.


_WARM = Conditions(rotation=1)  # the most that L2 can do: no L2 effect counts as impossible


def checked(columns: Columns) -> tuple[Columns, dict[str, int]]:
    """The rows that the table reader takes and that physics allows; the others counted by rule."""
    results, bad = predict_columns(columns, None, _WARM)
    keep = np.ones(len(columns["op"]), dtype=bool)
    keep[list(bad.messages)] = False
    counts = Counter(rule_of(message) for message in bad.messages.values())
    too_fast = keep & (columns["latency_us"] < FACTOR * results["bound_us"])
    if too_fast.any():
        counts["faster_than_physics"] = int(too_fast.sum())
        keep &= ~too_fast
    if keep.all():
        return columns, {}
    return {name: column[keep] for name, column in columns.items()}, ordered(counts)


def data_hash(columns: Mapping[str, NDArray[Any]]) -> str:
    """A name for a set of rows: the same for any order of rows or columns; cells not given do not count."""
    count = len(next(iter(columns.values()))) if columns else 0
    rows = np.zeros(count, dtype=np.uint64)
    for name in sorted(columns):
        seed = _text_hash(name)
        rows += _mixed(_cell_hashes(columns[name]), seed)
    digest = hashlib.sha256(np.sort(_mixed(rows, np.uint64(count))).tobytes())
    return digest.hexdigest()[:32]


def _cell_hashes(column: NDArray[Any]) -> NDArray[np.uint64]:
    """0 where not given; numbers by their value as float64, text by its hash."""
    if column.dtype == object:
        codes: dict[Any, int] = {}
        index = np.fromiter((codes.setdefault(v, len(codes)) for v in column), dtype=np.intp, count=len(column))
        hashes = [np.uint64(0) if value is None else _text_hash(str(value)) for value in codes]
        return np.array(hashes, dtype=np.uint64)[index] if len(column) else np.empty(0, dtype=np.uint64)
    values = column.filled(np.nan) if isinstance(column, np.ma.MaskedArray) else column
    numbers = np.ascontiguousarray(values, dtype=np.float64) + 0.0  # -0 is 0
    return np.where(np.isnan(numbers), np.uint64(0), numbers.view(np.uint64) | np.uint64(1))


def _text_hash(value: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(value.encode(), digest_size=8).digest(), "little") | 1)


def _mixed(values: NDArray[np.uint64], seed: np.uint64) -> NDArray[np.uint64]:
    """SplitMix64 of (value, seed); a cell that was not given stays 0."""
    with np.errstate(over="ignore"):
        z = values * np.uint64(0x9E3779B97F4A7C15) + seed
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.where(values == 0, np.uint64(0), z ^ (z >> np.uint64(31)))
