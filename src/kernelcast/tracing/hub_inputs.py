"""What a Hugging Face model is given: by the arguments that its ``forward`` has, sizes by its config."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from kernelcast.errors import KernelcastError

if TYPE_CHECKING:
    from kernelcast.tracing.build import Asked

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


class Inputs:
    """Builds the arguments of one model."""

    def __init__(self, model: Any, asked: Asked) -> None:
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
