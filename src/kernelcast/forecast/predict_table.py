"""Tables of kernel calls: columns in, columns out, row order kept, every distinct call predicted once.

Inside, times are seconds and names are integer codes; microseconds and text are made for output alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.forecast.calls import ROTATIONS, Call, columns_of
from kernelcast.forecast.conditions import DEFAULT, Conditions
from kernelcast.forecast.evidence import EvidenceMatch
from kernelcast.forecast.predict import THREADS, Predictions, begin_calls, predict_by_configuration, too_large_text
from kernelcast.forecast.table import BadRows, Rows, as_columns, different, grouped, missing, numbers_in
from kernelcast.hardware import Gpu, gpu
from kernelcast.machine.analyse import PIPELINES
from kernelcast.machine.limits import Rotation
from kernelcast.ops.base import Calls, Kernel
from kernelcast.ops.work import Array
from kernelcast.results import LEVELS, Interval

OUTPUT = (
    "predicted_us", "low_us", "high_us", "ceiling_us", "bound_us", "bound_by", "support",
    "evidence_calls", "evidence_error", "answered_as",
)  # fmt: skip
_DRAM = PIPELINES.index("dram")
_AHEAD = 8  # groups that are begun while an earlier one is waited for


def predict_table(
    table: Mapping[str, Any],
    gpu: Gpu | str | None = None,
    conditions: Conditions = DEFAULT,
    *,
    skip_bad: bool = False,
) -> dict[str, Any]:
    """Add predicted_us, low_us, high_us, ceiling_us, bound_us, bound_by, support and the evidence to a table.

    evidence_calls: measured calls of this configuration; evidence_error: mean error on those that no fit saw, as a
    share; answered_as: the choices that were filled in or substituted, empty where nothing was.

    ``table``: columns by name (lists or arrays; a pandas or Polars frame or an Arrow table will do): ``op``, the
    op's parameters, ``dtype``, and, unless ``gpu`` is given, a column ``gpu``. An empty cell means not given. A bad
    row is an error that names it; with ``skip_bad`` its results are empty (NaN, None) instead.
    """
    columns = as_columns(table)
    output, bad = predict_columns(columns, gpu, conditions)
    if bad.messages and not skip_bad:
        raise KernelcastError(bad.text())
    return {**columns, **output}


def predict_columns(
    columns: Mapping[str, NDArray[Any]], target: Gpu | str | None, conditions: Conditions = DEFAULT
) -> tuple[dict[str, NDArray[Any]], BadRows]:
    """The output columns and what was wrong; bad rows have NaN and None."""
    forecast = forecast_table(columns, target, conditions)
    return forecast.output(), forecast.errors


@dataclass(frozen=True)
class TableForecast:
    """Forecasts of a table's rows, in seconds; rows in ``errors`` are NaN."""

    times_s: Array  # (3, rows): time, low, high
    ceiling_s: Array
    bound_s: Array
    bound_by: NDArray[np.int8]  # index in PIPELINES
    support: NDArray[np.int8]  # index in LEVELS
    match: NDArray[Any]  # the evidence of each row
    launches: Array  # kernels of a call, one after another
    errors: BadRows
    slowdown: Array | None = None  # how many times as long each takes under a lower power limit, where there is one

    @property
    def dram_s(self) -> Array:
        """That a call's bytes keep DRAM busy, where these bind it."""
        return np.where(self.bound_by == _DRAM, self.bound_s, 0.0)

    def output(self) -> dict[str, NDArray[Any]]:
        """Microseconds and text, by column of OUTPUT."""
        bad = list(self.errors.messages)
        seconds = (*self.times_s, self.ceiling_s, self.bound_s)
        columns: dict[str, NDArray[Any]] = {
            name: column * 1e6 for name, column in zip(OUTPUT[: len(seconds)], seconds, strict=True)
        }
        for name, codes, names in (("bound_by", self.bound_by, PIPELINES), ("support", self.support, LEVELS)):
            columns[name] = np.array(names, dtype=object)[codes]
            columns[name][bad] = None
        return columns | self._evidence()

    def _evidence(self) -> dict[str, NDArray[Any]]:
        """A table has few different matches."""
        rows = self.match.tolist()
        code = {match: number for number, match in enumerate(dict.fromkeys(rows))}
        which = np.fromiter(map(code.__getitem__, rows), dtype=np.intp, count=len(rows))
        known = [(None, np.nan, np.nan) if match is None else _evidence_cells(match) for match in code]
        texts, calls, errors = zip(*known, strict=True) if known else ((), (), ())
        return {
            "evidence_calls": np.array(calls, dtype=np.float64)[which],
            "evidence_error": np.array(errors, dtype=np.float64)[which],
            "answered_as": np.array(texts, dtype=object)[which],
        }


