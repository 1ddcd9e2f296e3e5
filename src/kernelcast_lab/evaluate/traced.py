"""Traced models against whole models measured by this project.

Every measured case is built again on meta tensors, traced as it was run, and predicted: the sum of its kernels against
the profiler's, the wall time against the clock's. Needs torch and transformers; no GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from kernelcast.errors import KernelcastError
from kernelcast.forecast import Predictor
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict_table import Times
from kernelcast.hardware import gpu
from kernelcast.tracing import trace
from kernelcast.tracing.traced import Trace
from kernelcast.training.step import LAUNCH_BOUND, STEP, Step, run_step
from kernelcast_lab.collect.cases import MODELS, Case, Config, with_layers
from kernelcast_lab.collect.steps import build, make_step
from kernelcast_lab.collect.store import MeasuredCase, load_cases

MEASURED = Path(__file__).parents[3] / "validation" / "models_h200_sxm.json.gz"
_META = torch.device("meta")


@dataclass(frozen=True)
class ForecastCase:
    """A case, and what was predicted for it."""

    case: MeasuredCase
    step: Step

    @property
    def kernel_error(self) -> float:
        return self.step.kernel_time_s * 1e3 / self.case.kernel_sum_ms - 1

    @property
    def wall_error(self) -> float:
        return self.step.time_s * 1e3 / self.case.wall_ms - 1

    @property
    def inside(self) -> bool:
        """Whether the interval holds the wall time."""
        return self.step.low_s * 1e3 <= self.case.wall_ms <= self.step.high_s * 1e3

    @property
    def launch_bound(self) -> bool:
        """As measured: the GPU was idle for more of the wall time than gaps between kernels explain."""
        idle_ms = self.case.wall_ms - self.case.kernel_sum_ms
        gaps_ms = self.step.host.gap_s * 1e3 * self.case.measured.profile.kernel_calls
        return self.case.case.launch == "eager" and (idle_ms - gaps_ms) / self.case.wall_ms > LAUNCH_BOUND


def traced_case(case: Case, config: Config) -> Trace:
    """A case of the model of this config on meta tensors, as ``collect-models`` runs it."""
    model = build(config, case.dtype, _META)
    if case.mode == "training":
        with _META:
            tokens = torch.randint(4, model.config.vocab_size, (case.batch, case.seq))
        options = {} if model.config.model_type == "bert" else {"use_cache": False}
        return trace(model, {"input_ids": tokens, "labels": tokens, **options}, "training", name=case.id)
    with _META:
        step = make_step(model, case, _META)
    return trace(step, (), graph=case.launch == "graph", name=case.id)


def evaluate(cases: Iterable[MeasuredCase], conditions: Conditions) -> list[ForecastCase]:
    target = gpu("h200_sxm")
    times = Times(target, conditions)
    results = []
    for case in cases:
        step = run_step(
            traced_case(case.case, case.config),
            target,
            conditions,
            tf32=case.case.dtype == "tf32",
            graph=case.case.launch == "graph",
            times=times,
        )
        results.append(ForecastCase(case, step))
    return results


def case_lines(result: Iterable[ForecastCase]) -> list[dict[str, Any]]:
    """A line a case; ``launch_bound``: as measured, ``told``: as forecast."""
    return [
        {
            "case": f.case.case.id,
            "kernels_ms": f.case.kernel_sum_ms,
            "predicted_kernels_ms": f.step.kernel_time_s * 1e3,
            "kernels_error": 100 * f.kernel_error,
            "wall_ms": f.case.wall_ms,
            "predicted_wall_ms": f.step.time_s * 1e3,
            "wall_error": 100 * f.wall_error,
            "launch_bound": f.launch_bound,
            "told": f.step.launch_bound,
            "covered": f.step.coverage,
        }
        for f in result
    ]


def summary(result: Sequence[ForecastCase]) -> list[dict[str, Any]]:
    """Mean errors by mode, and in how many cases launch-bound is forecast right."""
    groups = {"inference": [f for f in result if f.case.case.mode != "training"]}
    groups |= {mode: [f for f in result if f.case.case.mode == mode] for mode in ("prefill", "decode", "training")}
    groups |= {"eager": [f for f in result if f.case.case.launch == "eager"], "all": list(result)}
    return [
        {
            "mode": name,
            "cases": len(members),
            "kernels_error": 100 * fmean(abs(f.kernel_error) for f in members),
            "wall_error": 100 * fmean(abs(f.wall_error) for f in members),
            "wall_inside": 100 * fmean(f.inside for f in members),
            "launch_bound_told_right": sum(f.launch_bound == f.step.launch_bound for f in members),
        }
        for name, members in groups.items()
        if members
    ]


def figures(cases: Iterable[MeasuredCase], predictor: str | Predictor) -> dict[str, list[dict[str, Any]]]:
    compared = evaluate(cases, replace(STEP, predictor=predictor))
    return {"cases": case_lines(compared), "summary": summary(compared)}


def chosen_cases(path: Path, only: Sequence[str] = ()) -> list[MeasuredCase]:
    """The measured cases of a file; with ``only``, those whose id contains one of them."""
    result = [case for case in load_cases(path) if not only or any(part in case.case.id for part in only)]
    if not result:
        raise KernelcastError(f"no measured case of {path} holds {' or '.join(only)} in its id")
    return result


# ---- Joules of whole models' steps that this project measured, against forecasts: none was seen by the power model's
# fit. The file is one of `kernelcast collect-models --power`. Every case is built again on meta tensors, traced as it
# was run, and predicted. Needs torch and transformers; no GPU.


ENERGY_MEASURED = Path(__file__).parents[3] / "validation" / "power_models_h200_sxm.jsonl"
_FIELDS = ("model", "mode", "launch", "dtype", "batch", "seq", "layers")


@dataclass(frozen=True)
class Drawn:
    """A step as it was measured while it repeated, and its forecast."""

    case: Case
    seconds: float
    power_w: float
    step: Step

    @property
    def line(self) -> dict[str, Any]:
        energy, joules = self.step.energy, self.seconds * self.power_w
        assert energy is not None
        watts = energy.value / self.step.time_s
        return {
            "case": self.case.id, "model": self.case.model, "mode": self.case.mode, "joules": joules,
            "predicted_joules": energy.value, "joules_error": 100 * (energy.value / joules - 1),
            "watts": self.power_w, "predicted_watts": watts, "watts_error": 100 * (watts / self.power_w - 1),
            "time_error": 100 * (self.step.time_s / self.seconds - 1),
            "inside": energy.low <= joules <= energy.high,
        }  # fmt: skip


def energy_cases(path: Path, only: Sequence[str] = ()) -> list[Drawn]:
    """The measured steps of a file; with ``only``, those whose id contains one of them."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    target = gpu("h200_sxm")
    times, result = Times(target, STEP), []
    for record in records:
        if record.get("status") != "ok" or (only and not any(part in record["id"] for part in only)):
            continue
        case = Case(**{name: record[name] for name in _FIELDS})
        trace = traced_case(case, with_layers(MODELS[case.model], case.layers))
        step = run_step(trace, target, STEP, graph=record["launched"] == "graph", times=times)
        result.append(Drawn(case, record["seconds_per_call"], record["power_w"], step))
    if not result:
        raise KernelcastError(f"no measured step of {path} holds {' or '.join(only)} in its id")
    return result


_ERRORS = ("joules_error", "watts_error", "time_error")


def energy_figures(result: Iterable[Drawn]) -> dict[str, list[dict[str, Any]]]:
    lines = [each.line for each in result]
    groups = sorted({(line["model"], line["mode"]) for line in lines})
    summary = [
        {
            "model": model, "mode": mode, "steps": len(members),
            **{name: fmean(abs(line[name]) for line in members) for name in _ERRORS},
            "inside": 100 * fmean(line["inside"] for line in members),
        }
        for model, mode in groups
        for members in [[line for line in lines if (line["model"], line["mode"]) == (model, mode)]]
    ]  # fmt: skip
    return {"cases": lines, "summary": summary}
