"""Whole models as NeuSight measured them.

Each case is traced, predicted kernel by kernel on its GPU, and compared with the measured time beside what NeuSight
itself predicted. Cases are fp32 in eager PyTorch; ``fused`` ones ran under torch.compile. Layers of a model are alike:
two traces, of few layers and of some more, tell what one adds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from kernelcast.errors import KernelcastError
from kernelcast.forecast import Predictor
from kernelcast.forecast.conditions import DEFAULT
from kernelcast.forecast.learned import WEIGHTS, Learned, load
from kernelcast.forecast.predict_table import Times
from kernelcast.hardware import gpu
from kernelcast.tracing.fusion import fuse
from kernelcast.training.layout import TrainingLayout
from kernelcast.training.scale import scale
from kernelcast.training.step import STEP, run_step
from kernelcast_lab.data.neusight_e2e import ModelCase
from kernelcast_lab.evaluate.neusight_models import depth, traced, traced_whole
from kernelcast_lab.evaluate.scores import ErrorSummary

SHALLOW, DEEPER = 2, 4  # layers that are traced; every second one of Switch is sparse
_PLAN = re.compile(r"(dp|tp|pp)(\d+)(?:_(\d+))?")
_FEW = 4  # cases, of which parts tell nothing
_ONLY_TESTED = "a100_pcie"  # products and vector ops of this GPU are in NeuSight's test split alone
_FAMILIES = ("gemm", "memory")  # that the models are made of


@dataclass(frozen=True)
class Compared:
    """A case beside its prediction, in seconds."""

    case: ModelCase
    predicted_s: float
    phases_s: Mapping[str, float] = field(default_factory=dict)  # forward and backward, of one GPU

    @property
    def error(self) -> float:
        """In percent of the measured time; above 0: predicted too slow."""
        return (self.predicted_s / self.case.measured_s - 1) * 100

    @property
    def neusight_error(self) -> float:
        """NaN where NeuSight has no prediction."""
        theirs = self.case.neusight_s
        return float("nan") if theirs is None else (theirs / self.case.measured_s - 1) * 100


# What the project set out to reach: name, which cases, mean error in percent.
GROUPS: tuple[tuple[str, Callable[[ModelCase], bool], float], ...] = (
    ("NVIDIA, one GPU, unfused", lambda c: c.single and c.vendor == "nvidia" and not c.fused, 8.0),
    ("NVIDIA, one GPU, fused", lambda c: c.single and c.vendor == "nvidia" and c.fused, 12.0),
    ("NVIDIA, four GPUs", lambda c: c.vendor == "nvidia" and not c.single, 8.0),
    ("AMD, one GPU", lambda c: c.single and c.vendor == "amd", 11.0),
)


def compare(cases: Iterable[ModelCase], predictor: str | Predictor = "learned") -> list[Compared]:
    """Every case with its prediction, under the conditions that a step of one GPU and of several have by default."""
    known: dict[tuple[str, bool], Times] = {}
    found = []
    for case in cases:
        conditions = replace(STEP if case.single else DEFAULT, predictor=predictor)
        times = known.setdefault((case.gpu, case.single), Times(gpu(case.gpu), conditions))
        found.append(_alone(case, times) if case.single else _together(case, times))
    return found


def _alone(case: ModelCase, times: Times) -> Compared:
    """One GPU: the whole from what two layers more add to two."""
    runs = [traced(case.model, case.mode, case.batch, case.seq, layers) for layers in (SHALLOW, DEEPER)]
    few, more = (run_step(fuse(run) if case.fused else run, times.gpu, times=times) for run in runs)
    times_more = (depth(case.model) - SHALLOW) / (DEEPER - SHALLOW)

    def whole(few_s: float, more_s: float) -> float:
        return few_s + times_more * (more_s - few_s)

    phases = {phase: whole(few.phase_s(phase), more.phase_s(phase)) for phase in ("forward", "backward")}
    return Compared(case, whole(few.time_s, more.time_s), phases)


def layout_of(case: ModelCase) -> TrainingLayout:
    """dp4, tp4, pp4_1 (four stages, one micro-batch)."""
    found = _PLAN.fullmatch(case.parallelism)
    if not found:
        raise KernelcastError(f"parallelism {case.parallelism!r} is none of dp4, tp4 or pp4_1")
    kind, ways, passes = found.groups()
    dp, tp, pp = (int(ways) if kind == name else 1 for name in ("dp", "tp", "pp"))
    return TrainingLayout(dp=dp, tp=tp, pp=pp, micro_batches=int(passes or 1))


def _together(case: ModelCase, times: Times) -> Compared:
    """Several GPUs, which share the batch out."""
    plan = layout_of(case)
    run = traced_whole(case.model, case.batch // (plan.dp * plan.micro_batches), case.seq)
    return Compared(case, scale(run, times.gpu, plan, times=times).time_s)


def families_that_saw_tests(folder: Path = WEIGHTS) -> list[str]:
    """Families whose weights were fitted on rows of NeuSight's test split, which makes errors look smaller here."""
    found = {name: load(folder, name) for name in _FAMILIES}
    return [name for name, fit in found.items() if fit and _ONLY_TESTED in fit.encoder.vocabulary.get("gpu", ())]


