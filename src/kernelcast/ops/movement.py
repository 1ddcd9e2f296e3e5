"""transpose, gather, embedding (and its dense gradient), kv_write and rope: kernels that mostly move bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, Conflicts, choice, conflict, size
from kernelcast.ops.dtypes import find_dtype
from kernelcast.ops.vector import (
    ACCUMULATOR_BYTES,
    INDEX_BYTES,
    MAX_THREADS,
    SECTOR_BYTES,
    VECTOR_BYTES,
    VECTOR_DTYPES,
    VECTOR_ELEMENTS,
    MemoryKernel,
    fill_kernel,
    row_threads,
    vector_kernel,
)
from kernelcast.ops.work import Array, Work, Works, ceil_div

_COPY_THREADS, _COPY_ELEMENTS = 128.0, 4.0  # PyTorch's copy of a strided tensor: elementwise_kernel<128, 4>
_OFFSET_INSTRUCTIONS = 12.0  # of a thread for an element: a division by multiplying for each dimension (IntDivider)
_GATHER_THREADS = 256.0  # PyTorch's vectorised gather: at most 256 threads of 16 bytes, 4 KiB of a row per CTA
_KV_DTYPES = (*VECTOR_DTYPES, "fp8", "int8", "nvfp4")
_TOKEN_THREADS = 512.0  # at most, of reshape_and_cache_flash
_UNSORTED_TOKENS = 3072.0  # up to this, one kernel processes the tokens in order (Embedding.cu)
_UNSORTED_COLS = 32.0  # columns of a CTA there, one warp for each of 32 tokens
_SEGMENT_TOKENS = 10.0  # NROWS_PER_THREAD: gradients of one token that a thread adds up
_RADIX_BITS = 8.0  # of one pass of cub's radix sort
_SEGMENT_KERNELS = 7.0  # beside the passes: the sort's histogram and its scan; unique ids, counts, offsets, their sums


class Transpose(MemoryKernel):
    """Transposed copy of a matrix (``x.mT.contiguous()``), for each of ``batch``.

    PyTorch writes contiguously and reads down a column, so that each element costs an SM a whole sector; DRAM moves
    every byte once. A permutation that keeps the innermost axis is a plain ``copy``.
    """

    op = "transpose"
    examples = ({"rows": 4096, "cols": 4096}, {"batch": 32, "rows": 512, "cols": 64})

    batch: int = size("matrices", default=1)
    rows: int = size("rows of the source")
    cols: int = size("columns of the source")

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        return {"log_rows": np.log2(calls["batch"] * calls["rows"] + 1), "log_cols": np.log2(calls["cols"] + 1)}

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        elements = calls["batch"] * calls["rows"] * calls["cols"]
        element_bytes = calls.dtype.act_bytes
        sector_bytes = np.minimum(SECTOR_BYTES, calls["cols"] * element_bytes)  # a vector is no matrix: it stays whole
        work = vector_kernel(
            gpu,
            tasks=ceil_div(elements, _COPY_THREADS * _COPY_ELEMENTS),
            threads=_COPY_THREADS,
            moved_bytes=2 * elements * element_bytes,
            again_bytes=elements * (sector_bytes - element_bytes),
            warp_instructions=(2 + _OFFSET_INSTRUCTIONS) * elements / gpu.warp_threads,
        )
        return (work,)


def _gathered(gpu: Gpu, rows: Array, cols: Array, element_bytes: float) -> Work:
    """``rows`` selected by an int64 index, each read and written."""
    row_bytes = cols * element_bytes
    pieces = ceil_div(row_bytes, _GATHER_THREADS * VECTOR_BYTES)
    return vector_kernel(
        gpu,
        tasks=rows * pieces,
        threads=row_threads(gpu, cols, VECTOR_BYTES / element_bytes, _GATHER_THREADS),
        moved_bytes=rows * (2 * row_bytes + INDEX_BYTES),
        again_bytes=rows * (pieces - 1) * INDEX_BYTES,
        registers=24.0,
        steps=2.0,  # the index, then the row
    )


class Gather(MemoryKernel):
    """Rows selected by an int64 index (``index_select``): each is read and written."""

    op = "gather"
    examples = ({"rows": 8192, "cols": 4096},)

    rows: int = size("rows gathered")
    cols: int = size("columns")

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        return (_gathered(gpu, calls["rows"], calls["cols"], calls.dtype.act_bytes),)


class _EmbeddingTable(MemoryKernel):
    """Parameters of the lookup and of its gradient."""

    tokens: int = size("tokens to look up")
    hidden: int = size("embedding dimension")
    vocab: int = size("rows of the embedding table")


class Embedding(_EmbeddingTable):
    """Embedding lookup: copies the table row of each token. Repeated tokens hit L2, so at most min(tokens, vocab) rows
    are streamed."""

    op = "embedding"
    examples = ({"tokens": 4096, "hidden": 4096, "vocab": 128256},)

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        tokens, element_bytes = calls["tokens"], calls.dtype.weight_bytes
        row_bytes = calls["hidden"] * element_bytes
        work = replace(
            _gathered(gpu, tokens, calls["hidden"], element_bytes),
            streamed_bytes=np.minimum(tokens, calls["vocab"]) * row_bytes,
            activation_bytes=tokens * (row_bytes + INDEX_BYTES),
        )
        return (work,)


class KvWrite(MemoryKernel):
    """Writes keys and values of new tokens to their slots of the paged KV cache (reshape_and_cache).

    One CTA per token (vLLM's reshape_and_cache_flash). A cache in another dtype costs a scale and a clamp per element.
    """

    op = "kv_write"
    examples = (
        {"tokens": 4096, "kv_heads": 8, "head_dim": 128},
        {"tokens": 64, "kv_heads": 8, "head_dim": 128, "kv_dtype": "fp8"},
    )

    tokens: int = size("new tokens")
    kv_heads: int = size("key and value heads")
    head_dim: int = size("elements of a head")
    kv_dtype: str | None = choice("dtype of the KV cache, default: dtype", _KV_DTYPES, default=None)

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        elements = 2 * calls["kv_heads"] * calls["head_dim"]  # of a token: key and value
        kept = find_dtype(calls.choice("kv_dtype") or calls.choice("dtype"))
        return (token_move(gpu, calls["tokens"], elements, calls.dtype.act_bytes, kept.act_bytes),)


def token_move(gpu: Gpu, tokens: Array, elements: Array, in_bytes: float, out_bytes: float) -> Work:
    """``elements`` of each token to its cache slot (int64), perhaps in another dtype: one CTA per token."""
    threads = row_threads(gpu, elements / 2, VECTOR_ELEMENTS, _TOKEN_THREADS)
    converted = tokens * elements * (in_bytes != out_bytes)
    return vector_kernel(
        gpu,
        tasks=tokens,
        threads=threads,
        moved_bytes=tokens * (elements * in_bytes + INDEX_BYTES),
        streamed_bytes=tokens * elements * out_bytes,
        flops=3 * converted,  # scale, and clamp from both sides
        converted=converted,
        steps=1 + ceil_div(elements / 2, threads * VECTOR_ELEMENTS),  # the slot, then the rows
    )


class EmbeddingBackward(_EmbeddingTable):
    """Dense gradient of an embedding table (embedding_dense_backward): zeros, then the sum of each token's gradients.

    Beyond 3,072 tokens the ids are sorted, equal ones summed ten at a time in fp32, and the partial sums added into the
    table.
    """

    op = "embedding_backward"
    examples = ({"tokens": 8192, "hidden": 4096, "vocab": 128256}, {"tokens": 2048, "hidden": 1024, "vocab": 50257})

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
        return (
            fill_kernel(gpu, table_bytes),
            _unsorted(gpu, tokens, hidden, read_bytes + 2 * written_bytes, element_bytes, ~sorts),
            _sort(gpu, tokens, vocab, sorts),
            _rows(gpu, tokens, hidden, read_bytes + part_bytes, sorts),
            _rows(gpu, tokens, hidden, part_bytes + written_bytes, sorts),
        )


def _unsorted(
    gpu: Gpu, tokens: Array, hidden: Array, moved_bytes: Array, element_bytes: float, runs: NDArray[np.bool_]
) -> Work:
    """Every CTA reads all ids; of the warps with the same token one adds for all."""
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
    """Radix sort of the ids with their positions, and the small kernels that find runs of equal ids."""
    passes = np.maximum(1.0, ceil_div(np.log2(np.maximum(vocab, 2.0)), _RADIX_BITS))
    moved = tokens * INDEX_BYTES * (4 * passes + _SEGMENT_KERNELS)  # id and position, read and written
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
    """One thread per element of a row (compute_grad_weight, sum_and_scatter)."""
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
        steps=3.0,  # run, position, element
        runs=runs,
    )


_MAX_THREADS = 512.0
# Of a thread for each pair, beside the vector loads that the bytes imply: the pair, its cosine and its sine
# come one element at a time, and the head and the offset in it are a division (vLLM pos_encoding_kernels.cu).
_INSTRUCTIONS_PER_PAIR = 12.0


class Rope(MemoryKernel):
    """Rotary position embedding: rotates pairs of each query and key head by an angle of the position.

    One CTA per token. Reads and writes the first ``rotary_dim`` of each head; reads a row of a cos/sin table.
    """

    op = "rope"
    examples = (
        {"tokens": 4096, "q_heads": 32, "kv_heads": 8, "head_dim": 128},
        {"tokens": 64, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "rotary_dim": 64},
    )

    tokens: int = size("tokens")
    q_heads: int = size("query heads")
    kv_heads: int = size("key heads")
    head_dim: int = size("elements of a head")
    rotary_dim: int | None = size("rotary dimensions of a head, default: all", default=None, low=2)

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        head_dim = calls["head_dim"]
        rotary_dim = calls.given("rotary_dim", head_dim)
        return conflict(
            (rotary_dim > head_dim) | (rotary_dim % 2 != 0),
            "rotary_dim {rotary_dim:.0f} must be even and at most head_dim {head_dim:.0f}",
            {"rotary_dim": rotary_dim, "head_dim": head_dim},
        )

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        tokens, q_heads, element_bytes = calls["tokens"], calls["q_heads"], calls.dtype.act_bytes
        rotary_dim = calls.given("rotary_dim", calls["head_dim"])
        elements = (q_heads + calls["kv_heads"]) * rotary_dim  # of a token
        threads = row_threads(gpu, q_heads * rotary_dim, 2, _MAX_THREADS)
        work = vector_kernel(
            gpu,
            tasks=tokens,
            threads=threads,
            moved_bytes=tokens * (2 * elements * element_bytes + INDEX_BYTES),
            streamed_bytes=tokens * rotary_dim * element_bytes,  # rotary_dim/2 cosines and as many sines
            flops=tokens * 3 * elements,  # a pair: four products, two sums
            warp_instructions=tokens * _INSTRUCTIONS_PER_PAIR * elements / 2 / gpu.warp_threads,
            steps=1 + ceil_div(elements / 2, threads),  # first the position: it names the table row
        )
        return (work,)
