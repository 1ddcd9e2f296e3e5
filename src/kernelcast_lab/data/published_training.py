"""Published training runs as training jobs. What the tables do not say is in ``training_recipes.toml``."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kernelcast.errors import KernelcastError
from kernelcast.hardware import gpu
from kernelcast.models import Architecture
from kernelcast.models.catalogue import bundled
from kernelcast.models.config import parse
from kernelcast.stacks.training_stack import TrainingStack, training_stack
from kernelcast.toml_folder import read_toml
from kernelcast.training.job import Lora, Offload, Recompute, TrainingJob, TrainingPrecision, precision
from kernelcast.training.layout import TrainingLayout
from kernelcast_lab.data.shared import NotExpressibleError

FILE = Path(__file__).with_name("training_recipes.toml")
_GRADIENT_BYTES = {"bf16": 2.0, "fp32": 4.0}
_GPUS = {"MI300": "mi300x", "MI325": "mi325x", "NVIDIA H200-NVL-141GB": "h200_nvl"}
_MLPERF_CONFIG = re.compile(r"x(\d+)xtp(\d+)pp(\d+)cp(\d+)")  # micro-batches, layout


def training_step(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Tokens a second and GPU of Megatron-Bridge, NeMo and llm-foundry."""
    settings = _recipe(row)
    sizes = {name: int(row[name] or 1) for name in ("tp", "pp", "cp", "vp", "ep")}
    seq = int(row["seq_len"])
    if row["source"] == "llm-foundry" and "act_ckpt=True" in str(row["notes"]):
        settings["full_layers"] = 0
    job = _job(row, settings, sizes, gpus=int(row["gpus"]), seq=seq, micro_batch=int(row["mbs"]),
               global_batch=int(row["gbs"]))  # fmt: skip
    seconds = job.tokens / (row["tokens_per_s_per_gpu"] * job.gpus)
    return _case(job, str(row["source"]), {"time_s": seconds})


