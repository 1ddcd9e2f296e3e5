"""Tables of kernel calls, any mix of ops and GPUs: good rows in groups, bad rows with their errors.

Rows are sorted into groups that one vectorised pass can take (same op, GPU and choices). Nothing here loops over
rows except the parsing of text.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu, gpu
from kernelcast.ops.base import Calls, Kernel, Parameter, Ragged, kernel_class, parameters_of
from kernelcast.ops.work import Number

Rows = NDArray[np.intp]


@dataclass
class BadRows:
    """What is wrong with which rows; rows count from 1, without the header."""

    messages: dict[int, str] = field(default_factory=dict)

    def add(self, rows: Iterable[int], message: str) -> None:
        for row in rows:
            self.messages.setdefault(int(row), message)

    def text(self, limit: int = 5) -> str:
        """'3 bad rows: row 2: …; row 7: …' with rows of one message joined."""
        by_message: dict[str, list[int]] = {}
        for row, message in sorted(self.messages.items()):
            by_message.setdefault(message, []).append(row + 1)
        parts = []
        for message, rows in list(by_message.items())[:limit]:
            shown = ", ".join(map(str, rows[:5])) + (f" and {len(rows) - 5} more" if len(rows) > 5 else "")
            parts.append(f"row{'s' if len(rows) > 1 else ''} {shown}: {message}")
        more = f"; and {len(by_message) - limit} other problems" if len(by_message) > limit else ""
        return f"{len(self.messages)} bad row{'s' if len(self.messages) > 1 else ''}: {'; '.join(parts)}{more}"


def as_columns(table: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Columns as NumPy arrays of one length; a column of lists stays a column of objects."""
    names = list(getattr(table, "column_names", None) or (table.keys() if hasattr(table, "keys") else table))
    columns = {str(name): _as_array(table[name]) for name in names}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise KernelcastError(f"columns differ in length: {lengths}")
    return columns


def _as_array(column: Any) -> NDArray[Any]:
    if isinstance(column, np.ndarray):
        return column
    values = column.to_numpy() if hasattr(column, "to_numpy") else column
    if isinstance(values, np.ndarray):
        return values
    items = list(values)
    if any(isinstance(v, list | tuple | str | type(None) | np.ndarray) for v in items):
        array = np.empty(len(items), dtype=object)
        array[:] = items
        return array
    return np.asarray(items)


def grouped(
    columns: Mapping[str, NDArray[Any]], chip: Gpu | None, bad: BadRows
) -> Iterator[tuple[type[Kernel], Gpu, Rows, Calls]]:
    """Good rows by op, GPU and choices; ``chip`` stands in for a column gpu. What is wrong goes to ``bad``."""
    for op, rows in _split(columns["op"], np.arange(len(columns["op"]))):
        try:
            kernel = kernel_class("" if op is None else str(op))
        except KernelcastError as error:
            bad.add(rows, "op is empty" if op is None else str(error))
            continue
        for place, there in _places(columns, chip, rows, bad):
            for good, calls in _calls(kernel, columns, there, bad):
                yield kernel, place, good, calls


def _places(
    columns: Mapping[str, NDArray[Any]], chip: Gpu | None, rows: Rows, bad: BadRows
) -> Iterator[tuple[Gpu, Rows]]:
    if chip is not None:
        yield chip, rows
        return
    for name, there in _split(columns["gpu"], rows):
        try:
            place = gpu(str(name)) if name is not None else None
        except KernelcastError as error:
            bad.add(there, str(error))
            continue
        if place is None:
            bad.add(there, "gpu is empty")
        else:
            yield place, there


def _calls(
    kernel: type[Kernel], columns: Mapping[str, NDArray[Any]], rows: Rows, bad: BadRows
) -> Iterator[tuple[Rows, Calls]]:
    """Validate the parameters of one op's rows and split them by their choices."""
    specs = list(parameters_of(kernel).values())
    groups: list[tuple[Rows, dict[str, Any], frozenset[str]]] = [(rows, {}, frozenset())]
    for spec in (s for s in specs if s.type in ("choice", "lengths")):
        groups = [finer for group in groups for finer in _refine(spec, columns, group, bad)]
    for members, choices, ragged in groups:
        keep = np.ones(len(members), dtype=bool)
        numbers = {
            s.name: _numbers(s, kernel.op, columns.get(s.name), members, keep, bad)
            for s in specs
            if s.type not in ("choice", "lengths")
        }
        parsed = {
            s.name: _parse_lengths(s, columns[s.name][members], members, keep, bad) for s in specs if s.name in ragged
        }
        calls = _kept(numbers, choices, parsed, keep)
        while calls.count and (found := kernel.conflicts(calls)):  # a family may name one broken rule at a time
            whole = np.flatnonzero(keep)
            for broken, message in found:
                bad.add(members[whole[broken]], f"{kernel.op}: {message}")
                keep[whole[broken]] = False
            calls = _kept(numbers, choices, parsed, keep)
        if calls.count:
            yield members[keep], calls


