"""A Hugging Face config.json -> Architecture."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kernelcast.errors import KernelcastError, nearest
from kernelcast.models.architecture import Architecture, run_lengths
from kernelcast.models.families import FAMILIES
from kernelcast.models.fields import Fields, hidden_size, layer_count
from kernelcast.models.precision import quantization
from kernelcast.models.vision import read_vision

# multimodal models: the key's text_config is of the value's type, or of the type that it names
WITH_TEXT_CONFIG = {
    "gemma3": "gemma3_text", "gemma4": "gemma4_text", "kimi_k25": "deepseek_v3", "kimi_k3": "kimi_linear",
    "llama4": "llama4_text", "minimax_m3_vl": "minimax_m3_vl_text", "mistral3": "mistral", "qwen2_5_vl": "qwen2",
    "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe",
}  # fmt: skip
ROBERTA = ("roberta", "xlm-roberta")  # BERT with other positions
SAME_AS = {"kimi_k2": "deepseek_v3"}  # the same layers under another name
SUPPORTED = tuple(sorted({*FAMILIES, *WITH_TEXT_CONFIG, *SAME_AS}))

_BARE = re.compile(r"(?!.*Head).*Model")  # classes without a head; not GPT2LMHeadModel
# parts of a field's name that hint at other layers
_HINTS = re.compile(r"moe|expert|lora|conv|ssm|index|window|compress|hyper|latent|sparse")
# fields with such names that change no kernel: of training, of tokens, of how a router's scores are scaled
_HARMLESS = re.compile(
    r".*(token_index|token_id|loss|_coef|_multipliers?|dropout|jitter|_dtype|overlap|_init|initializer).*"
    r"|ignore_index|norm_topk_prob|moe_renormalize|moe_norm_min|num_expert_group|index_share_for_mtp_iteration"
    r"|indexer_rope_interleave|expert_dtype|moe_router_(topk_scaling_factor|enable_expert_bias)|n_group"
    r"|use_mamba_kernels|convert_.*|use_expert_bias|mtp_.*|num_mtp_modules|sliding_window|max_window_layers"
    r"|.*_layer_index|swiglu_limit"
)


def parse(config: Mapping[str, Any], name: str | None = None) -> Architecture:
    """Read a config with Hugging Face's key names; of a multimodal model, the vision encoder too where it is known."""
    if not isinstance(config, Mapping):
        raise KernelcastError(f"a model config has to be a JSON object; this is a {type(config).__name__}")
    f = _fields(config, name)
    family = FAMILIES[f.model_type]
    _check_variant(f)
    bert, norms, layers = family.architecture == "encoder", family.layer_norms(f), family.layers(f)
    positions = f.count("max_position_embeddings", "n_positions", "model_max_length")
    # RoBERTa's positions begin after pad_token_id, 1; its files count the rows before them too
    max_context = positions - 2 if f.model_type in ROBERTA else positions
    mtp_layers, mtp_module = family.mtp(f, layers)
    stored = config.get("quantization_config", f.value("quantization_config"))
    return Architecture(
        name=f.name,
        model_type=f.model_type,
        kind=family.architecture,
        hidden=hidden_size(f),
        vocab=f.count("vocab_size"),
        layers=run_lengths(layers),
        tied_embeddings=False if bert else f.flag("tie_word_embeddings"),
        max_context=max_context,
        final_norm=None if bert else norms.op,
        embedding_norm=norms.op if bert else None,
        learned_positions=0 if family.position_offset is None else positions + family.position_offset,
        token_types=f.count("type_vocab_size") if bert else 0,
        head="pooler" if bert else "none" if _headless(config) else "lm",
        quantization=quantization(f, stored) if stored is not None else None,
        norm_shift=norms.shift,
        residual=family.residual(f) if family.residual else None,
        vision=read_vision(config, f.name, hidden_size(f)),
        mtp_layers=mtp_layers,
        mtp_module=run_lengths(mtp_module),
        unread=_unread(f),
    )


