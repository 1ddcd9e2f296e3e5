"""Measured calls of a file, or of its bytes: a torch.profiler trace, a CSV of Nsight Compute, or a table of calls."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast import hardware
from kernelcast.diagnose.chrome_events import parse_trace, short_name
from kernelcast.diagnose.measured import MeasuredCall, MeasuredKernel, Profile, parse_sizes
from kernelcast.diagnose.ncu import has_ncu_header, ncu_profile
from kernelcast.diagnose.profiler_trace import gpu_name, profile_of
from kernelcast.errors import KernelcastError
from kernelcast.files import ENDINGS, csv_header, open_table, opened_parquet
from kernelcast.forecast.calls import ROTATIONS, Call, Launch, columns_of
from kernelcast.forecast.predict_table import add_too_fast
from kernelcast.forecast.table import BadRows, plain
from kernelcast.hardware import Gpu
from kernelcast.ops import REGISTRY, parameters_of

Columns = Mapping[str, NDArray[Any]]
TIMES = ("measured_us", "latency_us")
_MORE = (*TIMES, *ROTATIONS, "kernel_name", "grid", "block", "registers", "smem_bytes", "count", "status")
_TRACES = (".json", ".gz")
_GPU_FILE = ".toml"  # a value with this ending names a file to the library
_HEAD_BYTES = 1 << 20  # in which ncu's header must be


@dataclass(frozen=True)
class FileLimits:
    """Of a file that somebody sent; a file of this machine has none."""

    unpacked_bytes: int
    rows: int  # of a table
    events: int  # of a trace; lines of a CSV of Nsight Compute, which has many a kernel

    def check_rows(self, path: Path, rows: int) -> None:
        if rows > self.rows:
            raise KernelcastError(f"{path}: a table may have {self.rows:,} rows here, not {rows:,}")


def read_measured(path: Path, gpu: Gpu | None = None) -> tuple[Profile, Gpu]:
    """The measured calls and the GPU: ``gpu``, else the GPU that the file names."""
    if not path.exists():
        raise KernelcastError(f"no file {path}")
    if not path.is_file():
        raise KernelcastError(f"{path} is not a file")
    if path.stat().st_size == 0:
        raise KernelcastError(f"{path} is empty")

    def columns() -> Columns:
        with open_table(path) as table:
            return table.columns(*_MORE)

    return _read(path, path.read_bytes, columns, gpu, None)


def read_bytes(content: bytes, name: str, gpu: Gpu | None, limits: FileLimits) -> tuple[Profile, Gpu]:
    """The same from memory: no file is opened, whatever the content names. ``name``: of the file."""
    path = Path(Path(name.replace("\\", "/")).name)

    def parsed() -> Columns:
        columns = _PARSERS[path.suffix.lower()](content, path, limits)
        if "op" not in columns:
            raise KernelcastError(f"{path}: a table of calls needs a column 'op'; this has {', '.join(columns)[:500]}")
        return columns

    return _read(path, lambda: content, parsed, gpu, limits)


def _read(
    path: Path, content: Callable[[], bytes], columns: Callable[[], Columns], gpu: Gpu | None, limits: FileLimits | None
) -> tuple[Profile, Gpu]:
    """Read a file by its suffix and header."""
    ending = path.suffix.lower()
    if ending in _TRACES:
        trace = parse_trace(content(), path, *((limits.unpacked_bytes, limits.events) if limits else ()))
        gpu = gpu or _named_gpu(path, gpu_name(trace), limits)
        return _trace_profile(trace, gpu, path), gpu
    if ending not in ENDINGS:
        formats = "a torch.profiler trace (.json, .json.gz), a CSV of ncu, or a table"
        raise KernelcastError(f"{path}: unknown format; it should be {formats} ({', '.join(ENDINGS)})")
    if ending == ".csv" and has_ncu_header(content()[:_HEAD_BYTES].decode(errors="replace")):
        if limits and (lines := content().count(b"\n")) > limits.events:
            raise KernelcastError(f"{path}: a CSV of ncu may have {limits.events:,} lines here, not {lines:,}")
        text = content().decode("utf-8-sig", errors="replace")
        return ncu_profile(text, path), gpu or _named_gpu(path, "", limits)
    profile = table_profile(columns(), path)
    if limits:
        _refuse_files(profile, path)
    gpu = gpu or _named_gpu(path, profile.gpu_name, limits)
    _refuse_too_fast(profile, gpu, path)
    return profile, gpu


def _named_gpu(path: Path, name: str, limits: FileLimits | None) -> Gpu:
    """The GPU that a file names; content that was sent (``limits``) may not name a GPU's file."""
    if not name:
        raise KernelcastError(f"which GPU? {path} does not say; give `gpu`, as in h200_sxm")
    if limits and name.endswith(_GPU_FILE):
        raise hardware.unknown_gpu(name)
    return hardware.gpu(name)


def _refuse_files(profile: Profile, path: Path) -> None:
    """Parameters that the library would open a file for."""
    for measured in profile.calls:
        for name, value in measured.calls[0].call.parameters:
            if isinstance(value, str) and value.endswith(_GPU_FILE):
                raise KernelcastError(f"{path}: {name} {value!r} is a file, and files are not read here")


def _trace_profile(trace: dict[str, Any], gpu: Gpu, path: Path) -> Profile:
    """The measured calls of a trace; what is wrong with it in one line."""
    try:
        return profile_of(trace, gpu)
    except KernelcastError as error:
        raise KernelcastError(f"{path}: {error}") from None
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError):
        raise KernelcastError(
            f"{path}: an event of the trace has no ts, dur or name, or they are not numbers"
        ) from None


