"""Catalogues: GPUs, models, ops, stacks, parameters, and the evidence that forecasts rest on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kernelcast._version import __version__
from kernelcast.app.questions.evidence import all_entries
from kernelcast.app.questions.evidence import evidence as select_evidence
from kernelcast.app.questions.kernel import KernelQuestion
from kernelcast.app.report import lists as report
from kernelcast.app.report.published import published_fields
from kernelcast.app.web.parameters import QUESTIONS, parameter_fields, web_parameters
from kernelcast.forecast import PREDICTORS
from kernelcast.forecast.end_to_end import end_to_end
from kernelcast.forecast.evidence import MeasuredConfiguration
from kernelcast.hardware import fabrics, gpu, gpu_ids
from kernelcast.hardware.prices import read_prices
from kernelcast.models import model, model_ids
from kernelcast.models.precision import CACHE, Precision
from kernelcast.models.precision import WEIGHTS as WEIGHT_FORMATS
from kernelcast.ops import REGISTRY
from kernelcast.stacks.stack import stack, stack_ids


def about(limits: Mapping[str, Any]) -> dict[str, Any]:
    prediction, _ = KernelQuestion(op="gemm", parameters={"m": 1, "n": 1, "k": 1}, gpu="h200_sxm").answer()
    return {
        "version": __version__,
        "weights": prediction.predictor,
        "predictors": list(PREDICTORS),
        "calls_measured": sum(entry.calls for entry in all_entries()),
        "gpus": len(gpu_ids()),
        "models": len(model_ids()),
        "ops": len(REGISTRY),
        "limits": limits,
    }


def gpus() -> dict[str, Any]:
    measured, prices = {entry.gpu for entry in all_entries()}, read_prices()
    ordered = sorted(map(gpu, gpu_ids()), key=report.architecture_age)
    return {
        "gpus": [
            {**report.gpu_summary(item), "measured": item.id in measured,
             "usd_per_hour": prices[item.id].usd_per_hour if item.id in prices else None}
            for item in ordered
        ]
    }  # fmt: skip


def gpu_details(gpu_id: str) -> dict[str, Any]:
    return report.gpu_fields(gpu(gpu_id))


def models() -> dict[str, Any]:
    return {
        "models": [
            {"name": name, **report.model_fields(m), "kind": m.kind,
             "experts": m.active_parameters.total < m.parameters.total, "dtype": Precision.of(m, None, None).label}
            for name, m in ((name, model(name)) for name in model_ids())
        ]
    }  # fmt: skip


def ops() -> dict[str, Any]:
    return {"ops": [report.op_fields(REGISTRY[op]) for op in sorted(REGISTRY)]}


def stacks() -> dict[str, Any]:
    return {
        "stacks": [{"id": s.id, "name": s.name, "schedules": bool(s.scheduler)} for s in map(stack, stack_ids())],
        "fabrics": sorted(fabrics()),
        "weight_formats": list(WEIGHT_FORMATS),
        "cache_formats": list(CACHE),
    }


def parameters() -> dict[str, Any]:
    return {command: [parameter_fields(parameter) for parameter in web_parameters(command)] for command in QUESTIONS}


def evidence(by: str = "kind", **only: Any) -> dict[str, Any]:
    """As `kernelcast evidence --json` has it; ``only``: of these op, gpu, stack."""
    return report.evidence_fields(select_evidence(**only), by)


def grid() -> dict[str, Any]:
    """Evidence by GPU, op and stack: which of them were measured together."""
    cells: dict[tuple[str, str, str], list[MeasuredConfiguration]] = {}
    for entry in all_entries():
        cells.setdefault((entry.gpu, entry.op, str(entry.configuration["stack"])), []).append(entry)
    axes = [sorted({key[at] for key in cells}) for at in range(3)]
    return {
        **dict(zip(("gpus", "ops", "stacks"), axes, strict=True)),
        "cells": [
            {"gpu": gpu_id, "op": op, "stack": stack_id, **_summed(members)}
            for (gpu_id, op, stack_id), members in sorted(cells.items())
        ],
    }


def published(by: str = "source") -> dict[str, Any]:
    """As `kernelcast evidence --published --json` has it."""
    return published_fields(end_to_end(), by)


def _summed(members: list[MeasuredConfiguration]) -> dict[str, Any]:
    line = report.summed_evidence(members, "op")[0]
    tested = sum(entry.tested for entry in members if entry.error is not None)  # the weight of a cell in a mean
    return {name: line[name] for name in ("kinds", "calls", "error", "inside")} | {"tested": tested}


LISTS: Mapping[str, Callable[..., Any]] = {
    "about": about, "gpus": gpus, "gpu": gpu_details, "models": models, "ops": ops, "stacks": stacks,
    "parameters": parameters, "evidence": evidence, "grid": grid, "published": published,
}  # fmt: skip
