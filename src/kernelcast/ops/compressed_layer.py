"""compressed_layer, block_sparse_layer: sparse attention layers of DeepSeek V4 and MiniMax M3 as engines run them.

DeepSeek V4: one key of ``head_dim`` per token, which is its value too. Every ``compress_ratio`` tokens give one
compressed key (a gated mean; at ratio 4 over two windows, so that both projections are twice as wide). A token attends
to the last ``window`` tokens and to compressed keys: at ratio 4 those that an indexer selects, at ratio 128 all. The
output has two products: each of ``o_groups`` groups of heads to ``o_rank``, then to the hidden size.

MiniMax M3: grouped-query attention over the ``topk_blocks`` blocks of keys that score best in a small indexer.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.ops.attention_layer import (
    MSA,
    AttentionLayer,
    attention_view,
    by_head,
    only,
    projection,
    seen_pairs,
    small_kernels,
)
from kernelcast.ops.base import Calls, ConfigurationColumns, Conflicts, size
from kernelcast.ops.requests import Heads, RequestBatch, head_conflicts
from kernelcast.ops.sparse_attention import SCORE_BYTES, gathered_attention, key_scores, topk_keys
from kernelcast.ops.work import Array, Work, Works

_DECODED = 2.0  # new tokens of a request, at most, that are a decode
_TILE_ROWS = 128.0
_WALK_CYCLES = 8000.0  # of 256 keys that a CTA of SGLang's Triton kernel scores: 17 ns per key on a B200
_CHOOSES = 4.0  # compressed keys of up to so many tokens are too many to attend to all
_GROUP = 8.0  # heads of a group of the output
_SMALL_KERNELS = 6.0  # norms of latent and key, of each head, rotation of queries and key, cache, rotation back
_COMPRESS_KERNELS = 3.0  # state, gated mean with its norm, cache; once more in the indexer
_INDEX_KERNELS = 5.0  # rotation, Hadamard transform and quantisation of queries, weights
_STATE_BYTES = 12.0  # of a number that goes into a compressed key: in 16 bits, kept and read again in 32


class CompressedLayer(AttentionLayer):
    """Layer of DeepSeek V4: a window of tokens, and compressed keys, all (ratio 128) or selected (ratio 4)."""

    op = "compressed_layer"
    family = "sparse_attention"
    examples = (
        {"batch": 64, "q_len": 1, "kv_len": 65536, "q_heads": 64, "compress_ratio": 4, "hidden": 4096, "q_rank": 1024},
        {"batch": 1, "q_len": 4096, "kv_len": 4096, "q_heads": 128, "compress_ratio": 128, "dtype": "fp8_block"},
    )

    q_rank: int = size("latent dimension of the query (q_lora_rank)", default=1536, high=65536)
    head_dim: int = size("head dimension, and that of the shared key", default=512, high=4096)
    rope_dim: int = size("rotary dimensions of a head", default=64, high=4096)
    o_rank: int = size("output rank of a group of heads (o_lora_rank)", default=1024, high=65536)
    o_groups: int | None = size("output groups on this rank, default: groups of 8 heads", default=None, high=65536)
    window: int = size("sliding window of uncompressed tokens", default=128)
    compress_ratio: int = size("tokens per compressed key, 0: no compression", default=4, low=0, high=65536)
    index_heads: int = size("indexer heads (replicated on every rank)", default=64, high=4096)
    index_dim: int = size("dimension of an index key", default=128, high=4096)
    index_topk: int = size("compressed keys selected per token", default=512, high=1 << 20)
    padded_heads: int | None = size("heads after padding with zeros, default: q_heads", default=None)

    @classmethod
    def heads(cls, calls: Calls) -> Heads:
        heads, dim = calls.given("padded_heads", calls["q_heads"]), calls["head_dim"]
        return Heads(heads, np.ones(calls.count), dim, dim, shared_where=True)

    @classmethod
    def configuration(cls, calls: Calls) -> ConfigurationColumns:
        keys = np.where(_Compression(calls).selects, "chosen", "all")
        keys = np.where(calls["compress_ratio"] == 0, "none", keys).astype(object)
        return {**super().configuration(calls), "compressed": keys}

    @classmethod
    def projected_flops(cls, calls: Calls) -> Array:
        sizes = _Compression(calls)
        out = calls["q_heads"] * calls["head_dim"] + sizes.groups * calls["hidden"]
        return 2 * (calls["hidden"] * sizes.down + calls["q_rank"] * sizes.up + calls["o_rank"] * out)

    @classmethod
    def attended_flops(cls, calls: Calls) -> Array:
        requests, sizes = RequestBatch.of(calls), _Compression(calls)
        pairs = requests.total(seen_pairs(requests)) / sizes.ratio
        most = requests.each(sizes.most * calls["compress_ratio"])
        chosen = requests.total(seen_pairs(requests, most)) / sizes.ratio
        last = requests.total(seen_pairs(requests, requests.each(calls["window"])))
        indexed = sizes.selects * calls["index_heads"] * calls["index_dim"] * pairs
        return 2 * (2 * calls["q_heads"] * calls["head_dim"] * (last + chosen * sizes.compresses) + indexed)

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        sizes = {"log_ratio": np.log2(calls["compress_ratio"] + 1), "log_topk": np.log2(calls["index_topk"])}
        return super().shape_features(calls, gpu) | sizes | {"indexer": _Compression(calls).selects.astype(np.float64)}

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        requests, sizes = RequestBatch.of(calls), _Compression(calls)
        tokens, heads, dim = requests.total(requests.queries), calls["q_heads"], calls["head_dim"]
        groups, view = sizes.groups, attention_view(calls, gpu, narrow=False)
        index = (
            key_scores(gpu, requests, calls["index_heads"], calls["index_dim"], sizes.ratio),
            topk_keys(gpu, requests, calls["index_topk"], sizes.ratio),
        )
        most = np.where(sizes.compresses, sizes.most, 1.0)  # none: a key beside the window
        return (
            *projection(gpu, calls, tokens, sizes.down, calls["hidden"]),
            *projection(gpu, calls, tokens, sizes.up, calls["q_rank"]),
            _small(gpu, calls, tokens, sizes),
            *only(index, sizes.selects),
            *gathered_attention(gpu, view, requests, cls.heads(calls), most, sizes.ratio, calls["window"]),
            by_head(gpu, calls, tokens, groups, calls["o_rank"], heads * dim / groups),
            *projection(gpu, calls, tokens, calls["hidden"], groups * calls["o_rank"]),
        )


class _Compression:
    """What compression and the indexer add to a layer; arrays (calls,)."""

    def __init__(self, calls: Calls) -> None:
        ratio, dim, heads = calls["compress_ratio"], calls["head_dim"], calls["q_heads"]
        self.ratio, self.compresses = np.maximum(ratio, 1.0), ratio > 0
        self.selects = np.asarray((ratio > 0) & (ratio <= _CHOOSES))  # has an indexer
        self.most = np.where(self.selects, calls["index_topk"], 0.0)  # compressed keys of a token, 0: all
        self.groups = calls.given("o_groups", np.maximum(1.0, heads / _GROUP))
        # columns that go into compressed keys: values and gates, of two windows where they overlap, and the indexer's
        wide = self.compresses * (1.0 + self.selects) * dim
        self.columns = 2 * (wide + self.selects * 2 * calls["index_dim"])
        self.down = calls["q_rank"] + dim + self.columns + self.selects * calls["index_heads"]
        self.up = heads * dim + self.selects * calls["index_heads"] * calls["index_dim"]


def _small(gpu: Gpu, calls: Calls, tokens: Array, sizes: _Compression) -> Work:
    heads, selects = calls["q_heads"], sizes.selects
    index_bytes = selects * calls["index_heads"] * calls["index_dim"] * 5.0  # in 16 bits, rotated and out in 8
    kernels = _SMALL_KERNELS + sizes.compresses * _COMPRESS_KERNELS + selects * (_COMPRESS_KERNELS + _INDEX_KERNELS)
    return small_kernels(
        gpu,
        calls,
        tokens,
        normed=calls["q_rank"] + (heads + 1) * calls["head_dim"],
        rotated=(2 * heads + 1) * calls["rope_dim"],
        kept=calls["head_dim"],
        kernels=kernels,
        moved_bytes=sizes.columns * _STATE_BYTES + index_bytes,
    )


class BlockSparseLayer(AttentionLayer):
    """Layer of MiniMax M3: grouped-query attention over blocks of keys that an indexer selects."""

    op = "block_sparse_layer"
    family = "sparse_attention"
    examples = (
        {"batch": 64, "q_len": 1, "kv_len": 65536, "q_heads": 64, "kv_heads": 4},
        {"batch": 1, "q_len": 4096, "kv_len": 4096, "q_heads": 16, "kv_heads": 1, "dtype": "fp8_block"},
    )
    trailing_parameters = ("causal", "page_size", "kv_dtype", "backend", "fused")

    hidden: int = size("hidden size of the model", default=6144, high=1 << 20)
    kv_heads: int = size("KV heads on this rank", high=65536)
    head_dim: int = size("head dimension", default=128, high=4096)
    index_heads: int | None = size("indexer heads on this rank, default: kv_heads", default=None, high=4096)
    index_dim: int = size("dimension of an index key", default=128, high=4096)
    block_size: int = size("tokens per block", default=128, high=65536)
    topk_blocks: int = size("blocks selected per token, the local block included", default=16, high=65536)

    @classmethod
    def heads(cls, calls: Calls) -> Heads:
        return Heads(calls["q_heads"], calls["kv_heads"], calls["head_dim"], calls["head_dim"])

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        return head_conflicts(calls) or super().conflicts(calls)

    @classmethod
    def projected_flops(cls, calls: Calls) -> Array:
        return 2 * calls["hidden"] * (_joint(calls) + calls["q_heads"] * calls["head_dim"])

    @classmethod
    def attended_flops(cls, calls: Calls) -> Array:
        requests = RequestBatch.of(calls)
        most = requests.each(calls["topk_blocks"] * calls["block_size"])
        pairs, chosen = (requests.total(seen_pairs(requests, x)) for x in (0.0, most))
        indexed = _index_heads(calls) * calls["index_dim"] * pairs
        return 2 * (2 * calls["q_heads"] * calls["head_dim"] * chosen + indexed)

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        return super().shape_features(calls, gpu) | {"log_kv_heads": np.log2(calls["kv_heads"])}

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        requests, block = RequestBatch.of(calls), calls["block_size"]
        tokens, heads, dim = requests.total(requests.queries), calls["q_heads"], calls["head_dim"]
        rotated = heads + calls["kv_heads"] + _index_heads(calls) + 1
        kept = 2 * calls["kv_heads"] * dim + calls["index_dim"]
        return (
            *projection(gpu, calls, tokens, _joint(calls), calls["hidden"]),
            small_kernels(gpu, calls, tokens, normed=rotated * dim, rotated=rotated * dim / 2, kept=kept, kernels=1.0),
            _scored_blocks(gpu, calls, requests),
            topk_keys(gpu, requests, calls["topk_blocks"], block),
            *_attended_blocks(gpu, calls, requests, cls.heads(calls)),
            *projection(gpu, calls, tokens, calls["hidden"], heads * dim),
        )


def _index_heads(calls: Calls) -> Array:
    return calls.given("index_heads", calls["kv_heads"])


def _joint(calls: Calls) -> Array:
    """Columns of the fused product for queries, keys, values and the indexer."""
    index = (_index_heads(calls) + 1) * calls["index_dim"]
    return (calls["q_heads"] + 2 * calls["kv_heads"]) * calls["head_dim"] + index


def _scored_blocks(gpu: Gpu, calls: Calls, requests: RequestBatch) -> Work:
    """Scores of all keys; only the best of each block is written. In SGLang's prefill one CTA loops over all keys."""
    walked = (requests.most(requests.queries) > _DECODED) & (calls.choice("stack") == "sglang")
    walk_cycles = np.where(walked, _WALK_CYCLES, 0.0)
    work = key_scores(gpu, requests, _index_heads(calls), calls["index_dim"], walk_cycles=walk_cycles)
    written = requests.total(seen_pairs(requests)) * SCORE_BYTES
    kept = np.asarray(work.activation_bytes) - written * (1 - 1 / calls["block_size"])
    return replace(work, activation_bytes=np.maximum(kept, 0.0))


def _attended_blocks(gpu: Gpu, calls: Calls, requests: RequestBatch, heads: Heads) -> Works:
    """MiniMax's kernel reads a block of keys once for as many prefill tokens as a tile has rows, and adds up each
    token's partial results."""
    work, *after = gathered_attention(
        gpu, attention_view(calls, gpu), requests, heads, calls["topk_blocks"] * calls["block_size"]
    )
    if calls.choice("backend") != MSA:
        return work, *after
    sharing = np.minimum(_TILE_ROWS * heads.kv / heads.queries, requests.least(requests.queries))
    sharing = np.maximum(sharing, 1.0)
    parts = calls["topk_blocks"] * (heads.queries / heads.kv) * heads.v_dim * SCORE_BYTES * (sharing > 1)
    return replace(work, l2_bytes=work.l2_bytes / sharing + parts, smem_bytes=work.smem_bytes / sharing), *after
