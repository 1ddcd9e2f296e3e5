"""Files of requests (input and output tokens of each, arrival times), and cells of table files as numbers."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.files import open_table

_DELIMITERS = ",;\t|"


def numbers(cells: NDArray[Any]) -> NDArray[np.float64]:
    """NaN where a cell has no number."""
    if cells.dtype.kind in "iuf":
        return np.ma.filled(cells.astype(np.float64), np.nan)
    return np.fromiter(map(_number, cells), dtype=np.float64, count=len(cells))


def whole_numbers(values: NDArray[np.float64], least: int) -> NDArray[np.bool_]:
    """Which are whole numbers of at least ``least``."""
    with np.errstate(invalid="ignore"):
        return (values >= least) & (values < 2**53) & (np.floor(values) == values)


def texts(cells: NDArray[Any]) -> list[str | None]:
    """The number of a cell; None where it is empty; int for a whole number."""
    if cells.dtype.kind == "f":
        return [None if cell != cell else str(int(cell)) if cell == int(cell) else str(cell) for cell in cells.tolist()]
    return [None if cell is None or cell == "" else str(cell) for cell in cells.tolist()]


def cell_text(cell: Any) -> str:
    """The cell as the file has it, long ones shortened."""
    if isinstance(cell, np.ndarray):
        cell = cell.tolist()
    if cell is None or cell is np.ma.masked or cell != cell:
        return "an empty cell"
    text = repr(cell.item() if isinstance(cell, np.generic) else cell)
    return text if len(text) <= 60 else f"{text[:57]}..."


def line_of(path: Path, row: int) -> str:
    """'line 7' of a text file, its header counted; 'row 7' of a Parquet file."""
    if path.suffix.lower() == ".parquet":
        return f"row {row + 1}"
    for number, (line, _) in enumerate(_records(path), start=-1 if path.suffix.lower() == ".csv" else 0):
        if number == row:
            return f"line {line}"
    return f"row {row + 1}"


def copy_valid_rows(path: Path, target: Path) -> int:
    """Copy a CSV or JSON lines file without malformed lines; returns how many those are."""
    if path.suffix.lower() == ".jsonl":
        with target.open("w", encoding="utf-8") as file:
            left_out = 0
            for _, text in _records(path):
                if _is_object(text):
                    file.write(text.rstrip("\n") + "\n")
                else:
                    left_out += 1
        return left_out
    with target.open("w", encoding="utf-8", newline="") as file:
        writer, columns, left_out = csv.writer(file), 0, 0
        for _, cells in _records(path, strict=True):  # a quote that is never closed would swallow rows
            columns = columns or len(cells)
            if len(cells) == columns:
                writer.writerow(cells)
            else:
                left_out += 1
    return left_out


def _records(path: Path, strict: bool = False) -> Iterator[tuple[int, Any]]:
    """The first line of each record and its content: cells of a CSV, its header first, or a line of JSON. Blank
    lines are none."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        if path.suffix.lower() == ".jsonl":
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
            return
        first = file.readline()
        file.seek(0)
        reader, start = csv.reader(file, delimiter=max(_DELIMITERS, key=first.count), strict=strict), 1
        try:
            for cells in reader:
                if cells:
                    yield start, cells
                start = reader.line_num + 1
        except csv.Error as error:
            raise KernelcastError(f"{path}: line {start}: {error}") from None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except json.JSONDecodeError:
        return False


def _number(cell: Any) -> float:
    if cell is np.ma.masked or isinstance(cell, bool | np.bool_):  # float() warns of the one and takes the other
        return np.nan
    try:
        return float(cell)
    except (TypeError, ValueError):
        return np.nan


@dataclass(frozen=True)
class RequestFile:
    """One entry a request, in the file's order."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cached: tuple[int, ...] = ()
    arrivals_s: tuple[float, ...] = ()


def read_requests(path: Path) -> RequestFile:
    """CSV, JSONL or Parquet with input_tokens and output_tokens; cached_tokens and arrival_s where given.

    Unlike ``load.read_trace`` it takes one static batch: times are optional and in any order, tokens may be cached.
    """
    with open_table(path) as source:
        have = list(source.types)
        for name in ("input_tokens", "output_tokens"):
            if name not in have:
                raise KernelcastError(f"{path}: a file of requests needs a column '{name}'; this has {', '.join(have)}")
        optional = [name for name in ("cached_tokens", "arrival_s") if name in have]
        columns = source.named("input_tokens", "output_tokens", *optional)
    inputs, outputs = (_token_counts(path, name, columns[name]) for name in ("input_tokens", "output_tokens"))
    if not inputs:
        raise KernelcastError(f"{path} has no request")
    cached = _token_counts(path, "cached_tokens", columns["cached_tokens"]) if "cached_tokens" in optional else ()
    arrivals = _seconds(path, "arrival_s", columns["arrival_s"]) if "arrival_s" in optional else ()
    return RequestFile(inputs, outputs, cached, arrivals)


def _token_counts(path: Path, name: str, cells: NDArray[Any]) -> tuple[int, ...]:
    counts = numbers(cells)
    _refuse_first(path, ~whole_numbers(counts, 0), cells, f"{name} must be a whole number of tokens")
    return tuple(counts.astype(np.int64).tolist())


def _seconds(path: Path, name: str, cells: NDArray[Any]) -> tuple[float, ...]:
    seconds = numbers(cells)
    _refuse_first(path, ~((seconds >= 0) & (seconds < np.inf)), cells, f"{name} must be a number of seconds")
    return tuple(seconds.tolist())


def _refuse_first(path: Path, bad: NDArray[np.bool_], cells: NDArray[Any], rule: str) -> None:
    if bad.any():
        row = int(np.argmax(bad))
        raise KernelcastError(f"{path}: row {row + 1}: {rule}, not {cell_text(cells[row])}")
