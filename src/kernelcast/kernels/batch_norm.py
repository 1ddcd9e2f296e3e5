"""batch_norm and its gradient as PyTorch launches them: its own kernels, or cuDNN's where its rules allow.

Sizes follow PyTorch's Normalization.cu and Normalization.cuh. Instance norm is batch norm of one image whose channels
are those of all images.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, choice, flag, size
from kernelcast.kernels.spatial import SpatialKernel, last, layout, power_below, width_of
from kernelcast.kernels.vector import ACCUMULATOR_BYTES, VECTOR_DTYPES, Mask, paced, vector_kernel
from kernelcast.kernels.work import Array, Work, Works, ceil_div

_MOST_THREADS = 512.0  # MAX_BLOCK_SIZE of a CTA
_TILE_CHANNELS = 32.0  # OPTIMAL_TILE_W: channels of a CTA, channels last
_THREAD_ROWS, _ROWS_AT_ONCE = 16.0, 4.0  # ELEMENTS_PER_THREAD, ELEMENTS_PER_ITER
_MOST_ROW_CTAS = 128.0  # MAX_H_BLOCK
_TRANSFORM_CTAS = 256.0 * 1024.0  # most of the normalising kernel, all channels
# A thread waits for each element before it asks for the next: on our H200 342 us for 800 steps of the statistics,
# 727 us for 1,600 of the gradient, 14 us for 32 of an instance norm.
_STEP_CYCLES = 850.0
_REDUCE_CYCLES = 4500.0  # the threads of a CTA join their sums
_LAST_STEP_CYCLES = 800.0  # channels last: of four elements, asked for together
_WELFORD_INSTRUCTIONS = 105.0  # channels last, of a thread for an element: a division, three bounds, five sums
_SUM_INSTRUCTIONS = 50.0
_APPLY_INSTRUCTIONS = 20.0  # a tensor
_FORWARD_PASSES, _BACKWARD_PASSES = 3.0, 2.0  # of cuDNN's kernels over a channel; four elements at a time forward


class _BatchNorm(SpatialKernel):
    """Parameters of both directions."""

    examples = (
        {"batch": 32, "channels": 64, "spatial": 12544},
        {"batch": 32, "channels": 256, "spatial": 3136, "layout": "nhwc"},
        {"batch": 1, "channels": 2048, "spatial": 49, "training": False},
    )

    batch: int = size("images")
    channels: int = size("channels, each with statistics of its own")
    spatial: int = size("pixels of a channel of one image")
    layout: str = layout()
    training: bool = flag("statistics of this batch; else those that were kept", default=True)
    weights: str | None = choice("number format of the weights; not given: dtype", VECTOR_DTYPES, default=None)

    @classmethod
    def hints(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        reduced = calls["batch"] * calls["spatial"]
        return {
            **super().hints(calls, gpu),
            "log_reduced": np.log2(reduced),
            "log_waves": np.log2(calls["channels"] / gpu.sm_count),
            "tail": ceil_div(calls["channels"], gpu.sm_count) * gpu.sm_count / calls["channels"] - 1,
        }


class BatchNorm(_BatchNorm):
    """Batch norm: statistics of each channel over images and pixels, then the normalisation; or that alone.

    One CTA a channel goes through all images for the statistics (channels last: CTAs of 32 channels share the rows).
    """

    op = "batch_norm"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        trains = calls["training"] > 0
        shape = _Shape(calls)
        if by_cudnn(calls):
            return (_library(gpu, calls, shape, 2.0, np.where(trains, _FORWARD_PASSES / 4, 0.0)),)
        normalise = _by_rows(gpu, shape, 2.0, 4.0) if last(calls) else _planes(gpu, shape)
        collect = _row_sums(gpu, shape, 1.0, trains) if last(calls) else _channel_pass(gpu, shape, 1, 0, trains)
        # kept statistics are moved on, or read: σ is inverted in a kernel of its own, beside a copy
        return (collect, _small(gpu, shape, np.where(trains, 1.0, 2.0)), normalise)


class BatchNormBackward(_BatchNorm):
    """Gradients of batch norm: of the weights and of the input.

    A CTA a channel sums dy and dy·x over all images, then goes through them again for dx; channels last these are two
    kernels.
    """

    op = "batch_norm_backward"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        shape = _Shape(calls)
        if by_cudnn(calls):
            return (_library(gpu, calls, shape, 3.0, np.full(calls.count, _BACKWARD_PASSES)),)
        if last(calls):
            return (_row_sums(gpu, shape, 2.0, True), _by_rows(gpu, shape, 3.0, 6.0))
        return (_channel_pass(gpu, shape, 2, 1, True),)


def by_cudnn(calls: Calls) -> bool:
    """Whether PyTorch hands the norm to cuDNN: in fp32, and in fp16 with weights in fp32."""
    weights = calls.choice("weights") or calls.choice("dtype")
    return bool(weights == "fp32" and calls.choice("dtype") != "bf16")


def _library(gpu: Gpu, calls: Calls, shape: _Shape, tensors: float, passes: Array) -> Work:
    """cuDNN's kernel: a CTA of 512 threads a channel, or, channels last or without statistics, all SMs together.

    ``passes``: of single elements over a channel.
    """
    alone = (passes > 0) & (not last(calls))
    tasks = np.where(alone, shape.channels, ceil_div(shape.elements, _MOST_THREADS * 4))
    work = vector_kernel(
        gpu,
        tasks=tasks,
        threads=_MOST_THREADS,
        moved_bytes=tensors * shape.elements * shape.element_bytes,
        flops=8 * shape.elements,
        warp_instructions=10 * tensors * shape.elements / gpu.warp_threads,
        steps=np.where(alone, passes * ceil_div(shape.rows, _MOST_THREADS), 1.0),
        launches=np.where((passes > 0) & last(calls), 1.5, 1.0),  # counters are cleared
    )
    return paced(work, gpu, np.where(alone, _STEP_CYCLES, 0.0))


class _Shape:
    """Columns of a call."""

    def __init__(self, calls: Calls) -> None:
        self.batch, self.channels, self.spatial = calls["batch"], calls["channels"], calls["spatial"]
        self.element_bytes = width_of(calls)
        self.elements = self.batch * self.channels * self.spatial
        self.rows = self.batch * self.spatial


def _threads(count: Array) -> Array:
    """getNumThreads: the power of two from 32 to 512 that covers ``count``."""
    return np.clip(2 ** np.ceil(np.log2(np.maximum(count, 1.0))), 32.0, _MOST_THREADS)


def _channel_pass(gpu: Gpu, shape: _Shape, reads: int, writes: int, runs: Mask) -> Work:
    """A CTA a channel: sums over all of ``reads`` tensors, and, where it writes, all of them once more."""
    wide = _threads(shape.spatial)
    if not writes:
        wide = np.maximum(_threads(np.floor(shape.spatial / 4)), np.minimum(wide, 64.0))
    high = np.maximum(1.0, _MOST_THREADS / wide)
    steps = ceil_div(shape.batch, high) * ceil_div(shape.spatial, wide)
    passes = 1 + writes
    moved = (reads + writes) * shape.elements * shape.element_bytes
    work = vector_kernel(
        gpu,
        tasks=shape.channels,
        threads=wide * high,
        moved_bytes=moved,
        again_bytes=writes * reads * shape.elements * shape.element_bytes,
        flops=(7.0 if reads == 1 else 12.0) * shape.elements,
        xu_ops=shape.elements if reads == 1 else 0.0,  # Welford's division
        converted=(reads * passes + writes) * shape.elements if shape.element_bytes < 4 else 0.0,
        warp_instructions=(8 * reads * passes) * shape.elements / gpu.warp_threads,
        steps=steps * passes,
        runs=runs,
    )
    # What does not stay in L2 between the passes comes from DRAM again.
    again = np.where(moved > gpu.l2_bytes, writes * reads * shape.elements * shape.element_bytes, 0.0)
    return replace(paced(work, gpu, _STEP_CYCLES), task_cycles=_REDUCE_CYCLES, refetched_bytes=again * np.asarray(runs))


def _planes(gpu: Gpu, shape: _Shape) -> Work:
    """A CTA a channel of some images: every element read and written."""
    wide = np.maximum(_threads(np.floor(shape.spatial / 4)), np.minimum(_threads(shape.spatial), 64.0))
    high = np.maximum(1.0, np.floor(64 / wide))
    rows = np.maximum(1.0, np.minimum(np.floor(_TRANSFORM_CTAS / shape.channels), ceil_div(shape.batch, high)))
    work = vector_kernel(
        gpu,
        tasks=shape.channels * rows,
        threads=wide * high,
        moved_bytes=2 * shape.elements * shape.element_bytes,
        flops=4 * shape.elements,
        converted=2 * shape.elements if shape.element_bytes < 4 else 0.0,
        warp_instructions=8 * shape.elements / gpu.warp_threads,
        steps=ceil_div(shape.batch, rows * high) * ceil_div(shape.spatial, wide),
    )
    return paced(work, gpu, _STEP_CYCLES)


def _row_grid(shape: _Shape) -> tuple[Array, Array, Array, Array]:
    """flexible_launch_configs: (CTAs over channels, over rows, threads along channels, along rows)."""
    wide = np.minimum(power_below(shape.channels), _TILE_CHANNELS)
    high = np.minimum(power_below(ceil_div(shape.rows, _THREAD_ROWS)), np.floor(_MOST_THREADS / wide))
    wide = np.where(
        wide * high != _MOST_THREADS, np.minimum(power_below(shape.channels), np.floor(_MOST_THREADS / high)), wide
    )
    down = np.minimum(ceil_div(shape.rows, high * _THREAD_ROWS), _MOST_ROW_CTAS)
    return ceil_div(shape.channels, wide), down, wide, high


def _row_sums(gpu: Gpu, shape: _Shape, reads: float, runs: Mask) -> Work:
    """Channels last: CTAs of some channels share the rows, and the last of them adds up their parts."""
    across, down, wide, high = _row_grid(shape)
    down = np.where(down < 8, 1.0, down)  # else no CTAs share
    instructions = _WELFORD_INSTRUCTIONS if reads == 1 else _SUM_INSTRUCTIONS
    part_bytes = np.where(down > 1, 2 * 2 * ACCUMULATOR_BYTES * shape.channels * down, 0.0)
    work = vector_kernel(
        gpu,
        tasks=across * down,
        threads=wide * high,
        moved_bytes=reads * shape.elements * shape.element_bytes,
        again_bytes=part_bytes,
        flops=(7.0 if reads == 1 else 6.0) * shape.elements,
        xu_ops=shape.elements if reads == 1 else 0.0,
        converted=reads * shape.elements if shape.element_bytes < 4 else 0.0,
        smem_bytes=across * down * wide * high * 8 * 2,
        warp_instructions=instructions * shape.elements / gpu.warp_threads,
        registers=48.0,
        steps=ceil_div(shape.rows, down * high * _ROWS_AT_ONCE),
        runs=runs,
    )
    return paced(work, gpu, _LAST_STEP_CYCLES)


def _by_rows(gpu: Gpu, shape: _Shape, tensors: float, flops: float) -> Work:
    """Channels last: element by element, the statistics of its channels held by each thread."""
    across, down, wide, high = _row_grid(shape)
    work = vector_kernel(
        gpu,
        tasks=across * down,
        threads=wide * high,
        moved_bytes=tensors * shape.elements * shape.element_bytes,
        flops=flops * shape.elements,
        converted=tensors * shape.elements if shape.element_bytes < 4 else 0.0,
        warp_instructions=_APPLY_INSTRUCTIONS * tensors * shape.elements / gpu.warp_threads,
        steps=ceil_div(shape.rows, down * high * _ROWS_AT_ONCE),
    )
    return paced(work, gpu, _LAST_STEP_CYCLES)


def _small(gpu: Gpu, shape: _Shape, launches: Array) -> Work:
    """1/σ and the kept statistics, a number of each a channel."""
    return vector_kernel(
        gpu,
        tasks=ceil_div(shape.channels, 512.0),
        threads=128.0,
        moved_bytes=6 * ACCUMULATOR_BYTES * shape.channels,
        launches=launches,
    )
