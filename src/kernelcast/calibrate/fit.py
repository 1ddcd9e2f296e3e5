"""The two levels of a calibration, fitted together: Bayesian, so that few rows move little.

The errors (log of measured over predicted) are biases + a smooth function of the features + noise with heavy tails.
Biases and the function have Gaussian priors around 0. How large they may be, and how far a measured call speaks for its
neighbours, is what predicts calls left out best; of settings that do so about as well (within one standard error),
the one that corrects least. The noise is Student's t, as weights that are found in turn with the rest: one
wild measurement counts for little.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from kernelcast.calibrate.measured import Errors
from kernelcast.efficiency.calibration import ELSEWHERE, REGIMES, bias_keys, matern, regimes

Doubles = NDArray[np.float64]

MAX_POINTS = 1000  # of the local part; more rows than that all count, through these
_SEARCH_ROWS = 400  # that choose the settings
_SEARCH_FOLDS = 20
_DEGREES = 4.0  # of freedom of the noise
_ROUNDS = 3
_JITTER = 1e-6
_LEAST_NOISE = 0.01  # measurements repeat to about 1%; a fit that follows them closer has not found less noise
# Shares of the prior variance of a bias: the family, each word (split among them), the words together. Of each of
# these, this much is common to all regimes.
_ALL, _WORDS, _JOINT, _COMMON = 0.4, 0.3, 0.3, 0.7


@dataclass(frozen=True)
class Setting:
    """Standard deviations of the biases and of the local part, as multiples of the noise; ``length``: how far a call
    speaks for others, in standard deviations of the features."""

    shared: float
    local: float
    length: float


_SHARED = (0.05, 0.3, 1.0, 3.0, 10.0)
_LOCAL = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
_LENGTHS = (0.8, 0.4, 1.6, 3.2)  # the first also says what is near when there is no local part


@dataclass(frozen=True)
class Design:
    """Rows as the model sees them: which biases each has, and where it stands among the features."""

    keys: tuple[str, ...]
    prior: Doubles  # (keys,) share of the variance
    member: Doubles  # (rows, keys) 1 where a row has the bias
    regime: Doubles  # (rows, 3)
    place: Doubles  # (rows, features), standardised, length scale 1
    code: NDArray[np.intp]
    target: Doubles

    def select(self, rows: NDArray[np.intp]) -> Design:
        return replace(
            self, member=self.member[rows], regime=self.regime[rows], place=self.place[rows], code=self.code[rows],
            target=self.target[rows],
        )  # fmt: skip


def design(rows: Errors, mean: NDArray[np.float32], scale: NDArray[np.float32]) -> Design:
    """``scale``: the features' spread times the root of their number, so that distances are near 1."""
    owned = [bias_keys(words) for words in rows.words]
    keys = tuple(dict.fromkeys(key for each in owned for key in each))
    prior = np.full(len(keys), _WORDS / max(1, len(owned[0]) - 2))
    member = np.zeros((len(rows.words), len(keys)))
    for at, each in enumerate(owned):
        member[at, [keys.index(key) for key in each]] = 1.0
        prior[keys.index(each[0])], prior[keys.index(each[-1])] = _ALL, _JOINT
    place = ((rows.values - mean) / scale).astype(np.float64)
    return Design(keys, prior, member[rows.code], regimes(rows.time_s), place, rows.code, rows.target)


def bias_kernel(one: Design, other: Design) -> Doubles:
    """Prior covariance of the biases of two sets of rows, at amplitude 1."""
    shared = (one.member * one.prior) @ other.member.T
    return np.asarray(shared * (_COMMON + (1 - _COMMON) * (one.regime @ other.regime.T)))


def local_kernel(one: Design, other: Design, length: float) -> Doubles:
    """Prior covariance of the local part, at amplitude 1."""
    squared = np.sum(one.place**2, axis=1)[:, None] + np.sum(other.place**2, axis=1) - 2 * one.place @ other.place.T
    same = np.where(one.code[:, None] == other.code[None, :], 1.0, ELSEWHERE)
    return np.asarray(matern(squared / length**2) * same)


def choose(rows: Design, fold: NDArray[np.intp]) -> Setting:
    """The setting that predicts left-out folds best, or nearly so with less correction."""
    if len(rows.target) > _SEARCH_ROWS:
        picked = np.sort(np.random.default_rng(0).choice(len(rows.target), _SEARCH_ROWS, replace=False))
        rows, fold = rows.select(picked), fold[picked]
    groups = [np.flatnonzero(fold % _SEARCH_FOLDS == at) for at in np.unique(fold % _SEARCH_FOLDS)]
    middle = rows.target - np.median(rows.target)
    weight = _weights(middle, _spread(middle))
    found = Setting(_SHARED[0], _LOCAL[0], _LENGTHS[0])
    for _ in range(2):
        left = {setting: _left_out(covariance, rows.target, weight, groups) for setting, covariance in _settings(rows)}
        found = _simplest(left)
        weight = _weights(left[found], _spread(left[found]))
    return found


