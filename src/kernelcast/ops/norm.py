"""rmsnorm and layernorm, one CTA a row; and their gradients: that of the input, then that of the weights.

Sizes of the gradients follow PyTorch's layer_norm_kernel.cu (2.7 on), which also serves ``rms_norm`` where it is fused.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, flag, size
from kernelcast.ops.reduce import reduction
from kernelcast.ops.vector import (
    ACCUMULATOR_BYTES,
    VECTOR_ELEMENTS,
    MemoryKernel,
    block_reduction,
    row_threads,
    vector_kernel,
)
from kernelcast.ops.work import Array, Work, Works, ceil_div

_INPUT_THREADS = 128.0  # num_threads(): four warps a row
_WEIGHT_COLS = 32.0  # block_dim_x: columns that a CTA sums over all rows
_MANY_ROWS = 65536.0  # beyond, and with few columns, CTAs share the rows and a sum over their parts follows
_PART_ROWS = 32.0  # rows_per_block_y of such a part
_MOST_PARTS = 32768.0  # CTAs of such a grid


class _Norm(MemoryKernel):
    """What both norms share: a CTA reads its row, reduces it, scales it and writes it."""

    examples = ({"rows": 4096, "cols": 4096}, {"rows": 1, "cols": 8192, "residual": True})
    flops_per_element: ClassVar[float]
    vectors: ClassVar[float]  # of ``cols`` weights; a row is reduced to as many numbers

    rows: int = size("rows (tokens)")
    cols: int = size("columns (hidden size), normalised over")
    residual: bool = flag("add a residual first, and write the sum back", default=False)

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        rows, cols, residual = calls["rows"], calls["cols"], calls["residual"]
        element_bytes = calls.dtype.act_bytes
        threads = row_threads(gpu, cols)
        smem_bytes, reduce_instructions = block_reduction(gpu, threads, cls.vectors)
        weight_bytes = cls.vectors * cols * element_bytes
        work = vector_kernel(
            gpu,
            tasks=rows,
            threads=threads,
            # x is read and y written; the residual is read and the sum written over it (vLLM fused_add_rms_norm).
            moved_bytes=rows * (2 + 2 * residual) * cols * element_bytes,
            # L1 keeps the weights between the rows of one SM, so they cross from L2 once an SM.
            again_bytes=weight_bytes * (np.minimum(rows, gpu.sm_count) - 1),
            streamed_bytes=weight_bytes,
            flops=rows * (cls.flops_per_element + residual) * cols,
            xu_ops=rows,  # one rsqrt
            converted=rows * (2 + cls.vectors + 2 * residual) * cols if element_bytes < 4 else 0.0,
            smem_bytes=rows * smem_bytes,
            warp_instructions=rows * reduce_instructions,
            registers=40.0,
            smem_bytes_per_cta=cls.vectors * 4 * (threads / gpu.warp_threads + 1),
            steps=ceil_div(cols, threads * VECTOR_ELEMENTS) + 1,  # the loads, then the reduction
        )
        return (work,)


class RmsNorm(_Norm):
    """Root-mean-square norm: y = x / sqrt(mean(x²) + ε) · weight, over each row."""

    op = "rmsnorm"
    flops_per_element = 4.0  # square and sum; times 1/rms; times weight
    vectors = 1.0


class LayerNorm(_Norm):
    """Layer norm: y = (x − mean) / sqrt(var + ε) · weight + bias, over each row."""

    op = "layernorm"
    flops_per_element = 8.0  # Welford's update 4; minus mean, times 1/σ, weight and bias
    vectors = 2.0  # weight and bias; mean and variance


class _NormBackward(MemoryKernel):
    """What both share: a CTA a row for dx; a CTA for each 32 columns, down all rows, for the weights."""

    examples = ({"rows": 4096, "cols": 4096}, {"rows": 131072, "cols": 1024})
    vectors: ClassVar[float]  # gradients of ``cols`` weights; the forward pass kept as many fp32 numbers a row
    input_flops: ClassVar[float]  # an element, both passes
    weight_flops: ClassVar[float]

    rows: int = size("rows (tokens)")
    cols: int = size("columns (hidden size), normalised over")

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        rows, cols = calls["rows"], calls["cols"]
        element_bytes = calls.dtype.act_bytes
        split = (rows > _MANY_ROWS) & (np.floor(cols / _WEIGHT_COLS) < np.floor(gpu.sm_count / 2))
        columns = ceil_div(cols, _WEIGHT_COLS)
        parts = np.where(split, np.minimum(np.floor(_MOST_PARTS / columns), ceil_div(rows, _PART_ROWS)), 1.0)
        return (
            cls._input(gpu, rows, cols, element_bytes),
            cls._weights(gpu, rows, cols, element_bytes, columns, parts),
            reduction(gpu, parts, cls.vectors * cols, element_bytes, launches=cls.vectors, runs=split),
        )

    @classmethod
    def _input(cls, gpu: Gpu, rows: Array, cols: Array, element_bytes: float) -> Work:
        """dx: sums over the row first, then the row again, from L1 or L2."""
        elements = rows * cols
        weight_bytes = cols * element_bytes
        smem_bytes, instructions = block_reduction(gpu, np.full_like(rows, _INPUT_THREADS), cls.vectors)
        return vector_kernel(
            gpu,
            tasks=rows,
            threads=_INPUT_THREADS,
            moved_bytes=3 * elements * element_bytes + rows * cls.vectors * ACCUMULATOR_BYTES,
            # x and dy once more; the weight once an SM, whose L1 keeps it
            again_bytes=2 * elements * element_bytes + weight_bytes * (np.minimum(rows, gpu.sm_count) - 1),
            streamed_bytes=weight_bytes,
            flops=cls.input_flops * elements,
            converted=7 * elements if element_bytes < 4 else 0.0,  # x, dy and weight twice; dx
            smem_bytes=rows * smem_bytes,
            warp_instructions=rows * instructions,
            registers=40.0,
            smem_bytes_per_cta=4 * cls.vectors * (_INPUT_THREADS / gpu.warp_threads + 1),
            steps=2 * ceil_div(cols, _INPUT_THREADS * VECTOR_ELEMENTS) + 1,
        )

    @classmethod
    def _weights(cls, gpu: Gpu, rows: Array, cols: Array, element_bytes: float, columns: Array, parts: Array) -> Work:
        """Sums over all rows, single elements at a time: x and dy are read a second time."""
        elements = rows * cols
        warps = np.where(parts > 1, 1.0, np.select([rows < 64, rows < 128, rows < 256], [1.0, 8.0, 16.0], 32.0))
        each = rows / parts  # of one CTA
        return vector_kernel(
            gpu,
            tasks=columns * parts,
            threads=warps * _WEIGHT_COLS,
            moved_bytes=2 * elements * element_bytes
            + rows * cls.vectors * ACCUMULATOR_BYTES
            + parts * cls.vectors * cols * element_bytes,
            again_bytes=(columns - 1) * rows * cls.vectors * ACCUMULATOR_BYTES,  # every CTA reads its rows'
            flops=cls.weight_flops * elements,
            converted=2 * elements if element_bytes < 4 else 0.0,
            # the warps of a CTA pass their sums through shared memory: written, then read across
            smem_bytes=np.where(warps > 1, 2 * cls.vectors * warps * _WEIGHT_COLS * 4 * columns * parts, 0.0),
            warp_instructions=2 * elements / gpu.warp_threads,
            registers=40.0,
            smem_bytes_per_cta=np.where(warps > 1, 2 * 4 * (_WEIGHT_COLS + 1) * warps, 0.0),
            steps=ceil_div(each, warps * 8) + 1,  # eight rows a thread are in flight
        )


class RmsNormBackward(_NormBackward):
    """Gradients of the root-mean-square norm: input, then weight. Reads x and dy twice."""

    op = "rmsnorm_backward"
    vectors = 1.0  # 1/rms
    input_flops = 10.0  # dy·w, times x/rms, summed 4; n·dy·w minus x/rms·sum, scaled 6
    weight_flops = 3.0  # dy · x/rms, summed


class LayerNormBackward(_NormBackward):
    """Gradients of the layer norm: input, then weight and bias. Reads x and dy twice."""

    op = "layernorm_backward"
    vectors = 2.0  # mean and 1/σ
    input_flops = 14.0  # as above, minus the mean in both passes 2, and the sum of dy·w 2
    weight_flops = 5.0  # dy · (x − mean)/σ, summed 4; dy summed 1
