"""A Hugging Face config as a model on meta tensors: the class that its ``architectures`` names, else what transformers
knows of its ``model_type``."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from kernelcast.errors import KernelcastError
from kernelcast.tracing.building import building, hold_buffers
from kernelcast.tracing.where import line_of

if TYPE_CHECKING:
    from kernelcast.tracing.build import Asked

_SEQUENCES = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")  # an encoder and a decoder
_SINGLE = (
    "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "IMAGE_CLASSIFICATION", "CTC", "AUDIO_CLASSIFICATION", "SEMANTIC_SEGMENTATION",
    "OBJECT_DETECTION", "VIDEO_CLASSIFICATION", "DEPTH_ESTIMATION",
)  # fmt: skip
_RESNETS = {
    "resnet18": ([2, 2, 2, 2], "basic"), "resnet34": ([3, 4, 6, 3], "basic"), "resnet50": ([3, 4, 6, 3], "bottleneck"),
    "resnet101": ([3, 4, 23, 3], "bottleneck"), "resnet152": ([3, 8, 36, 3], "bottleneck"),
}  # fmt: skip
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


def model_of(raw: Mapping[str, Any], asked: Asked, format_: torch.dtype) -> tuple[Any, list[str]]:
    """The model of a config, its weights in a format; and what had to be chosen."""
    library = transformers_here()
    raw, notes = _without_timm(raw)
    kind = raw.get("model_type")
    if not kind:
        raise KernelcastError(f"{asked.what} has no model_type, so it is no Hugging Face config of a model")
    try:
        config = library.AutoConfig.for_model(**_plain_floats(raw))
        found = _class_of(library, raw, config)
        if found.__name__.endswith("SequenceClassification") and getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0  # without one the last token is not found
        with building() as values:
            model = found._from_config(config, dtype=format_)
            hold_buffers(model, values)
            _convert(model, format_)
    except Exception as error:
        text = " ".join(str(error).split())[:300] or type(error).__name__
        raise KernelcastError(f"{line_of(error)}transformers does not build {asked.what}: {text}") from error
    if asked.checkpointing:
        if not model.supports_gradient_checkpointing:
            raise KernelcastError(f"{type(model).__name__} has no gradient checkpointing")
        model.gradient_checkpointing_enable()
    return model, notes


def _convert(model: Any, format_: torch.dtype) -> None:
    """Weights that the class makes in a format of its own are in the model's when it is loaded; but for some."""
    kept = list(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if format_ == torch.float16:
        kept += list(getattr(model, "_keep_in_fp32_modules", None) or ())
    same: dict[int, Any] = {}  # tied weights stay tied
    for path, part in model.named_modules():
        for name, value in part._parameters.items():
            if value is None or not value.is_floating_point() or value.dtype == format_:
                continue
            if not any(word in f"{path}.{name}" for word in kept):
                if id(value) not in same:
                    same[id(value)] = torch.nn.Parameter(value.detach().to(format_), value.requires_grad)
                part._parameters[name] = same[id(value)]


def _plain_floats(value: Any) -> Any:
    """Numbers that JSON has no word for, as transformers writes them."""
    if isinstance(value, Mapping):
        return (
            float(value["__float__"])
            if set(value) == {"__float__"}
            else {k: _plain_floats(v) for k, v in value.items()}
        )
    return [_plain_floats(item) for item in value] if isinstance(value, list) else value


def _without_timm(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Where timm is not installed, transformers' own ResNet stands in for timm's."""
    told = raw.get("backbone_config") or {}
    name = str(raw.get("backbone") or told.get("backbone") or "")
    uses = raw.get("use_timm_backbone") or told.get("model_type") == "timm_backbone"
    if not uses or importlib.util.find_spec("timm") is not None or name not in _RESNETS:
        return raw, []
    depths, kind = _RESNETS[name]
    stages = told.get("out_indices") or (raw.get("backbone_kwargs") or {}).get("out_indices") or [4]
    own = {
        "model_type": "resnet", "depths": depths, "layer_type": kind,
        "out_features": [f"stage{at}" for at in stages if at],
        "hidden_sizes": [256, 512, 1024, 2048] if kind == "bottleneck" else [64, 128, 256, 512],
    }  # fmt: skip
    left = {key: value for key, value in raw.items() if key not in ("backbone", "backbone_kwargs")}
    changed = {**left, "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone_config": own}
    return changed, [f"timm is not installed: transformers' own ResNet stands in for its {name}"]


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
