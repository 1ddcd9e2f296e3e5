"""The power model of a GPU: watts at rest, watts while kernels run, joules of a unit of work on each pipeline; and the
clock that a power limit leaves, with the time and the joules of calls at that clock.

    P = asleep + c v² (idle - asleep + busy · filled SMs)
      + v² Σ over core pipelines of joules a unit · units/s + (m + (1 - m) v²) joules a byte · DRAM bytes/s

``c`` is the clock, 1 at its full rate: what toggles every cycle costs as much less as there are fewer of them. ``v`` is
the voltage, 1 at the full clock and ``voltage`` times as steep as the clock below it. ``m`` is what memory itself
spends of a byte's joules (``memory``); the rest is spent on the chip. Measured on one GPU
(``models/*.toml``, made by `kernelcast fit-power`). Another GPU is taken to spend the same shares of its board's power
on the same things: what its designers give each pipeline at full rate.

Times of calls are measured in runs of milliseconds, in which a GPU may draw more than its limit (``burst_w``). In a
run that lasts it lowers its clock until it holds the limit: work of the tensor cores slows with it, waiting for DRAM
does not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu, gpu, root_of
from kernelcast.machine.analyse import PIPELINES, overlapped
from kernelcast.ops.work import Array
from kernelcast.toml_folder import ids_in, read_from

FOLDER = Path(__file__).parent / "models"
LOWEST_CLOCK = 0.35  # of the full clock: a lower limit is met by idling
MEMORY = ("dram", "link")  # have a voltage and a clock of their own
# Formats whose tensor cores are taken to draw what those of another do at full rate.
_LIKE = {"fp16": "bf16", "int4": "bf16", "int8_wo": "bf16", "mxfp4": "bf16", "mxfp4_fp8": "fp8", "fp8_block": "fp8",
         "int8": "fp8", "nvfp4": "fp8", "w4a4_mxfp4": "fp8", "fp64": "tf32", "fp32": "tf32"}  # fmt: skip
_TENSOR = ("bf16", "fp8", "tf32")  # formats that were measured
_WIDER = {"seen": 1.0, "near": 2.0, "extrapolated": 4.0}  # powers of the interval's factors


@dataclass(frozen=True)
class Coefficients:
    """One file of ``models/``: a GPU that was measured."""

    id: str
    asleep_w: float  # nothing runs, clocks down
    idle_w: float  # nothing runs, clocks up
    busy_w: float  # on top while every SM has work, whatever it is
    start_s: float  # of each kernel, in which the SMs have none yet
    voltage: float  # relative slope: v = 1 - voltage · (1 - clock)
    memory: float  # share of DRAM's joules that are not the chip's
    held: float  # share of the limit that a GPU at its limit draws
    burst: float  # times the limit: what runs of a few milliseconds may draw, as times of calls were measured
    burst_s: float  # a call as long as this was measured at the clock that the limit leaves
    low: float  # 80% of left-out calls drew at least so many times the forecast
    high: float  # and at most
    joules: tuple[tuple[str, float], ...]  # a FLOP, an op, a byte, a warp instruction; tensor cores by format
    sources: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class PowerModel:
    """A GPU's. ``watts``: of each pipeline at its full rate (rows as in PIPELINES), by format of the tensor cores."""

    asleep_w: float
    idle_w: float
    busy_w: float
    start_s: float
    voltage: float
    memory: float
    limit_w: float  # that it holds, over seconds
    board_w: float  # the same of the board that calls were measured on
    burst_w: float
    burst_s: float
    low: float
    high: float
    tensor_w: Mapping[str, float]
    other_w: Array
    measured: str  # GPU whose measurements it rests on
    support: str

    @property
    def lowest_w(self) -> float:
        """What it draws at the lowest clock with all SMs at work on nothing much."""
        return float(self.resting_w(LOWEST_CLOCK) + self.cycling(LOWEST_CLOCK) * self.busy_w)

    def interval(self, joules: float, spread: tuple[float, float]) -> tuple[float, float]:
        """Low and high joules. ``spread``: factors that the interval of the time reaches. Work that takes longer than
        forecast draws longer; beside that, watts are wrong on their own."""
        below = math.hypot(math.log(self.low), math.log(min(1.0, spread[0])))
        above = math.hypot(math.log(self.high), math.log(max(1.0, spread[1])))
        return joules * math.exp(-below), joules * math.exp(above)

    def watts(self, dtype: str) -> Array:
        """(pipelines,) at full rate."""
        watts = self.other_w.copy()
        watts[PIPELINES.index("tensor")] = self.tensor_w[_LIKE.get(dtype, dtype)]
        return watts

    def volts(self, clock: Any) -> Any:
        """Relative to those of the full clock."""
        return 1 - self.voltage * (1 - clock)

    def cycling(self, clock: Any) -> Any:
        """Watts of what switches every cycle, over those at the full clock."""
        return clock * self.volts(clock) ** 2

    def resting_w(self, clock: Any) -> Any:
        """What it draws while nothing runs, at a clock."""
        return self.asleep_w + (self.idle_w - self.asleep_w) * self.cycling(clock)


