"""Sizes of a convolution of one, two or three axes, for conv2d and its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.ops.base import Calls
from kernelcast.ops.work import Array, ceil_div

_WINOGRAD_SIDE = 4.0  # of a tile of outputs
# What cuDNN 9.19 has kernels for, by the names in profiles.
_GROUPED = (2, 4, 8, 16, 32, 64)  # channels of a group
_LONGEST_GROUPED = 7  # side of a filter, of groups of 32 channels and more
_DEPTHWISE = (3, 5, 7)  # sides
_FRAMES = {"depth": 1, "kernel_d": 1, "stride_d": 1, "padding_d": 0, "dilation_d": 1}  # of two axes


@dataclass(frozen=True)
class Axis:
    """One side of an image and of the filter that moves along it: whole numbers, or arrays (calls,)."""

    length: Any
    kernel: Any
    stride: Any
    padding: Any
    dilation: Any

    @property
    def span(self) -> Any:
        """Pixels that a filter covers."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def spare(self) -> Any:
        """Steps of one pixel that the filter can move; negative: it does not fit."""
        return self.length + 2 * self.padding - self.span

    @property
    def outputs(self) -> Any:
        return self.spare // self.stride + 1


def _or_else(value: Any, default: Any) -> Any:
    return default if value is None else value


def axes_of(call: Any) -> list[Axis]:
    """Rows and columns of one call, and its frames first where it has any."""
    frames = Axis(*(_or_else(getattr(call, name), usual) for name, usual in _FRAMES.items()))
    rows = Axis(call.height, call.kernel_h, call.stride, call.padding, call.dilation)
    columns = Axis(
        call.width,
        call.kernel_w,
        _or_else(call.stride_w, call.stride),
        _or_else(call.padding_w, call.padding),
        _or_else(call.dilation_w, call.dilation),
    )
    flat = (frames.length, frames.kernel, frames.padding) == (1, 1, 0)
    return [rows, columns] if flat else [frames, rows, columns]


def columns_by_axis(calls: Calls) -> tuple[Axis, Axis, Axis]:
    """Frames, rows and columns of many calls."""
    frames = Axis(*(calls.given(name, usual) for name, usual in _FRAMES.items()))
    rows = Axis(*(calls[name] for name in ("height", "kernel_h", "stride", "padding", "dilation")))
    ways = (calls.given(f"{name}_w", calls[name]) for name in ("stride", "padding", "dilation"))
    return frames, rows, Axis(calls["width"], calls["kernel_w"], *ways)


