"""Scaled dot-product attention, forward and backward, by the library that PyTorch takes on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

from kernelcast.calls import Launch
from kernelcast.networks.aten.table import Settings, launch, matrix_format, pointwise, rule
from kernelcast.networks.traced import Op, Tensor


def backend(query: Tensor, masked: bool, settings: Settings) -> str:
    """PyTorch's order (sdp_utils.cpp): cuDNN on Hopper and data-centre Blackwell, FlashAttention 2, and its own
    memory-efficient kernel, which alone takes fp32; that is near FlashAttention 2 in how it works."""
    if query.dtype == "fp32":
        return "fa2"
    return "cudnn" if settings.capability.startswith(("9.", "10.")) else "fa2"


def _sizes(query: Tensor, key: Tensor) -> dict[str, int]:
    batch, heads, length, size = query.shape
    return {"batch": batch, "q_heads": heads, "kv_heads": key.shape[1], "q_len": length, "kv_len": key.shape[2],
            "head_dim": size}  # fmt: skip


@rule(
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
def _forward(op: Op, settings: Settings) -> Iterator[Launch]:
    query, key = op.arguments[:2]
    causal = any(argument is True for argument in op.arguments[4:]) and _causal(op)
    masked = isinstance(op.argument(3, "attn_bias"), Tensor)
    yield launch("attention", "attention", settings, **_sizes(query, key), causal=causal and query.shape[2] > 1,
               backend=backend(query, masked, settings), dtype=_format(query, settings))  # fmt: skip
    if masked:  # the mask is read tile by tile
        mask = op.argument(3, "attn_bias")
        yield pointwise("attention", settings, mask.distinct, "bf16", read_bytes=mask.bytes, written_bytes=0.0)


def _causal(op: Op) -> bool:
    """The place of is_causal differs by op."""
    place = {
        "_scaled_dot_product_cudnn_attention": 6,
        "_scaled_dot_product_efficient_attention": 6,
        "_scaled_dot_product_flash_attention": 4,
        "_scaled_dot_product_flash_attention_for_cpu": 4,
        "_scaled_dot_product_fused_attention_overrideable": 5,
    }[op.name]
    return bool(op.argument(place, "is_causal", False))


def _format(query: Tensor, settings: Settings) -> str:
    found = matrix_format(query, settings)
    return "fp32" if found == "tf32" else found


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
    yield launch("attention", "attention_backward", settings, **_sizes(query, key), causal=causal,
               backend=backend(query, False, settings), dtype=_format(query, settings))  # fmt: skip
