"""Power laid out in time: what the GPU's limit costs, and the joules of a run.

Matrix products in 16 bits, one after another, do no more FLOPs than the watts of the board pay for
(``tensor_flops_per_j``, measured on whole models, some with rests between steps). A clock is lowered within a fraction
of a second: a short run ends before it is. Under a lower limit than the board's (``power_w`` changed) each call takes
as much longer as the power model says (``energy``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from kernelcast.energy import Activity, held_longer, power_model, run_operating_point, settled
from kernelcast.energy.activity import activity, activity_of
from kernelcast.errors import KernelcastError
from kernelcast.forecast.calls import Call
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict import Prediction
from kernelcast.forecast.predict_table import CallTable, CallTableTimes, Times
from kernelcast.hardware import Gpu, root_of
from kernelcast.results import Interval

WINDOW_S = 0.25  # shorter runs end before a GPU lowers its clock
_SIXTEEN_BITS = ("bf16", "fp16", "int4", "int8_wo", "mxfp4")  # multiplied in 16 bits
# What was worked out of the calls of each Times: their activity, and how much longer they take under a lower limit.
_ACTIVITY: WeakKeyDictionary[Times, dict[Call, Activity]] = WeakKeyDictionary()
_LOWER: WeakKeyDictionary[Times, dict[Call, float]] = WeakKeyDictionary()


def capped(gpu: Gpu) -> bool:
    """Whether its limit is lower than its board's."""
    return gpu.power_w < root_of(gpu).power_w


def with_cap(gpu: Gpu, watts: float | None) -> Gpu:
    """The GPU under a lower power limit, as `nvidia-smi -pl` sets it."""
    if watts is None:
        return gpu
    model = power_model(gpu)
    if model is None:
        raise KernelcastError(f"nothing measured tells what {gpu.id} draws: leave --power-cap out")
    if not model.lowest_w <= watts <= gpu.power_w:
        raise KernelcastError(
            f"--power-cap {watts:g}: {gpu.id} takes a limit from {math.ceil(model.lowest_w):,} W (what it draws at its "
            f"lowest clock) to {gpu.power_w:,.0f} W (its board's)"
        )
    return gpu.replace(power_w=watts)


def product_flops(call: Call) -> Any:
    """FLOPs of the matrix products of a call in 16 bits; 0 of any other call. A column where its sizes are some."""
    given = call.arguments
    if given.get("dtype") not in _SIXTEEN_BITS:
        return 0.0
    if call.op in ("gemm", "bmm", "moe_gemm"):
        rows = given["tokens"] * given["topk"] if call.op == "moe_gemm" else given["m"]
        return 2.0 * given.get("batch", 1) * rows * given["n"] * given["k"]
    if call.op == "moe":
        products = 3 if given.get("gated", True) else 2
        pairs = given["tokens"] * given["topk"] / given.get("ep", 1)
        return 2.0 * products * pairs * given["hidden"] * given["inter"] / given.get("tp", 1)
    return 0.0


def throttled_s(call: Call, time_s: float, times: Times) -> float:
    """How much longer a call takes in a run that keeps the GPU at its power limit."""
    return float(longer_s(call, time_s, times.gpu, _held(call, time_s, times)))


def held_s(call: Call, time_s: float, times: Times) -> float:
    """The same of a short run: only what a limit below the board's adds, which holds from the start."""
    return time_s * (_held(call, time_s, times) - 1)


def longer_s(call: Call, time_s: Any, gpu: Gpu, held: Any = 1.0) -> Any:
    """The same, columns in and out: what the board's own limit adds, and all of it ``held`` times as long under a lower
    one."""
    limited = 0.0
    if gpu.tensor_flops_per_j:
        limited = np.maximum(0.0, product_flops(call) / (gpu.tensor_flops_per_j * _board(gpu).power_w) - time_s)
    return (time_s + limited) * held - time_s


