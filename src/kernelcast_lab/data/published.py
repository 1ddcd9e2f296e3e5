"""Published results of other projects as questions in kernelcast's own parameters: one protocol a source.

How a row becomes a question is fixed here and described in docs/published.md before errors are looked at. A row that
cannot be expressed says which feature is missing. Nothing here is fitted on these tables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelcast.hardware import gpu
from kernelcast.models import model
from kernelcast_lab.data.gpustack import served_load
from kernelcast_lab.data.kernelbench import kernelbench
from kernelcast_lab.data.shared import NotExpressibleError, Row, known_gpu, known_model, read_rows


@dataclass(frozen=True)
class PublishedCase:
    """One published result, and the question that asks for it."""

    source: str
    id: str
    gpu: str
    model: str
    stack: str
    command: str  # kernels, infer, simulate or trace
    parameters: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)  # by name of the quantity
    release: str = ""  # of the engine, as published; "": not said
    missing: str = ""  # the feature without which it cannot be asked


Protocol = Callable[[Row], Mapping[str, Any]]  # the fields of a PublishedCase


def published_cases(root: Path | str | None, source: str) -> list[PublishedCase]:
    """All rows of a source, those that cannot be expressed with the reason."""
    table, protocol = SOURCES[source]
    cases = []
    for at, row in enumerate(read_rows(root, f"public/{table}")):
        case: dict[str, Any] = {"source": source, "id": f"{source}/{at}", "gpu": "", "model": "", "stack": ""}
        try:
            case |= protocol(row)
        except NotExpressibleError as reason:
            case |= {"command": "", "missing": str(reason), "gpu": str(row.get("gpu") or row.get("hardware") or "")}
        cases.append(PublishedCase(**case))
    return cases


# ---- kernels ----
def aiter_gemm(row: Row) -> Mapping[str, Any]:
    """The best tuned kernel of a shape: the ceiling is compared."""
    if row["suspect"] or row["B"] is not None:
        raise NotExpressibleError("a suspect row" if row["suspect"] else "batched GEMM with tuned kernels")
    family = str(row["family"])
    dtype = "fp8_block" if "blockscale" in family else "bf16" if family == "bf16" else "int8"
    sizes = {name: int(row[name.upper()]) for name in ("m", "n", "k")}
    return {"gpu": "mi300x", "model": f"gemm {dtype}", "stack": "aiter", "command": "kernels",
            "parameters": {"op": "gemm", "gpu": "mi300x", "dtype": dtype, **sizes},
            "measured": {"ceiling_us": row["us"]}}  # fmt: skip


def aiter_moe(row: Row) -> Mapping[str, Any]:
    """Both GEMMs of the experts that one GPU holds."""
    dtype = "bf16" if row["q_type"] == "QuantType.No" else "fp8_block"
    sizes = {"tokens": "token", "hidden": "model_dim", "inter": "inter_dim", "experts": "expert", "topk": "topk"}
    parameters = {name: int(row[column]) for name, column in sizes.items()}
    return {"gpu": "mi300x", "model": f"moe {dtype}", "stack": "aiter", "command": "kernels",
            "parameters": {"op": "moe", "gpu": "mi300x", "dtype": dtype, **parameters},
            "measured": {"ceiling_us": row["us"]}}  # fmt: skip


# ---- serving ----
_ARGONNE = {"Nvidia A100 GPU": "a100_sxm_40gb", "Nvidia H100 GPU": "h100_sxm", "AMD MI300X GPU": "mi300x"}
_ENGINES_OF_2024 = {"vLLM": ("vllm", "0.5"), "TensorRT-LLM": ("trtllm", "0.10")}


def static_batch(row: Row) -> Mapping[str, Any]:
    """One static batch in fp16, which runs as bf16 does. The releases are those of the summer of 2024."""
    if row["framework"] not in _ENGINES_OF_2024:
        raise NotExpressibleError(f"the engine {row['framework']}")
    name, _ = known_model(row["model"])
    stack, release = _ENGINES_OF_2024[row["framework"]]
    length, target = int(row["input_output_len"]), _ARGONNE[row["hardware"]]
    parameters = {"tp": int(row["n_devices"]), "batch": int(row["batch"]), "input_len": length, "output_len": length}
    stack = f"{stack}=={release}" if stack == "vllm" else stack
    return {"gpu": target, "model": name, "stack": stack, "release": release, "command": "infer",
            "measured": {"total_s": row["latency_s"]},
            "parameters": {"model": name, "gpu": target, "stack": stack, **parameters}}  # fmt: skip


# Requests by input and output length, from "Preparing a Dataset" of TensorRT-LLM's performance overview (v1.0 and v1.2)
_TRTLLM_REQUESTS = {
    (128, 128): 30000, (128, 2048): 3000, (128, 4096): 1500, (500, 2000): 3000, (1000, 1000): 3000, (1000, 2000): 1500,
    (2048, 128): 3000, (2048, 2048): 1500, (5000, 500): 1500, (20000, 2000): 1000, (1024, 1024): 3000,
    (8192, 1024): 1500, (1024, 8192): 1500, (32768, 1024): 1000, (1024, 32768): 1000,
}  # fmt: skip


def offline_throughput(row: Row) -> Mapping[str, Any]:
    """trtllm-bench as the performance overview runs it: all requests at once. DEPn: attention data parallel and expert
    parallel over n GPUs. Mixtures of experts are run with both in v1.0 too, where the table says TPn. Checkpoints in
    FP8 and FP4 keep the KV cache in fp8, but gpt-oss on Hopper."""
    name, _ = known_model(row["model"].removesuffix("-0528"))
    target = known_gpu(row["gpu"])
    layout = {axis: int(size) for axis, size in re.findall(r"(DEP|TP|PP)(\d+)", row["parallel"])}
    ranks = layout.get("DEP", layout.get("TP", 1))
    parallel = {"tp": ranks, "pp": layout.get("PP", 1)}
    if model(name).parameters.experts:
        parallel |= {"tp": 1, "dp": ranks, "ep": ranks}
    oss = name.startswith("gpt-oss")
    formats = {} if oss else {"dtype": {"FP8": "fp8", "FP4": "nvfp4"}[row["weights"]]}
    if name.startswith("deepseek") and row["weights"] == "FP8":
        formats = {}  # the checkpoint's own block format
    if not (oss and gpu(target).compute_capability.startswith("9")):
        formats["kv_dtype"] = "fp8"
    lengths = int(row["isl"]), int(row["osl"])
    requests = {"num_prompts": _TRTLLM_REQUESTS[lengths], "offline": True, "input_len": lengths[0],
                "output_len": lengths[1]}  # fmt: skip
    return {"gpu": target, "model": name, "stack": "trtllm", "release": row["trtllm"].strip("v"), "command": "simulate",
            "measured": {"output_throughput": row["output_tok_s_total"]},
            "parameters": {"model": name, "gpu": target, "stack": "trtllm", **formats, **parallel,
                           **requests}}  # fmt: skip


# ---- training ----
# MosaicML's MPT: layers, hidden size, heads (llm-foundry's scripts/train/yamls/pretrain)
_MPT = {"MPT-125m": (12, 768, 12), "MPT-350m": (24, 1024, 16), "MPT-760m": (24, 1536, 12), "MPT-1b": (24, 2048, 16),
        "MPT-3b": (32, 2560, 20), "MPT-7b": (32, 4096, 32), "MPT-13b": (40, 5120, 40), "MPT-30b": (48, 7168, 56),
        "MPT-70b": (80, 8192, 64)}  # fmt: skip
_TRAINED = {"GPT OSS 120B": "gpt-oss-120b", "Qwen3_235B_a22B": "qwen3-235b-a22b", "LLAMA3_8B": "llama-3-8b",
            "LLAMA3_70B": "llama-3-70b", "DeepSeekV3 (w/o MTP)": "deepseek-v3"}  # fmt: skip
_PRECISIONS = {"BF16": "mixed", "bf16": "pure", "amp_bf16": "mixed"}


def training_step(row: Row) -> Mapping[str, Any]:
    """Tokens a second and GPU of Megatron-Bridge, NeMo (mixed precision, distributed optimizer) and llm-foundry (FSDP:
    ZeRO 3)."""
    if row["precision"] not in _PRECISIONS:
        raise NotExpressibleError(f"training in {str(row['precision']).split(' ')[0]}")
    if row["task"] != "Pre-Training":
        raise NotExpressibleError(f"{row['task']} by name")
    if int(row["cp"] or 1) > 1:
        raise NotExpressibleError("context parallelism")
    gpus, tp, pp, ep = (int(row[name] or 1) for name in ("gpus", "tp", "pp", "ep"))
    dp, micro = gpus // (tp * pp), int(row["mbs"])
    passes = max(1, round(row["gbs"] / (dp * micro)))
    target, seq = known_gpu(row["gpu"]), int(row["seq_len"])
    layout = {"dp": dp, "tp": tp, "pp": pp, "ep": ep, "micro_batches": passes}
    built: dict[str, Any]
    common = {"gpu": target, "mode": "training", "batch": micro, "seq": seq, "dtype": "bf16"}
    if row["source"] == "llm-foundry":
        layers, hidden, heads = _MPT[row["model"]]
        name = str(row["model"]).lower()
        # MPT with fused attention and learned positions is an OPT with GELU and without biases; FSDP's mixed precision
        # gathers parameters in bf16
        built = {"config": {"model_type": "opt", "architectures": ["OPTForCausalLM"], "hidden_size": hidden,
                            "num_hidden_layers": layers, "num_attention_heads": heads, "ffn_dim": 4 * hidden,
                            "max_position_embeddings": seq, "vocab_size": 50368, "word_embed_proj_dim": hidden,
                            "activation_function": "gelu", "enable_bias": False,
                            **dict.fromkeys(("dropout", "attention_dropout"), 0.0)}}  # fmt: skip
        zero, checkpointing = (3 if row["fsdp"] == "FULL_SHARD" else 2), "act_ckpt=True" in str(row["notes"])
    else:
        if row["model"] not in _TRAINED:
            raise NotExpressibleError(f"training of {row['model']} by name")
        name, zero, checkpointing = _TRAINED[row["model"]], 1, False
        built = {"model": name}
        if int(row["vp"] or 1) > 1:
            layout |= {"schedule": "interleaved", "virtual_stages": int(row["vp"])}
    seconds = row["gbs"] * seq / (row["tokens_per_s_per_gpu"] * gpus)
    return {"gpu": target, "model": name, "stack": row["source"], "command": "trace", "measured": {"time_s": seconds},
            "parameters": {**built, **common, **layout, "zero": zero if dp > 1 else 0, "checkpointing": checkpointing,
                           "precision": _PRECISIONS[row["precision"]]}}  # fmt: skip


def mlperf_step(row: Row) -> Mapping[str, Any]:
    """MLPerf's submissions train in FP8 (some in FP4), the 70B by LoRA."""
    raise NotExpressibleError("LoRA by name, in FP8" if row["benchmark"] == "llama2_70b_lora" else "training in FP8")


