"""Tables of kernel calls, any mix of ops and GPUs: good rows in groups, bad rows with their errors.

Rows are sorted into groups that one vectorised pass can take (same op, GPU and choices). Nothing here loops over
rows except the parsing of text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu, gpu
from kernelcast.ops.base import Calls, Kernel, Parameter, Ragged, kernel_class, parameters_of
from kernelcast.ops.work import Number

Rows = NDArray[np.intp]
Columns = Mapping[str, NDArray[Any]]
T = TypeVar("T")
_TRUE, _FALSE = ("true", "t", "yes", "1", "1.0"), ("false", "f", "no", "0", "0.0")
_WORTH = 0.9  # of the calls are different: then finding the others costs more than they do
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, its bits well mixed (Knuth's multiplicative hashing)


@dataclass
class BadRows:
    """What is wrong with which rows; messages count rows from 1, without the header."""

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
    if not hasattr(table, "__getitem__") or isinstance(table, str):
        raise KernelcastError(f"a table is columns by name, as in {{'op': ['gemm'], 'm': [64]}}, not {table!r:.60}")
    names = list(getattr(table, "column_names", None) or (table.keys() if hasattr(table, "keys") else table))
    columns = {str(name): _as_array(table[name]) for name in names}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise KernelcastError(f"columns differ in length: {lengths}")
    return columns


def _as_array(column: Any) -> NDArray[Any]:
    values = column.to_numpy() if hasattr(column, "to_numpy") else column
    if isinstance(values, np.ndarray):
        return values
    items = list(values)
    if any(isinstance(item, list | tuple | str | NoneType | np.ndarray) for item in items):
        array = np.empty(len(items), dtype=object)
        array[:] = items
        return array
    return np.asarray(items)


def grouped(columns: Columns, target: Gpu | None, bad: BadRows) -> Iterator[tuple[type[Kernel], Gpu, Rows, Calls]]:
    """Good rows by op, GPU and choices; ``target`` stands in for a column gpu. Errors go to ``bad``."""
    for kernel, rows in _resolved(columns, "op", np.arange(len(columns["op"])), _named("op", kernel_class), bad):
        on = [(target, rows)] if target else _resolved(columns, "gpu", rows, _named("gpu", gpu), bad)
        for each, members in on:
            for good, calls in _calls(kernel, columns, members, bad):
                yield kernel, each, good, calls


def _named(name: str, find: Callable[[str], T]) -> Callable[[str | None], T]:
    def parsed(text: str | None) -> T:
        if text is None:
            raise KernelcastError(f"{name} is empty")
        return find(text)

    return parsed


def _resolved(
    columns: Columns, name: str, rows: Rows, resolve: Callable[[str | None], T], bad: BadRows
) -> Iterator[tuple[T, Rows]]:
    """Rows by what their text means; where it means nothing, the error goes to ``bad``."""
    groups = _split(columns[name], rows) if name in columns else [(None, rows)]
    for text, members in groups:
        try:
            value = resolve(text)
        except KernelcastError as error:
            bad.add(members, str(error))
            continue
        yield value, members


def _calls(kernel: type[Kernel], columns: Columns, rows: Rows, bad: BadRows) -> Iterator[tuple[Rows, Calls]]:
    """Validate the parameters of one op's rows and split them by their choices."""
    specs = parameters_of(kernel).values()
    groups: list[tuple[Rows, dict[str, Any], tuple[Parameter, ...]]] = [(rows, {}, ())]
    for spec in specs:
        if spec.type in ("choice", "lengths"):
            groups = [finer for group in groups for finer in _refined(spec, columns, group, bad)]
    for members, choices, ragged in groups:
        keep = np.ones(len(members), dtype=bool)
        numbers = {
            spec.name: _numbers(spec, kernel.op, columns.get(spec.name), members, keep, bad)
            for spec in specs
            if spec.type not in ("choice", "lengths")
        }
        lists = {spec.name: _lengths(spec, columns[spec.name][members], members, keep, bad) for spec in ragged}
        every = Calls(len(members), numbers, choices, {name: Ragged.of(values) for name, values in lists.items()})
        calls = every if keep.all() else every.take(np.flatnonzero(keep))
        while calls.count and (conflicts := kernel.conflicts(calls)):  # a family may name one broken rule at a time
            kept = np.flatnonzero(keep)
            for broken, message in conflicts:
                bad.add(members[kept[broken]], f"{kernel.op}: {message}")
                keep[kept[broken]] = False
            calls = every.take(np.flatnonzero(keep))
        if calls.count:
            yield members[keep], calls


def _refined(
    spec: Parameter, columns: Columns, group: tuple[Rows, dict[str, Any], tuple[Parameter, ...]], bad: BadRows
) -> Iterator[tuple[Rows, dict[str, Any], tuple[Parameter, ...]]]:
    """Split a group by one choice, or by whether a list is given."""
    rows, choices, ragged = group
    if spec.type == "choice":
        options = _resolved(columns, spec.name, rows, lambda t: spec.check(spec.default if t is None else t), bad)
        for option, members in options:
            yield members, {**choices, spec.name: option}, ragged
    elif spec.name not in columns:
        yield group
    else:
        empty = missing(columns[spec.name][rows])
        if empty.any():
            yield rows[empty], choices, ragged
        if not empty.all():
            yield rows[~empty], choices, (*ragged, spec)


