"""How each model_type lays out its layers: one short reader for its attention, one for its feed-forward part.

Every rule here is that of the model's class in transformers (src/transformers/models/<model_type>), which is what
gives a config.json its meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kernelcast.networks.fields import Fields
from kernelcast.networks.layers import Dense, Experts, Layer, LinearAttention, Mla, Norms, QkNorm, SelfAttention

Mixer = SelfAttention | Mla | LinearAttention
Mlp = Dense | Experts

SLIDING = "sliding_attention"
FULL = "full_attention"
LINEAR = "linear_attention"
CHUNKED = "chunked_attention"

# files of these types may leave num_key_value_heads out: as many as query heads, by their config classes
KV_HEADS_AS_QUERY = ("llama", "olmoe", "phi3")
# head_dim of these types is not hidden / heads: it has to be in the file
OWN_HEAD_DIM = ("gemma2", "gemma3_text", "glm4_moe", "gpt_oss", "llama4_text", "qwen3", "qwen3_moe", "qwen3_next")

RMSNORMS = Norms("rmsnorm", 2)
LAYERNORMS = Norms("layernorm", 2)
FOUR_NORMS = Norms("rmsnorm", 4)  # before and after both halves of a layer (Gemma)


@dataclass(frozen=True)
class Family:
    """The readers of one model_type: each returns a part that all layers share, or one for each layer."""

    mixer: Callable[[Fields], Mixer | Sequence[Mixer]]
    mlp: Callable[[Fields], Mlp | Sequence[Mlp]]
    norms: Norms = RMSNORMS
    kind: Literal["decoder", "encoder"] = "decoder"
    rows_before: int | None = None  # of a learned position table before position 0; None: rope

    def layers(self, f: Fields) -> list[Layer]:
        mixer, mlp = self.mixer(f), self.mlp(f)
        mixers = mixer if isinstance(mixer, Sequence) else [mixer] * layer_count(f)
        mlps = mlp if isinstance(mlp, Sequence) else [mlp] * layer_count(f)
        return [Layer(*halves, self.norms) for halves in zip(mixers, mlps, strict=True)]


def layer_count(f: Fields) -> int:
    return f.count("num_hidden_layers", "n_layer")


def hidden_size(f: Fields) -> int:
    return f.count("hidden_size", "n_embd")


def _attention(
    f: Fields,
    *,
    qkv_bias: bool | None = None,
    out_bias: bool | None = None,
    qk_norm: QkNorm = "none",
    rotary_fraction: float = 1.0,
) -> SelfAttention:
    """Attention over all keys from the usual keys; attention_bias where the type does not say otherwise."""
    q_heads = f.count("num_attention_heads", "n_head")
    head_dim = f.count("head_dim") if f.model_type in OWN_HEAD_DIM else f.count_or_none("head_dim")
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


def _with_windows(f: Fields, base: SelfAttention, slides: Callable[[int], bool]) -> list[SelfAttention]:
    """``base`` in each layer, with the window where layer_types, or else ``slides(index)``, says so."""
    layers = layer_count(f)
    types = f.layer_types(layers, (SLIDING, FULL))
    sliding = [kind == SLIDING for kind in types] if types else [slides(i) for i in range(layers)]
    if not any(sliding):
        return [base] * layers
    local = replace(base, window=f.count("sliding_window"))
    return [local if slide else base for slide in sliding]


def _one_window(f: Fields) -> SelfAttention:
    """Mistral and Phi-3: sliding_window, where set, holds in every layer; Mistral's class has one unless it is null."""
    key = "sliding_window"
    window = f.count_or_null(key) if f.model_type == "mistral" else f.count_or_none(key)
    return replace(_attention(f, qkv_bias=False, out_bias=False), window=window)


def _qwen_windows(f: Fields, base: SelfAttention) -> SelfAttention | Sequence[SelfAttention]:
    """Qwen files name a sliding_window that holds only with use_sliding_window, and only from max_window_layers on."""
    if not f.flag("use_sliding_window"):
        return base
    first = f.count("max_window_layers", least=0)
    return _with_windows(f, base, lambda i: i >= first)


def _qwen2(f: Fields) -> SelfAttention | Sequence[SelfAttention]:
    bias = f.flag("qkv_bias") if f.model_type == "qwen2_moe" else True
    return _qwen_windows(f, _attention(f, qkv_bias=bias, out_bias=False))


def _qwen3(f: Fields) -> SelfAttention | Sequence[SelfAttention]:
    return _qwen_windows(f, _attention(f, qk_norm="head"))


