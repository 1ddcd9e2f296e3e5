"""A profiled step in few rows: the time of each kernel, by name and grid, and by the op that launched it.

Input are the events of a Chrome trace as torch.profiler writes it. A kernel names the innermost op by "External id";
its launch by "correlation". Kernels replayed from a CUDA graph share one launch and name no op: they get the ops of
the same step run eagerly, kernel by kernel.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kernelcast.diagnose.chrome_events import DEVICE, HOST, Event, arg, launch_config, shape_text, short_name
from kernelcast.errors import KernelcastError

Calls = dict[tuple[Any, ...], list[float]]  # what makes a row -> microseconds of each of its calls
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
    phases = _phases(spans)
    kernels: Calls = defaultdict(list)
    ops: Calls = defaultdict(list)
    phase_ms: dict[str, float] = defaultdict(float)
    named = {arg(e, "External id"): e for e in spans if e.get("cat") == "cpu_op"}
    has_ops = any(arg(event, "External id") in named for event in device)
    for event in device:
        time_us, name = float(event["dur"]), short_name(str(event["name"]))
        phase = phases.get(arg(event, "correlation"), "step")
        phase_ms[phase] += time_us / 1e3
        kernels[name, *launch_config(event)].append(time_us)
        if has_ops:
            op = named.get(arg(event, "External id"), {"name": ""})
            ops[phase, str(op["name"]), shape_text(arg(op, "Input Dims") or ()), name].append(time_us)
    total_us = sum(float(event["dur"]) for event in device)
    kernel_rows, other_kernels = _largest(kernels, total_us, KernelRow)
    op_rows, other_ops = _largest(ops, total_us, OpRow)
    start = min(float(event["ts"]) for event in device)
    end = max(float(event["ts"]) + float(event["dur"]) for event in device)
    return StepProfile(
        kernel_sum_ms=total_us / 1e3,
        span_ms=(end - start) / 1e3,
        kernel_calls=len(device),
        host_launches=sum(e.get("cat") in HOST and "launch" in str(e["name"]).lower() for e in spans),
        phase_ms=dict(phase_ms),
        kernels=kernel_rows,
        other_kernels=other_kernels,
        ops=op_rows,
        other_ops=other_ops,
    )


def _phases(spans: Sequence[Event]) -> dict[Any, str]:
    """The phase in which each launch, by its correlation, lies; none for those outside of all."""
    marks = [e for e in spans if e.get("cat") == "user_annotation" and str(e["name"]).startswith(PHASE)]
    ranges = sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"]), str(e["name"])) for e in marks)
    result = {}
    for event in spans:
        if event.get("cat") in HOST:
            at = bisect_right(ranges, float(event["ts"]), key=lambda mark: mark[0]) - 1
            if at >= 0 and float(event["ts"]) <= ranges[at][1]:
                result[arg(event, "correlation")] = ranges[at][2].removeprefix(PHASE)
    return result


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


def _largest(rows: Calls, total_us: float, make: Callable[..., Row]) -> tuple[tuple[Row, ...], Other]:
    """Rows worth keeping, the largest first, and the sum of the rest."""
    sums = sorted(((key, len(times_us), sum(times_us)) for key, times_us in rows.items()), key=lambda r: (-r[2], r[0]))
    small = [(calls, time_us) for _, calls, time_us in sums if time_us < SMALL * total_us]
    made = tuple(make(*key, calls, time_us) for key, calls, time_us in sums[: len(sums) - len(small)])
    return made, Other(sum(calls for calls, _ in small), sum(time_us for _, time_us in small))
