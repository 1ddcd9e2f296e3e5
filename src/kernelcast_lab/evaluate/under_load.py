"""Servers under load, as they were measured, against simulations of the same load.

- ``vllm_h100``: vLLM on H100 under inference-perf's shared-prefix generator. It sends as many different prompts as
  there are users, in turn: from the second round on a prompt is cached whole. Turns are single, as its authors'
  simulator takes them (docs/simulate.md says what speaks for that).
- ``llmservingsim``: 300 requests through vLLM on an RTX PRO 6000, one by one.
- ``aiconfigurator``: closed loops on many engines, whole and disaggregated. Those of InferenceX draw lengths from 0.8
  to 1 of the nominal ones, ten requests for each in flight. Of the others nothing is told: fixed lengths, and steps
  that take one prompt and the batch (or 2,048 tokens, vLLM's default then), as AIConfigurator writes them for engines.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kernelcast.errors import KernelcastError
from kernelcast.hardware import gpu
from kernelcast.networks import model
from kernelcast.networks.forward import Deployment
from kernelcast.networks.precision import Precision
from kernelcast.parallel import Layout
from kernelcast.serving.engine.fleet import Pool, Service, Tables
from kernelcast.serving.engine.result import Simulation
from kernelcast.serving.engine.settings import settings_of
from kernelcast.serving.engine.simulate import simulate, tables_for
from kernelcast.serving.load import Bench, Load
from kernelcast.serving.load.arrivals import staged, vllm_draws
from kernelcast.serving.replay.compare import Runs
from kernelcast.serving.replay.fit import calibrate, part_of
from kernelcast.stacks import Stack, stack
from kernelcast_lab.data.serving import Row, ServingPoint, SplitPoint, serving_points, split_points
from kernelcast_lab.data.shared import read_rows, root_path
from kernelcast_lab.evaluate.served import Compared, by_group

SOURCES = ("vllm_h100", "llmservingsim", "aiconfigurator")
Stacks = Callable[[str], Stack]
_SKEW = 1.2  # of tokens over experts
_ASKED = 10  # requests for each in flight
_MOST = 640  # requests of a point, or four for each in flight
_RECV_FROM = 16  # requests in flight
_ADMITTED = 0.5  # of the requests in flight, that decode at a time
_BLACKWELL = "10"
_CATALOGUE = {
    "RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic": "llama-4-scout", "meta-llama/Llama-2-7b-hf": "llama-2-7b",
    "meta-llama/Llama-3.1-70B-Instruct": "llama-3.1-70b", "mistralai/Mistral-Nemo-Instruct-2407": "mistral-nemo-12b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b", "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b", "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "Qwen/Qwen3-32B": "qwen3-32b", "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b", "openai/gpt-oss-120b": "gpt-oss-120b",
    "deepseek-ai/DeepSeek-R1": "deepseek-r1", "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "moonshotai/Kimi-K2.5": "kimi-k2",
}  # names of the sources: of the catalogue  # fmt: skip
_STATS = {"ttft": ("mean", "p90"), "itl": ("mean",), "e2e": ("mean", "p90")}


def figures(root: Path | None, sources: Sequence[str] = SOURCES) -> dict[str, list[dict[str, Any]]]:
    """Tables of errors, by source."""
    found: dict[str, list[dict[str, Any]]] = {}
    if "vllm_h100" in sources:
        runs = vllm_runs(root)
        whole = [run for run in runs if run.groups["stage"] == "all"]
        found |= {"vllm_h100": by_group(whole), "vllm_h100_by_run": by_group(whole, "run")}
        found["vllm_h100_second_stage_calibrated_on_the_first"] = by_group(calibrated_runs(root))
    if "llmservingsim" in sources:
        found["llmservingsim"] = by_group(one_by_one(root))
        found["llmservingsim_calibrated_on_the_first_100"] = by_group(one_by_one(root, calibrate_on=100))
    if "aiconfigurator" in sources:
        points, left = closed_loops(serving_points(root), split_points(root))
        found["closed_loops"] = by_group(points)
        found |= {f"closed_loops_by_{by}": by_group(points, by)
                  for by in ("kind", "stack", "model", "concurrency", "held_out")}  # fmt: skip
        told = {"simulated": sum(c.what == "TPOT" for c in points), **dict(left.most_common())}
        found["points_told"] = [{"points": count, "which": reason} for reason, count in told.items()]
    return found


def vllm_runs(root: Path | str | None, stacks: Stacks = stack) -> list[Compared]:
    """Each run, whole ("all") and by stage."""
    rows: dict[str, list[Row]] = {}
    for row in read_rows(root, "vllm_h100/served"):
        rows.setdefault(row["id"], []).append(row)
    found = []
    for name, stages in rows.items():
        whole = next(row for row in stages if row["stage"] == -1)
        result = simulate(_vllm_service(whole, stacks), shared_prefix_load(whole))
        run = f"{whole['model'].split('/')[-1]}, {whole['workload']} ({name})"
        for part in stages:
            found += _run_compared(result, part, None if part["stage"] < 0 else part["stage"], run)
    return found


def calibrated_runs(root: Path | str | None) -> list[Compared]:
    """The second stage of runs that have two, the server's terms learnt from what was measured of the first."""
    rows: dict[str, dict[int, Row]] = {}
    for row in read_rows(root, "vllm_h100/served"):
        rows.setdefault(row["id"], {})[row["stage"]] = row
    found = []
    for name, stages in rows.items():
        if 1 not in stages:
            continue
        load, service, tables = shared_prefix_load(stages[-1]), _vllm_service(stages[-1], stack), tables_for()
        first = {f"{stat}_{'e2el' if of == 'e2e' else of}_ms": stages[0][f"measured_{of}_{stat}_ms"]
                 for of, stats in _STATS.items() for stat in stats if of != "itl"}  # fmt: skip
        bench = Bench(Path(name), "inference-perf", load, False, {}, stages=(first, {}))
        fitted = calibrate(bench, service, part_of(bench, "stage:0"), tables)
        result = simulate(fitted.service, load, tables=tables)
        found += _run_compared(result, stages[1], 1, f"{stages[1]['model'].split('/')[-1]} ({name})")
    return found


