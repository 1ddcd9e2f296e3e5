"""What turns limits into times: one interface for the learned efficiency, the generic one, and the baselines; and the
generic one itself, which is physics alone.

Generic: each pipeline sustains a share of its peak; pipelines overlap well but not perfectly (a 4-norm); the launch
floor comes on top. The shares of tensor cores and DRAM are those measured on the GPU, else the mean of its siblings; of
tensor cores times what the boards' power allows (``hardware/clocks.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kernelcast.forecast.evidence import UNMATCHED, EvidenceMatch, without_evidence
from kernelcast.hardware import Gpu, gpu, gpu_ids, root_of
from kernelcast.hardware.clocks import product_rates, usual_clock_hz
from kernelcast.machine.analyse import PIPELINES, Analysis, Candidates, Score, lazy, overlapped, summed
from kernelcast.machine.limits import NOTHING, PER_SM
from kernelcast.ops.base import Calls, Configuration, Kernel
from kernelcast.ops.work import Array, Number, chosen
from kernelcast.results import EXTRAPOLATED

if TYPE_CHECKING:
    from kernelcast.forecast.features import Features


@dataclass(frozen=True)
class PredictorInput:
    """Calls of one op on one GPU, and what the machine found: for each work its best candidates, best first."""

    kernel: type[Kernel]
    calls: Calls
    gpu: Gpu
    ranked: Sequence[tuple[Analysis, ...]]
    match: EvidenceMatch = UNMATCHED
    network_dtype: str | None = None  # the format that networks are given, where it is not that of the calls
    measured: PredictorInput | None = None  # the calls in the measured configuration, where that is another

    @property
    def best(self) -> list[Analysis]:
        return [candidates[0] for candidates in self.ranked]

    @property
    def bound_s(self) -> Array:
        return summed([work.bound for work in self.best])

    @property
    def choices(self) -> dict[str, str | None]:
        """What the calls are by name: op, dtype, stack, backend, …"""
        dtype = {"dtype": self.network_dtype} if self.network_dtype else {}
        return {**self.calls.choices, **dtype, "op": self.kernel.op}

    @property
    def time_s(self) -> Array:
        """The generic time, by physics alone."""
        from kernelcast.forecast.predictor import work_times  # which answers questions itself

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
    support: NDArray[Any]  # index in LEVELS
    predictor: str = ""  # who answered, where it is not the one that was asked

    def clipped(self, bound_s: Array) -> Self:
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
        """What every result names as its source, with the version."""
        ...

    @property
    def keep(self) -> int:
        """How many candidates of each work it looks at."""
        ...

    def score(self, target: Gpu) -> Score:
        """How it ranks them."""
        ...

    def estimate(self, question: PredictorInput) -> Estimate: ...

    def matches(self, kernel: type[Kernel], configuration: Configuration, target: Gpu) -> tuple[EvidenceMatch, ...]:
        """The evidence of a configuration; several, where the numbers of a call decide."""
        ...

    def what_if_spread(self, family: str) -> tuple[float, float] | None:
        """How far below and above (logs) a what-if may be off, beyond what it changes; None: a method of its own, which
        predicts the changed GPU like any other."""
        ...


# Share of the peak that good kernels sustain, of the pipelines that the catalogue has no measurement of.
_SHARES = {"fma": 0.80, "xu": 0.80, "smem": 0.95, "l2": 0.85, "issue": 0.80, "link": 0.80, "launch": 1.0}
# 80% of measured calls, eight families of public campaigns in equal parts, lie between these multiples of the estimate:
# stacks add kernels and overhead that physics does not know of.
LOW, HIGH = 0.98, 5.9

_LAUNCH, _DRAM = PIPELINES.index("launch"), PIPELINES.index("dram")


@dataclass(frozen=True)
class Generic:
    """Physics alone."""

    name: str = "generic-1"
    keep: int = 1

    def score(self, target: Gpu) -> Score:
        return ByTime(target)

    def what_if_spread(self, family: str) -> tuple[float, float]:
        return 0.0, 0.0

    def matches(self, kernel: type[Kernel], configuration: Configuration, target: Gpu) -> tuple[EvidenceMatch, ...]:
        return (without_evidence(kernel, configuration, target),)

    def estimate(self, question: PredictorInput) -> Estimate:
        target, works = question.gpu, question.best
        shares = sustained_shares(target)
        time = summed(work_times(works, target))
        ceiling = np.zeros(1)
        for work in works:
            best = work.limits / shares
            best[_LAUNCH] = 0.0
            ceiling = ceiling + _floor(work.limits[_LAUNCH], work.launches, target) + np.max(best, axis=0)
        nothing_fitted = np.full(question.calls.count, EXTRAPOLATED)
        return Estimate(time, time * LOW, time * HIGH, ceiling, nothing_fitted).clipped(question.bound_s)


def work_times(works: Sequence[Analysis], target: Gpu) -> list[Array]:
    """Seconds of each kernel; where they are what it was chosen by, they are known."""
    time = ByTime(target)
    known = [ranked_times(work, target) for work in works]
    return [
        work.full(time(work.busiest_each, work)) if times is None else times[work.rank]
        for work, times in zip(works, known, strict=True)
    ]


def ranked_times(work: Analysis, target: Gpu) -> Array | None:
    """(ranks, calls): of this candidate and those beside it, where seconds are what they were ranked by."""
    ranked = work.ranked
    return ranked.score if ranked and isinstance(ranked.by, ByTime) and ranked.by.target is target else None


@dataclass(frozen=True, eq=False)
class ByTime:
    """Seconds of a kernel, from the busiest SM's limits and what it waits for."""

    target: Gpu

    def __call__(self, limits: Sequence[Array], details: Candidates | Analysis) -> Array:
        target, shares = self.target, sustained_shares(self.target)[:, 0].tolist()
        busy = [limit if limit is NOTHING else limit / share for limit, share in zip(limits, shares, strict=True)]
        refetched = details["refetched_bytes"]
        busy[_DRAM] = busy[_DRAM] + refetched / (target.dram_bytes_per_s * shares[_DRAM])
        busy[_LAUNCH] = np.asarray(details["step_s"])  # its row is free: the floor is added below
        return _floor(limits[_LAUNCH], details["launches"], target) + details["setup_s"] + overlapped(busy)


