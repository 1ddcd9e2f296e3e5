"""mla_layer: the attention layer of DeepSeek V2 and V3 (and Kimi K2) as engines run it, projections and all.

Down to the latents of query and key (one product), up to the heads' queries, attention, and out. Where weights are
absorbed, each head's query is multiplied into the latent's space and its result out of it; else keys and values of all
heads are made from the latents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, choice, size
from kernelcast.ops.flash import flash_works
from kernelcast.ops.layer_parts import (
    AttentionLayer,
    around,
    attention_view,
    by_head,
    only,
    projection,
    seen_pairs,
    told,
)
from kernelcast.ops.requests import Heads, Requests
from kernelcast.ops.work import Array, Work, Works

_ABSORBED_QUERIES = 2.0  # up to which "auto" takes the latent itself
_SMALL_KERNELS = 4.0  # norms of both latents, a rotation, the write to the cache


class LatentLayer(AttentionLayer):
    """Sizes of multi-head latent attention."""

    q_rank: int = size("size of the query's latent (q_lora_rank), 0: none", default=1536, low=0, high=65536)
    kv_rank: int = size("size of the latent (kv_lora_rank)", default=512, high=65536)
    rope_dim: int = size("rotary part of a key (qk_rope_head_dim)", default=64, high=4096)
    nope_dim: int = size("plain part of an expanded key (qk_nope_head_dim)", default=128, high=4096)
    v_dim: int = size("size of an expanded value (v_head_dim)", default=128, high=4096)

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
    """The layer of multi-head latent attention: projections, norms, rotation, cache, attention, output."""

    op = "mla_layer"
    examples = (
        {"batch": 64, "q_len": 1, "kv_len": 4096, "q_heads": 16, "dtype": "fp8_block", "kv_dtype": "fp8"},
        {"batch": 1, "q_len": 4096, "kv_len": 4096, "q_heads": 128},
    )
    trailing_parameters = ("causal", "page_size", "kv_dtype", "absorbed", "backend", "fused")
    absorbed: str = choice("auto: absorbed when q_len is 1 or 2 (decode)", ("auto", "yes", "no"), default="auto")

    @classmethod
    def configuration(cls, calls: Calls) -> Mapping[str, str | NDArray[Any] | None]:
        return told(super().configuration(calls), absorbed=_latent(calls))

    @classmethod
    def attended_flops(cls, calls: Calls) -> Array:
        requests, latent = Requests.of(calls), _latent(calls)
        wide = np.where(latent, 2 * calls["kv_rank"], calls["nope_dim"] + calls["v_dim"]) + calls["rope_dim"]
        return 2 * calls["q_heads"] * wide * requests.total(seen_pairs(requests))

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        return super().shape_features(calls, gpu) | {"absorbed": _latent(calls).astype(np.float64)}

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        requests, latent = Requests.of(calls), _latent(calls)
        view = attention_view(calls, gpu)
        attended: Works = ()
        for on, heads in ((latent, latent_heads(calls)), (~latent, expanded_heads(calls))):
            if on.any():
                attended += only(flash_works(gpu, view, requests, heads), on)
        tokens, keys = (requests.total(x) for x in (requests.queries, requests.keys))
        return (
            *queried(gpu, calls, tokens),
            *only(expanded(gpu, calls, keys), ~latent),
            *only(absorbed(gpu, calls, tokens), latent),
            small(gpu, calls, tokens),
            *attended,
            *projection(gpu, calls, tokens, calls["hidden"], calls["q_heads"] * calls["v_dim"]),
        )


def _latent(calls: Calls) -> NDArray[np.bool_]:
    """Where weights are absorbed."""
    requests, how = Requests.of(calls), calls.choice("absorbed")
    if how == "auto":
        return requests.most(requests.queries) <= _ABSORBED_QUERIES
    return np.full(calls.count, how == "yes")


def latent_heads(calls: Calls) -> Heads:
    """All heads share the latent as their key, and its plain part as their value."""
    return Heads(
        queries=calls["q_heads"],
        kv=np.ones(calls.count),
        qk_dim=calls["kv_rank"] + calls["rope_dim"],
        v_dim=calls["kv_rank"],
        shared_where=True,
    )


def expanded_heads(calls: Calls) -> Heads:
    """Each head has a key and a value of its own."""
    heads = calls["q_heads"]
    return Heads(queries=heads, kv=heads, qk_dim=calls["nope_dim"] + calls["rope_dim"], v_dim=calls["v_dim"])


def queried(gpu: Gpu, calls: Calls, tokens: Array, beside: Array | float = 0.0, more: Array | float = 0.0) -> Works:
    """Down to the latents, one product, and up to the heads' queries. ``beside``, ``more``: columns that an indexer
    adds to the first and to the second."""
    rank, hidden = calls["q_rank"], calls["hidden"]
    down = rank + calls["kv_rank"] + calls["rope_dim"] + beside
    up = calls["q_heads"] * (calls["nope_dim"] + calls["rope_dim"]) + more
    return (
        *projection(gpu, calls, tokens, down, hidden),
        *projection(gpu, calls, tokens, up, np.where(rank > 0, rank, hidden)),
    )


def expanded(gpu: Gpu, calls: Calls, keys: Array) -> Works:
    """Keys and values of all heads from the latents, of cached tokens too."""
    return projection(gpu, calls, keys, calls["q_heads"] * (calls["nope_dim"] + calls["v_dim"]), calls["kv_rank"])


def absorbed(gpu: Gpu, calls: Calls, tokens: Array) -> Works:
    """Each head's query into the space of the latent, and its result out of it."""
    heads, rank = calls["q_heads"], calls["kv_rank"]
    return (
        by_head(gpu, calls, tokens, heads, rank, calls["nope_dim"]),
        by_head(gpu, calls, tokens, heads, calls["v_dim"], rank),
    )


def small(
    gpu: Gpu, calls: Calls, tokens: Array, kernels: Array | float = _SMALL_KERNELS, **more: Array | float
) -> Work:
    """Norms of the latents, rotation of queries and key, the write to the cache."""
    rope = calls["rope_dim"]
    return around(
        gpu,
        calls,
        tokens,
        normed=calls["q_rank"] + calls["kv_rank"],
        rotated=(calls["q_heads"] + 1) * rope,
        kept=calls["kv_rank"] + rope,
        kernels=kernels,
        **more,
    )
