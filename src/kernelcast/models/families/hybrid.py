"""Model types whose layers mix attention with a recurrent state: gated delta nets and Mamba-2."""

from __future__ import annotations

from dataclasses import replace

from kernelcast.models.families.sparse import qwen_experts
from kernelcast.models.fields import (
    FULL,
    LINEAR,
    ONE_NORM,
    Family,
    Fields,
    attention,
    dense,
    experts,
    hidden_size,
    layer_count,
    without_rope,
)
from kernelcast.models.layers import Dense, Experts, Layer, LinearAttention, Mamba2, Mixer, Mlp, Parallel, SelfAttention

# the letters of hybrid_override_pattern, and what transformers and older files call the same
_BLOCKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_SYNONYMS = {LINEAR: "mamba", FULL: "attention"}


def _qwen3_next(f: Fields) -> list[Mixer]:
    full = replace(attention(f, qk_norm="head", rotary_fraction=0.25), output_gate=f.flag("attn_output_gate"))
    sizes = f.counts(
        key_heads="linear_num_key_heads",
        value_heads="linear_num_value_heads",
        key_head_dim="linear_key_head_dim",
        value_head_dim="linear_value_head_dim",
        conv_width="linear_conv_kernel_dim",
    )
    linear = LinearAttention(**sizes, state_dtype=f.state_dtype("mamba_ssm_dtype"))
    layers, every = layer_count(f), f.count("full_attention_interval")
    types = f.layer_types(layers, (LINEAR, FULL))
    types = types or tuple(FULL if (i + 1) % every == 0 else LINEAR for i in range(layers))
    return [full if name == FULL else linear for name in types]


def _last_full(f: Fields, layers: list[Layer]) -> list[Layer]:
    """A layer for multi-token prediction attends to all tokens."""
    return [next(layer for layer in reversed(layers) if isinstance(layer.attention, SelfAttention))]


# ---- Nemotron-H: each layer is a mixer or a feed-forward part


def _blocks(f: Fields, pattern_key: str, list_key: str) -> list[str]:
    """The type of each layer, from a list of names or a string of letters."""
    pattern, names = f.value(pattern_key), f.value(list_key)
    if isinstance(names, list):
        blocks = [_SYNONYMS.get(str(name), str(name)) for name in names]
    elif isinstance(pattern, str):
        blocks = [_BLOCKS.get(letter, letter) for letter in pattern]
    else:
        raise f.refuse(f"{pattern_key!r} or {list_key!r} is missing; the model's full config.json has it")
    for name in blocks:
        if name not in _BLOCKS.values():
            raise f.refuse(f"layer type {name!r} is not supported; supported here: {', '.join(_BLOCKS.values())}")
    return blocks


def _nemotron_blocks(f: Fields) -> list[str]:
    blocks = _blocks(f, "hybrid_override_pattern", "layers_block_type")
    if len(blocks) != layer_count(f):
        raise f.refuse(f"the pattern of layers has {len(blocks)} entries; num_hidden_layers is {layer_count(f)}")
    return blocks


def _nemotron_mixer(f: Fields, block: str) -> Mixer | None:
    """Attention has no rope and no biases: the state-space layers encode positions."""
    if block == "attention":
        return without_rope(attention(f, qkv_bias=False, out_bias=False))
    if block != "mamba":
        return None
    sizes = f.counts(
        heads="mamba_num_heads",
        head_dim="mamba_head_dim",
        groups="n_groups, mamba_num_groups",
        state="ssm_state_size, mamba_state_dim",
        conv_width="conv_kernel",
        chunk="chunk_size",
    )
    bias = {"conv_bias": f.flag("use_conv_bias"), "proj_bias": f.flag("use_bias")}
    return Mamba2(**sizes, **bias, state_dtype=f.state_dtype("mamba_ssm_cache_dtype"))


