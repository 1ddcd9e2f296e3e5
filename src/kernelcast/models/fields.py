"""Reading a config.json: every field is checked as it is read, and one that is absent is refused, not guessed. Then the
usual blocks of a layer from the usual keys, and ``Family``, which has the readers of a model_type.

Every rule is that of the model's class in transformers (src/transformers/models/<model_type>), which is what gives a
config.json its meaning; where transformers has no class, the reader says whose code it follows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from kernelcast.errors import KernelcastError
from kernelcast.models.layers import (
    BlockResiduals,
    Dense,
    Experts,
    HyperConnections,
    Layer,
    Mixer,
    Mlp,
    Norms,
    QkNorm,
    SelfAttention,
)
from kernelcast.toml_folder import read_toml

SLIDING = "sliding_attention"
FULL = "full_attention"
LINEAR = "linear_attention"
CHUNKED = "chunked_attention"

RMSNORMS = Norms("rmsnorm", 2)
LAYERNORMS = Norms("layernorm", 2)
FOUR_NORMS = Norms("rmsnorm", 4)  # before and after attention and the feed-forward part (Gemma)
ONE_NORM = Norms("rmsnorm", 1)  # a layer of one part

# files of these types may leave num_key_value_heads out: as many as query heads, by their config classes
KV_HEADS_AS_QUERY = ("llama", "olmo2", "olmo3", "olmoe", "phi3")
# head_dim of these types is not hidden / heads: it has to be in the file
EXPLICIT_HEAD_DIM = (
    "falcon_h1", "gemma2", "gemma3_text", "gemma4_text", "glm4_moe", "gpt_oss", "llama4_text", "minimax_m2",
    "minimax_m3_vl_text", "ministral3", "nemotron_h", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe",
    "qwen3_next",
)  # fmt: skip
DEFAULTS = Path(__file__).with_name("class_defaults.toml")
_STATES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# between the products of a feed-forward block; another activation is another kernel
ACTIVATIONS = (
    "silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_tanh", "quick_gelu", "relu", "relu2",
    "situ", "swigluoai",
)  # fmt: skip
# ways to stretch positions: other angles, the same kernel
ROPES = ("default", "linear", "dynamic", "yarn", "longrope", "su", "llama3", "mrope", "proportional", "axial")


@functools.cache
def class_defaults(model_type: str) -> Mapping[str, Any]:
    """The defaults of transformers' config class for keys that a config.json leaves out."""
    tables = read_toml(DEFAULTS)
    return {**tables["any"], **tables.get(model_type, {})}


