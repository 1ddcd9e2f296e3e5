"""Reading a config.json: every field is checked as it is read, and one that is absent is refused, not guessed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernelcast.errors import KernelcastError

# What transformers' own config class fills in where a config.json leaves the key out. Files do leave these out:
# nested text_configs are saved as differences from the class, and older files predate some keys. Only values that
# the class fixes are here; sizes that tell one model from another have to be in the file (Gemma 3 aside, whose 4B
# file really does leave out its heads).
CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "bert": {"type_vocab_size": 2},
    "deepseek_v2": {"moe_layer_freq": 1},
    "deepseek_v3": {"moe_layer_freq": 1},
    "gemma2": {"tie_word_embeddings": True},
    "gemma3_text": {
        "tie_word_embeddings": True,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
    },
    "glm4_moe": {"use_qk_norm": False},
    "gpt2": {"tie_word_embeddings": True, "activation_function": "gelu_new"},
    "gpt_oss": {"attention_bias": True},
    "llama": {"mlp_bias": False},
    "llama4_text": {"attention_chunk_size": 8192, "no_rope_layer_interval": 4, "use_qk_norm": True},
    "opt": {
        "tie_word_embeddings": True,
        "enable_bias": True,
        "do_layer_norm_before": True,
        "layer_norm_elementwise_affine": True,
    },
    "qwen2": {"use_sliding_window": False},
    "qwen2_moe": {"use_sliding_window": False, "qkv_bias": True, "decoder_sparse_step": 1},
    "qwen3": {"use_sliding_window": False},
    "qwen3_moe": {"use_sliding_window": False, "decoder_sparse_step": 1},
    "qwen3_next": {"decoder_sparse_step": 1, "full_attention_interval": 4},
}
_IN_OTHERS = {"tie_word_embeddings": False, "attention_bias": False}  # of every class that has them, where not above


@dataclass(frozen=True)
class Fields:
    """The fields of one config, with the model's name for messages."""

    config: Mapping[str, Any]
    name: str
    model_type: str

    def refuse(self, what: str) -> KernelcastError:
        return KernelcastError(f"config of {self.name!r} (model_type {self.model_type}): {what}")

    def value(self, key: str) -> Any:
        """The value, else what the config class would fill in, else None (as JSON's null)."""
        found = self.config.get(key)
        return (_IN_OTHERS | CLASS_DEFAULTS.get(self.model_type, {})).get(key) if found is None else found

    def _first(self, keys: tuple[str, ...]) -> tuple[str, Any]:
        """The first of ``keys`` that is there, and its value."""
        for key in keys:
            found = self.value(key)
            if found is not None:
                return key, found
        raise self.refuse(f"{' or '.join(map(repr, keys))} is missing; the model's full config.json has it")

    def count(self, *keys: str, least: int = 1) -> int:
        """A whole number."""
        key, found = self._first(keys)
        if isinstance(found, bool) or not isinstance(found, int) or found < least:
            raise self.refuse(f"{key!r} is {found!r}; it has to be a whole number of at least {least}")
        return found

    def count_or_none(self, key: str) -> int | None:
        return None if self.value(key) is None else self.count(key)

    def count_or_null(self, key: str) -> int | None:
        """For keys where null has a meaning that no key at all does not have: the class fills in a number then."""
        if key not in self.config:
            raise self.refuse(f"{key!r} is missing; the model's full config.json has it, as a number or null")
        return self.count_or_none(key)

    def flag(self, key: str) -> bool:
        found = self.value(key)
        if found is None:
            raise self.refuse(f"{key!r} is missing; the model's full config.json has it as true or false")
        if not isinstance(found, bool):
            raise self.refuse(f"{key!r} is {found!r}; it has to be true or false")
        return found

    def word(self, *keys: str) -> str:
        key, found = self._first(keys)
        if not isinstance(found, str):
            raise self.refuse(f"{key!r} is {found!r}; it has to be a name in quotes")
        return found

    def whole_numbers(self, key: str) -> tuple[int, ...]:
        """A list such as mlp_only_layers; none where the key is absent."""
        found = self.value(key)
        if found is None:
            return ()
        if not isinstance(found, list) or not all(isinstance(x, int) for x in found):
            raise self.refuse(f"{key!r} is {found!r}; it has to be a list of whole numbers")
        return tuple(found)

    def layer_types(self, layers: int, allowed: tuple[str, ...]) -> tuple[str, ...] | None:
        """The kind of each layer where the file lists it, in transformers' words; None where it does not."""
        found = self.value("layer_types")
        if found is None:
            return None
        if not isinstance(found, list) or len(found) != layers:
            size = len(found) if isinstance(found, list) else repr(found)
            raise self.refuse(f"'layer_types' has {size} entries; num_hidden_layers asks for {layers}")
        for kind in found:
            if kind not in allowed:
                raise self.refuse(f"layer type {kind!r} is not supported; supported here: {', '.join(allowed)}")
        return tuple(found)

    def rotary_fraction(self, otherwise: float = 1.0) -> float:
        """partial_rotary_factor, on its own or inside the rope settings, as newer files have it."""
        places = (self.config, self.config.get("rope_parameters"), self.config.get("rope_scaling"))
        for place in places:
            found = place.get("partial_rotary_factor") if isinstance(place, Mapping) else None
            if found is not None:
                if not isinstance(found, int | float) or not 0 < found <= 1:
                    raise self.refuse(f"'partial_rotary_factor' is {found!r}; it has to lie above 0 and up to 1")
                return float(found)
        return otherwise
