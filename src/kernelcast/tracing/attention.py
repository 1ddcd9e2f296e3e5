"""scaled_dot_product_attention as PyTorch takes it on a CUDA GPU: one kernel, or its math in parts.

Which library has the kernel is decided when the GPU is known (networks/aten/attention.py); here is what no GPU does in
one kernel, and what runs before it whichever library it is.
"""

from __future__ import annotations

from typing import Any

import torch

_aten = torch.ops.aten
_FORMATS = (torch.float32, torch.float16, torch.bfloat16)
BIAS_ALIGNMENT = 8  # elements: where rows of a bias start for the memory-efficient kernel (preprocess_mask)


def fused_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """One kernel, whichever library has it on the GPU that is asked about."""
    learned = attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled()
    if not _one_kernel(query, key, value, attn_mask, enable_gqa, learned):
        return attention_in_parts(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    bias, keep = _added(attn_mask, query.dtype), torch.is_grad_enabled()
    if learned:  # a bias whose gradient only the memory-efficient kernel gives
        sizes = (*query.shape[:3], key.shape[2])
        kernel, bias = _aten._scaled_dot_product_efficient_attention, _aligned(bias).expand(sizes)
    else:
        kernel = _aten._scaled_dot_product_cudnn_attention
    return kernel(query, key, value, bias, keep, dropout_p, is_causal, scale=scale)[0]


def attention_in_parts(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """SDPA's last resort: 16 bits to fp32, Q and K scaled, a product, a mask, softmax, dropout, a product."""
    bias = _added(attn_mask, query.dtype)
    return torch._scaled_dot_product_attention_math(
        query, key, value, bias, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


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
    """A mask of bits as numbers that are added to the scores (convert_boolean_attn_mask)."""
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