@dataclass(frozen=True)
class Fields:
    """The fields of one config, with the model's name for messages."""

    config: Mapping[str, Any]
    name: str
    model_type: str
    read: set[str] = field(default_factory=set, compare=False, repr=False)  # keys that were looked up

    def refuse(self, what: str) -> KernelcastError:
        return KernelcastError(f"config of {self.name!r} (model_type {self.model_type}): {what}")

    def value(self, key: str) -> Any:
        """The value, else the default of the config class, else None (as JSON's null)."""
        self.read.add(key)
        value = self.config.get(key)
        return class_defaults(self.model_type).get(key) if value is None else value

    def _first(self, keys: Sequence[str], what: str = "") -> tuple[str, Any]:
        """The first of ``keys`` that is there, and its value."""
        for key in keys:
            if (value := self.value(key)) is not None:
                return key, value
        raise self.refuse(f"{' or '.join(map(repr, keys))} is missing; the model's full config.json has it{what}")

    def _checked(self, key: str, value: Any, valid: bool, wanted: str) -> Any:
        if not valid:
            shown = f"a list of {len(value)}" if isinstance(value, list) else repr(value)
            raise self.refuse(f"{key!r} is {shown}; it has to be {wanted}")
        return value

    def count(self, *keys: str, least: int = 1) -> int:
        """A whole number."""
        key, value = self._first(keys)
        valid = isinstance(value, int) and not isinstance(value, bool) and value >= least
        return int(self._checked(key, value, valid, f"a whole number of at least {least}"))

    def counts(self, *names: str, **keys: str) -> dict[str, Any]:
        """Whole numbers by name, for a dataclass: of the key of that name, or as ``name="key"`` or ``name="key, key"``
        says."""
        keys = dict.fromkeys(names, "") | keys
        return {name: self.count(*(key or name).split(", ")) for name, key in keys.items()}

    def count_or_none(self, key: str) -> int | None:
        return None if self.value(key) is None else self.count(key)

    def count_or_null(self, key: str) -> int | None:
        """For keys where null has a meaning that an absent key does not have: the class fills in a number then."""
        self.read.add(key)
        if key not in self.config:
            raise self.refuse(f"{key!r} is missing; the model's full config.json has it, as a number or null")
        return self.count_or_none(key)

    def flag(self, key: str) -> bool:
        _, value = self._first((key,), " as true or false")
        return bool(self._checked(key, value, isinstance(value, bool), "true or false"))

    def text(self, *keys: str) -> str:
        key, value = self._first(keys)
        return str(self._checked(key, value, isinstance(value, str), "a name in quotes"))

    def activation(self, *keys: str) -> str:
        name = self.text(*keys)
        if name not in ACTIVATIONS:
            raise self.refuse(f"activation {name!r} is not supported; supported here: {', '.join(ACTIVATIONS)}")
        return name

    def state_dtype(self, key: str) -> str:
        """The format of a recurrent state; fp32 where the file does not say."""
        name = self.value(key) or "float32"
        if name not in _STATES:
            raise self.refuse(f"{key!r} is {name!r}; supported here: {', '.join(_STATES)}")
        return _STATES[name]

    def nested(self, key: str) -> Fields:
        """The fields of an object in the file, such as linear_attn_config, and behind them those around it."""
        value = self._checked(key, self.value(key) or {}, isinstance(self.value(key) or {}, Mapping), "an object")
        return replace(self, config={**self.config, **value})

    def per_layer(self, key: str, size: int, allowed: Sequence[str]) -> tuple[str, ...]:
        """A name for each layer."""
        values = self.value(key)
        valid = isinstance(values, list) and len(values) == size
        self._checked(key, values, valid, f"a list of {size}, one a layer of num_hidden_layers")
        for name in values:
            if name not in allowed:
                raise self.refuse(f"{key!r} has layer type {name!r}; supported here: {', '.join(allowed)}")
        return tuple(values)

    def layer_types(self, layers: int, allowed: Sequence[str]) -> tuple[str, ...] | None:
        """The type of each layer where the file lists them; None where it does not."""
        return None if self.value("layer_types") is None else self.per_layer("layer_types", layers, allowed)

    def integers(self, key: str) -> tuple[int, ...]:
        """A list such as mlp_only_layers; empty where the key is absent."""
        values = self.value(key) or []
        valid = isinstance(values, list) and all(isinstance(value, int) for value in values)
        return tuple(self._checked(key, values, valid, "a list of whole numbers"))

    def flags_per_layer(self, key: str, size: int) -> list[bool]:
        """0 or 1 for each layer."""
        values = list(self.integers(key))
        self._checked(key, values, len(values) == size and set(values) <= {0, 1}, f"a list of {size} of 0 and 1")
        return [bool(value) for value in values]

    def uniform_count(self, key: str) -> int:
        """A whole number, or a list that repeats one."""
        value = self.value(key)
        if isinstance(value, list):
            if len(set(value)) > 1:
                raise self.refuse(f"{key!r} differs by layer; supported alike only")
            return replace(self, config={**self.config, key: value[0]}).count(key)
        return self.count(key)

    def rotary_fraction(self, otherwise: float = 1.0) -> float:
        """partial_rotary_factor, at the top level or inside the rope settings, as newer files have it."""
        for settings in (self.config, self.value("rope_parameters"), self.value("rope_scaling")):
            share = settings.get("partial_rotary_factor") if isinstance(settings, Mapping) else None
            if share is not None:
                valid = isinstance(share, int | float) and 0 < share <= 1
                return float(self._checked("partial_rotary_factor", share, valid, "above 0 and at most 1"))
        return otherwise

    def check_rope(self) -> None:
        """Refuse a rope type that is none of those that share a kernel."""
        for key in ("rope_parameters", "rope_scaling"):
            outer = self.value(key)
            if not isinstance(outer, Mapping):
                continue
            for settings in (outer, *(value for value in outer.values() if isinstance(value, Mapping))):
                name = settings.get("rope_type") or settings.get("type")
                if name is not None and name not in ROPES:
                    raise self.refuse(f"rope of type {name!r} is not supported; supported here: {', '.join(ROPES)}")


@dataclass(frozen=True)
class Family:
    """The readers of one model_type: each returns a part that all layers share, or one for each layer."""

    mixer: Callable[[Fields], Mixer | Sequence[Mixer | None]]
    mlp: Callable[[Fields], Mlp | Sequence[Mlp | None]]
    norms: Norms | Callable[[Fields], Norms] = RMSNORMS
    architecture: Literal["decoder", "encoder"] = "decoder"
    position_offset: int | None = None  # rows of a learned position table before position 0; None: rope
    residual: Callable[[Fields], HyperConnections | BlockResiduals | None] | None = None
    mtp_layers: Callable[[Fields, list[Layer]], list[Layer]] | None = None  # None: one like the last

    def layers(self, f: Fields) -> list[Layer]:
        mixer, mlp, norms, count = self.mixer(f), self.mlp(f), self.layer_norms(f), layer_count(f)
        mixers = mixer if isinstance(mixer, Sequence) else [mixer] * count
        mlps = mlp if isinstance(mlp, Sequence) else [mlp] * count
        return [Layer(*parts, norms) for parts in zip(mixers, mlps, strict=True)]

    def layer_norms(self, f: Fields) -> Norms:
        return self.norms if isinstance(self.norms, Norms) else self.norms(f)

    def mtp(self, f: Fields, layers: list[Layer]) -> tuple[int, list[Layer]]:
        """Modules for multi-token prediction, and the layers of one."""
        keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
        count = next((f.count(key, least=0) for key in keys if f.value(key) is not None), 0)
        return count, (self.mtp_layers(f, layers) if self.mtp_layers else layers[-1:]) if count else []


