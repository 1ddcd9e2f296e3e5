"""FlashInfer's attention: ragged prefill, paged prefill of mixed batches, paged decode, and latent attention (MLA).

One plan serves all sets of tensors of a call: the lengths are the same, and so is where the pages lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, count
from typing import Any

import torch
from torch import Tensor

from kernelcast.collect.pool import DTYPES, TensorSpec, specs
from kernelcast.collect.runners import Launch, NotMeasurableError, Recipe, Runner

_WORKSPACE_BYTES = 512 * 2**20
_CALLED = {"fa3": "fa3", "flashinfer": "fa2"}  # our name of a backend: FlashInfer's


@cache
def flashinfer() -> Any:
    try:
        import flashinfer
    except ImportError:
        raise NotMeasurableError("flashinfer is not installed") from None
    return flashinfer


@cache
def _workspace() -> Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


@cache
def _wrapper(name: str, *more: Any, **other: Any) -> Any:
    return getattr(flashinfer(), name)(_workspace(), *more, **other)


@dataclass(frozen=True)
class PagedBatch:
    """The requests of a call: new tokens and tokens attended to, and the pages that hold these."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    page_size: int

    @classmethod
    def of(cls, call: Any) -> PagedBatch:
        if call.q_lens is not None:
            return cls(tuple(call.q_lens), tuple(call.kv_lens), call.page_size or 0)
        return cls((call.q_len,) * call.batch, (call.kv_len,) * call.batch, call.page_size or 0)

    @property
    def decodes(self) -> bool:
        return max(self.queries) == 1

    @property
    def pages(self) -> tuple[int, ...]:
        """Pages of each request; the last may be partly full."""
        return tuple(-(-keys // self.page_size) for keys in self.keys)

    @property
    def last_page(self) -> tuple[int, ...]:
        """Tokens in the last page of each request."""
        return tuple(keys - (n - 1) * self.page_size for keys, n in zip(self.keys, self.pages, strict=True))


def starts(lengths: Sequence[int]) -> list[int]:
    """Where each begins when they lie end to end, and where the last ends."""
    return list(accumulate(lengths, initial=0))


def _integers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def _anywhere(pages: int) -> Tensor:
    """Page numbers: those of one request lie anywhere, as after hours of serving."""
    return torch.randperm(pages, device="cuda").to(torch.int32)


def attention(call: Any) -> Recipe:
    batch = PagedBatch.of(call)
    if not batch.page_size:
        heads = call.kv_heads or call.q_heads
        return _ragged(call, batch, heads, call.head_dim, call.head_dim)
    return _decode(call, batch) if batch.decodes and call.backend == "flashinfer" else _paged(call, batch)


def _ragged(call: Any, batch: PagedBatch, kv_heads: int, qk_dim: int, v_dim: int) -> Recipe:
    """Prefill over keys and values that lie end to end."""
    name = _CALLED[call.backend]
    wrapper = _wrapper("BatchPrefillWithRaggedKVCacheWrapper", "NHD", backend=name)
    wrapper.plan(
        _integers(starts(batch.queries)), _integers(starts(batch.keys)), call.q_heads, kv_heads, qk_dim,
        head_dim_vo=v_dim, causal=call.causal, q_data_type=DTYPES[call.dtype],
    )  # fmt: skip
    new, keys = sum(batch.queries), sum(batch.keys)
    read = specs(call.dtype, (new, call.q_heads, qk_dim), (keys, kv_heads, qk_dim), (keys, kv_heads, v_dim))
    written = specs(call.dtype, (new, call.q_heads, v_dim), use="written")
    return Recipe((*read, *written), lambda q, k, v, out: partial(wrapper.run, q, k, v, out=out), f"flashinfer_{name}")


def _paged_tensors(call: Any, batch: PagedBatch) -> tuple[TensorSpec, ...]:
    """Queries, the cache of all pages, and results."""
    kv_heads, queries = call.kv_heads or call.q_heads, (sum(batch.queries), call.q_heads, call.head_dim)
    cached = (sum(batch.pages), 2, batch.page_size, kv_heads, call.head_dim)
    return (
        *specs(call.dtype, queries),
        *specs(call.kv_dtype or call.dtype, cached),
        *specs(call.dtype, queries, use="written"),
    )


def _paged(call: Any, batch: PagedBatch) -> Recipe:
    """Prefill over a paged cache: chunks of prompts, with or without a past, beside requests that decode."""
    name = _CALLED[call.backend]
    wrapper = _wrapper("BatchPrefillWithPagedKVCacheWrapper", "NHD", backend=name)
    wrapper.plan(
        _integers(starts(batch.queries)), _integers(starts(batch.pages)), _anywhere(sum(batch.pages)),
        _integers(batch.last_page), call.q_heads, call.kv_heads or call.q_heads, call.head_dim, batch.page_size,
        causal=call.causal, q_data_type=DTYPES[call.dtype], kv_data_type=DTYPES[call.kv_dtype or call.dtype],
    )  # fmt: skip
    tensors = _paged_tensors(call, batch)
    return Recipe(tensors, lambda q, kv, out: partial(wrapper.run, q, kv, out=out), f"flashinfer_paged_{name}")


def _decode(call: Any, batch: PagedBatch) -> Recipe:
    wrapper = _wrapper("BatchDecodeWithPagedKVCacheWrapper", "NHD", use_tensor_cores=True)
    wrapper.plan(
        _integers(starts(batch.pages)), _anywhere(sum(batch.pages)), _integers(batch.last_page), call.q_heads,
        call.kv_heads or call.q_heads, call.head_dim, batch.page_size, q_data_type=DTYPES[call.dtype],
        kv_data_type=DTYPES[call.kv_dtype or call.dtype],
    )  # fmt: skip
    tensors = _paged_tensors(call, batch)
    return Recipe(tensors, lambda q, kv, out: partial(wrapper.run, q, kv, out=out), "flashinfer_decode")


def mla(call: Any) -> Recipe:
    """Over the latent in pages where weights are absorbed, else prefill of expanded heads."""
    batch = PagedBatch.of(call)
    if batch.page_size:
        return _latent(call, batch)
    return _ragged(call, batch, call.q_heads, call.nope_dim + call.rope_dim, call.v_dim)


def _latent(call: Any, batch: PagedBatch) -> Recipe:
    name = _CALLED[call.backend]
    wrapper = _wrapper("BatchMLAPagedAttentionWrapper", backend=name)
    wrapper.plan(
        _integers(starts(batch.queries)), _integers(starts(batch.pages)), _anywhere(sum(batch.pages)),
        _integers(batch.keys), call.q_heads, call.kv_rank, call.rope_dim, batch.page_size, call.causal,
        (call.nope_dim + call.rope_dim) ** -0.5, DTYPES[call.dtype], DTYPES[call.kv_dtype or call.dtype],
    )  # fmt: skip
    new, pages = sum(batch.queries), sum(batch.pages)
    latent, rotary = (new, call.q_heads, call.kv_rank), (new, call.q_heads, call.rope_dim)
    cached = specs(call.kv_dtype or call.dtype, *((pages, batch.page_size, n) for n in (call.kv_rank, call.rope_dim)))
    tensors = (*specs(call.dtype, latent, rotary), *cached, *specs(call.dtype, latent, use="written"))
    return Recipe(
        tensors,
        lambda q, q_pe, ckv, kpe, out: partial(wrapper.run, q, q_pe, ckv, kpe, out=out),
        f"flashinfer_mla_{name}",
    )


# ---- norms, SiLU-and-multiply, rotary embedding, sampling


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
    """FlashInfer's sampling, with seeds from a counter: a generator of PyTorch's may not be used inside of a graph."""
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
    "attention": attention,
    "mla": mla,
    "rmsnorm": rmsnorm,
    "silu_mul": silu_mul,
    "rope": rope,
    "top_k_top_p_sampling": top_k_top_p_sampling,
}