def _settings(rows: Design) -> Iterator[tuple[Setting, Doubles]]:
    """Every setting and its prior covariance."""
    shared = bias_kernel(rows, rows)
    for length in _LENGTHS:
        local = local_kernel(rows, rows, length)
        for bias, amplitude in product(_SHARED, _LOCAL if length == _LENGTHS[0] else _LOCAL[1:]):
            yield Setting(bias, amplitude, length), bias**2 * shared + amplitude**2 * local


def _left_out(covariance: Doubles, target: Doubles, weight: Doubles, groups: list[NDArray[np.intp]]) -> Doubles:
    """What is left of each error when its group is predicted from the others; one inverse serves all groups."""
    inverse = np.linalg.inv(covariance + np.diag(1 / weight))
    solved = inverse @ target
    left = np.empty(len(target))
    for group in groups:
        left[group] = np.linalg.solve(inverse[np.ix_(group, group)], solved[group])
    return left


def _simplest(left: dict[Setting, Doubles]) -> Setting:
    """Of the settings within one standard error of the best, the one with the least prior variance."""
    size = {setting: np.abs(values) for setting, values in left.items()}
    best = min(size, key=lambda setting: float(np.mean(size[setting])))
    near = [
        setting
        for setting, values in size.items()
        if np.mean(values - size[best]) <= np.std(values - size[best]) / np.sqrt(len(values))
    ]
    return min(near, key=lambda s: (s.shared**2 + s.local**2, float(np.mean(size[s]))))


def _weights(left: Doubles, noise: float) -> Doubles:
    """Of Student's noise: 1 and a little for small errors, less and less for large ones."""
    return np.asarray((_DEGREES + 1) / (_DEGREES + (left / noise) ** 2))


def _spread(values: Doubles) -> float:
    """A standard deviation that a few wild values do not move."""
    return float(1.4826 * np.median(np.abs(values)) + 1e-3)


@dataclass(frozen=True)
class Fit:
    """Biases by key and regime, and the weights of the local part's points."""

    setting: Setting
    biases: Doubles  # (keys, 3)
    points: NDArray[np.intp]  # rows of the design
    weights: Doubles
    design: Design

    def correction(self, rows: Design) -> Doubles:
        level = np.sum((rows.member @ self.biases) * rows.regime, axis=1)
        if not self.setting.local:
            return level
        known = self.design.select(self.points)
        return np.asarray(level + local_kernel(rows, known, self.setting.length) @ self.weights)


def fit(rows: Design, setting: Setting) -> Fit:
    """Ridge regression on the biases and on likeness to the points, each scaled by its prior."""
    points = spread_out(rows.place, MAX_POINTS)
    basis = [_bias_basis(rows, setting.shared)]
    if setting.local:
        known = rows.select(points)
        among = local_kernel(known, known, setting.length) + _JITTER * np.eye(len(points))
        turn = np.linalg.inv(np.linalg.cholesky(among)).T * setting.local
        basis.append(local_kernel(rows, known, setting.length) @ turn)
    columns = np.concatenate(basis, axis=1)
    middle = rows.target - np.median(rows.target)
    weight = _weights(middle, _spread(middle))
    for _ in range(_ROUNDS):
        found = ridge(columns, rows.target, weight)
        left = rows.target - columns @ found
        weight = _weights(left, max(_spread(left), _LEAST_NOISE))
    found = ridge(columns, rows.target, weight)
    count = basis[0].shape[1]
    biases = _bias_values(found[:count], rows.prior, setting.shared)
    weights = turn @ found[count:] if setting.local else np.zeros(len(points))
    return Fit(setting, biases, points, weights, rows)


def ridge(columns: Doubles, target: Doubles, weight: Doubles) -> Doubles:
    """Coefficients with a prior of variance 1, of targets with noise of variance 1 / weight."""
    weighted = columns.T * weight
    return np.asarray(np.linalg.solve(weighted @ columns + np.eye(columns.shape[1]), weighted @ target))


def _bias_basis(rows: Design, shared: float) -> Doubles:
    """(rows, keys * 4): of each bias its common part and its three regimes, scaled by their priors."""
    member = rows.member * np.sqrt(rows.prior) * shared
    parts = [np.sqrt(_COMMON) * member]
    parts += [np.sqrt(1 - _COMMON) * member * rows.regime[:, [at]] for at in range(len(REGIMES))]
    return np.concatenate(parts, axis=1)


def _bias_values(found: Doubles, prior: Doubles, shared: float) -> Doubles:
    """(keys, 3) biases from the scaled coefficients: common part + regime."""
    common, *each = found.reshape(1 + len(REGIMES), len(prior))
    scale = np.sqrt(prior) * shared
    return np.stack([scale * (np.sqrt(_COMMON) * common + np.sqrt(1 - _COMMON) * part) for part in each], axis=1)


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
