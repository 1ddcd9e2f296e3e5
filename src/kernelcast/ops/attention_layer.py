"""Whole attention layers as engines run and measure them: projections, norms, RoPE, cache writes, attention. The
kernels are those of the single ops (``matmul_work``, ``flash_works``).

mla_layer is the layer of DeepSeek V2, V3 and Kimi K2: one product down to the latents of query and key, one up to the
queries, attention, and the output projection. With absorbed weights each head's query is multiplied into the latent
space and its result out of it; else keys and values of all heads are expanded from the latents.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.hardware.gpu import TCGEN05
from kernelcast.ops.attention import OverCache
from kernelcast.ops.base import Calls, ConfigurationColumns, choice, flag, labels, size
from kernelcast.ops.dtypes import find_dtype, supports_dtype
from kernelcast.ops.flash import BACKENDS, flash_works, visible_pairs
from kernelcast.ops.gemm import QUANTISING_KERNELS, matmul_work
from kernelcast.ops.kernel_selection import default_backend
from kernelcast.ops.quantize import quantised_rows
from kernelcast.ops.requests import Heads, RequestBatch
from kernelcast.ops.vector import vector_kernel
from kernelcast.ops.work import Array, Number, Work, Works

FLASHMLA = "flashmla"
MSA = "msa"  # MiniMax's kernels for blocks of keys, of CUTLASS, on Blackwell
LAYER_BACKENDS = (*BACKENDS, FLASHMLA, MSA)
# Bytes per value of a norm or RoPE: read and written once; or by a chain of PyTorch kernels, one per step, in
# fp32 (square, mean, root, products with sine and cosine, halves put together). vLLM's layer on B200 with and without
# fusing shows: 54 us of small kernels, and at 32,768 tokens 21 ns per token for norms of 2,048 values and 0.85 per head
# for a rotation of 64, at DRAM's 7.2 TB/s.
_FUSED_BYTES, _CHAIN_NORM_BYTES, _CHAIN_ROPE_BYTES = 4.0, 75.0, 95.0
_CHAIN_KERNELS = 24.0  # beyond the fused kernels
_STEP_BYTES = 8.0  # of a number in fp32, read and written
_ROW_THREADS = 256.0


class AttentionLayer(OverCache):
    """Parameters of all layers; sizes are those of one rank."""

    dtypes = ("fp16", "bf16", "fp8", "fp8_block", "nvfp4", "int8", "int8_wo", "int4", "mxfp4", "mxfp4_fp8",
              "w4a4_mxfp4")  # fmt: skip
    trailing_parameters: ClassVar[tuple[str, ...]] = ("causal", "page_size", "kv_dtype", "backend", "fused")
    batch_parameter = "batch"

    kv_dtype: str = choice("dtype of the KV cache", ("fp16", "bf16", "fp8"), default="bf16")
    backend: str | None = choice("attention backend, default: the usual one on the GPU", LAYER_BACKENDS, default=None)
    hidden: int = size("hidden size of the model", default=7168, high=1 << 20)
    fused: bool = flag("norms and RoPE are fused kernels; false: chains of PyTorch kernels", default=True)

    @classmethod
    def projected_flops(cls, calls: Calls) -> Array:
        """FLOPs per token of all matrix products but attention."""
        raise TypeError(f"{cls.__name__} defines no projections")

    @classmethod
    def attended_flops(cls, calls: Calls) -> Array:
        """FLOPs of the call in attention and in the indexer."""
        raise TypeError(f"{cls.__name__} defines no attention")

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        requests = RequestBatch.of(calls)
        tokens, keys = (requests.total(x) for x in (requests.queries, requests.keys))
        return {
            "log_tokens": np.log2(tokens),
            "log_requests": np.log2(requests.count),
            "log_keys": np.log2(keys / requests.count),
            "longest_keys": np.log2(requests.most(requests.keys) * requests.count / keys),
            "cached": 1 - tokens / keys,
            "log_q_heads": np.log2(calls["q_heads"]),
            "log_hidden": np.log2(calls["hidden"]),
            "fused": calls["fused"],
            "attended": np.log2(cls.attended_flops(calls) / (tokens * cls.projected_flops(calls)) + 1e-3),
        }


def sixteen_bits(gpu: Gpu, calls: Calls | None = None) -> str:
    """The 16-bit dtype beside narrow ones: fp16 where the calls say so, or where the GPU lacks bf16."""
    half = calls is not None and calls.choice("dtype") == "fp16"
    return "fp16" if half or not supports_dtype(gpu, "bf16") else "bf16"


def tiling_backend(calls: Calls, gpu: Gpu) -> str:
    """The backend whose tiles the attention kernel has. FlashMLA tiles 64 rows of all heads and splits by load, like
    FlashAttention 3; on Blackwell it, and FlashInfer for latents, run like TensorRT-LLM's kernels."""
    name: str = calls.choice("backend") or default_backend(
        "attention", gpu, sixteen_bits(gpu, calls), calls.choice("stack")
    )
    if gpu.instruction_path == TCGEN05:
        return "trtllm" if name in (FLASHMLA, MSA, "flashinfer") else name
    return "fa3" if name in (FLASHMLA, MSA) else name


