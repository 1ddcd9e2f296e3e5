"""A predictor with a calibration laid over it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kernelcast.efficiency.calibration import Calibration
from kernelcast.efficiency.features import KEEP
from kernelcast.efficiency.predictor import Estimate, Predictor, Question
from kernelcast.hardware import Gpu
from kernelcast.machine.analyse import Score

_LIKE = 0.5  # a call this like a measured one is seen


@dataclass(frozen=True)
class Calibrated:
    """What ``base`` says, corrected by what measurements of this GPU showed."""

    base: Predictor
    calibration: Calibration

    @property
    def name(self) -> str:
        return f"{self.base.name}+calibrated"

    @property
    def keep(self) -> int:
        return max(self.base.keep, KEEP)

    def score(self, target: Gpu) -> Score:
        return self.base.score(target)

    def estimate(self, question: Question) -> Estimate:
        self.calibration.check_gpu(question.gpu.id)
        before = self.base.estimate(question)
        family = self.calibration.families.get(question.kernel.family)
        if family is None:
            return before
        found = question.features
        shift, like = family.correction(found.names, found.values, before.time_s, question.words)
        time = before.time_s * np.exp(shift)
        return replace(
            before,
            time_s=time,
            low_s=time * (before.low_s / before.time_s) ** _reach(family.low, like),
            high_s=time * (before.high_s / before.time_s) ** _reach(family.high, like),
            support=np.where(like >= _LIKE, "seen", before.support).astype(object),
            predictor=before.predictor and f"{before.predictor}+calibrated",
        ).held(question.bound_s)


def _reach(factor: float, like: NDArray[np.float64]) -> NDArray[np.float64]:
    """Errors that were wider than the interval widen it everywhere; narrower ones narrow it where calls are alike."""
    return np.full(len(like), factor) if factor >= 1 else 1.0 + (factor - 1.0) * like
