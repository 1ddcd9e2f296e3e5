"""Recurrent layers as a CUDA GPU runs them: cuDNN's, one op a layer stack, forward and backward; and fused cells.

Without a GPU PyTorch walks over the steps with products and gates of its own, hundreds of ops for one. What is told to
the dispatcher instead: the ops that people call (``INSTEAD``), and the sizes of what cuDNN's ops give (``SIZED``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernelcast.errors import KernelcastError

_aten = torch.ops.aten
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # cudnnRNNMode_t
# Numbers kept for the backward pass, for each step, sequence, chain and feature of the state: gates and cell, or gates
# and what the reset gate is multiplied with (sizes that cuDNN 9.19 asked for).
_KEPT = {0: 1, 1: 1, 2: 5, 3: 6}


def _cudnn(
    mode: int, x: Any, batch_sizes: list[int], state: Any, cell: Any, params: Sequence[Any], biases: bool, layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> Any:  # fmt: skip
    """(output, last state, last cell)"""
    hidden = int((cell if cell is not None else state).shape[-1])
    out = int(state.shape[-1])
    projection = 0 if out == hidden else out
    stride = (4 if biases else 2) + (projection > 0)
    found = _aten._cudnn_rnn(
        x, list(params), stride, None, state.contiguous(), None if cell is None else cell.contiguous(), mode, hidden,
        projection, layers, batch_first, dropout if train else 0.0, train, bidirectional, batch_sizes, None,
    )  # fmt: skip
    return found[:3]


def _lstm(
    input: Any, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool,
    bidirectional: bool, batch_first: bool,
) -> Any:  # fmt: skip
    how = (params, has_biases, num_layers, dropout, train, bidirectional, batch_first)
    return _cudnn(_MODES["lstm"], input, [], hx[0], hx[1], *how)


def _lstm_packed(
    data: Any, batch_sizes: Any, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool,
    bidirectional: bool,
) -> Any:  # fmt: skip
    how = (params, has_biases, num_layers, dropout, train, bidirectional, False)
    return _cudnn(_MODES["lstm"], data, _whole_numbers(batch_sizes), hx[0], hx[1], *how)


def _one_state(name: str) -> Callable[..., Any]:
    """Of GRU and RNN, whose state has no cell."""

    def layers(
        input: Any, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool,
        bidirectional: bool, batch_first: bool,
    ) -> Any:  # fmt: skip
        how = (params, has_biases, num_layers, dropout, train, bidirectional, batch_first)
        return _cudnn(_MODES[name], input, [], hx, None, *how)[:2]

    return layers


def _one_state_packed(name: str) -> Callable[..., Any]:
    def layers(
        data: Any, batch_sizes: Any, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float,
        train: bool, bidirectional: bool,
    ) -> Any:  # fmt: skip
        how = (params, has_biases, num_layers, dropout, train, bidirectional, False)
        return _cudnn(_MODES[name], data, _whole_numbers(batch_sizes), hx, None, *how)[:2]

    return layers


def _lstm_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    """Two products, and one kernel for the gates, which adds the biases too."""
    gates = torch.matmul(input, w_ih.t()), torch.matmul(hx[0], w_hh.t())
    return _aten._thnn_fused_lstm_cell(*gates, hx[1], b_ih, b_hh)[:2]


def _gru_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    gates = torch.matmul(input, w_ih.t()), torch.matmul(hx, w_hh.t())
    return _aten._thnn_fused_gru_cell(*gates, hx, b_ih, b_hh)[0]


def _pack(input: Any, lengths: Any, batch_first: bool) -> Any:
    """Runs of steps that the same sequences have, cut out and joined; lengths fall."""
    longest_first = _whole_numbers(lengths)
    x = input.transpose(0, 1) if batch_first else input
    pieces, sizes, before = [], [], 0
    for count in range(len(longest_first), 0, -1):
        length = longest_first[count - 1]
        if length > before:
            pieces.append(x[before:length, :count].contiguous().view(-1, *x.shape[2:]))
            sizes += (length - before) * [count]
            before = length
    return torch.cat(pieces), torch.tensor(sizes, device="cpu")


def _pad(data: Any, batch_sizes: Any, batch_first: bool, padding_value: float, total_length: int) -> Any:
    """Into a tensor filled with the padding, a copy for each run of steps of as many sequences."""
    sizes = _whole_numbers(batch_sizes)
    steps = total_length if total_length > 0 else len(sizes)
    padded = data.new_full((steps, sizes[0], *data.shape[1:]), padding_value)
    at = start = 0
    for step in range(1, len(sizes) + 1):
        if step == len(sizes) or sizes[step] != sizes[at]:
            rows = (step - at) * sizes[at]
            piece = data[start : start + rows].view(step - at, sizes[at], *data.shape[1:])
            padded[at:step, : sizes[at]].copy_(piece)
            at, start = step, start + rows
    lengths = [sum(size > sequence for size in sizes) for sequence in range(sizes[0])]
    return padded.transpose(0, 1) if batch_first else padded, torch.tensor(lengths, device="cpu")


def _whole_numbers(values: Any) -> list[int]:
    if values.device.type == "meta":
        raise KernelcastError(
            "cannot trace a packed sequence whose lengths depend on the data: give them as a list or a CPU tensor"
        )
    return [int(value) for value in values.tolist()]


INSTEAD: dict[str, Callable[..., Any]] = {
    "lstm.input": _lstm,
    "lstm.data": _lstm_packed,
    **{f"{name}.input": _one_state(name) for name in _MODES if name != "lstm"},
    **{f"{name}.data": _one_state_packed(name) for name in _MODES if name != "lstm"},
    "lstm_cell": _lstm_cell,
    "gru_cell": _gru_cell,
    "_pack_padded_sequence": _pack,
    "_pad_packed_sequence": _pad,
}


def _forward_sizes(
    input: Any, weight: Any, weight_stride0: int, weight_buf: Any, hx: Any, cx: Any, mode: int, hidden_size: int,
    proj_size: int, num_layers: int, batch_first: bool, dropout: float, train: bool, bidirectional: bool,
    batch_sizes: Any, dropout_state: Any,
) -> Any:  # fmt: skip
    """Output, states, what is kept for the backward pass, and the weights, which lie flat in memory already, unless
    they are bf16."""
    directions = 1 + bidirectional
    width = directions * (proj_size or hidden_size)
    output = input.new_empty((*input.shape[:-1], width))
    if batch_first and not batch_sizes:  # cuDNN writes steps first
        output = input.new_empty((input.shape[1], input.shape[0], width)).transpose(0, 1)
    kept = num_layers * directions * _KEPT[mode] * hidden_size + (num_layers - 1) * width  # and layers' outputs
    rows = input.numel() // input.shape[-1]
    flat = sum(one.numel() for one in weight) if input.dtype == torch.bfloat16 else 0
    return (
        output,
        torch.empty_like(hx),
        torch.empty_like(cx) if cx is not None else hx.new_empty(0),
        input.new_empty(rows * kept * input.element_size() if train else 0, dtype=torch.uint8),
        input.new_empty(flat),
    )


def _backward_sizes(
    input: Any, weight: Any, weight_stride0: int, weight_buf: Any, hx: Any, cx: Any, output: Any, grad_output: Any,
    grad_hy: Any, grad_cy: Any, mode: int, hidden_size: int, proj_size: int, num_layers: int, batch_first: bool,
    dropout: float, train: bool, bidirectional: bool, batch_sizes: Any, dropout_state: Any, reserve: Any,
    output_mask: Any,
) -> Any:  # fmt: skip
    """Of input and states, and of the weights as views of one flat buffer."""
    flat = input.new_empty(sum(one.numel() for one in weight))
    parts = flat.split([one.numel() for one in weight])
    return (
        torch.empty_like(input),
        torch.empty_like(hx),
        torch.empty_like(cx) if cx is not None else hx.new_empty(0),
        [part.view(one.shape) for part, one in zip(parts, weight, strict=True)],
    )


def _gru_cell_sizes(
    input_gates: Any, hidden_gates: Any, hx: Any, input_bias: Any = None, hidden_bias: Any = None
) -> Any:
    return torch.empty_like(hx), hx.new_empty((hx.shape[0], 5 * hx.shape[1]))


def _gru_cell_backward_sizes(grad_hy: Any, workspace: Any, has_bias: bool) -> Any:
    """Of both products, the state, and the biases."""
    rows, gates = grad_hy.shape[0], 3 * grad_hy.shape[1]
    both = [grad_hy.new_empty((rows, gates)) for _ in range(2)]
    biases = [grad_hy.new_empty(gates if has_bias else 0) for _ in range(2)]
    return (*both, torch.empty_like(grad_hy), *biases)


# Ops of a GPU alone, which say no sizes of their own.
SIZED: dict[str, Callable[..., Any]] = {
    "_cudnn_rnn": _forward_sizes,
    "_cudnn_rnn_backward": _backward_sizes,
    "_thnn_fused_gru_cell": _gru_cell_sizes,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward_sizes,
}
