"""reduce_sum and argmax, cut into CTAs as PyTorch's Reduce.cuh (setReduceConfig) does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, Kernel, choice, size
from kernelcast.kernels.dtypes import dtype
from kernelcast.kernels.norm import VECTOR_DTYPES, block_reduction
from kernelcast.kernels.vector import ACCUMULATOR_BYTES, INDEX_BYTES, vector_kernel
from kernelcast.kernels.work import Array, Number, Phases, Work, ceil_div

_THREADS = 512.0  # MAX_NUM_THREADS
_VECTOR = 4.0  # vt0: neighbours that a thread takes at once, of the inputs or of the outputs
_VECTOR_FROM = 128.0  # shorter rows are read one element at a time
_WARP_VALUES, _SPLIT_VALUES = 16.0, 256.0  # values a thread from which warps, and CTAs, share an output


@dataclass(frozen=True)
class _Plan:
    ctas: Array  # of an output, when CTAs share it
    tasks: Array
    threads: Array
    values: Array  # a thread


def _plan(gpu: Gpu, reduced: Array, outputs: Array, *, neighbours: bool) -> _Plan:
    """``neighbours``: the numbers that are added lie side by side; else the outputs do."""
    if neighbours:
        vector = np.ones_like(reduced)
        wide, high = np.where(reduced >= _VECTOR_FROM, np.floor(reduced / _VECTOR), reduced), outputs
    else:
        vector = np.where(np.mod(outputs, _VECTOR) == 0, _VECTOR, 1.0)
        wide, high = outputs / vector, reduced
    most = _THREADS / vector
    width = np.minimum(_power_below(wide), gpu.warp_threads)
    height = np.minimum(_power_below(high), most / width)
    width = np.minimum(_power_below(wide), most / height)
    values = ceil_div(reduced, width) if neighbours else reduced
    together = (values >= _WARP_VALUES * height) | (values >= _SPLIT_VALUES)  # the warps of a CTA share an output
    values = np.where(together, ceil_div(values, height), values)
    each = np.where(together, 1.0, height) * (1.0 if neighbours else width * vector)
    grid = ceil_div(outputs, each)
    target = gpu.sm_count * np.floor(gpu.max_threads_per_sm / (width * height))
    shared = np.maximum(
        np.minimum(ceil_div(target, grid), ceil_div(values, _WARP_VALUES)), ceil_div(values, _SPLIT_VALUES)
    )
    ctas = np.where(together & (values >= _SPLIT_VALUES) & (grid <= target), shared, 1.0)
    return _Plan(ctas, grid * ctas, width * height, ceil_div(values, ctas))


def _power_below(count: Array) -> Array:
    return 2 ** np.floor(np.log2(np.maximum(count, 1.0)))


def reduction(
    gpu: Gpu,
    reduced: Array,
    outputs: Array,
    element_bytes: float,
    *,
    neighbours: bool,
    output_bytes: float,
    flops: float = 1.0,
    launches: Number = 1.0,
    runs: NDArray[np.bool_] | bool = True,
) -> Work:
    """``outputs`` numbers, each made of ``reduced``; CTAs that share an output pass parts through memory."""
    plan = _plan(gpu, reduced, outputs, neighbours=neighbours)
    elements = reduced * outputs
    part_bytes = np.where(plan.ctas > 1, 2 * plan.ctas * outputs * ACCUMULATOR_BYTES, 0.0)  # written and read
    smem_bytes, instructions = block_reduction(gpu, np.maximum(plan.threads, gpu.warp_threads))
    return vector_kernel(
        gpu,
        tasks=plan.tasks,
        threads=np.maximum(plan.threads, gpu.warp_threads),
        moved_bytes=elements * element_bytes + outputs * output_bytes,
        again_bytes=part_bytes,  # small, and written just before
        flops=flops * elements,
        converted=elements if element_bytes < 4 else 0.0,
        smem_bytes=plan.tasks * smem_bytes,
        warp_instructions=plan.tasks * instructions + elements / _VECTOR / gpu.warp_threads,
        smem_bytes_per_cta=4 * plan.threads,
        steps=ceil_div(plan.values, _VECTOR) + 1 + (plan.ctas > 1),
        launches=launches,
        runs=runs,
    )


def sum_over_rows(
    gpu: Gpu,
    rows: Array,
    cols: Array,
    element_bytes: float,
    *,
    launches: Number = 1.0,
    runs: NDArray[np.bool_] | bool = True,
) -> Work:
    """Column sums, in the format of the input: how partial gradients and those of grouped heads are added up."""
    return reduction(
        gpu, rows, cols, element_bytes, neighbours=False, output_bytes=element_bytes, launches=launches, runs=runs
    )


@dataclass(frozen=True, kw_only=True)
class ReduceSum(Kernel):
    """Sum over one axis of a matrix: over the rows (a bias gradient) or over the columns."""

    family: ClassVar[str] = "memory"
    op: ClassVar[str] = "reduce_sum"
    dtypes: ClassVar[tuple[str, ...]] = VECTOR_DTYPES
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"rows": 8192, "cols": 4096, "axis": "rows"},
        {"rows": 8192, "cols": 4096, "axis": "cols"},
    )

    rows: int = size("rows of the input")
    cols: int = size("columns of the input")
    axis: str = choice("what is summed away", ("rows", "cols"), default="rows")

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Phases:
        rows, cols, element_bytes = calls["rows"], calls["cols"], dtype(calls.choice("dtype")).act_bytes
        if calls.choice("axis") == "rows":
            return (sum_over_rows(gpu, rows, cols, element_bytes),)
        return (reduction(gpu, cols, rows, element_bytes, neighbours=True, output_bytes=element_bytes),)


@dataclass(frozen=True, kw_only=True)
class Argmax(Kernel):
    """Place of the largest element of each row, as int64 (greedy sampling)."""

    family: ClassVar[str] = "memory"
    op: ClassVar[str] = "argmax"
    dtypes: ClassVar[tuple[str, ...]] = VECTOR_DTYPES
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"rows": 64, "cols": 128256},)

    rows: int = size("rows")
    cols: int = size("columns, searched")

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Phases:
        element_bytes = dtype(calls.choice("dtype")).act_bytes
        flops = 3.0  # compare; select the value and its place
        return (
            reduction(
                gpu, calls["cols"], calls["rows"], element_bytes, neighbours=True, output_bytes=INDEX_BYTES, flops=flops
            ),
        )
