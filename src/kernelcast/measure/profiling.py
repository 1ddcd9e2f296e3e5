"""Which GPU kernels a call launched: names, grids, registers and shared memory, from PyTorch's profiler."""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_LONGEST_NAME = 200
_MARK = "kernelcast:"


@dataclass(frozen=True)
class Launched:
    """One kernel of a call."""

    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    registers: int
    smem_bytes: int
    microseconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def profiled(makers: Sequence[Callable[[], Callable[[], object]]]) -> list[list[Launched]]:
    """The kernels of each launch, in order: a maker prepares a launch, and its own kernels do not count. Needs CUDA."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        for number, make in enumerate(makers):
            launch = make()
            with record_function(f"{_MARK}{number}"):
                launch()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return kernels_of(events, len(makers))


def kernels_of(events: Sequence[Mapping[str, Any]], count: int) -> list[list[Launched]]:
    """Kernels of each marked range of a Chrome trace: those whose launch on the CPU lies inside it."""
    marks = [e for e in events if e.get("cat") == "user_annotation" and str(e.get("name")).startswith(_MARK)]
    ranges = sorted((e["ts"], e["ts"] + e["dur"], int(e["name"].removeprefix(_MARK))) for e in marks)
    starts = [start for start, _, _ in ranges]
    owner: dict[int, int] = {}
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {}):
            number = _inside(event["ts"], ranges, starts)
            if number is not None:
                owner[event["args"]["correlation"]] = number
    found: list[list[Launched]] = [[] for _ in range(count)]
    for event in sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"]):
        args = event["args"]
        number = owner.get(args.get("correlation"))
        if number is not None:
            found[number].append(_launched(event, args))
    return found


def _inside(moment: float, ranges: Sequence[tuple[float, float, int]], starts: Sequence[float]) -> int | None:
    at = bisect_right(starts, moment) - 1
    return ranges[at][2] if at >= 0 and moment <= ranges[at][1] else None


def _launched(event: Mapping[str, Any], args: Mapping[str, Any]) -> Launched:
    return Launched(
        name=str(event["name"])[:_LONGEST_NAME],
        grid=tuple(args.get("grid", ())),
        block=tuple(args.get("block", ())),
        registers=int(args.get("registers per thread", 0)),
        smem_bytes=int(args.get("shared memory", 0)),
        microseconds=float(event.get("dur", 0.0)),
    )