_SIMUMAX = {"llama3_70b": "llama-3-70b", "llama3_405b": "llama-3.1-405b", "deepseekv2": "deepseek-v2",
            "deepseekv3": "deepseek-v3"}  # fmt: skip


def simumax_step(row: Row) -> Mapping[str, Any]:
    """Megatron-LM, bf16 with fp32 master weights, micro-batches of one sample, sequence parallel with TP."""
    if row["cp"] > 1:
        raise NotExpressibleError("context parallelism")
    name = _SIMUMAX[row["model"]]
    sizes = {axis: int(row[axis]) for axis in ("tp", "pp", "dp", "ep")}
    return {"gpu": known_gpu(row["gpu"]), "model": name, "stack": "Megatron-LM", "command": "trace",
            "measured": {"time_s": row["real_step_ms"] / 1e3},
            "parameters": {"base": name, "layers": int(row["layers"]), "gpu": "b200_sxm", "mode": "training",
                           "batch": 1, "seq": int(row["seq_len"]), "dtype": "bf16", "precision": "mixed", **sizes,
                           "zero": 1 if sizes["dp"] > 1 else 0, "micro_batches": int(row["micro_batches"]),
                           "sequence_parallel": sizes["tp"] > 1}}  # fmt: skip


# ---- PyTorch models ----
def vision_model(row: Row) -> Mapping[str, Any]:
    """Steps of timm models in fp16 autocast, with PyTorch of any release answered as that of today."""
    target = known_gpu(row["gpu"])
    return {"gpu": target, "model": row["model"], "stack": "torch", "release": row["torch"], "command": "timm",
            "measured": {"time_s": row["step_time_ms"] / 1e3},
            "parameters": {"model": row["model"], "gpu": target, "img_size": int(row["img_size"]),
                           "batch": int(row["batch_size"]), "channels_last": row["layout"] == "nhwc",
                           "compile": row["compile"] != "eager",
                           "mode": "training" if row["task"] == "train" else "inference"}}  # fmt: skip


