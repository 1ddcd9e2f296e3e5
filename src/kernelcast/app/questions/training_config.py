"""Config files of training frameworks as parameters of ``train``: YAML of Megatron-Bridge and NeMo, TOML of torchtitan,
arguments of Megatron-LM in a shell script."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from kernelcast.errors import KernelcastError
from kernelcast.stacks.training_flags import (
    ALIASES,
    HARMLESS,
    IN_FILES,
    MATTERS,
    WITHOUT_EFFECT,
    value_called,
)
from kernelcast.toml_folder import read_toml

_ASSIGNED = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|[^\s(;#]*)", re.MULTILINE)
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)(?::?-([^}]*))?\}?")
_NESTED = {alias: parameter for parameter, names in ALIASES.items() for alias in (parameter, *names)}
_MODEL_SIZES = re.compile(r"(^|\.)(num_layers|hidden_size|ffn_hidden_size|num_attention_heads|num_query_groups|"
                          r"num_experts|kv_channels|vocab_size|moe_ffn_hidden_size|.*lora_rank|qk_.*|v_head_dim|moe_router.*|"
                          r"rotary.*|normalization|position_embedding_type|max_position_embeddings)$")  # fmt: skip


def read_config(path: Path, known: Collection[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The parameters that a file sets, and its settings that would matter and are not read."""
    if not path.is_file():
        raise KernelcastError(f"no file {path}: `config` is a YAML, TOML or shell file of a training framework")
    settings = dict(_settings(path))
    if not settings:
        raise KernelcastError(f"{path} has no settings of Megatron-Bridge, NeMo, torchtitan or Megatron-LM")
    found: dict[str, Any] = {}
    unread: list[str] = []
    for name, value in settings.items():
        parameter = _parameter(name)
        if parameter is None:
            if MATTERS.search(name) and not _without_effect(name) and value not in (None, False, [], {}):
                unread.append(name)
        elif value is not None:
            found[parameter] = value_called(parameter, value)
    return _joined(found, path, known), tuple(unread)


def _parameter(name: str) -> str | None:
    """By the whole name, by its last two parts, by its last."""
    parts = name.split(".")
    for spelling in (name, ".".join(parts[-2:]), parts[-1]):
        if found := IN_FILES.get(spelling) or _NESTED.get(spelling):
            return found
    return None


