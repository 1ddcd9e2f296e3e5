"""Predictions of many kernel calls with what reasons are made of: limits, tiles, waves, bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.machine.analyse import PIPELINES, Analysis
from kernelcast.machine.limits import Turns
from kernelcast.networks.forward import Call
from kernelcast.predict import Conditions, Predictions, predict_calls, too_large_text
from kernelcast.tables import BadRows, grouped

Asked = tuple[tuple[tuple[str, Any], ...], float, float]  # parameters, rotation, input rotation


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


def asked(call: Call, conditions: Conditions, rotation: float | None = None, inputs: float | None = None) -> Asked:
    return (
        call.parameters,
        conditions.rotation if rotation is None else rotation,
        conditions.input_rotation if inputs is None else inputs,
    )


def predict_all(questions: Sequence[Asked], chip: Gpu, conditions: Conditions) -> dict[Asked, Predicted | str]:
    """Every different question once; where a call cannot be on this GPU, a text that says why."""
    new = list(dict.fromkeys(questions))
    if not new:
        return {}
    bad = BadRows()
    turns = Turns(np.array([q[1] for q in new]), np.array([q[2] for q in new]))
    found: dict[Asked, Predicted | str] = {}
    for kernel, place, rows, calls in grouped(_columns(new), chip, bad):
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


def _columns(questions: Sequence[Asked]) -> dict[str, NDArray[Any]]:
    names = list(dict.fromkeys(name for parameters, _, _ in questions for name, _ in parameters))
    columns = {name: np.full(len(questions), None, dtype=object) for name in names}
    for row, (parameters, _, _) in enumerate(questions):
        for name, value in parameters:
            columns[name][row] = value
    return columns


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
