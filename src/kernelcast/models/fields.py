"""Reading a config.json: every field is checked as it is read, and one that is absent is refused, not guessed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kernelcast.errors import KernelcastError

# What transformers' own config class fills in where a config.json leaves the key out. Files do leave these out:
# nested text_configs are saved as differences from the class, and older files predate some keys. Only values that
# the class fixes are here; sizes that tell one model from another have to be in the file (Gemma 3 aside, whose 4B
# file really does leave out its heads).
CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "bert": {"type_vocab_size": 2},
    "cohere2": {"tie_word_embeddings": True, "sliding_window_pattern": 4},
    "deepseek_v2": {"moe_layer_freq": 1},
    "deepseek_v3": {"moe_layer_freq": 1},
    "deepseek_v32": {"moe_layer_freq": 1, "index_topk_freq": 1, "index_skip_topk_offset": 2},
    "dots1": {"moe_layer_freq": 1},
    "ernie4_5_moe": {
        "tie_word_embeddings": True,
        "use_bias": False,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    },
    "falcon_h1": {
        "mlp_bias": False,
        "projectors_bias": False,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "mamba_rms_norm": False,
    },
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
    "gemma4_text": {
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 0,
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
    },
    "glm4_moe": {"use_qk_norm": False, "moe_layer_freq": 1},
    "glm4_moe_lite": {"moe_layer_freq": 1},
    "glm_moe_dsa": {"moe_layer_freq": 1, "index_topk_freq": 1, "index_skip_topk_offset": 2},
    "gpt2": {"tie_word_embeddings": True, "activation_function": "gelu_new"},
    "gpt_oss": {"attention_bias": True},
    "granite": {"mlp_bias": False},
    "granitemoehybrid": {"mamba_conv_bias": True, "mamba_proj_bias": False},
    "hunyuan_v1_moe": {"use_qk_norm": True},
    "kimi_linear": {
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "mla_use_output_gate": False,
        "latent_moe_use_norm": False,
    },
    "llama": {"mlp_bias": False},
    "llama4_text": {"attention_chunk_size": 8192, "no_rope_layer_interval": 4, "use_qk_norm": True},
    "minimax_m2": {
        "use_qk_norm": True,
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
    },
    "mistral4": {"moe_layer_freq": 1},
    "nemotron_h": {
        "use_bias": False,
        "use_conv_bias": True,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "mtp_layers_block_type": ["attention", "moe"],
    },
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
    "qwen3_5_moe_text": {"decoder_sparse_step": 1, "full_attention_interval": 4, "attn_output_gate": True},
    "qwen3_5_text": {"full_attention_interval": 4, "attn_output_gate": True},
    "qwen3_next": {"decoder_sparse_step": 1, "full_attention_interval": 4, "attn_output_gate": True},
    "smollm3": {"mlp_bias": False, "use_sliding_window": False, "no_rope_layer_interval": 4},
}
_IN_OTHERS = {"tie_word_embeddings": False, "attention_bias": False}  # of every class that has them, where not above
_STATES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# what stands between the products of a feed-forward block; another one is another kernel
ACTIVATIONS = (
    "silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_tanh", "quick_gelu", "relu", "relu2",
    "situ", "swigluoai",
)  # fmt: skip
# ways to stretch positions: other angles, the same kernel
ROPES = ("default", "linear", "dynamic", "yarn", "longrope", "su", "llama3", "mrope", "proportional", "axial")


@dataclass(frozen=True)
class Fields:
    """The fields of one config, with the model's name for messages."""

    config: Mapping[str, Any]
    name: str
    model_type: str
    read: set[str] = field(default_factory=set, compare=False, repr=False)  # keys that were asked for

    def refuse(self, what: str) -> KernelcastError:
        return KernelcastError(f"config of {self.name!r} (model_type {self.model_type}): {what}")

    def value(self, key: str) -> Any:
        """The value, else what the config class would fill in, else None (as JSON's null)."""
        self.read.add(key)
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
        self.read.add(key)
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

    def activation(self, *keys: str) -> str:
        found = self.word(*keys)
        if found not in ACTIVATIONS:
            raise self.refuse(f"activation {found!r} is not supported; supported here: {', '.join(ACTIVATIONS)}")
        return found

    def state_dtype(self, key: str) -> str:
        """The format of a recurrent state, in our words; fp32 where the file does not say."""
        found = self.value(key)
        if found is None:
            return "fp32"
        if found not in _STATES:
            raise self.refuse(f"{key!r} is {found!r}; supported here: {', '.join(_STATES)}")
        return _STATES[found]

    def inside(self, key: str) -> Fields:
        """The fields of an object in the file, such as linear_attn_config, and behind them those around it."""
        found = self.value(key)
        if found is not None and not isinstance(found, Mapping):
            raise self.refuse(f"{key!r} is {found!r}; it has to be an object")
        return replace(self, config={**self.config, **(found or {})})

    def words(self, key: str, size: int, allowed: tuple[str, ...]) -> tuple[str, ...]:
        """A word for each layer."""
        found = self.value(key)
        if not isinstance(found, list) or len(found) != size:
            raise self.refuse(f"{key!r} is {_short(found)}; it has to be a list of {size}, one a layer")
        for word in found:
            if word not in allowed:
                raise self.refuse(f"{key!r} has {word!r}; supported here: {', '.join(allowed)}")
        return tuple(found)

    def marks(self, key: str, size: int) -> list[bool]:
        """0 or 1 for each layer."""
        found = self.whole_numbers(key)
        if len(found) != size or not set(found) <= {0, 1}:
            raise self.refuse(f"{key!r} is {_short(list(found))}; it has to be a list of {size} of 0 and 1")
        return [bool(mark) for mark in found]

    def same_everywhere(self, key: str) -> int:
        """A whole number, or a list that repeats one."""
        found = self.value(key)
        if isinstance(found, list) and len(set(found)) > 1:
            raise self.refuse(f"{key!r} differs by layer; supported alike only")
        return replace(self, config={**self.config, key: found[0]} if isinstance(found, list) else self.config).count(
            key
        )

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
        places = (self.config, self.value("rope_parameters"), self.value("rope_scaling"))
        for place in places:
            found = place.get("partial_rotary_factor") if isinstance(place, Mapping) else None
            if found is not None:
                if not isinstance(found, int | float) or not 0 < found <= 1:
                    raise self.refuse(f"'partial_rotary_factor' is {found!r}; it has to lie above 0 and up to 1")
                return float(found)
        return otherwise

    def check_rope(self) -> None:
        """Refuse a kind of rope that is none of those that share a kernel."""
        for key in ("rope_parameters", "rope_scaling"):
            found = self.value(key)
            inner = [one for one in found.values() if isinstance(one, Mapping)] if isinstance(found, Mapping) else []
            for one in (found, *inner):
                kind = (one.get("rope_type") or one.get("type")) if isinstance(one, Mapping) else None
                if kind is not None and kind not in ROPES:
                    raise self.refuse(f"rope of type {kind!r} is not supported; supported here: {', '.join(ROPES)}")


def _short(found: Any) -> str:
    return f"a list of {len(found)}" if isinstance(found, list) else repr(found)
