"""dsa_layer: DeepSeek sparse attention (V3.2, GLM-5) as engines run the layer.

The layer of latent attention, with an indexer that gives each token ``index_topk`` keys: a key a token and weights of
its heads (columns beside the first product), its queries (columns beside the second), scores of all keys, a choice.
Some layers take the choice of one before. Attention is over the chosen latents, weights absorbed; SGLang's prefill of
a context no longer than the choice is that of expanded heads, without an indexer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, choice, flag, size
from kernelcast.ops.flash import flash_works
from kernelcast.ops.latent_layer import (
    LatentLayer,
    absorbed,
    expanded,
    expanded_heads,
    latent_heads,
    queried,
    small,
)
from kernelcast.ops.layer_parts import FLASHMLA, attention_view, only, projection, seen_pairs, told, untold
from kernelcast.ops.requests import Requests
from kernelcast.ops.sparse_parts import SCORE_BYTES, WALK_CYCLES, attended, chosen_keys, scored
from kernelcast.ops.work import Array, Works

_DENSE_STACK = "sglang"  # nsa_backend.py: multi-head attention where no request is longer than the choice
_JOINT_STACK = "sglang"
_DECODED = 2.0  # new tokens of a request, at most, that are a decode
_SMALL_KERNELS = 5.0  # as mla_layer's, and the places of the chosen keys
_INDEX_KERNELS = 6.0  # norm, rotation, Hadamard transform and quantisation of queries and key, its cache


class DsaLayer(LatentLayer):
    """The layer of DeepSeek sparse attention: latent attention over the keys that an indexer chooses."""

    op = "dsa_layer"
    family = "sparse_attention"
    examples = (
        {"batch": 64, "q_len": 1, "kv_len": 65536, "q_heads": 16, "dtype": "fp8_block", "kv_dtype": "fp8"},
        {"batch": 1, "q_len": 4096, "kv_len": 16384, "q_heads": 128},
    )

    index_heads: int = size("heads of the indexer, on every rank", default=64, high=4096)
    index_dim: int = size("size of an index key", default=128, high=4096)
    index_topk: int = size("keys that are chosen", default=2048, high=1 << 20)
    indexer: bool = flag("false: the choice is that of a layer before", default=True)
    path: str = choice(
        "auto: expanded heads (dense) where the stack takes them for a short prefill, else sparse",
        ("auto", "sparse", "dense"),
        default="auto",
    )

    @classmethod
    def configuration(cls, calls: Calls) -> Mapping[str, str | NDArray[Any] | None]:
        path = np.where(_dense(calls), "dense", "sparse").astype(object)
        return {**told(super().configuration(calls), indexer=calls["indexer"] > 0), "path": path}

    @classmethod
    def attended_flops(cls, calls: Calls) -> Array:
        requests, dense = Requests.of(calls), _dense(calls)
        chosen = requests.total(seen_pairs(requests, requests.each(calls["index_topk"])))
        pairs = requests.total(seen_pairs(requests))
        latent = 2 * calls["kv_rank"] + calls["rope_dim"]
        wide = calls["nope_dim"] + calls["rope_dim"] + calls["v_dim"]
        indexed = calls["index_heads"] * calls["index_dim"] * pairs * calls["indexer"]
        return 2 * np.where(dense, calls["q_heads"] * wide * pairs, calls["q_heads"] * latent * chosen + indexed)

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        own = {"log_index_heads": np.log2(calls["index_heads"]), "log_topk": np.log2(calls["index_topk"])}
        return (
            super().shape_features(calls, gpu)
            | own
            | {"indexer": calls["indexer"], "dense": _dense(calls).astype(np.float64)}
        )

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        requests, dense = Requests.of(calls), _dense(calls)
        tokens, keys = (requests.total(x) for x in (requests.queries, requests.keys))
        on, index = calls["indexer"], calls["index_heads"] * calls["index_dim"]
        beside = on * (calls["index_dim"] + calls["index_heads"])
        index_bytes = on * (index + calls["index_dim"]) * 5.0  # in 16 bits, rotated and out in 8
        return (
            *queried(gpu, calls, tokens, beside, on * index * ~dense),
            *only(expanded(gpu, calls, keys), dense),
            *only(absorbed(gpu, calls, tokens), ~dense),
            small(gpu, calls, tokens, _SMALL_KERNELS + on * _INDEX_KERNELS, moved_bytes=index_bytes),
            *only(_indexed(gpu, calls, requests), ~dense & (on > 0)),
            *_attended(gpu, calls, requests, dense),
            *projection(gpu, calls, tokens, calls["hidden"], calls["q_heads"] * calls["v_dim"]),
        )


def _dense(calls: Calls) -> NDArray[np.bool_]:
    """Where attention is that of expanded heads, over all keys."""
    path = calls.choice("path")
    if path != "auto":
        return np.full(calls.count, path == "dense")
    requests = Requests.of(calls)
    short = requests.most(requests.keys) <= calls["index_topk"]
    return short & (requests.most(requests.queries) > _DECODED) & (calls.choice("stack") == _DENSE_STACK)


def _indexed(gpu: Gpu, calls: Calls, requests: Requests) -> Works:
    """In SGLang's prefill a token's row of scores is as long as the keys of all requests together: 8,192 tokens of 128
    requests over 26 million keys take 109 ms on a B200, which is what DRAM takes for so many numbers."""
    prefills = requests.most(requests.queries) > _DECODED
    walk_cycles = np.where(prefills, WALK_CYCLES, 0.0)  # keys are gathered first
    scores = scored(gpu, requests, calls["index_heads"], calls["index_dim"], walk_cycles=walk_cycles)
    joint = prefills & (calls.choice("stack") == _JOINT_STACK)
    tokens, keys = (requests.total(x) for x in (requests.queries, requests.keys))
    others = keys - requests.total(seen_pairs(requests)) / tokens
    return (
        replace(scores, refetched_bytes=joint * tokens * others * SCORE_BYTES),
        chosen_keys(gpu, requests, calls["index_topk"]),
    )


def _attended(gpu: Gpu, calls: Calls, requests: Requests, dense: NDArray[np.bool_]) -> Works:
    """FlashMLA widens the cache's 8 bits where keys are gathered."""
    view = attention_view(calls, gpu, narrow=calls.choice("backend") != FLASHMLA)
    found: Works = ()
    if not dense.all():
        found += only(attended(gpu, view, requests, latent_heads(calls), calls["index_topk"]), ~dense)
    if dense.any():
        whole = flash_works(gpu, view, requests, expanded_heads(calls))
        found += only(tuple(map(untold, whole)), dense)
    return found
