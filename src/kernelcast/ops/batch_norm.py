"""batch_norm and its gradient as PyTorch launches them: ATen's kernels, or cuDNN's where PyTorch selects them.

Sizes follow PyTorch's Normalization.cu and Normalization.cuh. Instance norm is batch norm of one image with the
channels of all images.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, choice, flag
from kernelcast.ops.spatial import FeatureMapKernel, channels_last, layout
from kernelcast.ops.vector import ACCUMULATOR_BYTES, VECTOR_DTYPES, paced, power_below, vector_kernel
from kernelcast.ops.work import Array, Number, Work, Works, ceil_div

_MOST_THREADS = 512.0  # MAX_BLOCK_SIZE of a CTA
_TILE_CHANNELS = 32.0  # OPTIMAL_TILE_W: channels of a CTA, channels last
_THREAD_ROWS, _ROWS_AT_ONCE = 16.0, 4.0  # ELEMENTS_PER_THREAD, ELEMENTS_PER_ITER
_MOST_ROW_CTAS = 128.0  # MAX_H_BLOCK
_TRANSFORM_CTAS = 256.0 * 1024.0  # most of the normalising kernel, all channels
# A thread waits for each element before it loads the next: on an H200 342 us for 800 steps of the statistics,
# 727 us for 1,600 of the gradient, 14 us for 32 of an instance norm.
_STEP_CYCLES = 850.0
_REDUCE_CYCLES = 4500.0  # the threads of a CTA join their sums
_LAST_STEP_CYCLES = 800.0  # channels last: of four elements, loaded together
_WELFORD_INSTRUCTIONS = 94.0  # channels last, of a thread for an element: a division, three bounds, five sums
_SUM_INSTRUCTIONS = 44.0
_APPLY_INSTRUCTIONS = 18.0  # a tensor
# Of cuDNN's kernels on an H200: 833 us for 3,136 steps of 64 channels in fp32, 604 for 784 of the gradient;
# half as long a step where channels stay in registers; 243 us for 982 steps where CTAs share channels last.
_MOST_KEPT_BYTES = 40960.0  # of a channel that 512 threads keep
_MOST_PAIRED = 57344.0  # elements of a channel that they keep as pairs of fp16
_KEPT_CYCLES, _KEPT_BACK_CYCLES, _PAIRED_CYCLES, _KEPT_TASK_CYCLES = 700.0, 1500.0, 250.0, 2000.0
_AGAIN_CYCLES, _AGAIN_BACK_CYCLES, _AGAIN_INSTRUCTIONS = 500.0, 1500.0, 90.0
_SHARED_CYCLES, _SHARED_BACK_CYCLES, _SHARED_TASK_CYCLES = 520.0, 1250.0, 8000.0
_IMAGE_CTAS, _IMAGE_ELEMENTS = 13.0, 8192.0  # CTAs per image without statistics, channels last; elements of each


class _BatchNorm(FeatureMapKernel):
    """Parameters of both directions."""

    examples = (
        {"batch": 32, "channels": 64, "spatial": 12544},
        {"batch": 32, "channels": 256, "spatial": 3136, "layout": "nhwc"},
        {"batch": 1, "channels": 2048, "spatial": 49, "training": False},
    )

    layout: str = layout()
    training: bool = flag("use the statistics of this batch; else the running statistics", default=True)
    weights: str | None = choice("dtype of the weights, default: dtype", VECTOR_DTYPES, default=None)

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        reduced = calls["batch"] * calls["spatial"]
        return {
            **super().shape_features(calls, gpu),
            "log_reduced": np.log2(reduced),
            "log_waves": np.log2(calls["channels"] / gpu.sm_count),
            "tail": ceil_div(calls["channels"], gpu.sm_count) * gpu.sm_count / calls["channels"] - 1,
            "cudnn": np.full(calls.count, float(by_cudnn(calls))),
            "kept": _kept(_Shape(calls))[0].astype(np.float64),
        }


class BatchNorm(_BatchNorm):
    """Batch norm: statistics of each channel over images and pixels, then the normalisation; in inference the latter
    alone.

    One CTA per channel reads all images for the statistics (channels last: CTAs of 32 channels share the rows).
    """

    op = "batch_norm"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        trains = calls["training"] > 0
        shape = _Shape(calls)
        if by_cudnn(calls):
            return _cudnn(gpu, calls, shape, trains, 2.0)
        # running statistics are updated, or read: a kernel inverts σ, beside a copy
        small = _small(gpu, shape, np.where(trains, 1.0, 2.0))
        rows = _contiguous_rows(calls)
        return (
            _channel_pass(gpu, shape, 1, 0).where(trains & ~rows),
            _row_sums(gpu, shape, 1.0).where(trains & rows),
            small,
            _planes(gpu, shape).where(~rows),
            _by_rows(gpu, shape, 2.0, 4.0).where(rows),
        )


class BatchNormBackward(_BatchNorm):
    """Gradients of batch norm: of the weights and of the input.

    One CTA per channel sums dy and dy·x over all images, then reads them again for dx; channels last these are two
    kernels.
    """

    op = "batch_norm_backward"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        shape = _Shape(calls)
        if by_cudnn(calls):
            return _cudnn(gpu, calls, shape, np.ones(calls.count, dtype=bool), 3.0)
        rows = _contiguous_rows(calls)
        return (
            _channel_pass(gpu, shape, 2, 1).where(~rows),
            _row_sums(gpu, shape, 2.0).where(rows),
            _by_rows(gpu, shape, 3.0, 6.0).where(rows),
        )


def _contiguous_rows(calls: Calls) -> NDArray[np.bool_]:
    """Channels last; or a single pixel, where both memory formats are the same."""
    return (calls["spatial"] == 1) | channels_last(calls)


def by_cudnn(calls: Calls) -> bool:
    """Whether PyTorch calls cuDNN: in fp32, and in fp16 with weights in fp32."""
    weights = calls.choice("weights") or calls.choice("dtype")
    return bool(weights == "fp32" and calls.choice("dtype") != "bf16")


def _cudnn(gpu: Gpu, calls: Calls, shape: _Shape, trains: NDArray[np.bool_], tensors: float) -> Works:
    """cuDNN's kernels: one that normalises; one CTA per channel that keeps it in registers, or reads it again; channels
    last, resident CTAs share all rows. ``tensors``: 2 forward, 3 backward."""
    forward = tensors == 2
    kept, paired = _kept(shape)
    if channels_last(calls):
        wide = shape.batch * np.minimum(_IMAGE_CTAS, ceil_div(shape.elements / shape.batch, _IMAGE_ELEMENTS))
        most = np.maximum(1.0, np.floor(shape.elements / (_MOST_THREADS * 4)))
        shared = np.minimum(gpu.sm_count * 2.0, most)
        cycles = _SHARED_CYCLES if forward else _SHARED_BACK_CYCLES
        return (
            _threads_of(gpu, shape, tensors, np.maximum(1.0, wide), 20.0, _STEP_CYCLES).where(~trains),
            replace(
                _threads_of(gpu, shape, tensors, shared, 20.0, cycles).where(trains), task_cycles=_SHARED_TASK_CYCLES
            ),
        )
    wide = _threads(shape.spatial)
    plain = vector_kernel(
        gpu,
        tasks=shape.channels * shape.batch,
        threads=np.maximum(64.0, wide),
        moved_bytes=tensors * shape.elements * shape.element_bytes,
        warp_instructions=20 * shape.elements / gpu.warp_threads,
        steps=ceil_div(shape.spatial, wide),
    )
    cycles_kept = np.where(paired, _PAIRED_CYCLES, _KEPT_CYCLES if forward else _KEPT_BACK_CYCLES)
    one_read = _threads_of(gpu, shape, tensors, shape.channels, 20.0, cycles_kept)
    instructions, cycles = (_AGAIN_INSTRUCTIONS, _AGAIN_CYCLES) if forward else (60.0, _AGAIN_BACK_CYCLES)
    again = _threads_of(gpu, shape, tensors, shape.channels, instructions, cycles)
    return (
        paced(plain, gpu, _STEP_CYCLES).where(~trains),
        replace(one_read.where(trains & kept), task_cycles=_KEPT_TASK_CYCLES),
        _read_again(again, gpu, shape, tensors - 1).where(trains & ~kept),
    )


def _read_again(work: Work, gpu: Gpu, shape: _Shape, reads: float) -> Work:
    """The second pass over what ``reads`` tensors hold comes from DRAM where the channels at work, with their results,
    exceed L2. Where the steps of so few CTAs are slower than DRAM (on an H200 always), both passes are theirs."""
    at_work = np.minimum(1.0, 2.0 * gpu.sm_count / shape.channels)  # two CTAs per SM
    missed = at_work * work.activation_bytes > gpu.l2_bytes
    steps = ceil_div(shape.channels, 2.0 * gpu.sm_count) * work.serial_steps * work.step_cycles
    waits = work.activation_bytes / gpu.dram_bytes_per_s > steps / gpu.clock_boost_hz
    second = reads * shape.elements * shape.element_bytes
    return replace(work, refetched_bytes=np.where(missed & waits, second, 0.0))


def _kept(shape: _Shape) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Channels that stay in registers between the passes; and which of them as pairs of 16 bits."""
    even = (np.mod(shape.spatial, 2) == 0) & (shape.element_bytes == 2)
    paired = even & (shape.rows <= _MOST_PAIRED)
    return paired | (shape.rows * shape.element_bytes <= _MOST_KEPT_BYTES), paired


