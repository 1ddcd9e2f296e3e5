"""Model types with experts behind ordinary attention."""

from __future__ import annotations

from dataclasses import replace

from kernelcast.models.families.base import (
    CHUNKED,
    FULL,
    Family,
    attention,
    dense,
    each_layer,
    experts,
    layer_count,
    with_windows,
)
from kernelcast.models.families.dense import one_window, qwen2, qwen3
from kernelcast.models.fields import Fields
from kernelcast.models.layers import BlockSparseAttention, Experts, Mlp, SelfAttention


def _gpt_oss(f: Fields) -> list[SelfAttention]:
    return with_windows(f, replace(attention(f), sinks=True), lambda i: i % 2 == 0)


def _glm4_moe(f: Fields) -> SelfAttention:
    """attention_bias is on q, k and v alone."""
    return attention(f, out_bias=False, qk_norm="head" if f.flag("use_qk_norm") else "none", rotary_fraction=0.5)


def _olmoe(f: Fields) -> SelfAttention:
    return attention(f, qk_norm="full")


def _dots1(f: Fields) -> SelfAttention:
    if f.count_or_none("sliding_window") and f.count("max_window_layers") < layer_count(f):
        raise f.refuse("'max_window_layers' is below num_hidden_layers; dots1 is supported without windows only")
    return attention(f, qk_norm="head")


def _hunyuan(f: Fields) -> SelfAttention:
    return attention(f, qk_norm="head" if f.flag("use_qk_norm") else "none")


def _ernie(f: Fields) -> SelfAttention:
    bias = f.flag("use_bias")
    return attention(f, qkv_bias=bias, out_bias=bias)


def _minimax_m2(f: Fields) -> SelfAttention:
    """A norm over all heads together; rotary_dim numbers of a head are turned."""
    if any(kind != 1 for kind in f.whole_numbers("attn_type_list")):
        raise f.refuse("'attn_type_list' has layers of other kinds than 1; linear attention is not supported here")
    found = attention(f, qkv_bias=False, out_bias=False, qk_norm="full" if f.flag("use_qk_norm") else "none")
    return replace(found, rotary_dim=f.count("rotary_dim"))


def _minimax_m3(f: Fields) -> list[SelfAttention | BlockSparseAttention]:
    """Keys of sparse_attention_config, as the published file has them, or transformers' own."""
    base = attention(f, qkv_bias=False, out_bias=False, qk_norm="head")
    base = replace(base, rotary_dim=f.count("rotary_dim"))
    own = f.inside("sparse_attention_config")
    sparse = BlockSparseAttention(
        base,
        index_heads=own.count("sparse_num_index_heads", "index_n_heads"),
        index_dim=own.count("sparse_index_dim", "index_head_dim"),
        block=own.count("sparse_block_size", "index_block_size"),
        topk_blocks=own.count("sparse_topk_blocks", "index_topk_blocks"),
        local_blocks=own.count("sparse_local_block", "index_local_blocks"),
    )
    layers = layer_count(f)
    types = f.layer_types(layers, ("minimax_m3_sparse", FULL))
    chosen = [kind != FULL for kind in types] if types else own.marks("sparse_attention_freq", layers)
    return [sparse if is_sparse else base for is_sparse in chosen]


def _llama4(f: Fields) -> list[SelfAttention]:
    """Layers with rope see their own chunk; the others, every fourth by default, see all and norm nothing."""
    base, layers = attention(f), layer_count(f)
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


def _all_experts(f: Fields) -> Experts:
    """Mixtral, OLMoE, gpt-oss: experts in every layer, as wide as intermediate_size."""
    return experts(f, "intermediate_size", bias=f.model_type == "gpt_oss")


def qwen_experts(f: Fields) -> list[Mlp]:
    shared = 0 if f.model_type == "qwen3_moe" else f.count("shared_expert_intermediate_size", least=0)
    block = experts(f, "moe_intermediate_size", shared_inter=shared, shared_gate=shared > 0)
    step, dense_at = f.count("decoder_sparse_step"), f.whole_numbers("mlp_only_layers")
    if step == 1 and not dense_at:  # a file may then leave the width of dense layers out (Qwen3.5)
        return [block] * layer_count(f)
    return each_layer(f, lambda i: (i + 1) % step == 0 and i not in dense_at, block)


