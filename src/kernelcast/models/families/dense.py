"""Model types without experts: llama-like models, Gemma, and the older ones with learned positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from kernelcast.models.fields import (
    FOUR_NORMS,
    LAYERNORMS,
    Family,
    Fields,
    attention,
    dense,
    experts,
    hidden_size,
    layer_count,
    rope_layers,
    sliding_layers,
    with_windows,
    without_rope,
)
from kernelcast.models.layers import Dense, Mlp, Norms, SelfAttention


def uniform_window(f: Fields) -> SelfAttention:
    """Mistral and Phi-3: sliding_window, where set, is of every layer; Mistral's class has one unless it is null."""
    key = "sliding_window"
    window = f.count_or_null(key) if f.model_type == "mistral" else f.count_or_none(key)
    return replace(attention(f, qkv_bias=False, out_bias=False), window=window)


def _qwen(f: Fields, base: SelfAttention) -> SelfAttention | Sequence[SelfAttention]:
    """The sliding_window of a Qwen file applies only with use_sliding_window, and only from max_window_layers on."""
    if not f.flag("use_sliding_window"):
        return base
    first = f.count("max_window_layers", least=0)
    return with_windows(f, base, lambda i: i >= first)


def qwen2(f: Fields) -> SelfAttention | Sequence[SelfAttention]:
    bias = f.flag("qkv_bias") if f.model_type == "qwen2_moe" else True
    return _qwen(f, attention(f, qkv_bias=bias, out_bias=False))


def qwen3(f: Fields) -> SelfAttention | Sequence[SelfAttention]:
    return _qwen(f, attention(f, qk_norm="head"))


def _gemma2(f: Fields) -> list[SelfAttention]:
    base = replace(attention(f), softcap=f.value("attn_logit_softcapping") is not None)
    return with_windows(f, base, lambda i: i % 2 == 0)


def _gemma3(f: Fields) -> list[SelfAttention]:
    every = f.count("_sliding_window_pattern", "sliding_window_pattern")
    return with_windows(f, attention(f, qk_norm="head"), lambda i: (i + 1) % every != 0)


def _gemma4(f: Fields) -> list[SelfAttention]:
    """Layers without a window have heads of another size; their values may be the keys (attention_k_eq_v)."""
    if f.count("hidden_size_per_layer_input", least=0):
        raise f.refuse("'hidden_size_per_layer_input' is set; embeddings for each layer are not supported")
    local = replace(attention(f, qk_norm="head", rotary_fraction=1.0), window=f.count("sliding_window"))
    shared = f.flag("attention_k_eq_v")
    wide = f.count("global_head_dim")
    full = replace(
        local,
        window=None,
        head_dim=wide,
        kv_heads=(f.count_or_none("num_global_key_value_heads") if shared else None) or local.kv_heads,
        values_are_keys=shared,
        rotary_dim=wide // 4,  # the class's share of full_attention's rope
    )
    sliding = sliding_layers(f, lambda i: (i + 1) % 6 != 0)
    layers = [local if slides else full for slides in sliding[:-1]] + [full]  # the last is full whatever the list says
    unshared = layer_count(f) - f.count("num_kv_shared_layers", least=0)
    return layers[:unshared] + [replace(layer, shares_kv=True) for layer in layers[unshared:]]


def _gemma4_mlp(f: Fields) -> Mlp | Sequence[Mlp]:
    """Experts run beside the dense block, which then counts as the shared expert. Layers that share keys and values
    may have a block of twice the width."""
    if not f.flag("enable_moe_block"):
        narrow, sharing = dense(f), f.count("num_kv_shared_layers", least=0)
        wide = replace(narrow, inter=narrow.inter * (2 if f.flag("use_double_wide_mlp") else 1))
        return [narrow] * (layer_count(f) - sharing) + [wide] * sharing
    block = experts(f, shared_inter=f.count("intermediate_size"))
    return replace(block, router_scales=hidden_size(f) + block.experts)  # a scale a channel, and one an expert


