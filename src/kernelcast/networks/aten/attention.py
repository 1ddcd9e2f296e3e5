"""Scaled dot-product attention, forward and backward, by the library that PyTorch takes on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

from kernelcast.calls import Launch
from kernelcast.networks.aten.table import Settings, launch, matrix_format, pointwise, rule
from kernelcast.networks.traced import Op, Tensor


def _backend(query: Tensor, settings: Settings) -> str:
    """PyTorch's order (sdp_utils.cpp): cuDNN on Hopper and data-centre Blackwell, FlashAttention 2, and its own
    memory-efficient kernel, which alone takes fp32; that is near FlashAttention 2 in how it works."""
    if query.dtype == "fp32":
        return "fa2"
    return "cudnn" if settings.capability.startswith(("9.", "10.")) else "fa2"


def _attention(kernel: str, query: Tensor, key: Tensor, causal: bool, settings: Settings) -> Launch:
    batch, heads, length, size = query.shape
    dtype = matrix_format(query, settings)
    return launch("attention", kernel, batch=batch, q_heads=heads, kv_heads=key.shape[1], q_len=length,
                  kv_len=key.shape[2], head_dim=size, causal=causal, backend=_backend(query, settings),
                  dtype="fp32" if dtype == "tf32" else dtype)  # fmt: skip


# where is_causal is among the arguments
_CAUSAL_AT = {
    "_scaled_dot_product_cudnn_attention": 6,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_fused_attention_overrideable": 5,
}


@rule(*_CAUSAL_AT)
def _forward(op: Op, settings: Settings) -> Iterator[Launch]:
    query, key = op.arguments[:2]
    causal = any(argument is True for argument in op.arguments[4:])
    causal = causal and bool(op.argument(_CAUSAL_AT[op.name], "is_causal", False)) and query.shape[2] > 1
    yield _attention("attention", query, key, causal, settings)
    mask = op.argument(3, "attn_bias")
    if isinstance(mask, Tensor):  # it is read tile by tile
        yield pointwise("attention", mask.distinct, "bf16", read_bytes=mask.bytes, written_bytes=0.0)


@rule(
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_fused_attention_overrideable_backward",
)
def _backward(op: Op, settings: Settings) -> Iterator[Launch]:
    """grad_out, query, key, ...; gradients of each."""
    query, key = op.arguments[1:3]
    causal = any(argument is True for argument in (*op.arguments[4:], *op.options.values()))
    yield _attention("attention_backward", query, key, causal, settings)
