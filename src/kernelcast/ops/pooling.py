"""max_pool, avg_pool and adaptive_avg_pool with their gradients: ATen's kernels, one thread per output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, Conflicts, conflict, size
from kernelcast.ops.spatial import ImageKernel, channels_last, layout
from kernelcast.ops.vector import INDEX_BYTES, fill_kernel, paced, power_below, vector_kernel
from kernelcast.ops.work import Array, Number, Work, Works, ceil_div

_THREADS = 256.0  # BLOCK_THREADS of max_pool2d
_AVERAGE_THREADS = 1024.0
_VOLUME_TILE = (32.0, 8.0)  # columns and rows of a CTA of the 3d kernels
_LAST_THREADS, _LAST_CHANNELS, _LAST_PIXELS = 1024.0, 4.0, 2.0  # channels last: of a CTA; of a thread, an axis
# Instructions of a thread for what it makes, at the eight tenths of the peak that kernels issue: the divisions that
# give its image, channel, row and column, and then those of an element of its window. From H200 times: 290 + 25
# of a maximum, 320 + 13 of a mean, 640 + 17 channels last; 310 + 16 and 520 + 57 (500 + 80) of gradients.
_INSTRUCTIONS = {
    ("max", False, False): (230.0, 20.0), ("avg", False, False): (255.0, 10.5), ("avg", False, True): (510.0, 13.5),
    ("max", True, False): (245.0, 13.0), ("avg", True, False): (415.0, 46.0), ("avg", True, True): (400.0, 64.0),
}  # fmt: skip
# Cycles of a step, where each waits for the one before: of an element of a window in a 3d kernel; of one and a channel
# with channels last, whose maxima are in shared memory; of a part of a gradient that is added by an atomic.
_VOLUME_CYCLES, _LAST_CYCLES, _LAST_BACK_CYCLES, _ATOMIC_CYCLES = 450.0, 550.0, 1200.0, 1200.0
_WINDOW_CYCLES = 330.0  # of an element of a window, where there are too few CTAs to hide it
_MEAN_CYCLES, _MEAN_BEFORE = 75.0, 40.0  # of an element of an adaptive window, whose loads overlap; of the indices
_REDUCED_CYCLES, _SWAPPED_CYCLES = 150.0, 700.0  # of an atomic of 32 bits, and of 16, which swaps 32
_AXES = (("depth", "kernel_d"), ("height", "kernel_h"), ("width", "kernel_w"))


def output_sizes(calls: Calls) -> list[Array]:
    """Outputs along depth, height and width; padding is at most half of the window, as PyTorch requires."""
    outputs = []
    for axis, kernel in _AXES:
        padding = np.minimum(calls["padding"], np.floor(calls[kernel] / 2))
        outputs.append(np.floor((calls[axis] + 2 * padding - calls[kernel]) / calls["stride"]) + 1)
    return outputs


class _Pool(ImageKernel):
    """Parameters of pooling with windows, both directions."""

    examples = (
        {"batch": 32, "channels": 64, "height": 112, "width": 112, "kernel_h": 3, "kernel_w": 3, "stride": 2,
         "padding": 1},
        {"batch": 8, "channels": 256, "height": 56, "width": 56, "kernel_h": 2, "kernel_w": 2, "stride": 2,
         "layout": "nhwc"},
    )  # fmt: skip
    index_bytes: ClassVar[float] = 0.0  # of an output: where its maximum was
    backward: ClassVar[bool] = False

    kernel_h: int = size("rows of a window")
    kernel_w: int = size("columns of a window")
    stride: int = size("stride along each axis")
    padding: int = size("padding, at most half of a window along each axis", default=0, low=0)
    depth: int = size("frames of the input", default=1)
    kernel_d: int = size("frames of a window", default=1)
    layout: str = layout()

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        empty = np.min(output_sizes(calls), axis=0) < 1
        text = "a window of {kernel_h:.0f} x {kernel_w:.0f} does not fit {height:.0f} x {width:.0f}"
        return conflict(empty, text, calls.numbers)

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        window = calls["kernel_h"] * calls["kernel_w"] * calls["kernel_d"]
        return {
            **super().shape_features(calls, gpu),
            "log_outputs": np.log2(calls["batch"] * calls["channels"] * np.prod(output_sizes(calls), axis=0)),
            "log_window": np.log2(window),
            "overlap": np.log2(calls["kernel_w"] / calls["stride"]),
            "volume": (calls["depth"] * calls["kernel_d"] > 1).astype(np.float64),
        }

    @classmethod
    def _sizes(cls, calls: Calls) -> tuple[Array, Array, Array]:
        """(elements of the input, of the output, of a window)"""
        planes = calls["batch"] * calls["channels"]
        inputs = planes * calls["depth"] * calls["height"] * calls["width"]
        window = calls["kernel_d"] * calls["kernel_h"] * calls["kernel_w"]
        return inputs, planes * np.prod(output_sizes(calls), axis=0), window

    @classmethod
    def _launched(
        cls, gpu: Gpu, calls: Calls, made: Sequence[Array], window: Array, moved_bytes: Array, volume_steps: Array
    ) -> Work:
        """One thread per element along depth, height and width, each computed from ``window`` others.

        A 1d grid of CTAs; tiles of 32 x 8 where there is a depth; maxima channels last in CTAs of channels, columns and
        rows, and their gradients one CTA per image and channel.
        """
        depth, height, width = made
        planes = calls["batch"] * calls["channels"]
        elements = planes * depth * height * width
        mode, back = ("max" if cls.index_bytes else "avg"), cls.backward
        last_maximum = channels_last(calls) and mode == "max"
        volume = calls["depth"] * calls["kernel_d"] > 1
        one_by_one = _THREADS if mode == "max" else _AVERAGE_THREADS
        tasks, threads = ceil_div(elements, one_by_one), np.full_like(elements, one_by_one)
        steps, cycles = np.asarray(window, dtype=np.float64), np.full_like(elements, _WINDOW_CYCLES)
        if last_maximum:
            tasks, threads, pixels = _last_grid(calls["batch"], calls["channels"], height, width)
            steps = pixels * window
            # the first window's indices and gradients come from memory, the next window's are cached
            cycles = _LAST_CYCLES + back * (_LAST_BACK_CYCLES - _LAST_CYCLES) / window
        elif mode == "max" and back:
            tasks = planes * ceil_div(height * width, _THREADS)
        tiles = planes * depth * ceil_div(width, _VOLUME_TILE[0]) * ceil_div(height, _VOLUME_TILE[1])
        per_element, per_tap = _INSTRUCTIONS[mode, back, channels_last(calls) and mode == "avg"]
        instructions = np.where(volume | last_maximum, 20.0 + 4 * window, per_element + per_tap * window)
        work = vector_kernel(
            gpu,
            tasks=np.where(volume, tiles, tasks),
            threads=np.where(volume, _THREADS, threads),
            moved_bytes=moved_bytes,
            flops=window * elements,
            warp_instructions=instructions * elements / gpu.warp_threads,
            steps=np.where(volume, volume_steps, steps),
        )
        return paced(work, gpu, np.where(volume, _ATOMIC_CYCLES if back else _VOLUME_CYCLES, cycles))


class _Forward(_Pool):
    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        inputs, outputs, window = cls._sizes(calls)
        element_bytes = calls.dtype.act_bytes
        # windows that leave gaps do not read all
        moved = np.minimum(inputs, outputs * window) * element_bytes + outputs * (element_bytes + cls.index_bytes)
        return (cls._launched(gpu, calls, output_sizes(calls), window, moved, window + 4),)


class MaxPool(_Forward):
    """Maximum of each window, with its index as int64 (max_pool2d_with_indices, max_pool3d_with_indices)."""

    op = "max_pool"
    index_bytes = INDEX_BYTES


class AvgPool(_Forward):
    """Mean of each window (avg_pool2d, avg_pool3d)."""

    op = "avg_pool"


class _Backward(_Pool):
    """One thread per input, which finds the windows that contain it; in 3d one per output, which adds to inputs."""

    backward = True

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        inputs, outputs, window = cls._sizes(calls)
        element_bytes = calls.dtype.act_bytes
        shared = np.maximum(1.0, window * outputs / inputs)  # windows that contain an input
        volume = calls["depth"] * calls["kernel_d"] > 1
        axes = (calls[axis] for axis, _ in _AXES)
        made = [np.where(volume, out, size) for out, size in zip(output_sizes(calls), axes, strict=True)]
        moved = inputs * element_bytes + outputs * (element_bytes + cls.index_bytes)
        added = (
            4.0 * np.maximum(1.0, shared / 3) if cls.index_bytes else window
        )  # one element of a maximum, all of a mean
        work = cls._launched(gpu, calls, made, shared, moved, added)
        return (fill_kernel(gpu, inputs * element_bytes, volume | (cls.index_bytes > 0)), work)


class MaxPoolBackward(_Backward):
    """Gradient of max_pool: an input takes the gradient of each window whose maximum it was; reads dy and indices."""

    op = "max_pool_backward"
    index_bytes = INDEX_BYTES


class AvgPoolBackward(_Backward):
    """Gradient of avg_pool: an input takes its share of every window that contains it."""

    op = "avg_pool_backward"


def _last_grid(batch: Array, channels: Array, height: Array, width: Array) -> tuple[Array, Array, Array]:
    """(CTAs, threads per CTA, pixels times channels per thread) for channels last: threads along channels, then
    columns, then rows."""
    wide = np.minimum(power_below(channels), 32.0)
    across = np.minimum(power_below(width), _LAST_THREADS / wide)
    down = np.minimum(power_below(height), _LAST_THREADS / wide / across)
    wide = np.minimum(power_below(channels), _LAST_THREADS / across / down)
    parts = ceil_div(channels, wide * _LAST_CHANNELS)
    columns, rows = ceil_div(width, across * _LAST_PIXELS), ceil_div(height, down * _LAST_PIXELS)
    pixels = ceil_div(ceil_div(width, columns), across) * ceil_div(ceil_div(height, rows), down)
    return batch * parts * columns * rows, wide * across * down, pixels * ceil_div(channels, wide * parts)


class _Adaptive(ImageKernel):
    """Parameters of adaptive pooling, both directions."""

    examples = (
        {"batch": 32, "channels": 512, "height": 14, "width": 14, "out_height": 7, "out_width": 7},
        {"batch": 8, "channels": 2048, "height": 32, "width": 32, "out_height": 6, "out_width": 6, "layout": "nhwc"},
    )

    out_height: int = size("rows of the output")
    out_width: int = size("columns of the output")
    layout: str = layout()

    @classmethod
    def _each(cls, gpu: Gpu, calls: Calls, made: str, met: Array, cycles: Number, before: float) -> Work:
        """Elements of the axes ``made`` are computed from ``met`` elements of the other tensor; both tensors move once.

        A CTA of 32 x 8 threads takes a channel of an image; channels last as for maxima. ``before``: steps of a thread
        for its indices.
        """
        planes = calls["batch"] * calls["channels"]
        inputs, outputs = calls["height"] * calls["width"], calls["out_height"] * calls["out_width"]
        height, width = calls[f"{made}height"], calls[f"{made}width"]
        if channels_last(calls):
            tasks, threads, pixels = _last_grid(calls["batch"], calls["channels"], height, width)
        else:
            tasks, threads = planes, np.full_like(planes, _THREADS)
            pixels = ceil_div(width, _VOLUME_TILE[0]) * ceil_div(height, _VOLUME_TILE[1])
        work = vector_kernel(
            gpu,
            tasks=tasks,
            threads=threads,
            moved_bytes=planes * (inputs + outputs) * calls.dtype.act_bytes,
            flops=met * planes * height * width,
            warp_instructions=(20 + 2 * met) * planes * height * width / gpu.warp_threads,
            steps=before + pixels * met,
        )
        return paced(work, gpu, cycles)

    @classmethod
    def _windows(cls, calls: Calls, of: str, over: str) -> Array:
        """Elements of axes ``over`` that an element of axes ``of`` meets."""
        parts = [
            ceil_div(calls[f"{over}{axis}"], calls[f"{of}{axis}"])
            + (np.mod(calls[f"{over}{axis}"], calls[f"{of}{axis}"]) > 0)
            for axis in ("height", "width")
        ]
        return np.maximum(1.0, parts[0] * parts[1])


class AdaptiveAvgPool(_Adaptive):
    """Mean over the windows of a given output size (_adaptive_avg_pool2d); a single window is a ``reduce_sum``."""

    op = "adaptive_avg_pool"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        met = cls._windows(calls, "out_", "")
        if channels_last(calls):
            return (cls._each(gpu, calls, "out_", met, _LAST_CYCLES, 0.0),)
        return (cls._each(gpu, calls, "out_", met, _MEAN_CYCLES, _MEAN_BEFORE),)


class AdaptiveAvgPoolBackward(_Adaptive):
    """Gradient of adaptive_avg_pool: an input takes its share of every window that contains it; or, where windows
    overlap channels first, every output adds to its inputs by atomics, after zeros."""

    op = "adaptive_avg_pool_backward"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        over = [np.mod(calls[axis], calls[f"out_{axis}"]) > 0 for axis in ("height", "width")]
        met = (1 + 0.5 * over[0]) * (1 + 0.5 * over[1])  # windows of an input: of uneven ones some overlap
        taken = cls._each(gpu, calls, "", met, _LAST_CYCLES, 1.0)
        if channels_last(calls):
            return (taken,)
        uneven = over[0] | over[1]
        element_bytes = calls.dtype.act_bytes
        cycles = _REDUCED_CYCLES if element_bytes == 4 else _SWAPPED_CYCLES
        added = cls._each(gpu, calls, "out_", cls._windows(calls, "out_", ""), cycles, 4.0)
        filled = calls["batch"] * calls["channels"] * calls["height"] * calls["width"] * element_bytes
        return (fill_kernel(gpu, filled), taken.where(~uneven), added.where(uneven))
