"""Whole runs -> a factor for each configuration of kernels that they ran, by Bayesian inference.

The log of a measured time is the log of its forecast, with every configuration (and the host) so many times as long,
and noise. The logs of these factors have priors around 0, as wide as the forecast says that it may be off. The maximum
a posteriori is found by Gauss-Newton steps, its covariance by the Laplace approximation. A configuration without a
share in any run keeps its prior.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kernelcast._version import __version__
from kernelcast.errors import KernelcastError
from kernelcast.forecast import Calibration
from kernelcast.forecast.calibration import Scale
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.learned import WEIGHTS
from kernelcast.hardware import Gpu
from kernelcast.results import NOTHING, Interval

Doubles = NDArray[np.float64]
_STEPS, _HALVES = 50, 30
_ENOUGH = 1e-9  # a step below this is the last
_Z80 = 1.2816  # standard deviations that a normal 80% interval reaches to either side
_LEAST_SD = 1e-4  # of a configuration with a very narrow interval


class Forecast(Protocol):
    """A time as a function of scales."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The configurations that it depends on."""
        ...

    def at(self, log_scales: Doubles) -> tuple[float, Doubles]:
        """The log of seconds with these scales, one a key, and its slopes: shares of the time."""
        ...


@dataclass(frozen=True, eq=False)
class Pieces:
    """Sequential work: the sum of ``groups``, each as long as the longest of its alternatives (the GPU, or the
    host that it waits for). An alternative is a row of seconds by key; its last column is what nothing scales."""

    keys: tuple[str, ...]
    groups: tuple[Doubles, ...]

    def at(self, log_scales: Doubles) -> tuple[float, Doubles]:
        scaled = np.append(np.exp(log_scales), 1.0)
        taken = np.zeros(len(scaled))
        for group in self.groups:
            seconds = group * scaled
            taken += seconds[np.argmax(seconds.sum(axis=1))]
        total = taken.sum()
        return float(np.log(total)), taken[:-1] / total


@dataclass(frozen=True, eq=False)
class Slopes:
    """The result of a simulation, and its slope by each scale."""

    keys: tuple[str, ...]
    time_s: float
    slopes: Doubles

    def at(self, log_scales: Doubles) -> tuple[float, Doubles]:
        return float(np.log(self.time_s) + self.slopes @ log_scales), self.slopes


@dataclass(frozen=True, eq=False)
class MeasuredTime:
    """One measured number of a run beside its forecast. ``noise``: standard deviation of the log."""

    run: str
    what: str
    measured_s: float
    forecast: Forecast
    noise: float

    @property
    def error(self) -> float:
        """Without scales: predicted over measured, less 1."""
        return self.error_with({})

    def error_with(self, scales: Mapping[str, float]) -> float:
        log_s, _ = self.forecast.at(np.array([scales.get(key, 0.0) for key in self.forecast.keys]))
        return float(np.exp(log_s) / self.measured_s - 1)

    @property
    def shares(self) -> dict[str, float]:
        _, slopes = self.forecast.at(np.zeros(len(self.forecast.keys)))
        return dict(zip(self.forecast.keys, slopes.tolist(), strict=True))


def sd_of(low: float, high: float) -> float:
    """Standard deviation of the log whose 80% interval is between two factors."""
    return float(np.log(high / low)) / (2 * _Z80)


@dataclass(frozen=True, eq=False)
class MeasuredRun:
    """A run and its measured times; ``intervals``: forecast seconds by configuration."""

    name: str
    seen: tuple[MeasuredTime, ...]
    intervals: Mapping[str, Interval]


def prior_sds(runs: Iterable[MeasuredRun]) -> dict[str, float]:
    """Prior standard deviation of the log of each scale, from the forecast intervals of the runs."""
    by_key = summed((key, interval) for run in runs for key, interval in run.intervals.items())
    return {key: max(sd_of(interval.low, interval.high), _LEAST_SD) for key, interval in sorted(by_key.items())}


def summed(parts: Iterable[tuple[str, Interval]]) -> dict[str, Interval]:
    sums: dict[str, Interval] = {}
    for key, interval in parts:
        sums[key] = sums.get(key, NOTHING) + interval
    return sums


@dataclass(frozen=True, eq=False)
class ScaleFit:
    """The logs of scales by key, and their covariance. ``contradiction``: how many times its noise the runs lie from
    one another and from what the priors allow; 1 where they agree."""

    keys: tuple[str, ...]
    log_scales: Doubles
    covariance: Doubles = field(repr=False)
    contradiction: float

    @property
    def by_key(self) -> dict[str, float]:
        return dict(zip(self.keys, self.log_scales.tolist(), strict=True))

    @property
    def sds(self) -> Doubles:
        return np.sqrt(np.diag(self.covariance))


def solve(times: Sequence[MeasuredTime], prior_sds: Mapping[str, float]) -> ScaleFit:
    """The maximum a posteriori scales of all keys that have a prior."""
    problem = _Problem(times, prior_sds)
    at = np.zeros(len(problem.keys))
    cost, errors, slopes = problem.at(at)
    for _ in range(_STEPS):
        step = np.linalg.solve(problem.curvature(slopes), slopes.T @ (errors / problem.noise**2) - at / problem.sd**2)
        for _ in range(_HALVES):
            new_cost, new_errors, new_slopes = problem.at(at + step)
            if new_cost <= cost:
                break
            step = step / 2
        else:
            break
        at, cost, errors, slopes = at + step, new_cost, new_errors, new_slopes
        if np.abs(step).max(initial=0.0) < _ENOUGH:
            break
    # Runs that agree leave a cost of about one each; a larger cost means more noise than assumed, and wider
    # posteriors.
    contradiction = float(np.sqrt(max(1.0, cost / max(1, len(times)))))
    covariance = np.asarray(np.linalg.inv(problem.curvature(slopes, contradiction)), dtype=np.float64)
    return ScaleFit(problem.keys, at, covariance, contradiction)


