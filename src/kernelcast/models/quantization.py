"""What a checkpoint's ``quantization_config`` says of its number formats: of the matrices of layers, of the experts
where they differ, and of the KV cache.

Read: fp8 (DeepSeek, Qwen), fbgemm_fp8, mxfp4, awq, gptq, compressed-tensors, modelopt. What has no kernels here keeps
the reason, which whoever gives no format is told.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from kernelcast.models.architecture import Quantization
from kernelcast.models.families import layer_count
from kernelcast.models.fields import Fields

# Modules by which a part of a layer is known; engines and exporters name them alike, but for Nemotron-H's.
_PARTS = {
    "attention": ("self_attn.q_proj", "self_attn.q_a_proj", "self_attn.o_proj"),
    "mlp": ("mlp.up_proj", "mlp.down_proj"),
    "experts": ("mlp.experts.0.up_proj", "mlp.experts.0.down_proj", "mlp.experts"),
}
_NEMOTRON_PARTS = {
    "attention": ("mixer.in_proj", "mixer.out_proj", "mixer.q_proj", "mixer.o_proj"),
    "mlp": ("mixer.up_proj", "mixer.down_proj"),
    "experts": ("mixer.experts.0.up_proj", "mixer.experts.0.down_proj", "mixer.experts"),
}
# a config with one of these has experts
_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_MODELOPT = {"FP8": "fp8", "NVFP4": "nvfp4", "W4A16_AWQ": "int4", "W8A8_SQ_PER_CHANNEL": "int8", "INT8_SQ": "int8"}
_SCHEMES: Mapping[Any, str] = {  # compressed-tensors: bits and type of weights and of activations
    ((8, "int"), (8, "int")): "int8",
    ((4, "int"), (16, "float")): "int4",
    ((8, "int"), (16, "float")): "int8_wo",
    ((8, "float"), (16, "float")): "int8_wo",
    ((4, "float"), (4, "float")): "nvfp4",
}
_FP4 = "mxfp4"
_ONE_LAYER = re.compile(r".*\blayers\.\d+\.(.+)")
_EXCLUDED = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")


def quantization(f: Fields, found: Any) -> Quantization:
    """Of a config that has one. Whole parts that it leaves out stay in 16 bits."""
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    if not isinstance(method, str):
        raise f.refuse("'quantization_config' has no 'quant_method', which says how weights are stored, such as 'fp8'")
    try:
        return _read(f, method, found)
    except (AttributeError, KeyError, TypeError, re.error) as error:
        text = f"'quantization_config' is not as {method} writes it: {type(error).__name__}: {error}"
        raise f.refuse(text) from None


def _read(f: Fields, method: str, found: Mapping[str, Any]) -> Quantization:
    block = found.get("weight_block_size")
    out = tuple(str(name) for key in _EXCLUDED for name in found.get(key) or ())
    told = Quantization(method=method, weight_block=tuple(block) if block else None, not_converted=out,
                        cache=_cache(found), four_bit_bytes=_four_bit_bytes(f, method, found))  # fmt: skip
    if method == "mxfp4":  # 4-bit experts; the rest is bf16
        return _with(told, "bf16", _FP4)
    left_out = [*out, *_of_most_layers(out, layer_count(f))]
    parts = _NEMOTRON_PARTS if f.model_type == "nemotron_h" else _PARTS
    kinds = {part: _part(found, method, names, left_out) for part, names in parts.items()}
    if f.value("expert_dtype") == "fp4":  # DeepSeek-V4 says it outside: fp8 but for the experts
        kinds["experts"] = _FP4
    unknown = next((kind for kind in kinds.values() if kind is not None and " " in kind), None)
    if unknown:
        return _with(told, None, None, unknown)
    has_experts = any(f.config.get(key) for key in _OF_EXPERTS)
    weights, mlp, experts = (kinds[part] or "bf16" for part in ("attention", "mlp", "experts"))
    found_mlp = mlp if mlp != weights else None
    return replace(_with(told, weights, experts if has_experts and experts != weights else None), mlp=found_mlp)


def _with(told: Quantization, weights: str | None, experts: str | None, unknown: str | None = None) -> Quantization:
    return replace(told, weights=weights, experts=experts, unknown=unknown)


def _four_bit_bytes(f: Fields, method: str, found: Mapping[str, Any]) -> float | None:
    """Half a byte, and a share of the scale of its group."""
    groups = found.get("config_groups")
    one = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else found
    in_group = (one.get("weights") or {}).get("group_size") if one is not found else found.get("group_size")
    fp4 = method == "mxfp4" or f.value("expert_dtype") == "fp4" or str(found.get("format")).startswith("mxfp4")
    if fp4:
        return 0.5 + 1 / 32
    return 0.5 + 2.0 / in_group if isinstance(in_group, int) and in_group > 0 else None


def _cache(found: Mapping[str, Any]) -> str | None:
    """fp8 where the checkpoint has scales of keys and values; engines then keep them so."""
    scheme = found.get("kv_cache_scheme")
    told = isinstance(scheme, Mapping) and scheme.get("num_bits") == 8 and scheme.get("type") == "float"
    return "fp8" if told or str(found.get("kv_cache_quant_algo")).upper() == "FP8" else None


def _part(found: Mapping[str, Any], method: str, names: Iterable[str], out: Iterable[str]) -> str | None:
    """The format of a part; None: it is left out. What has no kernels here is told in words, with blanks."""
    kept = [name for name in names if not any(_covers(one, name) for one in out)]
    if not kept:
        return None
    if method == "fp8":
        return "fp8_block" if found.get("weight_block_size") else "fp8"
    if method == "fbgemm_fp8":
        return "fp8"
    if method in ("awq", "gptq"):
        bits = found.get("bits", found.get("w_bit"))
        return {4: "int4", 8: "int8_wo"}.get(bits, f"{method} of {bits} bits")
    if method.startswith("modelopt"):
        return _of_modelopt(found, kept)
    groups = found.get("config_groups")
    if method == "compressed-tensors" and str(found.get("format")).startswith("mxfp4"):
        return _FP4
    if method == "compressed-tensors" and isinstance(groups, Mapping):
        return _of_groups(groups.values(), kept)
    return f"{method} weights"


def _of_modelopt(found: Mapping[str, Any], names: Iterable[str]) -> str | None:
    algorithm = str(found.get("quant_algo") or (found.get("quantization") or {}).get("quant_algo"))
    if algorithm == "MIXED_PRECISION":
        layers = found.get("quantized_layers") or {}
        told = [one["quant_algo"] for module, one in layers.items() if any(_covers(name, module) for name in names)]
        if not told:
            return None
        algorithm = str(told[0])
    return _MODELOPT.get(algorithm, f"modelopt's {algorithm}")


def _of_groups(groups: Iterable[Any], names: Iterable[str]) -> str | None:
    """Of the first group that has one of these modules."""
    for group in groups:
        targets = group.get("targets") or ["Linear"]
        if any(target == "Linear" or _covers(target, name) for target in targets for name in names):
            return _scheme(group.get("weights") or {}, group.get("input_activations"))
    return None


def _scheme(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> str:
    kinds = [(one.get("num_bits"), one.get("type")) if one else (16, "float") for one in (weights, inputs)]
    if kinds == [(8, "float")] * 2:
        return "fp8_block" if weights.get("strategy") == "block" else "fp8"
    words = (f"{bits}-bit {kind} {what}" for (bits, kind), what in zip(kinds, ("weights", "activations"), strict=True))
    return _SCHEMES.get((kinds[0], kinds[1])) or " with ".join(words)


def _of_most_layers(names: Iterable[str], layers: int) -> list[str]:
    """What is listed layer by layer, for half of them or more."""
    found = Counter(match[1] for match in map(_ONE_LAYER.match, names) if match)
    return [f"*.{module}" for module, times in found.items() if 2 * times >= layers]


def _covers(pattern: str, module: str) -> bool:
    """Whether a name of a list means a module of every layer: a regular expression after "re:", one with stars, or a
    part of the path. A name of one layer alone (model.layers.0.…) does not."""
    path = f"model.layers.9999.{module}"
    if pattern.startswith("re:"):
        return re.match(pattern[3:], path) is not None
    if "*" in pattern:
        return fnmatchcase(path, pattern)
    return f".{pattern}." in f".{path}."
