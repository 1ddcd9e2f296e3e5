"""rmsnorm and layernorm, one CTA per row, and their gradients; group_norm and its gradient.

The gradients follow PyTorch's layer_norm_kernel.cu (2.7 on), which also serves ``rms_norm`` where it is fused;
group_norm follows group_norm_kernel.cu: small kernels around two large ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, Conflicts, flag, not_multiple, size
from kernelcast.ops.reduce import reduction
from kernelcast.ops.spatial import FeatureMapKernel
from kernelcast.ops.vector import (
    ACCUMULATOR_BYTES,
    VECTOR_ELEMENTS,
    MemoryKernel,
    block_reduction,
    paced,
    row_threads,
    vector_kernel,
)
from kernelcast.ops.work import Array, Work, Works, ceil_div

_INPUT_THREADS = 128.0  # num_threads(): four warps a row
# ATen's layer_norm has a CTA of four warps for a row too, a vector of four elements a thread and step, once for the
# moments and once for the output, and waits for each before the next: on an H200 58 us for 112 steps of a row of 28,672
# in fp32. Rows up to the longest measured are left to the networks, which learned that wait.
_ROW_VECTOR, _ROW_STEP_CYCLES, _LONGEST_MEASURED = 4.0, 1000.0, 32768.0
_WEIGHT_COLS = 32.0  # block_dim_x: columns that a CTA sums over all rows
_MANY_ROWS = 65536.0  # beyond, and with few columns, CTAs share the rows and a sum over their parts follows
_PART_ROWS = 32.0  # rows_per_block_y of such a part
_MOST_PARTS = 32768.0  # CTAs of such a grid


class _Norm(MemoryKernel):
    """Both norms: a CTA reads its row, reduces it, scales it and writes it."""

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
            # L1 keeps the weights between the rows of one SM, so they are read from L2 once per SM.
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
        if calls.choice("stack") == "torch" and (long := cols > _LONGEST_MEASURED).any():
            steps = 2 * ceil_div(cols, _INPUT_THREADS * _ROW_VECTOR)
            work = replace(
                work,
                threads=np.where(long, _INPUT_THREADS, work.threads),
                serial_steps=np.where(long, steps, work.serial_steps),
                step_cycles=np.where(long, _ROW_STEP_CYCLES, work.step_cycles),
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
    """Both gradients: one CTA per row for dx; one CTA per 32 columns, down all rows, for the weights."""

    examples = ({"rows": 4096, "cols": 4096}, {"rows": 131072, "cols": 1024})
    vectors: ClassVar[float]  # gradients of ``cols`` weights; the forward pass kept as many fp32 values per row
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
        """dx: sums over the row, then the row again, from L1 or L2."""
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
        """Sums over all rows, element by element: x and dy are read a second time."""
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
            steps=ceil_div(each, warps * 8) + 1,  # eight rows per thread are in flight
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


_BLOCK_THREADS = 512.0  # kCUDABlockReduceNumThreads, of a CTA that reduces at least so many numbers
_WARP_THREADS = 32.0  # of a CTA that reduces fewer
_CHANNEL_THREADS = 256.0  # kCUDANumThreads, one value per channel
_FEW_IMAGES = 128.0  # kReduceTileSize: up to so many, a thread sums the weights' gradients over the images
_TILE = 32.0
# A thread waits for each element before the next: on an H200 33 us for 80 steps of the statistics.
_STEP_CYCLES = 820.0
_REDUCE_CYCLES = 4000.0  # the threads of a CTA join their sums
_COPY_THREADS, _COPY_ELEMENTS = 128.0, 4.0
_OFFSET_INSTRUCTIONS = 20.0  # of a thread per element and tensor: its offset, over two axes


class _GroupNorm(FeatureMapKernel):
    """Parameters of both directions."""

    examples = (
        {"batch": 8, "channels": 320, "spatial": 4096, "groups": 32},
        {"batch": 64, "channels": 1024, "spatial": 1, "groups": 8},
    )

    groups: int = size("groups of channels")

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        return not_multiple(calls.numbers, "channels", "groups")

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        teams = calls["batch"] * calls["groups"]
        return {
            **super().shape_features(calls, gpu),
            "log_group": np.log2(calls["channels"] / calls["groups"] * calls["spatial"]),
            "log_waves": np.log2(teams / gpu.sm_count),
            "tail": ceil_div(teams, gpu.sm_count) * gpu.sm_count / teams - 1,
        }


class GroupNorm(_GroupNorm):
    """Group norm: one CTA per group of an image for the statistics, then an element-wise kernel."""

    op = "group_norm"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        batch, channels, spatial, groups = (calls[name] for name in ("batch", "channels", "spatial", "groups"))
        elements, element_bytes = batch * channels * spatial, calls.dtype.act_bytes
        moments = _team_sums(gpu, batch * groups, elements, 1.0, element_bytes, flops=7.0)
        return (
            replace(moments, xu_ops=elements / (batch * groups)),  # Welford's division
            _a_channel(gpu, batch * channels, 6.0),
            _elementwise(gpu, elements, 2.0 * element_bytes, 3.0, element_bytes < 4),
        )


class GroupNormBackward(_GroupNorm):
    """Gradients of group norm: sums per channel and image, three values per group, dx, and the weights'."""

    op = "group_norm_backward"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        batch, channels, spatial, groups = (calls[name] for name in ("batch", "channels", "spatial", "groups"))
        elements, element_bytes = batch * channels * spatial, calls.dtype.act_bytes
        many = batch > _FEW_IMAGES
        down = np.where(many, ceil_div(batch, _TILE), batch)
        weights = vector_kernel(
            gpu,
            tasks=ceil_div(channels, np.where(many, _TILE, _CHANNEL_THREADS)),
            threads=np.where(many, _TILE * _TILE / 2, _CHANNEL_THREADS),
            moved_bytes=2 * ACCUMULATOR_BYTES * batch * channels + 2 * channels * element_bytes,
            steps=down,
        )
        return (
            _team_sums(gpu, batch * channels, elements, 2.0, element_bytes, flops=3.0),
            _a_channel(gpu, batch * channels, 2.0),
            _team_sums(gpu, batch * groups, batch * channels, 3.0, ACCUMULATOR_BYTES, flops=6.0),
            _elementwise(gpu, elements, 3.0 * element_bytes, 5.0, element_bytes < 4),
            paced(weights, gpu, _STEP_CYCLES),
        )