class _Problem:
    """Residuals of all runs in the keys of the priors."""

    def __init__(self, times: Sequence[MeasuredTime], prior_sds: Mapping[str, float]) -> None:
        self.keys, self.seen = tuple(prior_sds), times
        self.sd = np.array(list(prior_sds.values()))
        self.noise = np.array([time.noise for time in times])
        column = {key: at for at, key in enumerate(self.keys)}
        self._own = [np.array([column[key] for key in time.forecast.keys], dtype=np.intp) for time in times]
        self._target = np.log([time.measured_s for time in times])

    def at(self, log_scales: Doubles) -> tuple[float, Doubles, Doubles]:
        """The cost (squares in units of their noise), the logs of measured over predicted, and the slopes."""
        errors, slopes = self._target.copy(), np.zeros((len(self.seen), len(self.keys)))
        for row, (time, columns) in enumerate(zip(self.seen, self._own, strict=True)):
            log_s, shares = time.forecast.at(log_scales[columns])
            errors[row] -= log_s
            slopes[row, columns] = shares
        cost = np.sum((errors / self.noise) ** 2) + np.sum((log_scales / self.sd) ** 2)
        return float(cost), errors, slopes

    def curvature(self, slopes: Doubles, contradiction: float = 1.0) -> Doubles:
        weighed = slopes / (contradiction * self.noise[:, None])
        return np.asarray(weighed.T @ weighed + np.diag(self.sd**-2.0))


def cross_validated(times: Sequence[MeasuredTime], prior_sds: Mapping[str, float]) -> list[float]:
    """Error of each number (predicted over measured, less 1) with the scales that the other runs give."""
    errors = []
    others: dict[str, dict[str, float]] = {}
    for time in times:
        if time.run not in others:
            others[time.run] = solve([other for other in times if other.run != time.run], prior_sds).by_key
        errors.append(time.error_with(others[time.run]))
    return errors


def scales_of(solved: ScaleFit, times: Sequence[MeasuredTime], prior_sds: Mapping[str, float]) -> dict[str, Scale]:
    """The scales of configurations with a share in some run; others are not scaled."""
    scales = {}
    for key, log_scale, sd in zip(solved.keys, solved.log_scales, solved.sds, strict=True):
        shares = np.array([time.shares.get(key, 0.0) for time in times])
        runs = {time.run for time, share in zip(times, shares, strict=True) if share}
        if runs:
            prior = prior_sds[key]
            scales[key] = Scale(float(log_scale), float(min(sd, prior)), prior, float(shares.mean()), len(runs))
    return scales


# ---- a calibration with the scales of runs


LEAST_RUNS = 3  # from which each is scored by the others
_PHASES = ("prefill", "decode", "mixed")


@dataclass(frozen=True)
class RunError:
    """One measured number of a run; errors are predicted over measured, less 1."""

    run: str
    what: str
    measured_s: float
    error_before: float
    error_after: float


@dataclass(frozen=True)
class RunErrors:
    """Errors of runs before and after. ``by_others``: the errors after are held out: with the scales from the other
    runs. ``contradiction``: disagreement between runs, in units of their noise."""

    lines: tuple[RunError, ...]
    by_others: bool
    contradiction: float
    unseen: tuple[str, ...]

    @property
    def runs(self) -> int:
        return len({line.run for line in self.lines})


def empty_calibration(target: Gpu, conditions: Conditions) -> Calibration:
    """A calibration before anything was measured."""
    if target.changes:
        raise KernelcastError(f"{target.label} was not measured: calibrate the GPU as it is")
    return Calibration(gpu=target.id, predictor=conditions.loaded_predictor.name, kernelcast=__version__, families={})


def calibrate_runs(calibration: Calibration, runs: Sequence[MeasuredRun]) -> tuple[Calibration, RunErrors]:
    """``runs``: forecast with this calibration, so that they scale what single calls left."""
    times = [time for run in runs for time in run.seen]
    names = [run.name for run in runs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise KernelcastError(f"two runs are called {twice!r}: give each a name of its own")
    priors = prior_sds(runs)
    solved = solve(times, priors)
    by_others = len(runs) >= LEAST_RUNS
    after = cross_validated(times, priors) if by_others else [time.error_with(solved.by_key) for time in times]
    lines = tuple(
        RunError(time.run, time.what, time.measured_s, time.error, error)
        for time, error in zip(times, after, strict=True)
    )
    scales = scales_of(solved, times, priors)
    return replace(calibration, scales=scales), RunErrors(
        lines, by_others, solved.contradiction, tuple(_not_measured(scales))
    )


def _not_measured(keys: Collection[str]) -> list[str]:
    """Families of the weights, and phases of theirs, that had no share in any run."""
    missing = []
    for family in sorted(path.stem for path in WEIGHTS.glob("*.safetensors")):
        measured = [key.removeprefix(f"{family} ") for key in keys if key.startswith(f"{family} ")]
        if not measured:
            missing.append(family)
        elif any(phase in key.split() for key in measured for phase in _PHASES):
            missing += [f"{family} {phase}" for phase in _PHASES if not any(phase in key.split() for key in measured)]
    return missing
