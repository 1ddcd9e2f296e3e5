"""A Hugging Face config as a model on meta tensors: the class that its ``architectures`` names, else what transformers
knows of its ``model_type``."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from kernelcast.errors import KernelcastError
from kernelcast.tracing.cuda_like import gpu_present
from kernelcast.tracing.where import line_of

if TYPE_CHECKING:
    from kernelcast.tracing.build import Asked

_SEQUENCES = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")  # an encoder and a decoder
_SINGLE = (
    "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "IMAGE_CLASSIFICATION", "CTC", "AUDIO_CLASSIFICATION", "SEMANTIC_SEGMENTATION",
    "OBJECT_DETECTION", "VIDEO_CLASSIFICATION", "DEPTH_ESTIMATION",
)  # fmt: skip
_FORMATS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def transformers_here() -> Any:
    """The library, quiet; or what to install."""
    if importlib.util.find_spec("transformers") is None:
        raise KernelcastError("tracing a Hugging Face config needs transformers: pip install 'kernelcast[torch]'")
    import transformers

    transformers.logging.set_verbosity_error()  # it speaks of losses, not of errors
    return transformers


def own_format(raw: Mapping[str, Any]) -> str | None:
    """The format that a config says its weights are in."""
    told = raw.get("dtype") or raw.get("torch_dtype") or raw.get("text_config", {}).get("torch_dtype")
    return _FORMATS.get(str(told).removeprefix("torch.")) if told else None


def model_of(raw: Mapping[str, Any], asked: Asked, format_: torch.dtype) -> Any:
    """The model of a config, its weights in a format."""
    library = transformers_here()
    kind = raw.get("model_type")
    if not kind:
        raise KernelcastError(f"{asked.what} has no model_type, so it is no Hugging Face config of a model")
    try:
        config = library.AutoConfig.for_model(**raw)
        found = _class_of(library, raw, config)
        with torch.device("meta"), gpu_present():
            model = found._from_config(config, dtype=format_)
    except Exception as error:
        text = " ".join(str(error).split())[:300] or type(error).__name__
        raise KernelcastError(f"{line_of(error)}transformers does not build {asked.what}: {text}") from error
    if asked.checkpointing:
        if not model.supports_gradient_checkpointing:
            raise KernelcastError(f"{type(model).__name__} has no gradient checkpointing")
        model.gradient_checkpointing_enable()
    return model


def _class_of(library: Any, raw: Mapping[str, Any], config: Any) -> Any:
    for name in raw.get("architectures") or ():
        found = getattr(library, name, None)
        if isinstance(found, type) and issubclass(found, library.PreTrainedModel):
            return found
    auto, kind = library.models.auto.modeling_auto, config.model_type
    table = {
        name: getattr(auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {}) for name in (*_SEQUENCES, "MASKED_LM", *_SINGLE)
    }
    order: tuple[str, ...] = ("MASKED_LM", *_SINGLE)
    if getattr(config, "is_encoder_decoder", False):
        order = (*_SEQUENCES, *order)
    elif getattr(config, "is_decoder", False):
        order = (*_SINGLE, "MASKED_LM")
    known = next((table[name][kind] for name in order if kind in table[name]), None) or auto.MODEL_MAPPING_NAMES.get(
        kind
    )
    if known is None:
        raise KernelcastError(f"transformers {library.__version__} knows no model of the type {kind!r}")
    return getattr(library, known if isinstance(known, str) else known[0])
