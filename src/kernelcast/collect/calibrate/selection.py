"""Which calls to measure next: the most informative of all the others, by the prior of a family's errors.

Of every candidate the process knows how much of the others' variance it would take away; the best is taken, and the
others' covariances are conditioned on it, call by call.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernelcast.collect.calibrate.fit import prior_of
from kernelcast.collect.calibrate.residuals import Columns, Residuals, predictions
from kernelcast.errors import KernelcastError
from kernelcast.forecast import Calibration
from kernelcast.forecast.calibration import FamilyCalibration
from kernelcast.forecast.conditions import DEFAULT, Conditions
from kernelcast.forecast.prior import CallPoints, Doubles, Prior, PriorScales
from kernelcast.hardware import Gpu

_REFERENCE = 500  # candidates of a family that represent the others
_POOL = 1500  # candidates of a family that are considered
_MEAN = np.sqrt(2 / np.pi)


@dataclass(frozen=True)
class Selection:
    """Rows of the candidates, the most informative first, and the mean error in % expected of all of them: before
    any is measured, and after all of these were."""

    rows: NDArray[np.intp]
    before: float
    after: float


def next_calls(
    candidates: Columns,
    count: int,
    target: Gpu,
    conditions: Conditions = DEFAULT,
    calibration: Calibration | None = None,
) -> Selection:
    """``count`` of the candidate calls (columns as in any table), given the calls of an existing calibration."""
    if calibration is not None:
        calibration.check_gpu(target.known_as)
    base = conditions.loaded_predictor
    by_family = predictions(candidates, target, base, conditions)
    if not by_family:
        raise KernelcastError("no call to choose from")
    parts = []
    for name, (rows, at) in by_family.items():
        known = calibration.families.get(name) if calibration else None
        keep = np.arange(len(rows))
        if len(rows) > _POOL:
            keep = np.sort(np.random.default_rng(0).choice(len(rows), _POOL, replace=False))
        prior = known.prior if known else prior_of(rows, base)
        parts.append(_Candidates(rows, at, keep, prior, known))
    picked: list[tuple[int, int]] = []
    gains = [part.gain for part in parts]
    while len(picked) < min(count, sum(len(part.keep) for part in parts)):
        best = int(np.argmax([gain.max() for gain in gains]))
        picked.append((best, parts[best].take(int(np.argmax(gains[best])))))
        gains[best] = parts[best].gain
    order = np.array([parts[family].at[row] for family, row in picked], dtype=np.intp)
    total = sum(len(part.reference) for part in parts)
    before, after = (
        np.concatenate(sizes).sum() for sizes in ([p.before for p in parts], [p.expected() for p in parts])
    )
    return Selection(order, float(100 * before / total), float(100 * after / total))


class _Candidates:
    """One family's candidates, and the information that each would give about the reference calls."""

    def __init__(
        self,
        rows: Residuals,
        at: NDArray[np.intp],
        keep: NDArray[np.intp],
        prior: Prior,
        known: FamilyCalibration | None,
    ) -> None:
        setting = known.setting if known else PriorScales()
        self.at, self.keep = at, keep
        rng = np.random.default_rng(1)
        self.reference = keep if len(keep) <= _REFERENCE else np.sort(rng.choice(keep, _REFERENCE, replace=False))
        placed, points = _with_calibrated(rows, prior, known)
        pool, reference = placed.select(keep), placed.select(self.reference)
        self.noise = prior.noise * setting.noise
        self.among = prior.covariance(pool, pool, setting)
        self.across = prior.covariance(pool, reference, setting)
        self.left = prior.variance(reference, setting)
        if known is not None and points is not None:  # on the calls that set the uncertainty of a calibration
            mine, theirs = (prior.covariance(c, points, setting) @ known.factor.T for c in (pool, reference))
            self.among -= mine @ mine.T
            self.across -= mine @ theirs.T
            self.left = self.left - np.sum(theirs**2, axis=1)
        self.own = np.diag(self.among).copy()
        self.taken: list[Doubles] = []  # columns of the Cholesky factor, one a call that was taken
        self.width = rows.width[self.reference]
        self.before = self.expected()
        self.free = np.ones(len(keep), dtype=bool)

    def expected(self) -> Doubles:
        """Size of the error that is expected of each reference call."""
        return np.asarray(_MEAN * self.width * np.sqrt(np.maximum(self.left, 0) + self.noise))

    @property
    def gain(self) -> Doubles:
        """The variance of the reference calls that each candidate would remove."""
        reduction = (self.across**2 @ self.width**2) / (np.maximum(self.own, 0) + self.noise)
        return np.where(self.free, reduction, -1.0)

    def take(self, row: int) -> int:
        """Take a candidate: the others are conditioned on it from now on."""
        column = self.among[:, row] - sum(
            (column_taken * column_taken[row] for column_taken in self.taken), np.zeros(len(self.own))
        )
        scale = np.sqrt(max(float(self.own[row]), 0.0) + self.noise)
        column, theirs = column / scale, self.across[row] / scale
        self.taken.append(column)
        self.own = self.own - column**2
        self.left = self.left - theirs**2
        self.across = self.across - np.outer(column, theirs)
        self.free[row] = False
        return int(self.keep[row])


def _with_calibrated(
    rows: Residuals, prior: Prior, known: FamilyCalibration | None
) -> tuple[CallPoints, CallPoints | None]:
    """The candidates, and the calls of a calibration, numbered by the same labels."""
    if known is None:
        return rows.placed(prior), None
    few, count = known.few, len(rows)
    positions = np.concatenate([rows.placed(prior).position, known.position[few]])
    leaning = np.concatenate([rows.leaning, known.leaning[few]])
    code = np.concatenate([rows.code, known.code[few] + len(rows.shared)])
    both = CallPoints.of(positions, leaning, (*rows.shared, *known.groups), code)
    return both.select(np.arange(count)), both.select(np.arange(count, len(both)))