def attention_view(calls: Calls, gpu: Gpu, *, narrow: bool = True) -> Calls:
    """The calls as the attention kernel sees them: in the dtype of attention, not of the projections, and without a
    window.

    ``narrow``: TensorRT-LLM's and FlashMLA's kernels multiply in the cache's 8 bits; the others convert what they read.
    """
    tiles = tiling_backend(calls, gpu)
    eight = calls.choice("kv_dtype") == "fp8" and supports_dtype(gpu, "fp8")
    multiplies = eight and narrow and (tiles == "trtllm" or calls.choice("backend") == FLASHMLA)
    choices = {"dtype": "fp8" if multiplies else sixteen_bits(gpu, calls), "backend": tiles}
    numbers = {name: column for name, column in calls.numbers.items() if name != "window"}
    return replace(calls, numbers=numbers, choices={**calls.choices, **choices})


def projection(gpu: Gpu, calls: Calls, tokens: Array, n: Array, k: Array) -> Works:
    """A linear layer of the engine; a narrow dtype quantises its input first."""
    dtype = calls.dtype
    product = without_tile(matmul_work(gpu, dtype, tokens, n, k))
    if dtype.act_bytes >= 2:
        return (product,)
    kernels = QUANTISING_KERNELS.get(calls.choice("stack") or "", 1.0)
    return replace(quantised_rows(gpu, dtype, tokens, k), launches=kernels), product


def by_head(gpu: Gpu, calls: Calls, tokens: Array, heads: Array, n: Array, k: Array) -> Work:
    """A batched product of heads (or groups) with weights that engines keep in 16 bits."""
    return without_tile(matmul_work(gpu, find_dtype(sixteen_bits(gpu, calls)), tokens, n, k, batch=heads))


def without_tile(work: Work) -> Work:
    """Without its tile as a feature: a layer has too many products to describe each."""
    return replace(work, tile={})


def only(works: Works, on: NDArray[np.bool_]) -> Works:
    """The kernels, launched by these calls only."""
    return works if on.all() else tuple(work.where(on) for work in works if on.any())