def _nemotron_mlp(f: Fields, block: str) -> Mlp | None:
    """Up, squared relu, down; experts alike, some in a narrower width (moe_latent_size)."""
    activation = f.activation("mlp_hidden_act")
    if block == "mlp":
        return Dense(f.count("intermediate_size"), gated=False, activation=activation, bias=f.flag("mlp_bias"))
    if block != "moe":
        return None
    return Experts(
        experts=f.count("n_routed_experts"),
        topk=f.count("num_experts_per_tok"),
        inter=f.count("moe_intermediate_size"),
        gated=False,
        activation=activation,
        shared_inter=f.count("n_shared_experts", least=0) * f.count("moe_shared_expert_intermediate_size"),
        router_bias=True,
        scoring="sigmoid",
        latent=f.count_or_none("moe_latent_size") or 0,
    )


def _nemotron_mtp(f: Fields, layers: list[Layer]) -> list[Layer]:
    blocks = _blocks(f, "mtp_hybrid_override_pattern", "mtp_layers_block_type")
    return [Layer(_nemotron_mixer(f, block), _nemotron_mlp(f, block), ONE_NORM) for block in blocks]


# ---- Falcon-H1 and Granite 4


def _mamba(f: Fields, width: int, *, proj_bias: str, gated_norm: bool) -> Mamba2:
    """Keys as both write them; mamba_d_head may be "auto"."""
    heads = f.count("mamba_n_heads")
    head_dim = width // heads if f.value("mamba_d_head") == "auto" else f.count("mamba_d_head")
    if heads * head_dim != width:
        wanted = f"{width} ('mamba_d_ssm', or else 'mamba_expand' x hidden_size)"
        raise f.refuse(f"'mamba_n_heads' x 'mamba_d_head' is {heads} x {head_dim}; it has to be {wanted}")
    return Mamba2(
        heads=heads,
        head_dim=head_dim,
        **f.counts(groups="mamba_n_groups", state="mamba_d_state", conv_width="mamba_d_conv", chunk="mamba_chunk_size"),
        conv_bias=f.flag("mamba_conv_bias"),
        proj_bias=f.flag(proj_bias),
        gated_norm=gated_norm,
        state_dtype=f.state_dtype("mamba_ssm_dtype"),
    )


def _falcon_h1(f: Fields) -> Parallel:
    width = f.count_or_none("mamba_d_ssm") or f.count("mamba_expand") * hidden_size(f)
    if f.flag("mamba_proj_bias") != f.flag("projectors_bias"):
        raise f.refuse("'mamba_proj_bias' and 'projectors_bias' differ; supported alike only")
    mamba = _mamba(f, width, proj_bias="projectors_bias", gated_norm=f.flag("mamba_rms_norm"))
    return Parallel(attention(f), mamba)


def _granite4(f: Fields) -> list[Mixer]:
    """A list says which layers attend; with position_embedding_type other than rope they have no positions."""
    base, layers = attention(f), layer_count(f)
    base = base if f.value("position_embedding_type") == "rope" else without_rope(base)
    types = f.per_layer("layer_types", layers, ("mamba", "attention", LINEAR, FULL))
    attends = [_SYNONYMS.get(name, name) == "attention" for name in types]
    if all(attends):
        return [base] * layers
    width = f.count("mamba_expand") * hidden_size(f)
    mamba = _mamba(f, width, proj_bias="mamba_proj_bias", gated_norm=True)
    return [base if mark else mamba for mark in attends]


def _granite4_mlp(f: Fields) -> Mlp:
    """A dense block of shared_intermediate_size in every layer, beside experts where there are any."""
    if not f.count("num_local_experts", least=0):
        return dense(f, "shared_intermediate_size")
    return experts(f, "intermediate_size", shared_inter=f.count("shared_intermediate_size"))


FAMILIES: dict[str, Family] = {
    "falcon_h1": Family(_falcon_h1, dense),
    "granitemoehybrid": Family(_granite4, _granite4_mlp),
    "nemotron_h": Family(
        lambda f: [_nemotron_mixer(f, block) for block in _nemotron_blocks(f)],
        lambda f: [_nemotron_mlp(f, block) for block in _nemotron_blocks(f)],
        ONE_NORM,
        mtp_layers=_nemotron_mtp,
    ),
    "qwen3_5_moe_text": Family(_qwen3_next, qwen_experts, mtp_layers=_last_full),
    "qwen3_5_text": Family(_qwen3_next, dense, mtp_layers=_last_full),
    "qwen3_next": Family(_qwen3_next, qwen_experts, mtp_layers=_last_full),
}
