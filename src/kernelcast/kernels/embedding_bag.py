"""embedding_bag: sums or means of table rows (recommendation models); and its gradient for the dense table."""

from __future__ import annotations

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, choice, size
from kernelcast.kernels.indexed import IndexedKernel, distinct, radix_sort, zeros
from kernelcast.kernels.vector import ACCUMULATOR_BYTES, INDEX_BYTES, SECTOR_BYTES, paced, vector_kernel
from kernelcast.kernels.work import Array, Work, Works, ceil_div

_CHUNK = 32.0  # columns of a warp, a thread each
_CTA_WARPS = 8.0
_CTAS = 1024.0  # of the grid, whatever the bags
_LOOKUP_CYCLES = 740.0  # of a row of a bag: 12 us for 32 of each of 2,048 on our H200
_SEGMENT_ROWS = 10.0  # NROWS_PER_THREAD: gradients of one row that a thread adds up
_SMALL_KERNELS = 8.0  # places counted up; runs of equal indices: found, counted, their parts' offsets and sums
_PART_THREADS = 128.0


class _EmbeddingBag(IndexedKernel):
    """Parameters of both directions."""

    examples = (
        {"bags": 2048, "pooling": 32, "hidden": 64, "vocab": 1000000, "dtype": "fp32"},
        {"bags": 8192, "pooling": 1, "hidden": 128, "vocab": 10000, "dtype": "fp32", "mode": "mean"},
    )

    bags: int = size("bags (samples)")
    pooling: int = size("rows of a bag")
    hidden: int = size("elements of a table row")
    vocab: int = size("rows of the table")
    mode: str = choice("what becomes of the rows of a bag", ("sum", "mean"), default="sum")

    @classmethod
    def hints(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        looked = calls["bags"] * calls["pooling"]
        return {
            **super().hints(calls, gpu),
            "log_lookups": np.log2(looked),
            "log_repeats": np.log2(looked / calls["vocab"]),
            "log_chunks": np.log2(ceil_div(calls["hidden"], _CHUNK) * calls["bags"] / (_CTAS * _CTA_WARPS)),
        }


class EmbeddingBag(_EmbeddingBag):
    """Sum or mean of the table rows of each bag. A warp takes 32 columns of a bag and goes through its rows."""

    op = "embedding_bag"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        bags, pooling, hidden, vocab = (calls[name] for name in ("bags", "pooling", "hidden", "vocab"))
        element_bytes = calls.dtype.weight_bytes
        looked, chunks = bags * pooling, ceil_div(hidden, _CHUNK)
        warps = np.minimum(bags * chunks, _CTAS * _CTA_WARPS)
        met = np.minimum(distinct(looked, vocab), looked)
        sectors = ceil_div(hidden * element_bytes, SECTOR_BYTES) * SECTOR_BYTES
        work = vector_kernel(
            gpu,
            tasks=np.minimum(ceil_div(bags * chunks, _CTA_WARPS), _CTAS),
            threads=_CHUNK * _CTA_WARPS,
            # rows of a bag; the index and the bag's number that is kept for each; the result, two numbers a bag
            moved_bytes=looked * 2 * INDEX_BYTES + bags * (hidden * element_bytes + 2 * INDEX_BYTES),
            again_bytes=(looked - met) * sectors + looked * (chunks - 1) * INDEX_BYTES,
            streamed_bytes=met * sectors,
            flops=looked * hidden,
            converted=looked * hidden if element_bytes < 4 else 0.0,
            warp_instructions=12 * looked * chunks,
            steps=pooling * ceil_div(bags * chunks, warps),
        )
        return (paced(work, gpu, _LOOKUP_CYCLES),)


class EmbeddingBagBackward(_EmbeddingBag):
    """Gradient of the dense table: zeros, then each row's gradients added up, ten at a time, after a sort."""

    op = "embedding_bag_backward"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        bags, pooling, hidden, vocab = (calls[name] for name in ("bags", "pooling", "hidden", "vocab"))
        element_bytes = calls.dtype.weight_bytes
        looked = bags * pooling
        met = np.minimum(distinct(looked, vocab), looked)
        parts = met * ceil_div(looked, met * _SEGMENT_ROWS)
        small = vector_kernel(
            gpu,
            tasks=_SMALL_KERNELS * ceil_div(looked, 1024.0),
            threads=256.0,
            moved_bytes=_SMALL_KERNELS * 2 * looked * INDEX_BYTES,
            launches=_SMALL_KERNELS,
        )
        return (
            zeros(gpu, vocab * hidden * element_bytes),
            *radix_sort(gpu, looked, INDEX_BYTES, INDEX_BYTES, 8 * INDEX_BYTES, True),
            small,
            _summed(gpu, looked, hidden, bags * element_bytes, looked * element_bytes, parts * ACCUMULATOR_BYTES),
            _summed(gpu, parts, hidden, parts * ACCUMULATOR_BYTES, 0.0, met * element_bytes),
        )


def _summed(gpu: Gpu, rows: Array, hidden: Array, read: Array, reread: Array | float, written: Array) -> Work:
    """A thread a column of a part; bytes are those of a column: of bags once from memory, of rows through L2."""
    padded = ceil_div(hidden, gpu.warp_threads) * gpu.warp_threads
    return vector_kernel(
        gpu,
        tasks=ceil_div(rows * padded, _PART_THREADS),
        threads=_PART_THREADS,
        moved_bytes=(read + written) * hidden + rows * 3 * INDEX_BYTES,
        again_bytes=reread * hidden,
        flops=rows * hidden,
        warp_instructions=12 * rows * padded / gpu.warp_threads,
        steps=3.0,
    )
