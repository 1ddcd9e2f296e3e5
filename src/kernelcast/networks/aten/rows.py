"""Ops over rows: norms, softmax, losses, reductions, sorting; forward and backward."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kernelcast.calls import Launch
from kernelcast.networks.aten.table import Settings, launch, number_format, pointwise, rule, split
from kernelcast.networks.traced import Op, Tensor


def _normal(x: Tensor, axes: int) -> dict[str, int]:
    """A norm over the last ``axes``."""
    cols = math.prod(x.shape[-axes:]) if axes else 1
    return {"rows": max(1, x.elements // max(1, cols)), "cols": max(1, cols)}


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm")
def _norm(op: Op, settings: Settings) -> Iterator[Launch]:
    x, shape = op.arguments[:2]
    kind = "layernorm" if "layer" in op.name else "rmsnorm"
    yield launch("norms", kind, settings, **_normal(x, len(shape)), dtype=number_format(x))


@rule("native_layer_norm_backward", "_fused_rms_norm_backward")
def _norm_backward(op: Op, settings: Settings) -> Iterator[Launch]:
    x, shape = op.arguments[1:3]
    kind = "layernorm_backward" if "layer" in op.name else "rmsnorm_backward"
    yield launch("norms", kind, settings, **_normal(x, len(shape)), dtype=number_format(x))


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
    reads = 2 if backward else 1
    if not frozen:
        yield pointwise("norms", settings, x.elements, number_format(x), read_bytes=reads * x.bytes, written_bytes=0.0,
                        flops=4.0)  # fmt: skip
    yield pointwise("norms", settings, x.elements, number_format(x), read_bytes=reads * x.bytes, written_bytes=x.bytes,
                    flops=4.0)  # fmt: skip


def _along(x: Tensor, axis: int) -> tuple[int, int]:
    """Rows and columns of an op over one axis."""
    cols = x.shape[axis] if x.shape else 1
    return max(1, x.elements // max(1, cols)), max(1, cols)


@rule("_softmax", "_log_softmax", "_safe_softmax")
def _softmax(op: Op, settings: Settings) -> Iterator[Launch]:
    x, axis = op.arguments[:2]
    rows, cols = _along(x, axis)
    kind = "log_softmax" if "log" in op.name else "softmax"
    yield launch("softmax", kind, settings, rows=rows, cols=cols, dtype=number_format(x))


@rule("_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward(op: Op, settings: Settings) -> Iterator[Launch]:
    grad, _, axis = op.arguments[:3]
    rows, cols = _along(grad, axis)
    kind = "log_softmax_backward" if "log" in op.name else "softmax_backward"
    yield launch("softmax", kind, settings, rows=rows, cols=cols, dtype=number_format(grad))


@rule("nll_loss_forward", "nll_loss2d_forward")
def _loss(op: Op, settings: Settings) -> Iterator[Launch]:
    x = op.arguments[0]
    yield launch("loss", "nll_loss", settings, rows=x.rows, cols=x.cols, dtype=number_format(x))


@rule("nll_loss_backward", "nll_loss2d_backward")
def _loss_backward(op: Op, settings: Settings) -> Iterator[Launch]:
    """Zeros everywhere, then one number a row."""
    x = op.outputs[0]
    rows, cols = split(x.elements, x.cols)
    yield launch("loss", "fill", settings, rows=rows, cols=cols, dtype=number_format(x))
    yield pointwise("loss", settings, x.rows, number_format(x), read_bytes=8.0 * x.rows, written_bytes=32.0 * x.rows,
                    access="strided")  # fmt: skip


REDUCTIONS = ("sum", "mean", "amax", "amin", "prod", "any", "all", "linalg_vector_norm", "norm", "var", "var_mean",
               "std", "max", "min", "logsumexp", "nansum", "count_nonzero", "std_mean")  # fmt: skip


@rule(*REDUCTIONS)
def _reduce(op: Op, settings: Settings) -> Iterator[Launch]:
    """One number for each group of the input; the groups lie side by side in memory, or across it."""
    x = op.inputs[0]
    if op.name in ("max", "min") and len(op.inputs) > 1:
        yield pointwise("element-wise", settings, x.elements, number_format(x), read_bytes=x.bytes * 2,
                        written_bytes=x.bytes)  # fmt: skip
        return
    outputs = max(1, op.outputs[0].elements)
    reduced = max(1, x.elements // outputs)
    axes = reduced_axes(op, x)
    inner = bool(x.shape) and (len(x.shape) - 1 in axes)
    if inner or outputs == 1:
        yield launch(
            "reduction", "reduce_sum", settings, rows=outputs, cols=reduced, axis="cols", dtype=number_format(x)
        )
    else:
        yield launch(
            "reduction", "reduce_sum", settings, rows=reduced, cols=outputs, axis="rows", dtype=number_format(x)
        )


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
    yield launch("reduction", "argmax", settings, rows=rows, cols=max(1, x.elements // rows), dtype=number_format(x))


@rule("cumsum", "cumprod", "logcumsumexp", "cummax")
def _scan(op: Op, settings: Settings) -> Iterator[Launch]:
    x, axis = op.arguments[:2]
    rows, cols = _along(x, axis)
    yield launch("reduction", "cumsum", settings, rows=rows, cols=cols, dtype=number_format(x))


@rule("topk")
def _topk(op: Op, settings: Settings) -> Iterator[Launch]:
    x, k = op.arguments[:2]
    rows, cols = _along(x, op.argument(2, "dim", -1))
    yield launch("sort", "topk", settings, rows=rows, cols=cols, k=k, dtype=number_format(x))


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
    yield pointwise("sort", settings, x.elements, "fp32", read_bytes=pair * x.elements * (1 + (passes > 1)),
                    written_bytes=pair * x.elements, access="strided", count=passes)  # fmt: skip


@rule("histc", "bincount", "_histogramdd_bin_edges")
def _histogram(op: Op, settings: Settings) -> Iterator[Launch]:
    x = op.inputs[0]
    yield launch("reduction", "fill", settings, rows=1, cols=max(1, op.outputs[0].elements), dtype="fp32")
    yield pointwise("reduction", settings, x.elements, number_format(x), read_bytes=x.bytes, written_bytes=0.0)
