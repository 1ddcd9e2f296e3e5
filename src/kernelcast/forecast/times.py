"""Times of many kernel calls at once: every different call is predicted once, in one table a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.forecast.call import Call, columns_of
from kernelcast.forecast.evidence import EvidenceMatch
from kernelcast.forecast.predict import DEFAULT, Conditions, chosen
from kernelcast.forecast.predict_table import predict_columns
from kernelcast.hardware import Gpu
from kernelcast.interval import Interval
from kernelcast.machine.analyse import PIPELINES
from kernelcast.ops.work import Array
from kernelcast.support import SUPPORT

_BOUND = {name: code for code, name in enumerate(PIPELINES)}
_SUPPORT = {name: code for code, name in enumerate(SUPPORT)}
_TIMES = ("predicted_us", "low_us", "high_us")


@dataclass(frozen=True, slots=True)
class CallTime:
    """One call on one GPU."""

    span: Interval
    bound_by: str
    support: str
    match: EvidenceMatch  # what it rests on
    launches: float  # kernels, one after another
    dram_s: float  # that its bytes keep DRAM busy, where these bind it


class Times:
    """What was predicted so far on one GPU; asking again costs nothing."""

    def __init__(self, gpu: Gpu, conditions: Conditions = DEFAULT) -> None:
        self.gpu, self.conditions = gpu, conditions
        self.predictor = chosen(conditions).name
        self._known: dict[Call, CallTime] = {}

    def learn(self, calls: Iterable[Call]) -> None:
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
class TimeColumns:
    """Predicted calls, one a row; of one that cannot be times are NaN and ``refused`` says why."""

    times_s: Array  # (3, rows): time, low, high
    bound_by: NDArray[np.int8]  # numbers of PIPELINES
    support: NDArray[np.int8]  # of the levels of SUPPORT
    match: NDArray[Any]
    refused: dict[int, str]
    dram_s: Array  # that a call's bytes keep DRAM busy, where these bind it
    held: Array | None = None  # how many times as long each takes under a lower power limit, where one was asked for


@dataclass
class Gathered:
    """Calls whose sizes are columns, from many launches: every different one gets a row."""

    count: int = 0
    _kinds: dict[tuple[Any, ...], dict[Any, int]] = field(default_factory=dict)  # of a kind: sizes -> row

    def rows(self, call: Call) -> NDArray[np.intp]:
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

    def predicted(self, gpu: Gpu, conditions: Conditions = DEFAULT) -> TimeColumns:
        """Every row, in one table."""
        if not self.count:
            none = np.empty(0, dtype=np.int8)
            return TimeColumns(np.empty((3, 0)), none, none, np.empty(0, dtype=object), {}, np.empty(0))
        matches = np.full(self.count, None, dtype=object)
        found, bad = predict_columns(self.columns(), gpu, conditions, matches)
        return TimeColumns(
            np.array([found[name] * 1e-6 for name in _TIMES]),
            np.array([_BOUND.get(word, 0) for word in found["bound_by"]], dtype=np.int8),
            np.array([_SUPPORT.get(word, 0) for word in found["support"]], dtype=np.int8),
            matches,
            bad.found,
            _dram_s(found),
        )

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