@functools.cache
def coefficients(name: str) -> Coefficients:
    return read_from(FOLDER, Coefficients, name)


def measured_ids() -> list[str]:
    return ids_in(FOLDER)


def power_model(target: Gpu) -> PowerModel | None:
    """Of a catalogued GPU, or of a what-if: what is done costs what it cost before, its limit is ``power_w``. None of
    another vendor's: nothing measured is near."""
    if target.vendor != gpu(measured_ids()[0]).vendor:
        return None
    origin = root_of(target)
    known = measured_ids()
    kin = [name for name in known if gpu(name).compute_capability == target.compute_capability]
    name = origin.id if origin.id in known else (kin or known)[0]
    return power_model_from(coefficients(name), gpu(name), origin, target)


def power_model_from(measured: Coefficients, reference: Gpu, origin: Gpu, target: Gpu) -> PowerModel:
    """Coefficients measured on ``reference``, for a ``target`` that is ``origin`` or a what-if of it."""
    same = origin.id == reference.id
    scale = 1.0 if same else origin.power_w / reference.power_w
    joules, full, before, after = dict(measured.joules), rates(reference), rates(origin), rates(target)

    def watts(name: str) -> float:
        faster = after[name] / before[name] if before[name] else 1.0
        return joules.get(name, 0.0) * full[name] * scale * faster

    support = (
        "seen" if same else "near" if reference.compute_capability == target.compute_capability else "extrapolated"
    )
    if target is not origin and support == "seen":
        support = "near"
    wider = _WIDER[support]
    return PowerModel(
        asleep_w=measured.asleep_w * scale, idle_w=measured.idle_w * scale, busy_w=measured.busy_w * scale,
        start_s=measured.start_s, voltage=measured.voltage, memory=measured.memory,
        limit_w=target.power_w * measured.held, board_w=origin.power_w * measured.held,
        burst_w=origin.power_w * measured.burst, burst_s=measured.burst_s,
        low=measured.low**wider, high=measured.high**wider,
        tensor_w={dtype: watts(f"tensor_{dtype}") for dtype in _TENSOR},
        other_w=np.array([watts(name) if name in full else 0.0 for name in PIPELINES]),
        measured=reference.id, support=support,
    )  # fmt: skip


def rates(target: Gpu) -> dict[str, float]:
    """Units a second of each pipeline at full rate; tensor cores by format."""
    return {
        **{f"tensor_{dtype}": target.tensor_flops_per_s(dtype) for dtype in _TENSOR},
        "fma": target.fma_flops_per_s("fp32"), "xu": target.xu_ops_per_s, "smem": target.smem_bytes_per_s,
        "l2": target.l2_bytes_per_s, "dram": target.dram_bytes_per_s, "issue": target.issue_warps_per_s,
        "link": target.link_bytes_per_s,
    }  # fmt: skip