SOURCES: Mapping[str, tuple[str, Protocol]] = {
    "aiter_gemm": ("aiter_amd_gemm", aiter_gemm), "aiter_moe": ("aiter_amd_moe", aiter_moe),
    "static_batches": ("llm_inference_static", static_batch),
    "trtllm_offline": ("trtllm_throughput", offline_throughput),
    "served": ("serving_benchmarks", served_load), "training_llm": ("training_llm", training_step),
    "mlperf_training": ("mlperf_training", mlperf_step), "simumax": ("simumax_b200_train", simumax_step),
    "timm": ("timm_vision", vision_model), "kernelbench": ("kernelbench_timings", kernelbench),
}  # fmt: skip


def config_file(parameters: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The parameters of a trace, with a config that the catalogue does not have written to a file."""
    given = dict(parameters)
    if "config" in given:
        config = given.pop("config")
    elif "base" in given:
        from kernelcast.models.catalogue import MODELS

        config = {**json.loads((MODELS / f"{given.pop('base')}.json").read_text()),
                  "num_hidden_layers": given.pop("layers")}  # fmt: skip
        config = {name: value for name, value in config.items() if not name.startswith("_")}
    else:
        return given
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return {"model": str(path), **given}


def reasons(cases: list[PublishedCase]) -> Iterator[tuple[str, int]]:
    """Why rows were not asked, the most frequent first."""
    counts: dict[str, int] = {}
    for case in cases:
        if case.missing:
            counts[case.missing] = counts.get(case.missing, 0) + 1
    yield from sorted(counts.items(), key=lambda item: -item[1])