def _split(column: NDArray[Any], rows: Rows) -> Iterator[tuple[str | None, Rows]]:
    """Rows by the text of a column; None for an empty cell."""
    part = column if len(rows) == len(column) else column[rows]  # rows are in order, so these are all
    if part.dtype == object:
        cells = part.tolist()
        codes: dict[Any, int] = {value: code for code, value in enumerate(dict.fromkeys(cells))}
    else:
        values, index = np.unique(part, return_inverse=True)
        codes = {value: code for code, value in enumerate(values.tolist())}
    if len(codes) == 1:
        yield _text(next(iter(codes))), rows
        return
    if part.dtype == object:
        index = np.fromiter(map(codes.__getitem__, cells), dtype=np.intp, count=len(part))
    order = np.argsort(index, kind="stable")
    edges = np.searchsorted(index[order], np.arange(len(codes) + 1))
    merged: dict[str | None, list[Rows]] = {}
    for value, code in codes.items():  # two spellings of empty are one value
        merged.setdefault(_text(value), []).append(rows[order[edges[code] : edges[code + 1]]])
    for text, parts in merged.items():
        yield text, np.sort(np.concatenate(parts)) if len(parts) > 1 else parts[0]


def _text(value: Any) -> str | None:
    """A cell's text, or None for an empty cell (None, NaN, blank)."""
    if value is None or value != value:
        return None
    return str(value).strip() or None


def _numbers(
    spec: Parameter, op: str, column: NDArray[Any] | None, rows: Rows, keep: NDArray[np.bool_], bad: BadRows
) -> NDArray[np.float64]:
    """One numeric or true/false parameter of these rows; clears ``keep`` where it is wrong."""
    default = np.nan if spec.required or spec.default is None else float(spec.default)
    if column is None:
        empty, values = np.ones(len(rows), dtype=bool), np.full(len(rows), default)
    else:
        part = column[rows]
        empty = missing(part)
        values = numbers_in(part, empty, flag=spec.type == "flag")
        for at in np.flatnonzero(~empty & _wrong(spec, values)):
            bad.add([rows[at]], f"{op}: {_complaint(spec, part[at], values[at])}")
            keep[at] = False
    if spec.required and empty.any():
        bad.add(rows[empty], f"{op} needs {spec.name}")
        keep[empty] = False
    return np.where(empty, default, values)


def _wrong(spec: Parameter, values: NDArray[np.float64]) -> NDArray[np.bool_]:
    if spec.type == "flag":
        return (values != 0) & (values != 1)
    with np.errstate(invalid="ignore"):
        wrong = ~np.isfinite(values) | (values < spec.low) | (values > spec.high)
        return wrong | (values != np.floor(values)) if spec.type == "size" else wrong


def _complaint(spec: Parameter, cell: Any, number: float) -> str:
    value = cell.item() if isinstance(cell, np.generic) else cell
    if isinstance(value, str) and np.isfinite(number):  # "-5" is a number, but a wrong one
        value = int(number) if number == int(number) else float(number)
    try:
        spec.check(value)
    except KernelcastError as error:
        return str(error)
    return f"{spec.name} must be a number, not {value!r}"


def _lengths(
    spec: Parameter, cells: NDArray[Any], rows: Rows, keep: NDArray[np.bool_], bad: BadRows
) -> list[list[int]]:
    """Lists, or JSON text of lists; an empty list (and ``keep`` cleared) where a cell is neither."""
    parsed: list[list[int]] = []
    for at, cell in enumerate(cells):
        try:
            parsed.append(list(spec.check(json.loads(cell) if isinstance(cell, str) else list(cell))))
        except (KernelcastError, TypeError, ValueError) as error:
            text = str(error) if isinstance(error, KernelcastError) else f"{spec.name} must be a list like [128, 64]"
            bad.add([rows[at]], text)
            keep[at] = False
            parsed.append([])
    return parsed


def missing(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Empty cells."""
    if isinstance(values, np.ma.MaskedArray):
        return np.ma.getmaskarray(values).copy()
    if values.dtype.kind == "f":
        return np.isnan(values)
    if values.dtype.kind != "O":
        return np.zeros(len(values), dtype=bool)
    cells = values.tolist()
    if {int, float, NoneType}.issuperset(map(type, cells)):
        return np.fromiter([cell is None or cell != cell for cell in cells], dtype=bool, count=len(cells))
    return np.fromiter(map(_empty, cells), dtype=bool, count=len(cells))


def _empty(value: Any) -> bool:
    """None, NaN or blank text."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and value != value)


def numbers_in(part: NDArray[Any], empty: NDArray[np.bool_], *, flag: bool) -> NDArray[np.float64]:
    """Numbers as they are, text as numbers where it is some; NaN where not."""
    if isinstance(part, np.ma.MaskedArray):
        part = part.filled(0)
    if part.dtype.kind in "biuf":
        return part.astype(np.float64)
    values = np.full(len(part), np.nan)
    cells = part[~empty].tolist()
    if not {int, float}.issuperset(map(type, cells)):
        cells = [_number(cell, flag=flag) for cell in cells]
    values[~empty] = cells
    return values


def _number(value: Any, *, flag: bool) -> float:
    if flag and isinstance(value, str):
        text = value.strip().lower()
        return 1.0 if text in _TRUE else 0.0 if text in _FALSE else np.nan
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


def different(calls: Calls, beside: Sequence[Number] = ()) -> tuple[Rows | None, Rows]:
    """One row of each different call (None: of all), and for every call its position among them.

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
