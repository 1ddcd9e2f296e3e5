"""What turns limits into times: one interface for the learned efficiency, the generic one, and the baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kernelcast.forecast.evidence import AS_IT_IS, EvidenceMatch
from kernelcast.hardware import Gpu
from kernelcast.machine.analyse import Analysis, Score, summed
from kernelcast.machine.lazy import lazy
from kernelcast.ops.base import Calls, Configuration, Kernel
from kernelcast.ops.work import Array

if TYPE_CHECKING:
    from kernelcast.forecast.features import Features


@dataclass(frozen=True)
class Question:
    """Calls of one op on one GPU, and what the machine found: for each work its best candidates, best first."""

    kernel: type[Kernel]
    calls: Calls
    gpu: Gpu
    ranked: Sequence[tuple[Analysis, ...]]
    match: EvidenceMatch = AS_IT_IS
    told_dtype: str | None = None  # the format that networks are told of, where it is not that of the calls
    heard: Question | None = None  # the same calls as the measured kind that they are answered as; None: they are of it

    @property
    def best(self) -> list[Analysis]:
        return [candidates[0] for candidates in self.ranked]

    @property
    def bound_s(self) -> Array:
        return summed([work.bound for work in self.best])

    @property
    def words(self) -> dict[str, str | None]:
        """What the calls are by name: op, dtype, stack, backend, …"""
        told = {"dtype": self.told_dtype} if self.told_dtype else {}
        return {**self.calls.choices, **told, "op": self.kernel.op}

    @property
    def time_s(self) -> Array:
        """The generic time, by physics alone."""
        from kernelcast.forecast.generic import work_times  # which answers questions itself

        return summed(work_times(self.best, self.gpu))

    @lazy
    def features(self) -> Features:
        """Made once, however many predictors look at them."""
        from kernelcast.forecast.features import features  # they rest on the generic time, which answers questions

        return features(self.ranked, self.kernel.shape_features(self.calls, self.gpu), self.gpu)


@dataclass(frozen=True)
class Estimate:
    """Times in seconds and how far the question is from the data, one entry a call."""

    time_s: Array
    low_s: Array
    high_s: Array
    ceiling_s: Array
    support: NDArray[Any]  # seen | near | extrapolated
    predictor: str = ""  # who answered, where it is not the one that was asked

    def held(self, bound_s: Array) -> Self:
        """The same with what must be so: bound <= low <= time <= high, and bound <= ceiling <= time."""
        time = np.maximum(self.time_s, bound_s)
        return replace(
            self,
            time_s=time,
            low_s=np.minimum(np.maximum(self.low_s, bound_s), time),
            high_s=np.maximum(self.high_s, time),
            ceiling_s=np.minimum(np.maximum(self.ceiling_s, bound_s), time),
        )


class Predictor(Protocol):
    """Anything that answers a question with times."""

    @property
    def name(self) -> str:
        """What every result says it rests on: kind and version."""
        ...

    @property
    def keep(self) -> int:
        """How many candidates of each work it looks at."""
        ...

    def score(self, target: Gpu) -> Score:
        """How it ranks them."""
        ...

    def estimate(self, question: Question) -> Estimate: ...

    def matches(self, kernel: type[Kernel], words: Configuration, target: Gpu) -> tuple[EvidenceMatch, ...]:
        """What calls of this kind rest on, and the words that they are answered in; several, where numbers decide."""
        ...

    def what_if_spread(self, family: str) -> tuple[float, float] | None:
        """How far below and above (logs) a what-if may be off, beyond what it changes; None: a method of its own, which
        is asked about the changed GPU as it is about any other."""
        ...
