"""Model types with experts behind ordinary attention."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from kernelcast.models.families.dense import qwen2, qwen3, uniform_window
from kernelcast.models.fields import (
    CHUNKED,
    FULL,
    Family,
    Fields,
    attention,
    dense,
    experts,
    layer_count,
    moe_layers,
    rope_layers,
    with_windows,
)
from kernelcast.models.layers import BlockSparseAttention, Experts, Mlp, SelfAttention


def _gpt_oss(f: Fields) -> list[SelfAttention]:
    return with_windows(f, replace(attention(f), sinks=True), lambda i: i % 2 == 0)


def _dots1(f: Fields) -> SelfAttention:
    if f.count_or_none("sliding_window") and f.count("max_window_layers") < layer_count(f):
        raise f.refuse("'max_window_layers' is below num_hidden_layers; dots1 is supported without windows only")
    return attention(f, qk_norm="head")


def _minimax_m2(f: Fields) -> SelfAttention:
    """A norm over all heads together."""
    if any(number != 1 for number in f.integers("attn_type_list")):
        raise f.refuse("'attn_type_list' has layers of other types than 1; linear attention is not supported here")
    return attention(f, qkv_bias=False, out_bias=False, qk_norm="full", norm_key="use_qk_norm")


def _minimax_m3(f: Fields) -> list[SelfAttention | BlockSparseAttention]:
    """Keys of sparse_attention_config, as the published file has them, or transformers' own."""
    base = attention(f, qkv_bias=False, out_bias=False, qk_norm="head")
    nested = f.nested("sparse_attention_config")
    sizes = nested.counts(
        index_heads="sparse_num_index_heads, index_n_heads",
        index_dim="sparse_index_dim, index_head_dim",
        block="sparse_block_size, index_block_size",
        topk_blocks="sparse_topk_blocks, index_topk_blocks",
        local_blocks="sparse_local_block, index_local_blocks",
    )
    layers = layer_count(f)
    types = f.layer_types(layers, ("minimax_m3_sparse", FULL))
    marks = [name != FULL for name in types] if types else nested.flags_per_layer("sparse_attention_freq", layers)
    return [BlockSparseAttention(base, **sizes) if sparse else base for sparse in marks]


def _llama4(f: Fields) -> list[SelfAttention]:
    """Layers with rope see a chunk of tokens; the others, every fourth by default, see all and norm nothing."""
    base, rope = attention(f), rope_layers(f)
    types = f.layer_types(layer_count(f), (CHUNKED, FULL)) or tuple(CHUNKED if turned else FULL for turned in rope)
    chunk, norm = f.count("attention_chunk_size"), f.flag("use_qk_norm")
    return [
        replace(
            base,
            window=chunk if name == CHUNKED else None,
            chunked=name == CHUNKED,
            rope=turned,
            rotary_dim=base.rotary_dim if turned else 0,
            qk_norm="unweighted" if norm and turned else "none",
        )
        for name, turned in zip(types, rope, strict=True)
    ]


def _all_experts(f: Fields) -> Experts:
    """Mixtral, OLMoE, gpt-oss: experts in every layer, as wide as intermediate_size."""
    bias = f.model_type == "gpt_oss"
    return experts(f, "intermediate_size", bias=bias, router_bias=bias)


def qwen_experts(f: Fields) -> list[Mlp]:
    shared = 0 if f.model_type == "qwen3_moe" else f.count("shared_expert_intermediate_size", least=0)
    block = experts(f, shared_inter=shared, shared_gate=shared > 0)
    step, dense_layers = f.count("decoder_sparse_step"), f.integers("mlp_only_layers")
    return moe_layers(f, block, lambda i: (i + 1) % step == 0 and i not in dense_layers)


def first_dense(f: Fields, block: Experts) -> list[Mlp]:
    """The first k layers are dense, then every moe_layer_freq-th has experts."""
    return moe_layers(
        f, block, lambda i: i >= f.count("first_k_dense_replace", least=0) and i % f.count("moe_layer_freq") == 0
    )


