"""Tensor cores through PyTorch: matrix products by cuBLAS (cuBLASLt for fp8), attention by FlashAttention 2 and
cuDNN."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernelcast.collect.pool import Spec, specs
from kernelcast.collect.runners import Launch, NotMeasurableError, Recipe, Runner

_BACKENDS = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def _precision(dtype: str) -> None:
    """Whether fp32 may be multiplied as tf32."""
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"


def gemm(call: Any) -> Recipe:
    """A [m, k] and B [k, n] are views of memory in the call's layout."""
    _precision(call.dtype)
    if call.dtype == "fp8":
        return _fp8(call)
    layout = call.layout or "tn"
    a_shape = (call.k, call.m) if layout == "nt" else (call.m, call.k)
    b_shape = (call.n, call.k) if layout == "tn" else (call.k, call.n)

    def launch(a: Tensor, b: Tensor, c: Tensor) -> Launch:
        return partial(torch.mm, a.t() if layout == "nt" else a, b.t() if layout == "tn" else b, out=c)

    product = specs(call.dtype, (call.m, call.n), use="written")
    return Recipe((*specs(call.dtype, a_shape, b_shape), *product), launch, "cublas")


def _fp8(call: Any) -> Recipe:
    one = torch.ones((), device="cuda")

    def launch(a: Tensor, b: Tensor) -> Launch:
        return partial(torch._scaled_mm, a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return Recipe(specs("fp8", (call.m, call.k), (call.n, call.k)), launch, "cublaslt")


def bmm(call: Any) -> Recipe:
    _precision(call.dtype)
    factors = specs(call.dtype, (call.batch, call.m, call.k), (call.batch, call.k, call.n))
    product = specs(call.dtype, (call.batch, call.m, call.n), use="written")
    return Recipe((*factors, *product), lambda a, b, c: partial(torch.bmm, a, b, out=c), "cublas")


def _queries_keys_values(call: Any) -> tuple[Spec, ...]:
    """[batch, length, heads, size] in memory, as a projection leaves them."""
    if call.backend not in _BACKENDS:
        raise NotMeasurableError(f"PyTorch has no attention backend {call.backend}; it has {', '.join(_BACKENDS)}")
    keys = (call.batch, call.kv_len, call.kv_heads or call.q_heads, call.head_dim)
    return specs(call.dtype, (call.batch, call.q_len, call.q_heads, call.head_dim), keys, keys)


def _attend(call: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shared = (call.kv_heads or call.q_heads) != call.q_heads
    with sdpa_kernel(_BACKENDS[call.backend]):
        return scaled_dot_product_attention(q, k, v, is_causal=call.causal, enable_gqa=shared)


def attention(call: Any) -> Recipe:
    def launch(*tensors: Tensor) -> Launch:
        return partial(torch.no_grad()(_attend), call, *(x.transpose(1, 2) for x in tensors))

    return Recipe(_queries_keys_values(call), launch, f"sdpa_{call.backend}")


def attention_backward(call: Any) -> Recipe:
    """One gradient of attention, through autograd, with the forward's results kept."""

    def launch(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> Launch:
        leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
        out = _attend(call, *leaves)
        return partial(torch.autograd.grad, out, leaves, gradient.transpose(1, 2), retain_graph=True)

    inputs = _queries_keys_values(call)
    return Recipe((*inputs, inputs[0]), launch, f"sdpa_{call.backend}", most_sets=16)


RUNNERS: Mapping[str, Runner] = {
    "gemm": gemm,
    "bmm": bmm,
    "attention": attention,
    "attention_backward": attention_backward,
}
