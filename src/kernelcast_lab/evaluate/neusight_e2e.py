"""Whole models as NeuSight measured them: ``python -m kernelcast_lab.evaluate.neusight_e2e --data DIR``.

Each case is traced, predicted kernel by kernel on its GPU, and compared with the measured time beside what NeuSight
itself predicted. Cases are fp32 in eager PyTorch; ``fused`` ones ran under torch.compile. Layers of a model are alike:
two traces, of few layers and of some more, tell what one adds.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from kernelcast.efficiency import Predictor
from kernelcast.efficiency.learned import WEIGHTS, Learned, load
from kernelcast.errors import KernelcastError
from kernelcast.hardware import gpu
from kernelcast.networks.fusion import fuse
from kernelcast.parallel.training import TrainingLayout
from kernelcast.predict import DEFAULT
from kernelcast.times import Times
from kernelcast.training.scale import scale
from kernelcast.training.step import STEP, run_step
from kernelcast_lab.data.neusight_e2e import ModelCase, model_cases
from kernelcast_lab.evaluate.neusight_models import depth, traced, traced_whole

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
    return float(np.mean([abs(entry.error) for entry in found if where(entry.case)]))


def case_lines(found: Iterable[Compared]) -> list[str]:
    """One line a case."""
    heads = f"{'gpu':16}{'model':12}{'mode':11}{'seq':>5}{'batch':>6}{'how':>7}"
    lines = [f"{heads}{'ms':>10}{'error':>8}{'NeuSight':>9}"]
    for entry in found:
        case = entry.case
        lines.append(
            f"{case.gpu:16}{case.model:12}{case.mode:11}{case.seq:5}{case.batch:6}{_how(case):>7}"
            f"{case.measured_s * 1e3:10.1f}{entry.error:+8.1f}{entry.neusight_error:+9.1f}"
        )
    return lines


def _how(case: ModelCase) -> str:
    return "fused" if case.fused else "" if case.single else case.parallelism


def group_lines(found: Sequence[Compared]) -> list[str]:
    """Mean errors of the groups with a target, and of their parts."""
    lines = [f"{'':44}{'n':>4}{'mean %':>8}{'bias %':>8}{'NeuSight %':>11}{'target %':>9}"]
    for name, where, target in GROUPS:
        members = [entry for entry in found if where(entry.case)]
        if not members:
            continue
        lines.append(_group_line(name, members) + f"{target:9.1f}")
        for part in ("gpu", "model", "mode") if len(members) > _FEW else ():
            for value in sorted({getattr(entry.case, part) for entry in members}):
                lines.append(_group_line(f"    {value}", [e for e in members if getattr(e.case, part) == value]))
    return lines


def _group_line(name: str, members: Sequence[Compared]) -> str:
    errors = np.array([entry.error for entry in members])
    theirs = np.array([entry.neusight_error for entry in members])
    known = np.abs(theirs[~np.isnan(theirs)])
    beside = f"{known.mean():11.1f}" if len(known) else f"{'-':>11}"
    return f"{name:44}{len(errors):4}{np.abs(errors).mean():8.1f}{np.median(errors):+8.1f}{beside}"


def main(words: Sequence[str] | None = None) -> int:
    """Entry: 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m kernelcast_lab.evaluate.neusight_e2e", description=__doc__)
    parser.add_argument("--data", type=Path, help="folder of measured tables; default: the variable KERNELCAST_DATA")
    parser.add_argument("--weights", type=Path, help="folder of fitted weights; default: those that ship")
    parser.add_argument("--predictor", default="learned", help="learned, generic or a baseline")
    given = parser.parse_args(words)
    try:
        found = compare(model_cases(given.data), Learned(given.weights) if given.weights else given.predictor)
    except KernelcastError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(*case_lines(found), "", *group_lines(found), sep="\n")
    print("AMD: matrix products of its test split are fitted on; there are no others.")
    for name in families_that_saw_tests(given.weights or WEIGHTS) if given.predictor == "learned" else ():
        print(f"Not clean: the weights of {name} were fitted on rows of NeuSight's test split; fit them again.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