def mlperf_step(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Median seconds of a step, with the layout that the submission's config names."""
    gpus, batch = int(row["gpus"]), int(row["global_batch"])
    named = {**row, "source": "MLPerf", "model": row["benchmark"], "precision": "FP8"}
    settings = _recipe(named)
    sizes = {"tp": 1, "pp": 1, "cp": 1, "vp": int(row["vp"] or 1), "ep": 1}
    if row["tp"] is not None:
        sizes |= {name: int(row[name]) for name in ("tp", "pp", "cp")}
    else:
        sizes |= _mlperf_layout(row) or {
            "cp": max(1, gpus * int(row["grad_accum"]) // batch),
            **settings.pop("layout", {}),
        }
    job = _job(named, settings, sizes, gpus=gpus, seq=int(row["seq_len"]), micro_batch=1, global_batch=batch)
    return _case(job, "NeMo", {"time_s": row["median_step_s"]})


def _mlperf_layout(row: Mapping[str, Any]) -> dict[str, int]:
    """Of several configs in a submission: the first with as many micro-batches as its log has."""
    for micro_batches, *layout in _MLPERF_CONFIG.findall(str(row["config"] or "")):
        if int(micro_batches) == int(row["grad_accum"]):
            return dict(zip(("tp", "pp", "cp"), map(int, layout), strict=True))
    return {}


def simumax_step(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Megatron-LM on 8 B200, bf16 with fp32 gradients, micro-batches of one sequence; models with fewer layers."""
    named = {**row, "source": "SimuMax", "precision": "bf16"}
    sizes = {"vp": 1, **{name: int(row[name]) for name in ("tp", "pp", "cp", "ep")}}
    batch = int(row["dp"]) * int(row["micro_batches"])
    settings = _recipe(named)
    settings["config"] = {**settings.get("config", {}), "num_hidden_layers": int(row["layers"])}
    job = _job(named, settings, sizes, gpus=int(row["gpus"]), seq=int(row["seq_len"]), micro_batch=1,
               global_batch=batch)  # fmt: skip
    measured = {"time_s": row["real_step_ms"] / 1e3, "memory_bytes": row["real_peak_alloc_gib"] * 2**30}
    return _case(job, "Megatron-LM", measured)


def _case(job: TrainingJob, stack: str, measured: Mapping[str, float]) -> dict[str, Any]:
    return {"gpu": job.gpu.id, "model": job.model.name, "stack": stack, "command": "train", "measured": measured,
            "parameters": {"job": job}}  # fmt: skip


# ---- Recipes


def _recipe(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the recipes say of a row, the last one first."""
    settings: dict[str, Any] = {}
    for entry in read_toml(FILE)["recipe"]:
        if all(_matches(row.get(key), allowed) for key, allowed in entry["where"].items()):
            settings |= entry
    return {name: value for name, value in settings.items() if name not in ("where", "source")}


def _matches(value: Any, allowed: list[Any]) -> bool:
    if isinstance(value, float):
        return value in allowed
    return any(fnmatchcase(str(value), str(pattern)) for pattern in allowed)


def _job(
    row: Mapping[str, Any], settings: Mapping[str, Any], sizes: Mapping[str, int], *, gpus: int, seq: int,
    micro_batch: int, global_batch: int,
) -> TrainingJob:  # fmt: skip
    """The job of a row: sizes of its layout, the rest by its recipes."""
    name = str(row["model"])
    rest = gpus // (sizes["tp"] * sizes["pp"] * sizes["cp"])
    if rest * sizes["tp"] * sizes["pp"] * sizes["cp"] != gpus or global_batch % (rest * micro_batch):
        raise NotExpressibleError("sizes of parallelism and batch that do not divide the GPUs")
    try:
        model = _model(name, seq, settings.get("config", {}))
        layout = _layout(sizes, settings, rest, global_batch // (rest * micro_batch))
        named = {k: v for k, v in settings.items() if k in ("routing", "packed", "dispatcher", "mtp", "expert_overlap",
                                                            "cuda_graphs")}  # fmt: skip
        lora: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in settings.get("lora", {}).items()
        }
        target = _GPUS.get(str(row.get("accelerator")), _GPUS.get(row["gpu"], str(row["gpu"])))
        return TrainingJob(
            model=model, gpu=gpu(target), layout=layout, seq=seq, micro_batch=micro_batch,
            stack=replace(training_stack(settings["stack"]), **_own(TrainingStack, settings)),
            precision=_precision(row, settings), recompute=_recompute(settings), lora=Lora(**lora) if lora else None,
            offload=Offload(activation_layers=settings.get("offload_layers", 0)),
            tp_overlap=settings.get("tp_overlap", False) and sizes["tp"] > 1, **named,
        )  # fmt: skip
    except KernelcastError as error:
        raise NotExpressibleError(str(error)) from None


def _layout(sizes: Mapping[str, int], settings: Mapping[str, Any], replicas: int, micro_batches: int) -> TrainingLayout:
    """Layers are split as a recipe says, else as the job does by itself."""
    tp, pp, cp, virtual = (sizes[name] for name in ("tp", "pp", "cp", "vp"))
    more = {name: settings[name] for name in ("cp_comm", "between_nodes") if name in settings}
    if pp > 1 and virtual > 1:
        more |= {"schedule": "interleaved", "virtual_stages": virtual}
    if pp > 1 and str(pp * virtual) in settings.get("split", {}):
        more["stage_layers"] = tuple(settings["split"][str(pp * virtual)])
    return TrainingLayout(
        dp=replicas, tp=tp, pp=pp, cp=cp, ep=sizes["ep"], zero=settings["zero"] if replicas * cp > 1 else 0,
        sequence_parallel=tp > 1, micro_batches=micro_batches, overlap=settings.get("overlap", True), **more,
    )  # fmt: skip


def _own(cls: type[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that are fields of a dataclass, other than its names."""
    known = {each.name for each in fields(cls)} - {"id", "name", "release", "sources"}
    return {name: value for name, value in settings.items() if name in known}


def _precision(row: Mapping[str, Any], settings: Mapping[str, Any]) -> TrainingPrecision:
    found = precision(settings.get("precision") or read_toml(FILE)["precisions"][row["precision"]])
    changed: dict[str, Any] = {"gather_bytes": settings["gather"]} if "gather" in settings else {}
    if "gradients" in settings:
        changed |= dict.fromkeys(("gradient_bytes", "reduce_bytes"), _GRADIENT_BYTES[settings["gradients"]])
    if settings.get("attention"):
        changed["attention"] = settings["attention"]
    return replace(found, **changed, **_own(TrainingPrecision, {k: v for k, v in settings.items() if k != "attention"}))


def _recompute(settings: Mapping[str, Any]) -> Recompute:
    if "full_layers" in settings:
        return Recompute("full", "block" if settings["full_layers"] else "uniform", settings["full_layers"])
    modules = tuple(settings.get("recompute", ()))
    return Recompute("selective", modules=modules) if modules else Recompute()


@functools.cache
def _published(name: str) -> dict[str, Any]:
    """The config.json of a name in the tables."""
    tables = read_toml(FILE)
    if name in tables["gpt"]:
        layers, hidden, heads, vocab = tables["gpt"][name]
        return {"_id": name.lower(), "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": layers,
                "n_embd": hidden, "n_head": heads, "vocab_size": vocab, "activation_function": "gelu",
                "tie_word_embeddings": True}  # fmt: skip
    if name not in tables["models"]:
        raise NotExpressibleError(f"the model {name}")
    stem = tables["models"][name]
    return {**bundled(stem), "_id": stem}


def _model(name: str, seq: int, changed: Mapping[str, Any]) -> Architecture:
    """Learned positions are as many as the sequence has tokens."""
    config = {**_published(name), **changed}
    if config["model_type"] == "gpt2":
        config["n_positions"] = seq
    return replace(parse(config, name=config["_id"]), quantization=None)