def _qwen3_next(f: Fields) -> list[Mixer]:
    full = replace(_attention(f, qk_norm="head", rotary_fraction=0.25), output_gate=True)
    linear = LinearAttention(
        key_heads=f.count("linear_num_key_heads"),
        value_heads=f.count("linear_num_value_heads"),
        key_head_dim=f.count("linear_key_head_dim"),
        value_head_dim=f.count("linear_value_head_dim"),
        conv_width=f.count("linear_conv_kernel_dim"),
    )
    layers, every = layer_count(f), f.count("full_attention_interval")
    types = f.layer_types(layers, (LINEAR, FULL))
    types = types or tuple(FULL if (i + 1) % every == 0 else LINEAR for i in range(layers))
    return [full if kind == FULL else linear for kind in types]


def _gemma2(f: Fields) -> list[SelfAttention]:
    base = replace(_attention(f), softcap=f.value("attn_logit_softcapping") is not None)
    return _with_windows(f, base, lambda i: i % 2 == 0)


def _gemma3(f: Fields) -> list[SelfAttention]:
    every = f.count("_sliding_window_pattern", "sliding_window_pattern")
    return _with_windows(f, _attention(f, qk_norm="head"), lambda i: (i + 1) % every != 0)


def _gpt_oss(f: Fields) -> list[SelfAttention]:
    return _with_windows(f, replace(_attention(f), sinks=True), lambda i: i % 2 == 0)


def _glm4_moe(f: Fields) -> SelfAttention:
    """attention_bias is on q, k and v alone."""
    return _attention(f, out_bias=False, qk_norm="head" if f.flag("use_qk_norm") else "none", rotary_fraction=0.5)


def _olmoe(f: Fields) -> SelfAttention:
    return _attention(f, qk_norm="full")


def _llama4(f: Fields) -> list[SelfAttention]:
    """Layers with rope see their own chunk; the others, every fourth by default, see all and norm nothing."""
    base, layers = _attention(f), layer_count(f)
    rope = f.whole_numbers("no_rope_layers")  # in spite of its name, 1 marks a layer with rope
    if not rope:
        every = f.count("no_rope_layer_interval")
        rope = tuple(int((i + 1) % every != 0) for i in range(layers))
    if len(rope) != layers:
        raise f.refuse(f"'no_rope_layers' has {len(rope)} entries; num_hidden_layers asks for {layers}")
    types = f.layer_types(layers, (CHUNKED, FULL)) or tuple(CHUNKED if r else FULL for r in rope)
    chunk, norm = f.count("attention_chunk_size"), f.flag("use_qk_norm")
    return [
        replace(
            base,
            window=chunk if kind == CHUNKED else None,
            chunked=kind == CHUNKED,
            rope=bool(turned),
            rotary_dim=base.rotary_dim if turned else 0,
            qk_norm="unweighted" if norm and turned else "none",
        )
        for kind, turned in zip(types, rope, strict=True)
    ]


def _mla(f: Fields) -> Mla:
    if f.flag("attention_bias"):
        raise f.refuse("'attention_bias' is true; latent attention is supported without biases only")
    return Mla(
        q_heads=f.count("num_attention_heads"),
        q_lora_rank=f.count_or_null("q_lora_rank"),
        kv_lora_rank=f.count("kv_lora_rank"),
        qk_nope_head_dim=f.count("qk_nope_head_dim"),
        qk_rope_head_dim=f.count("qk_rope_head_dim"),
        v_head_dim=f.count("v_head_dim"),
    )


