"""The fast paths of nn.MultiheadAttention and nn.TransformerEncoderLayer in inference, as their CUDA kernels run.

PyTorch asks whether tensors lie on a GPU before it takes them; here it is told so (``FAST_PATH``), and the two ops that
it then calls are made of those that they launch (transformers/cuda/attention.cu, transformers/transformer.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import layer_norm, linear, scaled_dot_product_attention

# Not the nested tensors of padded batches: how many tokens they leave out is in the data.
FAST_PATH: tuple[tuple[str, Any], ...] = (
    ("torch.utils.backend_registration._privateuse1_backend_name", "meta"),  # of the devices that have the fast path
    ("torch.overrides.has_torch_function", lambda *_: False),  # tracing itself is no override
    ("torch._nested_tensor_from_mask_left_aligned", lambda *_: False),
)


def _heads(x: Any, count: int) -> Any:
    """[batch, tokens, width] as [batch, heads, tokens, size], without a copy."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def multi_head_attention(
    query: Any, key: Any, value: Any, embed_dim: int, num_head: int, qkv_weight: Any, qkv_bias: Any, proj_weight: Any,
    proj_bias: Any, mask: Any = None, need_weights: bool = True, average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """A product for Q, K and V together, attention on views of it, the projection."""
    q, k, v = (_heads(x, num_head) for x in linear(query, qkv_weight, qkv_bias).chunk(3, dim=-1))
    if mask is None and not need_weights:
        y = scaled_dot_product_attention(q, k, v)
        return linear(y.transpose(1, 2).flatten(2), proj_weight, proj_bias), None
    # a pass adds the bias, scales and lays out; scores, masked softmax, values
    q, k, v = ((x * 1.0).contiguous() for x in (q, k, v))
    scores = torch.matmul(q, k.transpose(-2, -1))
    weights = torch.softmax(scores if mask is None else scores.masked_fill(_broadcast(mask, mask_type), 0.0), dim=-1)
    out = linear(torch.matmul(weights, v).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    return out, (weights.mean(1) if average_attn_weights else weights) if need_weights else None


def _broadcast(mask: Any, kind: int | None) -> Any:
    """Of queries and keys (0), of padded keys (1), or of all axes."""
    if kind == 1 and mask.dim() == 2:
        mask = mask[:, None, None, :]
    return mask.to(torch.bool)


def encoder_layer(
    src: Any, embed_dim: int, num_heads: int, qkv_weight: Any, qkv_bias: Any, proj_weight: Any, proj_bias: Any,
    use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Any, norm_bias_1: Any, norm_weight_2: Any,
    norm_bias_2: Any, ffn_weight_1: Any, ffn_bias_1: Any, ffn_weight_2: Any, ffn_bias_2: Any, mask: Any = None,
    mask_type: int | None = None,
) -> Any:  # fmt: skip
    """Attention and two products, of which the first has the activation in it."""

    def normed(x: Any, weight: Any, bias: Any) -> Any:
        return layer_norm(x, (embed_dim,), weight, bias, eps)

    def attended(x: Any) -> Any:
        return multi_head_attention(
            x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, True, mask_type
        )[0]

    def fed_forward(x: Any) -> Any:
        inner = torch._addmm_activation(ffn_bias_1, x.flatten(0, -2), ffn_weight_1.t(), use_gelu=use_gelu)
        return linear(inner, ffn_weight_2, ffn_bias_2).view(x.shape)

    if norm_first:
        x = src + attended(normed(src, norm_weight_1, norm_bias_1))
        return x + fed_forward(normed(x, norm_weight_2, norm_bias_2))
    x = normed(src + attended(src), norm_weight_1, norm_bias_1)
    return normed(x + fed_forward(x), norm_weight_2, norm_bias_2)


ENCODER: dict[str, Callable[..., Any]] = {
    "_native_multi_head_attention": multi_head_attention,
    "_transformer_encoder_layer_fwd": encoder_layer,
}
