"""Ops that PyTorch decomposes without a GPU, as a CUDA GPU runs them: attention, the fast paths of encoder layers, and
recurrent layers. They are registered with the dispatcher in place of the decompositions (``cuda_like``).

Which library has the attention kernel is decided when the GPU is known (aten/attention.py); here is what no GPU does in
one kernel, and what runs before it whichever library it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import layer_norm, linear, scaled_dot_product_attention

from kernelcast.errors import KernelcastError

_aten = torch.ops.aten


def _by_schema(name: str, function: Callable[[SimpleNamespace], Any]) -> Callable[..., Any]:
    """``function`` of the arguments by the names of the op's schema, called as the op is."""
    packet, _, overload = name.partition(".")
    arguments = getattr(getattr(_aten, packet), overload or "default")._schema.arguments
    names = [argument.name for argument in arguments]
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}

    @functools.wraps(function)
    def op(*args: Any, **kwargs: Any) -> Any:
        return function(SimpleNamespace(**{**defaults, **dict(zip(names, args, strict=False)), **kwargs}))

    return op


# ---- scaled_dot_product_attention

_FORMATS = (torch.float32, torch.float16, torch.bfloat16)
BIAS_ALIGNMENT = 8  # elements: where rows of a bias start for the memory-efficient kernel (preprocess_mask)


def _fused_attention(a: SimpleNamespace) -> Any:
    """One kernel, of any library."""
    learned = a.attn_mask is not None and a.attn_mask.requires_grad and torch.is_grad_enabled()
    if not _one_kernel(a.query, a.key, a.value, a.attn_mask, a.enable_gqa, learned):
        return _attention_in_parts(a)
    bias, keep = _added(a.attn_mask, a.query.dtype), torch.is_grad_enabled()
    if learned:  # a bias whose gradient only the memory-efficient kernel computes
        sizes = (*a.query.shape[:3], a.key.shape[2])
        kernel, bias = _aten._scaled_dot_product_efficient_attention, _aligned(bias).expand(sizes)
    else:
        kernel = _aten._scaled_dot_product_cudnn_attention
    return kernel(a.query, a.key, a.value, bias, keep, a.dropout_p, a.is_causal, scale=a.scale)[0]


def _attention_in_parts(a: SimpleNamespace) -> Any:
    """SDPA's math backend: 16 bits to fp32, Q and K scaled, a product, a mask, softmax, dropout, a product."""
    return torch._scaled_dot_product_attention_math(
        a.query, a.key, a.value, _added(a.attn_mask, a.query.dtype), a.dropout_p, a.is_causal, scale=a.scale,
        enable_gqa=a.enable_gqa,
    )[0]  # fmt: skip


fused_attention = _by_schema("scaled_dot_product_attention", _fused_attention)
attention_in_parts = _by_schema("scaled_dot_product_attention", _attention_in_parts)


def _one_kernel(query: Any, key: Any, value: Any, mask: Any, enable_gqa: bool, learned: bool) -> bool:
    """Whether any library takes it (sdp_utils.cpp): four axes, the last without steps (of a mask too: T5's bias, whose
    axes were exchanged, is none), heads that are there and not broadcast; grouped heads in 16 bits, and without a
    learned bias (the memory-efficient kernel has none)."""
    if query.dim() != 4 or query.dtype not in _FORMATS or not query.shape[0] == key.shape[0] == value.shape[0]:
        return False
    if any(x.shape[-1] > 1 and x.stride(-1) != 1 for x in (query, key, value)):
        return False
    if mask is not None and mask.stride(-1) != 1:
        return False
    if key.shape[1] == query.shape[1] == value.shape[1]:
        return True
    return enable_gqa and not learned and query.dtype != torch.float32


