"""Columns of measurements -> Calibration, scored on calls that the fit did not see."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast._version import __version__
from kernelcast.collect.calibrate.residuals import Columns, Residuals, measured_gpu, residuals, select, shapes
from kernelcast.errors import KernelcastError
from kernelcast.forecast import Calibration, Predictor
from kernelcast.forecast.calibration import FamilyCalibration
from kernelcast.forecast.conditions import DEFAULT, Conditions
from kernelcast.forecast.learned import weights_of
from kernelcast.forecast.prior import CallPoints, Doubles, Prior, PriorScales, plain_prior
from kernelcast.forecast.table import BadRows
from kernelcast.hardware import Gpu, gpu

LEAST_ROWS = 10
_FOLDS = 20  # cross-validation folds of shapes
_FEW = 30  # rows with which the interval is half the prior's (or the family's) and half what the errors say
_T_REACH = 1.5332  # scales to either side that hold 80% of Student's t with four degrees, which priors are learned with
_OUTSIDE = 0.08  # share of held-out calls on either side of the interval; of others, which chose no setting, 10%
_LEAST_SPREAD = 0.05  # of a feature's scale: a feature that hardly varies must not dominate distances
_PROCESS_SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)  # that are tried; the rest is a constant of the configuration
_MEAN = np.sqrt(2 / np.pi)  # mean size of a normal error of standard deviation 1


def calibrate(
    columns: Columns, target: Gpu | str | None = None, conditions: Conditions = DEFAULT, *, skip_bad: bool = False
) -> tuple[Calibration, BadRows]:
    """Fit a calibration to the measurements of one GPU. Bad rows are an error, or left out with ``skip_bad``.

    ``columns``: calls as in any table, and ``latency_us``. The GPU is ``target``, or the only one in the column gpu.
    """
    if conditions.calibration is not None:
        raise KernelcastError("a calibration is made of a predictor without one")
    measured = measured_gpu(columns, gpu(target) if target is not None else None)
    if measured.changes:
        raise KernelcastError(f"{measured.label} was not measured: calibrate the GPU as it is")
    base = conditions.loaded_predictor
    bad = BadRows()
    by_family = residuals(columns, measured, base, conditions, bad)
    if bad.messages and not skip_bad:
        raise KernelcastError(bad.text())
    count = sum(map(len, by_family.values()))
    if count < LEAST_ROWS:
        raise KernelcastError(f"{count} measured calls; a calibration needs {LEAST_ROWS} or more")
    families = {name: _family(rows, base) for name, rows in by_family.items()}
    return Calibration(gpu=measured.known_as, predictor=base.name, kernelcast=__version__, families=families), bad


def _family(rows: Residuals, base: Predictor) -> FamilyCalibration:
    if len(rows) > MAX_POINTS:
        rows = select(rows, np.sort(np.random.default_rng(0).choice(len(rows), MAX_POINTS, replace=False)))
    prior = prior_of(rows, base)
    placed = rows.placed(prior)
    error = rows.target / rows.width
    group = shapes(rows) % _FOLDS
    setting = chosen_scales(prior, placed, error, group)
    process = fit(prior, placed, error, setting, group)
    form, configuration = (np.array([labels[at] for labels in rows.shared])[rows.code] for at in (0, 2))
    by_process = (error - process.left_out) * rows.width
    share, constant = _mixture(placed, rows.target, by_process)
    after = share * by_process + (1 - share) * constant
    off = (rows.target - after) / rows.width / process.spread
    low, high = _reach(off, (_T_REACH, _T_REACH))
    return FamilyCalibration(
        rows=len(rows),
        error_before=float(np.mean(rows.percent(np.zeros(len(rows))))),
        error_after=float(np.mean(rows.percent(after))),
        expected_before=float(100 * np.mean(_MEAN * rows.width)),
        expected_after=float(100 * np.mean(_MEAN * rows.width * process.spread)),
        formats=_by_format(rows, form, after),
        reaches=_reaches(off, form, configuration, (low, high)),
        prior=prior,
        setting=setting,
        position=placed.position.astype(np.float32),
        leaning=rows.leaning.astype(np.float32),
        groups=rows.shared,
        code=rows.code.astype(np.int64),
        weights=process.weights.astype(np.float32),
        few=process.few.astype(np.int64),
        factor=process.factor.astype(np.float32),
        noise=prior.noise * setting.noise,
        low=low,
        high=high,
        constants=dict(zip(configuration.tolist(), zip(share.tolist(), constant.tolist(), strict=True), strict=True)),
        least=float(min(0.0, rows.target.min())),
        most=float(max(0.0, rows.target.max())),
    )


def prior_of(rows: Residuals, base: Predictor) -> Prior:
    """The prior of the errors of this family: learned with its weights, or the default."""
    weights = weights_of(base, rows.family)
    prior = weights.prior if weights else None
    if prior is None:
        spread = np.maximum(rows.values.std(axis=0, dtype=np.float64), _LEAST_SPREAD).astype(np.float32)
        prior = plain_prior(rows.names, rows.values.mean(axis=0), spread)
    return prior.with_hidden(rows.hidden)


def _mixture(rows: CallPoints, target: Doubles, by_process: Doubles) -> tuple[Doubles, Doubles]:
    """Of each row's configuration the share of the process with which calls left out are off least, and the constant
    that is the rest: where kernels scatter without a pattern, what single calls say of others only does harm."""
    constant = _by_configuration(rows, target, np.median, shrunk=1)
    _, number, count = np.unique(rows.configuration, return_inverse=True, return_counts=True)
    alone = 1 + 1 / np.maximum(count - 1, 0.5)[number.reshape(-1)]  # as far off as a constant without the call
    by_process, by_constant = target - by_process, alone * (target - constant)
    off = [np.abs(share * by_process + (1 - share) * by_constant) for share in _PROCESS_SHARES]
    means = [_by_configuration(rows, each, np.mean, _FEW) for each in off]
    return np.array(_PROCESS_SHARES)[np.argmin(means, axis=0)], constant


def _by_format(rows: Residuals, form: NDArray[Any], after: NDArray[np.float64]) -> dict[str, tuple[int, float, float]]:
    """Rows, error before and after, of each format."""
    before, corrected = rows.percent(np.zeros(len(rows))), rows.percent(after)
    members = {str(name): form == name for name in np.unique(form)}
    return {
        name: (int(at.sum()), float(before[at].mean()), float(corrected[at].mean())) for name, at in members.items()
    }


def _reaches(
    off: NDArray[np.float64], form: NDArray[Any], configuration: NDArray[Any], family: tuple[float, float]
) -> dict[str, tuple[float, float]]:
    """The reach by format, and by configuration within it: one engine's kernels may be far harder to predict than
    another's."""
    reaches = {str(name): _reach(off[form == name], family) for name in np.unique(form)}
    for name in np.unique(configuration):
        members = configuration == name
        reaches[str(name)] = _reach(off[members], reaches[str(form[members][0])])
    return reaches