def small_kernels(
    gpu: Gpu,
    calls: Calls,
    tokens: Array,
    *,
    normed: Number,
    rotated: Number,
    kept: Number,
    kernels: Number,
    moved_bytes: Number = 0.0,
) -> Work:
    """Norms, RoPE and cache writes as one work of several launches; sizes are per token. ``moved_bytes``: of other
    small kernels."""
    chain = calls["fused"] == 0
    numbers = tokens * (normed + rotated)
    again = (
        chain * tokens * (normed * (_CHAIN_NORM_BYTES - _FUSED_BYTES) + rotated * (_CHAIN_ROPE_BYTES - _FUSED_BYTES))
    )
    work = vector_kernel(
        gpu,
        tasks=tokens,
        threads=_ROW_THREADS,
        moved_bytes=tokens * ((normed + rotated) * _FUSED_BYTES + kept * 2.0 + moved_bytes),
        again_bytes=again,
        streamed_bytes=tokens * kept * find_dtype(calls.choice("kv_dtype")).act_bytes,
        flops=4 * (numbers + tokens * kept),
        converted=2 * (numbers + tokens * kept),
        steps=2.0,
        launches=kernels + np.where(chain, _CHAIN_KERNELS, 0.0),
    )
    missing = np.clip(numbers * _STEP_BYTES / gpu.l2_bytes - 1, 0.0, 1.0)  # of what a step leaves to the next in L2
    return replace(work, refetched_bytes=again * missing)


def seen_pairs(requests: RequestBatch, most: Array | float = 0.0, causal: Array | None = None) -> Array:
    """Query-key pairs of each request, at most ``most`` keys per query (0: all), under the causal mask unless
    ``causal`` is 0."""
    queries, keys = requests.queries, requests.keys
    limit = np.broadcast_to(most, queries.shape)
    seen = visible_pairs(queries, keys, np.ones_like(queries), limit)
    if causal is None or causal.all():
        return seen
    whole = queries * np.minimum(keys, np.where(limit > 0, limit, np.inf))
    return np.where(requests.each(causal) > 0, seen, whole)


_ABSORBED_QUERIES = 2.0  # up to which "auto" takes the latent itself
_SMALL_KERNELS = 4.0  # norms of both latents, a rotation, the write to the cache


class LatentLayer(AttentionLayer):
    """Parameters of multi-head latent attention."""

    q_rank: int = size("latent dimension of the query (q_lora_rank), 0: none", default=1536, low=0, high=65536)
    kv_rank: int = size("latent dimension (kv_lora_rank)", default=512, high=65536)
    rope_dim: int = size("rotary dimensions of a key (qk_rope_head_dim)", default=64, high=4096)
    nope_dim: int = size("non-rotary dimensions of a key (qk_nope_head_dim)", default=128, high=4096)
    v_dim: int = size("value head dimension (v_head_dim)", default=128, high=4096)

    @classmethod
    def heads(cls, calls: Calls) -> Heads:
        return latent_heads(calls)

    @classmethod
    def projected_flops(cls, calls: Calls) -> Array:
        heads, hidden, rank = calls["q_heads"], calls["hidden"], calls["kv_rank"]
        down = hidden * (calls["q_rank"] + rank + calls["rope_dim"])
        up = heads * (calls["nope_dim"] + calls["rope_dim"]) * np.where(calls["q_rank"] > 0, calls["q_rank"], hidden)
        return 2 * (down + up + heads * (rank * (calls["nope_dim"] + calls["v_dim"]) + calls["v_dim"] * hidden))

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        return super().shape_features(calls, gpu) | {"log_qk_dim": np.log2(calls["nope_dim"] + calls["rope_dim"])}


