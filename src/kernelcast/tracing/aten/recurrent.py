"""Recurrent layers as cuDNN runs them, the fused gates of single cells, and the loss that walks over steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kernelcast.forecast.calls import Launch
from kernelcast.tracing.aten.table import (
    OpSettings,
    launch,
    number_format,
    over,
    pointwise,
    rule,
    total_bytes,
    vectorised,
)
from kernelcast.tracing.traced import Op, Tensor

_PART = "recurrence"
_CELLS = {0: "rnn", 1: "rnn", 2: "lstm", 3: "gru"}  # cudnnRNNMode_t


def _format(x: Tensor, settings: OpSettings) -> str:
    """torch.backends.cudnn.allow_tf32 is on by default."""
    if x.dtype in ("bf16", "fp16"):
        return x.dtype
    return "tf32" if settings.has_tf32 and x.dtype == "fp32" else "fp32"


def _layers(x: Tensor, how: tuple[Any, ...], settings: OpSettings) -> dict[str, Any]:
    """Parameters of the kernel call. ``how``: mode, hidden, projection, layers, batch_first, dropout, train,
    bidirectional, batch_sizes."""
    mode, hidden, projection, layers, batch_first, _, _, bidirectional, batch_sizes = how
    if batch_sizes:
        steps, batch = len(batch_sizes), max(1, round(sum(batch_sizes) / len(batch_sizes)))
    else:
        steps, batch = (x.shape[1], x.shape[0]) if batch_first else (x.shape[0], x.shape[1])
    packed = "standard" if batch_sizes else None  # the other algorithms want equal lengths
    return {"batch": batch, "steps": steps, "input": x.cols, "hidden": hidden, "layers": layers,
            "bidirectional": bool(bidirectional), "projection": projection or None, "cell": _CELLS[mode],
            "algorithm": packed, "dtype": _format(x, settings)}  # fmt: skip


def _steps_first(x: Tensor, how: tuple[Any, ...]) -> Iterator[Launch]:
    """cuDNN takes time-major tensors: a batch-first tensor is copied, unless it is time-major in memory."""
    batch_first, batch_sizes = how[4], how[8]
    if batch_sizes or len(x.shape) < 3 or not batch_first or 1 in x.shape[:2]:
        return
    if x.stride[1] != x.shape[0] * x.stride[0]:
        yield over(_PART, x, tensors=1, access="strided", axes=3)


def _dropped(x: Tensor, width: int, how: tuple[Any, ...], op: str) -> Iterator[Launch]:
    """Dropout between two layers, in training."""
    layers, dropout, train = how[3], how[5], how[6]
    if train and dropout > 0 and layers > 1:
        yield launch(_PART, op, layers - 1, rows=max(1, x.elements // x.cols), cols=width, dtype=number_format(x))


def _flattened(weights: tuple[Tensor, ...]) -> Iterator[Launch]:
    """PyTorch keeps weights of fp16 and fp32 in one buffer, as cuDNN wants them (nn.RNNBase.flatten_parameters checks
    torch.backends.cudnn.is_acceptable, which excludes bf16): those of bf16 are copied into a new one every time."""
    if weights[0].dtype == "bf16":
        yield launch(_PART, "fill", rows=1, cols=sum(x.elements for x in weights), dtype="bf16")
        for x in weights:
            yield over(_PART, x, tensors=1)


@rule("_cudnn_rnn")
def _forward(op: Op, settings: OpSettings) -> Iterator[Launch]:
    x, weights, how = op.arguments[0], op.arguments[1], tuple(op.arguments[6:15])
    yield from _steps_first(x, how)
    yield from _flattened(weights)
    yield launch(_PART, "recurrent", **_layers(x, how, settings), training=bool(how[6]))
    yield from _dropped(x, op.outputs[0].cols, how, "dropout")


@rule("_cudnn_rnn_backward")
def _backward(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """The input is transposed for its gradient and again for that of the weights."""
    x, gradient, how = op.arguments[0], op.arguments[7], tuple(op.arguments[10:19])
    for tensor in (x, x, gradient):
        if tensor is not None:
            yield from _steps_first(tensor, how)
    yield launch(_PART, "recurrent_backward", **_layers(x, how, settings))
    yield from _dropped(x, op.arguments[6].cols, how, "dropout_backward")


@rule("_ctc_loss", "_ctc_loss_backward")
def _ctc(op: Op, settings: OpSettings) -> Iterator[Launch]:
    backward = op.name.endswith("backward")
    chances, alpha = (op.arguments[1], op.arguments[6]) if backward else (op.arguments[0], op.outputs[1])
    steps, batch, classes = chances.shape
    yield launch("loss", "ctc_loss", batch=batch, steps=steps, targets=max(1, alpha.cols // 2), classes=classes,
                 backward=backward, dtype="fp32")  # fmt: skip


@rule("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell")
def _cell(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """A thread an element of the state: gates of both products in, the state out, and what backward needs."""
    yield _gates(op, op.outputs[0], op.outputs)


@rule("_thnn_fused_lstm_cell_backward_impl")
def _lstm_cell_backward(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """Gates, then the sum of the biases' gradient, which both share."""
    yield _gates(op, op.outputs[1], op.outputs[:2])
    if op.argument(5, "has_bias"):
        yield vectorised("reduction", "reduce_sum", op.outputs[0], axis="rows")


@rule("_thnn_fused_gru_cell_backward")
def _gru_cell_backward(op: Op, settings: OpSettings) -> Iterator[Launch]:
    yield _gates(op, op.outputs[2], op.outputs[:3])
    for gates in op.outputs[:2] if op.argument(2, "has_bias") else ():
        yield vectorised("reduction", "reduce_sum", gates, axis="rows")


def _gates(op: Op, state: Tensor, outputs: tuple[Tensor, ...]) -> Launch:
    read, written = total_bytes(op.inputs), total_bytes(outputs)
    return pointwise(_PART, state.elements, number_format(state), read_bytes=read, written_bytes=written,
                     access="strided", flops=20.0, xu_ops=5.0)  # fmt: skip
