"""The power model's coefficients from measured joules, and how far off they are on calls that were left out.

Watts are linear in what pipelines do, at a voltage that follows the clock: non-negative least squares on relative
errors, with the voltage's slope and the burst limit from small grids. For left-out calls both
are chosen inside of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from kernelcast.collect.schema import columns_of, connect
from kernelcast.energy import Activity, activity, sustained
from kernelcast.energy.model import Coefficients, power_model_from, rates
from kernelcast.errors import KernelcastError
from kernelcast.files import text
from kernelcast.forecast.conditions import DEFAULT
from kernelcast.forecast.predict_table import predict_columns
from kernelcast.hardware import Gpu, gpu
from kernelcast.machine.analyse import PIPELINES
from kernelcast.ops.work import Array
from kernelcast_lab.collect.power import POWER
from kernelcast_lab.data.measurements import fetch

FORMATS = ("bf16", "fp8", "tf32")
_OTHER = ("fma", "xu", "smem", "l2", "issue", "dram")
_SAME = {"fp16": "bf16", "fp32": "tf32"}
_SLOPES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_BURSTS = (1.1, 1.15, 1.2, 1.25, 1.3, 1.35)
_START_S = 2e-6  # what a GPU draws in kernels shorter than this is what it draws at rest
_BURST_S = 9e-3
# Of DRAM's joules a byte, 31 pJ are those of HBM itself (3.9 pJ a bit: O'Connor et al., Fine-Grained DRAM, MICRO 2017);
# the fit finds 67 with what the chip spends on them, and cannot tell them apart.
_MEMORY = 0.47
_LINK_J = 4e-11  # a byte: an estimate (5 pJ a bit); no table here has power of links
_NOT_CALLS = ("latency_us", "split", "version", "campaign", *POWER)
FOLDS = 5


@dataclass(frozen=True)
class Rows:
    """Calls that were repeated on one GPU, with random numbers and no rests."""

    gpu: Gpu
    columns: dict[str, NDArray[Any]]
    calls: Activity
    forecast_s: Array  # by the shipped weights
    low_s: Array
    high_s: Array
    seconds: Array
    power_w: Array
    clock: Array
    idle_w: float
    asleep_w: float

    def take(self, rows: NDArray[Any]) -> Rows:
        columns = {name: values[rows] for name, values in self.columns.items()}
        arrays = {name: getattr(self, name)[rows]
                  for name in ("forecast_s", "low_s", "high_s", "seconds", "power_w", "clock")}  # fmt: skip
        return replace(self, columns=columns, calls=self.calls.take(rows), **arrays)

    @property
    def joules(self) -> Array:
        return self.seconds * self.power_w


def read_power(path: Path) -> Rows:
    """A table of `kernelcast collect --power`."""
    if not path.is_file():
        raise KernelcastError(f"no table {path}; `kernelcast collect --power` measures one")
    source = f"read_parquet({text(str(path))})"
    with connect() as connection:
        ops = [
            row[0] for row in connection.execute(f"SELECT DISTINCT op FROM {source} WHERE op IS NOT NULL").fetchall()
        ]
        types = columns_of(ops) | POWER
        where = "op IS NOT NULL AND NOT zeros AND rest_s = 0"
        columns = fetch(connection, f"SELECT * FROM {source} WHERE {where}", types)
        (idle_w, name), (asleep_w, _) = (
            connection.execute(
                f"SELECT median(power_w), any_value(gpu) FROM {source} WHERE op IS NULL AND sm_mhz {clocks} 1000"
            ).fetchone()
            or (None, None)
            for clocks in (">", "<=")
        )
    target = gpu(str(name))
    calls_table = {name: values for name, values in columns.items() if name not in _NOT_CALLS}
    forecast, bad = predict_columns(calls_table, target)
    if bad.messages:
        raise KernelcastError(bad.text())
    clock = np.minimum(1.0, columns["sm_mhz"] * 1e6 / target.clock_boost_hz)
    forecast_s, low_s, high_s = (forecast[name] * 1e-6 for name in ("predicted_us", "low_us", "high_us"))
    calls = activity(calls_table, target, DEFAULT)
    return Rows(
        target, columns, calls, forecast_s, low_s, high_s, columns["seconds"], columns["power_w"], clock,
        float(idle_w), float(asleep_w or idle_w),
    )  # fmt: skip


def _design_matrix(rows: Rows, slope: float) -> Array:
    """(calls, coefficients): busy, each format's tensor cores, the other pipelines, by what each is a share of."""
    volts = (1 - slope * (1 - rows.clock)) ** 2
    share = rows.calls.busy_s / rows.seconds
    started = np.maximum(0.0, 1 - _START_S * rows.calls.launches / rows.seconds) * rows.calls.filled
    format_ = np.array([_SAME.get(form, form) for form in rows.calls.dtype])
    tensor = [np.where(format_ == form, share[PIPELINES.index("tensor")], 0.0) * volts for form in FORMATS]
    other = [
        share[PIPELINES.index(name)] * (_MEMORY + (1 - _MEMORY) * volts if name == "dram" else volts) for name in _OTHER
    ]
    return np.array([started * volts * rows.clock, *tensor, *other]).T


