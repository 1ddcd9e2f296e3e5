"""A Hugging Face config as a model on meta tensors, of the class that its ``architectures`` names, else of what
transformers knows of its ``model_type``; and the inputs of that model."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kernelcast.errors import KernelcastError
from kernelcast.tracing.frames import line_of
from kernelcast.tracing.meta_model import building, fill_buffers

if TYPE_CHECKING:
    from kernelcast.tracing.build import TraceRequest

_SEQUENCES = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")  # an encoder and a decoder
_SINGLE = (
    "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "IMAGE_CLASSIFICATION", "CTC", "AUDIO_CLASSIFICATION", "SEMANTIC_SEGMENTATION",
    "OBJECT_DETECTION", "VIDEO_CLASSIFICATION", "DEPTH_ESTIMATION",
)  # fmt: skip
_RESNETS = {
    "resnet18": ([2, 2, 2, 2], "basic"), "resnet34": ([3, 4, 6, 3], "basic"), "resnet50": ([3, 4, 6, 3], "bottleneck"),
    "resnet101": ([3, 4, 23, 3], "bottleneck"), "resnet152": ([3, 8, 36, 3], "bottleneck"),
}  # fmt: skip
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def transformers_here() -> Any:
    """The library, quiet; or what to install."""
    if importlib.util.find_spec("transformers") is None:
        raise KernelcastError("tracing a Hugging Face config needs transformers: pip install 'kernelcast[torch]'")
    import transformers

    transformers.logging.set_verbosity_error()  # it warns of losses, not of errors
    return transformers


def config_dtype(raw: Mapping[str, Any]) -> str | None:
    """The dtype of the weights by the config."""
    name = raw.get("dtype") or raw.get("torch_dtype") or raw.get("text_config", {}).get("torch_dtype")
    return _DTYPES.get(str(name).removeprefix("torch.")) if name else None


def hub_model(raw: Mapping[str, Any], request: TraceRequest, dtype: torch.dtype) -> tuple[Any, list[str]]:
    """The model of a config, its weights in ``dtype``; and notes on what had to be chosen."""
    library = transformers_here()
    raw, notes = _without_timm(raw)
    if not raw.get("model_type"):
        raise KernelcastError(f"{request.what} has no model_type, so it is no Hugging Face config of a model")
    try:
        raw, as_notes = _of_known_type(library, raw)
        notes += as_notes
        config = library.AutoConfig.for_model(**_plain_floats(raw))
        cls = _class_of(library, raw, config)
        if cls.__name__.endswith("SequenceClassification") and getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0  # without a padding token the last token is not found
        with building() as values:
            model = cls._from_config(config, dtype=dtype)
            fill_buffers(model, values)
            convert(model, dtype, _kept(model, dtype))
    except Exception as error:
        text = " ".join(str(error).split())[:300] or type(error).__name__
        raise KernelcastError(f"{line_of(error)}transformers does not build {request.what}: {text}") from error
    if request.checkpointing:
        enable_checkpointing(model, type(model).__name__)
    return model, notes


def enable_checkpointing(model: Any, name: str) -> None:
    """Hugging Face's activation checkpointing, of every layer."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise KernelcastError(
            f"checkpointing: {name} gives no Hugging Face model that supports it; "
            "call torch.utils.checkpoint.checkpoint in the model's forward instead"
        )
    model.gradient_checkpointing_enable()


