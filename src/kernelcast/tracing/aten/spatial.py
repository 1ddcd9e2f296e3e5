"""Layers over feature maps: batch and group norm, pooling, resampling, padding, roll; forward and backward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from kernelcast.forecast.calls import Launch
from kernelcast.tracing.aten.elementwise import copied, filled, in_order, layout_of
from kernelcast.tracing.aten.table import (
    OpSettings,
    by_rows,
    launch,
    matrix_format,
    number_format,
    over,
    pointwise,
    rule,
    total_bytes,
)
from kernelcast.tracing.traced import Op, Tensor

_FROZEN = ("_native_batch_norm_legit_no_training", "_batch_norm_no_update")
_INPUT_FIRST = ("cudnn_batch_norm_backward", "miopen_batch_norm_backward")  # others have the gradient first


def _planes(x: Tensor) -> dict[str, int]:
    """Images, channels and pixels; without images (C, …) there is one."""
    batch = max(1, x.shape[0])
    channels = max(1, x.shape[1] if len(x.shape) > 1 else 1)
    return {"batch": batch, "channels": channels, "spatial": max(1, x.elements // (batch * channels))}


@rule("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "cudnn_batch_norm",
      "miopen_batch_norm", "_batch_norm_with_update", "_batch_norm_with_update_functional", *_FROZEN)  # fmt: skip
def _batch_norm(op: Op, settings: OpSettings) -> Iterator[Launch]:
    x, weight = op.arguments[:2]
    trains = op.name not in _FROZEN
    if op.name in ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm"):
        trains = next((flag for flag in op.arguments if isinstance(flag, bool)), True)
    yield _normed("batch_norm", x, weight, trains)


@rule("native_batch_norm_backward", "batch_norm_backward", *_INPUT_FIRST)
def _batch_norm_backward(op: Op, settings: OpSettings) -> Iterator[Launch]:
    x, weight = op.arguments[0 if op.name in _INPUT_FIRST else 1], op.arguments[2]
    trains = next((flag for flag in op.arguments if isinstance(flag, bool)), True)
    yield _normed("batch_norm_backward", x, weight, trains)


def _normed(kernel: str, x: Tensor, weight: Tensor | None, trains: bool) -> Launch:
    weights = weight.dtype if weight is not None and weight.dtype != x.dtype else None
    if len(x.shape) < 3:
        weights = None  # rows are ATen's own, in whatever formats: cuDNN takes feature maps
    return launch("norms", kernel, **_planes(x), layout=layout_of(x), training=trains, weights=weights,
                  dtype=number_format(x))  # fmt: skip


@rule("native_group_norm", "native_group_norm_backward")
def _group_norm(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """Statistics of each group of channels in each image; images, channels, pixels and groups are given."""
    x = op.arguments[1 if op.name.endswith("backward") else 0]
    batch, channels, spatial, groups = [a for a in op.arguments if type(a) is int][:4]
    yield launch("norms", op.name.removeprefix("native_"), batch=max(1, batch), channels=channels,
                 spatial=max(1, spatial), groups=groups, dtype=number_format(x))  # fmt: skip


def _three(sizes: Sequence[int], empty: int) -> list[int]:
    """Depth, height and width; ``empty`` for missing axes."""
    return [*[empty] * (3 - len(sizes)), *sizes]


def _windows(x: Tensor, axes: int, kernel: Any, stride: Any, padding: Any) -> dict[str, Any]:
    """Parameters of pooling over the last ``axes`` axes of ``x``; a number counts for each of them."""
    sizes, window, step, around = (
        list(value) * (axes if len(value) == 1 else 1) if isinstance(value, (list, tuple)) else [value] * axes
        for value in (x.shape[-axes:], kernel, stride or kernel, padding or 0)
    )
    depth, height, width = _three(sizes, 1)
    kernel_d, kernel_h, kernel_w = _three(window, 1)
    return {**_images(x, axes), "depth": depth, "height": height, "width": width, "kernel_d": min(kernel_d, depth),
            "kernel_h": min(kernel_h, height), "kernel_w": min(kernel_w, width), "stride": max(step),
            "padding": max(around), "layout": layout_of(x), "dtype": number_format(x)}  # fmt: skip


def _images(x: Tensor, axes: int) -> dict[str, int]:
    batch = x.shape[0] if len(x.shape) > axes + 1 else 1
    return {"batch": max(1, batch), "channels": max(1, x.shape[-axes - 1])}


@rule("max_pool2d_with_indices", "max_pool3d_with_indices", "max_pool2d", "avg_pool2d", "avg_pool3d")
def _pool(op: Op, settings: OpSettings) -> Iterator[Launch]:
    x, kernel = op.arguments[:2]
    stride, padding = op.argument(2, "stride"), op.argument(3, "padding")
    yield launch("pooling", op.name[:8], **_windows(x, 2 + ("3d" in op.name), kernel, stride, padding))


@rule("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward", "avg_pool2d_backward",
      "avg_pool3d_backward")  # fmt: skip
def _pool_backward(op: Op, settings: OpSettings) -> Iterator[Launch]:
    _, x, kernel, stride, padding = op.arguments[:5]
    yield launch("pooling", f"{op.name[:8]}_backward", **_windows(x, 2 + ("3d" in op.name), kernel, stride, padding))


@rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d",
      "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", "adaptive_max_pool2d_backward",
      "adaptive_max_pool3d_backward")  # fmt: skip
def _adaptive(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """Adaptive pooling, maximum or mean."""
    backward = op.name.endswith("backward")
    x, y = (op.arguments[1], op.arguments[0]) if backward else (op.arguments[0], op.outputs[0])
    axes = 2 + ("3d" in op.name)
    yield launch("pooling", f"adaptive_avg_pool{'_backward' * backward}", **_images(x, axes), **_resized(x, y, axes),
                 layout=layout_of(x), dtype=number_format(x))  # fmt: skip


def _resized(x: Tensor, y: Tensor, axes: int) -> dict[str, int]:
    """Rows and columns before and after; frames count as rows."""
    sizes: dict[str, int] = {}
    for name, tensor in (("", x), ("out_", y)):
        depth, height, width = _three(tensor.shape[-axes:], 1)
        sizes |= {f"{name}height": max(1, depth * height), f"{name}width": max(1, width)}
    return sizes


# interpolation modes, by a part of the op's name
_MODES = {"nearest": "nearest", "linear": "bilinear", "bicubic": "bicubic"}
_UPSAMPLES = [f"{name}{suffix}" for suffix in ("", "_backward") for name in (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)]  # fmt: skip


@rule(*_UPSAMPLES)
def _interpolate(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """The input is the small image, or, downwards, the large one."""
    backward = op.name.endswith("backward")
    x, y = (op.outputs[0], op.arguments[0]) if backward else (op.arguments[0], op.outputs[0])
    mode = next(name for part, name in _MODES.items() if part in op.name)
    axes = 3 if "3d" in op.name else 1 if "1d" in op.name else 2
    yield launch("resampling", f"interpolate{'_backward' * backward}", **_images(x, axes), **_resized(x, y, axes),
                 mode=mode, layout=layout_of(x), dtype=number_format(x))  # fmt: skip


@rule(*(f"{mode}_pad{axes}d{suffix}" for mode in ("reflection", "replication") for axes in (1, 2, 3)
        for suffix in ("", "_backward")))  # fmt: skip
def _mirrored(op: Op, settings: OpSettings) -> Iterator[Launch]:
    backward = op.name.endswith("backward")
    x, y = (op.arguments[1], op.arguments[0]) if backward else (op.arguments[0], op.outputs[0])
    axes = int(op.name.partition("_pad")[2][0])
    images = max(1, x.elements // max(1, math.prod(x.shape[-axes:])))
    mode = "reflect" if op.name.startswith("reflection") else "replicate"
    yield launch("copy", f"pad{'_backward' * backward}", images=images, **_resized(x, y, axes), mode=mode,
                 dtype=number_format(x))  # fmt: skip


@rule("constant_pad_nd")
def _constant_pad(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """The output is filled, then the input copied into it. Negative padding: a copy of what is left."""
    x, y = op.arguments[0], op.outputs[0]
    if all(border <= 0 for border in op.arguments[1]):
        yield copied(Tensor(y.shape, x.stride, x.dtype), y)
        return
    yield from filled(Tensor(tuple(map(min, x.shape, y.shape)), x.stride, x.dtype), y)


@rule("roll")
def _roll(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """A kernel for each axis that is shifted; the flattened tensor where none is given."""
    x = op.arguments[0]
    shifts, named = op.argument(1, "shifts"), op.argument(2, "dims", ())
    shifts, named = ([value] if isinstance(value, int) else list(value or ()) for value in (shifts, named))
    yield from in_order(x)
    for shift, axis in zip(shifts, named or [None] * len(shifts), strict=False):
        sizes = (x.elements,) if axis is None else x.shape
        at = 0 if axis is None else axis % len(sizes)
        length = max(1, sizes[at])
        yield launch("copy", "roll", outer=max(1, math.prod(sizes[:at])), length=length,
                     inner=max(1, math.prod(sizes[at + 1 :])), shift=abs(shift) % length,
                     dtype=number_format(x))  # fmt: skip


@rule("im2col", "col2im")
def _columns(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """A thread an output that reads its window; neighbours share it through L1."""
    x = max((*op.inputs, *op.outputs), key=lambda t: t.elements)
    yield pointwise("pooling", max(t.elements for t in op.outputs), number_format(x), flops=4.0, access="strided",
                    read_bytes=total_bytes(op.inputs), written_bytes=total_bytes(op.outputs))  # fmt: skip


# ---- Fourier transforms (cuFFT) and sampling at points of a grid: what audio and vision models do beside products

# A kernel of cuFFT transforms rows that fit in shared memory; longer ones are split into two factors, and so on.
_ROW = 8192
# cuFFT has radices up to 127: a row with a larger prime factor is a convolution of twice its length, padded to a power
# of two, with two transforms and products around them (Bluestein).
_LARGEST_RADIX = 127
_BLUESTEIN = 8.0  # kernels' worth of bytes against one


def _passes(length: int) -> float:
    """Times that a transform of this length reads and writes its rows."""
    rest = length
    for prime in range(2, _LARGEST_RADIX + 1):
        while rest % prime == 0:
            rest //= prime
    passes = max(1, math.ceil(math.log(max(2, length)) / math.log(_ROW) - 1e-9))
    return passes * (_BLUESTEIN if rest > 1 else 1.0)


def _transformed(x: Tensor, out: Tensor, dims: Sequence[int]) -> Iterator[Launch]:
    """A pass or more an axis: the first reads the input, all write numbers of the output's format."""
    shape = x.shape if x.elements >= out.elements else out.shape
    read = x
    for axis in reversed(list(dims)):
        for _ in range(round(_passes(shape[axis]))):
            flops = 5 * math.log2(max(2, shape[axis]))  # 5 n log2 n, the usual count
            yield over("transform", out, read_bytes=read.bytes, tensors=1, flops=flops,
                       access=None if axis % len(shape) == len(shape) - 1 else "strided", axes=2)  # fmt: skip
            read = out


