"""rmsnorm and layernorm, one CTA a row; and what every row-wise vector kernel shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, Kernel, flag, size
from kernelcast.kernels.dtypes import dtype
from kernelcast.kernels.work import Array, Number, Phases, Work, ceil_div

VECTOR_DTYPES = ("fp32", "fp16", "bf16")  # what vector kernels load; all of them compute in fp32
VECTOR_BYTES = 16.0  # the widest load or store of a thread
VECTOR_ELEMENTS = 8.0  # elements a thread takes at once: 16 bytes of bf16 (vLLM's vectorised norms)
MAX_THREADS = 1024.0
_WAVEFRONT_BYTES = 128.0  # an access to shared memory takes a cycle of all 32 banks, however few it uses


def row_threads(gpu: Gpu, cols: Array, elements: float = VECTOR_ELEMENTS, most: float = MAX_THREADS) -> Array:
    """Threads of a CTA that takes one row: ``elements`` each, whole warps, at most ``most``."""
    return np.minimum(most, ceil_div(ceil_div(cols, elements), gpu.warp_threads) * gpu.warp_threads)


def side_instructions(gpu: Gpu, vector_bytes: Number, converted: Number = 0.0) -> Array:
    """Warp instructions beside loads, stores and math.

    Two of index arithmetic for each 16-byte vector, and one for each element that changes format between the
    16 bits in memory and the fp32 that the math runs in.
    """
    return (2 * np.asarray(vector_bytes) / VECTOR_BYTES + converted) / gpu.warp_threads


def block_reduction(gpu: Gpu, threads: Array, values: float = 1.0) -> tuple[Array, Array]:
    """(shared-memory bytes, warp instructions) to reduce ``values`` numbers a thread over one CTA.

    Five shuffle-and-combine pairs inside each warp, as many in the warp that joins them (cub::BlockReduce);
    each warp writes its part and reads the result, the joining warp reads all parts.
    """
    warps = threads / gpu.warp_threads
    levels = np.log2(gpu.warp_threads)
    return values * (2 * warps + 1) * _WAVEFRONT_BYTES, values * (warps + 1) * 2 * levels


@dataclass(frozen=True, kw_only=True)
class _Norm(Kernel):
    """What both norms share: a CTA reads its row, reduces it, scales it and writes it."""

    family: ClassVar[str] = "memory"
    dtypes: ClassVar[tuple[str, ...]] = VECTOR_DTYPES
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"rows": 4096, "cols": 4096},
        {"rows": 1, "cols": 8192, "residual": True},
    )
    flops_per_element: ClassVar[float]
    weight_vectors: ClassVar[float]  # of ``cols`` elements
    sums: ClassVar[float]  # numbers that the row is reduced to

    rows: int = size("rows (tokens)")
    cols: int = size("columns (hidden size), normalised over")
    residual: bool = flag("add a residual first, and write the sum back", default=False)

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Phases:
        rows, cols, residual = calls["rows"], calls["cols"], calls["residual"]
        element_bytes = dtype(calls.choice("dtype")).act_bytes
        threads = row_threads(gpu, cols)
        # x is read and y written; the residual is read and the sum written over it (vLLM fused_add_rms_norm).
        row_bytes = (2 + 2 * residual) * cols * element_bytes
        weight_bytes = cls.weight_vectors * cols * element_bytes
        # L1 keeps the weights between the rows of one SM, so they cross from L2 once an SM.
        l2_bytes = row_bytes + weight_bytes * np.minimum(1, gpu.sm_count / rows)
        smem_bytes, reduce_instructions = block_reduction(gpu, threads, cls.sums)
        converted = (2 + cls.weight_vectors + 2 * residual) * cols if element_bytes < 4 else 0.0
        flops = (cls.flops_per_element + residual) * cols
        work = Work(
            tasks=rows,
            longest_count=rows,
            fma_flops=flops,
            xu_ops=1.0,  # one rsqrt
            smem_bytes=smem_bytes,
            l2_bytes=l2_bytes,
            other_warp_instructions=side_instructions(gpu, l2_bytes, converted) + reduce_instructions,
            streamed_bytes=weight_bytes,
            activation_bytes=rows * row_bytes,
            threads=threads,
            registers_per_thread=40.0,
            smem_bytes_per_cta=cls.sums * 4 * (threads / gpu.warp_threads + 1),
            serial_steps=ceil_div(cols, threads * VECTOR_ELEMENTS) + 1,  # the loads, then the reduction
            useful_flops=rows * flops,
        )
        return (work,)


@dataclass(frozen=True, kw_only=True)
class RmsNorm(_Norm):
    """Root-mean-square norm: y = x / sqrt(mean(x²) + ε) · weight, over each row."""

    op: ClassVar[str] = "rmsnorm"
    flops_per_element: ClassVar[float] = 4.0  # square and sum; times 1/rms; times weight
    weight_vectors: ClassVar[float] = 1.0
    sums: ClassVar[float] = 1.0


@dataclass(frozen=True, kw_only=True)
class LayerNorm(_Norm):
    """Layer norm: y = (x − mean) / sqrt(var + ε) · weight + bias, over each row."""

    op: ClassVar[str] = "layernorm"
    flops_per_element: ClassVar[float] = 8.0  # Welford's update 4; minus mean, times 1/σ, weight and bias
    weight_vectors: ClassVar[float] = 2.0
    sums: ClassVar[float] = 2.0
