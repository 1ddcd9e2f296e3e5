"""Where a GPU settles: the clock at which it draws what its limit allows, the time that calls take then, the joules.

Times of calls are measured in runs of milliseconds, in which a GPU may draw more than its limit (``burst_w``). In a
run that lasts it lowers its clock until it holds the limit: work of the tensor cores slows with it, waiting for DRAM
does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kernelcast.energy.activity import Activity
from kernelcast.energy.model import LOWEST_CLOCK, MEMORY, PowerModel
from kernelcast.machine.analyse import PIPELINES, overlapped
from kernelcast.ops.work import Array

_HALVINGS = 16
_LAUNCH = PIPELINES.index("launch")
_CORE = np.array([name not in (*MEMORY, "launch") for name in PIPELINES])
_MEMORY = np.array([name in MEMORY for name in PIPELINES])


@dataclass(frozen=True)
class OperatingPoint:
    """Calls, or a run of them, in a run that lasts."""

    clock: Array  # over the full one
    time_s: Array
    energy_j: Array
    limited: NDArray[np.bool_]  # whether the power limit lowers the clock

    @property
    def power_w(self) -> Array:
        return self.energy_j / self.time_s


@dataclass(frozen=True)
class _Draw:
    """Joules of calls as a function of the clock and of their time."""

    model: PowerModel
    busy_s: Array
    core_j: Array
    memory_j: Array
    filled: Array
    start_s: Array

    @classmethod
    def of(cls, model: PowerModel, calls: Activity) -> _Draw:
        watts = np.zeros((len(PIPELINES), calls.filled.size))
        for dtype in dict.fromkeys(calls.dtype.tolist()):
            watts[:, calls.dtype == dtype] = model.watts(dtype)[:, None]
        joules = watts * calls.busy_s
        start_s = model.start_s * calls.launches
        return cls(model, calls.busy_s, joules[_CORE].sum(0), joules[_MEMORY].sum(0), calls.filled, start_s)

    @cached_property
    def _work(self) -> tuple[Array, Array]:
        """Of each pipeline, and of all together, at the full clock."""
        work = self.busy_s.copy()
        work[_LAUNCH] = 0.0
        return work, overlapped(work)

    def slower(self, clock: Array) -> Array:
        """Times longer than at the full clock."""
        (at_full, full), work = self._work, self._work[0].copy()
        work[_CORE] = at_full[_CORE] / clock
        return np.where(full > 0, np.maximum(1.0, overlapped(work) / np.maximum(full, 1e-300)), 1.0)

    def joules(self, clock: Array, time_s: Array) -> Array:
        core = self.core_j + self.model.busy_w * self.filled * np.maximum(0.0, time_s - self.start_s)
        return self.model.idle_w * time_s + self.model.volts(clock) ** 2 * core + self.memory_j

    def full_time(self, time_s: Array) -> Array:
        """At the full clock, of calls that were measured in bursts; long ones at the clock that the limit leaves."""
        burst = self._clock(lambda clock: (self.joules(clock, time_s), time_s), self.model.burst_w)
        held = self._clock(lambda clock: (self.joules(clock, time_s), time_s), self.model.board_w)
        lasts = np.minimum(1.0, time_s / self.model.burst_s)
        return time_s / self.slower(burst + (np.minimum(held, burst) - burst) * lasts)

    def _clock(self, drawn: Callable[[Array], tuple[Array, Array]], limit_w: float) -> Array:
        return clock_under(drawn, limit_w, self.filled.shape)


def clock_under(drawn: Callable[[Array], tuple[Array, Array]], limit_w: float, shape: tuple[int, ...]) -> Array:
    """The highest clock whose joules (first) over seconds (second) stay within the limit."""

    def above(clock: Array) -> NDArray[np.bool_]:
        joules, seconds = drawn(clock)
        return np.asarray(joules > limit_w * seconds)

    high = np.ones(shape)
    low = np.full(shape, LOWEST_CLOCK)
    free = ~above(high)
    if free.all():
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        over = above(middle)
        high, low = np.where(over, middle, high), np.where(over, low, middle)
    return np.where(free, 1.0, low)


def settled(model: PowerModel, calls: Activity, time_s: Array) -> OperatingPoint:
    """Each call by itself, again and again."""
    draw = _Draw.of(model, calls)
    full_s = draw.full_time(time_s)

    def drawn(clock: Array) -> tuple[Array, Array]:
        seconds = full_s * draw.slower(clock)
        return draw.joules(clock, seconds), seconds

    clock = clock_under(drawn, model.limit_w, full_s.shape)
    joules, seconds = drawn(clock)
    limited = clock < 1
    # a clock cannot go lower than the lowest: then the GPU waits
    held_s = np.maximum(seconds, joules / model.limit_w)
    return OperatingPoint(clock, np.where(limited, np.maximum(held_s, time_s), time_s), joules, limited)


def held_longer(model: PowerModel, calls: Activity, time_s: Array) -> Array:
    """How many times as long calls take in a run under the limit as in one under the board's own."""
    board = settled(replace(model, limit_w=model.board_w), calls, time_s)
    return np.asarray(np.maximum(1.0, settled(model, calls, time_s).time_s / board.time_s))


def run_operating_point(
    model: PowerModel, calls: Activity, time_s: Array, counts: Array, waits_s: float = 0.0
) -> OperatingPoint:
    """Calls one after another, so many times each, and waiting between: one clock for all."""
    draw = _Draw.of(model, calls)
    full_s = draw.full_time(time_s)

    def drawn(clock: Array) -> tuple[Array, Array]:
        each = full_s * draw.slower(clock)
        joules = np.sum(counts * draw.joules(clock, each)) + model.idle_w * waits_s
        return np.reshape(joules, 1), np.reshape(np.sum(counts * each) + waits_s, 1)

    clock = clock_under(drawn, model.limit_w, (1,))
    joules, seconds = drawn(clock)
    limited = clock < 1
    told = np.sum(counts * time_s) + waits_s
    held_s = np.maximum(seconds, joules / model.limit_w)
    return OperatingPoint(clock, np.where(limited, np.maximum(held_s, told), told), joules, limited)
