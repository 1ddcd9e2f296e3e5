"""embedding_bag: sums or means of table rows (recommendation models), and the gradient of the dense table."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, choice, size
from kernelcast.ops.scatter import IndexedKernel, distinct, missed, radix_sort
from kernelcast.ops.vector import (
    ACCUMULATOR_BYTES,
    INDEX_BYTES,
    MAX_THREADS,
    SECTOR_BYTES,
    fill_kernel,
    paced,
    vector_kernel,
)
from kernelcast.ops.work import Array, Work, Works, ceil_div

_CHUNK = 32.0  # columns of a warp, a thread each
_CTA_WARPS = 8.0
_CTAS = 1024.0  # of the grid, whatever the bags
# Of a row of a bag, whose loads overlap with the next, and of a bag before; an H200 takes 14 us for bags of 100.
_LOOKUP_CYCLES, _BAG_ROWS = 300.0, 4.0
_BAG_INSTRUCTIONS, _ROW_INSTRUCTIONS = 330.0, 14.0  # of a warp: 64-bit divisions of a chunk; of a row
_SEGMENT_ROWS = 10.0  # NROWS_PER_THREAD: gradients of one row that a thread adds up
_SMALL_KERNELS = 8.0  # positions; runs of equal indices: found, counted, their offsets and sums
_WAIT_CYCLES = 600.0  # of a load that the next waits for


class _EmbeddingBag(IndexedKernel):
    """Parameters of both directions."""

    examples = (
        {"bags": 2048, "pooling": 32, "hidden": 64, "vocab": 1000000, "dtype": "fp32"},
        {"bags": 8192, "pooling": 1, "hidden": 128, "vocab": 10000, "dtype": "fp32", "mode": "mean"},
    )

    bags: int = size("bags (samples)")
    pooling: int = size("rows per bag")
    hidden: int = size("embedding dimension")
    vocab: int = size("rows of the embedding table")
    mode: str = choice("reduction over the rows of a bag", ("sum", "mean"), default="sum")

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        looked = calls["bags"] * calls["pooling"]
        return {
            **super().shape_features(calls, gpu),
            "log_lookups": np.log2(looked),
            "log_repeats": np.log2(looked / calls["vocab"]),
            "log_chunks": np.log2(ceil_div(calls["hidden"], _CHUNK) * calls["bags"] / (_CTAS * _CTA_WARPS)),
        }


class EmbeddingBag(_EmbeddingBag):
    """Sum or mean of the table rows of each bag. A warp takes 32 columns of a bag and loops over its rows."""

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
            warp_instructions=(_BAG_INSTRUCTIONS * bags + _ROW_INSTRUCTIONS * looked) * chunks,
            steps=(_BAG_ROWS + pooling) * ceil_div(bags * chunks, warps),
        )
        lost = missed(gpu, (looked - met) * sectors, vocab * sectors)
        return (replace(paced(work, gpu, _LOOKUP_CYCLES), refetched_bytes=lost),)


class EmbeddingBagBackward(_EmbeddingBag):
    """Gradient of the dense table: zeros, then each row's gradients added up, ten at a time, after a sort."""

    op = "embedding_bag_backward"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        bags, pooling, hidden, vocab = (calls[name] for name in ("bags", "pooling", "hidden", "vocab"))
        element_bytes = calls.dtype.weight_bytes
        looked = bags * pooling
        met = np.minimum(distinct(looked, vocab), looked)
        # launched for the upper bound of parts: one per ten rows, and a remainder per distinct row
        most = np.minimum(looked, vocab)
        parts = met * ceil_div(looked, met * _SEGMENT_ROWS)
        small = vector_kernel(
            gpu,
            tasks=_SMALL_KERNELS * ceil_div(looked, 1024.0),
            threads=256.0,
            moved_bytes=_SMALL_KERNELS * 2 * looked * INDEX_BYTES,
            launches=_SMALL_KERNELS,
        )
        return (
            fill_kernel(gpu, vocab * hidden * element_bytes),
            *radix_sort(gpu, looked, INDEX_BYTES, INDEX_BYTES, 8 * INDEX_BYTES, True),
            small,
            _summed(
                gpu,
                looked / _SEGMENT_ROWS + most,
                parts,
                looked,
                hidden,
                bags * element_bytes,
                parts * ACCUMULATOR_BYTES,
            ),
            _summed(gpu, most, met, parts, hidden, parts * ACCUMULATOR_BYTES, met * element_bytes),
        )


def _summed(
    gpu: Gpu, launched: Array, made: Array, added: Array, hidden: Array, read_bytes: Array, written_bytes: Array
) -> Work:
    """``made`` rows, each the sum of some of ``added``: one thread per column, which waits for every row's index, bag
    and value. Bytes are per column."""
    padded = ceil_div(hidden, gpu.warp_threads) * gpu.warp_threads
    threads = np.minimum(padded, MAX_THREADS)
    moved = (read_bytes + written_bytes) * hidden + added * 3 * INDEX_BYTES
    work = vector_kernel(
        gpu,
        tasks=ceil_div(launched * padded, threads),
        threads=threads,
        moved_bytes=moved,
        again_bytes=np.maximum(0.0, added * hidden * ACCUMULATOR_BYTES - read_bytes * hidden),
        flops=added * hidden,
        warp_instructions=(12 * added + 20 * launched) * padded / gpu.warp_threads,
        steps=2 + 2 * added / made,
    )
    return paced(work, gpu, _WAIT_CYCLES)
