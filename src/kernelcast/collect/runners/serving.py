"""FlashInfer's kernels: attention, RMS norm, SiLU-and-multiply, rotary embedding, sampling."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from kernelcast.collect.pool import DTYPES, specs
from kernelcast.collect.runners import Launch, Recipe, Runner, flashinfer_attention
from kernelcast.collect.runners.flashinfer_attention import flashinfer

_SPREAD = 6.0  # of logits: a few tokens then have most of the mass, as in a language model's
_TOP_K, _TOP_P = 50, 0.9


def rmsnorm(call: Any) -> Recipe:
    norm = flashinfer().norm
    weight = torch.ones(call.cols, dtype=DTYPES[call.dtype], device="cuda")
    shape = (call.rows, call.cols)
    if call.residual:
        both = specs(call.dtype, shape, shape, use="changed")
        return Recipe(both, lambda x, r: partial(norm.fused_add_rmsnorm, x, r, weight), "flashinfer")
    tensors = (*specs(call.dtype, shape), *specs(call.dtype, shape, use="written"))
    return Recipe(tensors, lambda x, y: partial(norm.rmsnorm, x, weight, out=y), "flashinfer")


def silu_mul(call: Any) -> Recipe:
    activation = flashinfer().activation
    result = specs(call.dtype, (call.rows, call.cols), use="written")
    tensors = (*specs(call.dtype, (call.rows, 2 * call.cols)), *result)
    return Recipe(tensors, lambda x, y: partial(activation.silu_and_mul, x, out=y), "flashinfer")


def rope(call: Any) -> Recipe:
    apply = flashinfer().rope.apply_rope_pos_ids_inplace
    positions = torch.arange(call.tokens, dtype=torch.int32, device="cuda")
    shapes = [(call.tokens, heads, call.head_dim) for heads in (call.q_heads, call.kv_heads)]
    tensors = specs(call.dtype, *shapes, use="changed")
    return Recipe(tensors, lambda q, k: partial(apply, q, k, positions), "flashinfer")


@cache
def _sampling() -> Any:
    """FlashInfer's sampling, with seeds from a counter: a generator of PyTorch's may not be asked inside of a graph."""
    sampling, offset = flashinfer().sampling, count(0, 4096)
    sampling.get_seed_and_offset = lambda increment, generator=None: (0, next(offset))
    return sampling


def top_k_top_p_sampling(call: Any) -> Recipe:
    sampling = _sampling()
    top_k, top_p = {"top_k": _TOP_K}, {"top_p": _TOP_P}
    run = {
        "both": partial(sampling.top_k_top_p_sampling_from_probs, **top_k, **top_p, filter_apply_order="joint"),
        "top_k": partial(sampling.top_k_sampling_from_probs, **top_k),
        "top_p": partial(sampling.top_p_sampling_from_probs, **top_p),
    }[call.keep]

    def launch(x: Tensor) -> Launch:
        x.copy_(torch.softmax(x * _SPREAD, dim=-1))
        return partial(run, x)

    return Recipe(specs(call.dtype, (call.rows, call.cols), use="changed"), launch, "flashinfer")


RUNNERS: Mapping[str, Runner] = {
    **flashinfer_attention.RUNNERS,
    "rmsnorm": rmsnorm,
    "silu_mul": silu_mul,
    "rope": rope,
    "top_k_top_p_sampling": top_k_top_p_sampling,
}