def _kept(model: Any, dtype: torch.dtype) -> list[str]:
    """Modules that the class keeps in fp32."""
    kept = list(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return kept + list(getattr(model, "_keep_in_fp32_modules", None) or ()) if dtype == torch.float16 else kept


def convert(model: Any, dtype: torch.dtype, kept: Iterable[str]) -> None:
    """Cast weights that the class creates in another format, except for those of the ``kept`` modules."""
    converted: dict[int, Any] = {}  # tied weights stay tied
    for path, part in model.named_modules():
        for name, value in part._parameters.items():
            if value is None or not value.is_floating_point() or value.dtype == dtype:
                continue
            if not any(module in f"{path}.{name}" for module in kept):
                if id(value) not in converted:
                    converted[id(value)] = torch.nn.Parameter(value.detach().to(dtype), value.requires_grad)
                part._parameters[name] = converted[id(value)]


def _plain_floats(value: Any) -> Any:
    """Numbers that JSON cannot write, as transformers writes them."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: _plain_floats(item) for key, item in value.items()}
    return [_plain_floats(item) for item in value] if isinstance(value, list) else value


def _of_known_type(library: Any, raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """A config of a type that transformers has no code for, as that of the class that it names (Kimi-K2 is a
    DeepseekV3ForCausalLM of the type kimi_k2), with a note."""
    types = library.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    for name in raw.get("architectures") or () if raw["model_type"] not in types else ():
        known = getattr(getattr(library, str(name), None), "config_class", None)
        if known is not None:
            return {**raw, "model_type": known.model_type}, [f"model_type {raw['model_type']}: built as {name}"]
    return raw, []


def _without_timm(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Where timm is not installed, transformers' own ResNet stands in for timm's."""
    backbone = raw.get("backbone_config") or {}
    name = str(raw.get("backbone") or backbone.get("backbone") or "")
    uses = raw.get("use_timm_backbone") or backbone.get("model_type") == "timm_backbone"
    if not uses or importlib.util.find_spec("timm") is not None or name not in _RESNETS:
        return raw, []
    depths, layer_type = _RESNETS[name]
    stages = backbone.get("out_indices") or (raw.get("backbone_kwargs") or {}).get("out_indices") or [4]
    resnet = {
        "model_type": "resnet", "depths": depths, "layer_type": layer_type,
        "out_features": [f"stage{stage}" for stage in stages if stage],
        "hidden_sizes": [256, 512, 1024, 2048] if layer_type == "bottleneck" else [64, 128, 256, 512],
    }  # fmt: skip
    rest = {key: value for key, value in raw.items() if key not in ("backbone", "backbone_kwargs")}
    changed = {**rest, "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone_config": resnet}
    return changed, [f"timm is not installed: transformers' own ResNet stands in for its {name}"]


def _class_of(library: Any, raw: Mapping[str, Any], config: Any) -> Any:
    for name in raw.get("architectures") or ():
        cls = getattr(library, name, None)
        if isinstance(cls, type) and issubclass(cls, library.PreTrainedModel):
            return cls
    auto, model_type = library.models.auto.modeling_auto, config.model_type
    tasks: tuple[str, ...] = ("MASKED_LM", *_SINGLE)
    if getattr(config, "is_encoder_decoder", False):
        tasks = (*_SEQUENCES, *tasks)
    elif getattr(config, "is_decoder", False):
        tasks = (*_SINGLE, "MASKED_LM")
    tables = [getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}) for task in tasks]
    names = next((table[model_type] for table in (*tables, auto.MODEL_MAPPING_NAMES) if table.get(model_type)), None)
    if names is None:
        raise KernelcastError(f"transformers {library.__version__} knows no model of the type {model_type!r}")
    return getattr(library, names if isinstance(names, str) else names[0])


# ---- inputs: the arguments of ``forward``, sizes by the config

TOKENS = 512  # of a text, where nothing is said
SAMPLES = 160_000  # of sound: ten seconds at 16 kHz
PIXELS = 224  # of an image's side, where the config says nothing; object detectors take larger ones
DETECTION_PIXELS = 800
_OBJECTS = ("ObjectDetection", "InstanceSegmentation", "UniversalSegmentation", "PanopticSegmentation",
            "ForSegmentation")  # fmt: skip
NO_LABELS = "trained on the mean of its output: no labels are made up for it"
_BY_SAMPLE = ("SequenceClassification", "ImageClassification", "VideoClassification", "ForAudioClassification")