def mean_error(found: Iterable[Compared], where: Callable[[ModelCase], bool] = lambda case: True) -> float:
    """Mean size of the error, in percent."""
    return _errors([entry for entry in found if where(entry.case)]).mean


def _errors(members: Sequence[Compared]) -> ErrorSummary:
    return ErrorSummary.of([entry.case.measured_s for entry in members], [entry.predicted_s for entry in members])


def case_lines(found: Iterable[Compared]) -> list[dict[str, Any]]:
    """One line a case."""
    return [
        {name: getattr(entry.case, name) for name in ("gpu", "model", "mode", "seq", "batch")}
        | {"how": "fused" if entry.case.fused else "" if entry.case.single else entry.case.parallelism}
        | {"measured_ms": entry.case.measured_s * 1e3, "predicted_ms": entry.predicted_s * 1e3}
        | {"error": entry.error, "neusight_error": entry.neusight_error}
        for entry in found
    ]


def group_lines(found: Sequence[Compared]) -> list[dict[str, Any]]:
    """Errors of the groups with a target, and of their parts."""
    lines = []
    for name, where, target in GROUPS:
        members = [entry for entry in found if where(entry.case)]
        if not members:
            continue
        lines.append(_group_line(name, "all", members) | {"target": target})
        for part in ("gpu", "model", "mode") if len(members) > _FEW else ():
            for value in sorted({getattr(entry.case, part) for entry in members}):
                lines.append(_group_line(name, value, [e for e in members if getattr(e.case, part) == value]))
    return lines


def _group_line(name: str, part: str, members: Sequence[Compared]) -> dict[str, Any]:
    theirs = [abs(entry.neusight_error) for entry in members if entry.case.neusight_s is not None]
    return {"group": name, "part": part, **asdict(_errors(members)), "neusight_mean": fmean(theirs) if theirs else None}


def figures(cases: Iterable[ModelCase], predictor: str | Predictor) -> dict[str, list[dict[str, Any]]]:
    """The cases, the groups with a target, and what makes their errors look smaller than they are."""
    found = compare(cases, predictor)
    folder = predictor.folder if isinstance(predictor, Learned) else WEIGHTS
    learned = isinstance(predictor, Learned) or predictor == "learned"
    notes = ["AMD: matrix products of its test split are fitted on; there are no others."]
    for name in families_that_saw_tests(folder) if learned else ():
        notes.append(f"Not clean: the weights of {name} were fitted on rows of NeuSight's test split; fit them again.")
    lines = {"cases": case_lines(found), "groups": group_lines(found)}
    return {**lines, "notes": [{"note": text} for text in notes]} if found else lines
