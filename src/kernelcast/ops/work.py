"""Work: the demand of one kernel on a GPU, before any clock is known.

Arrays broadcast to (candidates, calls): axis 0 are the tile configurations that the kernel's library may select, axis 1
the calls of a table. A call that launches several kernels has one Work for each (``Works``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Number = Array | float

# waves: a freed SM takes the next task, be it a CTA in grid order or a tile of a persistent CTA.
# longest_first: a heap hands the longest task to the least loaded CTA.
Schedule = Literal["waves", "longest_first"]


@dataclass(frozen=True, kw_only=True)
class Work:
    """One kernel launch (or ``launches`` alike) as tasks with demand on each pipeline."""

    # the tasks: the unit of work of a CTA
    tasks: Number
    schedule: Schedule = "waves"
    longest: Number = 1.0  # longest task over the mean task
    shortest: Number = 1.0
    longest_count: Number = 1.0  # how many tasks are that long (longest_first)
    # demand of the mean task on the pipelines of its SM
    tensor_flops: Number = 0.0
    tensor_dtype: str = "bf16"
    fma_flops: Number = 0.0
    fma_dtype: str = "fp32"
    xu_ops: Number = 0.0
    smem_bytes: Number = 0.0
    l2_bytes: Number = 0.0  # read from and written to L2
    multicast_bytes: Number = 0.0  # arrive at the SM too, but were read from L2 for a neighbour (TMA multicast)
    other_warp_instructions: Number = 0.0  # beside those that the demands above imply
    # demand of the whole kernel on what all SMs share
    streamed_bytes: Number = 0.0  # weights, KV cache: come from DRAM unless the same call just ran
    activation_bytes: Number = 0.0  # made or used by the neighbour kernels: may stay in L2
    refetched_bytes: Number = 0.0  # beyond the compulsory bytes, when L2 cannot hold what is reused
    link_bytes: Number = 0.0  # sent by each GPU
    link_steps: Number = 0.0  # dependent messages
    link: str = ""  # fabric, "" = the GPU's
    # the CTA, for occupancy
    threads: Number = 128.0
    registers_per_thread: Number = 64.0
    smem_bytes_per_cta: Number = 0.0
    serial_steps: Number = 1.0  # dependent load-compute steps in the longest task
    mean_steps: Number | None = None  # and in the mean task; None: all tasks have as many
    step_cycles: Number = 0.0  # latency of such a step, where the kernel does not hide it behind the next
    task_cycles: Number = 0.0  # latency of a task beside its steps: set-up, first loads, write-back
    launches: Number = 1.0  # 0 where this kernel does not run
    useful_flops: Number = 0.0  # whole kernel, without padding: never above tasks x FLOPs of the candidate
    tile: Mapping[str, Number] = field(default_factory=dict)  # what to call this candidate

    @property
    def shape(self) -> tuple[int, int]:
        """(candidates, calls)"""
        arrays = [value for value in (*vars(self).values(), *self.tile.values()) if isinstance(value, np.ndarray)]
        candidates = max((array.shape[0] for array in arrays if array.ndim == 2), default=1)
        return candidates, max((array.shape[-1] for array in arrays if array.ndim), default=1)

    def where(self, runs: NDArray[np.bool_]) -> Work:
        """The same kernel, launched by these calls only."""
        masked: dict[str, Any] = {name: getattr(self, name) * runs.astype(np.float64) for name in _TOTALS}
        return replace(self, **masked)

    def demand(self, candidate: NDArray[np.intp]) -> Work:
        """The demand of one candidate of each call, as far as limits need it."""
        taken: dict[str, Any] = {name: chosen(getattr(self, name), candidate) for name in _DEMAND}
        return Work(**taken)


_TOTALS = ("tasks", "streamed_bytes", "activation_bytes", "refetched_bytes", "launches", "useful_flops")
_DEMAND = (
    "tasks", "tensor_flops", "tensor_dtype", "fma_flops", "fma_dtype", "xu_ops", "smem_bytes", "l2_bytes",
    "multicast_bytes", "other_warp_instructions", "streamed_bytes", "activation_bytes", "link_bytes", "link_steps",
    "link", "launches",
)  # fmt: skip
Works = tuple[Work, ...]


def chosen(values: Number, candidate: NDArray[np.intp]) -> Number:
    """Values that broadcast to (candidates, calls), of one candidate of each call.

    ``candidate`` may be (ranks, calls): then so is the result, or it broadcasts to that.
    """
    if not isinstance(values, np.ndarray) or values.ndim < 2:
        return values
    candidates, calls = values.shape
    if candidates == 1:
        return values[0]
    return values.reshape(-1).take(candidate if calls == 1 else candidate * calls + np.arange(calls))


def ceil_div(a: Number, b: Number) -> Array:
    """Whole pieces of size ``b`` that cover ``a``."""
    return np.ceil(np.asarray(a, dtype=np.float64) / b)


def axis(values: list[float] | tuple[float, ...]) -> Array:
    """Candidate values as a column, to broadcast against calls."""
    return np.asarray(values, dtype=np.float64)[:, None]