def required(parameters: Mapping[str, inspect.Parameter], given: Iterable[str]) -> list[str]:
    """Parameters of a function without a default that are not given."""
    named = (p for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    return [p.name for p in named if p.default is p.empty and p.name not in given]


class ModelInputs:
    """Builds the arguments of one model."""

    def __init__(self, model: Any, request: TraceRequest) -> None:
        self.model, self.request, self.name = model, request, type(model).__name__
        self.config = model.config
        self.text = self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config
        self.parameters = inspect.signature(model.forward).parameters
        self.encoder_decoder = bool(getattr(self.config, "is_encoder_decoder", False))
        self.notes: list[str] = []
        self.made: dict[str, Any] = {}
        self.format = next((x.dtype for x in model.parameters() if x.is_floating_point()), torch.float32)

    def build(self) -> dict[str, Any]:
        """The arguments by name; ``notes`` has the choices that were made."""
        takes = self._takes
        if takes("pixel_values") and not (takes("input_ids") and self._reads_text()):
            self._image()
        if takes("input_features"):
            self.made["input_features"] = self._features()
        if takes("input_values"):
            self.made["input_values"] = self._sound()
        if takes("input_ids") and (self.main == "input_ids" or not self.made or self._has_text()):
            self.made["input_ids"] = self._tokens(self._seq())
        if takes("decoder_input_ids") and self.encoder_decoder:
            self._decoder()
        if self.request.mode == "training":
            self._labels()
        self._patch_mask()
        self._options()
        missing = required(self.parameters, self.made)
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
        """Whether images are optional inputs of a language model; a model that compares both gets both."""
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

    def _seq(self) -> int:
        names = ("max_position_embeddings", "max_target_positions", "max_text_positions")
        longest, seq = _integer(self.text, *names), self.request.seq
        if seq is None:
            return min(TOKENS, longest or TOKENS)
        if longest and seq > longest and self._rotates():
            note = f"{seq:,} tokens are more than the {longest:,} that the config names: its rotary positions go on"
            self.notes += [note] * (note not in self.notes)
        elif longest and seq > longest:
            raise KernelcastError(f"seq {seq:,} exceeds the {longest:,} positions of {self.request.what}")
        return seq

    def _rotates(self) -> bool:
        """Whether positions are rotations (RoPE), of which there is no table that ends."""
        return any("rotary" in name for name, _ in self.model.named_modules())

    def _tokens(self, length: int) -> torch.Tensor:
        """Ordinary tokens: none that stands for an image, an end or padding."""
        vocab = int(getattr(self.text, "vocab_size", None) or getattr(self.config, "vocab_size", None) or 1000)
        special = _special_tokens(vars(self.config)) | _special_tokens(vars(self.text))
        ordinary = torch.tensor([token for token in range(vocab) if token not in special] or [0], device="cpu")
        shape = (self.request.batch, 2, length) if "MultipleChoice" in self.name else (self.request.batch, length)
        tokens = ordinary[torch.randint(len(ordinary), shape, generator=torch.Generator().manual_seed(0), device="cpu")]
        image = _integer(self.config, "image_token_index", "image_token_id")
        queries = _integer(self.config, "num_query_tokens")
        if image and queries and "pixel_values" in self.made:
            tokens[..., :queries] = image  # where the image goes
        end = getattr(self.text, "eos_token_id", None)
        if isinstance(end, int) and self.encoder_decoder:
            tokens[..., -1] = end  # a classifier on top reads there
        return tokens

    def _decoder(self) -> None:
        """Tokens of the decoder; in training they are made from the labels."""
        names = ("decoder_start_token_id", "pad_token_id")
        starts = all(getattr(self.config, name, None) is not None for name in names)
        shifted = self._takes("labels") and self._generates() and starts
        if self.request.mode != "training" or not shifted:
            self.made["decoder_input_ids"] = self._tokens(self._seq())

    def _generates(self) -> bool:
        return self.name.endswith(("ForConditionalGeneration", "LMHeadModel", "ForCausalLM", "ForSpeechSeq2Seq"))

    # ---- images and sound ----

    def _image(self) -> None:
        vision = getattr(self.config, "vision_config", None) or self.config
        side = self.request.image or getattr(vision, "image_size", None) or getattr(self.config, "image_size", None)
        if not side:
            side = DETECTION_PIXELS if any(name in self.name for name in _OBJECTS) else PIXELS
        height, width = side if isinstance(side, (tuple, list)) else (side, side)
        channels = _integer(vision, "num_channels") or _integer(self.config, "num_channels") or 3
        frames = _integer(vision, "num_frames")
        self.made["pixel_values"] = self._floats((*([frames] if frames else []), channels, int(height), int(width)))

    def _sound(self) -> torch.Tensor:
        config = self.config
        if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):  # a spectrogram as an image
            return self._floats((int(config.max_length), int(config.num_mel_bins)))
        channels = _integer(config, "audio_channels")
        return self._floats((*([channels] if channels else []), self.request.seq or SAMPLES))

    def _features(self) -> torch.Tensor:
        config = getattr(self.config, "audio_config", None) or self.config
        if hasattr(config, "spec_size"):
            return self._floats((1, 1001, int(config.num_mel_bins)))
        bins = _integer(config, "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim") or 80
        if hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
            return self._floats((bins, 2 * int(config.max_source_positions)))  # the first layers halve it
        return self._floats((self.request.seq or 1000, bins))

    def _floats(self, shape: Iterable[int]) -> torch.Tensor:
        return torch.empty((self.request.batch, *shape), dtype=self.format, device="meta")

    # ---- training ----

    def _labels(self) -> None:
        ids, zeros = self.made.get("input_ids"), functools.partial(torch.zeros, dtype=torch.int64, device="cpu")
        if self._takes("start_positions"):
            first = torch.ones(self.request.batch, dtype=torch.int64, device="cpu")
            self.made |= {"start_positions": first, "end_positions": first}
        elif self._takes("return_loss"):
            self.made["return_loss"] = True
        elif not self._takes("labels") or any(name in self.name for name in _OBJECTS):
            self.notes.append(NO_LABELS)
        elif self.name.endswith(_BY_SAMPLE) or "MultipleChoice" in self.name:
            self.made["labels"] = zeros(self.request.batch)
        elif "TokenClassification" in self.name and ids is not None:
            self.made["labels"] = torch.zeros_like(ids)
        elif "SemanticSegmentation" in self.name:
            batch, *_, height, width = self.made["pixel_values"].shape
            self.made["labels"] = zeros((batch, height, width))
        elif "CTC" in self.name:
            self.made["labels"] = self._tokens(64)
        elif ids is not None or self._generates():
            self.made["labels"] = ids if ids is not None and not self.encoder_decoder else self._tokens(self._seq())
        else:
            self.notes.append(NO_LABELS)

    def _patch_mask(self) -> None:
        """Where ``forward`` requires one."""
        wanted = self.parameters.get("bool_masked_pos")
        if wanted is not None and wanted.default is wanted.empty and "pixel_values" in self.made:
            *_, height, width = self.made["pixel_values"].shape
            frames = getattr(self.config, "num_frames", 1) // getattr(self.config, "tubelet_size", 1)
            patches = frames * (height // self.config.patch_size) * (width // self.config.patch_size)
            mask = torch.zeros(self.request.batch, patches, dtype=torch.bool, device="cpu")
            mask[:, : (3 * patches) // 4] = True
            self.made["bool_masked_pos"] = mask

    def _options(self) -> None:
        """Options of ``forward``: with or without a cache, all logits or the last."""
        inference = self.request.mode == "inference"
        if self._takes("use_cache") or "past_key_values" in self.parameters:
            self.made["use_cache"] = bool(self.request.cache) and inference
        elif self.request.cache:
            raise KernelcastError(f"cache: {self.name} has none")
        if self._takes("logits_to_keep"):
            if self.request.logits == "last" or (self.request.logits is None and inference):
                self.made["logits_to_keep"] = 1
        elif self.request.logits == "last":
            raise KernelcastError(f"logits last: {self.name} gives all, or none")


def _integer(config: Any, *names: str) -> int | None:
    """The first of these attributes that is a positive whole number."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _special_tokens(config: dict[str, Any]) -> set[int]:
    named = [value for key, value in config.items() if key.endswith(("_token_id", "_token_index"))]
    return {value for value in named if isinstance(value, int)} | {0}


# ---- torchvision beside a CPU-only PyTorch

# Ops of its compiled half that torchvision's Python code looks up while it is imported.
_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def make_torchvision_importable() -> None:
    """torchvision built for GPUs does not import beside a PyTorch without them (its compiled half does not load), and
    transformers imports it: then the ops that it looks for are declared. They cannot run, but nothing here runs."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return
    folders = importlib.util.find_spec("torchvision").submodule_search_locations or ()  # type: ignore[union-attr]
    for compiled in (path for folder in folders for path in Path(folder).glob("_C*.so")):
        with contextlib.suppress(OSError, RuntimeError):
            torch.ops.load_library(str(compiled))
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", schema)


make_torchvision_importable()