@dataclass(frozen=True)
class Sizes:
    """A convolution as ``groups`` products of m x k by k x n; all arrays (calls,)."""

    axes: tuple[Axis, Axis, Axis]
    batch: Array
    m: Array
    n: Array
    k: Array
    groups: Array
    channels: Array  # of the input, a group
    whole: Array  # elements of the input
    input_elements: Array  # that any output needs: a stride beyond the kernel skips some
    winograd_tiles: Array  # of 4x4 outputs
    winograd: NDArray[np.bool_]  # the filter allows it

    @classmethod
    def of(cls, calls: Calls) -> Sizes:
        axes = columns_by_axis(calls)
        frames, rows, columns = axes
        groups, batch = calls["groups"], calls["batch"]
        taps = frames.kernel * rows.kernel * columns.kernel
        m = batch * frames.outputs * rows.outputs * columns.outputs
        k = calls["in_channels"] / groups * taps
        whole = batch * calls["in_channels"] * frames.length * rows.length * columns.length
        plain = np.ones(calls.count, dtype=bool)
        for axis in (rows, columns):
            plain &= (axis.kernel == 3) & (axis.stride == 1) & (axis.dilation == 1)
        tiles = ceil_div(rows.outputs, _WINOGRAD_SIDE) * ceil_div(columns.outputs, _WINOGRAD_SIDE)
        return cls(
            axes=axes,
            batch=batch,
            m=m,
            n=calls["out_channels"] / groups,
            k=k,
            groups=groups,
            channels=calls["in_channels"] / groups,
            whole=whole,
            input_elements=np.minimum(whole, groups * m * k),
            winograd_tiles=batch * tiles,
            winograd=plain & (groups == 1) & (frames.kernel == 1) & (frames.length == 1),
        )

    @property
    def taps(self) -> Array:
        """Elements of one filter of one channel."""
        return self.k / self.channels

    @property
    def filter_elements(self) -> Array:
        return self.groups * self.n * self.k

    @property
    def output_elements(self) -> Array:
        return self.groups * self.m * self.n

    @property
    def depthwise(self) -> NDArray[np.bool_]:
        """Each channel has filters of its own: no matrix to multiply by."""
        return (self.groups > 1) & (self.channels == 1)

    @property
    def pointwise(self) -> NDArray[np.bool_]:
        """A matrix product as the image lies, whichever way."""
        found = self.groups == 1
        for axis in self.axes:
            found &= (axis.kernel == 1) & (axis.stride == 1) & (axis.padding == 0)
        return found

    @property
    def looped(self) -> NDArray[np.bool_]:
        """Groups that cuDNN has no kernel for, so that each runs by itself, one after another."""
        members = np.maximum(self.channels, self.n)
        long = np.maximum(self.axes[1].kernel, self.axes[2].kernel) > _LONGEST_GROUPED
        odd = ~np.isin(members, _GROUPED) | (long & (members >= 32))
        return (self.groups > 1) & ~self.depthwise & odd

    @property
    def ordinary(self) -> NDArray[np.bool_]:
        """Depthwise filters that cuDNN has a kernel for, channels last: 3x3, 5x5 or 7x7, one for each channel."""
        frames, rows, columns = self.axes
        side = (rows.kernel == columns.kernel) & np.isin(columns.kernel, _DEPTHWISE)
        plain = (rows.dilation == 1) & (columns.dilation == 1) & (frames.kernel == 1)
        return side & plain & (self.n == 1)

    @property
    def input_pixels(self) -> Array:
        """Of all images."""
        return self.whole / (self.channels * self.groups)


def as_it_lies(calls: Calls, sizes: Sizes) -> NDArray[np.bool_]:
    """Images that are multiplied channels first: filters of one pixel, rows of at least pairs of 16-bit numbers (of odd
    ones half the calls that we measured were turned)."""
    row_bytes = sizes.m / sizes.batch * calls.dtype.act_bytes
    whole = (np.mod(row_bytes, 4) == 0) | (sizes.m == sizes.batch)
    return sizes.pointwise & whole & (calls.choice("layout") == "nchw")


def depthwise_in_pytorch(calls: Calls, sizes: Sizes) -> NDArray[np.bool_]:
    """Whether PyTorch runs its own depthwise kernels rather than cuDNN's: channels first, but for fp16 filters and
    sizes where cuDNN was found to be faster (``ConvParams::use_cudnn_depthwise`` in ATen's Convolution.cpp)."""
    if calls.choice("layout") != "nchw":
        return np.zeros(calls.count, dtype=bool)
    if calls.choice("dtype") != "fp16":
        return sizes.depthwise
    frames, rows, columns = sizes.axes
    channels, batch, width, side = sizes.groups, sizes.batch, columns.length, columns.kernel
    middle = (side == 3) | (side == 5)
    halved = np.where(
        batch == 1,
        middle | ((side == 1) & (width <= 28)),
        ((side == 1) & (batch <= 16) & (channels >= 128) & (width <= 7))
        | (middle & ((channels >= 512) | ((channels >= 256) & (width >= 28)))),
    )
    square = (rows.kernel == side) & (middle | (side == 1)) & (width >= 7)
    wide = square & ((columns.stride == 1) | ((columns.stride == 2) & halved))
    line = (rows.length == 1) & (columns.stride == 1)
    plain = (rows.dilation == 1) & (columns.dilation == 1) & (frames.kernel == 1) & (frames.length == 1)
    alike = (rows.stride == columns.stride) | (rows.length == 1)
    return sizes.depthwise & ~(plain & alike & (channels >= 32) & (line | wide))
