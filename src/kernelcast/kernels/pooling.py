"""max_pool, avg_pool and adaptive_avg_pool with their gradients: PyTorch's own kernels, a thread an output."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, Conflicts, conflict, size
from kernelcast.kernels.spatial import SpatialKernel, each_output, last, layout, width_of
from kernelcast.kernels.vector import INDEX_BYTES, vector_kernel
from kernelcast.kernels.work import Array, Work, Works, ceil_div

_THREADS = 256.0
_AVERAGE_THREADS = 1024.0
_PLACE_INSTRUCTIONS = 40.0  # of a thread: image, channel, row and column of its output, and the window's corners
_WINDOW_INSTRUCTIONS = 8.0  # an element of the window: its address, a load, a comparison or sum
_STEP_CYCLES = 30.0  # loads of a window do not wait for each other, but are few
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
            threads=_THREADS,
            moved_bytes=read + outputs * (element_bytes + cls.index_bytes),
            instructions=_PLACE_INSTRUCTIONS + _WINDOW_INSTRUCTIONS * window,
            flops=window,
            steps=window,
            step_cycles=_STEP_CYCLES,
        )
        return (work,)


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
            threads=_THREADS,
            moved_bytes=inputs * element_bytes + outputs * each,
            instructions=_PLACE_INSTRUCTIONS + (_WINDOW_INSTRUCTIONS + cls.index_bytes / 2) * shared,
            flops=shared,
            steps=shared * (2 if cls.index_bytes else 1),
            step_cycles=_STEP_CYCLES,
        )
        return (_zeros(gpu, inputs * element_bytes, last(calls) and cls.index_bytes > 0), work)


class MaxPoolBackward(_Backward):
    """Gradient of max_pool: an input takes the gradient of each window whose maximum it was; reads dy and places."""

    op = "max_pool_backward"
    index_bytes = INDEX_BYTES


class AvgPoolBackward(_Backward):
    """Gradient of avg_pool: an input takes its part of every window that it lies in."""

    op = "avg_pool_backward"


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
    def _each(cls, gpu: Gpu, calls: Calls, made: Array, met: Array) -> Works:
        """``made`` elements are computed from ``met`` of the other tensor each; both tensors move once."""
        planes = calls["batch"] * calls["channels"]
        inputs, outputs = calls["height"] * calls["width"], calls["out_height"] * calls["out_width"]
        work = each_output(
            gpu,
            planes * made,
            threads=_THREADS,
            moved_bytes=planes * (inputs + outputs) * width_of(calls),
            instructions=_PLACE_INSTRUCTIONS + _WINDOW_INSTRUCTIONS * met,
            flops=met,
            steps=met,
            step_cycles=_STEP_CYCLES,
        )
        return (work,)

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
        return cls._each(gpu, calls, calls["out_height"] * calls["out_width"], cls._windows(calls, "out_", ""))


class AdaptiveAvgPoolBackward(_Adaptive):
    """Gradient of adaptive_avg_pool: an input takes its part of every window that it lies in."""

    op = "adaptive_avg_pool_backward"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        return cls._each(gpu, calls, calls["height"] * calls["width"], cls._windows(calls, "", "out_"))
