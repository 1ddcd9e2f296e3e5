"""A profiled step in few rows: the time of each kernel, by name and grid, and by the op that launched it.

Input are the events of a Chrome trace as torch.profiler writes it. A kernel names the innermost op by "External id";
its launch by "correlation". Kernels replayed from a CUDA graph share one launch and name no op: they get the ops of
the same step run eagerly, kernel by kernel.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kernelcast.advise.chrome_events import DEVICE, HOST, Event, arg, launch_facts, shape_text, short_name
from kernelcast.errors import KernelcastError

Sums = dict[tuple[Any, ...], list[float]]  # what makes a row -> its calls and time
Row = TypeVar("Row")
SMALL = 1e-3  # a row under this share of the time goes into "other"
PHASE = "kernelcast."  # prefix of the annotations that mark phases of a step


@dataclass(frozen=True)
class KernelRow:
    """Calls of one kernel with one grid and block."""

    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    registers: int
    smem_bytes: int
    calls: int
    total_us: float


@dataclass(frozen=True)
class OpRow:
    """Calls of one kernel from one op with these input shapes, in one phase of the step. An empty op: not known."""

    phase: str
    op: str
    shapes: str
    kernel: str
    calls: int
    total_us: float


@dataclass(frozen=True)
class Other:
    """What is too small for a row of its own."""

    calls: int = 0
    total_us: float = 0.0


@dataclass(frozen=True)
class StepProfile:
    """One step: sums, and the rows that make them up. ``span_ms``: from the first kernel's start to the last's end."""

    kernel_sum_ms: float
    span_ms: float
    kernel_calls: int
    host_launches: int
    phase_ms: dict[str, float]
    kernels: tuple[KernelRow, ...]
    other_kernels: Other
    ops: tuple[OpRow, ...]
    other_ops: Other


def summarise(events: Iterable[Event]) -> StepProfile:
    """Sums and rows of the step whose events these are."""
    spans = [event for event in events if event.get("ph") == "X"]
    device = [event for event in spans if event.get("cat") in DEVICE]
    if not device:
        raise KernelcastError("the profiler saw no kernel: is CUPTI there, and may this user trace the GPU?")
    host = [event for event in spans if event.get("cat") in HOST]
    phases = _Phases(spans, host)
    kernels: Sums = {}
    ops: Sums = {}
    by_phase: dict[str, float] = {}
    named = {arg(e, "External id"): e for e in spans if e.get("cat") == "cpu_op"}
    has_ops = any(arg(event, "External id") in named for event in device)
    for event in device:
        time_us, name = float(event["dur"]), short_name(str(event["name"]))
        phase = phases.of(event)
        by_phase[phase] = by_phase.get(phase, 0.0) + time_us / 1e3
        _add(kernels, (name, *launch_facts(event)), time_us)
        if has_ops:
            op = named.get(arg(event, "External id"), {"name": ""})
            _add(ops, (phase, str(op["name"]), shape_text(arg(op, "Input Dims") or ()), name), time_us)
    total_us = sum(float(event["dur"]) for event in device)
    kernel_rows, other_kernels = _largest(kernels, total_us, KernelRow)
    op_rows, other_ops = _largest(ops, total_us, OpRow)
    start = min(float(event["ts"]) for event in device)
    end = max(float(event["ts"]) + float(event["dur"]) for event in device)
    return StepProfile(
        kernel_sum_ms=total_us / 1e3,
        span_ms=(end - start) / 1e3,
        kernel_calls=len(device),
        host_launches=sum("launch" in str(event["name"]).lower() for event in host),
        phase_ms=by_phase,
        kernels=kernel_rows,
        other_kernels=other_kernels,
        ops=op_rows,
        other_ops=other_ops,
    )


def with_ops(replayed: Sequence[Event], eager: Sequence[Event]) -> list[Event]:
    """Events of a replayed graph, its kernels with the ops that launch them eagerly: on one stream the order is kept.

    Where the kernels differ (a library may choose otherwise under capture) they stay without ops.
    """
    ours, theirs = _in_order(replayed), _in_order(eager)
    if [event["name"] for event in ours] != [event["name"] for event in theirs]:
        return list(replayed)
    named = [
        {**event, "args": {**event.get("args", {}), "External id": arg(other, "External id")}}
        for event, other in zip(ours, theirs, strict=True)
    ]
    launches = [event for event in replayed if event.get("cat") in HOST]
    return [*launches, *named, *(event for event in eager if event.get("cat") == "cpu_op")]


def _in_order(events: Sequence[Event]) -> list[Event]:
    device = (event for event in events if event.get("ph") == "X" and event.get("cat") in DEVICE)
    return sorted(device, key=lambda event: float(event["ts"]))


def _add(rows: Sums, key: tuple[Any, ...], time_us: float) -> None:
    row = rows.setdefault(key, [0, 0.0])
    row[0] += 1
    row[1] += time_us


def _largest(rows: Sums, total_us: float, make: Callable[..., Row]) -> tuple[tuple[Row, ...], Other]:
    """Rows worth keeping, the largest first, and the sum of the rest."""
    kept = [(key, calls, time_us) for key, (calls, time_us) in rows.items() if time_us >= SMALL * total_us]
    rest = [row for row in rows.values() if row[1] < SMALL * total_us]
    kept.sort(key=lambda row: (-row[2], row[0]))
    made = tuple(make(*key, int(calls), time_us) for key, calls, time_us in kept)
    return made, Other(int(sum(calls for calls, _ in rest)), sum(time_us for _, time_us in rest))


class _Phases:
    """Which phase a kernel belongs to: the one during which it was launched ('step' outside of all)."""

    def __init__(self, spans: list[Event], host: list[Event]) -> None:
        marks = [e for e in spans if e.get("cat") == "user_annotation" and str(e["name"]).startswith(PHASE)]
        marks.sort(key=lambda event: float(event["ts"]))
        self._marks = marks
        self._starts = [float(event["ts"]) for event in marks]
        self._launched = {arg(event, "correlation"): float(event["ts"]) for event in host}

    def of(self, event: Event) -> str:
        launched = self._launched.get(arg(event, "correlation"))
        if launched is None or not self._marks:
            return "step"
        at = bisect.bisect_right(self._starts, launched) - 1
        if at < 0 or launched > self._starts[at] + float(self._marks[at]["dur"]):
            return "step"
        return str(self._marks[at]["name"]).removeprefix(PHASE)