class MlaLayer(LatentLayer):
    """Layer of multi-head latent attention: projections, norms, RoPE, cache, attention, output."""

    op = "mla_layer"
    examples = (
        {"batch": 64, "q_len": 1, "kv_len": 4096, "q_heads": 16, "dtype": "fp8_block", "kv_dtype": "fp8"},
        {"batch": 1, "q_len": 4096, "kv_len": 4096, "q_heads": 128},
    )
    trailing_parameters = ("causal", "page_size", "kv_dtype", "absorbed", "backend", "fused")
    absorbed: str = choice("auto: absorbed when q_len is 1 or 2 (decode)", ("auto", "yes", "no"), default="auto")

    @classmethod
    def configuration(cls, calls: Calls) -> ConfigurationColumns:
        return {**super().configuration(calls), "absorbed": labels(_latent(calls))}

    @classmethod
    def attended_flops(cls, calls: Calls) -> Array:
        requests, latent = RequestBatch.of(calls), _latent(calls)
        wide = np.where(latent, 2 * calls["kv_rank"], calls["nope_dim"] + calls["v_dim"]) + calls["rope_dim"]
        return 2 * calls["q_heads"] * wide * requests.total(seen_pairs(requests))

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        return super().shape_features(calls, gpu) | {"absorbed": _latent(calls).astype(np.float64)}

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        requests, latent = RequestBatch.of(calls), _latent(calls)
        view = attention_view(calls, gpu)
        attended: Works = ()
        for on, heads in ((latent, latent_heads(calls)), (~latent, expanded_heads(calls))):
            if on.any():
                attended += only(flash_works(gpu, view, requests, heads), on)
        tokens, keys = (requests.total(x) for x in (requests.queries, requests.keys))
        return (
            *query_projections(gpu, calls, tokens),
            *only(expanded_keys(gpu, calls, keys), ~latent),
            *only(absorbed_products(gpu, calls, tokens), latent),
            latent_small_kernels(gpu, calls, tokens),
            *attended,
            *projection(gpu, calls, tokens, calls["hidden"], calls["q_heads"] * calls["v_dim"]),
        )


def _latent(calls: Calls) -> NDArray[np.bool_]:
    """Where weights are absorbed."""
    requests, how = RequestBatch.of(calls), calls.choice("absorbed")
    if how == "auto":
        return requests.most(requests.queries) <= _ABSORBED_QUERIES
    return np.full(calls.count, how == "yes")


def latent_heads(calls: Calls) -> Heads:
    """All heads share the latent as their key, and its non-rotary part as their value."""
    return Heads(
        queries=calls["q_heads"],
        kv=np.ones(calls.count),
        qk_dim=calls["kv_rank"] + calls["rope_dim"],
        v_dim=calls["kv_rank"],
        shared_where=True,
    )


def expanded_heads(calls: Calls) -> Heads:
    """Each head has its key and value (MHA)."""
    heads = calls["q_heads"]
    return Heads(queries=heads, kv=heads, qk_dim=calls["nope_dim"] + calls["rope_dim"], v_dim=calls["v_dim"])


def query_projections(
    gpu: Gpu, calls: Calls, tokens: Array, beside: Array | float = 0.0, more: Array | float = 0.0
) -> Works:
    """One product down to the latents and one up to the queries. ``beside``, ``more``: columns that an indexer adds to
    the first and to the second."""
    rank, hidden = calls["q_rank"], calls["hidden"]
    down = rank + calls["kv_rank"] + calls["rope_dim"] + beside
    up = calls["q_heads"] * (calls["nope_dim"] + calls["rope_dim"]) + more
    return (
        *projection(gpu, calls, tokens, down, hidden),
        *projection(gpu, calls, tokens, up, np.where(rank > 0, rank, hidden)),
    )


def expanded_keys(gpu: Gpu, calls: Calls, keys: Array) -> Works:
    """Keys and values of all heads from the latents, cached tokens included."""
    return projection(gpu, calls, keys, calls["q_heads"] * (calls["nope_dim"] + calls["v_dim"]), calls["kv_rank"])


def absorbed_products(gpu: Gpu, calls: Calls, tokens: Array) -> Works:
    """Each head's query into the latent space, and its result out of it."""
    heads, rank = calls["q_heads"], calls["kv_rank"]
    return (
        by_head(gpu, calls, tokens, heads, rank, calls["nope_dim"]),
        by_head(gpu, calls, tokens, heads, calls["v_dim"], rank),
    )


def latent_small_kernels(
    gpu: Gpu, calls: Calls, tokens: Array, kernels: Array | float = _SMALL_KERNELS, **more: Array | float
) -> Work:
    """Norms of the latents, RoPE of queries and key, the cache write."""
    rope = calls["rope_dim"]
    return small_kernels(
        gpu,
        calls,
        tokens,
        normed=calls["q_rank"] + calls["kv_rank"],
        rotated=(calls["q_heads"] + 1) * rope,
        kept=calls["kv_rank"] + rope,
        kernels=kernels,
        **more,
    )
