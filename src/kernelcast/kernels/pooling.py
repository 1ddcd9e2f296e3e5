"""max_pool, avg_pool and adaptive_avg_pool with their gradients: PyTorch's own kernels, a thread an output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, Conflicts, conflict, size
from kernelcast.kernels.spatial import SpatialKernel, each_output, last, layout, power_below, width_of
from kernelcast.kernels.vector import INDEX_BYTES, vector_kernel
from kernelcast.kernels.work import Array, Work, Works, ceil_div

_THREADS = 256.0  # BLOCK_THREADS of max_pool2d
_AVERAGE_THREADS = 1024.0
_VOLUME_TILE = (32.0, 8.0)  # columns and rows of a CTA of the 3d kernels
_LAST_THREADS, _LAST_CHANNELS, _LAST_PIXELS = 1024.0, 4.0, 2.0  # channels last: of a CTA; of a thread, an axis
# Of a thread for an output: the 64-bit divisions that give its image, channel, row and column, the window's corners;
# then for an element of the window its address, a load, a comparison or sum. Our H200 takes 107 us for 6.4e6 maxima of
# 3 x 3, 77 us for as many means of 2 x 2, 464 us for the 25.7e6 gradients of these.
_PLACE_INSTRUCTIONS = 180.0
_WINDOW_INSTRUCTIONS = 30.0
_MEAN_INSTRUCTIONS = 240.0
_STEP_CYCLES = 30.0  # loads of a window do not wait for each other, but are few
_LOAD_CYCLES = 700.0  # of a load that the next waits for
_AXES = (("depth", "kernel_d"), ("height", "kernel_h"), ("width", "kernel_w"))


def pooled(calls: Calls) -> list[Array]:
    """Outputs along depth, height and width. An axis is padded by at most half of its window, as PyTorch asks."""
    found = []
    for axis, kernel in _AXES:
        padding = np.minimum(calls["padding"], np.floor(calls[kernel] / 2))
        found.append(np.floor((calls[axis] + 2 * padding - calls[kernel]) / calls["stride"]) + 1)
    return found


class _Pool(SpatialKernel):
    """Parameters of pooling with windows, both directions."""

    examples = (
        {"batch": 32, "channels": 64, "height": 112, "width": 112, "kernel_h": 3, "kernel_w": 3, "stride": 2,
         "padding": 1},
        {"batch": 8, "channels": 256, "height": 56, "width": 56, "kernel_h": 2, "kernel_w": 2, "stride": 2,
         "layout": "nhwc"},
    )  # fmt: skip
    index_bytes: ClassVar[float] = 0.0  # of an output: where its maximum was

    batch: int = size("images")
    channels: int = size("channels")
    height: int = size("rows of the input")
    width: int = size("columns of the input")
    kernel_h: int = size("rows of a window")
    kernel_w: int = size("columns of a window")
    stride: int = size("pixels from window to window, along each axis")
    padding: int = size("pixels around, at most half of a window along each axis", default=0, low=0)
    depth: int = size("frames of the input", default=1)
    kernel_d: int = size("frames of a window", default=1)
    layout: str = layout()

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        empty = np.min(pooled(calls), axis=0) < 1
        text = "a window of {kernel_h:.0f} x {kernel_w:.0f} does not fit {height:.0f} x {width:.0f}"
        return conflict(empty, text, calls.numbers)

    @classmethod
    def hints(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        window = calls["kernel_h"] * calls["kernel_w"] * calls["kernel_d"]
        return {
            **super().hints(calls, gpu),
            "log_outputs": np.log2(calls["batch"] * calls["channels"] * np.prod(pooled(calls), axis=0)),
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
        return inputs, planes * np.prod(pooled(calls), axis=0), window

    @classmethod
    def _cut(cls, work: Work, calls: Calls, made: Sequence[Array], by_image: bool = False) -> Work:
        """The same work in the CTAs that it is cut into, where those are not a long row of threads: ``made`` are the
        elements along depth, height and width that threads make. ``by_image``: no CTA takes of two images."""
        depth, height, width = made
        planes = calls["batch"] * calls["channels"]
        tasks, threads = np.asarray(work.tasks), np.broadcast_to(work.threads, planes.shape)
        if last(calls) and cls.index_bytes:
            tasks, threads = _last_grid(calls["batch"], calls["channels"], height, width)
        elif by_image and cls.index_bytes:
            tasks = planes * ceil_div(height * width, _THREADS)
        volume = calls["depth"] * calls["kernel_d"] > 1
        cubes = planes * depth * ceil_div(width, _VOLUME_TILE[0]) * ceil_div(height, _VOLUME_TILE[1])
        tasks = np.where(volume, cubes, tasks)
        threads = np.where(volume, _VOLUME_TILE[0] * _VOLUME_TILE[1], threads)
        return _in_tasks(work, tasks, threads)


class _Forward(_Pool):
    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        inputs, outputs, window = cls._sizes(calls)
        element_bytes = width_of(calls)
        # windows that leave gaps do not read all
        read = np.minimum(inputs, outputs * window) * element_bytes
        work = each_output(
            gpu,
            outputs,
            threads=_AVERAGE_THREADS if not cls.index_bytes else _THREADS,
            moved_bytes=read + outputs * (element_bytes + cls.index_bytes),
            instructions=_PLACE_INSTRUCTIONS + _WINDOW_INSTRUCTIONS * window
            if cls.index_bytes
            else (1 + last(calls)) * (_MEAN_INSTRUCTIONS + _WINDOW_INSTRUCTIONS * window),
            flops=window,
            steps=window,
            step_cycles=_STEP_CYCLES,
        )
        return (cls._cut(work, calls, pooled(calls)),)


class MaxPool(_Forward):
    """Largest element of each window, with its place as int64 (max_pool2d_with_indices, max_pool3d_with_indices)."""

    op = "max_pool"
    index_bytes = INDEX_BYTES


class AvgPool(_Forward):
    """Mean of each window (avg_pool2d, avg_pool3d)."""

    op = "avg_pool"


class _Backward(_Pool):
    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        inputs, outputs, window = cls._sizes(calls)
        element_bytes = width_of(calls)
        shared = np.maximum(1.0, window * outputs / inputs)  # windows that an input lies in
        each = element_bytes + cls.index_bytes
        work = each_output(
            gpu,
            inputs,
            threads=_AVERAGE_THREADS if not cls.index_bytes else _THREADS,
            moved_bytes=inputs * element_bytes + outputs * each,
            instructions=(_PLACE_INSTRUCTIONS if cls.index_bytes else 1.8 * _MEAN_INSTRUCTIONS)
            + (_WINDOW_INSTRUCTIONS + cls.index_bytes) * shared,
            flops=shared,
            steps=shared * (2 if cls.index_bytes else 1),
            step_cycles=_STEP_CYCLES,
        )
        work = cls._cut(work, calls, [calls[axis] for axis, _ in _AXES], by_image=True)
        return (_zeros(gpu, inputs * element_bytes, cls.index_bytes > 0), work)


class MaxPoolBackward(_Backward):
    """Gradient of max_pool: an input takes the gradient of each window whose maximum it was; reads dy and places."""

    op = "max_pool_backward"
    index_bytes = INDEX_BYTES


class AvgPoolBackward(_Backward):
    """Gradient of avg_pool: an input takes its part of every window that it lies in."""

    op = "avg_pool_backward"


def _in_tasks(work: Work, tasks: Array, threads: Array) -> Work:
    """All demand shared out to so many CTAs; a CTA issues for all its warps, whether their lanes have work or not."""
    scale = np.asarray(work.tasks) / tasks
    lanes = np.maximum(1.0, tasks * threads / np.maximum(np.asarray(work.tasks) * work.threads, 1.0))
    return replace(
        work,
        tasks=tasks,
        threads=threads,
        fma_flops=work.fma_flops * scale,
        l2_bytes=work.l2_bytes * scale,
        other_warp_instructions=work.other_warp_instructions * scale * lanes,
    )


def _last_grid(batch: Array, channels: Array, height: Array, width: Array) -> tuple[Array, Array]:
    """(CTAs, threads of one) where channels lie innermost: threads along channels, then columns, then rows."""
    wide = np.minimum(power_below(channels), 32.0)
    across = np.minimum(power_below(width), _LAST_THREADS / wide)
    down = np.minimum(power_below(height), _LAST_THREADS / wide / across)
    wide = np.minimum(power_below(channels), _LAST_THREADS / across / down)
    parts = ceil_div(channels, wide * _LAST_CHANNELS)
    ctas = batch * parts * ceil_div(width, across * _LAST_PIXELS) * ceil_div(height, down * _LAST_PIXELS)
    return ctas, wide * across * down


def _zeros(gpu: Gpu, filled_bytes: Array, runs: bool) -> Work:
    """The gradient is filled with zeros first, where a kernel adds to it."""
    return vector_kernel(
        gpu,
        tasks=ceil_div(filled_bytes, 128.0 * 16.0),
        threads=128.0,
        moved_bytes=filled_bytes,
        runs=np.full(filled_bytes.shape, runs),
    )


class _Adaptive(SpatialKernel):
    """Parameters of adaptive pooling, both directions."""

    examples = (
        {"batch": 32, "channels": 512, "height": 14, "width": 14, "out_height": 7, "out_width": 7},
        {"batch": 8, "channels": 2048, "height": 32, "width": 32, "out_height": 6, "out_width": 6, "layout": "nhwc"},
    )

    batch: int = size("images")
    channels: int = size("channels")
    height: int = size("rows of the input")
    width: int = size("columns of the input")
    out_height: int = size("rows of the output")
    out_width: int = size("columns of the output")
    layout: str = layout()

    @classmethod
    def _each(cls, gpu: Gpu, calls: Calls, made: str, met: Array) -> Works:
        """Elements of the axes ``made`` are computed from ``met`` of the other tensor each; both tensors move once.

        A CTA of 32 x 8 threads takes a channel of an image, and a thread waits for each of its loads.
        """
        planes = calls["batch"] * calls["channels"]
        inputs, outputs = calls["height"] * calls["width"], calls["out_height"] * calls["out_width"]
        height, width = calls[f"{made}height"], calls[f"{made}width"]
        loops = ceil_div(width, _VOLUME_TILE[0]) * ceil_div(height, _VOLUME_TILE[1])
        first = not last(calls)
        work = each_output(
            gpu,
            planes * height * width,
            threads=_THREADS,
            moved_bytes=planes * (inputs + outputs) * width_of(calls),
            instructions=_PLACE_INSTRUCTIONS / 2 + _WINDOW_INSTRUCTIONS * met,
            flops=met,
            steps=loops * met if first else met,
            step_cycles=_LOAD_CYCLES if first else _STEP_CYCLES,
        )
        return (_in_tasks(work, planes, np.full_like(planes, _THREADS)),) if first else (work,)

    @classmethod
    def _windows(cls, calls: Calls, of: str, over: str) -> Array:
        """Elements of axes ``over`` that one of axes ``of`` meets."""
        parts = [
            ceil_div(calls[f"{over}{axis}"], calls[f"{of}{axis}"])
            + (np.mod(calls[f"{over}{axis}"], calls[f"{of}{axis}"]) > 0)
            for axis in ("height", "width")
        ]
        return np.maximum(1.0, parts[0] * parts[1])


class AdaptiveAvgPool(_Adaptive):
    """Mean over windows that cut the input into so many (_adaptive_avg_pool2d); a single one is a ``reduce_sum``."""

    op = "adaptive_avg_pool"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        return cls._each(gpu, calls, "out_", cls._windows(calls, "out_", ""))


class AdaptiveAvgPoolBackward(_Adaptive):
    """Gradient of adaptive_avg_pool: an input takes its part of every window that it lies in."""

    op = "adaptive_avg_pool_backward"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        return cls._each(gpu, calls, "", cls._windows(calls, "", "out_"))