def _vllm_service(row: Row, stacks: Stacks) -> Service:
    named = _CATALOGUE[row["model"]]
    known = model(named)
    formats = Precision.of(known, "fp8" if row["precision"] == "fp8" else None)
    place = Deployment(known, gpu(row["gpu"]), stacks("vllm"), formats, Layout(int(row["tp"])), _SKEW)
    limits = {"max_num_seqs": row["max_num_seqs"], "max_num_batched_tokens": row["max_num_batched_tokens"],
              "kv_blocks": row["kv_blocks"], "block_size": row["block_tokens"]}  # fmt: skip
    return Service(Pool(place, settings_of(place, {key: int(value) for key, value in limits.items()})))


def shared_prefix_load(row: Row, seed: int = 0) -> Load:
    """What inference-perf sent: users in turn, each with one prompt."""
    stages = list(zip(json.loads(row["rates"]), json.loads(row["durations_s"]), strict=True))
    times, which = staged(stages, vllm_draws(seed))
    count, users = len(times), int(row["system_prompts"] * row["users_per_prompt"])
    system, question = int(row["system_prompt_tokens"]), int(row["question_tokens"])
    each = int(row["users_per_prompt"])
    shared = tuple(((at % users // each, system), (1000 + at % users, question)) for at in range(count))
    inputs, outputs = (np.full(count, n) for n in (system + question, int(row["output_tokens"])))
    return Load(times, inputs, outputs, shared, stages=which)


def _run_compared(result: Simulation, row: Row, stage: int | None, run: str) -> list[Compared]:
    found = result.metrics if stage is None else result.stage(stage)
    groups = {"run": run, "stage": "all" if stage is None else str(stage)}
    compared = []
    for name, stats in _STATS.items():
        for stat in stats:
            key = f"{stat}_{'e2el' if name == 'e2e' else name}_ms"
            ends = (result.low[key] / 1e3, result.high[key] / 1e3) if stage is None else (None, None)
            measured_s = row[f"measured_{name}_{stat}_ms"] / 1e3
            compared.append(Compared(f"{name.upper()} {stat}", measured_s, found[key] / 1e3, groups, *ends))
    return compared


def one_by_one(root: Path | str | None, stacks: Stacks = stack, calibrate_on: int = 0) -> list[Compared]:
    """Mean and 90th percentile of the 300 requests; of those behind the first so many, which terms were learnt from."""
    folder = root_path(root) / "llmservingsim"
    name = "rtxpro6000_llama-3.1-8b_vllm"
    engine = json.loads((folder / f"{name}_meta.json").read_text())["engine_kwargs"]
    rows = sorted(read_rows(root, f"llmservingsim/{name}_requests"), key=lambda row: row["arrival_s"])
    arrival, first, last = (
        np.array([row[key] for row in rows]) for key in ("arrival_s", "first_token_s", "last_token_s")
    )
    inputs, outputs = (np.array([int(row[key]) for row in rows]) for key in ("input_toks", "output_toks"))
    place = Deployment(model("llama-3.1-8b"), gpu("rtx_pro_6000_server"), stacks("vllm"))
    # Times are the engine's own: no front end stands before them.
    place = replace(place, stack=replace(place.stack, request_s=0.0, front_s=0.0, token_s=0.0))
    limits = {word: engine[word] for word in ("max_num_seqs", "max_num_batched_tokens")}
    service, load, tables = (
        Service(Pool(place, settings_of(place, limits))),
        Load(arrival, inputs, outputs),
        tables_for(),
    )
    measured = {"ttft": first - arrival, "tpot": (last - first) / (outputs - 1), "e2el": last - arrival}
    if calibrate_on:
        bench = Bench(folder, "requests", load, True, {}, ttft_s=measured["ttft"], e2el_s=measured["e2el"])
        service = calibrate(bench, service, part_of(bench, str(calibrate_on)), tables).service
    runs = Runs.of(service, load, tables)
    rest = np.arange(len(load)) >= calibrate_on
    told = {f"{stat}_{key}_ms": float(of(seconds[rest])) * 1e3 for key, seconds in measured.items()
            for stat, of in (("mean", np.mean), ("p90", lambda values: np.quantile(values, 0.9)))}  # fmt: skip
    return [
        Compared(f"{key.upper()} {stat}", figure.measured / 1e3, figure.predicted / 1e3, {"run": name},
                 (figure.low or 0.0) / 1e3, (figure.high or 0.0) / 1e3)
        for figure in runs.figures(told, rest) for stat, key, _ in (figure.name.split("_"),)
    ]  # fmt: skip


def closed_loops(points: Iterable[ServingPoint], split: Iterable[SplitPoint] = (), stacks: Stacks = stack,
                 tables: Tables | None = None) -> tuple[list[Compared], Counter[str]]:  # fmt: skip
    """TTFT and TPOT of each point; why others are left out. ``held_out``: every second point, which the hosts' times in
    ``stacks/`` were not set on."""
    left: Counter[str] = Counter()
    shared, found = tables or tables_for(), []
    known: dict[Any, Deployment] = {}
    asked: list[ServingPoint | SplitPoint] = [*points, *split]
    for at, point in enumerate(asked):
        whole = point.decode if isinstance(point, SplitPoint) else point
        try:
            result = simulate(_loop_service(point, stacks, known), _loop(whole), intervals=False, tables=shared)
        except KernelcastError as error:
            left[str(error).split(";")[0].split(":")[0]] += 1
            continue
        if whole.running < _ADMITTED * whole.concurrency and _running(result) > _ADMITTED * whole.concurrency:
            left["its engine held fewer requests than were sent, by a limit that the table does not tell"] += 1
            continue
        groups = {
            "kind": "disaggregated" if isinstance(point, SplitPoint) else _kind(whole.model), "stack": whole.stack,
            "model": f"{whole.model} {whole.stack}", "held_out": "yes" if at % 2 else "no",
            "concurrency": f"{2 ** int(np.log2(whole.concurrency)):04d}", "id": whole.id, "gpu": whole.gpu,
        }  # fmt: skip
        metrics = result.metrics
        found.append(Compared("TPOT", whole.tpot_s, metrics["mean_tpot_ms"] / 1e3, groups))
        found.append(Compared("TTFT", whole.ttft_s, metrics["mean_ttft_ms"] / 1e3, groups))
    return found, left


def _running(result: Simulation) -> float:
    """Requests that decode at a time."""
    served = result.served
    share = (served.last_token_s - served.first_token_s).sum() / served.e2el_s.sum()
    return float(result.load.max_concurrency * share)


def _kind(name: str) -> str:
    return "dense" if any(word in name for word in ("Llama", "Qwen3-32B")) else "experts"


def _loop(point: ServingPoint) -> Load:
    count = max(4 * point.concurrency, min(_ASKED * point.concurrency, _MOST))
    drawn = np.random.default_rng(0)
    shortest = 0.8 if point.public else 1.0
    inputs, outputs = (
        drawn.integers(int(shortest * tokens), tokens + 1, count)
        for tokens in (point.input_tokens, point.output_tokens)
    )
    return Load(np.zeros(count), inputs, outputs, max_concurrency=point.concurrency)


def _loop_service(point: ServingPoint | SplitPoint, stacks: Stacks, known: dict[Any, Deployment]) -> Service:
    if isinstance(point, SplitPoint):
        decode = replace(_loop_pool(point.decode, stacks, known), replicas=point.decode_workers)
        prefill = replace(_loop_pool(point.prefill, stacks, known), replicas=point.prefill_workers)
        return Service(decode, prefill, "least_loaded")
    return Service(_loop_pool(point, stacks, known))


def _loop_pool(point: ServingPoint, stacks: Stacks, known: dict[Any, Deployment]) -> Pool:
    key = (
        point.gpu,
        point.stack,
        point.model,
        point.tp,
        point.pp,
        point.dp,
        point.moe_ep,
        point.weights,
        point.experts,
    )
    if key not in known:  # of one object, whose step times are shared
        known[key] = replace(deployment_of(point), skew=_SKEW, stack=stacks(point.stack))
    limits: dict[str, Any] = {"chunked_prefill": True}
    place = known[key]
    if point.public and point.stack == "sglang":  # InferenceX's recipes
        limits |= {"recv_interval": 30 if point.concurrency >= _RECV_FROM else 10, "max_num_batched_tokens": 32768,
                   "max_prefill_tokens": 32768, "max_num_seqs": max(128, point.concurrency)}  # fmt: skip
    if not point.public and point.stack != "sglang":
        limits["max_num_batched_tokens"] = max(2048, point.input_tokens + point.concurrency)
    return Pool(place, settings_of(place, limits, point.input_tokens + point.output_tokens // 2))


def deployment_of(point: ServingPoint) -> Deployment:
    """Where a point was served."""
    if point.model not in _CATALOGUE:
        raise KernelcastError(f"{point.model} is not in the catalogue")
    place, name = gpu(point.gpu), _CATALOGUE[point.model]
    layout = Layout(tp=point.tp, pp=point.pp, dp=point.dp, ep=point.moe_ep or 1)
    return Deployment(model(name), place, stack(point.stack), _precision(point, name, place.compute_capability), layout)


def _precision(point: ServingPoint, name: str, capability: str) -> Precision:
    """As the table says, but for what its labels leave out."""
    # NVIDIA's quantised checkpoints, which TensorRT-LLM serves, come with an fp8 KV cache; InferenceX's recipes for
    # quantised Llama give vLLM one.
    llama = point.stack == "vllm" and "Llama" in point.model and point.public
    cache = "fp8" if (point.stack == "trtllm" or llama) and point.weights != "bf16" else None
    if name == "gpt-oss-120b":  # mxfp4 experts, the rest bf16; the table calls it nvfp4 everywhere
        return Precision("bf16", cache, "nvfp4" if capability.startswith(_BLACKWELL) else "int4")
    if name == "kimi-k2" and point.weights == "int4":  # only its experts are
        return Precision("bf16", cache, "int4")
    if name == "qwen3-235b-a22b" and point.weights == "fp8":  # the published checkpoint has blocks of 128 x 128
        return Precision("fp8_block", cache)
    return Precision(point.weights, cache, point.experts)
