"""A calibration with the scales that whole runs give, and how much better it makes them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from kernelcast._version import __version__
from kernelcast.collect.calibrate.runs import Run, prior_sds
from kernelcast.collect.calibrate.scales import left_out, scales_of, solve
from kernelcast.errors import KernelcastError
from kernelcast.forecast import Calibration
from kernelcast.forecast.conditions import Conditions, chosen
from kernelcast.forecast.learned import WEIGHTS
from kernelcast.hardware import Gpu

LEAST_RUNS = 3  # from which each is scored by the others
_PHASES = ("prefill", "decode", "mixed")


@dataclass(frozen=True)
class Line:
    """One measured number of a run; errors are predicted over measured, less 1."""

    run: str
    what: str
    measured_s: float
    error_before: float
    error_after: float


@dataclass(frozen=True)
class RunsSeen:
    """What runs were made of. ``by_others``: the errors after are with the scales that the other runs give.
    ``contradiction``: how many times as far as their noise allows runs lie from one another."""

    lines: tuple[Line, ...]
    by_others: bool
    contradiction: float
    unseen: tuple[str, ...]

    @property
    def runs(self) -> int:
        return len({line.run for line in self.lines})


def nothing_yet(chip: Gpu, conditions: Conditions) -> Calibration:
    """A calibration before anything was measured."""
    if chip.changes:
        raise KernelcastError(f"{chip.label} was not measured: calibrate the GPU as it is")
    return Calibration(gpu=chip.id, predictor=chosen(conditions).name, kernelcast=__version__, families={})


def with_runs(calibration: Calibration, runs: Sequence[Run]) -> tuple[Calibration, RunsSeen]:
    """``runs``: forecast with this calibration, so that they scale what single calls left."""
    seen = [one for run in runs for one in run.seen]
    names = [run.name for run in runs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise KernelcastError(f"two runs are called {twice!r}: give each a name of its own")
    priors = prior_sds(runs)
    solved = solve(seen, priors)
    by_others = len(runs) >= LEAST_RUNS
    after = left_out(seen, priors) if by_others else [one.error_with(solved.by_key) for one in seen]
    lines = tuple(
        Line(one.run, one.what, one.measured_s, one.error, error) for one, error in zip(seen, after, strict=True)
    )
    scales = scales_of(solved, seen, priors)
    return replace(calibration, scales=scales), RunsSeen(lines, by_others, solved.contradiction, tuple(_unseen(scales)))


def _unseen(keys: Collection[str]) -> list[str]:
    """Families of the weights, and phases of theirs, that had no share in any run."""
    found = []
    for family in sorted(path.stem for path in WEIGHTS.glob("*.safetensors")):
        own = [key.removeprefix(f"{family} ") for key in keys if key.startswith(f"{family} ")]
        if not own:
            found.append(family)
        elif any(phase in key.split() for key in own for phase in _PHASES):
            found += [f"{family} {phase}" for phase in _PHASES if not any(phase in key.split() for key in own)]
    return found