def _evidence_cells(match: EvidenceMatch) -> tuple[str, float, float]:
    entry = match.entry
    error = None if entry is None else entry.error
    return match.text, entry.calls if entry else 0.0, np.nan if error is None else error


def forecast_table(
    columns: Mapping[str, NDArray[Any]],
    target: Gpu | str | None,
    conditions: Conditions = DEFAULT,
    *,
    distinct: bool = False,
) -> TableForecast:
    """``distinct``: no call is in the table twice."""
    if "op" not in columns:
        raise KernelcastError(f"the table needs a column 'op'; it has {', '.join(columns) or 'no columns'}")
    on = gpu(target) if target is not None else None
    if on is None and "gpu" not in columns:
        raise KernelcastError("which GPU? give one, or a column 'gpu'")
    if on is not None:
        conditions.check_gpu(on)
    count, bad = len(columns["op"]), BadRows()
    seconds, launches = np.full((5, count), np.nan), np.ones(count)
    codes, match = np.zeros((2, count), dtype=np.int8), np.full(count, None, dtype=object)
    for rows, at, predictions in predict_rows(columns, on, conditions, bad, distinct=distinct):
        each = (predictions.time_s, predictions.low_s, predictions.high_s, predictions.ceiling_s, predictions.bound_s)
        for column, values in zip(seconds, each, strict=True):
            column[rows] = values[at]
        codes[0, rows], codes[1, rows] = predictions.bound_by[at], predictions.support[at]
        match[rows], launches[rows] = predictions.match[at], predictions.launches[at]
    return TableForecast(seconds[:3], seconds[3], seconds[4], codes[0], codes[1], match, launches, bad)


def predict_rows(
    columns: Mapping[str, NDArray[Any]],
    gpu: Gpu | None,
    conditions: Conditions,
    bad: BadRows,
    *,
    distinct: bool = False,
    details: bool = False,
) -> Iterator[tuple[Rows, Rows, Predictions]]:
    """Good rows in groups, their positions in the group's predictions, and these. Errors go to ``bad``.

    ``details``: with the works, by configuration."""
    rotations = rotations_of(columns, conditions)
    begun: deque[tuple[str, Gpu, Rows, Callable[[], Iterable[tuple[Rows, Rows, Predictions]]]]] = deque()

    def begin(kernel: type[Kernel], on: Gpu, rows: Rows, calls: Calls) -> None:
        each = rotations.part(rows)
        if details:
            parts = predict_by_configuration(kernel, calls, on, conditions, each)
            begun.append((kernel.op, on, rows, lambda: _positions(rows, parts)))
            return
        first, alike = (None, np.arange(calls.count)) if distinct else different(calls, (each.weights, each.inputs))
        if first is not None:
            calls, each = calls.take(first), each.part(first)
        wait = begin_calls(kernel, calls, on, conditions, each, pool)
        begun.append((kernel.op, on, rows, lambda: [(rows, alike, wait())]))

    with ThreadPoolExecutor(THREADS) as pool:  # groups run side by side; no thread starts before it has work
        for group in grouped(columns, gpu, bad):
            begin(*group)
            if len(begun) > _AHEAD:
                yield from _fitting(*begun.popleft(), bad)
        while begun:
            yield from _fitting(*begun.popleft(), bad)


