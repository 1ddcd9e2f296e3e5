"""Tables of kernel calls: columns in, columns out, row order kept, every distinct call predicted once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
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
from kernelcast.ops.base import Kernel
from kernelcast.ops.work import Array
from kernelcast.results import SUPPORT, Interval

OUTPUT = (
    "predicted_us", "low_us", "high_us", "ceiling_us", "bound_us", "bound_by", "support",
    "evidence_calls", "evidence_error", "answered_as",
)  # fmt: skip
_PIPELINES = np.array(PIPELINES, dtype=object)
_AHEAD = 8  # groups that are begun while an earlier one is waited for
_NUMBERS = ("evidence_calls", "evidence_error")


def predict_table(
    table: Mapping[str, Any],
    target: Gpu | str | None = None,
    conditions: Conditions = DEFAULT,
    *,
    skip_bad: bool = False,
) -> dict[str, Any]:
    """Add predicted_us, low_us, high_us, ceiling_us, bound_us, bound_by, support and what it rests on to a table.

    evidence_calls: calls of this kind that were measured; evidence_error: mean error on those that no fit saw, as a
    share; answered_as: the words that were filled in or changed, empty where the call was answered as it was asked.

    ``table``: columns by name (lists or arrays; a pandas or Polars frame or an Arrow table will do): ``op``, the
    op's parameters, ``dtype``, and, unless ``target`` is given, ``gpu``. An empty cell means not given. A bad
    row is an error that names it; with ``skip_bad`` its results are empty (NaN, None) instead.
    """
    columns = as_columns(table)
    output, bad = predict_columns(columns, target, conditions)
    if bad.found and not skip_bad:
        raise KernelcastError(bad.text())
    return {**columns, **output}


def predict_columns(
    columns: Mapping[str, NDArray[Any]],
    target: Gpu | str | None,
    conditions: Conditions = DEFAULT,
    matches: NDArray[Any] | None = None,
    launches: NDArray[Any] | None = None,
) -> tuple[dict[str, NDArray[Any]], BadRows]:
    """The output columns and what was wrong; bad rows have NaN and None. ``matches`` (what each row rests
    on) and ``launches`` (kernels that it launches), where given, are filled in."""
    if "op" not in columns:
        raise KernelcastError(f"the table needs a column 'op'; it has {', '.join(columns) or 'no columns'}")
    chip = gpu(target) if target is not None else None
    if chip is None and "gpu" not in columns:
        raise KernelcastError("which GPU? give one, or a column 'gpu'")
    if chip is not None:
        conditions.check_gpu(chip)
    count = len(columns["op"])
    output: dict[str, NDArray[Any]] = {
        name: np.full(count, np.nan) if name.endswith("_us") or name in _NUMBERS else np.full(count, None, dtype=object)
        for name in OUTPUT
    }
    bad = BadRows()
    for rows, at, found in answered(columns, chip, conditions, bad):
        for name in (name for name in OUTPUT if name.endswith("_us")):
            values = getattr(found, name.replace("predicted_us", "time_us").replace("_us", "_s"))
            output[name][rows] = (values * 1e6)[at]
        output["bound_by"][rows] = _PIPELINES[np.argmax(found.limits_s, axis=0)][at]
        output["support"][rows] = found.support[at]
        for name, told in _evidence(found.match).items():
            output[name][rows] = told[at] if len(told) > 1 else told
        if matches is not None:
            matches[rows] = found.match[at]
        if launches is not None:
            launches[rows] = found.launches[at]
    return output, bad


def _evidence(matches: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """What the calls rest on, by column; a group has few different matches. One entry: the same for all."""
    given = matches.tolist()
    code = {match: number for number, match in enumerate(dict.fromkeys(given))}
    entries = [match.entry for match in code]
    errors = [None if entry is None else entry.error for entry in entries]
    which = np.fromiter(map(code.__getitem__, given), dtype=np.intp, count=len(given)) if len(code) > 1 else [0]
    return {
        "answered_as": np.array([match.text for match in code], dtype=object)[which],
        "evidence_calls": np.array([entry.calls if entry else 0.0 for entry in entries])[which],
        "evidence_error": np.array([np.nan if error is None else error for error in errors])[which],
    }


def answered(
    columns: Mapping[str, NDArray[Any]], chip: Gpu | None, conditions: Conditions, bad: BadRows, details: bool = False
) -> Iterator[tuple[Rows, Rows, Predictions]]:
    """Good rows in groups, their places in the group's predictions, and these. What is wrong goes to ``bad``."""
    begun: deque[Group] = deque()
    with ThreadPoolExecutor(THREADS) as pool:  # groups run side by side; no thread starts before it has work
        for group in _groups(columns, chip, conditions, bad, details, pool):
            begun.append(group)
            if len(begun) > _AHEAD:
                yield from _good(begun.popleft(), bad)
        while begun:
            yield from _good(begun.popleft(), bad)


