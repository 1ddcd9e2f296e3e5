"""The parts of one layer: frozen values that know their weights.

``weights(hidden)`` counts every stored number of a part (matrices, biases, and the norms that belong to it), so that
a sum over parts is the parameter count that a checkpoint holds. Widths are of the whole model, before it is sharded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kernelcast.errors import KernelcastError
from kernelcast.models.attention import (
    BlockSparseAttention,
    CompressedAttention,
    Indexer,
    LatentAttention,
    QkNorm,
    SelfAttention,
)
from kernelcast.models.recurrent import Kda, LinearAttention, Mamba2, RecurrentMixer

__all__ = [
    "BlockResiduals", "BlockSparseAttention", "CompressedAttention", "Dense", "Experts", "HyperConnections", "Indexer",
    "Kda", "LatentAttention", "Layer", "LayerRun", "LinearAttention", "Mamba2", "Mixer", "Mlp", "NormOp", "Norms",
    "Parallel", "QkNorm", "RecurrentMixer", "SelfAttention", "norm_weights",
]  # fmt: skip

NormOp = Literal["rmsnorm", "layernorm"]


def norm_weights(norm: NormOp, width: int, shift: bool = True) -> int:
    """A layernorm has a scale and, mostly, a shift; an rmsnorm only a scale."""
    return 2 * width if norm == "layernorm" and shift else width


@dataclass(frozen=True)
class Parallel:
    """Attention and a state-space mixer side by side over the same input, their outputs added (Falcon-H1)."""

    attention: SelfAttention
    recurrent: Mamba2

    @property
    def cache_values_per_token(self) -> int:
        return self.attention.cache_values_per_token

    @property
    def state_values(self) -> int:
        return self.recurrent.state_values

    def cache_bytes(self, context_tokens: Any, value_bytes: float, tp: int) -> Any:
        return sum(mixer.cache_bytes(context_tokens, value_bytes, tp) for mixer in (self.attention, self.recurrent))

    def query_flops(self, keys: Any) -> Any:
        return self.attention.query_flops(keys) + self.recurrent.query_flops(keys)

    def weights(self, hidden: int) -> int:
        return self.attention.weights(hidden) + self.recurrent.weights(hidden)


Attention = SelfAttention | LatentAttention | CompressedAttention | BlockSparseAttention
Mixer = Attention | LinearAttention | Kda | Mamba2 | Parallel


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
    shared_gate: bool = False  # a sigmoid of one column scales the shared experts (Qwen)
    bias: bool = False  # on the experts' projections (gpt-oss)
    router_bias: bool = False  # one number an expert: router bias, or DeepSeek-V3's balancing correction
    latent: int = 0  # width that routed experts work in, between a projection down and one up; 0: the hidden size
    latent_norm: bool = False  # over their output, before the projection up (Kimi-K3)
    scoring: str = "softmax"  # of the router: softmax, sigmoid, sqrtsoftplus
    hashed: bool = False  # experts are looked up by token, not by score (DeepSeek-V4's first layers)
    router_groups: int = 0  # of experts, that a router without a bias chooses from first (DeepSeek-V2); 0: none
    router_scales: int = 0  # further numbers of the router: per-channel and per-expert scales (Gemma 4)

    def __post_init__(self) -> None:
        if self.topk > self.experts:
            raise KernelcastError(
                f"each token is routed to {self.topk} of {self.experts} experts; "
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

    def width(self, hidden: int) -> int:
        """Columns that enter and leave a routed expert."""
        return self.latent or hidden

    def expert_weights(self, hidden: int) -> int:
        """Weights of one routed expert."""
        return self.expert.weights(self.width(hidden))

    def _always(self, hidden: int) -> int:
        router = hidden * self.experts + (self.experts if self.router_bias else 0) + self.router_scales
        shared = self.shared.weights(hidden) if self.shared else 0
        latent = 2 * hidden * self.latent + (self.latent if self.latent_norm else 0)
        return router + shared + (hidden if self.shared_gate else 0) + latent

    def weights(self, hidden: int) -> int:
        return self._always(hidden) + self.experts * self.expert_weights(hidden)

    def active_weights(self, hidden: int) -> int:
        """Weights that one token uses."""
        return self._always(hidden) + self.topk * self.expert_weights(hidden)


Mlp = Dense | Experts


@dataclass(frozen=True)
class Norms:
    """The norms over the hidden width in one layer: 2 in most models, 4 in Gemma (before and after each sublayer), 7 in
    Gemma 4 with experts (beside a dense block, each with norms), 1 where a layer is one sublayer."""

    op: NormOp
    count: int
    shift: bool = True  # a layernorm's; Cohere's has a scale alone

    @property
    def behind(self) -> bool:
        """Whether the output of each sublayer is normed too."""
        return self.count >= 4

    def weights(self, hidden: int) -> int:
        return self.count * norm_weights(self.op, hidden, self.shift)


@dataclass(frozen=True)
class HyperConnections:
    """In place of a residual: ``streams`` of the hidden width, mixed before and after each sublayer by a small
    product of all of them, its matrix made doubly stochastic (mHC, arXiv 2512.24880)."""

    streams: int
    sinkhorn_iterations: int

    @property
    def mixes(self) -> int:
        """Columns of the product: into the sublayer, out of it, and between streams."""
        return (2 + self.streams) * self.streams

    def weights(self, hidden: int) -> int:
        """Weights of one sublayer: the product, its bias, three scales."""
        return self.mixes * self.streams * hidden + self.mixes + 3

    def last_weights(self, hidden: int) -> int:
        """Streams into one, before the last norm."""
        return self.streams * self.streams * hidden + self.streams + 1


@dataclass(frozen=True)
class BlockResiduals:
    """Each sublayer reads a softmax-weighted sum of the residual and of the output of every block of ``layers`` layers
    (Kimi-K3's attention residuals): a score of one column and a norm."""

    layers: int

    def weights(self, hidden: int) -> int:
        """Weights of one sublayer."""
        return 2 * hidden

    def last_weights(self, hidden: int) -> int:
        return 2 * hidden


@dataclass(frozen=True)
class Layer:
    """A token mixer, then a feed-forward part. One of them may be absent (Nemotron-H)."""

    attention: Mixer | None
    mlp: Mlp | None
    norms: Norms

    @property
    def sublayers(self) -> int:
        return (self.attention is not None) + (self.mlp is not None)


@dataclass(frozen=True)
class LayerRun:
    """``count`` equal layers, one after another."""

    count: int
    layer: Layer
