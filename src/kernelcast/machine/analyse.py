"""Put work on a GPU: every candidate's limits, then the best few candidates of each call.

Which tile a library really picks is its secret, so candidates are ranked by a score that can be replaced: any
function from the limits and details of the candidates to a number, smallest first, will do (a learned choice, say).
Every number is computed when it is first needed, and keeps the shape that it has by itself, which broadcasts to
(candidates, calls): what no candidate changes is computed once a call, and a pipeline without demand costs nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.hardware.clocks import usual_clock_hz
from kernelcast.machine.limits import (
    LIMITS,
    NOTHING,
    PER_SM,
    Rotation,
    busiest_share,
    ctas_per_sm,
    dram_bytes,
    extra_dram_bytes,
    kept_share,
    resident_share,
)
from kernelcast.ops.work import Array, Number, Work, chosen

Value = TypeVar("Value")


class lazy(Generic[Value]):  # noqa: N801  a decorator
    """``functools.cached_property`` without its lock, which all values of a class share: chunks of a table run side by
    side, and must not wait for one another. Made twice by chance, a number is the same."""

    def __init__(self, make: Callable[[Any], Value]) -> None:
        self.make, self.__doc__ = make, make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...
    def __get__(self, instance: object | None, owner: type) -> Self | Value:
        if instance is None:
            return self
        value = instance.__dict__[self.name] = self.make(instance)  # found there from now on
        return value


@dataclass(frozen=True, eq=False)
class Candidates:
    """One kernel of many calls with all its candidates; ``without``: limits left out."""

    work: Work
    gpu: Gpu
    rotations: Rotation
    without: Collection[str] = ()

    def __getitem__(self, name: str) -> Number:
        """A quantity by its name, for scores."""
        value: Number = getattr(self, name)
        return value

    @property
    def tasks(self) -> Number:
        return self.work.tasks

    @property
    def serial_steps(self) -> Number:
        return self.work.serial_steps

    @property
    def launches(self) -> Number:
        return self.work.launches

    @property
    def useful_flops(self) -> Number:
        return self.work.useful_flops

    @lazy
    def tile_logs(self) -> dict[str, Number]:
        """log2 of the numbers that name a candidate, once for all that are chosen."""
        return {name: np.log2(np.maximum(value, 1e-9)) for name, value in self.work.tile.items()}

    @lazy
    def busiest_limits(self) -> list[Array]:
        """Seconds of each pipeline for the busiest SM, as its schedule loads it."""
        return [self.limit(name, self.busiest) for name in LIMITS]

    def limit(self, name: str, share: Array) -> Array:
        if name in self.without:
            return NOTHING
        return LIMITS[name](self.work, self.gpu, share, self.rotations)

    @lazy
    def busiest(self) -> Array:
        """Mean tasks on the busiest SM."""
        return busiest_share(self.work, self.gpu.sm_count)

    @lazy
    def ctas_per_sm(self) -> Array:
        return ctas_per_sm(self.work, self.gpu)

    @lazy
    def rounds(self) -> Array:
        """Of CTAs, one after another, on an SM."""
        rounds: Array = np.ceil(np.asarray(self.work.tasks) / (self.gpu.sm_count * self.ctas_per_sm))
        return rounds

    @lazy
    def step_s(self) -> Array:
        """Dependent steps of all rounds of CTAs, one after another: as many mean tasks as there are rounds, or the
        longest alone."""
        work, rounds = self.work, self.rounds
        walked = rounds * (work.serial_steps if work.mean_steps is None else work.mean_steps)
        if work.mean_steps is not None:
            walked = np.maximum(walked, np.where(rounds > 0, work.serial_steps, 0.0))
        return walked * work.step_cycles / usual_clock_hz(self.gpu)

    @lazy
    def setup_s(self) -> Array:
        """Set-up and write-back of all rounds."""
        return self.rounds / usual_clock_hz(self.gpu) * self.work.task_cycles

    @lazy
    def flops(self) -> Array:
        """Done, padding included."""
        return np.asarray(self.work.tasks) * (np.asarray(self.work.tensor_flops) + self.work.fma_flops)

    @lazy
    def dram_bytes(self) -> Array:
        """The least."""
        return dram_bytes(self.work, self.gpu, self.rotations)

    @lazy
    def refetched_bytes(self) -> Array:
        """Expected on top."""
        return extra_dram_bytes(self.work, self.gpu, self.rotations)

    @lazy
    def footprint_bytes(self) -> Array:
        return np.asarray(self.work.streamed_bytes) + self.work.activation_bytes

    @lazy
    def resident_share(self) -> Array:
        return resident_share(self.work, self.gpu, self.rotations, self.rotations.weights)

    @lazy
    def kept_share(self) -> Array:
        """What is expected of it."""
        return kept_share(self.work, self.gpu, self.rotations, self.rotations.weights)


PIPELINES = tuple(LIMITS)
IN_A_MODEL = Rotation()
_FEW_CALLS = 32
Score = Callable[[Sequence[Array], "Candidates | Analysis"], Array]
"""The limits of the busiest SM in seconds, one entry a pipeline, and what else is known by name (``details["step_s"]``)
-> a score that broadcasts to (candidates, calls); the least is chosen."""


def _each(name: str) -> lazy[Array]:
    """A number of ``Candidates``, of the chosen candidates."""

    def taken(self: Analysis) -> Array:
        return self.full(chosen(getattr(self.candidates, name), self.candidate))

    return lazy(taken)


@dataclass(frozen=True, eq=False)
class RankedCandidates:
    """The best candidates of each call, (ranks, calls), best first."""

    candidates: Candidates
    candidate: NDArray[np.intp]
    score: Array
    by: Score

    @lazy
    def tails(self) -> Array:
        busiest, tasks = (chosen(values, self.candidate) for values in (self.candidates.busiest, self.candidates.tasks))
        return _tail(busiest, tasks, self.candidates)

    @lazy
    def tile_logs(self) -> Mapping[str, Number]:
        """log2 of the numbers that name a candidate."""
        return {name: chosen(value, self.candidate) for name, value in self.candidates.tile_logs.items()}


def _tail(busiest: Number, tasks: Number, candidates: Candidates) -> Array:
    held = busiest * candidates.gpu.sm_count
    return np.where(held > 0, 1 - tasks / np.maximum(held, 1e-300), 0.0)


@dataclass(frozen=True, eq=False)
class Analysis:
    """One kernel of many calls on one GPU with one chosen candidate each; all arrays are (calls,), made when asked for.
    What the numbers are, ``Candidates`` says."""

    candidates: Candidates
    candidate: NDArray[np.intp]  # of the work's, which was chosen
    ranked: RankedCandidates | None = None  # among those, where there was a choice
    rank: int = 0

    tasks = _each("tasks")
    busiest = _each("busiest")
    ctas_per_sm = _each("ctas_per_sm")
    serial_steps = _each("serial_steps")
    step_s = _each("step_s")
    setup_s = _each("setup_s")
    launches = _each("launches")
    useful_flops = _each("useful_flops")
    dram_bytes = _each("dram_bytes")
    refetched_bytes = _each("refetched_bytes")
    footprint_bytes = _each("footprint_bytes")
    resident_share = _each("resident_share")
    kept_share = _each("kept_share")

    def __getitem__(self, name: str) -> Array:
        value: Array = getattr(self, name)
        return value

    def full(self, values: Number) -> Array:
        """One number a call."""
        calls = len(self.candidate)
        array = np.asarray(values, dtype=np.float64)
        if array.shape == (calls,):
            return array
        column = np.empty(calls)
        column[:] = array
        return column

    @lazy
    def _alone(self) -> Candidates:
        """The demand of the chosen candidates alone."""
        every = self.candidates
        return Candidates(every.work.demand(self.candidate), every.gpu, every.rotations, every.without)

    @lazy
    def flops(self) -> Array:
        return self.full(self._alone.flops)

    @lazy
    def limits(self) -> Array:
        """(pipelines, calls), seconds, work spread evenly; rows as in PIPELINES."""
        limits, share = self.busiest_limits.copy(), np.asarray(self._alone.tasks) / self.sm_count
        for name in PER_SM:
            limits[PIPELINES.index(name)] = self._alone.limit(name, share)
        return limits

    @lazy
    def busiest_limits(self) -> Array:
        """The same for the busiest SM, as its schedule loads it."""
        limits = np.empty((len(PIPELINES), len(self.candidate)))
        for row, limit in enumerate(self.busiest_each):
            limits[row] = limit
        return limits

    @lazy
    def busiest_each(self) -> list[Array]:
        """The same, each in its own shape."""
        return [np.asanyarray(chosen(limit, self.candidate)) for limit in self.candidates.busiest_limits]

    @lazy
    def tile(self) -> Mapping[str, Array]:
        return {name: self.full(chosen(value, self.candidate)) for name, value in self.candidates.work.tile.items()}

    @property
    def sm_count(self) -> int:
        return self.candidates.gpu.sm_count

    @lazy
    def bound(self) -> Array:
        bound: Array = np.maximum.reduce(self.limits)
        return bound

    @lazy
    def waves(self) -> Array:
        """Rounds of CTAs that fill the GPU."""
        return self.tasks / (self.sm_count * self.ctas_per_sm)

    @lazy
    def tail(self) -> Array:
        """Share of all SM time that idles because tasks do not divide evenly."""
        return _tail(self.busiest, self.tasks, self.candidates)

    @lazy
    def padding(self) -> Array:
        """Share of the arithmetic that is padding of tiles."""
        return np.where(self.flops > 0, 1 - self.useful_flops / np.maximum(self.flops, 1e-300), 0.0)


def overlapped(limits: Iterable[Array]) -> Array:
    """Time if pipelines overlap well but not perfectly: the 4-norm of the limits, added one after another."""
    total: Array = NOTHING
    for limit in limits:
        if limit is NOTHING:
            continue
        fourth = limit * limit
        fourth *= fourth
        total = fourth if total is NOTHING else _added(total, fourth)
    return np.sqrt(np.sqrt(total))


def _added(total: Array, more: Array) -> Array:
    """In the place of ``total``, where it is as large."""
    if total.shape == more.shape:
        total += more
        return total
    return total + more


def summed(arrays: Sequence[Array]) -> Array:
    """Of several kernels that run in turn."""
    return functools.reduce(np.add, arrays)


def by_pipelines(limits: Sequence[Array], details: Candidates | Analysis) -> Array:
    """Peaks alone, without latency."""
    return overlapped(limits)


def analyse(
    work: Work,
    gpu: Gpu,
    *,
    rotations: Rotation = IN_A_MODEL,
    without: Collection[str] = (),
    score: Score = by_pipelines,
    keep: int = 1,
    candidate: NDArray[np.intp] | None = None,
) -> tuple[Analysis, ...]:
    """The ``keep`` best candidates of each call, best first; or ``candidate`` of each, whatever its score."""
    candidates, calls = work.shape
    every = Candidates(work, gpu, rotations, without)
    if candidate is not None:
        return (Analysis(every, candidate),)
    if candidates == 1:
        return (Analysis(every, np.zeros(calls, dtype=np.intp)),)
    scores = np.broadcast_to(score(every.busiest_limits, every), (candidates, calls))
    ranked = RankedCandidates(every, *_least(scores, keep), score)
    return tuple(
        Analysis(every, candidate_of_rank, ranked, rank) for rank, candidate_of_rank in enumerate(ranked.candidate)
    )


def _least(scores: Array, keep: int) -> tuple[NDArray[np.intp], Array]:
    """The candidates with the least scores, best first, of equals the first; and these scores.

    Of many calls, one pass a candidate to keep is faster than sorting them all; of a few, one sort is.
    """
    if scores.shape[1] < _FEW_CALLS:
        order = np.argsort(scores, axis=0, kind="stable")[:keep]
        return order, scores[order, np.arange(scores.shape[1])]
    left = np.array(scores.T, order="C")
    call = np.arange(len(left))
    shape = min(keep, left.shape[1]), len(left)
    candidate, score = np.empty(shape, dtype=np.intp), np.empty(shape)
    for rank, least in enumerate(candidate):
        np.argmin(left, axis=1, out=least)
        score[rank] = left[call, least]
        left[call, least] = np.inf
    return candidate, score