@rule("_fft_r2c", "_fft_c2c", "_fft_c2r")
def _fft(op: Op, settings: OpSettings) -> Iterator[Launch]:
    x, out, dims = op.arguments[0], op.outputs[0], op.arguments[1]
    if op.name == "_fft_c2r":  # cuFFT writes over what it reads: PyTorch copies it first
        yield over("transform", x, tensors=1)
    yield from _transformed(x, out, dims)
    if op.argument(2, "normalization"):
        yield over("transform", out, tensors=1)


@rule("unfold_backward")
def _overlapped(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """Frames added up where they overlap, as istft and the gradient of stft do: into zeros, a thread a number."""
    frames, out = op.arguments[0], op.outputs[0]
    yield by_rows("transform", "fill", out)
    yield over("transform", out, read_bytes=frames.bytes, tensors=1, access="strided", axes=3, flops=2.0)


@rule("grid_sampler_2d", "grid_sampler_3d")
def _sample(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """A thread a point, which walks over the channels and mixes four or eight neighbours of each."""
    x, grid = op.arguments[:2]
    out = op.outputs[0]
    read = _touched(x, out) + grid.bytes
    yield over("sampling", out, read_bytes=read, tensors=2, access="strided", axes=3, flops=12.0)


@rule("grid_sampler_2d_backward", "grid_sampler_3d_backward")
def _sample_backward(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """The input's gradient starts at zero and is added to by atomics, four or eight for a number of the output's."""
    gradient, x, grid = op.arguments[:3]
    wanted = op.argument(6, "output_mask", (True, True))
    added = 0
    if wanted[0]:
        yield by_rows("sampling", "fill", x, dtype="fp32")
        added = 4 * gradient.elements * max(4, x.item_bytes)
    read = gradient.bytes + _touched(x, gradient) + grid.bytes
    yield over("sampling", gradient, read_bytes=read, written_bytes=added + grid.bytes * bool(wanted[1]), tensors=3,
               access="strided", axes=3, flops=24.0)  # fmt: skip


def _touched(x: Tensor, out: Tensor) -> int:
    """Bytes of the input that points reach: no more than four neighbours of each."""
    return min(x.bytes, 4 * out.elements * x.item_bytes)


@rule("affine_grid_generator")
def _affine_grid(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """A base grid, filled axis by axis, then a batch of small products."""
    theta, out = op.arguments[0], op.outputs[0]
    points = max(1, out.elements // max(1, theta.shape[0] * theta.shape[1]))
    yield pointwise("sampling", out.elements, "fp32", read_bytes=0, written_bytes=out.bytes, access="strided", count=5)
    yield launch("sampling", "bmm", batch=theta.shape[0], m=points, n=theta.shape[1], k=theta.shape[2], dtype="fp32")


@rule("_weight_norm_interface", "_weight_norm_interface_backward")
def _weight_norm(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """One CTA per filter: its norm first, then the weights again, scaled; backward reads the gradient too."""
    weights = op.outputs[0]
    read = 2 * sum(x.bytes for x in op.inputs if x.elements == weights.elements)
    yield over("norm", weights, read_bytes=read, written_bytes=total_bytes(op.outputs), tensors=len(op.inputs))


@rule("_euclidean_dist")
def _distances(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """Distances of all pairs by a matrix product with the squares appended, then a clamp and a root."""
    first, second = op.arguments[:2]
    out = op.outputs[0]
    for x in (first, second):
        yield over("distance", x, tensors=1)
        yield by_rows("distance", "reduce_sum", x, axis="cols")
        yield over("distance", x, tensors=2, access="strided", axes=2)
    rows, cols = first.shape[-2], second.shape[-2]
    yield launch("distance", "bmm", batch=max(1, out.elements // (rows * cols)), m=rows, n=cols, k=first.cols + 2,
                 dtype=matrix_format(first, settings))  # fmt: skip
    for _ in ("clamp_min_", "sqrt_"):
        yield over("distance", out, tensors=1)
