"""A Hugging Face config.json -> Architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelcast.errors import KernelcastError, nearest
from kernelcast.networks.architecture import Architecture, run_lengths
from kernelcast.networks.families import FAMILIES, hidden_size, layer_count
from kernelcast.networks.fields import Fields
from kernelcast.networks.quantization import quantization

# a model with images around it: the key's text_config is of the value's type
WITH_TEXT_CONFIG = {"gemma3": "gemma3_text", "llama4": "llama4_text"}
SAME_AS = {"kimi_k2": "deepseek_v3"}  # the same layers under another name
SUPPORTED = tuple(sorted({*FAMILIES, *WITH_TEXT_CONFIG, *SAME_AS}))


def parse(config: Mapping[str, Any], name: str | None = None) -> Architecture:
    """Read a config with Hugging Face's key names; of a model with images, the text part."""
    if not isinstance(config, Mapping):
        raise KernelcastError(f"a model config has to be a JSON object; this is a {type(config).__name__}")
    f = _fields(config, name)
    family = FAMILIES[f.model_type]
    _check_variant(f)
    bert, norm = f.model_type == "bert", family.norms.kind
    max_context = f.count("max_position_embeddings", "n_positions")
    return Architecture(
        name=f.name,
        model_type=f.model_type,
        kind=family.kind,
        hidden=hidden_size(f),
        vocab=f.count("vocab_size"),
        layers=run_lengths(family.layers(f)),
        tied_embeddings=False if bert else f.flag("tie_word_embeddings"),
        max_context=max_context,
        final_norm=None if bert else norm,
        embedding_norm=norm if bert else None,
        learned_positions=0 if family.rows_before is None else max_context + family.rows_before,
        token_types=f.count("type_vocab_size") if bert else 0,
        head="pooler" if bert else "lm",
        quantization=quantization(f, stored) if (stored := config.get("quantization_config")) is not None else None,
    )


def _fields(config: Mapping[str, Any], name: str | None) -> Fields:
    """The fields that describe the text model, under the model_type that reads them."""
    label = name or config.get("_id") or config.get("_name_or_path") or "this model"
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise KernelcastError(f"config of {label!r} has no 'model_type'; supported: {', '.join(SUPPORTED)}")
    if model_type not in SUPPORTED:
        raise KernelcastError(
            f"config of {label!r}: model_type {model_type!r} is not supported{nearest(model_type, SUPPORTED)}; "
            f"supported: {', '.join(SUPPORTED)}"
        )
    if model_type in WITH_TEXT_CONFIG:
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise KernelcastError(f"config of {label!r} (model_type {model_type}): 'text_config' is missing")
        # the outer file may settle what the text part leaves open
        outer = {k: config[k] for k in ("tie_word_embeddings",) if config.get(k) is not None}
        return Fields({**outer, **text}, str(label), WITH_TEXT_CONFIG[model_type])
    return Fields(config, str(label), SAME_AS.get(model_type, model_type))


def _check_variant(f: Fields) -> None:
    """Refuse switches that change the layers in ways not modelled here."""
    layer_count(f)
    if f.model_type == "opt":
        projected = f.count_or_none("word_embed_proj_dim") or hidden_size(f)
        if projected != hidden_size(f):
            raise f.refuse(f"'word_embed_proj_dim' is {projected}; only hidden_size ({hidden_size(f)}) is supported")
        for key in ("do_layer_norm_before", "layer_norm_elementwise_affine"):
            if not f.flag(key):
                raise f.refuse(f"{key!r} is false; only true is supported")
    if f.model_type == "bert" and f.config.get("is_decoder"):
        raise f.refuse("'is_decoder' is true; BERT is supported as an encoder only")
