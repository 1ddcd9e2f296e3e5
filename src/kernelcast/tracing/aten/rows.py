"""Ops over rows: norms, softmax, losses, reductions; forward and backward."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kernelcast.forecast.calls import Launch
from kernelcast.tracing.aten.elementwise import in_order
from kernelcast.tracing.aten.table import OpSettings, along, by_rows, number_format, over, pointwise, rule, vectorised
from kernelcast.tracing.traced import Op, Tensor

# the kernel, and where the tensor is among the arguments; its normal shape comes next
_NORMS = {
    "native_layer_norm": ("layernorm", 0), "_fused_rms_norm": ("rmsnorm", 0), "rms_norm": ("rmsnorm", 0),
    "native_layer_norm_backward": ("layernorm_backward", 1), "_fused_rms_norm_backward": ("rmsnorm_backward", 1),
}  # fmt: skip


@rule(*_NORMS)
def _norm(op: Op, settings: OpSettings) -> Iterator[Launch]:
    kernel, at = _NORMS[op.name]
    x, shape = op.arguments[at : at + 2]
    yield from in_order(*op.arguments[: at + 1])  # in the backward pass the gradient, then the input
    cols = max(1, math.prod(x.shape[-len(shape) :]) if shape else 1)
    yield by_rows("norms", kernel, x, x.elements // cols, cols)


# part and kernel, and where the axis is among the arguments
_ALONG_AN_AXIS = {
    "_softmax": ("softmax", "softmax", 1),
    "_log_softmax": ("softmax", "log_softmax", 1), "_softmax_backward_data": ("softmax", "softmax_backward", 2),
    "_log_softmax_backward_data": ("softmax", "log_softmax_backward", 2),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "cummax"), ("reduction", "cumsum", 1)),
}  # fmt: skip


@rule(*_ALONG_AN_AXIS)
def _one_axis(op: Op, settings: OpSettings) -> Iterator[Launch]:
    part, kernel, at = _ALONG_AN_AXIS[op.name]
    x, axis = op.arguments[0], op.arguments[at]
    if part == "softmax":
        yield from in_order(*op.arguments[:at])
    yield by_rows(part, kernel, x, *along(x, axis))


@rule("nll_loss_forward", "nll_loss2d_forward")
def _loss(op: Op, settings: OpSettings) -> Iterator[Launch]:
    yield by_rows("loss", "nll_loss", op.arguments[0])


@rule("nll_loss_backward", "nll_loss2d_backward")
def _loss_backward(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """Zeros everywhere, then one number a row."""
    x = op.outputs[0]
    yield vectorised("loss", "fill", x)
    yield pointwise("loss", x.rows, number_format(x), read_bytes=8.0 * x.rows, written_bytes=32.0 * x.rows,
                    access="strided")  # fmt: skip


REDUCTIONS = ("sum", "mean", "amax", "amin", "prod", "any", "all", "linalg_vector_norm", "norm", "var", "var_mean",
               "std", "max", "min", "nansum", "count_nonzero", "std_mean")  # fmt: skip


@rule(*REDUCTIONS)
def _reduce(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """One number for each group of the input; the groups are contiguous in memory, or strided."""
    x = op.inputs[0]
    if op.name in ("max", "min") and len(op.inputs) > 1:
        yield over("element-wise", x, read_bytes=x.bytes * 2)
        return
    outputs = max(1, op.outputs[0].elements)
    reduced = max(1, x.elements // outputs)
    if len(x.shape) - 1 in reduced_axes(op, x) or outputs == 1:
        yield by_rows("reduction", "reduce_sum", x, outputs, reduced, axis="cols")
    else:
        yield by_rows("reduction", "reduce_sum", x, reduced, outputs, axis="rows")


@rule("logsumexp")
def _log_sum_exp(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """The maximum, where that is infinite a zero, the exponentials of what is left, their sum, its logarithm
    (``logsumexp_out_impl`` in ReduceOps.cpp)."""
    x, y = op.inputs[0], op.outputs[0]
    reduction = tuple(_reduce(op, settings))
    yield from reduction
    for kernel in ("neg", "add", "masked_fill"):  # abs, eq, masked_fill
        yield vectorised("reduction", kernel, y)
    yield over("reduction", x, axes=2, access="strided")
    yield vectorised("reduction", "exp", x)
    yield from reduction
    for kernel in ("log", "add"):
        yield vectorised("reduction", kernel, y)


def reduced_axes(op: Op, x: Tensor) -> set[int]:
    """Axes that are reduced; all of them where none is given."""
    position = 2 if op.name in ("linalg_vector_norm", "norm") else 1
    named = op.argument(position, "dim")
    axes = [named] if isinstance(named, int) and not isinstance(named, bool) else named
    if not isinstance(axes, (tuple, list)) or not axes:
        return set(range(len(x.shape)))
    return {axis % len(x.shape) for axis in axes if isinstance(axis, int)} if x.shape else set()


@rule("argmax", "argmin")
def _argmax(op: Op, settings: OpSettings) -> Iterator[Launch]:
    x = op.inputs[0]
    rows = max(1, op.outputs[0].elements)
    yield by_rows("reduction", "argmax", x, rows, x.elements // rows)