def _without_effect(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last in WITHOUT_EFFECT or bool(HARMLESS.search(name)) or bool(_MODEL_SIZES.search(name))


# ---- Files


def _settings(path: Path) -> Iterator[tuple[str, Any]]:
    ending = path.suffix.lower()
    if ending == ".toml":
        yield from _flat(read_toml(path))
    elif ending in (".yaml", ".yml"):
        yield from _flat(_yaml(path))
    else:
        yield from _arguments(path)


def _yaml(path: Path) -> Mapping[str, Any]:
    try:
        import yaml
    except ImportError:
        raise KernelcastError(f"{path}: reading YAML needs PyYAML: pip install pyyaml") from None
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise KernelcastError(f"{path} is not readable as YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(read, Mapping):
        raise KernelcastError(f"{path} holds no settings: a config of Megatron-Bridge or NeMo is a mapping")
    return read


def _flat(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as dotted names; of NeMo's lists of overrides too."""
    for name, value in table.items():
        dotted = f"{before}{name}".replace("-", "_")
        if isinstance(value, Mapping):
            yield from _flat(value, f"{dotted}.")
        elif isinstance(value, str) and "${" in value:
            continue  # of another setting, which is read itself
        else:
            yield dotted, value


def _arguments(path: Path) -> Iterator[tuple[str, Any]]:
    """--name value of a shell script, with variables that it assigns."""
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise KernelcastError(f"{path} is not readable as text: {error}") from None
    text = re.sub(r"(^|\s)#.*", "", text)
    variables: dict[str, str] = {}
    for name, value in _ASSIGNED.findall(text):  # TP=${TP:-8}: what follows is not of itself
        variables[name] = re.sub(rf"\$\{{{name}:?-([^}}]*)\}}", r"\1", value.strip("\"'"))

    def resolved(flag: str) -> str:
        for _ in range(4):  # of a variable of a variable
            flag = _VARIABLE.sub(lambda m: variables.get(m[1]) or m[2] or "", flag)
        return flag

    for line in text.replace("\\\n", " ").splitlines():
        flags = [resolved(flag).strip("()\"';") for flag in line.replace("(", " ").split()]
        for at, flag in enumerate(flags):
            if not re.fullmatch(r"--[a-z][\w.-]*(=.*)?", flag):
                continue
            name, equals, value = flag[2:].partition("=")
            rest = [] if equals else itertools.takewhile(lambda each: not each.startswith("--"), flags[at + 1 :])
            values = [value] if equals else [each for each in rest if each and " " not in each]
            yield name.replace("-", "_"), values[0] if len(values) == 1 else values or True


# ---- Settings that are read together


def _joined(found: dict[str, Any], path: Path, known: Collection[str]) -> dict[str, Any]:
    """Settings of a file as parameters: counts of GPUs, formats, sharding."""
    taken = {name: _plain(value) for name, value in found.items()}
    result = {name: value for name, value in taken.items() if name in known}
    shard, copies = taken.get("shard_degree", -1), taken.get("replicate_degree", 1)
    if "shard_degree" in taken or taken.get("fsdp") or taken.get("sharding") == "optim_grads_params":
        result["zero"] = 3
    elif taken.get("sharding") in ("optim", "optim_grads"):
        result["zero"] = 1 if taken["sharding"] == "optim" else 2
    if isinstance(shard, int) and shard > 0:
        result["dp"] = shard * max(1, int(copies))
    if "fp8" in taken and str(taken["fp8"]).lower() in ("hybrid", "e4m3", "true") and "precision" not in result:
        result["precision"] = "fp8_delayed"
    if str(taken.get("fp4", "")).lower() in ("e2m1", "true"):
        result["precision"] = "nvfp4"
    if "fp32_gradients" in taken:
        result["gradients"] = "fp32" if taken["fp32_gradients"] else "bf16"
    if taken.get("recompute_activations"):
        result.setdefault("recompute", "selective")
    if path.suffix.lower() == ".toml" and "stack" in known:
        result["stack"] = "torchtitan" if taken.get("compile") else "torchtitan_eager"
    if result.get("recompute") == "selective" and taken.get("selective_option") == "op":
        result["recompute"] = "op"
    if taken.get("deepep"):
        result["dispatcher"] = "deepep"
    if isinstance(taken.get("packed"), bool) and not taken["packed"]:
        result.pop("packed", None)
    if "mtp" in taken:
        result["mtp"] = bool(taken["mtp"])
    if isinstance(taken.get("cuda_graphs"), bool):
        result["cuda_graphs"] = "full" if taken["cuda_graphs"] else "none"
    for name in ("recompute_modules", "lora_targets"):
        if isinstance(taken.get(name), list):
            result[name] = ",".join(str(each) for each in taken[name])
    if isinstance(taken.get("nodes"), int) and isinstance(taken.get("gpus_per_node"), int):
        result["gpus"] = str(taken["nodes"] * taken["gpus_per_node"])
    return {name: _of_type(name, value, path) for name, value in result.items() if value is not None}


def _plain(value: Any) -> Any:
    """Numbers and switches of a shell script as such."""
    if not isinstance(value, str):
        return value
    if re.fullmatch(r"-?\d+", value):
        return int(value)
    return {"true": True, "false": False, "null": None}.get(value.lower(), value)


_TEXTS = ("precision", "recompute", "recompute_method", "recompute_modules", "schedule", "cp_comm", "dispatcher",
          "cuda_graphs", "optimizer", "lora_targets", "gradients", "model", "gpus", "stack")  # fmt: skip
_SWITCHES = ("sequence_parallel", "distributed_optimizer", "overlap", "tp_overlap", "expert_overlap",
             "fp8_param_gather", "activation_func_fp8_input_store", "mtp",
             "packed", "offload_optimizer")  # fmt: skip


def _of_type(name: str, value: Any, path: Path) -> Any:
    if name in _SWITCHES:
        return bool(value)
    if name in _TEXTS:
        if value is True or value is False:
            raise KernelcastError(f"{path}: {name} needs a value")
        return str(value[0] if isinstance(value, list) and value else value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise KernelcastError(f"{path}: {name} must be a whole number, not {value!r}")
    return value
