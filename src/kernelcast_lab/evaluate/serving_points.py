"""Engines that hold so many requests in flight, as AIConfigurator's table of measured deployments has them, against
simulations of the same closed loop: aggregated and disaggregated.

Points of InferenceX draw lengths from 0.8 to 1 of the nominal ones, ten requests for each in flight, and run by recipes
that are public. The other points do not say: they get fixed lengths, and steps that hold one prompt and the batch (or
2,048 tokens, vLLM's default then), as AIConfigurator configures engines.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kernelcast.errors import KernelcastError
from kernelcast.hardware import gpu
from kernelcast.inference.deployment import Deployment, Layout
from kernelcast.inference.disaggregated import Disaggregated, PhaseWorkers, balanced, infer_disaggregated
from kernelcast.inference.workload import Speculation
from kernelcast.models import model
from kernelcast.models.architecture import draft_of
from kernelcast.models.precision import Precision
from kernelcast.serving.load import Load
from kernelcast.serving.service import EnginePool, Service, engine_settings
from kernelcast.serving.simulate import Simulation, simulate
from kernelcast.serving.step_times import StepTimeTables, step_time_tables
from kernelcast.stacks import Stack, stack
from kernelcast_lab.data.serving import ServingPoint, SplitPoint, left_out, serving_points, split_points
from kernelcast_lab.evaluate.served import Compared, by_group

Stacks = Callable[[str], Stack]
_DEPLOYMENT = ("gpu", "stack", "version", "model", "tp", "pp", "dp", "moe_ep", "weights", "experts")
FEW = 4  # requests in flight, up to which TTFT is hardly a queue
_REQUESTS_EACH = 10  # requests for each in flight
_MOST = 640  # requests of a point, or four for each in flight
_DP_WAIT = 60  # timeout_iters of InferenceX's recipes with attention DP
_RECV_FROM = 16  # requests in flight
_ADMITTED = 0.5  # of the requests in flight, that decode at a time
# TensorRT-LLM's decode workers stream 100 tokens at a time (stream_interval of the recipes of dynamo, in github
# NVIDIA/srt-slurm), the aggregated engines that ``sequence_s`` was set on 10: a tenth of the messages.
_STREAM_SHARE = {"trtllm": 0.1}


def figures(root: Path | None) -> dict[str, list[dict[str, Any]]]:
    """Errors of TPOT, and of TTFT with few requests in flight; what was left out and why."""
    apart = split_points(root)
    points, left = closed_loops(serving_points(root), apart)
    values = [each for each in points if each.what == "TPOT" or each.groups["few"] == "yes"]
    whole, split = (
        [each for each in values if (each.groups["kind"] == "disaggregated") == apart] for apart in (False, True)
    )
    result = {"serving_points": by_group(whole)}
    result |= {f"serving_points_by_{by}": by_group(whole, by) for by in ("kind", "model", "stack", "gpu", "held_out")}
    result["disaggregated"] = by_group(split)
    result |= {f"disaggregated_by_{by}": by_group(split, by) for by in ("model", "stack", "gpu", "held_out")}
    result["disaggregated_static"] = by_group(static_points(apart)[0])
    answered = {"answered": sum(each.what == "TPOT" for each in whole), **dict(left.most_common())}
    result["points_answered"] = [{"points": count, "which": reason} for reason, count in answered.items()]
    result["rows_not_usable"] = [{"rows": count, "rule": rule} for rule, count in left_out(root).items()]
    return result


def closed_loops(points: Iterable[ServingPoint], split: Iterable[SplitPoint] = (), stacks: Stacks = stack,
                 tables: StepTimeTables | None = None, intervals: bool = False,
                 ) -> tuple[list[Compared], Counter[str]]:  # fmt: skip
    """TTFT and TPOT of each point; why others are left out. ``held_out``: every second point, which the hosts' times in
    ``stacks/`` were not set on."""
    left: Counter[str] = Counter()
    shared, compared = tables or step_time_tables(), []
    known: dict[Any, Deployment] = {}
    tested: list[ServingPoint | SplitPoint] = [*points, *split]
    for at, point in enumerate(tested):
        whole = point.decode if isinstance(point, SplitPoint) else point
        try:
            result = simulate(_loop_service(point, stacks, known), _loop(whole), intervals=intervals, tables=shared)
        except KernelcastError as error:
            left[str(error).split(";")[0].split(":")[0]] += 1
            continue
        if whole.running < _ADMITTED * whole.concurrency and _running(result) > _ADMITTED * whole.concurrency:
            left["its engine held fewer requests than were sent, by a limit that the table does not have"] += 1
            continue
        groups = {
            "kind": "disaggregated" if isinstance(point, SplitPoint) else _architecture(whole.model),
            "stack": whole.stack, "model": whole.model, "held_out": "yes" if at % 2 else "no",
            "few": "yes" if whole.concurrency <= FEW else "no", "id": whole.id, "gpu": whole.gpu,
        }  # fmt: skip
        for what, measured_s in (("TPOT", whole.tpot_s), ("TTFT", whole.ttft_s)):
            key = f"mean_{what.lower()}_ms"
            ends = (values.get(key) for values in (result.low, result.high))
            predicted_s, low_s, high_s = (None if x is None else x / 1e3 for x in (result.metrics[key], *ends))
            assert predicted_s is not None
            of_run = result.service.setting(result.load), result.supports
            compared.append(Compared(what, measured_s, predicted_s, groups, low_s, high_s, *of_run))
    return compared, left


def _running(result: Simulation) -> float:
    """Requests that decode at a time."""
    served = result.request_times
    share = (served.last_token_s - served.first_token_s).sum() / served.e2el_s.sum()
    return float(result.load.max_concurrency * share)


def _architecture(name: str) -> str:
    return "dense" if any(part in name for part in ("Llama", "Qwen3-32B")) else "experts"


def _loop(point: ServingPoint) -> Load:
    count = max(4 * point.concurrency, min(_REQUESTS_EACH * point.concurrency, _MOST))
    drawn = np.random.default_rng(0)
    shortest = 0.8 if point.public else 1.0
    inputs, outputs = (
        drawn.integers(int(shortest * tokens), tokens + 1, count)
        for tokens in (point.input_tokens, point.output_tokens)
    )
    return Load(np.zeros(count), inputs, outputs, max_concurrency=point.concurrency)


def _loop_service(point: ServingPoint | SplitPoint, stacks: Stacks, known: dict[Any, Deployment]) -> Service:
    if isinstance(point, SplitPoint):
        decode = replace(_loop_pool(point.decode, stacks, known, apart=True), replicas=point.decode_workers)
        prefill = replace(_loop_pool(point.prefill, stacks, known), replicas=point.prefill_workers)
        return Service(decode, prefill, "least_loaded", speculation_of(point.decode, decode.deployment))
    pool = _loop_pool(point, stacks, known)
    return Service(pool, speculation=speculation_of(point, pool.deployment))


def released(point: ServingPoint) -> str:
    """The engine, of the release that was measured where that is known; the others have a file of one release."""
    known = point.stack == "vllm" and re.fullmatch(r"[\d.]+", point.version or "")
    return f"{point.stack}=={point.version}" if known else point.stack


def _loop_pool(point: ServingPoint, stacks: Stacks, known: dict[Any, Deployment], apart: bool = False) -> EnginePool:
    """``apart``: its workers only decode."""
    key = (apart, *(getattr(point, name) for name in _DEPLOYMENT))
    if key not in known:  # of one object, whose step times are shared
        result = deployment_of(point)
        engine = replace(stacks(released(point)), moe_backend=result.stack.moe_backend)
        if apart and point.public:
            engine = replace(engine, sequence_s=engine.sequence_s * _STREAM_SHARE.get(point.stack, 1.0))
        known[key] = replace(result, stack=engine)
    limits: dict[str, Any] = {"chunked_prefill": True}
    deployment = known[key]
    if point.public and point.stack == "sglang":  # InferenceX's recipes
        limits |= {"recv_interval": 30 if point.concurrency >= _RECV_FROM else 10, "max_num_batched_tokens": 32768,
                   "max_prefill_tokens": 32768, "max_num_seqs": max(128, point.concurrency),
                   "prefix_caching": False}  # fmt: skip
    if point.public and point.stack == "trtllm":
        tokens = (1 + point.draft_tokens) * max(1, point.concurrency // point.dp) + point.input_tokens + 64
        limits |= {"max_num_batched_tokens": -(-tokens // 64) * 64, "dp_wait": _DP_WAIT}
    if not point.public and point.stack != "sglang":
        limits["max_num_batched_tokens"] = max(2048, point.input_tokens + point.concurrency)
    drafting = speculation_of(point, deployment)
    draft = drafting.draft if drafting else None
    return EnginePool(
        deployment, engine_settings(deployment, limits, point.input_tokens + point.output_tokens // 2, draft)
    )


# ---- Disaggregated deployments as static points, against AIConfigurator's measured closed loops. Each decode worker
# holds its part of the requests in flight, with the mean lengths of the load, or as many as the prefill workers can
# keep there. Times to first token are left out: most of a measured one is a queue, which a static point does not
# have.


_READ = 16384  # prompt tokens that a rank prefills at a time (max_num_tokens of most recipes)
_MEAN_LENGTH = 0.9  # of the nominal one, where lengths are drawn from 0.8 to 1


def static_points(points: Iterable[SplitPoint]) -> tuple[list[Compared], Counter[str]]:
    """TPOT of each point with its interval; why others are left out."""
    results, left = [], Counter[str]()
    for point in points:
        decode = point.decode
        try:
            values = static_point(point)
        except KernelcastError as error:
            left[str(error).split(";")[0].split(" needs ")[0]] += 1
            continue
        groups = {"gpu": decode.gpu, "stack": decode.stack, "model": decode.model, "id": decode.id}
        results.append(Compared("TPOT", decode.tpot_s, values.tpot.value, groups, values.tpot.low, values.tpot.high))
    return results, left


def static_point(point: SplitPoint) -> Disaggregated:
    """The forecast of one."""
    decode, prefill = deployment_of(point.decode), deployment_of(point.prefill)
    prefill = replace(prefill, precision=replace(prefill.precision, cache=decode.precision.cache))
    share = _MEAN_LENGTH if point.decode.public else 1.0
    inputs, outputs = (max(2, round(share * n)) for n in (point.decode.input_tokens, point.decode.output_tokens))
    held = max(1, round(point.decode.concurrency / point.decode_workers))
    read = min(prefill.layout.dp * max(1, _READ // inputs), -(-point.decode.concurrency // point.prefill_workers))
    pools = PhaseWorkers(prefill, read, point.prefill_workers), PhaseWorkers(decode, held, point.decode_workers)
    return balanced(infer_disaggregated(*pools, inputs, outputs, speculation=speculation_of(point.decode, decode)))


# ---- Deployments of AIConfigurator's measured points. What the table leaves out is as public recipes have it.


_BLACKWELL = "10"
_ACCEPTANCE = {"trtllm": 0.7, "sglang": 0.5}  # of draft tokens, in tenths: set on the points that are not held out
_NAMES = {  # of sources: of the catalogue, where it does not know theirs
    "RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic": "llama-4-scout", "zhipuai/GLM-5": "glm-5",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b", "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "nvidia/Qwen3-32B-NVFP4": "qwen3-32b", "nvidia/DeepSeek-R1-NVFP4": "deepseek-r1",
}  # fmt: skip
# fp8 checkpoints of these have a scale for every 128 x 128 weights; the table says fp8 of theirs too
_BLOCKS = ("deepseek", "glm", "minimax", "qwen3-235b", "qwen3.5")


def speculation_of(point: ServingPoint, deployment: Deployment) -> Speculation | None:
    """Drafted by the model's own multi-token prediction layers."""
    if not point.draft_tokens:
        return None
    return Speculation(
        point.draft_tokens, _ACCEPTANCE[point.stack], replace(deployment, model=draft_of(deployment.model))
    )


