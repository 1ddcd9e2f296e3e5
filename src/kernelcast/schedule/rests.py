"""What a run as a whole rests on: the measured kinds behind its kernels, by how much of the time each has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kernelcast.forecast.evidence import EvidenceMatch
from kernelcast.schedule.ran import KernelTime
from kernelcast.support import SUPPORT

_TOLD = 12  # kinds that are told one by one, those with the most time first


@dataclass(frozen=True)
class EvidenceSummary:
    """Kinds with their share of the time of kernels; ``support`` is that share by level."""

    kinds: tuple[tuple[EvidenceMatch, float], ...]
    support: dict[str, float]

    @classmethod
    def of(cls, run: Iterable[KernelTime]) -> EvidenceSummary:
        times: dict[EvidenceMatch, float] = {}
        levels: dict[str, float] = {}
        for one in run:
            if one.match is not None:
                times[one.match] = times.get(one.match, 0.0) + one.time_s
                levels[one.support] = levels.get(one.support, 0.0) + one.time_s
        total = sum(times.values()) or 1.0
        order = sorted(times.items(), key=lambda item: -item[1])
        shares = {level: levels[level] / total for level in SUPPORT if level in levels}
        return cls(tuple((match, time / total) for match, time in order), shares)

    @property
    def calls(self) -> int:
        """Measured calls of all these kinds."""
        return sum({id(one.entry): one.entry.calls for one, _ in self.kinds if one.entry}.values())

    @property
    def error(self) -> float | None:
        """Mean error on calls left out, by time; None where nothing was tested."""
        tested = [(one.entry.error, share) for one, share in self.kinds if one.entry and one.entry.error is not None]
        whole = sum(share for _, share in tested)
        return sum(error * share for error, share in tested) / whole if whole else None

    def told(self) -> dict[str, Any]:
        """As data: the whole, and the kinds with the most time."""
        kinds = [
            {"share": round(share, 4), "answered_as": one.answered_as, **(one.rests_on or {"words": dict(one.words)})}
            for one, share in self.kinds[:_TOLD]
        ]
        return {"calls": self.calls, "error": self.error, "support": self.support, "kinds": kinds}

    @property
    def text(self) -> str:
        """'1,204,880 calls of 14 kinds; 3.4% off on those left out; 88% of the time seen, 12% near'."""
        measured = len({id(one.entry) for one, _ in self.kinds if one.entry})
        off = f"; {100 * self.error:.1f}% off on those left out" if self.error is not None else ""
        levels = ", ".join(f"{share:.0%} {level}" for level, share in self.support.items())
        return f"{self.calls:,} calls of {measured} kinds{off}; of the time {levels}"

    @property
    def changes(self) -> list[str]:
        """What was answered in other words than asked, with the share of the time, most first."""
        told: dict[str, float] = {}
        for one, share in self.kinds:
            if one.changed and one.entry is not None:
                words = ", ".join(f"{word} {answered} for {asked}" for word, asked, answered in one.changed)
                key = f"{one.entry.op} as {words}"
                told[key] = told.get(key, 0.0) + share
        return [f"{text} ({share:.1%})" for text, share in sorted(told.items(), key=lambda item: -item[1])]
