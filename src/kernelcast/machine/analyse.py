"""Put work on a GPU: every candidate's limits, then the best few candidates of each call.

Which tile a library really picks is its secret, so candidates are ranked by a score that can be replaced: any
function from the limits and details of the candidates to a number, smallest first, will do (a learned choice, say).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.kernels.work import Array, Number, Work
from kernelcast.machine.limits import LIMITS, PER_SM, Turns, dram_bytes, extra_dram_bytes, resident_share
from kernelcast.machine.schedule import busiest_share, ctas_per_sm

PIPELINES = tuple(LIMITS)
IN_A_MODEL = Turns()
Details = Mapping[str, Number]
Score = Callable[[Array, Details], Array]
"""(pipelines, candidates, calls) limits of the busiest SM in seconds, and the fields of ``Analysis`` beside limits and
tile, -> (candidates, calls) score; the least is chosen."""


@dataclass(frozen=True)
class Analysis:
    """One kernel of many calls on one GPU with one chosen candidate each; all arrays are (calls,)."""

    limits: Array  # (pipelines, calls), seconds, work spread evenly; rows as in PIPELINES
    busiest_limits: Array  # the same for the busiest SM, as its schedule loads it
    tasks: Array
    busiest: Array  # mean tasks on the busiest SM
    ctas_per_sm: Array
    serial_steps: Array
    step_s: Array  # dependent steps of all rounds of CTAs, one after another
    setup_s: Array  # set-up and write-back of all rounds
    launches: Array
    flops: Array  # done, padding included
    useful_flops: Array
    dram_bytes: Array  # the least
    refetched_bytes: Array  # expected on top
    footprint_bytes: Array
    resident_share: Array
    tile: Mapping[str, Array]
    sm_count: int
    candidate: NDArray[np.intp]  # of the work's, which was chosen

    @property
    def bound(self) -> Array:
        return np.max(self.limits, axis=0)

    @property
    def waves(self) -> Array:
        """Rounds of CTAs that fill the GPU."""
        return self.tasks / (self.sm_count * self.ctas_per_sm)

    @property
    def tail(self) -> Array:
        """Share of all SM time that idles because tasks do not divide evenly."""
        held = self.busiest * self.sm_count
        return np.where(held > 0, 1 - self.tasks / np.maximum(held, 1e-300), 0.0)

    @property
    def padding(self) -> Array:
        """Share of the arithmetic that is padding of tiles."""
        return np.where(self.flops > 0, 1 - self.useful_flops / np.maximum(self.flops, 1e-300), 0.0)


def overlapped(limits: Array) -> Array:
    """Time if pipelines overlap well but not perfectly: the 4-norm of the limits."""
    squares = limits * limits
    return np.sqrt(np.sqrt(np.sum(squares * squares, axis=0)))


def by_pipelines(limits: Array, details: Details) -> Array:
    """Peaks alone, without latency."""
    return overlapped(limits)


def analyse(
    work: Work,
    gpu: Gpu,
    *,
    turns: Turns = IN_A_MODEL,
    without: Collection[str] = (),
    score: Score = by_pipelines,
    keep: int = 1,
    candidate: NDArray[np.intp] | None = None,
) -> tuple[Analysis, ...]:
    """The ``keep`` best candidates of each call, best first; or ``candidate`` of each, whatever its score."""
    shape = work.shape
    busiest = busiest_share(work, gpu.sm_count)
    even = np.asarray(work.tasks) / gpu.sm_count
    limits = np.zeros((len(PIPELINES), *shape))
    loaded = np.zeros_like(limits)
    for row, (name, limit) in enumerate(LIMITS.items()):
        if name not in without:
            limits[row] = limit(work, gpu, even, turns)
            loaded[row] = limit(work, gpu, busiest, turns) if name in PER_SM else limits[row]
    details = _details(work, gpu, busiest, turns)
    order: NDArray[np.intp]
    if candidate is not None:
        order = candidate[None]
    elif shape[0] == 1:
        order = np.zeros(shape, dtype=np.intp)
    elif keep == 1:
        order = np.argmin(score(loaded, details), axis=0)[None]
    else:
        order = np.argsort(score(loaded, details), axis=0, kind="stable")[:keep]
    return tuple(_take(limits, loaded, details, work, gpu, candidate) for candidate in order)


def _details(work: Work, gpu: Gpu, busiest: Array, turns: Turns) -> dict[str, Number]:
    ctas = ctas_per_sm(work, gpu)
    rounds = np.ceil(np.asarray(work.tasks) / (gpu.sm_count * ctas))
    rounds_s = rounds / gpu.clock_boost_hz
    # An SM walks its tasks one after another: as many mean ones as there are rounds, or the longest alone.
    mean_steps = work.serial_steps if work.mean_steps is None else work.mean_steps
    walked = np.maximum(rounds * mean_steps, np.where(rounds > 0, work.serial_steps, 0.0))
    return {
        "tasks": work.tasks,
        "busiest": busiest,
        "ctas_per_sm": ctas,
        "serial_steps": work.serial_steps,
        "step_s": walked * work.step_cycles / gpu.clock_boost_hz,
        "setup_s": rounds_s * work.task_cycles,
        "launches": work.launches,
        "flops": np.asarray(work.tasks) * (np.asarray(work.tensor_flops) + work.fma_flops),
        "useful_flops": work.useful_flops,
        "dram_bytes": dram_bytes(work, gpu, turns),
        "refetched_bytes": extra_dram_bytes(work, gpu, turns),
        "footprint_bytes": np.asarray(work.streamed_bytes) + work.activation_bytes,
        "resident_share": resident_share(work, gpu, turns.weights),
    }


def _take(
    limits: Array, loaded: Array, details: Details, work: Work, gpu: Gpu, candidate: NDArray[np.intp]
) -> Analysis:
    """The chosen candidate of each call."""
    calls = limits.shape[2]
    call = np.arange(calls)

    def chosen(values: Number) -> Array:
        """np.broadcast_to(values, (candidates, calls))[candidate, call], in a tenth of the time for a single call."""
        array = np.asarray(values, dtype=np.float64)
        if array.ndim < 2:
            return array if array.size == calls and array.ndim else np.full(calls, array)
        rows = candidate if array.shape[0] > 1 else np.zeros_like(candidate)
        return array[rows, call if array.shape[1] > 1 else 0]

    return Analysis(
        limits=limits[:, candidate, call],
        busiest_limits=loaded[:, candidate, call],
        tile={name: chosen(v) for name, v in work.tile.items()},
        sm_count=gpu.sm_count,
        candidate=candidate,
        **{name: chosen(v) for name, v in details.items()},
    )
