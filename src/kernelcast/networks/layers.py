"""The parts of one layer: frozen values that know their own weights.

``weights(hidden)`` counts every stored number of a part (matrices, biases, and the norms that belong to it), so that
a sum over parts is the parameter count that a checkpoint holds. Widths are per model, before any cut over GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kernelcast.errors import KernelcastError

NormKind = Literal["rmsnorm", "layernorm"]
# head: one weight vector of head_dim for q and one for k; full: over all heads together (OLMoE);
# unweighted: a plain L2 norm (Llama 4), which costs time but has no weights
QkNorm = Literal["none", "head", "full", "unweighted"]


def norm_weights(kind: NormKind, width: int) -> int:
    """A layernorm has a scale and a shift, an rmsnorm only a scale."""
    return width if kind == "rmsnorm" else 2 * width


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
    rotary_dim: int = 0  # numbers of each head that rope turns; 0 without rope
    output_gate: bool = False  # q_proj also yields a gate as wide as the queries (Qwen3-Next)
    sinks: bool = False  # one learned logit a head joins the softmax (gpt-oss)
    softcap: bool = False  # scores pass through tanh (Gemma 2), which rules out some kernels

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
        """Numbers that one token leaves in the KV cache of this layer."""
        return 2 * self.kv_width

    @property
    def qkv_width(self) -> int:
        """Columns of the joint q, k, v projection (with the gate where there is one)."""
        return self.q_width * (2 if self.output_gate else 1) + 2 * self.kv_width

    def weights(self, hidden: int) -> int:
        matrices = hidden * (self.qkv_width + self.q_width)
        biases = (self.qkv_width if self.qkv_bias else 0) + (hidden if self.out_bias else 0)
        norms = {"head": 2 * self.head_dim, "full": self.q_width + self.kv_width}.get(self.qk_norm, 0)
        return matrices + biases + norms + (self.q_heads if self.sinks else 0)


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values share one low-rank latent."""

    q_heads: int
    q_lora_rank: int | None  # None: queries are projected in one step (V2-Lite)
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_values_per_token(self) -> int:
        """The latent and the one rotated key that all heads share."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def weights(self, hidden: int) -> int:
        q_width = self.q_heads * self.qk_head_dim
        if self.q_lora_rank is None:
            query = hidden * q_width
        else:  # down, norm, up
            query = hidden * self.q_lora_rank + self.q_lora_rank + self.q_lora_rank * q_width
        down = hidden * (self.kv_lora_rank + self.qk_rope_head_dim) + self.kv_lora_rank
        up = self.kv_lora_rank * self.q_heads * (self.qk_nope_head_dim + self.v_head_dim)
        return query + down + up + self.q_heads * self.v_head_dim * hidden


@dataclass(frozen=True)
class LinearAttention:
    """Gated delta net (Qwen3-Next): a recurrent state in place of a KV cache."""

    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int
    cache_values_per_token: ClassVar[int] = 0
    state_dtype: str = "fp32"  # Qwen3.5's mamba_ssm_dtype and SGLang's default; vLLM's default is the model's own

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise KernelcastError(
                f"{self.value_heads} value heads do not divide over {self.key_heads} key heads; "
                "linear_num_value_heads has to be a multiple of linear_num_key_heads"
            )

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_head_dim

    @property
    def conv_channels(self) -> int:
        """q, k and v pass through one depthwise convolution."""
        return 2 * self.key_width + self.value_width

    @property
    def in_width(self) -> int:
        """Columns of the input projections: q, k, v, the output gate z, and beta and alpha of each value head."""
        return self.conv_channels + self.value_width + 2 * self.value_heads

    @property
    def state_values(self) -> int:
        """Numbers kept for a sequence whatever its length: one key_head_dim x value_head_dim matrix a value head, and
        the inputs that the convolution still needs."""
        recurrent = self.value_heads * self.key_head_dim * self.value_head_dim
        return recurrent + self.conv_channels * (self.conv_width - 1)

    def weights(self, hidden: int) -> int:
        decay = 2 * self.value_heads  # A_log and dt_bias
        conv = self.conv_channels * self.conv_width
        return hidden * self.in_width + conv + decay + self.value_head_dim + self.value_width * hidden


@dataclass(frozen=True)
class Dense:
    """A feed-forward block: up (and gate), activation, down."""

    inter: int
    gated: bool
    activation: str
    bias: bool = False

    @property
    def up_width(self) -> int:
        """Columns of the first projection: gate and up side by side, or up alone."""
        return self.inter * (2 if self.gated else 1)

    def weights(self, hidden: int) -> int:
        return hidden * (self.up_width + self.inter) + (self.up_width + hidden if self.bias else 0)

    def active_weights(self, hidden: int) -> int:
        return self.weights(hidden)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: a router sends each token to ``topk`` of ``experts`` blocks, and to the shared one."""

    experts: int
    topk: int
    inter: int
    gated: bool
    activation: str
    shared_inter: int = 0  # width of all shared experts together; 0: none
    shared_gate: bool = False  # a sigmoid of one column weighs the shared experts (Qwen)
    bias: bool = False  # on the experts' own projections (gpt-oss)
    router_bias: bool = False  # one number an expert: router bias, or DeepSeek-V3's balancing correction

    def __post_init__(self) -> None:
        if self.topk > self.experts:
            raise KernelcastError(
                f"each token asks for {self.topk} of {self.experts} experts; "
                "num_experts_per_tok has to be at most the number of experts"
            )

    @property
    def expert(self) -> Dense:
        """One routed expert."""
        return Dense(self.inter, self.gated, self.activation, self.bias)

    @property
    def shared(self) -> Dense | None:
        """The shared experts, run as one block."""
        return Dense(self.shared_inter, self.gated, self.activation) if self.shared_inter else None

    def _always(self, hidden: int) -> int:
        router = hidden * self.experts + (self.experts if self.router_bias else 0)
        shared = self.shared.weights(hidden) if self.shared else 0
        return router + shared + (hidden if self.shared_gate else 0)

    def weights(self, hidden: int) -> int:
        return self._always(hidden) + self.experts * self.expert.weights(hidden)

    def active_weights(self, hidden: int) -> int:
        """What one token uses."""
        return self._always(hidden) + self.topk * self.expert.weights(hidden)


@dataclass(frozen=True)
class Norms:
    """The norms over the hidden width in one layer: 2 in most models, 4 in Gemma."""

    kind: NormKind
    count: int

    def weights(self, hidden: int) -> int:
        return self.count * norm_weights(self.kind, hidden)


@dataclass(frozen=True)
class Layer:
    """One block: a mixer over tokens, then a feed-forward part."""

    attention: SelfAttention | Mla | LinearAttention
    mlp: Dense | Experts
    norms: Norms


@dataclass(frozen=True)
class LayerRun:
    """``count`` layers of the same kind, one after another."""

    count: int
    layer: Layer