def deepseek_experts(f: Fields) -> list[Mlp]:
    """DeepSeek, GLM, dots1: the first k layers are dense; all but V2 correct the router for balance."""
    shared = f.count("n_shared_experts", least=0) * f.count("moe_intermediate_size")
    block = experts(f, "moe_intermediate_size", shared_inter=shared)
    if f.model_type != "deepseek_v2":
        block = replace(block, router_bias=f.model_type != "mistral4", scoring=f.value("scoring_func") or "sigmoid")
    kinds = f.value("mlp_layer_types")
    if kinds is not None:
        marks = f.words("mlp_layer_types", layer_count(f), ("dense", "sparse"))
        return each_layer(f, lambda i: marks[i] == "sparse", block)
    first = f.count("first_k_dense_replace", least=0)
    every = f.count("moe_layer_freq")
    return each_layer(f, lambda i: i >= first and i % every == 0, block)


def _llama4_experts(f: Fields) -> list[Mlp]:
    """One shared expert as wide as a routed one; the dense layers between have a width of their own."""
    block = replace(experts(f, "intermediate_size", shared_inter=f.count("intermediate_size")), scoring="sigmoid")
    if f.value("moe_layers") is None:
        step = f.count("interleave_moe_layer_step")
        sparse = tuple(range(step - 1, layer_count(f), step))
    else:
        sparse = f.whole_numbers("moe_layers")
    return each_layer(f, lambda i: i in sparse, block, dense(f, "intermediate_size_mlp"))


def _minimax_experts(f: Fields) -> Experts:
    """Every layer; sigmoid scores with a correction for balance."""
    block = experts(f, "intermediate_size", shared_inter=f.count("shared_intermediate_size", least=0))
    return replace(block, router_bias=f.flag("use_routing_bias"), scoring=f.word("scoring_func"))


def _minimax_m3_experts(f: Fields) -> list[Mlp]:
    layers = layer_count(f)
    block = experts(f, "intermediate_size", shared_inter=f.count("shared_intermediate_size", least=0))
    block = replace(block, router_bias=True, scoring="sigmoid")
    if f.value("mlp_layer_types") is not None:
        marks = [kind == "sparse" for kind in f.words("mlp_layer_types", layers, ("dense", "sparse"))]
    else:
        marks = f.marks("moe_layer_freq", layers)
    return each_layer(f, lambda i: marks[i], block, dense(f, "dense_intermediate_size"))


def _ernie_experts(f: Fields) -> list[Mlp]:
    """From moe_layer_start_index to moe_layer_end_index (-1: the last), every moe_layer_interval-th."""
    wide = f.count("moe_intermediate_size")
    block = experts(f, "moe_intermediate_size", shared_inter=wide * f.count("moe_num_shared_experts", least=0))
    block = replace(block, router_bias=True)
    first, last = f.count("moe_layer_start_index", least=0), f.count("moe_layer_end_index", least=-1)
    last, every = layer_count(f) - 1 if last == -1 else last, f.count("moe_layer_interval")
    return each_layer(f, lambda i: first <= i <= last and (i + 1) % every == 0, block)


def _hunyuan_experts(f: Fields) -> Experts:
    """One shared block as wide as an expert, whatever num_shared_expert says of 1 (Tencent's own code)."""
    topk = f.same_everywhere("moe_topk")
    shared = f.same_everywhere("num_shared_expert") * f.count("intermediate_size")
    wide = f.same_everywhere("moe_intermediate_size") if f.value("moe_intermediate_size") else None
    return Experts(
        experts=f.count("num_experts"),
        topk=topk,
        inter=wide or f.count("intermediate_size"),
        gated=True,
        activation=f.activation("hidden_act"),
        shared_inter=shared,
    )


FAMILIES: dict[str, Family] = {
    "dots1": Family(_dots1, deepseek_experts),
    "ernie4_5_moe": Family(_ernie, _ernie_experts),
    "glm4_moe": Family(_glm4_moe, deepseek_experts),
    "gpt_oss": Family(_gpt_oss, _all_experts),
    "hunyuan_v1_moe": Family(_hunyuan, _hunyuan_experts),
    "llama4_text": Family(_llama4, _llama4_experts),
    "minimax_m2": Family(_minimax_m2, _minimax_experts),
    "minimax_m3_vl_text": Family(_minimax_m3, _minimax_m3_experts),
    "mixtral": Family(one_window, _all_experts),
    "olmoe": Family(_olmoe, _all_experts),
    "qwen2_moe": Family(qwen2, qwen_experts),
    "qwen3_moe": Family(qwen3, qwen_experts),
}
