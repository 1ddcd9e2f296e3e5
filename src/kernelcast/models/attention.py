"""Token mixers that attend: frozen values that know their weights and their cache.

``cache_bytes`` is what one sequence occupies on one of ``tp`` GPUs: keys and values in the format of the KV cache
(``value_bytes`` each), and what has another format. ``query_flops``: of scores and values of one token's queries with
``keys`` tokens before them, on all GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from kernelcast.errors import KernelcastError

# head: one weight vector of head_dim for q and one for k; full: over all heads together (OLMoE);
# unweighted: a plain L2 norm (Llama 4), which costs time but has no weights
QkNorm = Literal["none", "head", "full", "unweighted"]

_FP8_BLOCK = 128  # values that share one fp32 scale in an indexer's fp8 keys (DeepSeek-V3.2's inference/kernel.py)
_PARTIAL_BYTES = 4.0  # a compressor sums in fp32 (DeepSeek-V4's inference/model.py)


@dataclass(frozen=True)
class SelfAttention:
    """Softmax attention with grouped heads."""

    q_heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None  # most keys that a query sees; None: all before it
    chunked: bool = False  # the window is a fixed chunk that does not slide (Llama 4)
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QkNorm = "none"
    rope: bool = True
    rotary_dim: int = 0  # of each head that rope rotates; 0 without rope
    output_gate: bool = False  # q_proj also yields a gate as wide as the queries (Qwen3-Next)
    sinks: bool = False  # one learned logit a head joins the softmax (gpt-oss)
    softcap: bool = False  # scores pass through tanh (Gemma 2), which rules out some kernels
    values_are_keys: bool = False  # no v_proj: values are the keys before their norm and rope (Gemma 4)
    shares_kv: bool = False  # reads the keys and values of an earlier layer (Gemma 4)

    def __post_init__(self) -> None:
        if self.q_heads % self.kv_heads:
            raise KernelcastError(
                f"{self.q_heads} query heads do not divide over {self.kv_heads} key-value heads; "
                "num_attention_heads has to be a multiple of num_key_value_heads"
            )

    @property
    def q_width(self) -> int:
        return self.q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def cache_values_per_token(self) -> int:
        """Numbers of one token in the KV cache of this layer."""
        return 0 if self.shares_kv else 2 * self.kv_width

    @property
    def qkv_width(self) -> int:
        """Columns of the joint q, k, v projection (with the gate where there is one)."""
        kv = 0 if self.shares_kv else 1 if self.values_are_keys else 2
        return self.q_width * (2 if self.output_gate else 1) + kv * self.kv_width

    def cache_bytes(self, context_tokens: Any, value_bytes: float, tp: int) -> Any:
        """Heads are sharded over tp until each GPU has one."""
        cached = np.minimum(context_tokens, self.window) if self.window else context_tokens
        return self.cache_values_per_token * cached / min(tp, self.kv_heads) * value_bytes

    def query_flops(self, keys: Any) -> Any:
        return 4.0 * self.q_width * (np.minimum(keys, self.window) if self.window else keys)

    def weights(self, hidden: int) -> int:
        matrices = hidden * (self.qkv_width + self.q_width)
        biases = (self.qkv_width if self.qkv_bias else 0) + (hidden if self.out_bias else 0)
        keys = 0 if self.shares_kv else 1
        norms = {"head": (1 + keys) * self.head_dim, "full": self.q_width + keys * self.kv_width}.get(self.qk_norm, 0)
        return matrices + biases + norms + (self.q_heads if self.sinks else 0)


@dataclass(frozen=True)
class Indexer:
    """Selects keys in DeepSeek sparse attention (V3.2): small heads score every key, ``topk`` are attended."""

    heads: int
    head_dim: int
    topk: int
    shared: bool = False  # no weights or keys: the selection of the last layer that made one (GLM-5.2)

    @property
    def key_bytes(self) -> float:
        """One key that all heads share, in fp8 with its scales whatever the KV cache's format: 132 bytes of 128."""
        return 0.0 if self.shared else self.head_dim + 4.0 * -(-self.head_dim // _FP8_BLOCK)

    def query_flops(self, keys: Any) -> Any:
        """Every key is scored."""
        return 2.0 * self.heads * self.head_dim * keys

    def weights(self, hidden: int, q_lora_rank: int) -> int:
        """wq_b, wk with its layernorm, weights_proj."""
        if self.shared:
            return 0
        keys = hidden * self.head_dim + 2 * self.head_dim
        return q_lora_rank * self.heads * self.head_dim + keys + hidden * self.heads


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values share one low-rank latent."""

    q_heads: int
    q_lora_rank: int | None  # None: queries are projected in one step (V2-Lite)
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    indexer: Indexer | None = None  # queries see its topk keys only
    rope: bool = True  # False: qk_rope_head_dim stays, not rotated (Kimi-Linear)
    output_gate: bool = False  # g_proj: a gate as wide as the values of all heads (Kimi-K3)

    def __post_init__(self) -> None:
        if self.indexer and self.q_lora_rank is None:
            raise KernelcastError("an indexer reads the queries' latent; 'q_lora_rank' has to be a number")

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_values_per_token(self) -> int:
        """The latent and the one rotated key that all heads share."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def cache_bytes(self, context_tokens: Any, value_bytes: float, tp: int) -> Any:
        """A latent is not sharded: every GPU has it, and the indexer's keys."""
        index_bytes = self.indexer.key_bytes if self.indexer else 0.0
        return context_tokens * (self.cache_values_per_token * value_bytes + index_bytes)

    def query_flops(self, keys: Any) -> Any:
        """With the keys and values of all heads, as the model is written; kernels that absorb them do more."""
        each = 2.0 * self.q_heads * (self.qk_head_dim + self.v_head_dim)
        if self.indexer is None:
            return each * keys
        return each * np.minimum(keys, self.indexer.topk) + self.indexer.query_flops(keys)

    def weights(self, hidden: int) -> int:
        q_width, v_width = self.q_heads * self.qk_head_dim, self.q_heads * self.v_head_dim
        if self.q_lora_rank is None:
            query = hidden * q_width
        else:  # down, norm, up
            query = hidden * self.q_lora_rank + self.q_lora_rank + self.q_lora_rank * q_width
        down = hidden * (self.kv_lora_rank + self.qk_rope_head_dim) + self.kv_lora_rank
        up = self.kv_lora_rank * self.q_heads * (self.qk_nope_head_dim + self.v_head_dim)
        gate = hidden * v_width if self.output_gate else 0
        index = self.indexer.weights(hidden, self.q_lora_rank or 0) if self.indexer else 0
        return query + down + up + v_width * hidden + gate + index


@dataclass(frozen=True)
class CompressedAttention:
    """DeepSeek-V4: one key-value head (values are the keys) over a window, and over compressed keys behind it.

    ``ratio`` tokens become one compressed key, a softmax-weighted sum: 4 with an indexer that chooses among them and
    windows that overlap (CSA), 128 without (HCA), 0: the window alone. Queries come from a latent; the output is
    projected in ``o_groups`` groups of heads to ``o_lora_rank`` each, then to the hidden width.
    """

    q_heads: int
    head_dim: int
    rope_dim: int  # at the end of each head; the output is rotated back
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window: int
    ratio: int = 0
    indexer: Indexer | None = None
    sinks: bool = True
    kv_heads: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.q_heads % self.o_groups:
            raise KernelcastError(f"{self.q_heads} heads do not divide over 'o_groups' {self.o_groups}")

    @property
    def series(self) -> int:
        """Windows of a compressor: two where they overlap."""
        return 2 if self.indexer else 1

    @property
    def cache_values_per_token(self) -> int:
        """Values of compressed keys; the window is cached beside them, once."""
        return self.head_dim // self.ratio if self.ratio else 0

    @property
    def state_values(self) -> int:
        """Partial sums and their weights, in fp32: of the compressor and of the indexer's."""
        width = self.head_dim + (self.indexer.head_dim if self.indexer else 0)
        return 2 * self.series * self.ratio * self.series * width

    def cache_bytes(self, context_tokens: Any, value_bytes: float, tp: int) -> Any:
        """Not sharded over tp: there is one key-value head."""
        window = np.minimum(context_tokens, self.window) * self.head_dim * value_bytes
        if not self.ratio:
            return window
        each = self.head_dim * value_bytes + (self.indexer.key_bytes if self.indexer else 0.0)
        return window + context_tokens // self.ratio * each + self.state_values * _PARTIAL_BYTES

    def query_flops(self, keys: Any) -> Any:
        compressed = keys // self.ratio if self.ratio else 0
        scored = self.indexer.query_flops(compressed) if self.indexer else 0.0
        chosen = np.minimum(compressed, self.indexer.topk) if self.indexer else compressed
        return 4.0 * self.q_heads * self.head_dim * (np.minimum(keys, self.window) + chosen) + scored

    def _compressor(self, hidden: int, width: int) -> int:
        """kv and gate projections, the bias of each position in the window, and a norm."""
        return self.series * width * (2 * hidden + self.ratio) + width

    def weights(self, hidden: int) -> int:
        q_width, o_width = self.q_heads * self.head_dim, self.o_groups * self.o_lora_rank
        query = hidden * self.q_lora_rank + self.q_lora_rank + self.q_lora_rank * q_width
        keys = hidden * self.head_dim + self.head_dim
        out = q_width // self.o_groups * o_width + o_width * hidden
        total = query + keys + out + (self.q_heads if self.sinks else 0)
        total += self._compressor(hidden, self.head_dim) if self.ratio else 0
        if self.indexer:
            heads, dim = self.indexer.heads, self.indexer.head_dim
            total += self._compressor(hidden, dim) + self.q_lora_rank * heads * dim + hidden * heads
        return total


@dataclass(frozen=True)
class BlockSparseAttention:
    """MiniMax-M3: small heads score every key; each key-value head's queries attend the best blocks of keys only."""

    dense: SelfAttention  # projections, heads and cache, as without the selection
    index_heads: int
    index_dim: int
    block: int  # keys
    topk_blocks: int
    local_blocks: int  # of those, always the nearest

    @property
    def q_heads(self) -> int:
        return self.dense.q_heads

    @property
    def kv_heads(self) -> int:
        return self.dense.kv_heads

    @property
    def head_dim(self) -> int:
        return self.dense.head_dim

    @property
    def cache_values_per_token(self) -> int:
        """Keys, values, and the one key of the index heads."""
        return self.dense.cache_values_per_token + self.index_dim

    def cache_bytes(self, context_tokens: Any, value_bytes: float, tp: int) -> Any:
        """Every GPU has the index key, in the KV cache's format."""
        index = context_tokens * self.index_dim * value_bytes
        return self.dense.cache_bytes(context_tokens, value_bytes, tp) + index

    def query_flops(self, keys: Any) -> Any:
        chosen = np.minimum(keys, self.topk_blocks * self.block)
        return self.dense.query_flops(chosen) + 2.0 * self.index_heads * self.index_dim * keys

    def weights(self, hidden: int) -> int:
        """Weights of dense attention, and q and k of the index heads with their norms."""
        return self.dense.weights(hidden) + hidden * (self.index_heads + 1) * self.index_dim + 2 * self.index_dim