def under_cap(calls: CallTable, found: CallTableTimes, gpu: Gpu, conditions: Conditions) -> CallTableTimes:
    """Gathered calls with what a limit below the board's makes of each."""
    model = power_model(gpu)
    if model is None or not calls.count:
        return found
    good = np.flatnonzero(~np.isnan(found.times_s[0]))
    columns = {name: values[good] for name, values in calls.columns().items()}
    held = np.ones(calls.count)
    held[good] = held_longer(model, activity(columns, gpu, conditions), found.times_s[0, good])
    return replace(found, held=held)


def _held(call: Call, time_s: float, times: Times) -> float:
    if not capped(times.gpu):
        return 1.0
    known = _LOWER.setdefault(times, {})
    if call not in known:
        model = power_model(times.gpu)
        if model is None:
            return 1.0
        known[call] = float(held_longer(model, activities([call], times), np.array([time_s]))[0])
    return known[call]


def _board(gpu: Gpu) -> Gpu:
    """Without a limit lower than the board's."""
    return root_of(gpu) if capped(gpu) else gpu


def activities(calls: Sequence[Call], times: Times) -> Activity:
    """What calls keep busy, each worked out once."""
    known = _ACTIVITY.setdefault(times, {})
    new = [call for call in dict.fromkeys(calls) if call not in known]
    if new:
        found = activity_of(new, times.gpu, times.conditions)
        known |= {call: found.take([at]) for at, call in enumerate(new)}
    return Activity.joined([known[call] for call in calls])


@dataclass(frozen=True)
class Energy:
    """Of a run that lasts: joules with their interval, and the GPU's mean watts."""

    joules: Interval
    power_w: float
    limit_w: float
    support: str  # of the power model
    clock: float  # over the full one

    @property
    def watts(self) -> Interval:
        """With the joules' interval; no more than the limit."""
        low, high = (self.power_w * other / self.joules.value for other in (self.joules.low, self.joules.high))
        return Interval(self.power_w, low, max(self.power_w, min(high, self.limit_w)))


def energy_of(
    launched: Mapping[Call, tuple[float, float]], times: Times, waits_s: float, run: Interval
) -> Energy | None:
    """Calls, each so many times and so many seconds each time, on one GPU that waits so long between; None where nobody
    knows what the GPU draws. ``run``: what all of it takes, in which no more is drawn than the limit allows."""
    model = power_model(times.gpu)
    if model is None or not launched:
        return None
    calls = list(launched)
    counts, seconds = np.array([launched[call] for call in calls]).T
    found = run_operating_point(model, activities(calls, times), seconds, counts, max(0.0, waits_s))
    joules = min(float(found.energy_j[0]), times.gpu.power_w * run.value)
    spread = run.low / run.value, run.high / run.value
    low, high = model.interval(joules, spread)
    return Energy(
        Interval(joules, low, high), joules / run.value, times.gpu.power_w, model.support, float(found.clock[0])
    )


def lasting(found: Prediction, gpu: Gpu, conditions: Conditions) -> tuple[Prediction, Energy | None]:
    """A call that is repeated for seconds: what it draws, and under a lower limit what it takes then."""
    model = power_model(gpu)
    if model is None:
        return found, None
    call = Call.of(found.op, found.parameters)
    busy, time_s = activity_of([call], gpu, conditions), np.array([found.time_s])
    held = settled(model, busy, time_s)
    joules, seconds, clock = (float(values[0]) for values in (held.energy_j, held.time_s, held.clock))
    spread = found.low_s / found.time_s, found.high_s / found.time_s
    low, high = model.interval(joules, spread)
    drawn = Energy(Interval(joules, low, high), joules / seconds, gpu.power_w, model.support, clock)
    if not capped(gpu):
        return found, drawn
    longer = float(held_longer(model, busy, time_s)[0])
    slower = {name: getattr(found, name) * longer for name in ("time_s", "low_s", "high_s", "ceiling_s")}
    return replace(found, **slower, efficiency=found.efficiency / longer), drawn


def total(parts: Iterable[Energy | None], times: float = 1.0) -> Interval | None:
    """Joules of parts of one run, as wrong together; None where one is unknown."""
    found = None
    for part in parts:
        if part is None:
            return None
        found = part.joules * times if found is None else found + part.joules * times
    return found