def _floor(launch_s: Array, launches: Number, target: Gpu) -> Array:
    """What a kernel takes with next to nothing to do; nothing where the launch limit is left out."""
    return np.where(launch_s > 0, np.maximum(launch_s, sustained_start_s(target) * launches), 0.0)


def sustained_start_s(target: Gpu) -> float:
    """What the smallest GEMMs take on this GPU."""
    return _sustained("sustained_launch_s", target)


def sustained_shares(target: Gpu) -> Array:
    """(pipelines, 1) share of each peak, at its highest clock, that this GPU sustains."""
    usual = usual_clock_hz(target) / target.clock_boost_hz
    dram = _sustained("sustained_dram_fraction", target)
    return _shares(tensor_share(target), dram, target.clock_reserve, usual)


@functools.cache
def _shares(tensor: float, dram: float, reserve: float, usual: float) -> Array:
    """``reserve``: the highest clock, ``usual``: that of a load which no limit slows, over the boost clock."""
    by_name = {name: share * (usual / reserve if name in PER_SM else 1) for name, share in _SHARES.items()}
    by_name |= {"tensor": tensor / reserve, "dram": dram}
    shares = np.array([by_name[name] for name in PIPELINES])[:, None]
    shares.flags.writeable = False  # it is shared
    return shares


def dram_time_s(works: Sequence[Analysis], target: Gpu) -> Array:
    """What crosses DRAM's pins once, at the rate that large kernels sustain."""
    once = [np.maximum(work.dram_bytes, work.dram_bytes + work.refetched_bytes - _read_again(work)) for work in works]
    return summed(once) / (target.dram_bytes_per_s * _sustained("sustained_dram_fraction", target))


def _read_again(work: Analysis) -> Array:
    """Operands that are expected from DRAM more than once."""
    return work.full(chosen(work.candidates.work.refetched_bytes, work.candidate))


def tensor_share(target: Gpu) -> float:
    """Share of the published 16-bit peak that its large products reach: measured, else that of its siblings, times what
    the watts of the two boards let their silicon do."""
    if target.sustained_tensor_fraction:
        return target.sustained_tensor_fraction
    guess = _sustained("sustained_tensor_fraction", target)
    if target.long_tensor_fraction:  # measured in runs that last: networks were fitted with this guess
        return guess
    target = root_of(target)  # what a what-if changes is left to physics: a better part is never slower
    here, there = product_rates(target), _reference_rate(target.compute_capability)
    if not here or not there:
        return guess
    rate, reference = target.tensor_flops_per_clk_sm["fp16"], there[1]
    # what those lose that a share is known of, beyond physics, weighs less beside tensor cores of a lower rate
    return float(here.burst * (guess / there[0]) ** min(1.0, rate / reference))


@functools.cache
def _reference_rate(compute_capability: str) -> tuple[float, float] | None:
    """What physics says of the GPUs of this compute capability that a share is known of, and their 16-bit FLOPs a clock
    and SM: of measured ones, else of those that the networks know."""
    known = [g for g in map(gpu, gpu_ids()) if g.compute_capability == compute_capability]
    field = "sustained_tensor_fraction"
    known = [g for g in known if g.sustained_tensor_fraction and g.known_as == g.id]
    known = [g for g in known if _measured(field, g)] or known
    rates = [(each.burst, g.tensor_flops_per_clk_sm["fp16"]) for g in known if (each := product_rates(g))]
    return (float(np.mean([r for r, _ in rates])), max(r for _, r in rates)) if rates else None


def _measured(field: str, known: Gpu) -> bool:
    """Whether it is of a measured campaign, as what the networks were fitted with."""
    return not known.sources.get(field, "").startswith(("estimate", "published"))


def _sustained(field: str, target: Gpu) -> float:
    return getattr(target, field) or _sibling_mean(field, target.compute_capability, target.architecture)


@functools.cache
def _sibling_mean(field: str, compute_capability: str, architecture: str) -> float:
    """Mean over the measured GPUs of its compute capability; else of its architecture; else over NVIDIA's, which the
    networks were fitted with."""
    known = [g for g in map(gpu, gpu_ids()) if getattr(g, field) is not None]
    if field != "sustained_launch_s":
        known = [g for g in known if _measured(field, g)]
    siblings = [g for g in known if g.compute_capability == compute_capability]
    siblings = siblings or [g for g in known if g.architecture == architecture]
    siblings = siblings or [g for g in known if g.vendor == "nvidia"]
    return float(np.mean([getattr(g, field) for g in siblings]))
