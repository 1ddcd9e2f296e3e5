"""Power of calls and runs: what pipelines do, what the GPU's power limit costs in time, and the joules of a run.

Limits bound time; power follows what is done. Padding multiplies zeros, which draws little, so that only useful FLOPs
count; DRAM moves what is expected, not only the least; SMs without a task are dark.

Matrix products in 16 bits, one after another, do no more FLOPs than the watts of the board pay for
(``tensor_flops_per_j``, measured on whole models, some with rests between steps). A clock is lowered within a fraction
of a second: a short run ends before it is. Under a lower limit than the board's (``power_w`` changed) each call takes
as much longer as the power model says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from kernelcast.energy.model import Activity, power_model, run_operating_point, slowdown, sustained
from kernelcast.errors import KernelcastError
from kernelcast.forecast.calls import Call, columns_of
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict import Prediction, by_configuration
from kernelcast.forecast.predict_table import CallTable, TableForecast, Times, rotations_of
from kernelcast.forecast.predictor import ByTime
from kernelcast.forecast.table import BadRows, grouped
from kernelcast.hardware import Gpu, root_of
from kernelcast.machine.analyse import PIPELINES, Analysis, analyse
from kernelcast.machine.limits import Rotation
from kernelcast.ops.base import Calls, Kernel, kernel_class
from kernelcast.ops.base import columns_of as kernel_columns
from kernelcast.results import Interval

WINDOW_S = 0.25  # shorter runs end before a GPU lowers its clock
_SIXTEEN_BITS = ("bf16", "fp16", "int4", "int8_wo", "mxfp4")  # multiplied in 16 bits
_TENSOR, _DRAM = PIPELINES.index("tensor"), PIPELINES.index("dram")
# Of the calls of each Times: their activity, and how many times as long they take under a lower limit.
_ACTIVITY: WeakKeyDictionary[Times, dict[Call, Activity]] = WeakKeyDictionary()
_SLOWDOWN: WeakKeyDictionary[Times, dict[Call, float]] = WeakKeyDictionary()


def activity(columns: Mapping[str, NDArray[Any]], gpu: Gpu, conditions: Conditions) -> Activity:
    """Of the calls of a table, all of which must be good."""
    rotations, bad = rotations_of(columns, conditions), BadRows()
    parts, order = [], []
    for kernel, on, rows, calls in grouped(columns, gpu, bad):
        for members, match in by_configuration(kernel, calls, on, conditions.loaded_predictor):
            some = np.arange(calls.count) if members is None else members
            chosen = kernel.with_choices(calls if members is None else calls.take(members), match.configuration)
            works = _analysed(kernel, chosen, on, rotations.part(rows).part(some))
            parts.append(_activity(works, on, np.full(len(some), calls.choices["dtype"], dtype=object)))
            order.append(rows[some])
    if bad.messages:
        raise KernelcastError(bad.text())
    return Activity.joined(parts).take(np.argsort(np.concatenate(order)))


def _analysed(kernel: type[Kernel], calls: Calls, gpu: Gpu, rotations: Rotation) -> list[Analysis]:
    works = kernel.work(calls, gpu)
    return [
        analyse(work, gpu, rotations=rotation, score=ByTime(gpu))[0]
        for work, rotation in zip(works, rotations.of_each(works), strict=True)
    ]


def _activity(works: Sequence[Analysis], gpu: Gpu, dtype: NDArray[Any]) -> Activity:
    """Of the kernels that each call launches in sequence."""
    busy = np.sum([work.limits for work in works], axis=0)
    done, useful = (np.sum([getattr(work, name) for work in works], axis=0) for name in ("flops", "useful_flops"))
    busy[_TENSOR] *= np.where(done > 0, np.minimum(1.0, useful / np.maximum(done, 1.0)), 1.0)
    moved = np.sum([work.dram_bytes + work.refetched_bytes for work in works], axis=0)
    busy[_DRAM] = moved / gpu.dram_bytes_per_s
    launches = np.sum([work.launches for work in works], axis=0)
    tasks = np.sum([np.minimum(work.tasks, gpu.sm_count) * work.launches for work in works], axis=0)
    return Activity(busy, tasks / (np.maximum(launches, 1.0) * gpu.sm_count), launches, dtype)


def activities(calls: Sequence[Call], times: Times) -> Activity:
    """What calls keep busy, each analysed once."""
    known = _ACTIVITY.setdefault(times, {})
    new = [call for call in dict.fromkeys(calls) if call not in known]
    if new:
        analysed = activity(columns_of(new), times.gpu, times.conditions)
        known |= {call: analysed.take([row]) for row, call in enumerate(new)}
    return Activity.joined([known[call] for call in calls])


def _predicted_activity(prediction: Prediction, conditions: Conditions) -> Activity:
    """The analysis that the prediction kept, where it is of the configuration that was asked for."""
    kernel, columns, row = kernel_class(prediction.op), prediction.columns, [prediction.row]
    calls = kernel_columns([kernel(**prediction.parameters)])
    chosen = kernel.with_choices(calls, prediction.match.configuration)
    dtype = np.array([calls.choices["dtype"]], dtype=object)
    kept = columns.calls
    if kept is None or conditions.without or not _same(kept.take(np.array(row)), chosen):
        return _activity(_analysed(kernel, chosen, prediction.on, conditions.rotations), prediction.on, dtype)
    every = np.full(kept.count, dtype[0], dtype=object)
    return _activity(columns.works, prediction.on, every).take(row)


def _same(first: Calls, second: Calls) -> bool:
    if first.choices != second.choices or first.lists or second.lists:
        return False
    return all(np.array_equal(column, second[name], equal_nan=True) for name, column in first.numbers.items())


def capped(gpu: Gpu) -> bool:
    """Whether its limit is lower than its board's."""
    return gpu.power_w < root_of(gpu).power_w


