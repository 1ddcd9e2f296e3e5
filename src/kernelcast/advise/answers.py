"""Predictions of many kernel calls with what reasons are made of: limits, tiles, waves, bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kernelcast.calls.call import Call, columns_of
from kernelcast.calls.table import BadRows, grouped
from kernelcast.hardware import Gpu
from kernelcast.machine.analyse import PIPELINES, Analysis
from kernelcast.predict import Conditions, Predictions, predict_calls, too_large_text
from kernelcast.tables import turns_of


@dataclass(frozen=True)
class Predicted:
    """One kernel call, or several in turn: times add up, the rest is of the longest."""

    time_us: float
    low_us: float
    high_us: float
    ceiling_us: float
    bound_us: float
    limits_us: Mapping[str, float]
    support: str
    flops: float  # useful ones
    moved_bytes: float  # all operands once
    dram_bytes: float  # the least
    refetched_bytes: float
    tile: Mapping[str, float]
    tasks: float
    tail: float
    padding: float

    @property
    def bound_by(self) -> str:
        return max(self.limits_us, key=lambda name: self.limits_us[name], default="launch")

    @property
    def work_us(self) -> float:
        """The largest limit beside the launch."""
        return max((v for name, v in self.limits_us.items() if name != "launch"), default=0.0)


def predict_all(asked: Iterable[Call], chip: Gpu, conditions: Conditions) -> dict[Call, Predicted | str]:
    """Every different call once; where one cannot be on this GPU, a text that says why."""
    new = list(dict.fromkeys(asked))
    if not new:
        return {}
    bad, columns = BadRows(), columns_of(new)
    turns = turns_of(columns, conditions)
    found: dict[Call, Predicted | str] = {}
    for kernel, place, rows, calls in grouped(columns, chip, bad):
        try:
            told = predict_calls(kernel, calls, place, conditions, turns=turns.part(rows), details=True)
        except ValueError as error:  # the whole group asks for what the GPU lacks
            bad.add(rows, str(error))
            continue
        large = told.too_large(place)
        for at, row in enumerate(rows):
            if large[at]:
                bad.add([row], too_large_text(kernel.op, float(told.footprint_bytes[at]), place))
            else:
                found[new[row]] = _one(told, at)
    return found | {new[row]: text for row, text in bad.found.items()}


def _one(told: Predictions, at: int) -> Predicted:
    phases = [phase for phase in told.phases if phase.launches[at] > 0] or list(told.phases[:1])
    main: Analysis = max(phases, key=lambda phase: float(phase.bound[at]))
    return Predicted(
        time_us=float(told.time_s[at]) * 1e6,
        low_us=float(told.low_s[at]) * 1e6,
        high_us=float(told.high_s[at]) * 1e6,
        ceiling_us=float(told.ceiling_s[at]) * 1e6,
        bound_us=float(told.bound_s[at]) * 1e6,
        limits_us={name: float(v) * 1e6 for name, v in zip(PIPELINES, told.limits_s[:, at], strict=True) if v > 0},
        support=str(told.support[at]),
        flops=sum(float(phase.useful_flops[at]) or float(phase.flops[at]) for phase in phases),
        moved_bytes=float(told.footprint_bytes[at]),
        dram_bytes=sum(float(phase.dram_bytes[at]) for phase in phases),
        refetched_bytes=sum(float(phase.refetched_bytes[at]) for phase in phases),
        tile={name: float(v[at]) for name, v in main.tile.items()},
        tasks=float(main.tasks[at]),
        tail=float(main.tail[at]),
        padding=float(main.padding[at]),
    )


def together(parts: Sequence[tuple[Predicted, float]]) -> Predicted:
    """Calls of one op in turn, each so many times."""
    longest = max(parts, key=lambda part: part[0].time_us * part[1])[0]

    def total(name: str) -> float:
        return sum(float(getattr(one, name)) * count for one, count in parts)

    names = dict.fromkeys(name for one, _ in parts for name in one.limits_us)
    return Predicted(
        **{name: total(name) for name in _ADDED},
        limits_us={name: sum(one.limits_us.get(name, 0.0) * count for one, count in parts) for name in names},
        support=longest.support,
        tile=longest.tile,
        tasks=longest.tasks,
        tail=longest.tail,
        padding=longest.padding,
    )


_ADDED = ("time_us", "low_us", "high_us", "ceiling_us", "bound_us", "flops", "moved_bytes", "dram_bytes",
          "refetched_bytes")  # fmt: skip
