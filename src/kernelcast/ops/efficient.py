"""PyTorch's memory-efficient attention (mem_eff_attention/kernel_forward.h and kernel_backward.h, xFormers, CUTLASS).

Forward, a CTA takes 64 queries of a head (32 of wide heads) and walks over its keys. Backward, it takes tiles of keys
of one head, one after another, and walks over the queries of each; heads of a batch that do not fill the GPU are split
by their keys; dQ is added up in global memory; five products, as FlashAttention's. Nothing is loaded ahead of the
products, scores pass through shared memory, and iterators check every place: a step takes thousands of cycles, and an
SM has one to four CTAs to hide them. Registers and shared memory are those that our H200 reports, cycles of a step what
calls with a CTA an SM take there; instructions what calls that fill it take beside.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls
from kernelcast.ops.dtypes import dtype, matmul_pipe, runs
from kernelcast.ops.flash import kv_steps, visible_pairs
from kernelcast.ops.reduce import reduction
from kernelcast.ops.vector import ACCUMULATOR_BYTES, vector_kernel
from kernelcast.ops.work import Array, Work, Works, ceil_div

_PRODUCTS = 5.0
_SCORE_FLOPS = 6.0
_ENOUGH_HEADS = 256.0  # of a batch: above, short keys are not split
_ROW_BYTES = 8.0  # log-sum and row sum of dO · O, fp32
_SLOTS = 200.0  # CTAs that may keep gradients in global memory
_ROW_THREADS, _ROW_ELEMENTS = 128.0, 512.0  # a CTA of the passes before the backward kernel


@dataclass(frozen=True)
class _Kernel:
    """One that was compiled (generate_kernels.py, SM80 and above), for heads up to ``size``."""

    size: float
    queries: float  # of a tile
    keys: float
    registers: float
    smem_bytes: float
    step_cycles: float  # of a CTA alone on its SM

    @property
    def threads(self) -> float:
        return self.queries * self.keys / 32


# half, then fp32; the last also takes wider heads, in parts
_FORWARD = {
    True: (_Kernel(64, 64, 64, 128, 18944, 5400), _Kernel(128, 64, 128, 128, 52224, 9500),
           _Kernel(256, 32, 128, 122, 51200, 16400)),
    False: (_Kernel(64, 64, 64, 168, 36352, 13500), _Kernel(128, 64, 128, 244, 86016, 20000),
            _Kernel(256, 32, 128, 168, 76288, 41000)),
}  # fmt: skip
_BACKWARD = {
    True: (_Kernel(32, 64, 64, 165, 34560, 17000), _Kernel(64, 64, 64, 167, 42240, 17500),
           _Kernel(128, 128, 128, 128, 133632, 41000), _Kernel(256, 128, 64, 170, 60928, 118000)),
    False: (_Kernel(32, 64, 64, 232, 53504, 25000), _Kernel(64, 64, 64, 232, 53504, 27500),
            _Kernel(128, 128, 64, 224, 121344, 66000), _Kernel(256, 128, 64, 230, 121344, 143000)),
}  # fmt: skip
# Instructions of a score: of its own, and for each number of a head. fp32 is split into high and low parts.
_FORWARD_INSTRUCTIONS = {True: (22.0, 0.42), False: (100.0, 1.4)}
_BACKWARD_INSTRUCTIONS = {True: (75.0, 1.3), False: (400.0, 1.8)}


@dataclass(frozen=True)
class _Chosen:
    """The kernel of each call: numbers of it by call."""

    size: Array
    queries: Array
    keys: Array
    threads: Array
    registers: Array
    smem_bytes: Array
    step_cycles: Array


def _chosen(kernels: tuple[_Kernel, ...], dim: Array) -> _Chosen:
    fits = [dim <= kernel.size for kernel in kernels[:-1]]

    def column(name: str) -> Array:
        *smaller, largest = (float(getattr(kernel, name)) for kernel in kernels)
        return np.select(fits, smaller, largest)

    parts = np.maximum(1.0, ceil_div(dim, kernels[-1].size))
    names = ("queries", "keys", "threads", "registers", "smem_bytes")
    return _Chosen(size=column("size") * parts, step_cycles=column("step_cycles") * parts,
                   **{name: column(name) for name in names})  # fmt: skip


def multiplied_as(gpu: Gpu, name: str) -> str:
    """fp32 by tensor cores as tf32, where a GPU has them for it."""
    return "tf32" if name == "fp32" and runs(gpu, "tf32") else name


def efficient_forward(gpu: Gpu, calls: Calls, work: Work) -> Work:
    """``work``: of a kernel with these tiles that hides its steps; heads are padded to what kernels are made for."""
    dim, scores, half = calls["head_dim"], np.asarray(work.xu_ops), calls.dtype.act_bytes < 4
    kernel, (own, a_number) = _chosen(_FORWARD[half], dim), _FORWARD_INSTRUCTIONS[half]
    wide = ceil_div(dim, 32.0) * 32.0 + ceil_div(dim, kernel.keys) * kernel.keys
    instructions = scores * (own + a_number * kernel.size) / gpu.warp_threads
    return replace(
        work,
        tensor_flops=2 * scores * wide if np.any(work.tensor_flops) else 0.0,
        smem_bytes=np.asarray(work.smem_bytes) + scores * (ACCUMULATOR_BYTES + 2 * calls.dtype.act_bytes),
        other_warp_instructions=np.asarray(work.other_warp_instructions) + instructions,
        threads=kernel.threads,
        registers_per_thread=kernel.registers,
        smem_bytes_per_cta=np.minimum(kernel.smem_bytes, gpu.smem_bytes_per_cta),
        step_cycles=kernel.step_cycles,
        task_cycles=0.0,
    )


def efficient_backward(gpu: Gpu, calls: Calls) -> Works:
    """The kernel, and before it zeros for dQ's sums, and what the row sums of dO · O take in fp32 (16-bit kernels
    compute them themselves)."""
    half, rows = calls.dtype.act_bytes < 4, calls["batch"] * calls["q_heads"] * calls["q_len"]
    gradients, elements = _gradients(gpu, calls, half), rows * calls["head_dim"]
    ctas, number = ceil_div(elements, _ROW_ELEMENTS), elements * ACCUMULATOR_BYTES
    cleared = vector_kernel(gpu, tasks=ctas, threads=_ROW_THREADS, moved_bytes=number)
    if half:
        return cleared, gradients
    product = vector_kernel(gpu, tasks=ctas, threads=_ROW_THREADS, moved_bytes=3 * number, flops=elements)
    return product, reduction(gpu, calls["head_dim"], rows, ACCUMULATOR_BYTES, launches=2.0), cleared, gradients


def _splits(kernel: _Chosen, lanes: Array, keys: Array, half: bool) -> Array:
    """CTAs that share the keys of a head."""
    tiles = ceil_div(keys, kernel.keys)
    splits = np.where((lanes >= _ENOUGH_HEADS) & (keys <= 2 * kernel.keys), 1.0, tiles)
    kept = (kernel.size > 128) & half  # gradients of keys that do not fit registers, nor, as in fp32, the output
    return np.where(kept, np.clip(np.floor(_SLOTS / lanes), 1.0, splits), splits)


def _gradients(gpu: Gpu, calls: Calls, half: bool) -> Work:
    queries, keys, dim, causal = (calls[x] for x in ("q_len", "kv_len", "head_dim", "causal"))
    kind = dtype(multiplied_as(gpu, calls.choice("dtype")))
    on_tensor = matmul_pipe(gpu, kind.name) == "tensor"
    lanes, none = calls["batch"] * calls["q_heads"], np.zeros_like(queries)
    kernel, (own, a_number) = _chosen(_BACKWARD[half], dim), _BACKWARD_INSTRUCTIONS[half]
    tile_q, tile_kv = kernel.queries, kernel.keys
    q_tiles, kv_tiles = ceil_div(queries, tile_q), ceil_div(keys, tile_kv)
    splits = _splits(kernel, lanes, keys, half)
    mean = kv_steps(queries, keys, none + 1, tile_q, tile_kv, causal, none) / splits  # steps of the mean task
    scores = mean * tile_q * tile_kv
    flops = 2 * _PRODUCTS * scores * kernel.size
    longest = q_tiles * ceil_div(kv_tiles, splits)
    width = kind.act_bytes
    kept_bytes = np.where((kernel.size > 128) & half, ACCUMULATOR_BYTES, width)
    q_bytes = queries * dim * (2 * width + ACCUMULATOR_BYTES) + queries * _ROW_BYTES
    return Work(
        tasks=lanes * splits,
        schedule="longest_first",
        longest=longest / mean,
        shortest=np.where(causal > 0, ceil_div(q_tiles, kv_tiles) / mean, 1.0),
        longest_count=np.where(causal > 0, lanes, lanes * splits),
        tensor_flops=flops if on_tensor else 0.0,
        tensor_dtype=kind.math,
        fma_flops=scores * _SCORE_FLOPS + (0.0 if on_tensor else flops),
        xu_ops=scores,
        other_warp_instructions=scores * (own + a_number * kernel.size) / gpu.warp_threads,
        smem_bytes=mean * (dim * (6 * tile_q + 3 * tile_kv) + 5 * tile_q * tile_kv) * width,
        l2_bytes=mean * tile_q * (dim * (2 * width + 2 * ACCUMULATOR_BYTES) + _ROW_BYTES)
        + kv_tiles / splits * 2 * tile_kv * dim * (width + kept_bytes),
        activation_bytes=lanes * (q_bytes + 2 * keys * dim * (width + kept_bytes)),
        threads=kernel.threads,
        registers_per_thread=kernel.registers,
        smem_bytes_per_cta=np.minimum(kernel.smem_bytes, gpu.smem_bytes_per_cta),
        serial_steps=longest,
        mean_steps=mean,
        step_cycles=kernel.step_cycles,
        useful_flops=lanes * visible_pairs(queries, keys, causal, none) * 2 * _PRODUCTS * dim,
        tile={"tile_q": tile_q, "tile_kv": tile_kv, "kv_splits": splits},
    )
