"""embedding_backward: the dense gradient of an embedding table (PyTorch's embedding_dense_backward)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, size
from kernelcast.kernels.vector import (
    ACCUMULATOR_BYTES,
    INDEX_BYTES,
    MAX_THREADS,
    VECTOR_BYTES,
    MemoryKernel,
    vector_kernel,
)
from kernelcast.kernels.work import Array, Work, Works, ceil_div

_UNSORTED_TOKENS = 3072.0  # up to this one kernel goes through the tokens in order (Embedding.cu)
_UNSORTED_COLS = 32.0  # columns of a CTA there, one warp for each of 32 tokens
_SEGMENT_TOKENS = 10.0  # NROWS_PER_THREAD: gradients of one token that a thread adds up
_RADIX_BITS = 8.0  # of one pass of cub's radix sort
_SEGMENT_KERNELS = 7.0  # beside the passes: the sort's histogram and its scan; unique ids, counts, offsets, their sums
_FILL_THREADS = 128.0


class EmbeddingBackward(MemoryKernel):
    """Dense gradient of an embedding table: fills it with zeros, then adds up each token's gradient.

    Beyond 3,072 tokens their ids are sorted, equal ones summed ten at a time in fp32, and the parts summed into the
    table. Tokens repeat no more than the vocabulary makes them, as in ``embedding``.
    """

    op = "embedding_backward"
    examples = (
        {"tokens": 8192, "hidden": 4096, "vocab": 128256},
        {"tokens": 2048, "hidden": 1024, "vocab": 50257},
    )

    tokens: int = size("tokens looked up in the forward pass")
    hidden: int = size("elements of a table row")
    vocab: int = size("rows of the table")

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        tokens, hidden, vocab = calls["tokens"], calls["hidden"], calls["vocab"]
        element_bytes = calls.dtype.weight_bytes
        distinct = np.minimum(tokens, vocab)
        segments = distinct * ceil_div(tokens, distinct * _SEGMENT_TOKENS)
        sorts = tokens > _UNSORTED_TOKENS
        table_bytes = vocab * hidden * element_bytes
        read_bytes, written_bytes = tokens * hidden * element_bytes, distinct * hidden * element_bytes
        part_bytes = segments * hidden * ACCUMULATOR_BYTES
        fill = vector_kernel(
            gpu,
            tasks=ceil_div(table_bytes, _FILL_THREADS * VECTOR_BYTES),
            threads=_FILL_THREADS,
            moved_bytes=table_bytes,
        )
        return (
            fill,
            _unsorted(gpu, tokens, hidden, read_bytes + 2 * written_bytes, element_bytes, ~sorts),
            _sort(gpu, tokens, vocab, sorts),
            _rows(gpu, tokens, hidden, read_bytes + part_bytes, sorts),
            _rows(gpu, tokens, hidden, part_bytes + written_bytes, sorts),
        )


def _unsorted(
    gpu: Gpu, tokens: Array, hidden: Array, moved_bytes: Array, element_bytes: float, runs: NDArray[np.bool_]
) -> Work:
    """Every CTA reads all ids; warps with the same token elect one that adds for all."""
    tasks, elements = ceil_div(hidden, _UNSORTED_COLS), tokens * hidden
    return vector_kernel(
        gpu,
        tasks=tasks,
        threads=MAX_THREADS,
        moved_bytes=moved_bytes + tokens * INDEX_BYTES,
        again_bytes=(tasks - 1) * tokens * INDEX_BYTES,
        flops=elements,
        converted=3 * elements if element_bytes < 4 else 0.0,
        smem_bytes=2 * 4 * elements,
        warp_instructions=8 * elements / gpu.warp_threads,  # single loads and stores; compare, ballot, elect
        smem_bytes_per_cta=MAX_THREADS * 8,
        steps=2 * ceil_div(tokens, _UNSORTED_COLS),
        runs=runs,
    )


def _sort(gpu: Gpu, tokens: Array, vocab: Array, runs: NDArray[np.bool_]) -> Work:
    """Radix sort of the ids with their places, and the small kernels that find runs of equal ones."""
    passes = np.maximum(1.0, ceil_div(np.log2(np.maximum(vocab, 2.0)), _RADIX_BITS))
    moved = tokens * INDEX_BYTES * (4 * passes + _SEGMENT_KERNELS)  # id and place, read and written
    return vector_kernel(
        gpu,
        tasks=ceil_div(tokens, MAX_THREADS) * (passes + _SEGMENT_KERNELS),
        threads=256.0,
        moved_bytes=moved,
        smem_bytes=2 * moved,
        smem_bytes_per_cta=16384.0,
        launches=passes + _SEGMENT_KERNELS,
        runs=runs,
    )


def _rows(gpu: Gpu, tokens: Array, hidden: Array, moved_bytes: Array, runs: NDArray[np.bool_]) -> Work:
    """A thread an element of a row, single elements at a time (compute_grad_weight, sum_and_scatter)."""
    padded = ceil_div(hidden, gpu.warp_threads) * gpu.warp_threads
    threads = np.minimum(padded, MAX_THREADS)
    return vector_kernel(
        gpu,
        tasks=ceil_div(tokens * padded, threads),
        threads=threads,
        moved_bytes=moved_bytes + tokens * 2 * INDEX_BYTES,
        flops=tokens * hidden,
        converted=tokens * hidden,
        warp_instructions=4 * tokens * padded / gpu.warp_threads,  # loads, stores, and whose run this is
        steps=3.0,  # run, place, element
        runs=runs,
    )
