"""What readers of model types share: a family, and the usual blocks from the usual keys.

Every rule in this package is that of the model's class in transformers (src/transformers/models/<model_type>), which
is what gives a config.json its meaning; where transformers has no class, the reader says whose code it follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kernelcast.models.fields import Fields
from kernelcast.models.layers import (
    BlockResiduals,
    Dense,
    Experts,
    HyperConnections,
    Layer,
    Mixer,
    Mlp,
    Norms,
    QkNorm,
    SelfAttention,
)

SLIDING = "sliding_attention"
FULL = "full_attention"
LINEAR = "linear_attention"
CHUNKED = "chunked_attention"

RMSNORMS = Norms("rmsnorm", 2)
LAYERNORMS = Norms("layernorm", 2)
FOUR_NORMS = Norms("rmsnorm", 4)  # before and after both halves of a layer (Gemma)
ONE_NORM = Norms("rmsnorm", 1)  # a layer of one half

# files of these types may leave num_key_value_heads out: as many as query heads, by their config classes
KV_HEADS_AS_QUERY = ("llama", "olmo2", "olmo3", "olmoe", "phi3")
# head_dim of these types is not hidden / heads: it has to be in the file
OWN_HEAD_DIM = (
    "falcon_h1", "gemma2", "gemma3_text", "gemma4_text", "glm4_moe", "gpt_oss", "llama4_text", "minimax_m2",
    "minimax_m3_vl_text", "ministral3", "nemotron_h", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe",
    "qwen3_next",
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """The readers of one model_type: each returns a part that all layers share, or one for each layer."""

    mixer: Callable[[Fields], Mixer | Sequence[Mixer | None]]
    mlp: Callable[[Fields], Mlp | Sequence[Mlp | None]]
    norms: Norms | Callable[[Fields], Norms] = RMSNORMS
    kind: Literal["decoder", "encoder"] = "decoder"
    rows_before: int | None = None  # of a learned position table before position 0; None: rope
    residual: Callable[[Fields], HyperConnections | BlockResiduals | None] | None = None
    predicts: Callable[[Fields, list[Layer]], list[Layer]] | None = None  # a module's layers; None: one like the last

    def layers(self, f: Fields) -> list[Layer]:
        mixer, mlp, norms = self.mixer(f), self.mlp(f), self.layer_norms(f)
        mixers = mixer if isinstance(mixer, Sequence) else [mixer] * layer_count(f)
        mlps = mlp if isinstance(mlp, Sequence) else [mlp] * layer_count(f)
        return [Layer(*halves, norms) for halves in zip(mixers, mlps, strict=True)]

    def layer_norms(self, f: Fields) -> Norms:
        return self.norms if isinstance(self.norms, Norms) else self.norms(f)

    def prediction(self, f: Fields, layers: list[Layer]) -> tuple[int, list[Layer]]:
        """Modules that predict further tokens, and the layers of one."""
        keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
        count = next((f.count(key, least=0) for key in keys if f.value(key) is not None), 0)
        return count, (self.predicts(f, layers) if self.predicts else layers[-1:]) if count else []


def layer_count(f: Fields) -> int:
    return f.count("num_hidden_layers", "n_layer")


def hidden_size(f: Fields) -> int:
    return f.count("hidden_size", "n_embd")


def attention(
    f: Fields,
    *,
    qkv_bias: bool | None = None,
    out_bias: bool | None = None,
    qk_norm: QkNorm = "none",
    rotary_fraction: float = 1.0,
) -> SelfAttention:
    """Attention over all keys from the usual keys; attention_bias where the type does not say otherwise."""
    q_heads = f.count("num_attention_heads", "n_head")
    own = ("head_dim", "attention_head_dim") if f.model_type == "nemotron_h" else ("head_dim",)
    head_dim = f.count(*own) if f.model_type in OWN_HEAD_DIM else f.count_or_none("head_dim")
    if head_dim is None:
        if hidden_size(f) % q_heads:
            raise f.refuse(f"hidden_size {hidden_size(f)} does not divide over {q_heads} heads; give 'head_dim'")
        head_dim = hidden_size(f) // q_heads
    if f.model_type in KV_HEADS_AS_QUERY:
        kv_heads = f.count_or_none("num_key_value_heads") or q_heads
    else:
        kv_heads = f.count("num_key_value_heads")
    return SelfAttention(
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=f.flag("attention_bias") if qkv_bias is None else qkv_bias,
        out_bias=f.flag("attention_bias") if out_bias is None else out_bias,
        qk_norm=qk_norm,
        rotary_dim=round(head_dim * f.rotary_fraction(rotary_fraction)),
    )


def plain_attention(f: Fields) -> SelfAttention:
    return attention(f)


def without_rope(base: SelfAttention) -> SelfAttention:
    return replace(base, rope=False, rotary_dim=0)


def with_windows(f: Fields, base: SelfAttention, slides: Callable[[int], bool]) -> list[SelfAttention]:
    """``base`` in each layer, with the window where layer_types, or else ``slides(index)``, says so."""
    layers = layer_count(f)
    types = f.layer_types(layers, (SLIDING, FULL))
    sliding = [kind == SLIDING for kind in types] if types else [slides(i) for i in range(layers)]
    if not any(sliding):
        return [base] * layers
    local = replace(base, window=f.count("sliding_window"))
    return [local if slide else base for slide in sliding]


def dense(f: Fields, key: str = "intermediate_size") -> Dense:
    """The gated block of all llama-like models; few types have a switch for biases."""
    bias = f.flag("mlp_bias") if f.model_type in ("falcon_h1", "granite", "llama", "smollm3") else False
    return Dense(f.count(key), gated=True, activation=f.activation("hidden_activation", "hidden_act"), bias=bias)


def plain_dense(f: Fields) -> Dense:
    return dense(f)


def experts(f: Fields, inter_key: str, shared_inter: int = 0, shared_gate: bool = False, bias: bool = False) -> Experts:
    return Experts(
        experts=f.count("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        topk=f.count("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_k", "top_k_experts"),
        inter=f.count(inter_key),
        gated=True,
        activation=f.activation("hidden_activation", "hidden_act"),
        shared_inter=shared_inter,
        shared_gate=shared_gate,
        bias=bias,
        router_bias=bias,
    )


def each_layer(f: Fields, sparse: Callable[[int], bool], block: Experts, otherwise: Dense | None = None) -> list[Mlp]:
    """``block`` where ``sparse(index)``, a dense one elsewhere."""
    return [block if sparse(i) else (otherwise or dense(f)) for i in range(layer_count(f))]
