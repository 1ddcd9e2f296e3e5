"""Breakdown of a run: kernel time by phase and part, memory by what it holds, and the evidence behind it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kernelcast.forecast.calls import Launch
from kernelcast.forecast.evidence import EvidenceMatch
from kernelcast.forecast.predict_table import Times
from kernelcast.hardware import gpu, gpu_ids
from kernelcast.ops.base import kernel_class
from kernelcast.results import NOTHING, SUPPORT, Interval, independent


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Kernels of one part of a run: ``interval`` of all its launches together."""

    phase: str  # of a run: prefill, decode; forward, backward, optimizer
    part: str
    interval: Interval
    launches: float
    bound_by: str
    support: str
    network: str = ""  # the family of kernels whose network answered
    match: EvidenceMatch | None = None  # what it rests on

    @property
    def time_s(self) -> float:
        return self.interval.value

    def __mul__(self, times: float) -> KernelTime:
        return replace(self, interval=self.interval * times, launches=self.launches * times)

    @classmethod
    def of(cls, phase: str, launch: Launch, times: Times, count: float = 1.0) -> KernelTime:
        """A launch, so many times over."""
        time, count = times[launch.call], launch.count * count
        network = kernel_class(launch.call.op).family
        return cls(phase, launch.part, time.interval * count, count, time.bound_by, time.support, network, time.match)

    @classmethod
    def beside(cls, phase: str, part: str, interval: Interval, bound_by: str, support: str = "seen") -> KernelTime:
        """Time that no kernel takes: waiting for the host, a lowered clock."""
        return cls(phase, part, interval, 0.0, bound_by, support)


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
    for kernel in run:
        groups.setdefault((kernel.phase, kernel.part), []).append(kernel)
    return tuple(
        Share(
            phase, part, sum(kernel.time_s for kernel in members), sum(kernel.launches for kernel in members),
            _most((kernel.bound_by, kernel.time_s) for kernel in members),
            _most((kernel.support, kernel.time_s) for kernel in members),
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
    """Kernels one after another: errors of one network have one cause, those of different networks are independent."""
    groups: dict[str, Interval] = {}
    for kernel in run:
        groups[kernel.network] = groups.get(kernel.network, NOTHING) + kernel.interval
    return independent(groups.values())


_SELDOM = 0.005  # of the time: shown as 0%
_LEAST = 0.0005
_LISTED = 12  # configurations in JSON, those with the most time first


@dataclass(frozen=True)
class EvidenceSummary:
    """Configurations with their share of the time of kernels; ``support`` is that share by level."""

    configurations: tuple[tuple[EvidenceMatch, float], ...]
    support: dict[str, float]

    @classmethod
    def of(cls, run: Iterable[KernelTime]) -> EvidenceSummary:
        times: dict[EvidenceMatch, float] = {}
        levels: dict[str, float] = {}
        for kernel in run:
            if kernel.match is not None:
                times[kernel.match] = times.get(kernel.match, 0.0) + kernel.time_s
                levels[kernel.support] = levels.get(kernel.support, 0.0) + kernel.time_s
        total = sum(times.values()) or 1.0
        order = sorted(times.items(), key=lambda item: -item[1])
        shares = {level: levels[level] / total for level in SUPPORT if level in levels}
        return cls(tuple((match, time / total) for match, time in order), shares)

    @property
    def calls(self) -> int:
        """Measured calls of all these configurations."""
        return sum({id(match.entry): match.entry.calls for match, _ in self.configurations if match.entry}.values())

    @property
    def error(self) -> float | None:
        """Mean error on calls left out, by time; None where nothing was tested."""
        tested = [
            (match.entry.error, share)
            for match, share in self.configurations
            if match.entry and match.entry.error is not None
        ]
        whole = sum(share for _, share in tested)
        return sum(error * share for error, share in tested) / whole if whole else None

    def to_dict(self) -> dict[str, Any]:
        """As data: the whole, and the configurations with the most time."""
        kinds = [
            {
                "share": round(share, 4),
                "answered_as": match.answered_as,
                **(match.evidence or {"words": dict(match.configuration)}),
            }
            for match, share in self.configurations[:_LISTED]
        ]
        return {"calls": self.calls, "error": self.error, "support": self.support, "kinds": kinds}

    @property
    def text(self) -> str:
        """'67,280 calls of 3 configurations; 3.4% held-out error; 6% borrowed from H200; of the time 88% seen, 12%
        near'; 'nothing measured on RTX 4090; borrowed from L40S, H200; …'."""
        own = {id(match.entry): match.entry for match, _ in self.configurations if match.entry and not match.borrowed}
        others = self._borrowed()
        names = ", ".join(others)
        if own:
            count, calls = len(own), sum(entry.calls for entry in own.values())
            parts = [f"{calls:,} call{'' if calls == 1 else 's'} of {count} configuration{'' if count == 1 else 's'}"]
            parts += [f"{self.error:.1%} held-out error"] if self.error is not None else []
            parts += [f"{sum(others.values()):.0%} borrowed from {names}"] if others else []
        elif others:
            matches = [match for match, _ in self.configurations if match.borrowed]
            what = "nothing" if any(match.gpu_is_new for match in matches) else "none of it was"
            parts = [f"{what} measured on {short_name(matches[0].gpu)}", f"borrowed from {names}"]
        else:
            parts = ["no measured call of these configurations"]
        levels = ", ".join(f"{share:.0%} {level}" for level, share in self.support.items() if share >= _SELDOM)
        return "; ".join([*parts, f"of the time {levels}"] if levels else parts)

    def _borrowed(self) -> dict[str, float]:
        """Other GPUs whose measurements stand in, with their share of the time, most first."""
        shares: dict[str, float] = {}
        for match, share in self.configurations:
            if match.borrowed and match.entry:
                name = short_name(match.entry.gpu)
                shares[name] = shares.get(name, 0.0) + share
        return {name: share for name, share in shares.items() if share >= _SELDOM}

    @property
    def changes(self) -> list[str]:
        """Choices that others stand in for, with the share of the time, most first."""
        totals: dict[str, float] = {}
        for match, share in self.configurations:
            if match.entry is not None and match.stand_in:
                key = f"{match.entry.op} {match.stand_in}"
                totals[key] = totals.get(key, 0.0) + share
        order = sorted(totals.items(), key=lambda item: -item[1])
        return [f"{text} ({share:.1%})" for text, share in order if share >= _LEAST]


def short_name(gpu_id: str) -> str:
    """'RTX 4090' of rtx_4090: the name that its maker prints, without the maker."""
    if gpu_id not in gpu_ids():
        return gpu_id
    name = gpu(gpu_id).name
    for maker in ("NVIDIA GeForce ", "NVIDIA ", "AMD Instinct ", "AMD "):
        name = name.removeprefix(maker)
    return name


@dataclass(frozen=True)
class Memory:
    """Bytes by what they hold; parts add up to ``used_bytes``. Columns of bytes make it many memories of one GPU."""

    parts: Mapping[str, Any]
    gpu_bytes: float
    available_bytes: float  # of these, that may be filled

    def __getitem__(self, part: str) -> Any:
        return self.parts[part]

    @property
    def used_bytes(self) -> Any:
        return sum(self.parts.values())

    @property
    def free_bytes(self) -> Any:
        """Below zero when it does not fit."""
        return self.available_bytes - self.used_bytes

    @property
    def fits(self) -> Any:
        return self.free_bytes >= 0

    @property
    def missing_bytes(self) -> Any:
        return np.maximum(0.0, -self.free_bytes)

    def fields(self, *names: str) -> dict[str, float]:
        """``name_bytes`` of each part and of these properties, for JSON."""
        values = {f"{name}_bytes": float(size) for name, size in self.parts.items()}
        return values | {name: float(getattr(self, name)) for name in names}
