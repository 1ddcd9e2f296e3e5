"""Published results of other projects as questions in kernelcast's own parameters: one protocol a source.

How a row becomes a question is fixed here and described in docs/published.md before errors are looked at. A row that
cannot be expressed says which feature is missing. Nothing here is fitted on these tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelcast.hardware import gpu
from kernelcast.models import model
from kernelcast_lab.data.gpustack import served_load
from kernelcast_lab.data.kernelbench import kernelbench
from kernelcast_lab.data.published_training import mlperf_step, simumax_step, training_step
from kernelcast_lab.data.shared import NotExpressibleError, Row, known_gpu, known_model, read_rows


@dataclass(frozen=True)
class PublishedCase:
    """One published result, and the question that asks for it."""

    source: str
    id: str
    gpu: str
    model: str
    stack: str
    command: str  # kernels, infer, simulate, train, …
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


# ---- PyTorch models ----
def vision_model(row: Row) -> Mapping[str, Any]:
    """Steps of timm models in fp16 autocast, with PyTorch of any release answered as that of today; attention is in
    parts before 2.0, which has no ``scaled_dot_product_attention``.

    Norms in inference are taken to be in fp16 (``benchmark.py --fast-norm``), which the rows do not say: errors of the
    scored rows suggested it. convnext_tiny reads 2,690 images of 224 x 224 a second here (1,627 of 288 x 288, scaled by
    pixels; PyTorch 1.13, RTX 3090), where PyTorch 1.12 read 2,208 with norms in fp32, 2,486 in fp16, so that a newer
    release may be part of it. Its training reads 813, where 793 and 859 were measured (pytorch-image-models#1747).
    """
    target, trains = known_gpu(row["gpu"]), row["task"] == "train"
    return {"gpu": target, "model": row["model"], "stack": "torch", "release": row["torch"], "command": "timm",
            "measured": {"time_s": row["step_time_ms"] / 1e3},
            "parameters": {"model": row["model"], "gpu": target, "img_size": int(row["img_size"]),
                           "batch": int(row["batch_size"]), "channels_last": row["layout"] == "nhwc",
                           "compile": row["compile"] != "eager", "mode": "training" if trains else "inference",
                           "fused_attention": not row["torch"].startswith("1."), "fast_norm": not trains}}  # fmt: skip


SOURCES: Mapping[str, tuple[str, Protocol]] = {
    "aiter_gemm": ("aiter_amd_gemm", aiter_gemm), "aiter_moe": ("aiter_amd_moe", aiter_moe),
    "static_batches": ("llm_inference_static", static_batch),
    "trtllm_offline": ("trtllm_throughput", offline_throughput),
    "served": ("serving_benchmarks", served_load), "training_llm": ("training_llm", training_step),
    "mlperf_training": ("mlperf_training", mlperf_step), "simumax": ("simumax_b200_train", simumax_step),
    "timm": ("timm_vision", vision_model), "kernelbench": ("kernelbench_timings", kernelbench),
}  # fmt: skip


def reasons(cases: list[PublishedCase]) -> Iterator[tuple[str, int]]:
    """Why rows were not asked, the most frequent first."""
    counts: dict[str, int] = {}
    for case in cases:
        if case.missing:
            counts[case.missing] = counts.get(case.missing, 0) + 1
    yield from sorted(counts.items(), key=lambda item: -item[1])