def _olmo3(f: Fields) -> list[SelfAttention]:
    return with_windows(f, attention(f, qk_norm="full"), lambda i: (i + 1) % 4 != 0)


def _smollm3(f: Fields) -> Sequence[SelfAttention]:
    """Every fourth layer has no rope."""
    if f.flag("use_sliding_window"):
        raise f.refuse("'use_sliding_window' is true; SmolLM3 is supported without windows only")
    base = attention(f)
    return [base if rope else without_rope(base) for rope in rope_layers(f)]


def _cohere2(f: Fields) -> list[SelfAttention]:
    """Layers without a window have no rope."""
    every = f.count("sliding_window_pattern")
    layers = with_windows(f, attention(f), lambda i: (i + 1) % every != 0)
    return [layer if layer.window else without_rope(layer) for layer in layers]


def learned_positions(f: Fields) -> SelfAttention:
    """OPT, GPT-2, BERT: as many key as query heads, a bias everywhere, no rope."""
    heads = f.count("num_attention_heads", "n_head")
    if hidden_size(f) % heads:
        raise f.refuse(f"hidden size {hidden_size(f)} does not divide over {heads} heads")
    bias = f.flag("enable_bias") if f.model_type == "opt" else True
    return SelfAttention(heads, heads, hidden_size(f) // heads, qkv_bias=bias, out_bias=bias, rope=False)


def _nemotron_mlp(f: Fields) -> Dense:
    return Dense(f.count("intermediate_size"), gated=False, activation=f.activation("hidden_act"))


def _ungated(f: Fields) -> Dense:
    """OPT, GPT-2, BERT: up, activation, down. GPT-2's n_inner is 4 x hidden unless the file says otherwise."""
    if f.model_type == "gpt2":
        inter = f.count_or_none("n_inner") or 4 * hidden_size(f)
    else:
        inter = f.count("ffn_dim" if f.model_type == "opt" else "intermediate_size")
    bias = f.flag("enable_bias") if f.model_type == "opt" else True
    return Dense(inter, gated=False, activation=f.activation("activation_function", "hidden_act"), bias=bias)


FAMILIES: dict[str, Family] = {
    "bert": Family(learned_positions, _ungated, LAYERNORMS, architecture="encoder", position_offset=0),
    # one norm, whose output attention and the feed-forward part read; they run one after the other all the same
    "cohere2": Family(_cohere2, dense, Norms("layernorm", 1, shift=False)),
    "gemma2": Family(_gemma2, dense, FOUR_NORMS),
    "gemma3_text": Family(_gemma3, dense, FOUR_NORMS),
    "gemma4_text": Family(
        _gemma4, _gemma4_mlp, lambda f: Norms("rmsnorm", 7) if f.flag("enable_moe_block") else FOUR_NORMS
    ),
    "gpt2": Family(learned_positions, _ungated, LAYERNORMS, position_offset=0),
    "granite": Family(attention, dense),
    "llama": Family(attention, dense),
    "ministral3": Family(uniform_window, dense),
    "mistral": Family(uniform_window, dense),
    "nemotron": Family(partial(attention, rotary_fraction=0.5), _nemotron_mlp, LAYERNORMS),
    "olmo2": Family(partial(attention, qk_norm="full"), dense),
    "olmo3": Family(_olmo3, dense),
    "opt": Family(learned_positions, _ungated, LAYERNORMS, position_offset=2),
    "phi3": Family(uniform_window, dense),
    "qwen2": Family(qwen2, dense),
    "qwen3": Family(qwen3, dense),
    "roberta": Family(learned_positions, _ungated, LAYERNORMS, architecture="encoder", position_offset=0),
    "smollm3": Family(_smollm3, dense),
    "xlm-roberta": Family(learned_positions, _ungated, LAYERNORMS, architecture="encoder", position_offset=0),
}
