"""Time one call by replaying a CUDA graph of many launches of it, set after set; the median of several replays."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch

Launch = Callable[[], object]
_GRAPH_S = 400e-6  # a replay lasts about this, or one launch of each set
_MOST_LAUNCHES = 512
_REPLAYS = 5
_MORE_REPLAYS = 15
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
    """The stream of all measuring: autograd runs a gradient on the stream of its forward."""
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