def _fields(config: Mapping[str, Any], name: str | None) -> Fields:
    """The fields that describe the text model, under the model_type that reads them."""
    label = str(name or config.get("_id") or config.get("_name_or_path") or "this model")
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise KernelcastError(f"config of {label!r} has no 'model_type'; supported: {', '.join(SUPPORTED)}")
    if model_type not in SUPPORTED:
        raise _unknown_type(config, label, model_type)
    if model_type not in WITH_TEXT_CONFIG:
        return Fields(config, label, SAME_AS.get(model_type, model_type))
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        if "hidden_size" not in config:
            raise KernelcastError(f"config of {label!r} (model_type {model_type}): 'text_config' is missing")
        text = config  # older files have the fields of the text model at the top level
    text_type = text.get("model_type") if model_type == "mistral3" else None  # whose text models are of several types
    if text_type is not None and text_type not in FAMILIES:
        raise _unknown_type(text, label, str(text_type))
    # the outer file may set what text_config leaves out
    outer = {k: config[k] for k in ("tie_word_embeddings",) if config.get(k) is not None}
    return Fields({**outer, **text}, label, text_type or WITH_TEXT_CONFIG[model_type])


def _unknown_type(config: Mapping[str, Any], label: str, model_type: str) -> KernelcastError:
    """The error for an unknown model_type: the nearest known types, by name and by fields."""
    text = config.get("text_config")
    fields = {key: value for key, value in (text if isinstance(text, Mapping) else config).items() if key[:1] != "_"}
    alike = _alike(fields)
    hinting = sorted(key for key, value in fields.items() if _hints(key, value))
    message = f"config of {label!r}: model_type {model_type!r} is not supported{nearest(model_type, SUPPORTED)}"
    if alike and not hinting:
        message += f"; its fields are those of {alike!r}: set model_type to that to have it forecast so"
    elif alike:
        message += f"; nearest by its fields is {alike!r}, but parameters cannot be counted: "
        message += f"{', '.join(hinting)} may mean other layers"
    else:
        message += "; its fields are of no supported type, so parameters cannot be counted"
    return KernelcastError(f"{message}; supported: {', '.join(SUPPORTED)}")


def _alike(fields: Mapping[str, Any]) -> str | None:
    """The type that reads these fields without a complaint and leaves the fewest of them unread."""
    readable: list[tuple[int, int, str]] = []
    for number, model_type in enumerate(("llama", *FAMILIES)):
        f = Fields(fields, "", model_type)
        try:
            FAMILIES[model_type].layers(f)
        except KernelcastError:
            continue
        unread = sum(key not in f.read and bool(value) for key, value in fields.items())
        readable.append((unread, number, model_type))
    return min(readable)[2] if readable else None


def _hints(key: str, value: Any) -> bool:
    set_to_something = value not in (None, False, 0, 0.0, "", [], {}) and value != -1
    return bool(set_to_something and _HINTS.search(key) and not _HARMLESS.fullmatch(key))


def _unread(f: Fields) -> tuple[str, ...]:
    return tuple(key for key, value in f.config.items() if key not in f.read and key[:1] != "_" and _hints(key, value))


def _headless(config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint is of the class without a head (Qwen3Model, MistralModel): an embedding model."""
    classes = config.get("architectures")
    return isinstance(classes, list) and bool(classes) and all(_BARE.fullmatch(str(name)) for name in classes)


def _check_variant(f: Fields) -> None:
    """Refuse switches that change the layers in ways not modelled here."""
    layer_count(f)
    f.check_rope()
    if f.model_type == "opt":
        projected = f.count_or_none("word_embed_proj_dim") or hidden_size(f)
        if projected != hidden_size(f):
            raise f.refuse(f"'word_embed_proj_dim' is {projected}; only hidden_size ({hidden_size(f)}) is supported")
        for key in ("do_layer_norm_before", "layer_norm_elementwise_affine"):
            if not f.flag(key):
                raise f.refuse(f"{key!r} is false; only true is supported")
    if f.model_type in ("bert", *ROBERTA) and f.config.get("is_decoder"):
        raise f.refuse("'is_decoder' is true; BERT is supported as an encoder only")
