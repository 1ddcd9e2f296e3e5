"""What calls keep busy: the seconds that each pipeline works at its full rate, with what power follows beside limits.

Limits bound time; power follows what is done. Padding multiplies zeros, which draws little, so that only useful FLOPs
count; DRAM moves what is expected, not only the least; SMs without a task are dark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.forecast.calls import Call, columns_of
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict import by_configuration
from kernelcast.forecast.predict_table import rotations_of
from kernelcast.forecast.predictor import by_time
from kernelcast.forecast.table import BadRows, grouped
from kernelcast.hardware import Gpu
from kernelcast.machine.analyse import PIPELINES, Analysis, analyse
from kernelcast.ops.work import Array

_TENSOR, _DRAM = PIPELINES.index("tensor"), PIPELINES.index("dram")


@dataclass(frozen=True)
class Activity:
    """Of many calls on one GPU; arrays are (calls,) but ``busy_s``."""

    busy_s: Array  # (pipelines, calls)
    filled: Array  # share of the SMs that have tasks
    launches: Array
    dtype: NDArray[Any]

    @classmethod
    def joined(cls, parts: Sequence[Activity]) -> Activity:
        arrays = ("filled", "launches", "dtype")
        busy_s = np.concatenate([part.busy_s for part in parts], axis=1)
        return cls(busy_s, *(np.concatenate([getattr(part, name) for part in parts]) for name in arrays))

    def take(self, rows: NDArray[Any] | Sequence[int]) -> Activity:
        return Activity(self.busy_s[:, rows], self.filled[rows], self.launches[rows], self.dtype[rows])


def activity(columns: Mapping[str, NDArray[Any]], chip: Gpu, conditions: Conditions) -> Activity:
    """Of the calls of a table, all of which must be good."""
    count = len(columns["op"])
    busy, filled, launches = np.zeros((len(PIPELINES), count)), np.zeros(count), np.zeros(count)
    dtype = np.full(count, "bf16", dtype=object)
    rotations, answering, bad = rotations_of(columns, conditions), conditions.loaded_predictor, BadRows()
    score = by_time(chip)
    for kernel, place, rows, calls in grouped(columns, chip, bad):
        own = rotations.part(rows)
        for members, match in by_configuration(kernel, calls, place, answering):
            some = np.arange(calls.count) if members is None else members
            part = calls if members is None else calls.take(members)
            made = kernel.work(kernel.with_choices(part, match.configuration), place)
            works = [
                analyse(work, place, rotations=mine, score=score)[0]
                for work, mine in zip(made, own.part(some).of_each(made), strict=True)
            ]
            at = rows[some]
            busy[:, at], filled[at], launches[at] = _summed(works, place)
            dtype[at] = part.choices["dtype"]
    if bad.found:
        raise KernelcastError(bad.text())
    return Activity(busy, filled, launches, dtype)


def activity_of(calls: Sequence[Call], chip: Gpu, conditions: Conditions) -> Activity:
    return activity(columns_of(calls), chip, conditions)


def _summed(works: Sequence[Analysis], chip: Gpu) -> tuple[Array, Array, Array]:
    """Of the kernels that a call launches in turn."""
    busy = np.sum([work.limits for work in works], axis=0)
    done, useful = (np.sum([getattr(work, name) for work in works], axis=0) for name in ("flops", "useful_flops"))
    busy[_TENSOR] *= np.where(done > 0, np.minimum(1.0, useful / np.maximum(done, 1.0)), 1.0)
    moved = np.sum([work.dram_bytes + work.refetched_bytes for work in works], axis=0)
    busy[_DRAM] = moved / chip.dram_bytes_per_s
    launches = np.sum([work.launches for work in works], axis=0)
    tasks = np.sum([np.minimum(work.tasks, chip.sm_count) * work.launches for work in works], axis=0)
    return busy, tasks / (np.maximum(launches, 1.0) * chip.sm_count), launches