def _refuse_too_fast(profile: Profile, gpu: Gpu, path: Path) -> None:
    """Rows of a table with times that this GPU cannot reach."""
    bad = BadRows()
    times_us = np.array([measured.time_us for measured in profile.calls])
    add_too_fast(columns_of([measured.calls[0].call for measured in profile.calls]), times_us, gpu, bad)
    if bad.messages:
        raise KernelcastError(f"{path}: {bad.text()}")


# ---- tables of kernel calls with a measured time, as `kernelcast collect` writes them, or made by hand ----


def table_profile(columns: Columns, path: Path) -> Profile:
    """One measured call a row. A row that failed when it was measured (no time) is left out."""
    if not len(columns["op"]):
        raise KernelcastError(f"{path}: the table has no rows")
    time = next((name for name in TIMES if name in columns), None)
    if time is None:
        raise KernelcastError(f"{path}: no measured times: the table needs a column {' or '.join(TIMES)}")
    bad, calls = BadRows(), []
    for row in range(len(columns["op"])):
        cells = {name: cell for name, column in columns.items() if (cell := plain(column[row])) is not None}
        if time not in cells:
            if cells.get("status", "ok") == "ok":
                bad.add([row], f"{time} is empty")
        elif not 0 < (_float(cells, time) or 0.0) < math.inf:
            bad.add([row], f"{time} must be a time above 0, not {columns[time][row]!r}")
        else:
            calls.append(_call(cells, time))
    if bad.messages:
        raise KernelcastError(f"{path}: {bad.text()}")
    if not calls:
        raise KernelcastError(f"{path}: no row has a measured time in {time!r}")
    gpus = sorted({str(name) for value in columns.get("gpu", ()) if (name := plain(value)) is not None})
    if len(gpus) > 1:
        raise KernelcastError(f"{path}: measured on several GPUs ({', '.join(gpus[:4])}); diagnose one at a time")
    return Profile("table", tuple(calls), launches=sum(call.count for call in calls), gpu_name="".join(gpus))


def _call(cells: Mapping[str, Any], time: str) -> MeasuredCall:
    """``cells``: of one row, those that are not empty."""
    op = str(cells.get("op"))
    names = parameters_of(REGISTRY[op]) if op in REGISTRY else ()
    kernel = MeasuredKernel(
        name=short_name(str(cells.get("kernel_name", ""))),
        time_us=_float(cells, time) or 0.0,
        grid=parse_sizes(str(cells.get("grid", ""))),
        block=parse_sizes(str(cells.get("block", ""))),
        registers=int(_float(cells, "registers") or 0),
        smem_bytes=int(_float(cells, "smem_bytes") or 0),
    )
    call = Call.of(op, {name: cells.get(name) for name in names}, *(_float(cells, name) for name in ROTATIONS))
    count = int(_float(cells, "count") or 1)
    return MeasuredCall(name=op, shapes="", kernels=(kernel,), calls=(Launch("", call),), count=count)


def _float(cells: Mapping[str, Any], name: str) -> float | None:
    """None where the cell is empty or no number."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return float(cells[name])
    return None


# ---- tables from memory, where the library may open no file ----


def _csv_columns(content: bytes, path: Path, limits: FileLimits) -> Columns:
    """Typed by the whole column, as ``files`` does it: one odd cell makes it text."""
    limits.check_rows(path, content.count(b"\n") - 1)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise KernelcastError(f"{path}: not readable as CSV: it is not UTF-8 text") from None
    names, delimiter = csv_header(text.partition("\n")[0], path)
    columns: list[list[str | None]] = [[] for _ in names]
    try:
        for number, row in enumerate(csv.reader(io.StringIO(text), delimiter=delimiter), start=1):
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
    column = np.full(len(cells), None, dtype=object)
    if {cell.lower() for cell in cells if cell is not None} <= {"true", "false"}:
        column[:] = [None if cell is None else cell.lower() == "true" for cell in cells]
        return column
    with contextlib.suppress(ValueError):
        column[:] = [None if cell is None else _number(cell) for cell in cells]
        return column
    column[:] = cells
    return column


def _number(cell: str) -> float:
    """A number, but no code with leading zeros such as 007."""
    if (cell[:1] == "0" and cell[1:2].isdigit()) or "_" in cell:
        raise ValueError
    return float(cell)


def _jsonl_columns(content: bytes, path: Path, limits: FileLimits) -> Columns:
    limits.check_rows(path, content.count(b"\n"))
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


def _parquet_columns(content: bytes, path: Path, limits: FileLimits) -> Columns:
    """DuckDB reads it from a file in memory, which has no name on any disk."""
    if not hasattr(os, "memfd_create"):
        raise KernelcastError(f"{path}: Parquet is read in memory on Linux alone; give the table as CSV or JSON lines")
    memory = os.memfd_create("table")
    try:
        with os.fdopen(os.dup(memory), "wb") as file:
            file.write(content)
        with opened_parquet(Path(f"/proc/self/fd/{memory}"), path, limits.unpacked_bytes, limits.rows) as table:
            return table.columns(*_MORE)
    finally:
        os.close(memory)


_PARSERS = {".csv": _csv_columns, ".jsonl": _jsonl_columns, ".parquet": _parquet_columns}
