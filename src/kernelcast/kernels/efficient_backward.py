"""The backward pass of PyTorch's memory-efficient attention (mem_eff_attention/kernel_backward.h, xFormers).

A CTA takes tiles of keys of one head, one after another, and walks over the queries of each; heads of a batch that do
not fill the GPU are split by their keys. dQ is added up in global memory. Five products, as FlashAttention's.
"""

from __future__ import annotations

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls
from kernelcast.kernels.dtypes import dtype
from kernelcast.kernels.flash import kv_steps, visible_pairs
from kernelcast.kernels.reduce import reduction
from kernelcast.kernels.vector import ACCUMULATOR_BYTES, vector_kernel
from kernelcast.kernels.work import Array, Work, Works, ceil_div

_PRODUCTS = 5.0
_SCORE_FLOPS = 6.0
_ENOUGH_HEADS = 256.0  # of a batch: above, short keys are not split
_ROW_BYTES = 8.0  # log-sum and row sum of dO · O, fp32
_SLOTS = 200.0  # CTAs that may keep gradients in global memory


def _tiles(dim: Array, half: bool) -> tuple[Array, Array]:
    """(queries, keys) of a tile, and whether dK and dV stay in registers (generate_kernels.py, SM80 and above)."""
    small = dim <= 64
    queries = np.where(small, 64.0, np.where((dim <= 128) & half, 128.0, 64.0))
    keys = np.where(small, 64.0, 128.0)
    return queries, keys


def efficient_backward(gpu: Gpu, calls: Calls, products_of_fp32: float) -> Works:
    """The kernel, and before it zeros for dQ's sums, and what the row sums of dO · O take in fp32 (16-bit kernels
    compute them themselves)."""
    half = calls.dtype.act_bytes < 4
    rows = calls["batch"] * calls["q_heads"] * calls["q_len"]
    gradients, elements = _gradients(gpu, calls, half), rows * calls["head_dim"]
    cleared = vector_kernel(
        gpu, tasks=ceil_div(elements, 512.0), threads=128.0, moved_bytes=elements * ACCUMULATOR_BYTES
    )
    if half:
        return cleared, gradients
    product = vector_kernel(
        gpu,
        tasks=ceil_div(elements, 512.0),
        threads=128.0,
        moved_bytes=3 * elements * ACCUMULATOR_BYTES,
        flops=elements,
    )
    return product, reduction(gpu, calls["head_dim"], rows, ACCUMULATOR_BYTES, launches=2.0), cleared, gradients


def _gradients(gpu: Gpu, calls: Calls, half: bool) -> Work:
    queries, keys, dim, causal = (calls[x] for x in ("q_len", "kv_len", "head_dim", "causal"))
    kind = calls.dtype if half else dtype("tf32")
    lanes = calls["batch"] * calls["q_heads"]
    tile_q, tile_kv = _tiles(dim, half)
    none = np.zeros_like(queries)
    q_tiles, kv_tiles = ceil_div(queries, tile_q), ceil_div(keys, tile_kv)
    steps = kv_steps(queries, keys, none + 1, tile_q, tile_kv, causal, none)  # of a head
    splits = np.where((lanes >= _ENOUGH_HEADS) & (keys <= 2 * tile_kv), 1.0, kv_tiles)
    kept = (dim > tile_kv) | (not half)  # gradients of keys that do not fit registers
    splits = np.where(kept, np.clip(np.floor(_SLOTS / lanes), 1.0, splits), splits)
    mean = steps / splits
    scores = mean * tile_q * tile_kv
    longest = q_tiles * ceil_div(kv_tiles, splits)
    width = kind.act_bytes
    kept_bytes = np.where(kept, ACCUMULATOR_BYTES, width)
    q_bytes = queries * dim * (2 * width + ACCUMULATOR_BYTES) + queries * _ROW_BYTES
    return Work(
        tasks=lanes * splits,
        schedule="longest_first",
        longest=longest / mean,
        shortest=np.where(causal > 0, ceil_div(q_tiles, kv_tiles) / mean, 1.0),
        longest_count=np.where(causal > 0, lanes, lanes * splits),
        tensor_flops=2 * _PRODUCTS * scores * dim,
        tensor_dtype=kind.math,
        fma_flops=scores * _SCORE_FLOPS,
        xu_ops=scores,
        smem_bytes=mean * (dim * (6 * tile_q + 3 * tile_kv) + 5 * tile_q * tile_kv) * width,
        l2_bytes=mean * tile_q * (dim * (2 * width + 2 * ACCUMULATOR_BYTES) + _ROW_BYTES)
        + kv_tiles / splits * 2 * tile_kv * dim * (width + kept_bytes),
        activation_bytes=lanes * (q_bytes + 2 * keys * dim * (width + kept_bytes)),
        threads=tile_q * tile_kv / 32.0,
        registers_per_thread=255.0,
        smem_bytes_per_cta=np.minimum(
            (2 * tile_kv * dim + 2 * tile_q * dim + 2 * tile_q * tile_kv) * width, gpu.smem_bytes_per_cta
        ),
        serial_steps=longest,
        useful_flops=lanes * visible_pairs(queries, keys, causal, none) * 2 * _PRODUCTS * dim,
        tile={"tile_q": tile_q, "tile_kv": tile_kv, "kv_splits": splits},
    )
