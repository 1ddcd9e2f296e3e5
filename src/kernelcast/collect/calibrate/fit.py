"""Columns of measurements -> Calibration, scored on calls that the fit did not see."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast._version import __version__
from kernelcast.collect.calibrate.residuals import Columns, Residuals, measured_gpu, residuals, select, shapes
from kernelcast.errors import KernelcastError
from kernelcast.forecast import Calibration, Predictor
from kernelcast.forecast.calibration import FamilyCalibration
from kernelcast.forecast.conditions import DEFAULT, Conditions
from kernelcast.forecast.learned import Learned, load
from kernelcast.forecast.prior import CallPoints, Doubles, Prior, PriorScales, plain_prior
from kernelcast.forecast.table import BadRows
from kernelcast.hardware import Gpu, gpu

LEAST_ROWS = 10
_FOLDS = 20  # cross-validation folds of shapes
_FEW = 30  # rows with which the interval is half the prior's (or the family's) and half what the errors say
_T_REACH = 1.5332  # scales to either side that hold 80% of Student's t with four degrees, which priors are learned with
_OUTSIDE = 0.1  # share of calls below the interval, and above: it holds 80%
_LEAST_SPREAD = 0.05  # of a feature's scale: a feature that hardly varies must not dominate distances
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
    setting = most_likely_scales(prior, placed, error)
    process = fit(prior, placed, error, setting, shapes(rows) % _FOLDS)
    after = (error - process.left_out) * rows.width
    form, configuration = (np.array([labels[at] for labels in rows.shared])[rows.code] for at in (0, 2))
    off = process.left_out / process.spread
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
        least=float(min(0.0, rows.target.min())),
        most=float(max(0.0, rows.target.max())),
    )


def prior_of(rows: Residuals, base: Predictor) -> Prior:
    """The prior of the errors of this family: learned with its weights, or the default."""
    weights = load(base.folder, rows.family) if isinstance(base, Learned) else getattr(base, "weights", None)
    learned: Prior | None = getattr(weights, "prior", None)
    if learned is not None:
        return learned
    spread = rows.values.std(axis=0, dtype=np.float64)
    return plain_prior(rows.names, rows.values.mean(axis=0), np.maximum(spread, _LEAST_SPREAD).astype(np.float32))


def _by_format(rows: Residuals, form: NDArray[Any], after: NDArray[np.float64]) -> dict[str, tuple[int, float, float]]:
    """Rows, error before and after, of each format."""
    before, corrected = rows.percent(np.zeros(len(rows))), rows.percent(after)
    return {
        str(name): (
            int((form == name).sum()),
            float(before[form == name].mean()),
            float(corrected[form == name].mean()),
        )
        for name in np.unique(form)
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


MAX_POINTS = 1500  # more rows than that count through a sample
_FEW_POINTS = 256  # that set the uncertainty of a correction
_SEARCH_ROWS = 350  # that choose the setting
_DEGREES = 4.0  # of freedom of the noise
_ROUNDS = 3
_JITTER = 1e-5
# Factors that are tried, and the standard deviation of the prior of their logs.
_BIASES = ((0.05, 0.3, 1.0, 4.0), 1.4)
_SMOOTH = ((0.05, 0.3, 1.0, 2.0, 4.0, 8.0), 1.0)
_NOISE = ((0.1, 0.3, 1.0, 3.0), 1.4)
_LENGTH = ((0.5, 0.7, 1.0, 1.5), 1.0)
_SETTINGS = [PriorScales(*values) for values in product(_BIASES[0], _SMOOTH[0], _NOISE[0], _LENGTH[0])]


def penalty(setting: PriorScales) -> float:
    """Negative log prior of a setting."""
    widths = (_BIASES[1], _SMOOTH[1], _NOISE[1], _LENGTH[1])
    values = (setting.biases, setting.smooth, setting.noise, setting.length)
    return float(sum(0.5 * (np.log(value) / width) ** 2 for value, width in zip(values, widths, strict=True)))


def most_likely_scales(prior: Prior, rows: CallPoints, error: Doubles) -> PriorScales:
    """The maximum a posteriori setting. Lengths share what costs most, the covariances."""
    if len(rows) > _SEARCH_ROWS:
        picked = np.sort(np.random.default_rng(0).choice(len(rows), _SEARCH_ROWS, replace=False))
        rows, error = rows.select(picked), error[picked]
    middle = error - np.median(error)
    weight = _weights(middle, 1.4826 * float(np.median(np.abs(middle))) + 1e-3)
    best, best_scales = np.inf, PriorScales()
    for length in _LENGTH[0]:
        shared = prior.covariance(rows, rows, PriorScales(1.0, 0.0, 1.0, length))
        smooth = prior.covariance(rows, rows, PriorScales(0.0, 1.0, 1.0, length))
        for setting in (scales for scales in _SETTINGS if scales.length == length):
            noise = prior.noise * setting.noise / weight + _JITTER
            score = _negative_log_likelihood(setting.biases * shared + setting.smooth * smooth, noise, error) + penalty(
                setting
            )
            if score < best:
                best, best_scales = score, setting
    return best_scales


def _negative_log_likelihood(covariance: Doubles, noise: Doubles, error: Doubles) -> float:
    """Negative log likelihood of the errors under this covariance and noise, up to a constant."""
    covariance = covariance.copy()
    covariance[np.diag_indices_from(covariance)] += noise
    try:
        factor = np.linalg.cholesky(covariance)
    except np.linalg.LinAlgError:  # rounding: nothing but noise is as good
        return np.inf
    return float(0.5 * np.sum(np.linalg.solve(factor, error) ** 2) + np.sum(np.log(np.diag(factor))))


def _weights(left: Doubles, spread: float) -> Doubles:
    """Weights of Student's t noise: a little above 1 for small errors, decreasing for large ones."""
    return np.asarray((_DEGREES + 1) / (_DEGREES + (left / spread) ** 2))