def _threads_of(gpu: Gpu, shape: _Shape, tensors: float, tasks: Array, instructions: float, cycles: Number) -> Work:
    """CTAs of 512 threads, two per SM, that loop over the elements."""
    work = vector_kernel(
        gpu,
        tasks=tasks,
        threads=_MOST_THREADS,
        moved_bytes=tensors * shape.elements * shape.element_bytes,
        warp_instructions=instructions * shape.elements / gpu.warp_threads,
        registers=64.0,
        steps=ceil_div(shape.elements, tasks * _MOST_THREADS),
    )
    return paced(work, gpu, cycles)


class _Shape:
    """Columns of a call."""

    def __init__(self, calls: Calls) -> None:
        self.batch, self.channels, self.spatial = calls["batch"], calls["channels"], calls["spatial"]
        self.element_bytes = calls.dtype.act_bytes
        self.elements = self.batch * self.channels * self.spatial
        self.rows = self.batch * self.spatial


def _threads(count: Array) -> Array:
    """getNumThreads: the power of two from 32 to 512 that covers ``count``."""
    return np.clip(2 ** np.ceil(np.log2(np.maximum(count, 1.0))), 32.0, _MOST_THREADS)


def _channel_pass(gpu: Gpu, shape: _Shape, reads: int, writes: int) -> Work:
    """One CTA per channel: sums over ``reads`` tensors and, where it writes, reads all of them again."""
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
    )
    # What does not stay in L2 between the passes comes from DRAM again.
    again = np.where(moved > gpu.l2_bytes, writes * reads * shape.elements * shape.element_bytes, 0.0)
    return replace(paced(work, gpu, _STEP_CYCLES), task_cycles=_REDUCE_CYCLES, refetched_bytes=again)


def _planes(gpu: Gpu, shape: _Shape) -> Work:
    """One CTA per channel of some images: every element read and written."""
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


def _row_sums(gpu: Gpu, shape: _Shape, reads: float) -> Work:
    """Channels last: CTAs of some channels share the rows, and the last one adds up their partial sums."""
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
    )
    return paced(work, gpu, _LAST_STEP_CYCLES)


def _by_rows(gpu: Gpu, shape: _Shape, tensors: float, flops: float) -> Work:
    """Channels last: element-wise, each thread holds the statistics of its channels."""
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
    """1/σ and the running statistics, one value of each per channel."""
    return vector_kernel(
        gpu,
        tasks=ceil_div(shape.channels, 512.0),
        threads=128.0,
        moved_bytes=6 * ACCUMULATOR_BYTES * shape.channels,
        launches=launches,
    )
