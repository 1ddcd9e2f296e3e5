"""The measured calls of one GPU and the prior of its errors -> what they say of every other call.

A Gaussian process: the prior gives the covariance of errors, learned from GPUs that were left out of a fit. How large
its parts are on this GPU is what makes the measured errors most likely (a coarse search around what was learned, held
by a penalty). The noise is Student's t, as weights that are found in turn with the rest: one wild measurement counts
for little.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from kernelcast.forecast.prior import Doubles, Placed, Prior, Setting

MAX_POINTS = 1500  # more rows than that count through a sample
_FEW_POINTS = 256  # that say how sure a correction is
_SEARCH_ROWS = 350  # that choose the setting
_DEGREES = 4.0  # of freedom of the noise
_ROUNDS = 3
_JITTER = 1e-5
# Factors that are tried, and how unlikely they are: the standard deviation of their logs.
_BIASES = ((0.05, 0.3, 1.0, 4.0), 1.4)
_SMOOTH = ((0.05, 0.3, 1.0, 2.0, 4.0, 8.0), 1.0)
_NOISE = ((0.1, 0.3, 1.0, 3.0), 1.4)
_LENGTH = ((0.5, 0.7, 1.0, 1.5), 1.0)
_SETTINGS = [Setting(*values) for values in product(_BIASES[0], _SMOOTH[0], _NOISE[0], _LENGTH[0])]


def penalty(setting: Setting) -> float:
    """Minus the log of how likely a setting is before anything was measured."""
    widths = (_BIASES[1], _SMOOTH[1], _NOISE[1], _LENGTH[1])
    values = (setting.biases, setting.smooth, setting.noise, setting.length)
    return float(sum(0.5 * (np.log(value) / width) ** 2 for value, width in zip(values, widths, strict=True)))


def choose(prior: Prior, rows: Placed, error: Doubles) -> Setting:
    """The setting under which the errors are most likely. Lengths share what costs most, the covariances."""
    if len(rows) > _SEARCH_ROWS:
        picked = np.sort(np.random.default_rng(0).choice(len(rows), _SEARCH_ROWS, replace=False))
        rows, error = rows.select(picked), error[picked]
    middle = error - np.median(error)
    weight = _weights(middle, 1.4826 * float(np.median(np.abs(middle))) + 1e-3)
    best, found = np.inf, Setting()
    for length in _LENGTH[0]:
        shared = prior.covariance(rows, rows, Setting(1.0, 0.0, 1.0, length))
        smooth = prior.covariance(rows, rows, Setting(0.0, 1.0, 1.0, length))
        for setting in (one for one in _SETTINGS if one.length == length):
            noise = prior.noise * setting.noise / weight + _JITTER
            score = _unlikely(setting.biases * shared + setting.smooth * smooth, noise, error) + penalty(setting)
            if score < best:
                best, found = score, setting
    return found


def _unlikely(covariance: Doubles, noise: Doubles, error: Doubles) -> float:
    """Minus the log of the likelihood of errors under this covariance and noise, less a constant."""
    covariance = covariance.copy()
    covariance[np.diag_indices_from(covariance)] += noise
    try:
        factor = np.linalg.cholesky(covariance)
    except np.linalg.LinAlgError:  # rounding: nothing but noise is as good
        return np.inf
    return float(0.5 * np.sum(np.linalg.solve(factor, error) ** 2) + np.sum(np.log(np.diag(factor))))


def _weights(left: Doubles, spread: float) -> Doubles:
    """Of Student's noise: 1 and a little for small errors, less and less for large ones."""
    return np.asarray((_DEGREES + 1) / (_DEGREES + (left / spread) ** 2))


@dataclass(frozen=True, eq=False)
class Fit:
    """What the measured errors say, and what each is off by where its group was left out."""

    weights: Doubles  # (rows,)
    few: NDArray[np.intp]  # rows that say how sure a correction is
    factor: Doubles  # the inverse of the Cholesky factor of their covariance
    left_out: Doubles  # (rows,) error that is left when its group is told by the others
    spread: Doubles  # (rows,) its standard deviation, as the process has it


def fit(prior: Prior, rows: Placed, error: Doubles, setting: Setting, group: NDArray[np.intp]) -> Fit:
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
    for one in np.unique(group):
        at = np.flatnonzero(group == one)
        among = np.linalg.inv(inverse[np.ix_(at, at)])
        left[at] = among @ solved[at]
        spread[at] = np.sqrt(np.maximum(np.diag(among) - noise[at] / weight[at] + noise[at], 1e-9))
    few = spread_out(rows.place, _FEW_POINTS)
    small = covariance[np.ix_(few, few)] + np.diag((noise / weight)[few])
    return Fit(solved, few, np.linalg.inv(np.linalg.cholesky(small)), left, spread)


def spread_out(place: Doubles, count: int) -> NDArray[np.intp]:
    """Rows that cover the rest, in their order."""
    return np.sort(farthest_first(place, count)) if len(place) > count else np.arange(len(place))


def farthest_first(points: Doubles, count: int) -> list[int]:
    """Start at the most central point, then always take the one farthest from all that are taken."""
    picked = [int(np.argmin(np.sum((points - points.mean(axis=0)) ** 2, axis=1)))]
    nearest = np.full(len(points), np.inf)
    while len(picked) < count:
        nearest = np.minimum(nearest, np.sum((points - points[picked[-1]]) ** 2, axis=1))
        picked.append(int(np.argmax(nearest)))
    return picked