def _team_sums(gpu: Gpu, teams: Array, elements: Array, reads: float, element_bytes: float, *, flops: float) -> Work:
    """One CTA (or warp, for few elements) per sum, element by element."""
    each = elements / teams
    threads = np.where(each < _BLOCK_THREADS, _WARP_THREADS, _BLOCK_THREADS)
    smem_bytes, instructions = block_reduction(gpu, threads, 2.0)
    work = vector_kernel(
        gpu,
        tasks=teams,
        threads=threads,
        moved_bytes=reads * elements * element_bytes + 2 * teams * ACCUMULATOR_BYTES,
        flops=flops * elements,
        converted=reads * elements if element_bytes < 4 else 0.0,
        smem_bytes=teams * smem_bytes,
        warp_instructions=teams * instructions + 6 * reads * elements / gpu.warp_threads,
        steps=ceil_div(each, threads),
    )
    return replace(paced(work, gpu, _STEP_CYCLES), task_cycles=_REDUCE_CYCLES)


def _a_channel(gpu: Gpu, channels: Array, numbers: float) -> Work:
    """A scale and a shift per channel and image."""
    return vector_kernel(
        gpu,
        tasks=ceil_div(channels, _CHANNEL_THREADS),
        threads=_CHANNEL_THREADS,
        moved_bytes=numbers * ACCUMULATOR_BYTES * channels,
    )


def _elementwise(gpu: Gpu, elements: Array, moved: float, tensors: float, converts: bool) -> Work:
    """Over (images · channels) x pixels with values broadcast over the pixels: every offset is computed."""
    return vector_kernel(
        gpu,
        tasks=ceil_div(elements, _COPY_THREADS * _COPY_ELEMENTS),
        threads=_COPY_THREADS,
        moved_bytes=moved * elements,
        flops=4 * elements,
        converted=tensors * elements if converts else 0.0,
        warp_instructions=_OFFSET_INSTRUCTIONS * tensors * elements / gpu.warp_threads,
    )
