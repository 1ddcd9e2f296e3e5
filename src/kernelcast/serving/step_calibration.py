"""Overheads of an engine, fitted to its steps, which were timed one by one.

A step determines less than a benchmark: nothing of the front end. Sets of terms are tried: none; the factors of decode
and prefill; with them the host times of every step; all of the host. Each is the least squares of the logarithms of
predicted over measured times, with a penalty on the distance from the values before, which keeps what the steps do not
constrain. Steps that only decode count as much as all that have a prompt beside them, of which a file has many more.
Of the sets the one with the least error on compositions left out is taken, of those that make neither sort of step
worse: all steps of a composition are left out by the linear model around the fit (PRESS, Allen 1974:
e = (I - H_gg)^-1 r_g). Steps of a prompt alone wait for a host that a server's steps do not wait for: they are compared
and not fitted, unless there are no others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kernelcast.ops.work import Array
from kernelcast.serving.calibrate import SCALES
from kernelcast.serving.service import HOST_FACTOR
from kernelcast.serving.step_replay import StepForecasts, step_seconds
from kernelcast.serving.step_table import MeasuredStep
from kernelcast.stacks import Stack

FACTORS, PER_STEP = ("decode_factor", "prompt_factor"), ("step_s", "sequence_s")
FITTED = (*FACTORS, *PER_STEP, HOST_FACTOR)
_SETS = ((), FACTORS[:1], FACTORS[1:], (HOST_FACTOR,), FACTORS, (*FACTORS, *PER_STEP), FITTED)
_HOST_SCALE = 0.4  # machines are up to twice as slow (``HOST_RANGE``), in logarithms
_NOISE = 0.01  # no step is known better, as a share
_ROUNDS, _GAIN, _APART = 12, 1e-6, 0.05  # of Gauss and Newton; the slopes' distance in scales
_BETTER = 0.98  # the error that more terms must reach, of that of fewer
_LEAST_SPREAD, _HELD = 0.02, 0.8  # of a measured server, and the share of steps left out that it holds
_OUTLIER = 3.0  # times the usual error, from which a step counts less


@dataclass(frozen=True, eq=False)
class CalibratedSteps:
    """An engine's fitted ``stack``; ``host``: the factor on its host times. Errors are root mean squares of logarithms
    on compositions left out, by each set of terms."""

    stack: Stack
    before: Stack
    host: float
    fitted: tuple[str, ...]
    fitted_on: int
    errors: dict[tuple[str, ...], float]

    @property
    def error_before(self) -> float:
        return self.errors[()]

    @property
    def error(self) -> float:
        return self.errors[self.fitted]

    def value(self, name: str, stack: Stack) -> float:
        if name == HOST_FACTOR:
            return self.host if stack is self.stack else 1.0
        return float(getattr(stack, name))


def calibrate_steps(
    forecasts: StepForecasts, progress: Callable[[int, int], None] = lambda done, total: None
) -> CalibratedSteps:
    """The engine's overheads by the set of terms that serves steps left out best."""
    problem, fits = _Problem(forecasts), dict[tuple[str, ...], tuple[Array, Array]]()
    for at, terms in enumerate(_SETS):
        progress(at, len(_SETS))
        fits[terms] = problem.fit(terms)
    errors = {terms: problem.size(left_out) for terms, (_, left_out) in fits.items()}
    chosen: tuple[str, ...] = ()
    for terms, (_, left_out) in fits.items():
        if errors[terms] < _BETTER * errors[chosen] and problem.none_worse(left_out, fits[()][1]):
            chosen = terms
    fit, left_out = fits[chosen]
    stack, host = problem.stack(fit)
    spread = max(_LEAST_SPREAD, problem.held(left_out))
    stack = replace(stack, spread=min(round(spread, 3), 0.99))
    return CalibratedSteps(stack, problem.before, host, chosen, len(problem.steps), errors)