@dataclass(frozen=True)
class Group:
    """Rows of one op, GPU and choices: ``wait`` for their predictions, with each row's place among them."""

    kernel: type[Kernel]
    place: Gpu
    rows: Rows
    wait: Callable[[], Iterable[tuple[Rows, Rows, Predictions]]]


def _groups(
    columns: Mapping[str, NDArray[Any]], chip: Gpu | None, conditions: Conditions, bad: BadRows, details: bool,
    pool: Executor,
) -> Iterator[Group]:  # fmt: skip
    rotations = rotations_of(columns, conditions)
    for kernel, place, rows, calls in grouped(columns, chip, bad):
        own = rotations.part(rows)
        if details:
            kinds = predict_by_configuration(kernel, calls, place, conditions, own)
            yield Group(kernel, place, rows, partial(_by_configuration, rows, kinds))
            continue
        first, alike = different(calls, (own.weights, own.inputs))
        if first is not None:
            calls, own = calls.take(first), own.part(first)
        begun = begin_calls(kernel, calls, place, conditions, own, pool)
        yield Group(kernel, place, rows, partial(_together, rows, alike, begun))


def _by_configuration(
    rows: Rows, kinds: Iterable[tuple[Rows, Predictions]]
) -> Iterator[tuple[Rows, Rows, Predictions]]:
    for members, found in kinds:
        yield rows[members], np.arange(len(members)), found


def _together(rows: Rows, alike: Rows, begun: Callable[[], Predictions]) -> Iterator[tuple[Rows, Rows, Predictions]]:
    yield rows, alike, begun()


def _good(group: Group, bad: BadRows) -> Iterator[tuple[Rows, Rows, Predictions]]:
    """What the GPU's memory holds."""
    try:
        parts = list(group.wait())
    except KernelcastError as error:  # the whole group asks for what the GPU lacks
        bad.add(group.rows, str(error))
        return
    for rows, at, found in parts:
        large = found.too_large(group.place)
        if large.any():
            too = large[at]
            for row, footprint in zip(rows[too], found.footprint_bytes[at[too]], strict=True):
                bad.add([row], too_large_text(group.kernel.op, float(footprint), group.place))
            rows, at = rows[~too], at[~too]
        yield rows, at, found


def rotations_of(columns: Mapping[str, NDArray[Any]], conditions: Conditions = DEFAULT) -> Rotation:
    """Columns of their own may say what the conditions say for all; an empty cell leaves it to them."""

    def told(name: str) -> NDArray[np.float64] | float:
        if name not in columns:
            return float(getattr(conditions, name))
        values = numbers_in(columns[name], missing(columns[name]), flag=False)
        return np.where(values >= 1, values, getattr(conditions, name))

    return Rotation(*map(told, ROTATIONS))


_BOUND = {name: code for code, name in enumerate(PIPELINES)}
_SUPPORT = {name: code for code, name in enumerate(SUPPORT)}
_TIMES = ("predicted_us", "low_us", "high_us")


@dataclass(frozen=True, slots=True)
class CallTime:
    """One call on one GPU."""

    interval: Interval
    bound_by: str
    support: str
    match: EvidenceMatch  # what it rests on
    launches: float  # kernels, one after another
    dram_s: float  # that its bytes keep DRAM busy, where these bind it


class Times:
    """What was predicted so far on one GPU; asking again costs nothing."""

    def __init__(self, gpu: Gpu, conditions: Conditions = DEFAULT) -> None:
        self.gpu, self.conditions = gpu, conditions
        self.predictor = conditions.loaded_predictor.name
        self._known: dict[Call, CallTime] = {}

    def predict(self, calls: Iterable[Call]) -> None:
        """Predict all of these that are not known yet."""
        new = list(dict.fromkeys(call for call in calls if call not in self._known))
        if not new:
            return
        matches, launches = np.full(len(new), None, dtype=object), np.ones(len(new))
        found, bad = predict_columns(columns_of(new), self.gpu, self.conditions, matches, launches)
        if bad.found:
            first = min(bad.found)
            raise KernelcastError(refusal(bad.found[first], new[first]))
        seconds = (found[name] * 1e-6 for name in _TIMES)
        others = found["bound_by"], found["support"], matches, launches.tolist(), _dram_s(found).tolist()
        for call, *span, bound_by, support, match, kernels, dram_s in zip(new, *seconds, *others, strict=True):
            self._known[call] = CallTime(Interval(*span), bound_by, support, match, kernels, dram_s)

    def columns(self, calls: CallTable) -> CallTableTimes:
        """Calls that are columns, of which nothing is kept."""
        return calls.predict(self.gpu, self.conditions)

    @property
    def calls(self) -> tuple[Call, ...]:
        """Those that are known."""
        return tuple(self._known)

    def __getitem__(self, call: Call) -> CallTime:
        return self._known[call]


