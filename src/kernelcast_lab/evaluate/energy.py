"""Joules of whole models' steps that this project measured, against forecasts: none was seen by the power model's fit.

The file is one of `kernelcast collect-models --power`. Every case is built again on meta tensors, traced as it was run,
and predicted. Needs torch and transformers; no GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from kernelcast.errors import KernelcastError
from kernelcast.forecast.predict_table import Times
from kernelcast.hardware import gpu
from kernelcast.training.step import STEP, Step, run_step
from kernelcast_lab.collect.cases import MODELS, Case, cut
from kernelcast_lab.evaluate.traced import traced_case

MEASURED = Path(__file__).parents[3] / "validation" / "power_models_h200_sxm.jsonl"
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


def compared(path: Path, words: Sequence[str] = ()) -> list[Drawn]:
    """The measured steps of a file; with ``words``, those whose id holds one of them."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    chip = gpu("h200_sxm")
    times, found = Times(chip, STEP), []
    for record in records:
        if record.get("status") != "ok" or (words and not any(word in record["id"] for word in words)):
            continue
        case = Case(**{name: record[name] for name in _FIELDS})
        trace = traced_case(case, cut(MODELS[case.model], case.layers))
        step = run_step(trace, chip, STEP, graph=record["launched"] == "graph", times=times)
        found.append(Drawn(case, record["seconds_per_call"], record["power_w"], step))
    if not found:
        raise KernelcastError(f"no measured step of {path} holds {' or '.join(words)} in its id")
    return found


def figures(found: Iterable[Drawn]) -> dict[str, list[dict[str, Any]]]:
    lines = [one.line for one in found]
    groups = sorted({(line["model"], line["mode"]) for line in lines})
    summary = [
        {
            "model": model, "mode": mode, "steps": len(own),
            **{name: fmean(abs(line[name]) for line in own) for name in ("joules_error", "watts_error", "time_error")},
            "inside": 100 * fmean(line["inside"] for line in own),
        }
        for model, mode in groups
        for own in [[line for line in lines if (line["model"], line["mode"]) == (model, mode)]]
    ]  # fmt: skip
    return {"cases": lines, "summary": summary}
