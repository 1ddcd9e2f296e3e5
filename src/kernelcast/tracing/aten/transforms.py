"""Fourier transforms (cuFFT) and sampling at points of a grid: what audio and vision models do beside products."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from kernelcast.forecast.calls import Launch
from kernelcast.tracing.aten.table import (
    Settings,
    launch,
    matrix_format,
    number_format,
    over,
    pointwise,
    rule,
    total_bytes,
)
from kernelcast.tracing.traced import Op, Tensor

# A kernel of cuFFT transforms rows that fit in shared memory; longer ones are cut into two factors, and so on.
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
            yield over("transform", out, read_bytes=read.bytes, written_bytes=out.bytes, tensors=1, flops=flops,
                       access=None if axis % len(shape) == len(shape) - 1 else "strided", axes=2)  # fmt: skip
            read = out


@rule("_fft_r2c", "_fft_c2c", "_fft_c2r")
def _fft(op: Op, settings: Settings) -> Iterator[Launch]:
    x, out, dims = op.arguments[0], op.outputs[0], op.arguments[1]
    if op.name == "_fft_c2r":  # cuFFT writes over what it reads: PyTorch copies it first
        yield over("transform", x, read_bytes=x.bytes, written_bytes=x.bytes, tensors=1)
    yield from _transformed(x, out, dims)
    if op.argument(2, "normalization"):
        yield over("transform", out, read_bytes=out.bytes, written_bytes=out.bytes, tensors=1)


@rule("unfold_backward")
def _overlapped(op: Op, settings: Settings) -> Iterator[Launch]:
    """Frames added up where they overlap, as istft and the gradient of stft do: into zeros, a thread a number."""
    frames, out = op.arguments[0], op.outputs[0]
    yield launch("transform", "fill", rows=out.rows, cols=out.cols, dtype=number_format(out))
    yield over("transform", out, read_bytes=frames.bytes, written_bytes=out.bytes, tensors=1, access="strided", axes=3,
               flops=2.0)  # fmt: skip


@rule("grid_sampler_2d", "grid_sampler_3d")
def _sample(op: Op, settings: Settings) -> Iterator[Launch]:
    """A thread a point, which walks over the channels and mixes four or eight neighbours of each."""
    x, grid = op.arguments[:2]
    out = op.outputs[0]
    yield over("sampling", out, read_bytes=_touched(x, out) + grid.bytes, written_bytes=out.bytes, tensors=2,
               access="strided", axes=3, flops=12.0)  # fmt: skip


@rule("grid_sampler_2d_backward", "grid_sampler_3d_backward")
def _sample_backward(op: Op, settings: Settings) -> Iterator[Launch]:
    """The input's gradient starts at zero and is added to by atomics, four or eight for a number of the output's."""
    gradient, x, grid = op.arguments[:3]
    wanted = op.argument(6, "output_mask", (True, True))
    added = 0
    if wanted[0]:
        yield launch("sampling", "fill", rows=max(1, x.elements // x.cols), cols=x.cols, dtype="fp32")
        added = 4 * gradient.elements * max(4, x.item_bytes)
    read = gradient.bytes + _touched(x, gradient) + grid.bytes
    yield over("sampling", gradient, read_bytes=read, written_bytes=added + grid.bytes * bool(wanted[1]), tensors=3,
               access="strided", axes=3, flops=24.0)  # fmt: skip


def _touched(x: Tensor, out: Tensor) -> int:
    """Bytes of the input that points reach: no more than four neighbours of each."""
    return min(x.bytes, 4 * out.elements * x.item_bytes)


@rule("affine_grid_generator")
def _affine_grid(op: Op, settings: Settings) -> Iterator[Launch]:
    """A grid of places of its own, filled axis by axis, then a batch of small products."""
    theta, out = op.arguments[0], op.outputs[0]
    points = max(1, out.elements // max(1, theta.shape[0] * theta.shape[1]))
    yield pointwise("sampling", out.elements, "fp32", read_bytes=0, written_bytes=out.bytes, access="strided", count=5)
    yield launch("sampling", "bmm", batch=theta.shape[0], m=points, n=theta.shape[1], k=theta.shape[2], dtype="fp32")


@rule("_weight_norm_interface", "_weight_norm_interface_backward")
def _weight_norm(op: Op, settings: Settings) -> Iterator[Launch]:
    """A CTA a filter: its norm first, then the weights again, scaled; backward has the gradient beside them."""
    weights = op.outputs[0]
    read = 2 * sum(x.bytes for x in op.inputs if x.elements == weights.elements)
    yield over("norm", weights, read_bytes=read, written_bytes=total_bytes(op.outputs), tensors=len(op.inputs))


@rule("_euclidean_dist")
def _distances(op: Op, settings: Settings) -> Iterator[Launch]:
    """Of all pairs by a product: squares of both sides beside their numbers, then a clamp and a root."""
    one, other = op.arguments[:2]
    out = op.outputs[0]
    for x in (one, other):
        yield over("distance", x, read_bytes=x.bytes, written_bytes=x.bytes, tensors=1)
        yield launch("distance", "reduce_sum", rows=x.rows, cols=x.cols, axis="cols", dtype=number_format(x))
        yield over("distance", x, read_bytes=x.bytes, written_bytes=x.bytes, tensors=2, access="strided", axes=2)
    rows, cols = one.shape[-2], other.shape[-2]
    yield launch("distance", "bmm", batch=max(1, out.elements // (rows * cols)), m=rows, n=cols, k=one.cols + 2,
                 dtype=matrix_format(one, settings))  # fmt: skip
    for _ in ("clamp_min_", "sqrt_"):
        yield over("distance", out, read_bytes=out.bytes, written_bytes=out.bytes, tensors=1)