def _reach(left_out: NDArray[np.float64], before: tuple[float, float]) -> tuple[float, float]:
    """Standard deviations to either side that hold 80% of calls not seen; with few of them mostly as ``before``.

    ``left_out``: errors of such calls, over the standard deviation that the process gives them."""
    share = len(left_out) / (len(left_out) + _FEW)
    reaches = []
    for side, reach in zip((-left_out, left_out), before, strict=True):
        needed = float(np.quantile(side, 1 - _OUTSIDE))
        reaches.append(float(reach * np.exp(share * np.log(np.clip(needed / reach, 0.2, 5.0)))))
    return reaches[0], reaches[1]


# ---- the Gaussian process of a family's residuals


MAX_POINTS = 2000  # more rows than that count through a sample
_FEW_POINTS = 256  # that set the uncertainty of a correction
_SEARCH_ROWS = 450  # that choose the setting
_DEGREES = 4.0  # of freedom of the noise
_ROUNDS = 3
_JITTER = 1e-5
_LARGEST = 16.0  # factor on all variances together
_SHRUNK = 8  # rows with which a configuration's spread counts as much as that of its format (and that, its family's)
_LEAST_ERROR = 0.05  # of the width: measurements are no closer together than that
# Factors that are tried, and the standard deviation of the prior of their logs.
_TRIED = {
    "smooth": ((0.05, 0.3, 1.0, 2.0, 4.0, 8.0), 1.0),
    "noise": ((0.1, 0.3, 1.0, 3.0), 1.4),
    "unshared": ((0.1, 0.3, 1.0, 3.0, 10.0), 1.4),
    "length": ((0.5, 0.7, 1.0, 1.5), 1.0),
    "biases": ((0.05, 0.3, 1.0, 4.0), 1.4),
    "hidden": ((0.03, 0.1, 0.3, 1.0, 3.0, 10.0), 1.4),
}