def _kept(
    numbers: Mapping[str, NDArray[np.float64]],
    choices: Mapping[str, Any],
    parsed: Mapping[str, list[list[int]]],
    keep: NDArray[np.bool_],
) -> Calls:
    return Calls(
        count=int(keep.sum()),
        numbers={name: column[keep] for name, column in numbers.items()},
        choices=choices,
        lists={n: Ragged.of([x for x, k in zip(v, keep, strict=True) if k]) for n, v in parsed.items()},
    )


def _refine(
    spec: Parameter,
    columns: Mapping[str, NDArray[Any]],
    group: tuple[Rows, dict[str, Any], frozenset[str]],
    bad: BadRows,
) -> Iterator[tuple[Rows, dict[str, Any], frozenset[str]]]:
    """Split a group by one choice, or by whether a list is given."""
    rows, choices, ragged = group
    if spec.type == "lengths":
        column = columns.get(spec.name)
        if column is None:
            yield group
            return
        empty = missing(column[rows])
        if empty.any():
            yield rows[empty], choices, ragged
        if not empty.all():
            yield rows[~empty], choices, ragged | {spec.name}
        return
    if spec.name not in columns:
        pairs: Iterable[tuple[Any, Rows]] = [(None, rows)]
    else:
        pairs = _split(columns[spec.name], rows)
    for word, members in pairs:
        value = spec.default if word is None else str(word)
        try:
            yield members, {**choices, spec.name: spec.check(value)}, ragged
        except KernelcastError as error:
            bad.add(members, str(error))


def _split(column: NDArray[Any], rows: Rows) -> Iterator[tuple[Hashable, Rows]]:
    """Rows by the value of a column of words; None for an empty cell."""
    part = column if len(rows) == len(column) else column[rows]  # rows are in order, so these are all
    codes: dict[Any, int] = {}
    if part.dtype == object:
        cells = part.tolist()
        codes = {value: code for code, value in enumerate(dict.fromkeys(cells))}
        if len(codes) == 1:
            yield _word(cells[0]), rows
            return
        index = np.fromiter(map(codes.__getitem__, cells), dtype=np.intp, count=len(part))
    else:
        values, index = np.unique(part, return_inverse=True)
        codes = {v: i for i, v in enumerate(values.tolist())}
    if len(codes) == 1:
        yield _word(next(iter(codes))), rows
        return
    order = np.argsort(index, kind="stable")
    edges = np.searchsorted(index[order], np.arange(len(codes) + 1))
    merged: dict[Hashable, list[Rows]] = {}
    for value, code in codes.items():  # two spellings of empty are one value
        merged.setdefault(_word(value), []).append(rows[order[edges[code] : edges[code + 1]]])
    for word, parts in merged.items():
        yield word, np.sort(np.concatenate(parts)) if len(parts) > 1 else parts[0]


def _word(value: Any) -> Hashable:
    """A cell's word, or None for an empty one (None, NaN, blank text)."""
    if value is None or value != value:
        return None
    text = str(value).strip()
    return text or None


def _numbers(
    spec: Parameter, op: str, column: NDArray[Any] | None, rows: Rows, keep: NDArray[np.bool_], bad: BadRows
) -> NDArray[np.float64]:
    """One numeric or true/false parameter of these rows; clears ``keep`` where it is wrong."""
    default = np.nan if spec.required or spec.default is None else float(spec.default)
    if column is None:
        if spec.required:
            _reject(np.ones(len(rows), dtype=bool), f"{op} needs {spec.name}", rows, keep, bad)
        return np.full(len(rows), default)
    part = column[rows]
    empty = missing(part)
    values = numbers_in(part, empty, flag=spec.type == "flag")
    wrong = ~empty & ~np.isfinite(values)
    if spec.type == "flag":
        wrong |= ~empty & (values != 0) & (values != 1)
    else:
        with np.errstate(invalid="ignore"):
            wrong |= ~empty & ((values < spec.low) | (values > spec.high))
            if spec.type == "size":
                wrong |= ~empty & (values != np.floor(values))
    for at in np.flatnonzero(wrong):
        value = part[at].item() if isinstance(part[at], np.generic) else part[at]
        if isinstance(value, str) and np.isfinite(values[at]):  # "-5" is a number, but a wrong one
            value = _scalar(values[at])
        try:
            spec.check(value)
            message = f"{spec.name} must be a number, not {value!r}"
        except KernelcastError as error:
            message = str(error)
        bad.add([rows[at]], f"{op}: {message}")
        keep[at] = False
    if spec.required:
        _reject(empty, f"{op} needs {spec.name}", rows, keep, bad)
    return np.where(empty, default, values)


