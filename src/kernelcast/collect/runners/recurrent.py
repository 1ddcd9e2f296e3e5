"""Recurrence through PyTorch: cuDNN's LSTM, GRU and RNN, as nn.LSTM, nn.GRU and nn.RNN call them; its own CTC loss."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernelcast.collect.pool import TensorSpec, specs
from kernelcast.collect.runners import Launch, Recipe, Runner

_MODES = {"rnn": 1, "lstm": 2, "gru": 3}  # of cudnnRNNMode_t; rnn: tanh
_GATES = {"rnn": 1, "lstm": 4, "gru": 3}
_MOST_SETS = 1  # hundreds of kernels, which take their weights from L2 after the first step


def _weights(call: Any) -> tuple[TensorSpec, ...]:
    """Weights as nn.LSTM keeps them: for each layer and direction two matrices, two biases, and the projection."""
    rows, out = _GATES[call.cell] * call.hidden, call.projection or call.hidden
    directions = 1 + call.bidirectional
    shapes: list[tuple[int, ...]] = []
    for layer in range(call.layers):
        width = directions * out if layer else call.input
        shapes_of_layer = [(rows, width), (rows, out), (rows,), (rows,)] + (
            [(out, call.hidden)] if call.projection else []
        )
        shapes += directions * shapes_of_layer
    return specs(call.dtype, *shapes)


class _Layers:
    """One set of tensors, and the arguments that both passes are called with."""

    def __init__(self, call: Any, training: bool, x: Tensor, weights: tuple[Tensor, ...]) -> None:
        self._mode = _MODES[call.cell]
        self._stride = 5 if call.projection else 4
        projection = call.projection or 0
        sizes = (call.hidden, projection, call.layers)
        self._x = x
        # as small as nn.LSTM draws them, for kernels that keep weights wait on sums that are not their mark of "none
        # yet", the lowest number of the format; the copies become views of one flat buffer
        self._weights = [weight * (call.hidden**-0.5 / 2) for weight in weights]
        self._flat = torch._cudnn_rnn_flatten_weight(
            self._weights, self._stride, call.input, self._mode, *sizes, False, call.bidirectional
        )
        states = call.layers * (1 + call.bidirectional)
        self._hx = x.new_zeros(states, call.batch, projection or call.hidden)
        self._cx = x.new_zeros(states, call.batch, call.hidden) if call.cell == "lstm" else None
        # equal lengths, but packed: PyTorch takes the standard algorithm for those
        batches = [call.batch] * call.steps if call.algorithm == "standard" else []
        self._how = (self._mode, *sizes, False, 0.0, training, call.bidirectional, batches, None)

    def forward(self) -> tuple[Tensor, ...]:
        outputs = torch._cudnn_rnn(self._x, self._weights, self._stride, self._flat, self._hx, self._cx, *self._how)
        return tuple(outputs)

    def backward(self, gradient: Tensor) -> Launch:
        """The launch, after a forward pass whose results it keeps."""
        out, _, _, reserve, flat = self.forward()
        wanted = [True, True, self._cx is not None, True]
        return partial(
            torch.ops.aten._cudnn_rnn_backward, self._x, self._weights, self._stride, flat, self._hx,
            self._cx, out, gradient, None, None, *self._how, reserve, wanted,
        )  # fmt: skip


def _sequence(call: Any, width: int) -> tuple[int, ...]:
    """Steps first; a packed batch has no axis for them."""
    if call.algorithm == "standard":
        return (call.steps * call.batch, width)
    return (call.steps, call.batch, width)


def _precision(dtype: str) -> None:
    """Whether fp32 may be multiplied as tf32, as PyTorch lets cuDNN do by default."""
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"


def recurrent(call: Any) -> Recipe:
    _precision(call.dtype)

    def launch(x: Tensor, *weights: Tensor) -> Launch:
        return torch.no_grad()(_Layers(call, call.training, x, weights).forward)

    inputs = specs(call.dtype, _sequence(call, call.input))
    return Recipe((*inputs, *_weights(call)), launch, "cudnn", most_sets=_MOST_SETS)


def recurrent_backward(call: Any) -> Recipe:
    _precision(call.dtype)

    def launch(x: Tensor, gradient: Tensor, *weights: Tensor) -> Launch:
        with torch.no_grad():
            return _Layers(call, True, x, weights).backward(gradient)

    width = (1 + call.bidirectional) * (call.projection or call.hidden)
    inputs = specs(call.dtype, _sequence(call, call.input), _sequence(call, width))
    return Recipe((*inputs, *_weights(call)), launch, "cudnn", most_sets=_MOST_SETS)


def ctc_loss(call: Any) -> Recipe:
    """CTC loss of random scores, as log-probabilities."""

    def launch(scores: Tensor) -> Launch:
        labels = torch.randint(1, max(2, call.classes), (call.batch, call.targets), device=scores.device)
        how = (labels, [call.steps] * call.batch, [call.targets] * call.batch)
        chances = scores.log_softmax(-1)
        if not call.backward:
            return partial(torch.ops.aten._ctc_loss, chances, *how)
        loss, alpha = torch.ops.aten._ctc_loss(chances, *how)
        return partial(torch.ops.aten._ctc_loss_backward, torch.ones_like(loss), chances, *how, loss, alpha, 0)

    return Recipe(specs(call.dtype, (call.steps, call.batch, call.classes)), launch, "torch", most_sets=1)


RUNNERS: Mapping[str, Runner] = {"recurrent": recurrent, "recurrent_backward": recurrent_backward, "ctc_loss": ctc_loss}
