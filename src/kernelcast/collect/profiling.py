"""Which GPU kernels a call launched: names, grids, registers and shared memory, from PyTorch's profiler."""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelcast.diagnose.chrome_events import DEVICE, HOST, Event, arg, launch_config

_LONGEST_NAME = 200
_MARK = "kernelcast:"


@dataclass(frozen=True)
class Launched:
    """One kernel of a call; a copy or a fill by the driver has no grid."""

    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    registers: int
    smem_bytes: int
    time_us: float


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
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return kernels_of(events, len(makers))


def kernels_of(events: Sequence[Event], count: int) -> list[list[Launched]]:
    """Kernels of each marked range of a Chrome trace: those whose launch on the CPU lies inside it."""
    marks = [e for e in events if e.get("cat") == "user_annotation" and str(e.get("name")).startswith(_MARK)]
    ranges = sorted((e["ts"], e["ts"] + e["dur"], int(e["name"].removeprefix(_MARK))) for e in marks)
    starts = [start for start, _, _ in ranges]
    owner: dict[Any, int] = {}  # of a launch, by its correlation
    for event in events:
        if event.get("cat") in HOST and (launch := arg(event, "correlation")) is not None:
            at = bisect_right(starts, event["ts"]) - 1
            if at >= 0 and event["ts"] <= ranges[at][1]:
                owner[launch] = ranges[at][2]
    found: list[list[Launched]] = [[] for _ in range(count)]
    for event in sorted((e for e in events if e.get("cat") in DEVICE), key=lambda e: e["ts"]):
        number = owner.get(arg(event, "correlation"))
        if number is not None:
            name, time_us = str(event["name"])[:_LONGEST_NAME], float(event.get("dur", 0.0))
            found[number].append(Launched(name, *launch_config(event), time_us))
    return found
