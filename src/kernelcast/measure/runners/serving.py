"""FlashInfer's kernels: ragged prefill (FA2 and FA3), paged decode, RMS norm, SiLU-and-multiply, rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from kernelcast.measure.pool import DTYPES, specs
from kernelcast.measure.runners import NotMeasurableError, Recipe, Runner

_WORKSPACE_BYTES = 512 * 2**20


@cache
def _flashinfer() -> Any:
    try:
        import flashinfer
    except ImportError:
        raise NotMeasurableError("flashinfer is not installed") from None
    return flashinfer


@cache
def _workspace() -> Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


@cache
def _prefill(backend: str) -> Any:
    return _flashinfer().BatchPrefillWithRaggedKVCacheWrapper(_workspace(), "NHD", backend=backend)


@cache
def _decode() -> Any:
    return _flashinfer().BatchDecodeWithPagedKVCacheWrapper(_workspace(), "NHD", use_tensor_cores=True)


def _starts(count: int, length: int) -> Tensor:
    return torch.arange(count + 1, dtype=torch.int32, device="cuda") * length


def attention(call: Any) -> Recipe:
    return _paged(call) if call.page_size else _ragged(call)


def _ragged(call: Any) -> Recipe:
    name = {"fa3": "fa3", "flashinfer": "fa2"}[call.backend]
    wrapper = _prefill(name)
    kv_heads = call.kv_heads or call.q_heads
    wrapper.plan(
        _starts(call.batch, call.q_len), _starts(call.batch, call.kv_len), call.q_heads, kv_heads, call.head_dim,
        causal=call.causal, q_data_type=DTYPES[call.dtype],
    )  # fmt: skip
    queries = (call.batch * call.q_len, call.q_heads, call.head_dim)
    keys = (call.batch * call.kv_len, kv_heads, call.head_dim)
    tensors = (*specs(call.dtype, queries, keys, keys), *specs(call.dtype, queries, use="written"))
    return Recipe(tensors, lambda q, k, v, out: partial(wrapper.run, q, k, v, out=out), f"flashinfer_{name}")


def _paged(call: Any) -> Recipe:
    wrapper = _decode()
    kv_heads = call.kv_heads or call.q_heads
    pages = -(-call.kv_len // call.page_size)
    last = call.kv_len - (pages - 1) * call.page_size
    order = torch.randperm(call.batch * pages, device="cuda").to(torch.int32)  # pages lie anywhere
    wrapper.plan(
        _starts(call.batch, pages), order, torch.full((call.batch,), last, dtype=torch.int32, device="cuda"),
        call.q_heads, kv_heads, call.head_dim, call.page_size, q_data_type=DTYPES[call.dtype],
        kv_data_type=DTYPES[call.dtype],
    )  # fmt: skip
    cache_shape = (call.batch * pages, 2, call.page_size, kv_heads, call.head_dim)
    queries = (call.batch, call.q_heads, call.head_dim)
    tensors = (*specs(call.dtype, queries, cache_shape), *specs(call.dtype, queries, use="written"))
    return Recipe(tensors, lambda q, kv, out: partial(wrapper.run, q, kv, out=out), "flashinfer_decode")


def rmsnorm(call: Any) -> Recipe:
    norm = _flashinfer().norm
    weight = torch.ones(call.cols, dtype=DTYPES[call.dtype], device="cuda")
    shape = (call.rows, call.cols)
    if call.residual:
        both = specs(call.dtype, shape, shape, use="changed")
        return Recipe(both, lambda x, r: partial(norm.fused_add_rmsnorm, x, r, weight), "flashinfer")
    tensors = (*specs(call.dtype, shape), *specs(call.dtype, shape, use="written"))
    return Recipe(tensors, lambda x, y: partial(norm.rmsnorm, x, weight, out=y), "flashinfer")


def silu_mul(call: Any) -> Recipe:
    activation = _flashinfer().activation
    result = specs(call.dtype, (call.rows, call.cols), use="written")
    tensors = (*specs(call.dtype, (call.rows, 2 * call.cols)), *result)
    return Recipe(tensors, lambda x, y: partial(activation.silu_and_mul, x, out=y), "flashinfer")


def rope(call: Any) -> Recipe:
    apply = _flashinfer().rope.apply_rope_pos_ids_inplace
    positions = torch.arange(call.tokens, dtype=torch.int32, device="cuda")
    shapes = [(call.tokens, heads, call.head_dim) for heads in (call.q_heads, call.kv_heads)]
    tensors = specs(call.dtype, *shapes, use="changed")
    return Recipe(tensors, lambda q, k: partial(apply, q, k, positions), "flashinfer")


RUNNERS: Mapping[str, Runner] = {"attention": attention, "rmsnorm": rmsnorm, "silu_mul": silu_mul, "rope": rope}
