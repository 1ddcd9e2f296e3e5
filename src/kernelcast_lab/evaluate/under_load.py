"""Servers under load, as they were measured, against simulations of the same load.

- ``vllm_h100``: vLLM on H100 under inference-perf's shared-prefix generator. It sends as many different prompts as
  there are users, in turn: from the second round on a prompt is cached whole. Conversations have a single turn, as in
  its authors' simulator (docs/simulate.md says why).
- ``llmservingsim``: 300 requests through vLLM on an RTX PRO 6000, one by one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kernelcast.hardware import gpu
from kernelcast.inference.deployment import Deployment, Layout
from kernelcast.models import model
from kernelcast.models.precision import Precision
from kernelcast.serving.bench import read_bench
from kernelcast.serving.calibrate import calibrate, calibration_requests
from kernelcast.serving.load import Load, staged, vllm_draws
from kernelcast.serving.metrics import BenchResult
from kernelcast.serving.replay import SimulatedRuns
from kernelcast.serving.service import EnginePool, Service, engine_settings
from kernelcast.serving.simulate import Simulation, simulate
from kernelcast.serving.step_times import step_time_tables
from kernelcast.stacks import Stack, stack
from kernelcast_lab.data.serving import Row
from kernelcast_lab.data.shared import read_rows, root_path
from kernelcast_lab.evaluate.served import Compared, by_group

SOURCES = ("vllm_h100", "llmservingsim")
Stacks = Callable[[str], Stack]
_NAMES = {"RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic": "llama-4-scout"}  # of the source: of the catalogue
_RELEASE_H100 = "vllm==0.15"  # current when the runs were made (their folders are of February 2026)
_STATS = {"ttft": ("mean", "p90"), "itl": ("mean",), "e2e": ("mean", "p90")}


def figures(root: Path | None, sources: Sequence[str] = SOURCES) -> dict[str, list[dict[str, Any]]]:
    """Tables of errors, by source."""
    result: dict[str, list[dict[str, Any]]] = {}
    if "vllm_h100" in sources:
        runs = vllm_runs(root)
        whole = [run for run in runs if run.groups["stage"] == "all"]
        result |= {"vllm_h100": by_group(whole), "vllm_h100_by_run": by_group(whole, "run")}
        result["vllm_h100_second_stage_calibrated_on_the_first"] = by_group(calibrated_runs(root))
    if "llmservingsim" in sources:
        result["llmservingsim"] = by_group(single_requests(root))
        result["llmservingsim_calibrated_on_the_first_100"] = by_group(single_requests(root, calibrate_on=100))
    return result


def vllm_runs(root: Path | str | None, stacks: Stacks = stack) -> list[Compared]:
    """Each run, whole ("all") and by stage."""
    rows: dict[str, list[Row]] = {}
    for row in read_rows(root, "vllm_h100/served"):
        rows.setdefault(row["id"], []).append(row)
    results = []
    for name, stages in rows.items():
        whole = next(row for row in stages if row["stage"] == -1)
        result = simulate(_vllm_service(whole, stacks), shared_prefix_load(whole))
        run = f"{whole['model'].split('/')[-1]}, {whole['workload']} ({name})"
        for part in stages:
            results += _run_compared(result, part, None if part["stage"] < 0 else part["stage"], run)
    return results


def calibrated_runs(root: Path | str | None) -> list[Compared]:
    """The second stage of runs that have two, the server calibrated on what was measured of the first."""
    rows: dict[str, dict[int, Row]] = {}
    for row in read_rows(root, "vllm_h100/served"):
        rows.setdefault(row["id"], {})[row["stage"]] = row
    results = []
    for name, stages in rows.items():
        if 1 not in stages:
            continue
        load, service, tables = shared_prefix_load(stages[-1]), _vllm_service(stages[-1], stack), step_time_tables()
        first = {f"{stat}_{'e2el' if of == 'e2e' else of}_ms": stages[0][f"measured_{of}_{stat}_ms"]
                 for of, stats in _STATS.items() for stat in stats if of != "itl"}  # fmt: skip
        bench = BenchResult(Path(name), "inference-perf", load, False, {}, stages=(first, {}))
        fitted = calibrate(bench, service, calibration_requests(bench, "stage:0"), tables)
        result = simulate(fitted.service, load, tables=tables)
        results += _run_compared(result, stages[1], 1, f"{stages[1]['model'].split('/')[-1]} ({name})")
    return results


def _vllm_service(row: Row, stacks: Stacks) -> Service:
    known = model(_NAMES.get(row["model"]) or str(row["model"]))
    formats = Precision.of(known, "fp8" if row["precision"] == "fp8" else None)
    deployment = Deployment(known, gpu(row["gpu"]), stacks(_RELEASE_H100), formats, Layout(int(row["tp"])))
    limits = {"max_num_seqs": row["max_num_seqs"], "max_num_batched_tokens": row["max_num_batched_tokens"],
              "kv_blocks": row["kv_blocks"], "block_size": row["block_tokens"]}  # fmt: skip
    return Service(
        EnginePool(deployment, engine_settings(deployment, {key: int(value) for key, value in limits.items()}))
    )


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
    metrics = result.metrics if stage is None else result.stage(stage)
    groups = {"run": run, "stage": "all" if stage is None else str(stage)}
    compared = []
    for name, stats in _STATS.items():
        for stat in stats:
            key = f"{stat}_{'e2el' if name == 'e2e' else name}_ms"
            low_s, high_s = (result.low[key] / 1e3, result.high[key] / 1e3) if stage is None else (None, None)
            measured_s = row[f"measured_{name}_{stat}_ms"] / 1e3
            of_run = result.service.setting(result.load), result.supports
            predicted_s, what = metrics[key] / 1e3, f"{name.upper()} {stat}"
            compared.append(Compared(what, measured_s, predicted_s, groups, low_s, high_s, *of_run))
    return compared


def single_requests(root: Path | str | None, stacks: Stacks = stack, calibrate_on: int = 0) -> list[Compared]:
    """Mean and 90th percentile of the 300 requests; of those after the first so many, which calibrate."""
    folder = root_path(root) / "llmservingsim"
    name = "rtxpro6000_llama-3.1-8b_vllm"
    engine = json.loads((folder / f"{name}_meta.json").read_text())["engine_kwargs"]
    rows = sorted(read_rows(root, f"llmservingsim/{name}_requests"), key=lambda row: row["arrival_s"])
    arrival, first, last = (
        np.array([row[key] for row in rows]) for key in ("arrival_s", "first_token_s", "last_token_s")
    )
    inputs, outputs = (np.array([int(row[key]) for row in rows]) for key in ("input_toks", "output_toks"))
    release = json.loads((folder / f"{name}_meta.json").read_text())["vllm_version"]
    deployment = Deployment(model("llama-3.1-8b"), gpu("rtx_pro_6000_server"), stacks(f"vllm=={release}"))
    # Times are the engine's own: no front end stands before them.
    deployment = replace(deployment, stack=replace(deployment.stack, request_s=0.0, front_s=0.0, token_s=0.0))
    limits = {name: engine[name] for name in ("max_num_seqs", "max_num_batched_tokens")}
    service, load, tables = (
        Service(EnginePool(deployment, engine_settings(deployment, limits))),
        Load(arrival, inputs, outputs),
        step_time_tables(),
    )
    measured = {"ttft": first - arrival, "tpot": (last - first) / (outputs - 1), "e2el": last - arrival}
    if calibrate_on:
        bench = BenchResult(folder, "requests", load, True, {}, ttft_s=measured["ttft"], e2el_s=measured["e2el"])
        service = calibrate(bench, service, calibration_requests(bench, str(calibrate_on)), tables).service
    runs = SimulatedRuns.of(service, load, tables)
    rest = np.arange(len(load)) >= calibrate_on
    labels = {f"{stat}_{key}_ms": float(of(seconds[rest])) * 1e3 for key, seconds in measured.items()
            for stat, of in (("mean", np.mean), ("p90", lambda values: np.quantile(values, 0.9)))}  # fmt: skip
    return [
        Compared(f"{key.upper()} {stat}", figure.measured / 1e3, figure.predicted / 1e3, {"run": name},
                 (figure.low or 0.0) / 1e3, (figure.high or 0.0) / 1e3, service.setting(load), runs.supports)
        for figure in runs.figures(labels, rest) for stat, key, _ in (figure.name.split("_"),)
    ]  # fmt: skip


LIVE = Path(__file__).parents[3] / "validation" / "vllm_h200"  # this project's own
# Medians: the first requests of a server waited for compiles
_LIVE = {"p50_ttft_ms": "TTFT p50", "p50_tpot_ms": "TPOT p50", "p50_itl_ms": "ITL p50", "p50_e2el_ms": "E2E p50"}


def live_runs(folder: Path = LIVE) -> list[Compared]:
    """Results of `vllm bench serve`, MODEL_RUN.json each, of default servers (vLLM 0.22.1) on an H200; those without a
    request that failed."""
    tables, compared = step_time_tables(), []
    services: dict[str, Service] = {}
    for path in sorted(folder.glob("*.json")):
        name, run = path.stem.rsplit("_", 1)
        if json.loads(path.read_text()).get("failed"):
            continue
        if name not in services:
            # weights drawn at random route tokens at random
            deployment = Deployment(model(name), gpu("h200_sxm"), stack("vllm"), routing="random")
            given = re.search(r"--max-num-seqs[= ](\d+)", json.loads(path.read_text()).get("serve_args", ""))
            settings = engine_settings(deployment, {"max_num_seqs": int(given[1])} if given else None)
            services[name] = Service(EnginePool(deployment, settings))
        bench = read_bench(path)
        runs = SimulatedRuns.of(services[name], bench.load, tables)
        of_run = services[name].setting(bench.load), runs.supports
        compared += [
            Compared(_LIVE[figure.name], figure.measured, figure.predicted, {"run": f"{name} {run}", "model": name},
                     figure.low, figure.high, *of_run)
            for figure in runs.figures(bench.metrics) if figure.name in _LIVE
        ]  # fmt: skip
    return compared
