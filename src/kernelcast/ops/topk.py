"""topk: the k largest elements of each row, by PyTorch's radix selection (TensorTopK.cu) and a sort; and
top_k_top_p_sampling."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, Conflicts, choice, conflict, size
from kernelcast.ops.scatter import IndexedKernel
from kernelcast.ops.vector import (
    INDEX_BYTES,
    MAX_THREADS,
    VECTOR_BYTES,
    Mask,
    MemoryKernel,
    block_reduction,
    paced,
    vector_kernel,
)
from kernelcast.ops.work import Array, Work, Works, ceil_div

# should_use_multiblock: rows up to this many go to several CTAs each when they are at least this long.
_MULTI_BLOCK = ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800), (np.inf, 400))
_BLOCK_BITS, _WARP_BITS = 8.0, 2.0  # radix digits of the two kernels
_THREADS = 256.0  # of a CTA that shares a row
_LEAST_VALUES, _MOST_VALUES = 4.0, 64.0  # a thread, there
_DIGIT_FLOPS = 4.0  # an element a pass: to a sortable integer, mask, digit, compare
_SORT_FLOPS = 2.0  # compare and exchange
_PART_CYCLES = 34.0  # of a CTA's counts, added to those before: 17 us for 977 on an H200
_COUNTS_CYCLES = 2500.0  # of a row's 256 counts
_SEARCH_CYCLES = 700.0  # of a CTA's pass over as many elements as it has threads
_COUNT_INSTRUCTIONS = 30.0  # of a thread for an element: a single load, an atomic in shared memory
_GATHER_INSTRUCTIONS = 80.0  # two prefix sums
_SMALL_KERNELS = 8.0  # beside it: cleared counts, the k-th value's counts, their sums by row
_LEVEL_CYCLES = 200.0  # of a level of the sorting network


class Topk(IndexedKernel):
    """The k largest elements of each row, sorted, with int64 indices.

    Long rows: a kernel per 8 bits finds the digit of the k-th element, reading all rows anew; short rows: one CTA each,
    2 bits at a time. A last pass gathers what is larger.
    """

    op = "topk"
    examples = ({"rows": 64, "cols": 128256, "k": 50}, {"rows": 4096, "cols": 128, "k": 8})

    rows: int = size("rows")
    cols: int = size("columns")
    k: int = size("elements to select per row")

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        return conflict(calls["k"] > calls["cols"], "k {k:.0f} must be at most cols {cols:.0f}", calls.numbers)

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        rows, cols, k = calls["rows"], calls["cols"], calls["k"]
        element_bytes = calls.dtype.act_bytes
        least = np.select([rows <= most for most, _ in _MULTI_BLOCK], [float(least) for _, least in _MULTI_BLOCK])
        shared = cols >= least
        topk_bytes = rows * k * (element_bytes + INDEX_BYTES)
        digits = int(8 * element_bytes / _BLOCK_BITS)
        select = _pass(gpu, rows, cols, element_bytes, rows * 256 * 2.0, shared)  # a histogram of 16 bits a digit
        join = _joined(gpu, rows, cols, shared)
        gather = _pass(gpu, rows, cols, element_bytes, topk_bytes, shared, _GATHER_INSTRUCTIONS, _SMALL_KERNELS)
        alone = _alone(gpu, rows, cols, element_bytes, topk_bytes, ~shared)
        return (*(select, join) * digits, gather, alone, _sort(gpu, rows, k, topk_bytes))


def _pass(
    gpu: Gpu,
    rows: Array,
    cols: Array,
    element_bytes: float,
    written_bytes: Array,
    runs: Mask,
    instructions: float = _COUNT_INSTRUCTIONS,
    launches: float = 1.0,
) -> Work:
    """All rows once, several CTAs each."""
    values = _values(gpu, rows, cols)
    elements = rows * cols
    return vector_kernel(
        gpu,
        tasks=rows * ceil_div(cols, _THREADS * values),
        threads=_THREADS,
        moved_bytes=elements * element_bytes + written_bytes,
        flops=_DIGIT_FLOPS * elements,
        smem_bytes=elements * 4,  # a count in the histogram, or a position in the prefix sum
        warp_instructions=instructions * elements / gpu.warp_threads,
        launches=launches,
        smem_bytes_per_cta=256 * 4.0,
        steps=values,
        runs=runs,
    )


def _values(gpu: Gpu, rows: Array, cols: Array) -> Array:
    """Elements per thread, where CTAs share a row."""
    return np.clip(ceil_div(rows * cols, gpu.sm_count * gpu.max_threads_per_sm), _LEAST_VALUES, _MOST_VALUES)


def _joined(gpu: Gpu, rows: Array, cols: Array, runs: Mask) -> Work:
    """Two kernels after each pass: the counts of a row's CTAs added up, and the digit of the k-th element."""
    parts = ceil_div(cols, _THREADS * _values(gpu, rows, cols))
    work = vector_kernel(
        gpu,
        tasks=2 * rows,
        threads=_THREADS,
        moved_bytes=2 * rows * parts * 256 * 2.0,
        steps=parts,
        launches=2.0,
        runs=runs,
    )
    return replace(paced(work, gpu, _PART_CYCLES), task_cycles=_COUNTS_CYCLES)