def penalty(setting: PriorScales) -> float:
    """Negative log prior of a setting."""
    return float(sum(0.5 * (np.log(getattr(setting, name)) / width) ** 2 for name, (_, width) in _TRIED.items()))


def chosen_scales(prior: Prior, rows: CallPoints, error: Doubles, group: NDArray[np.intp]) -> PriorScales:
    """The setting with which held-out errors are least, and ``penalty`` small: one factor after the other, until none
    gets better. The likelihood of the errors takes for noise what a few hundred calls of a wild kernel can teach."""
    if len(rows) > _SEARCH_ROWS:
        picked = np.sort(np.random.default_rng(0).choice(len(rows), _SEARCH_ROWS, replace=False))
        rows, error, group = rows.select(picked), error[picked], group[picked]
    weight = _outlier_weights(rows, error)

    def left_out(setting: PriorScales) -> tuple[Doubles, Doubles]:
        among = prior.covariance(rows, rows, setting) + np.diag(prior.noise * setting.noise / weight + _JITTER)
        return _left_out(np.asarray(np.linalg.inv(among), dtype=np.float64), error, group)

    @functools.cache
    def score(setting: PriorScales) -> float:
        return float(len(error) * np.log(np.mean(np.abs(left_out(setting)[0])) + _JITTER)) + penalty(setting)

    best, before = PriorScales(), np.inf
    while score(best) < before:
        before = score(best)
        for name, (factors, _) in _TRIED.items():
            tried = [best, *(replace(best, **{name: factor}) for factor in factors)]
            best = min(tried, key=score)
    # All parts larger or smaller by one factor predict alike: what errors they expect is by the size of the held-out.
    left, variance = left_out(best)
    usual = float(np.median(left**2 / variance)) / 0.6745**2  # 1 of normal errors
    larger = float(np.clip(usual ** (len(error) / (len(error) + _FEW)), 1 / _LARGEST, _LARGEST))
    return replace(best, **{name: larger * getattr(best, name) for name in ("biases", "smooth", "hidden", "noise")})


def _outlier_weights(rows: CallPoints, error: Doubles) -> Doubles:
    """What counts as an outlier is a matter of the configuration: a kernel that is far off in some sizes is not wild
    beside one that is close everywhere."""
    left = error - _by_configuration(rows, error, np.median)
    return _weights(left, np.exp(_by_configuration(rows, error, _log_spread)))


def _log_spread(error: Doubles) -> float:
    """Of the standard deviation, by the median distance from the median."""
    return float(np.log(1.4826 * np.median(np.abs(error - np.median(error))) + _LEAST_ERROR))


