"""Ops over rows: norms, softmax, losses, reductions, sorting; forward and backward."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from kernelcast.calls import Launch
from kernelcast.networks.aten.table import Settings, launch, number_format, over, pointwise, rule, vectorised
from kernelcast.networks.traced import Op, Tensor


def _by_rows(part: str, kernel: str, x: Tensor, rows: int, cols: int, **given: Any) -> Launch:
    return launch(part, kernel, rows=rows, cols=cols, dtype=number_format(x), **given)


# the kernel, and where the tensor is among the arguments; its normal shape comes next
_NORMS = {
    "native_layer_norm": ("layernorm", 0), "_fused_rms_norm": ("rmsnorm", 0), "rms_norm": ("rmsnorm", 0),
    "native_layer_norm_backward": ("layernorm_backward", 1), "_fused_rms_norm_backward": ("rmsnorm_backward", 1),
}  # fmt: skip


@rule(*_NORMS)
def _norm(op: Op, settings: Settings) -> Iterator[Launch]:
    kernel, at = _NORMS[op.name]
    x, shape = op.arguments[at : at + 2]
    cols = max(1, math.prod(x.shape[-len(shape) :]) if shape else 1)
    yield _by_rows("norms", kernel, x, max(1, x.elements // cols), cols)


@rule("native_group_norm", "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm",
      "_batch_norm_with_update", "_batch_norm_no_update", "native_batch_norm_backward", "cudnn_batch_norm_backward",
      "batch_norm_backward", "native_group_norm_backward")  # fmt: skip
def _channel_norm(op: Op, settings: Settings) -> Iterator[Launch]:
    """Statistics of each channel in one pass, then the normalisation (or gradient) in another."""
    x = max(op.inputs, key=lambda t: t.elements)
    backward = op.name.endswith("backward")
    frozen = op.name == "_batch_norm_no_update" or (
        op.name == "native_batch_norm" and op.argument(5, "training") is False
    )
    read = (2 if backward else 1) * x.bytes
    if not frozen:
        yield over("norms", x, read_bytes=read, written_bytes=0.0, flops=4.0)
    yield over("norms", x, read_bytes=read, written_bytes=x.bytes, flops=4.0)


def _along(x: Tensor, axis: int) -> tuple[int, int]:
    """Rows and columns of an op over one axis."""
    cols = x.shape[axis] if x.shape else 1
    return max(1, x.elements // max(1, cols)), max(1, cols)


# part and kernel, and where the axis is among the arguments
_ALONG_AN_AXIS = {
    "_softmax": ("softmax", "softmax", 1),
    "_log_softmax": ("softmax", "log_softmax", 1), "_softmax_backward_data": ("softmax", "softmax_backward", 2),
    "_log_softmax_backward_data": ("softmax", "log_softmax_backward", 2),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "cummax"), ("reduction", "cumsum", 1)),
}  # fmt: skip


@rule(*_ALONG_AN_AXIS)
def _one_axis(op: Op, settings: Settings) -> Iterator[Launch]:
    part, kernel, at = _ALONG_AN_AXIS[op.name]
    x, axis = op.arguments[0], op.arguments[at]
    yield _by_rows(part, kernel, x, *_along(x, axis))


@rule("nll_loss_forward", "nll_loss2d_forward")
def _loss(op: Op, settings: Settings) -> Iterator[Launch]:
    x = op.arguments[0]
    yield _by_rows("loss", "nll_loss", x, x.rows, x.cols)


@rule("nll_loss_backward", "nll_loss2d_backward")
def _loss_backward(op: Op, settings: Settings) -> Iterator[Launch]:
    """Zeros everywhere, then one number a row."""
    x = op.outputs[0]
    yield vectorised("loss", "fill", x)
    yield pointwise("loss", x.rows, number_format(x), read_bytes=8.0 * x.rows, written_bytes=32.0 * x.rows,
                    access="strided")  # fmt: skip


REDUCTIONS = ("sum", "mean", "amax", "amin", "prod", "any", "all", "linalg_vector_norm", "norm", "var", "var_mean",
               "std", "max", "min", "logsumexp", "nansum", "count_nonzero", "std_mean")  # fmt: skip


@rule(*REDUCTIONS)
def _reduce(op: Op, settings: Settings) -> Iterator[Launch]:
    """One number for each group of the input; the groups lie side by side in memory, or across it."""
    x = op.inputs[0]
    if op.name in ("max", "min") and len(op.inputs) > 1:
        yield over("element-wise", x, read_bytes=x.bytes * 2, written_bytes=x.bytes)
        return
    outputs = max(1, op.outputs[0].elements)
    reduced = max(1, x.elements // outputs)
    if len(x.shape) - 1 in reduced_axes(op, x) or outputs == 1:
        yield _by_rows("reduction", "reduce_sum", x, outputs, reduced, axis="cols")
    else:
        yield _by_rows("reduction", "reduce_sum", x, reduced, outputs, axis="rows")


def reduced_axes(op: Op, x: Tensor) -> set[int]:
    """Axes that go away; all of them where none is named."""
    place = 2 if op.name in ("linalg_vector_norm", "norm") else 1
    named = op.argument(place, "dim")
    axes = [named] if isinstance(named, int) and not isinstance(named, bool) else named
    if not isinstance(axes, (tuple, list)) or not axes:
        return set(range(len(x.shape)))
    return {axis % len(x.shape) for axis in axes if isinstance(axis, int)} if x.shape else set()


@rule("argmax", "argmin")
def _argmax(op: Op, settings: Settings) -> Iterator[Launch]:
    x = op.inputs[0]
    rows = max(1, op.outputs[0].elements)
    yield _by_rows("reduction", "argmax", x, rows, max(1, x.elements // rows))


@rule("topk")
def _topk(op: Op, settings: Settings) -> Iterator[Launch]:
    x, k = op.arguments[:2]
    yield _by_rows("sort", "topk", x, *_along(x, op.argument(2, "dim", -1)), k=k)


_RADIX_FROM = 4096  # longer rows are sorted by cub's radix sort in passes over memory, shorter ones within a CTA
_RADIX_BITS = 8


@rule("sort", "argsort", "_unique2", "unique_consecutive")
def _sort(op: Op, settings: Settings) -> Iterator[Launch]:
    """Pairs of value and place: passes of 8 bits over long rows, one within a CTA over short ones."""
    x = op.inputs[0]
    axis = next((a for a in (*op.arguments[1:], op.options.get("dim")) if type(a) is int), -1)
    _, cols = _along(x, axis)
    passes = math.ceil(8 * x.item_bytes / _RADIX_BITS) if cols > _RADIX_FROM else 1
    pair = x.item_bytes + 8
    yield pointwise("sort", x.elements, "fp32", read_bytes=pair * x.elements * (1 + (passes > 1)),
                    written_bytes=pair * x.elements, access="strided", count=passes)  # fmt: skip


@rule("histc", "bincount", "_histogramdd_bin_edges")
def _histogram(op: Op, settings: Settings) -> Iterator[Launch]:
    x = op.inputs[0]
    yield launch("reduction", "fill", rows=1, cols=max(1, op.outputs[0].elements), dtype="fp32")
    yield over("reduction", x, read_bytes=x.bytes, written_bytes=0.0)
