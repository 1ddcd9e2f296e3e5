"""Sparse attention with an indexer: mqa_logits, index_topk, sparse_mla, and the whole dsa_layer.

DeepSeek's lightning indexer (V3.2, GLM-5; V4 over compressed keys): a token's index heads multiply one key per token in
fp8, negative scores become 0, and a weighted sum over the heads is the key's score. Each token attends to the ``topk``
best keys, gathered one by one.

dsa_layer is latent attention with such an indexer: its key and head weights are extra columns of the first product, its
queries of the second. Some layers reuse the selection of an earlier one. SGLang's prefill of a context no longer than
``index_topk`` attends to expanded heads, without an indexer.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.ops.attention import OverCache
from kernelcast.ops.attention_layer import (
    FLASHMLA,
    LAYER_BACKENDS,
    LatentLayer,
    absorbed_products,
    attention_view,
    expanded_heads,
    expanded_keys,
    latent_heads,
    latent_small_kernels,
    only,
    projection,
    query_projections,
    seen_pairs,
    sixteen_bits,
    without_tile,
)
from kernelcast.ops.base import Calls, ConfigurationColumns, choice, flag, labels, size
from kernelcast.ops.dtypes import find_dtype, supports_dtype
from kernelcast.ops.flash import flash_works
from kernelcast.ops.requests import Heads, RequestBatch
from kernelcast.ops.vector import MAX_THREADS, paced, vector_kernel
from kernelcast.ops.work import Array, Number, Work, Works, ceil_div

_TILE_ROWS, _TILE_KEYS = 128.0, 256.0  # DeepGEMM's smxx_fp8_mqa_logits: rows are tokens times index heads
_LEAST_ROWS = 64.0  # of a matrix instruction
_KEY_SCALE_BYTES = 4.0  # fp32, of each key
SCORE_BYTES = 4.0  # fp32
_SCORE_FLOPS = 2.0  # of each head: at least 0, times its weight, added
_TASK_CYCLES = 1500.0  # of a tile: keys from L2, a product of one step, the sum over heads
WALK_CYCLES = 2000.0  # of such a tile in DeepGEMM's kernel for contiguous keys: 4 ns per key on an H200
_SCAN_CYCLES = 300.0  # of a CTA's pass over 4,096 scores: loads, atomics in shared memory
_SCAN_VALUES = 4.0  # scores of a thread in a pass
_SCAN_INSTRUCTIONS = 12.0  # of a thread for a score: a digit, a count, and once more when it is gathered
_CHOSEN_BYTES = 4.0  # int32: the index of a key


class SparsePart(OverCache):
    """Parameters of the parts: requests over a cache with one key per ``compress_ratio`` tokens."""

    family = "sparse_attention"
    dtypes = ("fp16", "bf16", "fp8")
    trailing_parameters = ("causal", "page_size", "kv_dtype", "backend")
    batch_parameter = "batch"

    compress_ratio: int = size("tokens per compressed key", default=1, high=65536)
    q_heads: int = size("query heads", default=1, high=65536)
    backend: str | None = choice("attention backend, default: the usual one on the GPU", LAYER_BACKENDS, default=None)

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        requests = RequestBatch.of(calls)
        tokens, keys = (requests.total(x) for x in (requests.queries, requests.keys))
        return {
            "log_tokens": np.log2(tokens),
            "log_requests": np.log2(requests.count),
            "log_keys": np.log2(keys / requests.count),
            "cached": 1 - tokens / keys,
            "log_ratio": np.log2(calls["compress_ratio"]),
        }


class MqaLogits(SparsePart):
    """Scores of an indexer: for each new token, of every key that it sees."""

    op = "mqa_logits"
    examples = (
        {"batch": 1, "q_len": 4096, "kv_len": 4096, "index_heads": 64},
        {"batch": 64, "q_len": 1, "kv_len": 65536, "index_heads": 64, "compress_ratio": 4},
    )

    index_heads: int = size("indexer heads", default=64, high=4096)
    index_dim: int = size("dimension of an index key", default=128, high=4096)

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        return super().shape_features(calls, gpu) | {"log_index_heads": np.log2(calls["index_heads"])}

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        ratio, shape = calls["compress_ratio"], (calls["index_heads"], calls["index_dim"])
        walk_cycles = np.where(calls["page_size"] == 0, WALK_CYCLES, 0.0)  # pages are split among SMs
        return (key_scores(gpu, RequestBatch.of(calls), *shape, ratio, walk_cycles),)


class IndexTopk(SparsePart):
    """Top-k selection of keys for each new token; nothing runs where a token sees no more than ``topk``."""

    op = "index_topk"
    examples = ({"batch": 1, "q_len": 1024, "kv_len": 32768}, {"batch": 64, "q_len": 1, "kv_len": 65536})

    topk: int = size("keys selected per token", default=2048, high=1 << 20)

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        return super().shape_features(calls, gpu) | {"log_topk": np.log2(calls["topk"])}

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        return (topk_keys(gpu, RequestBatch.of(calls), calls["topk"], calls["compress_ratio"], calls["causal"]),)


class SparseMla(SparsePart):
    """Attention of each new token to its ``topk`` selected latents, and to the last ``window`` tokens."""

    op = "sparse_mla"
    examples = (
        {"batch": 1, "q_len": 4096, "kv_len": 4096, "q_heads": 64},
        {"batch": 64, "q_len": 1, "kv_len": 65536, "q_heads": 64, "topk": 512, "compress_ratio": 128, "window": 128},
    )

    topk: int = size("keys selected per token, 0: all", default=2048, low=0, high=1 << 20)
    window: int = size("sliding window of uncompressed tokens", default=0, low=0)
    kv_rank: int = size("latent dimension, which is the value", default=512, high=65536)
    rope_dim: int = size("rotary dimensions of a key beside the latent", default=64, low=0, high=4096)

    @classmethod
    def heads(cls, calls: Calls) -> Heads:
        qk_dim = calls["kv_rank"] + calls["rope_dim"]
        return Heads(calls["q_heads"], np.ones(calls.count), qk_dim, calls["kv_rank"], shared_where=True)

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        heads = {"log_q_heads": np.log2(calls["q_heads"]), "log_qk_dim": np.log2(cls.heads(calls).qk_dim)}
        return super().shape_features(calls, gpu) | {"log_topk": np.log2(calls["topk"] + 1), **heads}

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        requests, heads = RequestBatch.of(calls), cls.heads(calls)
        view = attention_view(calls, gpu, narrow=False)
        return gathered_attention(gpu, view, requests, heads, calls["topk"], calls["compress_ratio"], calls["window"])


def key_scores(
    gpu: Gpu, requests: RequestBatch, heads: Array, dim: Array, ratio: Number = 1.0, walk_cycles: Number = 0.0
) -> Work:
    """Scores of all keys that tokens see: tiles of 128 rows by 256 keys, each a task; with ``walk_cycles`` one task
    loops over all keys of its rows, at so many cycles per tile."""
    dtype = find_dtype("fp8" if supports_dtype(gpu, "fp8") else sixteen_bits(gpu))
    tokens, keys = (requests.total(x) for x in (requests.queries, requests.keys))
    pairs = requests.total(seen_pairs(requests)) / ratio
    together = np.maximum(1.0, np.floor(_TILE_ROWS / heads))  # tokens of a tile
    tiles = requests.total(ceil_div(requests.queries, requests.each(together)))
    mean_keys = np.maximum(1.0, pairs / tokens)
    rows = np.maximum(_LEAST_ROWS, heads * np.minimum(together, requests.most(requests.queries)))
    key_bytes = dim * dtype.act_bytes + _KEY_SCALE_BYTES
    written = np.minimum(together, tokens) * SCORE_BYTES  # of a key
    steps = ceil_div(mean_keys, _TILE_KEYS)
    each = np.where(np.asarray(walk_cycles) > 0, steps, 1.0)  # of a task
    return Work(
        tasks=tiles * steps / each,
        tensor_flops=2 * rows * dim * _TILE_KEYS * each,
        tensor_dtype=dtype.math,
        fma_flops=_SCORE_FLOPS * rows * _TILE_KEYS * each,
        smem_bytes=_TILE_KEYS * key_bytes * (1 + rows / _LEAST_ROWS) * each,
        l2_bytes=_TILE_KEYS * (key_bytes + written) * each,
        streamed_bytes=keys / ratio * key_bytes,
        activation_bytes=tokens * heads * dim * dtype.act_bytes + pairs * SCORE_BYTES,
        threads=384.0,
        registers_per_thread=168.0,
        smem_bytes_per_cta=np.minimum(4 * _TILE_KEYS * key_bytes, gpu.smem_bytes_per_cta),
        serial_steps=each,
        step_cycles=walk_cycles,
        task_cycles=_TASK_CYCLES,
        useful_flops=2 * heads * dim * pairs,
    )


def topk_keys(gpu: Gpu, requests: RequestBatch, topk: Array, ratio: Number = 1.0, causal: Array | None = None) -> Work:
    """Top-k by radix selection, one CTA per token: scores are counted by digit, then gathered."""
    tokens = requests.total(requests.queries)
    keys = np.maximum(1.0, requests.total(seen_pairs(requests, causal=causal)) / ratio / tokens)
    longest = requests.most(requests.keys) / ratio
    scores = tokens * keys * (longest > topk)
    work = vector_kernel(
        gpu,
        tasks=tokens,
        threads=MAX_THREADS,
        moved_bytes=scores * SCORE_BYTES + tokens * np.minimum(topk, keys) * _CHOSEN_BYTES,
        again_bytes=scores * SCORE_BYTES,
        smem_bytes=2 * scores * SCORE_BYTES,
        warp_instructions=_SCAN_INSTRUCTIONS * scores / gpu.warp_threads,
        steps=2 * ceil_div(np.where(longest > topk, longest, 1.0), MAX_THREADS * _SCAN_VALUES),
    )
    return paced(work, gpu, _SCAN_CYCLES)


def gathered_attention(
    gpu: Gpu, view: Calls, requests: RequestBatch, heads: Heads, topk: Number, ratio: Number = 1.0, window: Number = 0.0
) -> Works:
    """Each token counts as a request over its selected keys: of the keys that it sees, one in ``ratio``, at most
    ``topk`` (0: all), plus ``window``. Tokens share what they read only through L2."""
    each = requests.each
    ratio, window, topk = (each(np.broadcast_to(x, heads.queries.shape)) for x in (ratio, window, topk))
    chosen = seen_pairs(requests, topk * ratio, view["causal"]) / ratio + np.where(
        window > 0, seen_pairs(requests, window, view["causal"]), 0.0
    )
    keys = np.maximum(1.0, np.ceil(chosen / requests.queries))
    alone = RequestBatch(np.ones_like(keys), keys, requests.copies * requests.queries, requests.starts, requests.call)
    work, *after = flash_works(gpu, view, alone, heads)
    cached = requests.total(requests.keys / ratio + np.minimum(window + requests.queries, requests.keys) * (window > 0))
    token_bytes = heads.kv * heads.kv_dim * find_dtype(view.choice("kv_dtype") or view.choice("dtype")).act_bytes
    return replace(work, streamed_bytes=np.minimum(work.streamed_bytes, cached * token_bytes)), *after


_DENSE_STACK = "sglang"  # nsa_backend.py: multi-head attention where no request is longer than the choice
_JOINT_STACK = "sglang"
_DECODED = 2.0  # new tokens of a request, at most, that are a decode
_SMALL_KERNELS = 5.0  # as mla_layer's, and the indices of the selected keys
_INDEX_KERNELS = 6.0  # norm, rotation, Hadamard transform and quantisation of queries and key, its cache


class DsaLayer(LatentLayer):
    """Layer of DeepSeek sparse attention: latent attention over the keys that an indexer selects."""

    op = "dsa_layer"
    family = "sparse_attention"
    examples = (
        {"batch": 64, "q_len": 1, "kv_len": 65536, "q_heads": 16, "dtype": "fp8_block", "kv_dtype": "fp8"},
        {"batch": 1, "q_len": 4096, "kv_len": 16384, "q_heads": 128},
    )

    index_heads: int = size("indexer heads (replicated on every rank)", default=64, high=4096)
    index_dim: int = size("dimension of an index key", default=128, high=4096)
    index_topk: int = size("keys selected per token", default=2048, high=1 << 20)
    indexer: bool = flag("false: the layer reuses the selection of an earlier layer", default=True)
    path: str = choice(
        "auto: dense (expanded heads) where the stack runs a short prefill so, else sparse",
        ("auto", "sparse", "dense"),
        default="auto",
    )

    @classmethod
    def configuration(cls, calls: Calls) -> ConfigurationColumns:
        path = labels(_dense(calls), "dense", "sparse")
        return {**super().configuration(calls), "indexer": labels(calls["indexer"] > 0), "path": path}

    @classmethod
    def attended_flops(cls, calls: Calls) -> Array:
        requests, dense = RequestBatch.of(calls), _dense(calls)
        chosen = requests.total(seen_pairs(requests, requests.each(calls["index_topk"])))
        pairs = requests.total(seen_pairs(requests))
        latent = 2 * calls["kv_rank"] + calls["rope_dim"]
        wide = calls["nope_dim"] + calls["rope_dim"] + calls["v_dim"]
        indexed = calls["index_heads"] * calls["index_dim"] * pairs * calls["indexer"]
        return 2 * np.where(dense, calls["q_heads"] * wide * pairs, calls["q_heads"] * latent * chosen + indexed)

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        sizes = {"log_index_heads": np.log2(calls["index_heads"]), "log_topk": np.log2(calls["index_topk"])}
        return (
            super().shape_features(calls, gpu)
            | sizes
            | {"indexer": calls["indexer"], "dense": _dense(calls).astype(np.float64)}
        )

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        requests, dense = RequestBatch.of(calls), _dense(calls)
        tokens, keys = (requests.total(x) for x in (requests.queries, requests.keys))
        on, index = calls["indexer"], calls["index_heads"] * calls["index_dim"]
        beside = on * (calls["index_dim"] + calls["index_heads"])
        index_bytes = on * (index + calls["index_dim"]) * 5.0  # in 16 bits, rotated and out in 8
        return (
            *query_projections(gpu, calls, tokens, beside, on * index * ~dense),
            *only(expanded_keys(gpu, calls, keys), dense),
            *only(absorbed_products(gpu, calls, tokens), ~dense),
            latent_small_kernels(gpu, calls, tokens, _SMALL_KERNELS + on * _INDEX_KERNELS, moved_bytes=index_bytes),
            *only(_indexed(gpu, calls, requests), ~dense & (on > 0)),
            *_attended(gpu, calls, requests, dense),
            *projection(gpu, calls, tokens, calls["hidden"], calls["q_heads"] * calls["v_dim"]),
        )


def _dense(calls: Calls) -> NDArray[np.bool_]:
    """Where attention is over all keys, with expanded heads."""
    path = calls.choice("path")
    if path != "auto":
        return np.full(calls.count, path == "dense")
    requests = RequestBatch.of(calls)
    short = requests.most(requests.keys) <= calls["index_topk"]
    return short & (requests.most(requests.queries) > _DECODED) & (calls.choice("stack") == _DENSE_STACK)


def _indexed(gpu: Gpu, calls: Calls, requests: RequestBatch) -> Works:
    """In SGLang's prefill a token's row of scores spans the keys of all requests: 8,192 tokens of 128 requests over 26
    million keys take 109 ms on a B200, which is DRAM's time for so many values."""
    prefills = requests.most(requests.queries) > _DECODED
    walk_cycles = np.where(prefills, WALK_CYCLES, 0.0)  # keys are gathered first
    scores = key_scores(gpu, requests, calls["index_heads"], calls["index_dim"], walk_cycles=walk_cycles)
    joint = prefills & (calls.choice("stack") == _JOINT_STACK)
    tokens, keys = (requests.total(x) for x in (requests.queries, requests.keys))
    others = keys - requests.total(seen_pairs(requests)) / tokens
    return (
        replace(scores, refetched_bytes=joint * tokens * others * SCORE_BYTES),
        topk_keys(gpu, requests, calls["index_topk"]),
    )


def _attended(gpu: Gpu, calls: Calls, requests: RequestBatch, dense: NDArray[np.bool_]) -> Works:
    """FlashMLA converts the cache's 8 bits where keys are gathered."""
    view = attention_view(calls, gpu, narrow=calls.choice("backend") != FLASHMLA)
    works: Works = ()
    if not dense.all():
        works += only(gathered_attention(gpu, view, requests, latent_heads(calls), calls["index_topk"]), ~dense)
    if dense.any():
        whole = flash_works(gpu, view, requests, expanded_heads(calls))
        works += only(tuple(map(without_tile, whole)), dense)
    return works