def _by_configuration(
    rows: CallPoints, values: Doubles, of: Callable[[Doubles], Any], shrunk: float = _SHRUNK
) -> Doubles:
    """(rows,) a statistic of each row's configuration, drawn to that of its format, and that to the family's, the more
    the fewer rows there are."""
    result = np.full(len(values), float(of(values)))
    for codes in (rows.format, rows.configuration):
        for number in np.unique(codes):
            at = np.flatnonzero(codes == number)
            share = len(at) / (len(at) + shrunk)
            result[at] = share * float(of(values[at])) + (1 - share) * result[at]
    return result


def _weights(left: Doubles, spread: Doubles | float) -> Doubles:
    """Weights of Student's t noise: a little above 1 for small errors, decreasing for large ones."""
    return np.asarray((_DEGREES + 1) / (_DEGREES + (left / spread) ** 2))


@dataclass(frozen=True, eq=False)
class ProcessFit:
    """The posterior given the measured errors, and the held-out residual of each row."""

    weights: Doubles  # (rows,)
    noise: Doubles  # (rows,) its variance: larger for outliers
    few: NDArray[np.intp]  # rows that set the uncertainty of a correction
    factor: Doubles  # the inverse of the Cholesky factor of their covariance
    left_out: Doubles  # (rows,) held-out residual: its group is predicted from the others
    spread: Doubles  # (rows,) its standard deviation under the Gaussian process


def fit(prior: Prior, rows: CallPoints, error: Doubles, setting: PriorScales, group: NDArray[np.intp]) -> ProcessFit:
    """Condition the prior on the errors. ``group``: calls that are left out together, with which each is scored."""
    covariance = prior.covariance(rows, rows, setting)
    usual = prior.noise * setting.noise + _JITTER
    noise = np.full(len(rows), usual)
    for _ in range(_ROUNDS):
        said = covariance @ np.linalg.solve(covariance + np.diag(noise), error)
        noise = usual / np.minimum(_weights(error - said, np.sqrt(usual)), 1.25)
    inverse = np.asarray(np.linalg.inv(covariance + np.diag(noise)), dtype=np.float64)
    left, variance = _left_out(inverse, error, group)
    variance += usual - noise
    few = spread_out(rows.position, _FEW_POINTS)
    factor = np.linalg.inv(np.linalg.cholesky(covariance[np.ix_(few, few)] + np.diag(noise[few])))
    others = np.setdiff1d(np.arange(len(rows)), few)  # of them the few say what they say of calls not measured
    known = np.sum((covariance[np.ix_(others, few)] @ factor.T) ** 2, axis=1)
    variance[others] = np.diag(covariance)[others] - known + usual
    return ProcessFit(inverse @ error, noise, few, factor, left, np.sqrt(np.maximum(variance, 1e-9)))


def _left_out(inverse: Doubles, error: Doubles, group: NDArray[np.intp]) -> tuple[Doubles, Doubles]:
    """Of each row the error that is left where its group is predicted from the others, and its variance.
    ``inverse``: of the covariance with noise."""
    solved = inverse @ error
    left, variance = np.empty(len(error)), np.empty(len(error))
    for number in np.unique(group):
        at = np.flatnonzero(group == number)
        among = np.linalg.inv(inverse[np.ix_(at, at)])
        left[at], variance[at] = among @ solved[at], np.diag(among)
    return left, variance


def spread_out(positions: Doubles, count: int) -> NDArray[np.intp]:
    """Inducing rows that cover the rest, in their order."""
    return np.sort(farthest_first(positions, count)) if len(positions) > count else np.arange(len(positions))


def farthest_first(points: Doubles, count: int) -> list[int]:
    """Farthest-point sampling from the most central point."""
    picked = [int(np.argmin(np.sum((points - points.mean(axis=0)) ** 2, axis=1)))]
    nearest = np.full(len(points), np.inf)
    while len(picked) < count:
        nearest = np.minimum(nearest, np.sum((points - points[picked[-1]]) ** 2, axis=1))
        picked.append(int(np.argmax(nearest)))
    return picked
