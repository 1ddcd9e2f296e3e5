"""reduce_sum and argmax, as PyTorch's Reduce.cuh (setReduceConfig) launches them; nll_loss; cumsum; ctc_loss.

Cross-entropy is log_softmax and nll_loss. ctc_loss (LossCTC.cu): a CTA takes a few sequences and loops over the steps:
each of 2 S + 1 states (targets with blanks between) adds up itself and two neighbours of the step before. Backward runs
the other way, and a separate kernel computes the gradient of every class at every step.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, Kernel, choice, flag, size
from kernelcast.ops.vector import (
    ACCUMULATOR_BYTES,
    INDEX_BYTES,
    MAX_THREADS,
    SECTOR_BYTES,
    WAVEFRONT_BYTES,
    MemoryKernel,
    block_reduction,
    power_below,
    vector_kernel,
)
from kernelcast.ops.work import Array, Number, Work, Works, ceil_div

_THREADS = 512.0  # MAX_NUM_THREADS
_VECTOR = 4.0  # vt0: neighbours that a thread takes at once, of the inputs or of the outputs
_VECTOR_FROM = 128.0  # shorter rows are read one element at a time
_WARP_VALUES, _SPLIT_VALUES = 16.0, 256.0  # values per thread from which warps, and CTAs, share an output
_LOSS_ROWS_PER_THREAD = 16.0  # nll_loss_threads: the power of two nearest to rows / 16, from 32 to 1024
_SCAN_THREADS = 512.0  # of a CTA of cumsum (ScanUtils.cuh), shared by rows when they are short
_FEWEST, _MOST = 16.0, 512.0  # threads of a row there
# One row alone goes to cub::DeviceScan: 128 threads of about 15 elements, one pass with look-back.
_ONE_ROW_THREADS, _ONE_ROW_ELEMENTS = 128.0, 1920.0


def _plan(gpu: Gpu, reduced: Array, outputs: Array, *, neighbours: bool) -> tuple[Array, Array, Array, Array]:
    """(CTAs per output, all CTAs, threads per CTA, values per thread). ``neighbours``: the reduced axis is contiguous;
    else the outputs are."""
    if neighbours:
        vector = np.ones_like(reduced)
        wide, high = np.where(reduced >= _VECTOR_FROM, np.floor(reduced / _VECTOR), reduced), outputs
    else:
        vector = np.where(np.mod(outputs, _VECTOR) == 0, _VECTOR, 1.0)
        wide, high = outputs / vector, reduced
    most = _THREADS / vector
    width = np.minimum(power_below(wide), gpu.warp_threads)
    height = np.minimum(power_below(high), most / width)
    width = np.minimum(power_below(wide), most / height)
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
    return ctas, grid * ctas, width * height, ceil_div(values, ctas)


def reduction(
    gpu: Gpu,
    reduced: Array,
    outputs: Array,
    element_bytes: float,
    *,
    neighbours: bool = False,
    output_bytes: float | None = None,
    flops: float = 1.0,
    launches: Number = 1.0,
    runs: NDArray[np.bool_] | bool = True,
) -> Work:
    """``outputs`` values, each reduced from ``reduced``; CTAs that share an output pass partial sums through memory.

    By default column sums in the dtype of the input, as for partial gradients and those of grouped heads.
    """
    ctas, tasks, threads, values = _plan(gpu, reduced, outputs, neighbours=neighbours)
    elements, warped = reduced * outputs, np.maximum(threads, gpu.warp_threads)
    smem_bytes, instructions = block_reduction(gpu, warped)
    return vector_kernel(
        gpu,
        tasks=tasks,
        threads=warped,
        moved_bytes=elements * element_bytes + outputs * (output_bytes or element_bytes),
        again_bytes=np.where(ctas > 1, 2 * ctas * outputs * ACCUMULATOR_BYTES, 0.0),  # parts, written and read
        flops=flops * elements,
        converted=elements if element_bytes < 4 else 0.0,
        smem_bytes=tasks * smem_bytes,
        warp_instructions=tasks * instructions + elements / _VECTOR / gpu.warp_threads,
        smem_bytes_per_cta=4 * threads,
        steps=ceil_div(values, _VECTOR) + 1 + (ctas > 1),
        launches=launches,
        runs=runs,
    )


class ReduceSum(MemoryKernel):
    """Sum over one axis of a matrix: over the rows (a bias gradient) or over the columns."""

    op = "reduce_sum"
    examples = ({"rows": 8192, "cols": 4096, "axis": "rows"}, {"rows": 8192, "cols": 4096, "axis": "cols"})

    rows: int = size("rows of the input")
    cols: int = size("columns of the input")
    axis: str = choice("axis that is summed over", ("rows", "cols"), default="rows")

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        rows, cols, element_bytes = calls["rows"], calls["cols"], calls.dtype.act_bytes
        if calls.choice("axis") == "rows":
            return (reduction(gpu, rows, cols, element_bytes),)
        return (reduction(gpu, cols, rows, element_bytes, neighbours=True),)


class Argmax(MemoryKernel):
    """Index of the largest element of each row, as int64 (greedy sampling)."""

    op = "argmax"
    examples = ({"rows": 64, "cols": 128256},)

    rows: int = size("rows")
    cols: int = size("columns")

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        work = reduction(
            gpu,
            calls["cols"],
            calls["rows"],
            calls.dtype.act_bytes,
            neighbours=True,
            output_bytes=INDEX_BYTES,
            flops=3.0,  # compare; select the value and its index
        )
        return (work,)


class NllLoss(MemoryKernel):
    """Negative log-likelihood: gathers the element of each row's class and averages. PyTorch runs one CTA, whatever the
    number of rows (nll_loss_forward_reduce_cuda_kernel_2d)."""

    op = "nll_loss"
    examples = ({"rows": 4096, "cols": 128256},)

    rows: int = size("rows (tokens)")
    cols: int = size("columns (classes)")

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        rows, element_bytes = calls["rows"], calls.dtype.act_bytes
        each = np.maximum(np.floor(rows / _LOSS_ROWS_PER_THREAD), 1.0)
        threads = np.clip(2 ** np.floor(np.log2(each) + 0.5), gpu.warp_threads, MAX_THREADS)
        sector_bytes = np.minimum(SECTOR_BYTES, calls["cols"] * element_bytes)
        smem_bytes, instructions = block_reduction(gpu, threads, 2.0)  # the loss and the weight
        work = vector_kernel(
            gpu,
            tasks=np.ones_like(rows),
            threads=threads,
            moved_bytes=rows * (sector_bytes + INDEX_BYTES) + 2 * element_bytes,
            flops=2 * rows,
            converted=rows if element_bytes < 4 else 0.0,
            smem_bytes=smem_bytes,
            warp_instructions=instructions + 2 * rows / gpu.warp_threads,
            smem_bytes_per_cta=2 * 4 * threads,
            steps=2 * ceil_div(rows, threads) + 1,  # the class names the element
        )
        return (work,)


class Cumsum(MemoryKernel):
    """Cumulative sum along each row: threads take two elements each and add them up in shared memory level by level
    (Sklansky's scan), one piece of the row after another."""

    op = "cumsum"
    examples = ({"rows": 4096, "cols": 4096}, {"rows": 1, "cols": 1048576})

    rows: int = size("rows")
    cols: int = size("columns")

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        rows, cols = calls["rows"], calls["cols"]
        element_bytes = calls.dtype.act_bytes
        alone = rows == 1
        row_threads = np.clip(2 ** np.ceil(np.log2(np.maximum(cols / 2, 1.0))), _FEWEST, _MOST)
        pieces = ceil_div(cols, 2 * row_threads)
        levels = np.log2(row_threads) + 1
        tasks = np.where(alone, ceil_div(cols, _ONE_ROW_ELEMENTS), ceil_div(rows, _SCAN_THREADS / row_threads))
        threads = np.where(alone, _ONE_ROW_THREADS, _SCAN_THREADS)
        warp_steps = tasks * pieces * _SCAN_THREADS / gpu.warp_threads  # warps, each for each piece
        # Two elements in and two out; at each level two reads and a write.
        smem_bytes = np.where(alone, 4 * rows * cols * 4, warp_steps * (4 + 3 * levels) * WAVEFRONT_BYTES)
        work = vector_kernel(
            gpu,
            tasks=tasks,
            threads=threads,
            moved_bytes=2 * rows * cols * element_bytes,
            flops=np.where(alone, 2 * cols, rows * cols * levels / 2),  # half of the elements get a sum at each level
            converted=2 * rows * cols if element_bytes < 4 else 0.0,
            smem_bytes=smem_bytes,
            # single elements, in and out; addresses of a level
            warp_instructions=2 * rows * cols / gpu.warp_threads + np.where(alone, 0.0, 4 * warp_steps * levels),
            smem_bytes_per_cta=np.where(alone, 4 * _ONE_ROW_ELEMENTS, 2 * _SCAN_THREADS * element_bytes),
            steps=np.where(alone, 3.0, pieces * levels),
        )
        return (work,)


# A step waits for three sums of the step before, from L2, and for a barrier: a round number of cycles.
_STEP_CYCLES = 1500.0


class CtcLoss(Kernel):
    """Connectionist temporal classification loss of ``steps`` distributions over ``classes`` against ``targets``
    labels."""

    op = "ctc_loss"
    batch_parameter = "batch"
    timed_as_sum = True
    dtypes = ("fp32",)
    examples = ({"batch": 16, "steps": 500, "targets": 60, "classes": 32, "dtype": "fp32"},)

    batch: int = size("sequences")
    steps: int = size("time steps")
    targets: int = size("labels per sequence")
    classes: int = size("classes, the blank included")
    backward: bool = flag("gradient of the log-probabilities, after the forward pass", default=False)

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        states = 2 * calls["targets"] + 1
        walk = _walk(gpu, calls, states)
        elements = calls["batch"] * calls["steps"] * calls["classes"]
        gradient = vector_kernel(
            gpu,
            tasks=ceil_div(elements, 1024.0),
            threads=256.0,
            moved_bytes=(2 * elements + 2 * calls["batch"] * calls["steps"] * states) * calls.dtype.act_bytes,
            flops=4 * elements,
            xu_ops=2 * elements,
            launches=2.0,  # and one that fills it first
            runs=calls["backward"] > 0,
        )
        return walk, gradient


def _walk(gpu: Gpu, calls: Calls, states: Array) -> Work:
    """All steps in one kernel."""
    threads = np.minimum(MAX_THREADS, 2 ** np.ceil(np.log2(states)))
    beside = np.minimum(np.floor(MAX_THREADS / threads), calls["batch"])
    cells = calls["batch"] * calls["steps"] * states
    work = vector_kernel(
        gpu,
        tasks=ceil_div(calls["batch"], beside),
        threads=threads * beside,
        moved_bytes=2 * cells * calls.dtype.act_bytes + calls["batch"] * calls["targets"] * INDEX_BYTES,
        again_bytes=4 * cells * calls.dtype.act_bytes,
        flops=8 * cells,
        xu_ops=4 * cells,
        steps=calls["steps"] * ceil_div(states, MAX_THREADS),
    )
    return replace(work, step_cycles=np.full_like(states, _STEP_CYCLES))
