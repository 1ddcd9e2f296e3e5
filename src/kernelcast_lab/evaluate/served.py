"""Whole models as one static batch in a serving engine, measured by PipeWeave, against predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernelcast.forecast.end_to_end import Setting, WholeSupport
from kernelcast.hardware import gpu
from kernelcast.inference.deployment import Deployment, Layout
from kernelcast.inference.infer import infer_many
from kernelcast.inference.workload import Workload
from kernelcast.models import model
from kernelcast.models.precision import Precision
from kernelcast.stacks import stack
from kernelcast_lab.data.serving import ServedCase, served_cases
from kernelcast_lab.evaluate.scores import ErrorSummary

# The source's names, where they are not names of the catalogue.
_MODELS = {"Qwen2.5-14B": "qwen2.5-14b", "Qwen3-32B": "qwen3-32b", "Llama-3.1-70B": "llama-3.1-70b"}


@dataclass(frozen=True)
class Compared:
    """One measured time beside its prediction, in seconds; ``groups``: what errors are grouped by."""

    what: str
    measured_s: float
    predicted_s: float
    groups: Mapping[str, str]
    low_s: float | None = None  # the interval, where the time itself was predicted
    high_s: float | None = None
    setting: Setting | None = None  # of the run
    supports: WholeSupport | None = None

    @property
    def inside(self) -> bool | None:
        if self.low_s is None or self.high_s is None:
            return None
        return self.low_s <= self.measured_s <= self.high_s

    @property
    def error(self) -> float:
        """In percent of the measured time; above 0: predicted too slow."""
        return (self.predicted_s / self.measured_s - 1) * 100


def static_batches(cases: Sequence[ServedCase]) -> list[Compared]:
    """Total, prefill and mean decode step of every case."""
    pairs = []
    for case in cases:
        inputs, outputs = (tuple(int(n) for n in column) for column in zip(*case.requests, strict=True))
        pairs.append((_case(case), Workload(inputs, outputs, chunk=0)))  # read in one pass, as it was measured
    results = []
    for case, result in zip(cases, infer_many(pairs), strict=True):
        groups = {"gpu": case.gpu, "stack": case.stack, "model": case.model, "workload": case.workload,
                  "sizes": f"tp{case.tp} pp{case.pp}"}  # fmt: skip
        values = [("total", case.total_s, result.total)]
        if case.prefill_s is not None and case.decode_step_mean_s is not None:
            values += [
                ("prefill", case.prefill_s, result.prefill),
                ("decode step", case.decode_step_mean_s, result.step),
            ]
        for what, measured_s, forecast in values:
            interval = forecast.value, groups, forecast.low, forecast.high
            results.append(Compared(what, measured_s, *interval, result.results.setting, result.supports))
    return results


def _case(case: ServedCase) -> Deployment:
    layout = Layout(tp=case.tp, pp=case.pp)
    return Deployment(model(_MODELS[case.model]), gpu(case.gpu), stack(case.stack), Precision(), layout)


def by_group(compared: Sequence[Compared], by: str | None = None) -> list[dict[str, Any]]:
    """Errors of each quantity, whole or by a group."""
    members: dict[tuple[str, str], list[Compared]] = {}
    for entry in compared:
        members.setdefault((entry.what, entry.groups[by] if by else ""), []).append(entry)
    lines = []
    for (what, name), entries in sorted(members.items()):
        errors = ErrorSummary.of([c.measured_s for c in entries], [c.predicted_s for c in entries])
        held = [entry.inside for entry in entries if entry.inside is not None]
        inside = {"inside": 100 * sum(held) / len(held)} if held else {}
        lines.append({"of": what, **({by: name} if by else {}), **asdict(errors), **inside})
    return lines


def figures(root: Path | None) -> dict[str, list[dict[str, Any]]]:
    """Tables of errors of PipeWeave's batches."""
    batches = static_batches(served_cases(root))
    return {"static_batches": by_group(batches), "static_batches_by_gpu": by_group(batches, "gpu")}