def _positions(rows: Rows, parts: Iterable[tuple[Rows, Predictions]]) -> Iterator[tuple[Rows, Rows, Predictions]]:
    for members, predictions in parts:
        yield rows[members], np.arange(len(members)), predictions


def _fitting(
    op: str, gpu: Gpu, group: Rows, parts: Callable[[], Iterable[tuple[Rows, Rows, Predictions]]], bad: BadRows
) -> Iterator[tuple[Rows, Rows, Predictions]]:
    """The rows that fit in the GPU's memory."""
    try:
        known = list(parts())
    except KernelcastError as error:  # the whole group needs what the GPU lacks
        bad.add(group, str(error))
        return
    for rows, at, predictions in known:
        large = predictions.too_large(gpu)
        if large.any():
            too = large[at]
            for row, footprint in zip(rows[too], predictions.footprint_bytes[at[too]], strict=True):
                bad.add([row], too_large_text(op, float(footprint), gpu))
            rows, at = rows[~too], at[~too]
        yield rows, at, predictions


def rotations_of(columns: Mapping[str, NDArray[Any]], conditions: Conditions = DEFAULT) -> Rotation:
    """Columns may say what the conditions say for all; an empty cell leaves it to them."""

    def column(name: str) -> NDArray[np.float64] | float:
        if name not in columns:
            return float(getattr(conditions, name))
        values = numbers_in(columns[name], missing(columns[name]), flag=False)
        return np.where(values >= 1, values, getattr(conditions, name))

    return Rotation(*map(column, ROTATIONS))


@dataclass(frozen=True, slots=True)
class CallTime:
    """One call on one GPU."""

    interval: Interval
    bound_by: str
    support: str
    match: EvidenceMatch  # its evidence
    launches: float  # kernels, one after another
    dram_s: float  # that its bytes keep DRAM busy, where these bind it


class Times:
    """What was predicted so far on one GPU; a call is predicted once."""

    def __init__(self, gpu: Gpu, conditions: Conditions = DEFAULT) -> None:
        self.gpu, self.conditions = gpu, conditions
        self.predictor = conditions.loaded_predictor.name
        self._known: dict[Call, CallTime] = {}

    def predict(self, calls: Iterable[Call]) -> None:
        """Predict all of these that are not known yet."""
        new = list(dict.fromkeys(call for call in calls if call not in self._known))
        if not new:
            return
        forecast = forecast_table(columns_of(new), self.gpu, self.conditions, distinct=True)
        if forecast.errors.messages:
            first = min(forecast.errors.messages)
            raise KernelcastError(refusal(forecast.errors.messages[first], new[first]))
        columns = (forecast.bound_by, forecast.support, forecast.match, forecast.launches, forecast.dram_s)
        rows = zip(new, forecast.times_s.T.tolist(), *(column.tolist() for column in columns), strict=True)
        for call, times, bound_by, support, match, launches, dram_s in rows:
            interval = Interval(*times)
            self._known[call] = CallTime(interval, PIPELINES[bound_by], LEVELS[support], match, launches, dram_s)

    def columns(self, calls: CallTable) -> TableForecast:
        """Calls that are columns, of which nothing is kept."""
        return calls.predict(self.gpu, self.conditions)

    @property
    def calls(self) -> tuple[Call, ...]:
        """Those that are known."""
        return tuple(self._known)

    def __getitem__(self, call: Call) -> CallTime:
        return self._known[call]


def refusal(why: str, call: Call) -> str:
    return f"{why} (asked for by {call})"


