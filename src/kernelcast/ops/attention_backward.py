"""attention_backward: gradients of scaled dot-product attention, as FlashAttention and cuDNN compute them.

A task is one tile of keys of one query head, which loops over the query tiles that see it. For each it recomputes the
scores and makes five matrix products (the forward makes two): S = Q Kᵀ, dP = dO Vᵀ, dV += Pᵀ dO, dQ += dS K, dK += dSᵀ
Q (FlashAttention-2, algorithm 2). A kernel before it takes the row sums of dO · O and clears dQ; a kernel after it
converts dQ from fp32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.hardware.gpu import TCGEN05, WIDE
from kernelcast.ops.base import Calls, Configuration, choice, flag
from kernelcast.ops.dtypes import DType, matmul_pipe
from kernelcast.ops.flash import BACKENDS, kv_steps, visible_pairs
from kernelcast.ops.kernel_selection import default_backend, stack_backend
from kernelcast.ops.reduce import reduction
from kernelcast.ops.requests import EqualRequests, equal_heads
from kernelcast.ops.vector import ACCUMULATOR_BYTES, VECTOR_BYTES, vector_kernel
from kernelcast.ops.work import Array, Work, Works, ceil_div

LIBRARIES = ("fa2", "fa3", "fa4", "cudnn")  # of attention's backends those that have a backward pass
_PRODUCTS = 5.0
_SCORE_FLOPS = 6.0  # a score: scale and subtract the row's log-sum, dS = P (dP − D), and two conversions
_ROW_BYTES = 8.0  # of a query row: its log-sum and its D, fp32
_ROW_THREADS = 128.0  # of the passes before and after
# Tiles (queries, keys) by head size, up to each: FlashAttention-3's flash_bwd_launch_template.h for SM90, and
# FlashAttention-2's, which takes the smaller where a CTA has less than 144 KB of shared memory. What cuDNN has is not
# documented: as FlashAttention-3. Blackwell (FlashAttention-4): two tiles of 128 by 128.
_HEAD_SIZES = (64, 96, 128, 192)
_SM90 = ((128, 128), (64, 128), (64, 128), (64, 96), (64, 80))
_LARGE = ((128, 128), (64, 128), (64, 128), (64, 64), (64, 64))
_SMALL = ((64, 128), (64, 128), (64, 64), (64, 64), (64, 32))
_SM100 = ((128, 128),) * 5
_LARGE_SMEM_BYTES = 144 * 1024


class AttentionBackward(EqualRequests):
    """Gradients of softmax(Q Kᵀ) V with respect to Q, K and V, for a batch of equal requests."""

    op = "attention_backward"
    dtypes = ("fp32", "fp16", "bf16")
    examples = (
        {"batch": 4, "q_len": 4096, "kv_len": 4096, "q_heads": 32, "head_dim": 128},
        {"batch": 4, "q_len": 2048, "kv_len": 2048, "q_heads": 32, "kv_heads": 8, "head_dim": 64, "backend": "fa2"},
    )

    causal: bool = flag("causal mask", default=True)
    backend: str | None = choice("attention backend, default: the usual one on the GPU", LIBRARIES, default=None)

    @classmethod
    def with_defaults(cls, configuration: Configuration, gpu: Gpu) -> dict[str, str | None]:
        return {**configuration, "backend": configuration["backend"] or stack_backend(cls.op, configuration, gpu)}

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        dtype, name = calls.dtype, calls.choice("backend") or default_backend(cls.op, gpu, calls.choice("dtype"))
        queries, keys, dim = (calls[x] for x in ("q_len", "kv_len", "head_dim"))
        q_rows = calls["batch"] * calls["q_heads"] * queries
        kv_rows = calls["batch"] * calls.given("kv_heads", calls["q_heads"]) * keys
        heads = equal_heads(calls)
        grouped, elements = heads.kv < heads.queries, 2 * kv_rows * dim
        # GQA: dK and dV of the query heads that share a KV head. FlashAttention-2 writes them all and sums them after
        # (mha_bwd's dk_expanded); the others add in fp32 by atomics, and convert.
        if name == "fa2":
            shared = heads.queries / heads.kv
            joined = reduction(gpu, shared, elements, dtype.out_bytes, launches=2.0, runs=grouped)
        else:
            joined = _narrow(gpu, dtype, elements, grouped)
        return (
            _row_sums(gpu, dtype, q_rows, dim),
            _gradients(gpu, dtype, name, calls, kv_rows),
            _narrow(gpu, dtype, q_rows * dim, True),
            joined,
        )


def _wide_unit(gpu: Gpu) -> bool:
    """wgmma and tcgen05 read operands from shared memory and keep P and dS in registers or tensor memory."""
    return gpu.instruction_path in WIDE


def gradient_tiles(gpu: Gpu, name: str, dim: Array, causal: Array) -> tuple[Array, Array]:
    """(queries, keys) of a tile."""
    if gpu.instruction_path == TCGEN05 and name != "fa2":
        table = _SM100
    elif name != "fa2":
        table = _SM90
    else:
        table = _LARGE if gpu.smem_bytes_per_cta >= _LARGE_SMEM_BYTES else _SMALL
    fits = [dim <= most for most in _HEAD_SIZES]
    tile_q, tile_kv = (np.select(fits, [float(t[i]) for t in table[:-1]], float(table[-1][i])) for i in (0, 1))
    if table is _SM90:  # without a mask FlashAttention-3 has registers left
        tile_q = np.where((dim > 96) & (dim <= 128) & (causal == 0), 80.0, tile_q)
    return tile_q, tile_kv


def _gradients(gpu: Gpu, dtype: DType, name: str, calls: Calls, kv_rows: Array) -> Work:
    """dQ, dK and dV. Every tile of keys adds its part of dQ in fp32, by atomics in L2."""
    queries, keys, dim, causal = (calls[x] for x in ("q_len", "kv_len", "head_dim", "causal"))
    lanes = calls["batch"] * calls["q_heads"]
    grouped = equal_heads(calls).kv < calls["q_heads"]
    tile_q, tile_kv = gradient_tiles(gpu, name, dim, causal)
    none, before = np.zeros_like(queries), np.where(causal > 0, keys - queries, np.inf)
    q_tiles, kv_tiles = ceil_div(queries, tile_q), ceil_div(keys, tile_kv)
    steps = kv_steps(queries, keys, none + 1, tile_q, tile_kv, causal, none) / kv_tiles  # of the mean task
    # Under the mask, a tile of keys starts at the first query that sees its first key.
    first = np.floor(np.maximum(0.0, (kv_tiles - 1) * tile_kv - before) / tile_q)
    seen_by_all = np.where(causal > 0, np.minimum(kv_tiles, ceil_div(before + tile_q, tile_kv)), kv_tiles)

    scores = steps * tile_q * tile_kv
    flops = 2 * _PRODUCTS * scores * dim
    pipe = matmul_pipe(gpu, dtype.name)
    kept_bytes = np.where(grouped & (name != "fa2"), ACCUMULATOR_BYTES, dtype.out_bytes)  # of a number of dK and dV
    q_rows = lanes * queries
    kept_rows = np.where(grouped & (name != "fa2"), kv_rows, lanes * keys)  # fa2 keeps those of each query head apart
    return Work(
        tasks=lanes * kv_tiles,
        schedule="longest_first",
        longest=q_tiles / steps,
        shortest=(q_tiles - first) / steps,
        longest_count=lanes * seen_by_all,
        tensor_flops=flops if pipe == "tensor" else 0.0,
        tensor_dtype=dtype.math,
        fma_flops=scores * _SCORE_FLOPS + (flops if pipe == "fma" else 0.0),
        xu_ops=scores,
        smem_bytes=steps * _smem_step(gpu, name, dtype.act_bytes, tile_q, tile_kv, dim),
        l2_bytes=2 * tile_kv * dim * (dtype.act_bytes + kept_bytes)
        + steps * tile_q * (dim * (2 * dtype.act_bytes + ACCUMULATOR_BYTES) + _ROW_BYTES),
        activation_bytes=q_rows * (dim * (2 * dtype.act_bytes + ACCUMULATOR_BYTES) + _ROW_BYTES)
        + 2 * dim * (kv_rows * dtype.act_bytes + kept_rows * kept_bytes),
        threads=384.0 if _wide_unit(gpu) else 256.0,
        registers_per_thread=168.0 if _wide_unit(gpu) else 255.0,
        smem_bytes_per_cta=np.minimum(
            (2 * tile_kv * dim + 3 * tile_q * dim + 2 * tile_q * tile_kv) * dtype.act_bytes, gpu.smem_bytes_per_cta
        ),
        serial_steps=q_tiles,
        useful_flops=lanes * visible_pairs(queries, keys, causal, none) * 2 * _PRODUCTS * dim,
        tile={"tile_q": tile_q, "tile_kv": tile_kv},
    )


def _smem_step(gpu: Gpu, name: str, element_bytes: float, tile_q: Array, tile_kv: Array, dim: Array) -> Array:
    """Shared-memory bytes of one step: Q and dO are loaded once and read by two products each, K by two and V by one.

    An operand is read again for every ``rows_per_read`` rows of its product. mma.sync passes P and dS through shared
    memory to three products; wgmma only dS to one, but sends dQ through it on the way to L2.
    """
    tall = gpu.instruction_path == TCGEN05  # one tcgen05 instruction has 128 rows
    rows = 128.0 if tall else BACKENDS[name].rows_per_read
    again_q, again_kv = np.maximum(1.0, tile_kv / rows), np.maximum(1.0, tile_q / rows)
    inputs = dim * (tile_q * (2 + 4 * again_q) + tile_kv * (2 + again_kv)) * element_bytes
    scores = tile_q * tile_kv * element_bytes
    if _wide_unit(gpu):
        return inputs + 2 * scores + 2 * tile_q * dim * ACCUMULATOR_BYTES
    return inputs + 5 * scores


def _row_sums(gpu: Gpu, dtype: DType, rows: Array, dim: Array) -> Work:
    """D = rowsum(dO · O); clears dQ's sums."""
    elements = rows * dim
    return vector_kernel(
        gpu,
        tasks=ceil_div(elements * dtype.act_bytes, _ROW_THREADS * VECTOR_BYTES),
        threads=_ROW_THREADS,
        moved_bytes=elements * (2 * dtype.act_bytes + ACCUMULATOR_BYTES) + rows * ACCUMULATOR_BYTES,
        flops=2 * elements,
        converted=2 * elements if dtype.act_bytes < 4 else 0.0,
    )


def _narrow(gpu: Gpu, dtype: DType, elements: Array, runs: NDArray[np.bool_] | bool) -> Work:
    """Converts scaled fp32 sums to the dtype of the tensors."""
    return vector_kernel(
        gpu,
        tasks=ceil_div(elements * ACCUMULATOR_BYTES, _ROW_THREADS * VECTOR_BYTES),
        threads=_ROW_THREADS,
        moved_bytes=elements * (ACCUMULATOR_BYTES + dtype.out_bytes),
        flops=elements,
        converted=elements,
        runs=runs,
    )
