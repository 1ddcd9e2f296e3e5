"""A Hugging Face config as a model on meta tensors: the class that its ``architectures`` names, else what transformers
knows of its ``model_type``."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from kernelcast.errors import KernelcastError
from kernelcast.tracing.frames import line_of
from kernelcast.tracing.meta_model import building, fill_buffers

if TYPE_CHECKING:
    from kernelcast.tracing.build import TraceRequest


import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernelcast.tracing.build import TraceRequest


import contextlib
import sys
from pathlib import Path

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


def model_of(raw: Mapping[str, Any], asked: TraceRequest, format_: torch.dtype) -> tuple[Any, list[str]]:
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
            fill_buffers(model, values)
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


# ---- What a Hugging Face model is given: by the arguments that its ``forward`` has, sizes by its config

TOKENS = 512  # of a text, where nothing is said
SAMPLES = 160_000  # of sound: ten seconds at 16 kHz
PIXELS = 224  # of an image's side, where the config says nothing; models that find objects take larger ones
FOUND_PIXELS = 800
_OBJECTS = (
    "ObjectDetection",
    "InstanceSegmentation",
    "UniversalSegmentation",
    "PanopticSegmentation",
    "ForSegmentation",
)
_BY_SAMPLE = ("SequenceClassification", "ImageClassification", "VideoClassification", "ForAudioClassification")


class ModelInputs:
    """Builds the arguments of one model."""

    def __init__(self, model: Any, asked: TraceRequest) -> None:
        self.model, self.asked, self.name = model, asked, type(model).__name__
        self.config = model.config
        self.text = self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config
        self.parameters = inspect.signature(model.forward).parameters
        self.notes: list[str] = []
        self.made: dict[str, Any] = {}
        self.format = next((x.dtype for x in model.parameters() if x.is_floating_point()), torch.float32)

    def build(self) -> dict[str, Any]:
        """The arguments by name; ``notes`` says what was chosen."""
        takes = self._takes
        if takes("pixel_values") and not (takes("input_ids") and self._reads_text()):
            self._image()
        if takes("input_features"):
            self.made["input_features"] = self._features()
        if takes("input_values"):
            self.made["input_values"] = self._sound()
        if takes("input_ids") and (self.main == "input_ids" or not self.made or self._has_text()):
            self.made["input_ids"] = self._tokens(self._seq())
        if takes("decoder_input_ids") and getattr(self.config, "is_encoder_decoder", False):
            self._decoder()
        if self.asked.mode == "training":
            self._labels()
        self._rest()
        self._choices()
        missing = [name for name, p in self.parameters.items() if p.default is p.empty and name not in self.made
                   and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]  # fmt: skip
        if missing:
            raise KernelcastError(f"{self.name} needs {', '.join(missing)}: give it and its inputs by FILE.py:function")
        if not any(isinstance(x, torch.Tensor) for x in self.made.values()):
            raise KernelcastError(
                f"{self.name} takes {', '.join(list(self.parameters)[:6])}: give it and its inputs by FILE.py:function"
            )
        return self.made

    @property
    def main(self) -> str:
        return str(getattr(self.model, "main_input_name", "input_ids"))

    def _takes(self, name: str) -> bool:
        return name in self.parameters

    def _reads_text(self) -> bool:
        """A language model that may be given images beside its text; one that compares both is given both."""
        alone = self.main == "input_ids" and self._takes("labels")
        if alone and "images are left out: text alone" not in self.notes:
            self.notes.append("images are left out: text alone")
        return alone

    def _has_text(self) -> bool:
        """Whether a model of images reads a text beside them."""
        return "pixel_values" in self.made and (
            hasattr(self.config, "text_config") or hasattr(self.config, "qformer_config")
        )

    # ---- text ----

    def _longest(self) -> int | None:
        text = self.text
        names = ("max_position_embeddings", "max_target_positions", "max_text_positions")
        limits = (getattr(text, name, None) for name in names)
        return next((int(limit) for limit in limits if isinstance(limit, int) and limit > 0), None)

    def _seq(self) -> int:
        longest, asked = self._longest(), self.asked.seq
        if asked is None:
            return min(TOKENS, longest or TOKENS)
        if longest and asked > longest:
            raise KernelcastError(f"--seq {asked:,} exceeds the {longest:,} positions of {self.asked.what}")
        return asked

    def _tokens(self, length: int) -> torch.Tensor:
        """Ordinary tokens: none that stands for an image, an end or nothing."""
        vocab = int(getattr(self.text, "vocab_size", None) or getattr(self.config, "vocab_size", None) or 1000)
        special = _numbers(vars(self.config)) | _numbers(vars(self.text))
        ordinary = torch.tensor([token for token in range(vocab) if token not in special] or [0], device="cpu")
        shape = (self.asked.batch, 2, length) if "MultipleChoice" in self.name else (self.asked.batch, length)
        tokens = ordinary[torch.randint(len(ordinary), shape, generator=torch.Generator().manual_seed(0), device="cpu")]
        images = getattr(self.config, "image_token_index", None) or getattr(self.config, "image_token_id", None)
        queries = getattr(self.config, "num_query_tokens", None)
        if isinstance(images, int) and isinstance(queries, int) and "pixel_values" in self.made:
            tokens[..., :queries] = images  # where what is seen is put
        end = getattr(self.text, "eos_token_id", None)
        if isinstance(end, int) and getattr(self.config, "is_encoder_decoder", False):
            tokens[..., -1] = end  # a classifier on top reads there
        return tokens

    def _decoder(self) -> None:
        """A decoder's own tokens; in training they are made from the labels."""
        starts = getattr(self.config, "decoder_start_token_id", None) is not None
        starts = starts and getattr(self.config, "pad_token_id", None) is not None
        if self.asked.mode == "training" and self._takes("labels") and self._has_tokens_out() and starts:
            return
        self.made["decoder_input_ids"] = self._tokens(self._seq())

    def _has_tokens_out(self) -> bool:
        return self.name.endswith(("ForConditionalGeneration", "LMHeadModel", "ForCausalLM", "ForSpeechSeq2Seq"))

    # ---- images and sound ----

    def _image(self) -> None:
        vision = getattr(self.config, "vision_config", None) or self.config
        side = self.asked.image or getattr(vision, "image_size", None) or getattr(self.config, "image_size", None)
        if not side:
            side = FOUND_PIXELS if any(word in self.name for word in _OBJECTS) else PIXELS
        height, width = side if isinstance(side, (tuple, list)) else (side, side)
        channels = next((n for c in (vision, self.config) if isinstance(n := getattr(c, "num_channels", None), int)), 3)
        shape: tuple[int, ...] = (channels, int(height), int(width))
        frames = getattr(vision, "num_frames", None)
        if isinstance(frames, int):
            shape = (frames, *shape)
        self.made["pixel_values"] = self._floats(shape)

    def _sound(self) -> torch.Tensor:
        config = self.config
        if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):  # a spectrogram as an image
            return self._floats((int(config.max_length), int(config.num_mel_bins)))
        channels = getattr(config, "audio_channels", None)
        return self._floats((*([channels] if isinstance(channels, int) else []), self.asked.seq or SAMPLES))

    def _features(self) -> torch.Tensor:
        config = getattr(self.config, "audio_config", None) or self.config
        if hasattr(config, "spec_size"):
            return self._floats((1, 1001, int(config.num_mel_bins)))
        bins = next((n for name in ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim")
                     if isinstance(n := getattr(config, name, None), int)), 80)  # fmt: skip
        if hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
            return self._floats((bins, 2 * int(config.max_source_positions)))  # the first layers halve it
        return self._floats((self.asked.seq or 1000, bins))

    def _floats(self, shape: Iterable[int]) -> torch.Tensor:
        return torch.empty((self.asked.batch, *shape), dtype=self.format, device="meta")

    # ---- training ----

    def _labels(self) -> None:
        batch, config = self.asked.batch, self.config
        ids = self.made.get("input_ids")
        if self._takes("start_positions"):
            first = torch.ones(batch, dtype=torch.int64, device="cpu")
            self.made |= {"start_positions": first, "end_positions": first}
        elif self._takes("return_loss"):
            self.made["return_loss"] = True
        elif not self._takes("labels") or any(word in self.name for word in _OBJECTS):
            self.notes.append("trained on the mean of its output: no labels are made up for it")
        elif self.name.endswith(_BY_SAMPLE) or "MultipleChoice" in self.name:
            self.made["labels"] = torch.zeros(batch, dtype=torch.int64, device="cpu")
        elif "TokenClassification" in self.name and ids is not None:
            self.made["labels"] = torch.zeros_like(ids)
        elif "SemanticSegmentation" in self.name:
            shape = self.made["pixel_values"].shape
            self.made["labels"] = torch.zeros((shape[0], *shape[-2:]), dtype=torch.int64, device="cpu")
        elif "CTC" in self.name:
            self.made["labels"] = self._tokens(64)
        elif ids is not None or self._has_tokens_out():
            other = getattr(config, "is_encoder_decoder", False) or ids is None
            self.made["labels"] = self._tokens(self._seq()) if other else ids
        else:
            self.notes.append("trained on the mean of its output: no labels are made up for it")

    def _rest(self) -> None:
        """What has no default and is a mask of patches."""
        wanted = self.parameters.get("bool_masked_pos")
        if wanted is not None and wanted.default is wanted.empty and "pixel_values" in self.made:
            *_, height, width = self.made["pixel_values"].shape
            frames = getattr(self.config, "num_frames", 1) // getattr(self.config, "tubelet_size", 1)
            patches = frames * (height // self.config.patch_size) * (width // self.config.patch_size)
            mask = torch.zeros(self.asked.batch, patches, dtype=torch.bool, device="cpu")
            mask[:, : (3 * patches) // 4] = True
            self.made["bool_masked_pos"] = mask

    def _choices(self) -> None:
        """With or without a cache, all logits or the last: as asked, and told."""
        inference = self.asked.mode == "inference"
        if self._takes("use_cache") or "past_key_values" in self.parameters:
            self.made["use_cache"] = bool(self.asked.cache) and inference
        elif self.asked.cache:
            raise KernelcastError(f"--cache: {self.name} has none")
        if self._takes("logits_to_keep"):
            if self.asked.logits == "last" or (self.asked.logits is None and inference):
                self.made["logits_to_keep"] = 1
        elif self.asked.logits == "last":
            raise KernelcastError(f"--logits last: {self.name} gives all, or none")


def _numbers(config: dict[str, Any]) -> set[int]:
    """Tokens of a config that stand for something else than words."""
    named = [value for key, value in config.items() if key.endswith(("_token_id", "_token_index"))]
    return {value for value in named if isinstance(value, int)} | {0}


# ---- Libraries that a CPU-only PyTorch would not import

# What torchvision's Python code asks of its compiled half while it is imported.
_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def make_torchvision_importable() -> None:
    """torchvision built for GPUs does not import beside a PyTorch without them (its compiled half does not load), and
    transformers imports it: then the ops that it looks for are declared. They cannot run, but nothing here runs."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return
    places = importlib.util.find_spec("torchvision").submodule_search_locations or ()  # type: ignore[union-attr]
    for compiled in (path for place in places for path in Path(place).glob("_C*.so")):
        with contextlib.suppress(OSError, RuntimeError):
            torch.ops.load_library(str(compiled))
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", schema)
