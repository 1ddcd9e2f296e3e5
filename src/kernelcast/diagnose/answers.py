"""Predictions of many kernel calls with what reasons are made of: limits, tiles, waves, bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kernelcast.forecast.calls import Call, Launch, columns_of
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict import Predictions
from kernelcast.forecast.predict_table import answered
from kernelcast.forecast.table import BadRows
from kernelcast.hardware import Gpu
from kernelcast.machine.analyse import PIPELINES

_ADDED = ("time_us", "low_us", "high_us", "ceiling_us", "bound_us", "flops", "moved_bytes", "dram_bytes",
          "refetched_bytes")  # fmt: skip


@dataclass(frozen=True)
class Predicted:
    """One kernel call, or several in turn: times, limits and bytes add up, the rest is of the longest."""

    time_us: float
    low_us: float
    high_us: float
    ceiling_us: float
    bound_us: float
    flops: float  # useful ones
    moved_bytes: float  # all operands once
    dram_bytes: float  # the least
    refetched_bytes: float
    limits_us: Mapping[str, float]
    support: str
    tile: Mapping[str, float]
    tasks: float
    padding: float

    @property
    def bound_by(self) -> str:
        return max(self.limits_us, key=lambda name: self.limits_us[name], default="launch")

    @property
    def work_us(self) -> float:
        """The largest limit beside the launch."""
        return max((v for name, v in self.limits_us.items() if name != "launch"), default=0.0)


class Answers:
    """Every different call predicted once; where one cannot be on this GPU, a text that says why."""

    def __init__(self, asked: Iterable[Call], chip: Gpu, conditions: Conditions) -> None:
        calls, bad = list(dict.fromkeys(asked)), BadRows()
        self._told: dict[Call, Predicted | str] = {}
        for rows, places, found in answered(columns_of(calls), chip, conditions, bad, details=True):
            self._told |= {calls[row]: _one(found, at) for row, at in zip(rows, places, strict=True)}
        self._told |= {calls[row]: text for row, text in bad.found.items()}

    def of(self, launches: Iterable[Launch]) -> Predicted | str | None:
        """Of calls in turn; a text that says why one of them cannot be, None where there is none."""
        parts: list[tuple[Predicted, float]] = []
        for launch in launches:
            told = self._told[launch.call]
            if isinstance(told, str):
                return told
            parts.append((told, launch.count))
        return together(parts) if parts else None


def _one(told: Predictions, at: int) -> Predicted:
    works = [work for work in told.works if work.launches[at] > 0] or list(told.works[:1])
    main = max(works, key=lambda work: float(work.bound[at]))
    times = ("time", "low", "high", "ceiling", "bound")
    times_us: dict[str, Any] = {f"{name}_us": float(getattr(told, f"{name}_s")[at]) * 1e6 for name in times}
    return Predicted(
        **times_us,
        flops=sum(float(work.useful_flops[at]) or float(work.flops[at]) for work in works),
        moved_bytes=float(told.footprint_bytes[at]),
        dram_bytes=sum(float(work.dram_bytes[at]) for work in works),
        refetched_bytes=sum(float(work.refetched_bytes[at]) for work in works),
        limits_us={name: float(v) * 1e6 for name, v in zip(PIPELINES, told.limits_s[:, at], strict=True) if v > 0},
        support=str(told.support[at]),
        tile={name: float(v[at]) for name, v in main.tile.items()},
        tasks=float(main.tasks[at]),
        padding=float(main.padding[at]),
    )


def together(parts: Sequence[tuple[Predicted, float]]) -> Predicted:
    """Calls of one op in turn, each so many times."""
    longest = max(parts, key=lambda part: part[0].time_us * part[1])[0]
    names = dict.fromkeys(name for one, _ in parts for name in one.limits_us)
    added: dict[str, Any] = {name: sum(float(getattr(one, name)) * count for one, count in parts) for name in _ADDED}
    limits = {name: sum(one.limits_us.get(name, 0.0) * count for one, count in parts) for name in names}
    return replace(longest, **added, limits_us=limits)