def _solved(rows: Rows, slope: float, burst: float) -> Coefficients:
    weights = 1 / rows.power_w
    cycling = rows.clock * (1 - slope * (1 - rows.clock)) ** 2
    resting_w = rows.asleep_w + (rows.idle_w - rows.asleep_w) * cycling
    coefficients, _ = nnls(_design_matrix(rows, slope) * weights[:, None], (rows.power_w - resting_w) * weights)
    limited = rows.power_w[rows.clock < 0.95]
    held = float(np.mean(limited)) / rows.gpu.power_w if len(limited) else 1.0
    busy_w, *watts = (float(value) for value in coefficients)
    full = rates(rows.gpu)
    names = [f"tensor_{form}" for form in FORMATS] + list(_OTHER)
    joules = (*((name, value / full[name]) for name, value in zip(names, watts, strict=True)), ("link", _LINK_J))
    return Coefficients(rows.gpu.id, rows.asleep_w, rows.idle_w, busy_w, _START_S, slope, _MEMORY, held, burst,
                        _BURST_S, 1.0, 1.0, joules)  # fmt: skip


def fitted(rows: Rows) -> Coefficients:
    """The slope and the burst limit with the least error of forecast joules."""
    best: tuple[float, Coefficients] | None = None
    for slope in _SLOPES:
        for burst in _BURSTS:
            coefficients = _solved(rows, slope, burst)
            error = float(np.mean(np.abs(np.log(forecast(coefficients, rows)[0] / rows.joules))))
            if best is None or error < best[0]:
                best = error, coefficients
    assert best is not None
    return best[1]


def forecast(coefficients: Coefficients, rows: Rows) -> tuple[Array, Array]:
    """Joules and watts, from forecast times."""
    result = sustained(power_model_from(coefficients, rows.gpu, rows.gpu, rows.gpu), rows.calls, rows.forecast_s)
    return result.time_s * result.power_w, result.power_w


def left_out(rows: Rows, seed: int = 0) -> tuple[Array, Array]:
    """Joules and watts of each call by a fit that did not see it."""
    count = len(rows.seconds)
    fold = np.random.default_rng(seed).permutation(count) % FOLDS
    joules, watts = np.zeros(count), np.zeros(count)
    for at in range(FOLDS):
        members = np.flatnonzero(fold == at)
        joules[members], watts[members] = forecast(fitted(rows.take(np.flatnonzero(fold != at))), rows.take(members))
    return joules, watts