def layer_count(f: Fields) -> int:
    return f.count("num_hidden_layers", "n_layer")


def hidden_size(f: Fields) -> int:
    return f.count("hidden_size", "n_embd")


def attention(
    f: Fields,
    *,
    bias_key: str = "attention_bias",
    qkv_bias: bool | None = None,
    out_bias: bool | None = None,
    qk_norm: QkNorm = "none",
    norm_key: str = "",
    rotary_fraction: float = 1.0,
) -> SelfAttention:
    """Attention over all tokens from the usual keys. ``bias_key``: says whether there are biases where the type does
    not; ``norm_key``: whether queries and keys are normed."""
    q_heads = f.count("num_attention_heads", "n_head")
    keys = ("head_dim", "attention_head_dim") if f.model_type == "nemotron_h" else ("head_dim",)
    head_dim = f.count(*keys) if f.model_type in EXPLICIT_HEAD_DIM else f.count_or_none("head_dim")
    if head_dim is None:
        if hidden_size(f) % q_heads:
            raise f.refuse(f"hidden_size {hidden_size(f)} does not divide over {q_heads} heads; give 'head_dim'")
        head_dim = hidden_size(f) // q_heads
    same = f.model_type in KV_HEADS_AS_QUERY and f.value("num_key_value_heads") is None
    partial_rope = f.model_type in ("minimax_m2", "minimax_m3_vl_text")
    return SelfAttention(
        q_heads=q_heads,
        kv_heads=q_heads if same else f.count("num_key_value_heads"),
        head_dim=head_dim,
        qkv_bias=f.flag(bias_key) if qkv_bias is None else qkv_bias,
        out_bias=f.flag(bias_key) if out_bias is None else out_bias,
        qk_norm=qk_norm if not norm_key or f.flag(norm_key) else "none",
        rotary_dim=f.count("rotary_dim") if partial_rope else round(head_dim * f.rotary_fraction(rotary_fraction)),
    )


def without_rope(base: SelfAttention) -> SelfAttention:
    return replace(base, rope=False, rotary_dim=0)


def sliding_layers(f: Fields, otherwise: Callable[[int], bool]) -> list[bool]:
    """Which layers have a sliding window, by layer_types, or else by ``otherwise(index)``."""
    types = f.layer_types(layer_count(f), (SLIDING, FULL))
    return [name == SLIDING for name in types] if types else [otherwise(i) for i in range(layer_count(f))]


def with_windows(f: Fields, base: SelfAttention, otherwise: Callable[[int], bool]) -> list[SelfAttention]:
    """``base`` in each layer, with the window where ``sliding_layers`` says so."""
    sliding = sliding_layers(f, otherwise)
    local = replace(base, window=f.count("sliding_window")) if any(sliding) else base
    return [local if slides else base for slides in sliding]


def rope_layers(f: Fields) -> tuple[bool, ...]:
    """Which layers have rope: no_rope_layers, in which 1 marks a layer with rope in spite of the name."""
    layers = layer_count(f)
    if marks := f.integers("no_rope_layers"):
        if len(marks) != layers:
            raise f.refuse(f"'no_rope_layers' has {len(marks)} entries; num_hidden_layers is {layers}")
        return tuple(map(bool, marks))
    return tuple((i + 1) % f.count("no_rope_layer_interval") != 0 for i in range(layers))


def dense(f: Fields, key: str = "intermediate_size") -> Dense:
    """The gated block of all llama-like models; few types have a switch for biases."""
    bias = f.flag("mlp_bias") if f.model_type in ("falcon_h1", "granite", "llama", "smollm3") else False
    return Dense(f.count(key), gated=True, activation=f.activation("hidden_activation", "hidden_act"), bias=bias)


def experts(f: Fields, inter_key: str = "moe_intermediate_size", *, shared_keys: str = "", **settings: Any) -> Experts:
    """``shared_keys``: of the number of shared experts, each as wide as a routed one."""
    inter = f.count(inter_key)
    if shared_keys:
        settings["shared_inter"] = inter * f.count(*shared_keys.split(", "), least=0)
    return Experts(
        experts=f.count("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        topk=f.count("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_k", "top_k_experts"),
        inter=inter,
        gated=True,
        activation=f.activation("hidden_activation", "hidden_act"),
        **settings,
    )


def moe_layers(f: Fields, block: Experts, sparse: Callable[[int], bool], otherwise: Dense | None = None) -> list[Mlp]:
    """``block`` where mlp_layer_types, or else ``sparse(index)``, says so; a dense block elsewhere."""
    layers = layer_count(f)
    if f.value("mlp_layer_types") is not None:
        marks = [name == "sparse" for name in f.per_layer("mlp_layer_types", layers, ("dense", "sparse"))]
    else:
        marks = [sparse(i) for i in range(layers)]
    return [block if mark else (otherwise or dense(f)) for mark in marks]