def deepseek_experts(f: Fields) -> list[Mlp]:
    """DeepSeek, GLM, dots1: all but V2 correct the router for balance."""
    block = experts(f, shared_keys="n_shared_experts")
    if f.model_type == "deepseek_v2":
        block = replace(block, router_groups=f.count_or_none("n_group") or 1)
    else:
        block = replace(block, router_bias=f.model_type != "mistral4", scoring=f.value("scoring_func") or "sigmoid")
    return first_dense(f, block)


def _llama4_experts(f: Fields) -> list[Mlp]:
    """One shared expert as wide as a routed one; the dense layers between have another width."""
    block = experts(f, "intermediate_size", shared_inter=f.count("intermediate_size"), scoring="sigmoid")
    if f.value("moe_layers") is None:
        step = f.count("interleave_moe_layer_step")
        sparse = tuple(range(step - 1, layer_count(f), step))
    else:
        sparse = f.integers("moe_layers")
    return moe_layers(f, block, lambda i: i in sparse, dense(f, "intermediate_size_mlp"))


def _minimax_experts(f: Fields, **settings: Any) -> Experts:
    """Every layer; sigmoid scores with a correction for balance."""
    settings = settings or {"router_bias": f.flag("use_routing_bias"), "scoring": f.text("scoring_func")}
    return experts(f, "intermediate_size", shared_inter=f.count("shared_intermediate_size", least=0), **settings)


def _minimax_m3_experts(f: Fields) -> list[Mlp]:
    block = _minimax_experts(f, router_bias=True, scoring="sigmoid")
    marks = f.value("mlp_layer_types") or f.flags_per_layer("moe_layer_freq", layer_count(f))
    return moe_layers(f, block, lambda i: marks[i], dense(f, "dense_intermediate_size"))


def _ernie_experts(f: Fields) -> list[Mlp]:
    """Experts from moe_layer_start_index to moe_layer_end_index (-1: the last), in every moe_layer_interval-th
    layer."""
    block = experts(f, shared_keys="moe_num_shared_experts", router_bias=True)
    first, last = f.count("moe_layer_start_index", least=0), f.count("moe_layer_end_index", least=-1)
    last, every = layer_count(f) - 1 if last == -1 else last, f.count("moe_layer_interval")
    return moe_layers(f, block, lambda i: first <= i <= last and (i + 1) % every == 0)


def _hunyuan_experts(f: Fields) -> Experts:
    """One shared block, num_shared_expert times intermediate_size wide (as in Tencent's own code)."""
    wide = f.uniform_count("moe_intermediate_size") if f.value("moe_intermediate_size") else None
    return Experts(
        experts=f.count("num_experts"),
        topk=f.uniform_count("moe_topk"),
        inter=wide or f.count("intermediate_size"),
        gated=True,
        activation=f.activation("hidden_act"),
        shared_inter=f.uniform_count("num_shared_expert") * f.count("intermediate_size"),
    )


FAMILIES: dict[str, Family] = {
    "dots1": Family(_dots1, deepseek_experts),
    "ernie4_5_moe": Family(partial(attention, bias_key="use_bias"), _ernie_experts),
    "glm4_moe": Family(  # attention_bias is on q, k and v alone
        partial(attention, out_bias=False, qk_norm="head", norm_key="use_qk_norm", rotary_fraction=0.5),
        deepseek_experts,
    ),
    "gpt_oss": Family(_gpt_oss, _all_experts),
    "hunyuan_v1_moe": Family(partial(attention, qk_norm="head", norm_key="use_qk_norm"), _hunyuan_experts),
    "llama4_text": Family(_llama4, _llama4_experts),
    "minimax_m2": Family(_minimax_m2, _minimax_experts),
    "minimax_m3_vl_text": Family(_minimax_m3, _minimax_m3_experts),
    "mixtral": Family(uniform_window, _all_experts),
    "olmoe": Family(partial(attention, qk_norm="full"), _all_experts),
    "qwen2_moe": Family(qwen2, qwen_experts),
    "qwen3_moe": Family(qwen3, qwen_experts),
}
