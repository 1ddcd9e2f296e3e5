"""Model types with latent attention: DeepSeek and what follows it."""

from __future__ import annotations

from dataclasses import replace

from kernelcast.models.families.sparse import deepseek_experts, first_dense
from kernelcast.models.fields import FULL, LINEAR, RMSNORMS, Family, Fields, experts, layer_count
from kernelcast.models.layers import (
    BlockResiduals,
    CompressedAttention,
    HyperConnections,
    Indexer,
    Kda,
    LatentAttention,
    Layer,
    Mlp,
)

# DeepSeek-V4's layer types in transformers, and the ratio that each compresses by unless compress_rates says otherwise
_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def _mla(f: Fields) -> LatentAttention:
    if f.flag("attention_bias"):
        raise f.refuse("'attention_bias' is true; latent attention is supported without biases only")
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = f.counts(*names, q_heads="num_attention_heads")
    return LatentAttention(q_lora_rank=f.count_or_null("q_lora_rank"), **sizes)


def _indexer(f: Fields) -> Indexer:
    return Indexer(**f.counts(heads="index_n_heads", head_dim="index_head_dim", topk="index_topk"))


def _sparse_mla(f: Fields) -> list[LatentAttention]:
    """An indexer in every layer; in GLM-5.2 most layers take the selection of the last one that made it."""
    full = replace(_mla(f), indexer=_indexer(f))
    shared = replace(full, indexer=replace(_indexer(f), shared=True))
    layers, pattern = layer_count(f), f.value("index_topk_pattern")
    every, offset = f.count("index_topk_freq"), f.count("index_skip_topk_offset", least=0)
    if f.value("indexer_types") is not None:
        marks = [name == "full" for name in f.per_layer("indexer_types", layers, ("full", "shared"))]
    elif isinstance(pattern, str) and len(pattern) == layers and set(pattern) <= set("FS"):
        marks = [letter == "F" for letter in pattern]
    elif pattern is not None:
        raise f.refuse(f"'index_topk_pattern' is {pattern!r}; it has to be {layers} letters of F and S")
    else:
        marks = [max(i - offset + 1, 0) % every == 0 for i in range(layers)]
    return [full if mark else shared for mark in marks]


def _with_indexer(f: Fields, layers: list[Layer]) -> list[Layer]:
    return [replace(layers[-1], attention=_sparse_mla(f)[0])]


def _compressed(f: Fields, ratio: int) -> CompressedAttention:
    names = {"q_heads": "num_attention_heads", "rope_dim": "qk_rope_head_dim", "window": "sliding_window"}
    sizes = f.counts("head_dim", "q_lora_rank", "o_groups", "o_lora_rank", **names)
    sparse = ratio == _RATIOS["compressed_sparse_attention"]
    return CompressedAttention(**sizes, ratio=ratio, indexer=_indexer(f) if sparse else None)


def _deepseek_v4(f: Fields) -> list[CompressedAttention]:
    """compress_ratios of the published file (those of prediction layers at its end), or transformers' layer_types."""
    layers = layer_count(f)
    if f.value("num_key_value_heads") not in (None, 1):
        raise f.refuse(f"'num_key_value_heads' is {f.value('num_key_value_heads')}; DeepSeek-V4 has one")
    types = f.layer_types(layers, tuple(_RATIOS))
    ratios = [_RATIOS[name] for name in types] if types else list(f.integers("compress_ratios")[:layers])
    if len(ratios) != layers:
        raise f.refuse(f"'compress_ratios' has {len(ratios)} entries; num_hidden_layers is {layers}")
    for ratio in set(ratios) - set(_RATIOS.values()):
        raise f.refuse(f"'compress_ratios' has {ratio}; supported here: {', '.join(map(str, _RATIOS.values()))}")
    return [_compressed(f, ratio) for ratio in ratios]


def _deepseek_v4_experts(f: Fields) -> list[Mlp]:
    """Experts in every layer; in the first num_hash_layers a table of tokens routes to them."""
    block = experts(f, shared_keys="n_shared_experts", scoring=f.text("scoring_func"))
    hashed, scored = replace(block, hashed=True), replace(block, router_bias=True)
    layers = layer_count(f)
    if f.value("mlp_layer_types") is not None:
        marks = [name == "hash_moe" for name in f.per_layer("mlp_layer_types", layers, ("hash_moe", "moe"))]
    else:
        marks = [i < f.count("num_hash_layers", least=0) for i in range(layers)]
    return [hashed if mark else scored for mark in marks]


def _hyper_connections(f: Fields) -> HyperConnections:
    return HyperConnections(**f.counts(streams="hc_mult", sinkhorn_iterations="hc_sinkhorn_iters"))


def _window_alone(f: Fields, layers: list[Layer]) -> list[Layer]:
    """V4's layer for multi-token prediction compresses nothing (the last of compress_ratios)."""
    return [replace(layers[-1], attention=_compressed(f, 0))]


def _kimi_linear(f: Fields) -> list[LatentAttention | Kda]:
    """Kimi-Linear and Kimi-K3: three delta layers to one of latent attention, which has no rope."""
    nested = f.nested("linear_attn_config")
    sizes = nested.counts(
        heads="num_heads, linear_num_heads",
        head_dim="head_dim, linear_head_dim",
        conv_width="short_conv_kernel_size, linear_conv_kernel_dim",
    )
    full_rank = nested.value("use_full_rank_gate") is True
    delta = Kda(
        **sizes, gate_rank=None if full_rank else sizes["head_dim"], state_dtype=f.state_dtype("mamba_ssm_dtype")
    )
    latent = replace(_mla(f), rope=f.value("mla_use_nope") is False, output_gate=f.flag("mla_use_output_gate"))
    layers = layer_count(f)
    types = f.layer_types(layers, (LINEAR, FULL))
    if types:
        full = [i for i, name in enumerate(types, 1) if name == FULL]
    else:  # counted from 1
        full = list(nested.integers("full_attn_layers"))
        if sorted((*full, *nested.integers("kda_layers"))) != list(range(1, layers + 1)):
            raise f.refuse(f"'full_attn_layers' and 'kda_layers' have to name each of {layers} layers once")
    return [latent if i in full else delta for i in range(1, layers + 1)]


def _kimi_linear_experts(f: Fields) -> list[Mlp]:
    """Kimi-K3's experts work in a narrower width."""
    block = experts(
        f,
        shared_keys="num_shared_experts, n_shared_experts",
        router_bias=True,
        scoring=f.text("moe_router_activation_func"),
        latent=f.count_or_none("routed_expert_hidden_size") or 0,
        latent_norm=f.flag("latent_moe_use_norm"),
    )
    return first_dense(f, block)


def _block_residuals(f: Fields) -> BlockResiduals | None:
    layers = f.count_or_none("attn_res_block_size")
    return BlockResiduals(layers) if layers else None


FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(_mla, deepseek_experts),
    "deepseek_v3": Family(_mla, deepseek_experts),
    "deepseek_v32": Family(_sparse_mla, deepseek_experts, mtp_layers=_with_indexer),
    "deepseek_v4": Family(
        _deepseek_v4, _deepseek_v4_experts, RMSNORMS, residual=_hyper_connections, mtp_layers=_window_alone
    ),
    "glm4_moe_lite": Family(_mla, deepseek_experts),
    "glm_moe_dsa": Family(_sparse_mla, deepseek_experts, mtp_layers=_with_indexer),
    "kimi_linear": Family(_kimi_linear, _kimi_linear_experts, residual=_block_residuals),
    "mistral4": Family(_mla, deepseek_experts),
}