_HALVINGS = 16
_LAUNCH = PIPELINES.index("launch")
_CORE = np.array([name not in (*MEMORY, "launch") for name in PIPELINES])
_DRAM, _LINK = (PIPELINES.index(name) for name in MEMORY)


@dataclass(frozen=True)
class Activity:
    """What many calls on one GPU keep busy: seconds that each pipeline works at its full rate, and what power follows
    beside. Arrays are (calls,) but ``busy_s``."""

    busy_s: Array  # (pipelines, calls)
    filled: Array  # share of the SMs that have tasks
    launches: Array
    dtype: NDArray[Any]

    @classmethod
    def joined(cls, parts: Sequence[Activity]) -> Activity:
        arrays = ("filled", "launches", "dtype")
        busy_s = np.concatenate([part.busy_s for part in parts], axis=1)
        return cls(busy_s, *(np.concatenate([getattr(part, name) for part in parts]) for name in arrays))

    def take(self, rows: NDArray[Any] | Sequence[int]) -> Activity:
        return Activity(self.busy_s[:, rows], self.filled[rows], self.launches[rows], self.dtype[rows])


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
class _PowerDraw:
    """Joules of calls as a function of the clock and of their time."""

    model: PowerModel
    busy_s: Array
    core_j: Array
    memory_j: Array
    filled: Array
    start_s: Array

    @classmethod
    def of(cls, model: PowerModel, calls: Activity) -> _PowerDraw:
        watts = np.zeros((len(PIPELINES), calls.filled.size))
        for dtype in dict.fromkeys(calls.dtype.tolist()):
            watts[:, calls.dtype == dtype] = model.watts(dtype)[:, None]
        joules = watts * calls.busy_s
        start_s = model.start_s * calls.launches
        memory_j = model.memory * joules[_DRAM]
        core_j = joules[_CORE].sum(0) + joules[_DRAM] - memory_j
        return cls(model, calls.busy_s, core_j, memory_j + joules[_LINK], calls.filled, start_s)

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
        model = self.model
        busy_w = model.cycling(clock) * model.busy_w * self.filled
        switched = busy_w * np.maximum(0.0, time_s - self.start_s) + model.volts(clock) ** 2 * self.core_j
        return model.resting_w(clock) * time_s + switched + self.memory_j

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


def sustained(model: PowerModel, calls: Activity, time_s: Array) -> OperatingPoint:
    """Each call by itself, again and again."""
    draw = _PowerDraw.of(model, calls)
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


def slowdown(model: PowerModel, calls: Activity, time_s: Array) -> Array:
    """How many times as long calls take in a run under the limit as in one under the board's own."""
    board = sustained(replace(model, limit_w=model.board_w), calls, time_s)
    return np.asarray(np.maximum(1.0, sustained(model, calls, time_s).time_s / board.time_s))


def run_operating_point(
    model: PowerModel, calls: Activity, time_s: Array, counts: Array, waits_s: float = 0.0
) -> OperatingPoint:
    """Calls one after another, so many times each, and waiting between: one clock for all."""
    draw = _PowerDraw.of(model, calls)
    full_s = draw.full_time(time_s)

    def drawn(clock: Array) -> tuple[Array, Array]:
        each = full_s * draw.slower(clock)
        joules = np.sum(counts * draw.joules(clock, each)) + np.sum(model.resting_w(clock)) * waits_s
        return np.reshape(joules, 1), np.reshape(np.sum(counts * each) + waits_s, 1)

    clock = clock_under(drawn, model.limit_w, (1,))
    joules, seconds = drawn(clock)
    limited = clock < 1
    run_s = np.sum(counts * time_s) + waits_s
    held_s = np.maximum(seconds, joules / model.limit_w)
    return OperatingPoint(clock, np.where(limited, np.maximum(held_s, run_s), run_s), joules, limited)
