"""What forecasts of a traced step and of a training job share: where the time goes, the interval, support."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kernelcast.forecast.end_to_end import EXACT, Setting, WholeSupport, end_to_end, widened
from kernelcast.forecast.predict_table import Times
from kernelcast.results import Interval, support_of
from kernelcast.schedule import EvidenceSummary, KernelTime, Share, joined, shares

# Error of whole steps beyond the intervals of their kernels (clocks, caches, kernels that no campaign has): of our 73
# measured steps eight of ten have kernels that take 0.94 to 1.06 times the predicted sum.
STEP_SPREAD = (0.06, 0.06)


class PredictedStep(ABC):
    """A step's time, its kernels, and what they rest on."""

    if TYPE_CHECKING:  # fields of some, computed by others

        @property
        def time_s(self) -> float: ...
        @property
        def kernels(self) -> Sequence[KernelTime]: ...
        @property
        def times(self) -> Times: ...
        @property
        def setting(self) -> Setting:
            """What decides, beside the kernels, whether such a step was measured."""

    @property
    @abstractmethod
    def spread(self) -> tuple[float, float]:
        """Factors of the time that the 80% interval reaches: kernels, and the host where the GPU waits for it."""

    @cached_property
    def kernel_spread(self) -> tuple[float, float]:
        """Relative spread of the kernels' sum, below and above: their intervals, and the error of whole steps."""
        whole = joined(self.kernels)
        total = whole.value or 1.0
        low, high = (whole.value - whole.low) / total, (whole.high - whole.value) / total
        return float(np.hypot(low, STEP_SPREAD[0])), float(np.hypot(high, STEP_SPREAD[1]))

    @cached_property
    def interval(self) -> Interval:
        """The time of the step, with the error of whole steps on such GPUs beyond kernels and host."""
        measured = self.times.conditions.runs_measured
        spread = EXACT if measured else end_to_end().spread(self.setting)
        return Interval(*widened(self.time_s * np.array([1.0, *self.spread]), spread).tolist())

    @property
    def low_s(self) -> float:
        return self.interval.low

    @property
    def high_s(self) -> float:
        return self.interval.high

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """Where the time of ``kernels`` goes."""
        return shares(self.kernels)

    @cached_property
    def rests_on(self) -> EvidenceSummary:
        """The measured configurations behind the kernels."""
        return EvidenceSummary.of(self.kernels)

    @cached_property
    def supports(self) -> WholeSupport:
        """Of the kernels, and of the step as a whole."""
        return WholeSupport.of(self.setting, support_of((share.time_s, share.support) for share in self.shares))

    @property
    def support(self) -> str:
        return self.supports.level