@dataclass
class CallTable:
    """Calls whose sizes are columns, from many launches: every different one gets a row."""

    count: int = 0
    _kinds: dict[tuple[Any, ...], dict[Any, int]] = field(default_factory=dict)  # of a configuration: sizes -> row

    def add(self, call: Call) -> NDArray[np.intp]:
        """The row of each entry of the call's columns."""
        choices, lists, sizes = [], {}, {}
        for name, value in call.parameters:
            if isinstance(value, str):
                choices.append((name, value))
            elif isinstance(value, np.ndarray) and value.dtype == object:
                lists[name] = value
            else:
                sizes[name] = value
        count = max((len(value) for _, value in call.parameters if isinstance(value, np.ndarray)), default=1)
        table = np.empty((count, len(sizes)))
        for at, value in enumerate(sizes.values()):
            table[:, at] = value
        raw, width = table.tobytes(), 8 * len(sizes)
        keys: Iterable[Any] = (raw[at : at + width] for at in range(0, count * width, width))
        if lists:
            keys = zip(keys, *lists.values(), strict=True)
        known = self._kinds.setdefault((call.op, tuple(choices), tuple(sizes), tuple(lists)), {})
        rows = np.empty(count, dtype=np.intp)
        for at, key in enumerate(keys):
            row = known.get(key)
            if row is None:
                row = known[key] = self.count
                self.count += 1
            rows[at] = row
        return rows

    def predict(self, gpu: Gpu, conditions: Conditions = DEFAULT) -> TableForecast:
        """Every row, in one table."""
        return forecast_table(self.columns(), gpu, conditions, distinct=True)

    def calls(self) -> list[Call]:
        """One a row."""
        columns = {name: values.tolist() for name, values in self.columns().items()}
        rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
        return [Call.of(row.pop("op"), {name: value for name, value in row.items() if value == value}) for row in rows]

    def columns(self) -> dict[str, NDArray[Any]]:
        """As ``columns_of`` calls; sizes as numbers, not given: NaN."""
        columns: dict[str, NDArray[Any]] = {"op": np.empty(self.count, dtype=object)}
        for (op, choices, sizes, lists), known in self._kinds.items():
            rows = np.fromiter(known.values(), dtype=np.intp, count=len(known))
            columns["op"][rows] = op
            for name, value in choices:
                columns.setdefault(name, np.full(self.count, None, dtype=object))[rows] = value
            raw = b"".join(key[0] for key in known) if lists else b"".join(known)
            for name, values in zip(sizes, np.frombuffer(raw).reshape(len(known), len(sizes)).T, strict=True):
                columns.setdefault(name, np.full(self.count, np.nan))[rows] = values
            for at, name in enumerate(lists, start=1):
                column = columns.setdefault(name, np.full(self.count, None, dtype=object))
                for row, key in zip(rows, known, strict=True):
                    column[row] = key[at]
        return columns


FACTOR = 0.5  # bounds are good to a few per cent; a factor of two is a wrong shape or a broken timer
_WARM = Conditions(rotation=1, predictor="generic")  # the most that L2 can do: no L2 effect counts as impossible
_UNITS = {"milliseconds": 1e3, "seconds": 1e6}
_WITHIN = 30.0  # kernels take 1 to 30 times their bound: a unit explains a time that is right but for its factor


def add_too_fast(columns: Mapping[str, NDArray[Any]], latency_us: NDArray[np.float64], gpu: Gpu, bad: BadRows) -> None:
    """Name the rows whose time is below half of their bound with all of L2 warm, each with the likely reason."""
    plain = {name: column for name, column in columns.items() if name not in ROTATIONS}
    results, _ = predict_columns(plain, gpu, _WARM)
    with np.errstate(invalid="ignore"):  # rows that are no calls have no bound
        too_fast = latency_us < FACTOR * results["bound_us"]
    most = bool(too_fast.mean() > 0.5)
    for row in np.flatnonzero(too_fast):
        bad.add([int(row)], _message(float(latency_us[row]), float(results["bound_us"][row]), most))


def _message(latency_us: float, bound_us: float, most: bool) -> str:
    """One text for all rows with the same reason."""
    for unit, factor in _UNITS.items():
        if most and bound_us <= latency_us * factor <= bound_us * _WITHIN:
            return f"measured in {unit}? times are microseconds, and these are below what the hardware allows"
    return "measured time is less than half of what the hardware allows: another GPU, shape or number format?"