@dataclass(frozen=True, eq=False)
class ProcessFit:
    """The posterior given the measured errors, and the held-out residual of each row."""

    weights: Doubles  # (rows,)
    few: NDArray[np.intp]  # rows that set the uncertainty of a correction
    factor: Doubles  # the inverse of the Cholesky factor of their covariance
    left_out: Doubles  # (rows,) held-out residual: its group is predicted from the others
    spread: Doubles  # (rows,) its standard deviation under the Gaussian process


def fit(prior: Prior, rows: CallPoints, error: Doubles, setting: PriorScales, group: NDArray[np.intp]) -> ProcessFit:
    """Condition the prior on the errors. ``group``: calls that are left out together, with which each is scored."""
    covariance = prior.covariance(rows, rows, setting)
    noise = np.full(len(rows), prior.noise * setting.noise + _JITTER)
    weight = np.ones(len(rows))
    for _ in range(_ROUNDS):
        inverse = np.linalg.inv(covariance + np.diag(noise / weight))
        solved = inverse @ error
        weight = np.minimum(_weights(error - covariance @ solved, float(np.sqrt(noise[0]))), 1.25)
    inverse = np.linalg.inv(covariance + np.diag(noise / weight))
    solved = inverse @ error
    left, spread = np.empty(len(rows)), np.empty(len(rows))
    for number in np.unique(group):
        at = np.flatnonzero(group == number)
        among = np.linalg.inv(inverse[np.ix_(at, at)])
        left[at] = among @ solved[at]
        spread[at] = np.sqrt(np.maximum(np.diag(among) - noise[at] / weight[at] + noise[at], 1e-9))
    few = spread_out(rows.position, _FEW_POINTS)
    small = covariance[np.ix_(few, few)] + np.diag((noise / weight)[few])
    return ProcessFit(solved, few, np.linalg.inv(np.linalg.cholesky(small)), left, spread)


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