def with_cap(gpu: Gpu, watts: float | None) -> Gpu:
    """The GPU under a lower power limit, as `nvidia-smi -pl` sets it."""
    if watts is None:
        return gpu
    model = power_model(gpu)
    if model is None:
        raise KernelcastError(f"there is no power model for {gpu.id}: leave `power_cap` out")
    if not model.lowest_w <= watts <= gpu.power_w:
        raise KernelcastError(
            f"`power_cap` {watts:g}: {gpu.id} takes a limit from {math.ceil(model.lowest_w):,} W (what it draws at its "
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
    return float(longer_s(call, time_s, times.gpu, _slowdown(call, time_s, times)))


def held_s(call: Call, time_s: float, times: Times) -> float:
    """The same of a short run: only what a limit below the board's adds, which holds from the start."""
    return time_s * (_slowdown(call, time_s, times) - 1)


def longer_s(call: Call, time_s: Any, gpu: Gpu, slowdown: Any = 1.0) -> Any:
    """The same, columns in and out: what the board's limit adds, and all of it ``slowdown`` times as long under a lower
    limit."""
    limited = 0.0
    if gpu.tensor_flops_per_j:
        board = root_of(gpu) if capped(gpu) else gpu
        limited = np.maximum(0.0, product_flops(call) / (gpu.tensor_flops_per_j * board.power_w) - time_s)
    return (time_s + limited) * slowdown - time_s


def under_cap(calls: CallTable, forecast: TableForecast, gpu: Gpu, conditions: Conditions) -> TableForecast:
    """The forecast with what a limit below the board's makes of each call."""
    model, good = power_model(gpu), np.flatnonzero(~np.isnan(forecast.times_s[0]))
    if model is None or not len(good):
        return forecast
    columns = {name: values[good] for name, values in calls.columns().items()}
    slower = np.ones(calls.count)
    slower[good] = slowdown(model, activity(columns, gpu, conditions), forecast.times_s[0, good])
    return replace(forecast, slowdown=slower)


def _slowdown(call: Call, time_s: float, times: Times) -> float:
    model = power_model(times.gpu) if capped(times.gpu) else None
    if model is None:
        return 1.0
    known = _SLOWDOWN.setdefault(times, {})
    if call not in known:
        known[call] = float(slowdown(model, activities([call], times), np.array([time_s]))[0])
    return known[call]


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
    """Calls, each so many times and so many seconds each time, on one GPU that waits so long between; None where the
    GPU has no power model. ``run``: what all of it takes, in which no more is drawn than the limit allows."""
    model = power_model(times.gpu)
    if model is None or not launched:
        return None
    calls = list(launched)
    counts, seconds = np.array([launched[call] for call in calls]).T
    point = run_operating_point(model, activities(calls, times), seconds, counts, max(0.0, waits_s))
    joules = min(float(point.energy_j[0]), times.gpu.power_w * run.value)
    low, high = model.interval(joules, (run.low / run.value, run.high / run.value))
    interval, limit_w = Interval(joules, low, high), times.gpu.power_w
    return Energy(interval, joules / run.value, limit_w, model.support, float(point.clock[0]))


def lasting(prediction: Prediction, gpu: Gpu, conditions: Conditions) -> tuple[Prediction, Energy | None]:
    """A call that is repeated for seconds: what it draws, and under a lower limit what it takes then."""
    model = power_model(gpu)
    if model is None:
        return prediction, None
    calls, time_s = _predicted_activity(prediction, conditions), np.array([prediction.time_s])
    point = sustained(model, calls, time_s)
    joules, seconds, clock = (float(values[0]) for values in (point.energy_j, point.time_s, point.clock))
    low, high = model.interval(joules, (prediction.low_s / prediction.time_s, prediction.high_s / prediction.time_s))
    energy = Energy(Interval(joules, low, high), joules / seconds, gpu.power_w, model.support, clock)
    if not capped(gpu):
        return prediction, energy
    longer = float(slowdown(model, calls, time_s)[0])
    slower = {name: getattr(prediction, name) * longer for name in ("time_s", "low_s", "high_s", "ceiling_s")}
    return replace(prediction, **slower, efficiency=prediction.efficiency / longer), energy


def total(parts: Iterable[Energy | None], times: float = 1.0) -> Interval | None:
    """Joules of parts of one run, whose errors have one cause; None where one is unknown."""
    sum_j = None
    for part in parts:
        if part is None:
            return None
        sum_j = part.joules * times if sum_j is None else sum_j + part.joules * times
    return sum_j