def _added(mask: Any, dtype: torch.dtype) -> Any:
    """A boolean mask as numbers that are added to the scores (convert_boolean_attn_mask)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    shown, hidden = (torch.scalar_tensor(x, dtype=dtype, device=mask.device) for x in (0.0, float("-inf")))
    return torch.where(mask, shown, hidden)


def _aligned(bias: Any) -> Any:
    """A copy with longer rows, where they do not start at the multiples that the memory-efficient kernel reads."""
    if bias.stride(-1) == 1 and all(step % BIAS_ALIGNMENT == 0 for step in bias.stride()[:-1]):
        return bias
    keys = bias.shape[-1]
    return torch.nn.functional.pad(bias, (0, BIAS_ALIGNMENT - keys % BIAS_ALIGNMENT))[..., :keys]


# ---- fast paths of nn.MultiheadAttention and nn.TransformerEncoderLayer in inference: the ops that their CUDA kernels
# launch (transformers/cuda/attention.cu, transformers/transformer.cpp)

# PyTorch checks that tensors are on a GPU before it takes them. Not the nested tensors of padded batches: how many
# tokens they leave out is in the data.
FAST_PATH: tuple[tuple[str, Any], ...] = (
    ("torch.utils.backend_registration._privateuse1_backend_name", "meta"),  # of the devices that have the fast path
    ("torch.overrides.has_torch_function", lambda *_: False),  # tracing itself is no override
    ("torch._nested_tensor_from_mask_left_aligned", lambda *_: False),
)


def _multi_head_attention(a: SimpleNamespace) -> tuple[Any, Any]:
    """A product for Q, K and V together, attention on views of it, the projection."""
    joint = linear(a.query, a.qkv_weight, a.qkv_bias).chunk(3, dim=-1)
    q, k, v = (x.unflatten(-1, (a.num_head, -1)).transpose(1, 2) for x in joint)  # [batch, heads, tokens, size]
    if a.mask is None and not a.need_weights:
        y = scaled_dot_product_attention(q, k, v)
        return linear(y.transpose(1, 2).flatten(2), a.proj_weight, a.proj_bias), None
    # a kernel adds the bias, scales and transposes; scores, masked softmax, values
    q, k, v = ((x * 1.0).contiguous() for x in (q, k, v))
    scores = torch.matmul(q, k.transpose(-2, -1))
    if a.mask is not None:  # of queries and keys (0), of padded keys (1), or of all axes
        mask = a.mask[:, None, None, :] if a.mask_type == 1 and a.mask.dim() == 2 else a.mask
        scores = scores.masked_fill(mask.to(torch.bool), 0.0)
    weights = torch.softmax(scores, dim=-1)
    out = linear(torch.matmul(weights, v).transpose(1, 2).flatten(2), a.proj_weight, a.proj_bias)
    return out, (weights.mean(1) if a.average_attn_weights else weights) if a.need_weights else None


def _encoder_layer(a: SimpleNamespace) -> Any:
    """Attention and two products, of which the first has the activation in it."""

    def norm(x: Any, weight: Any, bias: Any) -> Any:
        return layer_norm(x, (a.embed_dim,), weight, bias, a.eps)

    def attend(x: Any) -> Any:
        given = {**vars(a), "query": x, "num_head": a.num_heads, "need_weights": False, "average_attn_weights": True}
        return _multi_head_attention(SimpleNamespace(**given))[0]

    def feed_forward(x: Any) -> Any:
        inner = torch._addmm_activation(a.ffn_bias_1, x.flatten(0, -2), a.ffn_weight_1.t(), use_gelu=a.use_gelu)
        return linear(inner, a.ffn_weight_2, a.ffn_bias_2).view(x.shape)

    first, second = (a.norm_weight_1, a.norm_bias_1), (a.norm_weight_2, a.norm_bias_2)
    if a.norm_first:
        x = a.src + attend(norm(a.src, *first))
        return x + feed_forward(norm(x, *second))
    x = norm(a.src + attend(a.src), *first)
    return norm(x + feed_forward(x), *second)


# ---- recurrent layers: cuDNN's, one op for all layers and steps, forward and backward; fused cells. Without a GPU
# PyTorch loops over the steps with products and gates, hundreds of ops for one.

_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # cudnnRNNMode_t
# Numbers saved for the backward pass, for each step, sequence, chain and feature of the state: gates and cell, or gates
# and what the reset gate is multiplied with (sizes that cuDNN 9.19 requested).
_SAVED = {0: 1, 1: 1, 2: 5, 3: 6}


def _cudnn_layers(name: str, packed: bool) -> Callable[[SimpleNamespace], Any]:
    """Results of LSTM, GRU or RNN: (output, last state, last cell of an LSTM)."""

    def layers(a: SimpleNamespace) -> Any:
        state, cell = a.hx if name == "lstm" else (a.hx, None)
        hidden, out = int((cell if cell is not None else state).shape[-1]), int(state.shape[-1])
        projection = 0 if out == hidden else out
        stride = (4 if a.has_biases else 2) + (projection > 0)
        x, batch_sizes, batch_first = a.data if packed else a.input, [], False
        if packed:
            batch_sizes = _as_list(a.batch_sizes)
        else:
            batch_first = a.batch_first
        results = _aten._cudnn_rnn(
            x, list(a.params), stride, None, state.contiguous(), None if cell is None else cell.contiguous(),
            _MODES[name], hidden, projection, a.num_layers, batch_first, a.dropout if a.train else 0.0, a.train,
            a.bidirectional, batch_sizes, None,
        )  # fmt: skip
        return results[: 2 if cell is None else 3]

    return layers


def _lstm_cell(a: SimpleNamespace) -> Any:
    """Two products, and one kernel for the gates, which adds the biases too."""
    gates = torch.matmul(a.input, a.w_ih.t()), torch.matmul(a.hx[0], a.w_hh.t())
    return _aten._thnn_fused_lstm_cell(*gates, a.hx[1], a.b_ih, a.b_hh)[:2]


def _gru_cell(a: SimpleNamespace) -> Any:
    gates = torch.matmul(a.input, a.w_ih.t()), torch.matmul(a.hx, a.w_hh.t())
    return _aten._thnn_fused_gru_cell(*gates, a.hx, a.b_ih, a.b_hh)[0]


def _pack(a: SimpleNamespace) -> Any:
    """Pack a batch: slices of steps with the same sequences, concatenated; lengths decrease."""
    longest_first = _as_list(a.lengths)
    x = a.input.transpose(0, 1) if a.batch_first else a.input
    pieces, sizes, before = [], [], 0
    for count in range(len(longest_first), 0, -1):
        length = longest_first[count - 1]
        if length > before:
            pieces.append(x[before:length, :count].contiguous().view(-1, *x.shape[2:]))
            sizes += (length - before) * [count]
            before = length
    return torch.cat(pieces), torch.tensor(sizes, device="cpu")


def _pad(a: SimpleNamespace) -> Any:
    """Pad a packed batch: copy each run of steps with the same number of sequences into a tensor filled with the
    padding."""
    sizes, features = _as_list(a.batch_sizes), a.data.shape[1:]
    steps = a.total_length if a.total_length > 0 else len(sizes)
    padded = a.data.new_full((steps, sizes[0], *features), a.padding_value)
    at = start = 0
    for step in range(1, len(sizes) + 1):
        if step == len(sizes) or sizes[step] != sizes[at]:
            rows = (step - at) * sizes[at]
            padded[at:step, : sizes[at]].copy_(a.data[start : start + rows].view(step - at, sizes[at], *features))
            at, start = step, start + rows
    lengths = [sum(size > sequence for size in sizes) for sequence in range(sizes[0])]
    return padded.transpose(0, 1) if a.batch_first else padded, torch.tensor(lengths, device="cpu")


def _as_list(values: Any) -> list[int]:
    if values.device.type == "meta":
        raise KernelcastError(
            "cannot trace a packed sequence whose lengths depend on the data: give them as a list or a CPU tensor"
        )
    return [int(value) for value in values.tolist()]


CUDA_OPS: dict[str, Callable[..., Any]] = {
    name: _by_schema(name, function)
    for name, function in {
        "_native_multi_head_attention": _multi_head_attention,
        "_transformer_encoder_layer_fwd": _encoder_layer,
        **{f"{name}.input": _cudnn_layers(name, packed=False) for name in _MODES},
        **{f"{name}.data": _cudnn_layers(name, packed=True) for name in _MODES},
        "lstm_cell": _lstm_cell,
        "gru_cell": _gru_cell,
        "_pack_padded_sequence": _pack,
        "_pad_packed_sequence": _pad,
    }.items()
}


# ---- shapes of the outputs of ops that exist on a GPU alone


def _rnn_outputs(a: SimpleNamespace) -> Any:
    """Output, states, what is saved for the backward pass, and the weights, which are flat in memory already, unless
    they are bf16."""
    directions = 1 + a.bidirectional
    width = directions * (a.proj_size or a.hidden_size)
    output = a.input.new_empty((*a.input.shape[:-1], width))
    if a.batch_first and not a.batch_sizes:  # cuDNN writes steps first
        output = a.input.new_empty((a.input.shape[1], a.input.shape[0], width)).transpose(0, 1)
    # and the outputs of layers
    saved = a.num_layers * directions * _SAVED[a.mode] * a.hidden_size + (a.num_layers - 1) * width
    rows = a.input.numel() // a.input.shape[-1]
    flat = sum(x.numel() for x in a.weight) if a.input.dtype == torch.bfloat16 else 0
    reserve = a.input.new_empty(rows * saved * a.input.element_size() if a.train else 0, dtype=torch.uint8)
    return output, *_state_shapes(a), reserve, a.input.new_empty(flat)


def _rnn_gradients(a: SimpleNamespace) -> Any:
    """Gradients of input and states, and of the weights as views of one flat buffer."""
    flat = a.input.new_empty(sum(x.numel() for x in a.weight))
    parts = flat.split([x.numel() for x in a.weight])
    weights = [part.view(x.shape) for part, x in zip(parts, a.weight, strict=True)]
    return torch.empty_like(a.input), *_state_shapes(a), weights


def _state_shapes(a: SimpleNamespace) -> tuple[Any, Any]:
    return torch.empty_like(a.hx), torch.empty_like(a.cx) if a.cx is not None else a.hx.new_empty(0)


def _gru_cell_gradients(a: SimpleNamespace) -> Any:
    """Gradients of both products, the state, and the biases."""
    rows, gates = a.grad_hy.shape[0], 3 * a.grad_hy.shape[1]
    both = [a.grad_hy.new_empty((rows, gates)) for _ in range(2)]
    biases = [a.grad_hy.new_empty(gates if a.has_bias else 0) for _ in range(2)]
    return (*both, torch.empty_like(a.grad_hy), *biases)


def _ctc_outputs(a: SimpleNamespace) -> Any:
    """The loss of each sequence, and a number for each step and state: labels with blanks between."""
    steps, batch = a.log_probs.shape[:2]
    labels = int(a.targets.shape[1]) if a.targets.dim() == 2 else -(-int(a.targets.shape[0]) // int(batch))
    return a.log_probs.new_empty(batch), a.log_probs.new_empty((batch, steps, 2 * labels + 1))


META_KERNELS: dict[str, Callable[..., Any]] = {
    name: _by_schema(name, function)
    for name, function in {
        "_cudnn_rnn": _rnn_outputs,
        "_cudnn_rnn_backward": _rnn_gradients,
        **dict.fromkeys(("_ctc_loss", "_ctc_loss.Tensor"), _ctc_outputs),
        **dict.fromkeys(("_ctc_loss_backward", "_ctc_loss_backward.Tensor"), lambda a: torch.empty_like(a.log_probs)),
        "_thnn_fused_gru_cell": lambda a: (torch.empty_like(a.hx), a.hx.new_empty((a.hx.shape[0], 5 * a.hx.shape[1]))),
        "_thnn_fused_gru_cell_backward": _gru_cell_gradients,
    }.items()
}
