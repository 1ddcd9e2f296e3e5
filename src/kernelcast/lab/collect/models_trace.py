"""A profiled step in few rows: the time of each kernel, by name and grid, and by the op that launched it.

Input are the events of a Chrome trace as torch.profiler writes it. A kernel names the innermost op by "External id";
its launch by "correlation". Kernels replayed from a CUDA graph share one launch and name no op: they get the ops of
the same step run eagerly, kernel by kernel.
"""

from __future__ import annotations

import bisect
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kernelcast.errors import KernelcastError

Event = dict[str, Any]
Sums = dict[tuple[Any, ...], list[float]]  # what makes a row -> its calls and time
Row = TypeVar("Row")
NAME_CHARS = 160
SHAPE_CHARS = 200
SMALL = 1e-3  # a row under this share of the time goes into "other"
PHASE = "kernelcast."  # prefix of the annotations that mark phases of a step
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST = ("cuda_runtime", "cuda_driver")
_NOISE = ("void ", "at::native::", "(anonymous namespace)::", "c10::")


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


def short_name(name: str) -> str:
    """At most 160 characters: without namespaces that say nothing; a checksum keeps long names apart."""
    full = name
    for word in _NOISE:
        name = name.replace(word, "")
    return name if len(name) <= NAME_CHARS else f"{name[: NAME_CHARS - 9]}~{zlib.crc32(full.encode()):08x}"


def shape_text(dims: Sequence[Any]) -> str:
    """'512x4096,4096x4096': an input each; '-' is a scalar, '[290]' a list of so many tensors."""
    words = [_one_shape(dim) for dim in dims]
    while words and words[-1] == "-":
        words.pop()
    text = ",".join(words)
    return text if len(text) <= SHAPE_CHARS else text[: SHAPE_CHARS - 1] + "~"


def _one_shape(dim: Any) -> str:
    if not isinstance(dim, list) or not dim:
        return "-"
    return f"[{len(dim)}]" if isinstance(dim[0], list) else "x".join(str(n) for n in dim)


def summarise(events: Iterable[Event]) -> StepProfile:
    """Sums and rows of the step whose events these are."""
    spans = [event for event in events if event.get("ph") == "X"]
    device = [event for event in spans if event.get("cat") in _DEVICE]
    if not device:
        raise KernelcastError("the profiler saw no kernel: is CUPTI there, and may this user trace the GPU?")
    host = [event for event in spans if event.get("cat") in _HOST]
    phases = _Phases(spans, host)
    kernels: Sums = {}
    ops: Sums = {}
    by_phase: dict[str, float] = {}
    named = {_arg(e, "External id"): e for e in spans if e.get("cat") == "cpu_op"}
    has_ops = any(_arg(event, "External id") in named for event in device)
    for event in device:
        time_us, name = float(event["dur"]), short_name(str(event["name"]))
        phase = phases.of(event)
        by_phase[phase] = by_phase.get(phase, 0.0) + time_us / 1e3
        _add(kernels, (name, *_launch_facts(event)), time_us)
        if has_ops:
            op = named.get(_arg(event, "External id"), {"name": ""})
            _add(ops, (phase, str(op["name"]), shape_text(_arg(op, "Input Dims") or ()), name), time_us)
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
        {**event, "args": {**event.get("args", {}), "External id": _arg(other, "External id")}}
        for event, other in zip(ours, theirs, strict=True)
    ]
    launches = [event for event in replayed if event.get("cat") in _HOST]
    return [*launches, *named, *(event for event in eager if event.get("cat") == "cpu_op")]


def _in_order(events: Sequence[Event]) -> list[Event]:
    device = (event for event in events if event.get("ph") == "X" and event.get("cat") in _DEVICE)
    return sorted(device, key=lambda event: float(event["ts"]))


def _arg(event: Event, name: str) -> Any:
    return event.get("args", {}).get(name)


def _launch_facts(event: Event) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    args = event.get("args", {})
    grid, block = args.get("grid") or (), args.get("block") or ()
    registers, smem = args.get("registers per thread") or 0, args.get("shared memory") or 0
    return tuple(map(int, grid)), tuple(map(int, block)), int(registers), int(smem)


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
        self._launched = {_arg(event, "correlation"): float(event["ts"]) for event in host}

    def of(self, event: Event) -> str:
        launched = self._launched.get(_arg(event, "correlation"))
        if launched is None or not self._marks:
            return "step"
        at = bisect.bisect_right(self._starts, launched) - 1
        if at < 0 or launched > self._starts[at] + float(self._marks[at]["dur"]):
            return "step"
        return str(self._marks[at]["name"]).removeprefix(PHASE)