def _dram_s(found: dict[str, NDArray[Any]]) -> Array:
    return np.where(found["bound_by"] == "dram", found["bound_us"].astype(float) * 1e-6, 0.0)


def refusal(why: str, call: Call) -> str:
    return f"{why} (asked for by {call})"


@dataclass(frozen=True)
class CallTableTimes:
    """Predicted calls, one a row; of one that cannot be times are NaN and ``refused`` says why."""

    times_s: Array  # (3, rows): time, low, high
    bound_by: NDArray[np.int8]  # numbers of PIPELINES
    support: NDArray[np.int8]  # of the levels of SUPPORT
    match: NDArray[Any]
    refused: dict[int, str]
    dram_s: Array  # that a call's bytes keep DRAM busy, where these bind it
    held: Array | None = None  # how many times as long each takes under a lower power limit, where one was asked for


@dataclass
class CallTable:
    """Calls whose sizes are columns, from many launches: every different one gets a row."""

    count: int = 0
    _kinds: dict[tuple[Any, ...], dict[Any, int]] = field(default_factory=dict)  # of a kind: sizes -> row

    def add(self, call: Call) -> NDArray[np.intp]:
        """The row of each entry of the call's columns."""
        words, lists, sizes = [], {}, {}
        for name, value in call.parameters:
            if isinstance(value, str):
                words.append((name, value))
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
        known = self._kinds.setdefault((call.op, tuple(words), tuple(sizes), tuple(lists)), {})
        found = np.empty(count, dtype=np.intp)
        for at, key in enumerate(keys):
            row = known.get(key)
            if row is None:
                row = known[key] = self.count
                self.count += 1
            found[at] = row
        return found

    def predict(self, gpu: Gpu, conditions: Conditions = DEFAULT) -> CallTableTimes:
        """Every row, in one table."""
        if not self.count:
            none = np.empty(0, dtype=np.int8)
            return CallTableTimes(np.empty((3, 0)), none, none, np.empty(0, dtype=object), {}, np.empty(0))
        matches = np.full(self.count, None, dtype=object)
        found, bad = predict_columns(self.columns(), gpu, conditions, matches)
        return CallTableTimes(
            np.array([found[name] * 1e-6 for name in _TIMES]),
            np.array([_BOUND.get(word, 0) for word in found["bound_by"]], dtype=np.int8),
            np.array([_SUPPORT.get(word, 0) for word in found["support"]], dtype=np.int8),
            matches,
            bad.found,
            _dram_s(found),
        )

    def calls(self) -> list[Call]:
        """One a row."""
        columns = {name: values.tolist() for name, values in self.columns().items()}
        rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
        return [Call.of(row.pop("op"), {name: value for name, value in row.items() if value == value}) for row in rows]

    def columns(self) -> dict[str, NDArray[Any]]:
        """As ``columns_of`` calls; sizes as numbers, not given: NaN."""
        columns: dict[str, NDArray[Any]] = {"op": np.empty(self.count, dtype=object)}
        for (op, words, sizes, lists), known in self._kinds.items():
            rows = np.fromiter(known.values(), dtype=np.intp, count=len(known))
            columns["op"][rows] = op
            for name, word in words:
                columns.setdefault(name, np.full(self.count, None, dtype=object))[rows] = word
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


def add_too_fast(columns: Mapping[str, NDArray[Any]], latency_us: NDArray[np.float64], chip: Gpu, bad: BadRows) -> None:
    """Name the rows whose time is below half of their bound with all of L2 warm, each with the likely reason."""
    plain = {name: column for name, column in columns.items() if name not in ROTATIONS}
    results, _ = predict_columns(plain, chip, _WARM)
    with np.errstate(invalid="ignore"):  # rows that are no calls have no bound
        found = latency_us < FACTOR * results["bound_us"]
    most = bool(found.mean() > 0.5)
    for row in np.flatnonzero(found):
        bad.add([int(row)], _message(float(latency_us[row]), float(results["bound_us"][row]), most))


def _message(latency_us: float, bound_us: float, most: bool) -> str:
    """One text for rows of one reason, so that they are told of together."""
    for unit, factor in _UNITS.items():
        if most and bound_us <= latency_us * factor <= bound_us * _WITHIN:
            return f"measured in {unit}? times are microseconds, and these are below what the hardware allows"
    return "measured time is less than half of what the hardware allows: another GPU, shape or number format?"