def _alone(gpu: Gpu, rows: Array, cols: Array, element_bytes: float, topk_bytes: Array, runs: Mask) -> Work:
    """One CTA per row: a pass per digit, then one for larger and one for equal elements."""
    passes = 8 * element_bytes / _WARP_BITS + 2
    elements = rows * cols
    threads = np.minimum(MAX_THREADS, ceil_div(cols, gpu.warp_threads) * gpu.warp_threads)
    work = vector_kernel(
        gpu,
        tasks=rows,
        threads=threads,
        moved_bytes=elements * element_bytes + topk_bytes,
        again_bytes=(passes - 1) * elements * element_bytes,
        flops=passes * _DIGIT_FLOPS * elements,
        warp_instructions=passes * 5 * elements / gpu.warp_threads,  # a single load; a ballot and a count a digit
        smem_bytes_per_cta=MAX_THREADS,
        steps=passes * ceil_div(cols, threads),
        runs=runs,
    )
    return paced(work, gpu, _SEARCH_CYCLES)


def _sort(gpu: Gpu, rows: Array, k: Array, topk_bytes: Array) -> Work:
    """The k of each row in shared memory; a bitonic network has log(k) (log(k) + 1) / 2 levels of k/2 pairs."""
    padded = 2 ** np.ceil(np.log2(np.maximum(k, 2.0)))
    levels = np.log2(padded) * (np.log2(padded) + 1) / 2
    pairs = rows * padded / 2 * levels
    work = vector_kernel(
        gpu,
        tasks=rows,
        threads=np.clip(padded / 2, gpu.warp_threads, MAX_THREADS),
        moved_bytes=2 * topk_bytes,  # in place
        flops=_SORT_FLOPS * pairs,
        smem_bytes=pairs * 2 * 2 * (4 + INDEX_BYTES),  # two keys with their indices, read and written
        smem_bytes_per_cta=np.minimum(padded * (4 + INDEX_BYTES), gpu.smem_bytes_per_cta),
        steps=levels,
        runs=k > 1,
    )
    return paced(work, gpu, _LEVEL_CYCLES)


# FlashInfer's sampling.cuh (0.5.3), TopKTopPSamplingFromProbKernel: a CTA of 1,024 threads takes a row. A round walks
# it up to the token that it draws, half of it on average, and walks it all again to count and add up what is likelier
# than two pivots; rounds go on until the token drawn is among those kept. Each halves what is left, as in a binary
# search: three on average (https://flashinfer.ai/2025/03/10/sampling.html).
_ROUNDS = 3.0
_WALKS = 1.5  # of the row, a round
_STEP_CYCLES = 1000.0  # a vector a thread, then a sum over the CTA with two barriers, which the next step waits for
_SUMS = 2.0  # a step: mass and count
_FLOPS = 4.0  # an element and walk: compare with two pivots, add, count
_TOKEN_BYTES = 4.0  # int32


class TopKTopPSampling(MemoryKernel):
    """One token per row, sampled from probabilities among the top k, the top p, or both (FlashInfer).

    Rejection sampling: how many rounds a row takes depends on its probabilities. Those measured are the softmax of
    normal numbers of standard deviation 6, where few tokens have most of the mass, as in language models.
    """

    op = "top_k_top_p_sampling"
    dtypes: ClassVar[tuple[str, ...]] = ("fp32",)
    examples = ({"rows": 64, "cols": 128256}, {"rows": 256, "cols": 151936, "keep": "top_p"})

    rows: int = size("rows (requests)")
    cols: int = size("columns (vocabulary)")
    keep: str = choice("filter applied to the probabilities", ("both", "top_k", "top_p"), default="both")
    dtype: str = choice("dtype of the probabilities", ("fp32",), default="fp32")

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        rows, cols, element_bytes = calls["rows"], calls["cols"], calls.dtype.act_bytes
        walks = _ROUNDS * _WALKS
        steps = walks * ceil_div(cols * element_bytes, MAX_THREADS * VECTOR_BYTES)
        smem_bytes, instructions = block_reduction(gpu, MAX_THREADS + 0 * rows, _SUMS)
        work = vector_kernel(
            gpu,
            tasks=rows,
            threads=MAX_THREADS,
            moved_bytes=rows * (cols * element_bytes + _TOKEN_BYTES),
            again_bytes=(walks - 1) * rows * cols * element_bytes,
            flops=_FLOPS * walks * rows * cols,
            smem_bytes=rows * steps * smem_bytes,
            warp_instructions=rows * steps * instructions,
            steps=steps,
        )
        return (replace(work, step_cycles=_STEP_CYCLES),)
