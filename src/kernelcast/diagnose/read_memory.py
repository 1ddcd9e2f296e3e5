"""Whatever was measured, from a file's bytes and nothing else: no file is opened, whatever the content names.

Traces, what ncu prints, and tables (CSV, JSON lines; Parquet where the system has files in memory).
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.diagnose.chrome_events import parse_trace
from kernelcast.diagnose.measured import Profile
from kernelcast.diagnose.read import TRACES, named_in, refuse_too_fast, trace_profile, what_is_it
from kernelcast.diagnose.read_ncu import has_header, ncu_profile
from kernelcast.diagnose.read_profile import gpu_name
from kernelcast.diagnose.read_table import MORE, table_profile
from kernelcast.errors import KernelcastError, unknown
from kernelcast.files import ENDINGS, csv_header, opened_parquet
from kernelcast.hardware import Gpu, gpu_ids

Columns = Mapping[str, NDArray[Any]]
_FILE = ".toml"  # of a word that the library would read a file by


def read_bytes(content: bytes, name: str, chip: Gpu | None, most_bytes: int) -> tuple[Profile, Gpu]:
    """The measured calls and the GPU: ``chip``, else the one that the content names. ``name``: as the file was called;
    ``most_bytes``: that it may have when it is no longer compressed."""
    path = Path(Path(name.replace("\\", "/")).name)
    ending = path.suffix.lower()
    if ending in TRACES:
        trace = parse_trace(content, path, most_bytes)
        place = chip or _named(path, gpu_name(trace))
        return trace_profile(trace, place, path), place
    if ending == ".csv" and has_header(io.StringIO(content[:_HEAD].decode(errors="replace"))):
        return ncu_profile(content.decode("utf-8-sig", errors="replace"), path), chip or _named(path, "")
    if ending not in ENDINGS:
        raise what_is_it(path)
    columns = _COLUMNS[ending](content, path, most_bytes)
    if "op" not in columns:
        raise KernelcastError(f"{path}: a table of calls needs a column 'op'; this has {', '.join(columns)[:500]}")
    profile = table_profile(columns, path)
    for measured in profile.calls:
        for word, value in measured.calls[0].call.parameters:
            if isinstance(value, str) and value.endswith(_FILE):
                raise KernelcastError(f"{path}: {word} {value!r} is a file, and files are not read here")
    place = chip or _named(path, profile.gpu_name)
    refuse_too_fast(profile, place, path)
    return profile, place


_HEAD = 1 << 20  # bytes in which ncu's header must stand


def _named(path: Path, name: str) -> Gpu:
    if name.endswith(_FILE):
        raise unknown("gpu", name, gpu_ids())
    return named_in(path, name)


def _of_csv(content: bytes, path: Path, _: int) -> Columns:
    """Typed by the whole column, as ``files`` does it: one odd cell makes it text."""
    try:
        whole = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise KernelcastError(f"{path}: not readable as CSV: it is not UTF-8 text") from None
    names, delimiter = csv_header(whole.partition("\n")[0], path)
    columns: list[list[str | None]] = [[] for _ in names]
    try:
        for number, row in enumerate(csv.reader(io.StringIO(whole), delimiter=delimiter), start=1):
            if number == 1 or not row:
                continue
            if len(row) != len(names):
                raise KernelcastError(f"{path}: row {number} has {len(row)} cells, and the header {len(names)}")
            for column, cell in zip(columns, row, strict=True):
                column.append(cell or None)
    except csv.Error as error:
        raise KernelcastError(f"{path}: not readable as CSV: {error}") from None
    return {name: _typed(column) for name, column in zip(names, columns, strict=True)}


def _typed(cells: Sequence[str | None]) -> NDArray[Any]:
    found = np.full(len(cells), None, dtype=object)
    if {cell.lower() for cell in cells if cell is not None} <= {"true", "false"}:
        found[:] = [None if cell is None else cell.lower() == "true" for cell in cells]
        return found
    with contextlib.suppress(ValueError):
        found[:] = [None if cell is None else _number(cell) for cell in cells]
        return found
    found[:] = cells
    return found


def _number(cell: str) -> int | float:
    """A number, but no code with leading zeros such as 007."""
    if (cell[:1] == "0" and cell[1:2].isdigit()) or "_" in cell:
        raise ValueError
    return float(cell)


def _of_lines(content: bytes, path: Path, _: int) -> Columns:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode())
        except UnicodeDecodeError:
            raise KernelcastError(f"{path}: line {number} is not text") from None
        except (ValueError, RecursionError) as error:
            raise KernelcastError(f"{path}: line {number} is not JSON: {getattr(error, 'msg', error)}") from None
        if not isinstance(row, dict):
            raise KernelcastError(f"{path}: line {number} is no JSON object")
        rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: np.full(len(rows), None, dtype=object) for name in names}
    for at, row in enumerate(rows):
        for name, value in row.items():
            columns[name][at] = json.dumps(value) if isinstance(value, dict) else value
    return columns


def _of_parquet(content: bytes, path: Path, most_bytes: int) -> Columns:
    """DuckDB reads it from a file in memory, which has no name on any disk."""
    if not hasattr(os, "memfd_create"):
        raise KernelcastError(f"{path}: Parquet is read in memory on Linux alone; give the table as CSV or JSON lines")
    memory = os.memfd_create("table")
    try:
        with os.fdopen(os.dup(memory), "wb") as file:
            file.write(content)
        with opened_parquet(Path(f"/proc/self/fd/{memory}"), path, most_bytes) as table:
            return table.columns(*MORE)
    finally:
        os.close(memory)


_COLUMNS = {".csv": _of_csv, ".jsonl": _of_lines, ".parquet": _of_parquet}