def _learned_positions(f: Fields) -> SelfAttention:
    """OPT, GPT-2, BERT: as many key as query heads, a bias everywhere, no rope."""
    heads = f.count("num_attention_heads", "n_head")
    if hidden_size(f) % heads:
        raise f.refuse(f"hidden size {hidden_size(f)} does not divide over {heads} heads")
    bias = f.flag("enable_bias") if f.model_type == "opt" else True
    return SelfAttention(heads, heads, hidden_size(f) // heads, qkv_bias=bias, out_bias=bias, rope=False)


def _dense(f: Fields, key: str = "intermediate_size") -> Dense:
    """The gated block of all llama-like models; only llama has a switch for biases."""
    bias = f.flag("mlp_bias") if f.model_type == "llama" else False
    return Dense(f.count(key), gated=True, activation=f.word("hidden_activation", "hidden_act"), bias=bias)


def _plain(f: Fields) -> Dense:
    """OPT, GPT-2, BERT: up, activation, down. GPT-2's n_inner is 4 x hidden unless the file says otherwise."""
    if f.model_type == "gpt2":
        inter = f.count_or_none("n_inner") or 4 * hidden_size(f)
    else:
        inter = f.count("ffn_dim" if f.model_type == "opt" else "intermediate_size")
    bias = f.flag("enable_bias") if f.model_type == "opt" else True
    return Dense(inter, gated=False, activation=f.word("activation_function", "hidden_act"), bias=bias)


def _experts(
    f: Fields, inter_key: str, shared_inter: int = 0, shared_gate: bool = False, bias: bool = False
) -> Experts:
    return Experts(
        experts=f.count("num_experts", "num_local_experts", "n_routed_experts"),
        topk=f.count("num_experts_per_tok", "experts_per_token"),
        inter=f.count(inter_key),
        gated=True,
        activation=f.word("hidden_act"),
        shared_inter=shared_inter,
        shared_gate=shared_gate,
        bias=bias,
        router_bias=bias,
    )


def _all_experts(f: Fields) -> Experts:
    """Mixtral, OLMoE, gpt-oss: experts in every layer, as wide as intermediate_size."""
    return _experts(f, "intermediate_size", bias=f.model_type == "gpt_oss")


def _qwen_experts(f: Fields) -> list[Mlp]:
    shared = 0 if f.model_type == "qwen3_moe" else f.count("shared_expert_intermediate_size", least=0)
    experts = _experts(f, "moe_intermediate_size", shared_inter=shared, shared_gate=shared > 0)
    step, dense_at = f.count("decoder_sparse_step"), f.whole_numbers("mlp_only_layers")
    sparse = [(i + 1) % step == 0 and i not in dense_at for i in range(layer_count(f))]
    return [experts if is_sparse else _dense(f) for is_sparse in sparse]


def _deepseek_experts(f: Fields) -> list[Mlp]:
    """DeepSeek and GLM-4.5: the first k layers are dense; V3 and GLM correct the router for balance."""
    shared = f.count("n_shared_experts", least=0) * f.count("moe_intermediate_size")
    experts = _experts(f, "moe_intermediate_size", shared_inter=shared)
    experts = replace(experts, router_bias=f.model_type != "deepseek_v2")
    first = f.count("first_k_dense_replace", least=0)
    every = 1 if f.model_type == "glm4_moe" else f.count("moe_layer_freq")
    return [experts if i >= first and i % every == 0 else _dense(f) for i in range(layer_count(f))]


def _llama4_experts(f: Fields) -> list[Mlp]:
    """One shared expert as wide as a routed one; the dense layers between have a width of their own."""
    experts = _experts(f, "intermediate_size", shared_inter=f.count("intermediate_size"))
    if f.value("moe_layers") is None:
        step = f.count("interleave_moe_layer_step")
        sparse = tuple(range(step - 1, layer_count(f), step))
    else:
        sparse = f.whole_numbers("moe_layers")
    return [experts if i in sparse else _dense(f, "intermediate_size_mlp") for i in range(layer_count(f))]


FAMILIES: dict[str, Family] = {
    "bert": Family(_learned_positions, _plain, LAYERNORMS, kind="encoder", rows_before=0),
    "deepseek_v2": Family(_mla, _deepseek_experts),
    "deepseek_v3": Family(_mla, _deepseek_experts),
    "gemma2": Family(_gemma2, _dense, FOUR_NORMS),
    "gemma3_text": Family(_gemma3, _dense, FOUR_NORMS),
    "glm4_moe": Family(_glm4_moe, _deepseek_experts),
    "gpt2": Family(_learned_positions, _plain, LAYERNORMS, rows_before=0),
    "gpt_oss": Family(_gpt_oss, _all_experts),
    "llama": Family(_attention, _dense),
    "llama4_text": Family(_llama4, _llama4_experts),
    "mistral": Family(_one_window, _dense),
    "mixtral": Family(_one_window, _all_experts),
    "olmoe": Family(_olmoe, _all_experts),
    "opt": Family(_learned_positions, _plain, LAYERNORMS, rows_before=2),
    "phi3": Family(_one_window, _dense),
    "qwen2": Family(_qwen2, _dense),
    "qwen2_moe": Family(_qwen2, _qwen_experts),
    "qwen3": Family(_qwen3, _dense),
    "qwen3_moe": Family(_qwen3, _qwen_experts),
    "qwen3_next": Family(_qwen3_next, _qwen_experts),
}
