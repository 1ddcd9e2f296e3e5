"""Attention through PyTorch's scaled_dot_product_attention: FlashAttention 2 and cuDNN, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernelcast.measure.pool import Pool, specs
from kernelcast.measure.runners import NotMeasurableError, Prepared, Runner

_BACKENDS = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def _shapes(call: Any) -> tuple[tuple[int, ...], ...]:
    kv_heads = call.kv_heads or call.q_heads
    queries = (call.batch, call.q_len, call.q_heads, call.head_dim)
    keys = (call.batch, call.kv_len, kv_heads, call.head_dim)
    return queries, keys, keys


def _backend(call: Any) -> SDPBackend:
    if call.backend not in _BACKENDS:
        raise NotMeasurableError(f"PyTorch has no attention backend {call.backend}; it has {', '.join(_BACKENDS)}")
    return _BACKENDS[call.backend]


def attention(call: Any, pool: Pool) -> Prepared:
    backend, shared = _backend(call), (call.kv_heads or call.q_heads) != call.q_heads

    def launch(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
        # [batch, length, heads, size] in memory, as a projection leaves them
        args = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

        def run() -> object:
            with sdpa_kernel(backend), torch.no_grad():
                return scaled_dot_product_attention(*args, is_causal=call.causal, enable_gqa=shared)

        return run

    return Prepared([launch(*tensors) for tensors in pool.sets(*specs(call.dtype, *_shapes(call)))],
                    f"sdpa_{call.backend}")  # fmt: skip


def attention_backward(call: Any, pool: Pool) -> Prepared:
    """One gradient of attention, through autograd, with the forward's results kept."""
    backend, shared = _backend(call), (call.kv_heads or call.q_heads) != call.q_heads
    shapes = _shapes(call)

    def launch(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Callable[[], object]:
        leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
        queries, keys, values = leaves
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(queries, keys, values, is_causal=call.causal, enable_gqa=shared)
        gradient = grad.transpose(1, 2)
        return lambda: torch.autograd.grad(out, leaves, gradient, retain_graph=True)

    sets = pool.sets(*specs(call.dtype, *shapes, shapes[0]))[:16]  # each keeps its forward's results
    return Prepared([launch(*tensors) for tensors in sets], f"sdpa_{call.backend}")


RUNNERS: Mapping[str, Runner] = {"attention": attention, "attention_backward": attention_backward}
