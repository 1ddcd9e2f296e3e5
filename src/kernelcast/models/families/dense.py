"""Model types without experts: llama and its like, Gemma, and the older ones with learned positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kernelcast.models.families.base import (
    FOUR_NORMS,
    FULL,
    LAYERNORMS,
    SLIDING,
    Family,
    attention,
    dense,
    experts,
    hidden_size,
    layer_count,
    plain_attention,
    plain_dense,
    with_windows,
    without_rope,
)
from kernelcast.models.fields import Fields
from kernelcast.models.layers import Dense, Mlp, Norms, SelfAttention


def one_window(f: Fields) -> SelfAttention:
    """Mistral and Phi-3: sliding_window, where set, holds in every layer; Mistral's class has one unless it is null."""
    key = "sliding_window"
    window = f.count_or_null(key) if f.model_type == "mistral" else f.count_or_none(key)
    return replace(attention(f, qkv_bias=False, out_bias=False), window=window)


def qwen_windows(f: Fields, base: SelfAttention) -> SelfAttention | Sequence[SelfAttention]:
    """Qwen files name a sliding_window that holds only with use_sliding_window, and only from max_window_layers on."""
    if not f.flag("use_sliding_window"):
        return base
    first = f.count("max_window_layers", least=0)
    return with_windows(f, base, lambda i: i >= first)


def qwen2(f: Fields) -> SelfAttention | Sequence[SelfAttention]:
    bias = f.flag("qkv_bias") if f.model_type == "qwen2_moe" else True
    return qwen_windows(f, attention(f, qkv_bias=bias, out_bias=False))


def qwen3(f: Fields) -> SelfAttention | Sequence[SelfAttention]:
    return qwen_windows(f, attention(f, qk_norm="head"))


def _gemma2(f: Fields) -> list[SelfAttention]:
    base = replace(attention(f), softcap=f.value("attn_logit_softcapping") is not None)
    return with_windows(f, base, lambda i: i % 2 == 0)


def _gemma3(f: Fields) -> list[SelfAttention]:
    every = f.count("_sliding_window_pattern", "sliding_window_pattern")
    return with_windows(f, attention(f, qk_norm="head"), lambda i: (i + 1) % every != 0)


def _gemma4(f: Fields) -> list[SelfAttention]:
    """Layers without a window have heads of their own size; their values may be the keys (attention_k_eq_v)."""
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
    types = f.layer_types(layer_count(f), (SLIDING, FULL))
    sliding = [kind == SLIDING for kind in types] if types else [(i + 1) % 6 != 0 for i in range(layer_count(f))]
    found = [local if slide else full for slide in sliding[:-1]] + [full]  # the last is full whatever the list says
    own = layer_count(f) - f.count("num_kv_shared_layers", least=0)
    return found[:own] + [replace(layer, borrows=True) for layer in found[own:]]


def _gemma4_mlp(f: Fields) -> Mlp | Sequence[Mlp]:
    """Experts stand beside the dense block, which then counts as the shared expert. Layers that borrow keys and values
    may have a block of twice the width."""
    if not f.flag("enable_moe_block"):
        narrow, borrowing = dense(f), f.count("num_kv_shared_layers", least=0)
        wide = replace(narrow, inter=narrow.inter * (2 if f.flag("use_double_wide_mlp") else 1))
        return [narrow] * (layer_count(f) - borrowing) + [wide] * borrowing
    block = experts(f, "moe_intermediate_size", shared_inter=f.count("intermediate_size"))
    return replace(block, router_scales=hidden_size(f) + block.experts)  # a scale a channel, and one an expert


def _gemma4_norms(f: Fields) -> Norms:
    return Norms("rmsnorm", 7) if f.flag("enable_moe_block") else FOUR_NORMS


def _olmo2(f: Fields) -> SelfAttention:
    return attention(f, qk_norm="full")


def _olmo3(f: Fields) -> list[SelfAttention]:
    return with_windows(f, attention(f, qk_norm="full"), lambda i: (i + 1) % 4 != 0)


def _smollm3(f: Fields) -> Sequence[SelfAttention]:
    """Every fourth layer has no rope; in spite of its name, 1 marks a layer with rope."""
    base, layers = attention(f), layer_count(f)
    if f.flag("use_sliding_window"):
        raise f.refuse("'use_sliding_window' is true; SmolLM3 is supported without windows only")
    rope = f.whole_numbers("no_rope_layers") or tuple(
        int((i + 1) % f.count("no_rope_layer_interval") != 0) for i in range(layers)
    )
    if len(rope) != layers:
        raise f.refuse(f"'no_rope_layers' has {len(rope)} entries; num_hidden_layers asks for {layers}")
    return [base if turned else without_rope(base) for turned in rope]


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


def _plain(f: Fields) -> Dense:
    """OPT, GPT-2, BERT: up, activation, down. GPT-2's n_inner is 4 x hidden unless the file says otherwise."""
    if f.model_type == "gpt2":
        inter = f.count_or_none("n_inner") or 4 * hidden_size(f)
    else:
        inter = f.count("ffn_dim" if f.model_type == "opt" else "intermediate_size")
    bias = f.flag("enable_bias") if f.model_type == "opt" else True
    return Dense(inter, gated=False, activation=f.activation("activation_function", "hidden_act"), bias=bias)


FAMILIES: dict[str, Family] = {
    "bert": Family(learned_positions, _plain, LAYERNORMS, kind="encoder", rows_before=0),
    # one norm, whose output both halves read; they run one after the other all the same
    "cohere2": Family(_cohere2, plain_dense, Norms("layernorm", 1, shift=False)),
    "gemma2": Family(_gemma2, plain_dense, FOUR_NORMS),
    "gemma3_text": Family(_gemma3, plain_dense, FOUR_NORMS),
    "gemma4_text": Family(_gemma4, _gemma4_mlp, _gemma4_norms),
    "gpt2": Family(learned_positions, _plain, LAYERNORMS, rows_before=0),
    "granite": Family(plain_attention, plain_dense),
    "llama": Family(plain_attention, plain_dense),
    "ministral3": Family(one_window, plain_dense),
    "mistral": Family(one_window, plain_dense),
    "olmo2": Family(_olmo2, plain_dense),
    "olmo3": Family(_olmo3, plain_dense),
    "opt": Family(learned_positions, _plain, LAYERNORMS, rows_before=2),
    "phi3": Family(one_window, plain_dense),
    "qwen2": Family(qwen2, plain_dense),
    "qwen3": Family(qwen3, plain_dense),
    "smollm3": Family(_smollm3, plain_dense),
}