class _Problem:
    """Logarithms of predicted over measured steps as a function of the terms, in scales from their values before."""

    def __init__(self, forecasts: StepForecasts) -> None:
        self.forecasts, self.before = forecasts, replace(forecasts.stack, spread=0.0)
        every = forecasts.table.steps
        self.steps: list[MeasuredStep] = [step for step in every if step.group != "prompts alone"] or list(every)
        self._measured = np.log([step.step_s for step in self.steps])
        keys = [(step.decodes, step.prompts, step.prompt_tokens) for step in self.steps]
        groups = [step.group for step in self.steps]
        self._sorts = [np.array([group == name for group in groups]) for name in dict.fromkeys(groups)]
        self._shares = sum(rows * len(rows) / (len(self._sorts) * rows.sum()) for rows in self._sorts)
        self._groups = [np.flatnonzero([key == each for key in keys]) for each in dict.fromkeys(keys)]
        self.start = np.zeros(len(FITTED))

    def stack(self, at: Array) -> tuple[Stack, float]:
        values = dict(zip(FITTED, at.tolist(), strict=True))
        host = float(np.exp(_HOST_SCALE * values.pop(HOST_FACTOR)))
        base, changed = self.before.with_host(host), dict[str, Any]()
        for name, u in values.items():
            known = getattr(base, name)
            factor = name in FACTORS
            changed[name] = known * float(np.exp(u * SCALES[name])) if factor else max(0.0, known + u * SCALES[name])
        return replace(base, **changed), host

    def residuals(self, at: Array) -> Array:
        times = self.forecasts.on(*self.stack(at))
        return np.log([step_seconds(times, step) for step in self.steps]) - self._measured

    def size(self, errors: Array) -> float:
        """The root mean square, each sort of step as much as the other."""
        return float(np.sqrt(np.mean(self._shares * errors**2)))

    def none_worse(self, errors: Array, before: Array) -> bool:
        """Whether no sort of step has larger errors than before, beyond what any step is known by."""
        sizes = [(np.sqrt(np.mean(errors[rows] ** 2)), np.sqrt(np.mean(before[rows] ** 2))) for rows in self._sorts]
        return all(size <= max(known, _NOISE) for size, known in sizes)

    def held(self, errors: Array) -> float:
        """What so large a share of the errors does not exceed."""
        order = np.argsort(np.abs(errors))
        shares = np.cumsum(self._shares[order]) / np.sum(self._shares)
        return float(np.abs(errors)[order][np.searchsorted(shares, _HELD)])

    def fit(self, names: tuple[str, ...]) -> tuple[Array, Array]:
        """Where the terms fit best, and the residuals of each composition without its own steps."""
        at, free = self.start, [FITTED.index(name) for name in names]
        if not free:
            return at, self.residuals(at)
        here = self.residuals(at)
        for _ in range(_ROUNDS):
            slopes, weights = self._slopes(at, free), self._robust(here)
            step = np.zeros(len(at))
            step[free] = np.linalg.solve(_curvature(slopes, weights), -(slopes.T @ (weights * here) + at[free]))
            tried = self._lower(at, step, weights, here)
            if tried is None:
                break
            moved, at, here = float(np.abs(tried[0] - at).max()), *tried
            if moved < _GAIN:
                break
        return at, self._left_out(here, self._slopes(at, free), self._robust(here))

    def _lower(self, at: Array, step: Array, weights: Array, here: Array) -> tuple[Array, Array] | None:
        """A step, or a part of it, that lowers the objective."""
        before = weights @ here**2 + at @ at
        for _ in range(5):
            tried = self._within(at + step)
            residuals = self.residuals(tried)
            if weights @ residuals**2 + tried @ tried < before:
                return tried, residuals
            step = step / 4
        return None

    def _within(self, at: Array) -> Array:
        """No time is negative, and no factor is beyond belief."""
        least = [-getattr(self.before, name) / SCALES[name] if name in PER_STEP else -10.0 for name in FITTED]
        return np.clip(at, least, 10.0)

    def _slopes(self, at: Array, free: list[int]) -> Array:
        columns = []
        for number in free:
            ends = [at + sign * _APART * (np.arange(len(at)) == number) for sign in (1.0, -1.0)]
            ends[1] = self._within(ends[1])
            columns.append((self.residuals(ends[0]) - self.residuals(ends[1])) / (ends[0] - ends[1])[number])
        return np.stack(columns, axis=1)

    def _robust(self, residuals: Array) -> Array:
        """Weights of the squares: noise is what most steps are off by; beyond that they count less (Huber)."""
        usual = max(_NOISE, 1.48 * float(np.median(np.abs(residuals - np.median(residuals)))))
        beyond = np.maximum(1.0, np.abs(residuals - np.median(residuals)) / (_OUTLIER * usual))
        return np.asarray(self._shares / (usual**2 * beyond))

    def _left_out(self, here: Array, slopes: Array, weights: Array) -> Array:
        inverse, without = np.linalg.inv(_curvature(slopes, weights)), here.copy()
        for rows in self._groups:
            hat = slopes[rows] @ inverse @ (slopes[rows] * weights[rows, None]).T
            without[rows] = np.linalg.lstsq(np.eye(len(rows)) - hat, here[rows], rcond=None)[0]
        return without


def _curvature(slopes: Array, weights: Array) -> Array:
    """Of the objective: squares of the residuals, and of the distance from the values before."""
    return np.asarray(slopes.T @ (weights[:, None] * slopes) + np.eye(slopes.shape[1]))