def _scalar(value: float) -> float | int:
    return int(value) if value == int(value) else float(value)


def _reject(wrong: NDArray[np.bool_], message: str, rows: Rows, keep: NDArray[np.bool_], bad: BadRows) -> None:
    if wrong.any():
        bad.add(rows[wrong], message)
        keep[wrong] = False


def _parse_lengths(
    spec: Parameter, cells: NDArray[Any], rows: Rows, keep: NDArray[np.bool_], bad: BadRows
) -> list[list[int]]:
    """Lists, or JSON text of lists; an empty list (and ``keep`` cleared) where a cell is neither."""
    parsed: list[list[int]] = []
    for at, cell in enumerate(cells):
        try:
            value = json.loads(cell) if isinstance(cell, str) else list(cell)
            parsed.append(list(spec.check(value)))
        except (KernelcastError, TypeError, ValueError) as error:
            text = str(error) if isinstance(error, KernelcastError) else f"{spec.name} must be a list like [128, 64]"
            bad.add([rows[at]], text)
            keep[at] = False
            parsed.append([])
    return parsed


_NUMBERS = {int, float, NoneType}
_WORDS_TRUE, _WORDS_FALSE = ("true", "t", "yes", "1", "1.0"), ("false", "f", "no", "0", "0.0")


def missing(values: NDArray[Any]) -> NDArray[np.bool_]:
    if isinstance(values, np.ma.MaskedArray):
        return np.ma.getmaskarray(values).copy()
    if values.dtype.kind == "f":
        return np.isnan(values)
    if values.dtype.kind != "O":
        return np.zeros(len(values), dtype=bool)
    cells = values.tolist()
    if _NUMBERS.issuperset(map(type, cells)):
        return np.fromiter([cell is None or cell != cell for cell in cells], dtype=bool, count=len(cells))
    return np.fromiter(map(_empty, cells), dtype=bool, count=len(cells))


def _empty(value: Any) -> bool:
    """None, NaN or blank text."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and value != value)


def numbers_in(part: NDArray[Any], empty: NDArray[np.bool_], *, flag: bool) -> NDArray[np.float64]:
    """Numbers as they are, words as numbers where they are some; NaN where not."""
    if isinstance(part, np.ma.MaskedArray):
        part = part.filled(0)
    if part.dtype.kind in "biuf":
        return part.astype(np.float64)
    values = np.full(len(part), np.nan)
    cells = part[~empty].tolist()
    if {int, float}.issuperset(map(type, cells)):
        values[~empty] = cells
        return values
    for at in np.flatnonzero(~empty):
        values[at] = _cell(part[at], flag=flag)
    return values


def _cell(value: Any, *, flag: bool) -> float:
    if flag and isinstance(value, str):
        word = value.strip().lower()
        return 1.0 if word in _WORDS_TRUE else 0.0 if word in _WORDS_FALSE else np.nan
    if isinstance(value, bool) and not flag:
        return np.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return np.nan


def plain(value: Any) -> Any:
    """One cell as a plain value: None where it is empty, a whole number as such, a list as a tuple."""
    value = value.tolist() if isinstance(value, np.generic | np.ndarray) else value
    if value is np.ma.masked or _empty(value):
        return None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return tuple(value) if isinstance(value, list) else value


_WORTH = 0.9  # of the calls are different: then finding the others costs more than they do
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, its bits well mixed (Knuth's multiplicative hashing)


def different(calls: Calls, beside: Sequence[Number] = ()) -> tuple[Rows | None, Rows]:
    """One row of each different call (None: of all), and for every call its place among them.

    ``beside``: what else must be the same.
    """
    everyone = np.arange(calls.count)
    if calls.count < 2 or calls.lists:  # batches of lists of lengths are seldom the same
        return None, everyone
    given = [*calls.numbers.values(), *(column for column in beside if isinstance(column, np.ndarray))]
    bits = [np.ascontiguousarray(column, dtype=np.float64).view(np.uint64) for column in given]  # NaN is like NaN
    varying = [column for column in bits if (column != column[0]).any()]
    code = np.zeros(calls.count, dtype=np.uint64)
    for column in varying:
        code = (code ^ column) * _FACTOR
        code ^= code >> np.uint64(32)
    ordered = np.sort(code)  # a tenth of the price of sorting rows
    if np.count_nonzero(ordered[1:] != ordered[:-1]) + 1 > _WORTH * calls.count:
        return None, everyone
    _, first, alike = np.unique(code, return_index=True, return_inverse=True)
    if any((column != column[first][alike]).any() for column in varying):  # two calls have one code: never seen
        return None, everyone
    return first, alike
