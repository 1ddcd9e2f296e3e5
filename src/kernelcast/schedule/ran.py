"""Kernels as they ran: what each took, and what many add up to, by phase and part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kernelcast.forecast.calls import Launch
from kernelcast.forecast.evidence import EvidenceMatch
from kernelcast.forecast.times import Times
from kernelcast.interval import NOTHING, Interval, independent
from kernelcast.ops.base import kernel_class


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Kernels of one part of a run: ``span`` of all its launches together."""

    phase: str  # of a run: prefill, decode; forward, backward, optimizer
    part: str
    span: Interval
    launches: float
    bound_by: str
    support: str
    network: str = ""  # the family of kernels whose network answered
    match: EvidenceMatch | None = None  # what it rests on

    @property
    def time_s(self) -> float:
        return self.span.value

    def __mul__(self, times: float) -> KernelTime:
        return replace(self, span=self.span * times, launches=self.launches * times)

    @classmethod
    def of(cls, phase: str, launch: Launch, times: Times, count: float = 1.0) -> KernelTime:
        """A launch, so many times over."""
        found, count = times[launch.call], launch.count * count
        network = kernel_class(launch.call.op).family
        return cls(phase, launch.part, found.span * count, count, found.bound_by, found.support, network, found.match)

    @classmethod
    def beside(cls, phase: str, part: str, span: Interval, bound_by: str, support: str = "seen") -> KernelTime:
        """Time that no kernel takes: waiting for the host, a lowered clock."""
        return cls(phase, part, span, 0.0, bound_by, support)


@dataclass(frozen=True)
class Share:
    """A part in one phase: its seconds, its kernels, and what binds (supports) most of its time."""

    phase: str
    part: str
    time_s: float
    kernels: float  # launched
    bound_by: str
    support: str


def shares(run: Iterable[KernelTime]) -> tuple[Share, ...]:
    """Where the time goes, by phase and part in the order of appearance; adds up to the run's time."""
    groups: dict[tuple[str, str], list[KernelTime]] = {}
    for one in run:
        groups.setdefault((one.phase, one.part), []).append(one)
    return tuple(
        Share(
            phase, part, sum(one.time_s for one in members), sum(one.launches for one in members),
            _most((one.bound_by, one.time_s) for one in members),
            _most((one.support, one.time_s) for one in members),
        )
        for (phase, part), members in groups.items()
    )  # fmt: skip


def _most(named: Iterable[tuple[str, float]]) -> str:
    """The name with the largest sum."""
    sums: dict[str, float] = {}
    for name, value in named:
        sums[name] = sums.get(name, 0.0) + value
    return max(sums, key=lambda name: sums[name])


def joined(run: Iterable[KernelTime]) -> Interval:
    """Kernels one after another: what one network says is wrong the same way wherever it runs, different networks are
    wrong on their own."""
    groups: dict[str, Interval] = {}
    for one in run:
        groups[one.network] = groups.get(one.network, NOTHING) + one.span
    return independent(groups.values())