def deployment_of(point: ServingPoint) -> Deployment:
    """The deployment that a point was measured on."""
    result, gpu_id = model(_NAMES.get(point.model, point.model)), gpu(point.gpu)
    layout = Layout(tp=point.tp, pp=point.pp, dp=point.dp, ep=point.moe_ep or 1)
    formats = _precision(point, result.name, gpu_id.compute_capability)
    engine = replace(stack(released(point)), moe_backend=_experts_kernel(point, gpu_id.compute_capability))
    return Deployment(result, gpu_id, engine, formats, layout)


def _experts_kernel(point: ServingPoint, capability: str) -> str:
    """What InferenceX's recipes set on Blackwell (benchmarks/single_node/*_b200*.sh): TensorRT-LLM's generated
    kernels; with attention DP TensorRT-LLM's CUTLASS or, of 8 bits, DeepGEMM, and SGLang's of DeepEP; "": the usual."""
    if not (point.public and capability.startswith(_BLACKWELL)) or point.stack == "vllm":
        return ""
    if point.stack == "sglang" and point.dp > 1:
        return ""
    if point.stack == "trtllm" and point.dp > 1:
        return "deepgemm" if point.weights == "fp8" else "cutlass"
    return "trtllm"


def _precision(point: ServingPoint, name: str, capability: str) -> Precision:
    """As the table says, but for what its labels leave out."""
    # NVIDIA's quantised checkpoints, which TensorRT-LLM serves, come with an fp8 KV cache; InferenceX's recipes give
    # one to vLLM with quantised Llama, and to SGLang on B200 (benchmarks/single_node/*_b200.sh).
    blackwell = capability.startswith(_BLACKWELL)
    given = {"vllm": "Llama" in point.model, "sglang": blackwell}.get(point.stack, False) and point.public
    cache = "fp8" if (point.stack == "trtllm" or given) and point.weights != "bf16" else None
    if name == "gpt-oss-120b":  # mxfp4 experts, the rest bf16; the table calls it nvfp4 everywhere
        return Precision("bf16", cache, "mxfp4_fp8" if blackwell else "mxfp4")
    if name.startswith("kimi") and point.weights == "int4":  # only its experts are
        return Precision("bf16", cache, "int4")
    if name.startswith(_BLOCKS) and point.weights == "fp8":
        return Precision("fp8_block", cache)
    return Precision(point.weights, cache, point.experts)