def widened(coefficients: Coefficients, rows: Rows, joules: Array, watts: Array, share: float = 0.8) -> Coefficients:
    """With the interval that holds so many left-out calls, beside what their times are off: the quantiles of measured
    over forecast watts, stretched or narrowed together."""
    tail = (1 - share) / 2
    low, high = (float(np.quantile(rows.power_w / watts, at)) for at in (tail, 1 - tail))
    for stretch in np.arange(0.3, 3.0, 0.02):
        wide = replace(coefficients, low=min(1.0, low) ** stretch, high=max(1.0, high) ** stretch)
        if inside(wide, rows, joules) >= share:
            return wide
    return wide


def inside_of_others(rows: Rows, joules: Array, watts: Array, seed: int = 0) -> float:
    """The same of each half of the calls, in the interval that the other half sets."""
    order = np.random.default_rng(seed).permutation(len(joules))
    halves = order[::2], order[1::2]
    results = []
    for members, other in (halves, halves[::-1]):
        wide = widened(fitted(rows.take(other)), rows.take(other), joules[other], watts[other])
        results.append(inside(wide, rows.take(members), joules[members]))
    return float(np.mean(results))


def inside(coefficients: Coefficients, rows: Rows, joules: Array) -> float:
    """Share of the measured joules that lie in the intervals around these."""
    model = power_model_from(coefficients, rows.gpu, rows.gpu, rows.gpu)
    times = zip(rows.low_s / rows.forecast_s, rows.high_s / rows.forecast_s, strict=True)
    intervals = np.array([model.interval(1.0, spread) for spread in times]) * joules[:, None]
    return float(np.mean((intervals[:, 0] <= rows.joules) & (rows.joules <= intervals[:, 1])))


def errors(rows: Rows, joules: Array, watts: Array) -> list[dict[str, Any]]:
    """By type of call: mean errors of joules from forecast times, and of watts (joules with measured times)."""
    family = rows.columns["family"]
    groups = {"gemm": np.isin(family, ("gemm", "gemm-fp8")), "attention": family == "attention",
             "decode attention": family == "decode"}  # fmt: skip
    groups["others"] = ~np.any(list(groups.values()), axis=0)
    groups["all"] = np.ones(len(family), dtype=bool)
    return [
        {"calls": name, "rows": int(members.sum()), "joules_error": _mean_error(joules[members], rows.joules[members]),
         "watts_error": _mean_error(watts[members], rows.power_w[members])}
        for name, members in groups.items()
    ]  # fmt: skip


def _mean_error(result: Array, measured: Array) -> float:
    return float(np.mean(np.abs(result / measured - 1)))


def notes(rows: Rows, table: Path, lines: Sequence[dict[str, Any]], held: float) -> list[tuple[str, str]]:
    """What the coefficients rest on."""
    message = ", ".join(f"{line['calls']} {100 * line['joules_error']:.1f}%" for line in lines)
    return [
        ("data", f"{table.name}: {len(rows.seconds)} calls repeated on one {rows.gpu.name}, by the energy counter"),
        ("made", "kernelcast fit-power: non-negative least squares on relative errors of watts"),
        ("left_out", f"mean error of joules from forecast times, {FOLDS} folds: {message}; interval holds {held:.0%}"),
        ("link", "estimate: 5 pJ a bit; no table here has power of links"),
        ("memory", "estimate: 3.9 pJ a bit of HBM2, O'Connor et al., Fine-Grained DRAM, MICRO 2017"),
        ("start_s", "kernels shorter than this were measured at the watts of a GPU at rest"),
    ]


def write(coefficients: Coefficients, path: Path, notes: Sequence[tuple[str, str]]) -> None:
    numbers = (
        "asleep_w",
        "idle_w",
        "busy_w",
        "start_s",
        "voltage",
        "memory",
        "held",
        "burst",
        "burst_s",
        "low",
        "high",
    )
    lines = [f"{name} = {getattr(coefficients, name):.6g}" for name in numbers]
    lines += ["", "[joules]", *(f"{name} = {value:.4g}" for name, value in coefficients.joules)]
    lines += ["", "[sources]", *(f'{name} = "{note}"' for name, note in notes)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
