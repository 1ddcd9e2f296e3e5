"""Time one call by replaying a CUDA graph of many launches of it, set after set; the median of several replays."""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from kernelcast.diagnose.chrome_events import DEVICE, HOST, Event, arg, launch_config

Launch = Callable[[], object]
_GRAPH_S = 400e-6  # a replay lasts about this, or one launch of each set
_MOST_LAUNCHES = 512
_REPLAYS = 5
_MORE_REPLAYS = 15
_CHUNK_S = 15e-3  # of replays, before the host checks again
_IN_FLIGHT = 3  # chunks: the GPU never waits for the host
WIDE = 0.03  # spread above which a call is timed again


@dataclass(frozen=True)
class Timing:
    """Seconds a launch. ``spread``: half the distance between the quartiles of the replays, over the median."""

    seconds: float
    spread: float
    replays: int
    launches: int


@cache
def stream() -> torch.cuda.Stream:
    """The stream of all measurements: autograd runs a gradient on the stream of its forward."""
    return torch.cuda.Stream()


def timed(launches: Sequence[Launch], guess_s: float) -> Timing:
    """``launches``: the same call on one set of tensors each. ``guess_s``: about how long one takes."""
    with torch.cuda.stream(stream()):
        launches[0]()  # libraries choose and load kernels on the first call
        torch.cuda.synchronize()
        rounds = max(1, math.ceil(_GRAPH_S / max(guess_s, 1e-6) / len(launches)))
        rounds = max(1, min(rounds, _MOST_LAUNCHES // len(launches)))
        graph = captured([*launches] * rounds)
        samples = replayed_s(graph, _REPLAYS)
        if _spread(samples) > WIDE:
            samples += replayed_s(graph, _MORE_REPLAYS)
    count = rounds * len(launches)
    return Timing(statistics.median(samples) / count, _spread(samples), len(samples), count)


def captured(launches: Sequence[Launch]) -> torch.cuda.CUDAGraph:
    """A graph of the launches in turn, on the current stream, that ran once."""
    graph = torch.cuda.CUDAGraph()
    # not torch.cuda.graph(): it collects garbage and empties the allocator's cache, longer than the timing takes
    graph.capture_begin()
    try:
        for launch in launches:
            launch()
    finally:
        graph.capture_end()
    graph.replay()
    return graph


def replayed_s(graph: torch.cuda.CUDAGraph, times: int) -> list[float]:
    """Seconds of each replay."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    for mark in marks[:-1]:
        mark.record()
        graph.replay()
    marks[-1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e-3 for a, b in pairwise(marks)]


def _spread(samples: Sequence[float]) -> float:
    low, middle, high = statistics.quantiles(samples, n=4)
    return (high - low) / 2 / middle


class Replays:
    """Replays of a graph, or steps of a model, some chunks ahead of the GPU; with a rest after ``busy_s`` each."""

    def __init__(
        self, replay: Callable[[], object], calls: int, replay_s: float, busy_s: float = 0.0, rest_s: float = 0.0
    ) -> None:
        self._replay, self._calls = replay, calls
        self._chunk = max(1, round((busy_s or _CHUNK_S) / replay_s))
        self._rest_s = rest_s
        self._marks: list[Any] = []

    def push(self) -> int:
        for _ in range(self._chunk):
            self._replay()
        mark: Any = torch.cuda.Event()
        mark.record()
        self._marks.append(mark)
        if self._rest_s:
            self.finish()
            time.sleep(self._rest_s)
        elif len(self._marks) >= _IN_FLIGHT:
            self._marks.pop(0).synchronize()
        return self._chunk * self._calls

    def finish(self) -> None:
        torch.cuda.current_stream().synchronize()
        self._marks.clear()


# ---- the GPU kernels of a call, from PyTorch's profiler


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
    kernels: list[list[Launched]] = [[] for _ in range(count)]
    for event in sorted((e for e in events if e.get("cat") in DEVICE), key=lambda e: e["ts"]):
        number = owner.get(arg(event, "correlation"))
        if number is not None:
            name, time_us = str(event["name"])[:_LONGEST_NAME], float(event.get("dur", 0.0))
            kernels[number].append(Launched(name, *launch_config(event), time_us))
    return kernels
