"""Number formats of a served model: its weights, the activations between them, and the KV cache; and what a
checkpoint's ``quantization_config`` says of them.

Read: fp8 (DeepSeek, Qwen), fbgemm_fp8, mxfp4, awq, gptq, compressed-tensors, modelopt, quark. Of a format without
kernels here the reason is kept for the message to a user who gives no dtype.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from kernelcast.errors import KernelcastError, unknown
from kernelcast.hardware import Gpu
from kernelcast.models.architecture import Architecture, Quantization
from kernelcast.models.fields import Fields, layer_count
from kernelcast.models.layers import Dense
from kernelcast.ops.dtypes import find_dtype, supports_dtype

WEIGHTS = ("bf16", "fp16", "fp32", "tf32", "fp8", "fp8_block", "int8", "int4", "nvfp4", "int8_wo", "mxfp4", "mxfp4_fp8",
           "w4a4_mxfp4")  # fmt: skip
# What quantised weights run as where the GPU has no arithmetic of their format: weight-only kernels (Marlin)
WEIGHT_ONLY = {"nvfp4": "int4", "fp8": "int8_wo", "fp8_block": "int8_wo", "int8": "int8_wo", "mxfp4_fp8": "mxfp4",
               "w4a4_mxfp4": "mxfp4"}  # fmt: skip
CACHE = ("bf16", "fp16", "fp8")
_UNQUANTISED = ("bf16", "fp16", "fp32", "tf32")
# Modules that identify a part of a layer; engines and exporters use the same names, except for Nemotron-H's.
_ATTENTION = ("self_attn.q_proj", "self_attn.q_a_proj", "self_attn.o_proj")
_NEMOTRON_ATTENTION = ("mixer.in_proj", "mixer.out_proj", "mixer.q_proj", "mixer.o_proj")
# a config with one of these has experts
_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_MODELOPT = {"FP8": "fp8", "NVFP4": "nvfp4", "W4A16_AWQ": "int4", "W8A8_SQ_PER_CHANNEL": "int8", "INT8_SQ": "int8",
             "W4A16_MXFP4": "mxfp4", "W4A8_MXFP4_MXFP8": "mxfp4_fp8", "W4A8_MXFP4_FP8": "mxfp4_fp8"}  # fmt: skip
_SCHEMES: Mapping[Any, str] = {  # compressed-tensors: bits and type of weights and of activations
    ((8, "int"), (8, "int")): "int8",
    ((4, "int"), (16, "float")): "int4",
    ((8, "int"), (16, "float")): "int8_wo",
    ((8, "float"), (16, "float")): "int8_wo",
    ((4, "float"), (4, "float")): "nvfp4",
}
_FP4 = "mxfp4"
_MXFP4 = {16: _FP4, 8: "mxfp4_fp8", 4: "w4a4_mxfp4"}  # compressed-tensors: by bits of activations
_QUARK: Mapping[Any, str] = {  # AMD Quark: of weights and of activations; groups of 32 in fp4
    ("fp4", None): "mxfp4",
    ("fp4", "fp8_e4m3"): "mxfp4_fp8",
    ("fp4", "fp4"): "w4a4_mxfp4",
    ("fp8_e4m3", "fp8_e4m3"): "fp8",
    ("int8", "int8"): "int8",
    ("int4", None): "int4",
}
_ONE_LAYER = re.compile(r".*\blayers\.\d+\.(.+)")
_EXCLUDED = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules", "exclude")


@dataclass(frozen=True)
class Precision:
    """``weights``: format of the matrices of layers (the head, the router and the embedding stay in ``between``).
    ``experts`` and ``mlp``: of routed experts, and of dense blocks and shared experts, where they differ. ``cache``: of
    the KV cache, default as ``between``. ``stored``: as the checkpoint is, whatever arithmetic the GPU has.
    ``activations``: of quantised weights, the 16-bit format between layers; None: bf16, or fp16 on GPUs without it."""

    weights: str = "bf16"
    cache: str | None = None
    experts: str | None = None
    mlp: str | None = None
    stored: bool = False
    activations: str | None = None

    def __post_init__(self) -> None:
        for name in (self.weights, self.experts or self.weights, self.mlp or self.weights):
            if name not in WEIGHTS:
                raise unknown("number format of weights", name, WEIGHTS)
        if self.cache is not None and self.cache not in CACHE:
            raise unknown("number format of the KV cache", self.cache, CACHE)
        if self.cache == "fp8" and self.between in ("fp32", "tf32"):
            raise KernelcastError("an fp8 KV cache needs 16-bit activations")

    @classmethod
    def of(cls, model: Architecture, weights: str | None = None, cache: str | None = None) -> Precision:
        """The given formats, else as the checkpoint stores its weights; fp8 of one that has fp8 by blocks is that."""
        stored = model.quantization
        in_blocks = stored is not None and stored.weights == "fp8_block" and weights in ("fp8", "fp8_block")
        if stored is None or not (weights is None or in_blocks):
            return cls(weights or "bf16", cache, stored=weights is None)
        if stored.weights is None:
            raise KernelcastError(f"{model.name} ships as {stored.unknown}, which has no kernels here; give `dtype`")
        blocks = [run.layer.mlp for run in model.distinct_layers]
        dense = any(isinstance(block, Dense) or (block is not None and block.shared) for block in blocks)
        mlp = stored.mlp if dense else None
        return cls(stored.weights, cache or stored.cache, stored.experts, mlp, stored=True)

    @property
    def between(self) -> str:
        """Activations between layers."""
        return self.weights if self.weights in _UNQUANTISED else self.activations or "bf16"

    def on(self, gpu: Gpu) -> Precision:
        """As engines run it there: what is stored in bf16, and activations that nobody chose, are fp16 on a GPU without
        bf16 (vllm/config/model.py, _resolve_auto_dtype)."""
        if supports_dtype(gpu, "bf16") or self.between != "bf16" or self.activations is not None:
            return self
        if self.weights == "bf16" and not self.stored:
            return self
        parts: dict[str, Any] = {
            name: "fp16" for name in ("weights", "experts", "mlp") if getattr(self, name) == "bf16"
        }
        return replace(self, activations="fp16", **parts)

    @property
    def quantised(self) -> bool:
        """Whether activations change format before a product."""
        return find_dtype(self.weights).act_bytes < 2

    @property
    def vectors(self) -> str:
        """The format that vector kernels (norms, activations) name it by."""
        return "fp32" if self.between == "tf32" else self.between

    @property
    def between_bytes(self) -> float:
        return find_dtype(self.between).act_bytes

    @property
    def cache_bytes(self) -> float:
        return find_dtype(self.cache or self.between).act_bytes

    @property
    def expert_weights(self) -> str:
        return self.experts or self.weights

    @property
    def mlp_weights(self) -> str:
        return self.mlp or self.weights

    def runs(self, name: str, gpu: Gpu) -> str:
        """The format that matrices of this format run in: weight-only quantised where they are stored so and the GPU
        does not multiply such numbers."""
        return WEIGHT_ONLY.get(name, name) if self.stored and not supports_dtype(gpu, name) else name

    def weight_only(self, gpu: Gpu) -> tuple[str, ...]:
        """Formats that run as weight-only quantised."""
        every = dict.fromkeys((self.weights, self.mlp_weights, self.expert_weights))
        return tuple(name for name in every if self.runs(name, gpu) != name)

    @property
    def label(self) -> str:
        parts = [self.weights]
        parts += [f"mlp {self.mlp}"] if self.mlp and self.mlp != self.weights else []
        parts += [f"experts {self.experts}"] if self.experts and self.experts != self.weights else []
        parts += [f"KV cache {self.cache}"] if self.cache and self.cache != self.between else []
        return ", ".join(parts)


# ---- quantization_config


def quantization(f: Fields, config: Any) -> Quantization:
    """Read a ``quantization_config``. Whole parts that it excludes stay in 16 bits."""
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if not isinstance(method, str):
        raise f.refuse("'quantization_config' has no 'quant_method', which says how weights are stored, such as 'fp8'")
    try:
        return _quantization(f, method, config)
    except (AttributeError, KeyError, TypeError, re.error) as error:
        text = f"'quantization_config' is not as {method} writes it: {type(error).__name__}: {error}"
        raise f.refuse(text) from None


def _quantization(f: Fields, method: str, config: Mapping[str, Any]) -> Quantization:
    block = config.get("weight_block_size")
    excluded = tuple(str(name) for key in _EXCLUDED for name in config.get(key) or ())
    base = Quantization(method=method, weight_block=tuple(block) if block else None, not_converted=excluded,
                        cache=_cache(config), four_bit_bytes=_four_bit_bytes(f, method, config))  # fmt: skip
    if method == "mxfp4":  # 4-bit experts; the rest is bf16
        return replace(base, weights="bf16", experts=_FP4)
    patterns = [*excluded, *_of_most_layers(excluded, layer_count(f))]
    nemotron = f.model_type == "nemotron_h"
    prefix = "mixer" if nemotron else "mlp"
    products = (f"{prefix}.up_proj", f"{prefix}.down_proj")
    of_experts = (f"{prefix}.experts.0.up_proj", f"{prefix}.experts.0.down_proj", f"{prefix}.experts")
    parts = (_NEMOTRON_ATTENTION if nemotron else _ATTENTION, products, of_experts)
    weights, mlp, experts = (_part(config, method, modules, patterns) for modules in parts)
    if f.value("expert_dtype") == "fp4":  # DeepSeek-V4 says it outside: fp8 but for the experts
        experts = _FP4
    unsupported = next((dtype for dtype in (weights, mlp, experts) if dtype is not None and " " in dtype), None)
    if unsupported:
        return replace(base, unknown=unsupported)
    has_experts = any(f.config.get(key) for key in _OF_EXPERTS)
    weights, mlp, experts = weights or "bf16", mlp or "bf16", experts or "bf16"
    return replace(
        base,
        weights=weights,
        experts=experts if has_experts and experts != weights else None,
        mlp=mlp if mlp != weights else None,
    )


def _four_bit_bytes(f: Fields, method: str, config: Mapping[str, Any]) -> float | None:
    """Half a byte, and a share of the scale of its group."""
    if method == "mxfp4" or f.value("expert_dtype") == "fp4" or str(config.get("format")).startswith("mxfp4"):
        return 0.5 + 1 / 32
    groups = config.get("config_groups")
    group: Mapping[str, Any] = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else {"weights": config}
    group_size = (group.get("weights") or {}).get("group_size")
    return 0.5 + 2.0 / group_size if isinstance(group_size, int) and group_size > 0 else None


def _cache(config: Mapping[str, Any]) -> str | None:
    """fp8 where the checkpoint has scales of keys and values; engines then cache them so."""
    scheme = config.get("kv_cache_scheme")
    scaled = isinstance(scheme, Mapping) and scheme.get("num_bits") == 8 and scheme.get("type") == "float"
    outputs = ((each or {}).get("output_tensors") or {} for each in (config.get("layer_quant_config") or {}).values())
    scaled = scaled or any(str(each.get("dtype")).startswith("fp8") for each in outputs)  # Quark: of the projections
    return "fp8" if scaled or str(config.get("kv_cache_quant_algo")).upper() == "FP8" else None


def _part(config: Mapping[str, Any], method: str, modules: Iterable[str], excluded: Iterable[str]) -> str | None:
    """The dtype of a part; None: it is excluded. A format without kernels here is described, with blanks."""
    quantised = [module for module in modules if not any(_covers(pattern, module) for pattern in excluded)]
    if not quantised:
        return None
    if method == "fp8":
        return "fp8_block" if config.get("weight_block_size") else "fp8"
    if method == "fbgemm_fp8":
        return "fp8"
    if method in ("awq", "gptq"):
        bits = config.get("bits", config.get("w_bit"))
        return {4: "int4", 8: "int8_wo"}.get(bits, f"{method} of {bits} bits")
    if method.startswith("modelopt"):
        return _of_modelopt(config, quantised)
    if method == "quark":
        return _of_quark(config, quantised)
    groups = config.get("config_groups")
    if method == "compressed-tensors" and isinstance(groups, Mapping):
        microscaling = str(config.get("format")).startswith("mxfp4")
        return _of_groups(groups.values(), quantised, _microscaled if microscaling else _scheme)
    return f"{method} weights"


def _of_modelopt(config: Mapping[str, Any], modules: Iterable[str]) -> str | None:
    algorithm = str(config.get("quant_algo") or (config.get("quantization") or {}).get("quant_algo"))
    if algorithm == "MIXED_PRECISION":
        layers = (config.get("quantized_layers") or {}).items()
        matches = (settings for name, settings in layers if any(_covers(module, name) for module in modules))
        settings = next(matches, None)
        if settings is None:
            return None
        algorithm = str(settings["quant_algo"])
    return _MODELOPT.get(algorithm, f"modelopt's {algorithm}")


def _of_quark(config: Mapping[str, Any], modules: Iterable[str]) -> str:
    """The format of the first entry of these modules, else that of all layers."""
    layers = (config.get("layer_quant_config") or {}).items()
    named = (settings for pattern, settings in layers if any(_covers(pattern, module) for module in modules))
    settings = next(named, config.get("global_quant_config") or {})
    tensors = (settings.get("weight") or {}, settings.get("input_tensors") or {})
    if any(not isinstance(each, Mapping) or each.get("group_size") not in (None, 32, 128) for each in tensors):
        return "quark's scales of more than one level"  # of NVFP4, or int4 under fp8
    weights, inputs = (each.get("dtype") for each in tensors)
    return _QUARK.get((weights, inputs), f"quark's {weights} weights with {inputs or '16-bit'} activations")


def _of_groups(groups: Iterable[Any], modules: Iterable[str], scheme: Callable[[Any, Any], str]) -> str | None:
    """The format of the first group that has one of these modules."""
    for group in groups:
        targets = group.get("targets") or ["Linear"]
        if any(target == "Linear" or _covers(target, module) for target in targets for module in modules):
            return scheme(group.get("weights") or {}, group.get("input_activations"))
    return None


def _microscaled(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> str:
    return _MXFP4[inputs["num_bits"] if inputs else 16]


def _scheme(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> str:
    formats = [(part.get("num_bits"), part.get("type")) if part else (16, "float") for part in (weights, inputs)]
    if formats == [(8, "float")] * 2:
        return "fp8_block" if weights.get("strategy") == "block" else "fp8"
    named = zip(formats, ("weights", "activations"), strict=True)
    return _SCHEMES.get(tuple(formats)) or " with ".join(f"{bits}-bit {type_} {what}" for (bits, type_), what in named)


def _of_most_layers(names: Iterable[str], layers: int) -> list[str]:
    """Modules that are listed layer by layer, for half of the layers or more."""
    counts = Counter(match[1] for match in map(_ONE_LAYER.match, names) if match)
    return [f"*.{module}" for module, times in counts.items() if 2 * times >= layers]


def _covers(pattern: str, module: str) -> bool:
    """Whether a pattern means a module of every layer: a regular expression after "re:", one with stars, or a part of
    the path. A name of one layer alone (model.layers.0.…) does not."""
    path = f"model.layers.9999.{module}"
    if pattern.startswith("re:"):
        return re.match(pattern[3:], path) is not None
    if "*" in pattern:
        return fnmatchcase(path, pattern)
    return f".{pattern}." in f".{path}."
