"""A table of kernel calls with a measured time (as `kernelcast collect` writes it, or any made by hand)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.advise.chrome_events import short_name
from kernelcast.advise.measured import MeasuredCall, MeasuredKernel, Profile
from kernelcast.calls import Call, Launch
from kernelcast.calls.table import BadRows
from kernelcast.errors import KernelcastError
from kernelcast.files import open_table
from kernelcast.kernels import REGISTRY, parameters_of

TIMES = ("measured_us", "latency_us")
_LAUNCH = ("kernel_name", "grid", "block", "registers", "smem_bytes")
_ROTATIONS = ("rotation", "input_rotation")
_MORE = (*TIMES, *_LAUNCH, *_ROTATIONS, "count", "status")


def read_table(path: Path) -> Profile:
    """One measured call a row. A row that failed when it was measured (no time) is left out."""
    with open_table(path) as table:
        columns = table.columns(*_MORE)
    if not len(columns["op"]):
        raise KernelcastError(f"{path}: the table has no rows")
    time = next((name for name in TIMES if name in columns), None)
    if time is None:
        raise KernelcastError(f"{path}: no measured times: the table needs a column {' or '.join(TIMES)}")
    bad = BadRows()
    calls = [_call(columns, row, time, bad) for row in range(len(columns["op"]))]
    if bad.found:
        raise KernelcastError(f"{path}: {bad.text()}")
    measured = tuple(call for call in calls if call is not None)
    if not measured:
        raise KernelcastError(f"{path}: no row has a measured time in {time!r}")
    return Profile("table", measured, launches=sum(call.count for call in measured), gpu_name=_gpu(path, columns))


def _gpu(path: Path, columns: Mapping[str, NDArray[Any]]) -> str:
    if "gpu" not in columns:
        return ""
    names = sorted({str(value) for value in columns["gpu"] if not _empty(value)})
    if len(names) > 1:
        raise KernelcastError(f"{path}: measured on several GPUs ({', '.join(names[:4])}); diagnose one at a time")
    return names[0] if names else ""


def _call(columns: Mapping[str, NDArray[Any]], row: int, time: str, bad: BadRows) -> MeasuredCall | None:
    if _empty(columns[time][row]):
        if _cell(columns, "status", row) in (None, "ok"):
            bad.add([row], f"{time} is empty")
        return None
    measured_us = _number(columns, time, row)
    if measured_us is None or not 0 < measured_us < float("inf"):
        bad.add([row], f"{time} must be a time above 0, not {columns[time][row]!r}")
        return None
    op = str(columns["op"][row])
    names = parameters_of(REGISTRY[op]) if op in REGISTRY else ()
    given = {name: value for name in names if (value := _cell(columns, name, row)) is not None}
    count = _number(columns, "count", row)
    kernel = MeasuredKernel(
        name=short_name(str(_cell(columns, "kernel_name", row) or "")),
        time_us=measured_us,
        grid=_sizes(_cell(columns, "grid", row)),
        block=_sizes(_cell(columns, "block", row)),
        registers=int(_number(columns, "registers", row) or 0),
        smem_bytes=int(_number(columns, "smem_bytes", row) or 0),
    )
    call = Call.of(op, given, _number(columns, "rotation", row), _number(columns, "input_rotation", row))
    return MeasuredCall(name=op, shapes="", kernels=(kernel,), calls=(Launch("", call),), count=int(count or 1))


def _empty(value: Any) -> bool:
    return value is None or value is np.ma.masked or value != value or (isinstance(value, str) and not value.strip())


def _cell(columns: Mapping[str, NDArray[Any]], name: str, row: int) -> Any:
    """A plain value, None where there is none; whole numbers as such."""
    if name not in columns or _empty(columns[name][row]):
        return None
    value = columns[name][row]
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return tuple(value) if isinstance(value, (list, np.ndarray)) else value


def _number(columns: Mapping[str, NDArray[Any]], name: str, row: int) -> float | None:
    value = _cell(columns, name, row)
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None


def _sizes(text: Any) -> tuple[int, ...]:
    """'2x66x1', '(2, 66, 1)'"""
    return tuple(int(number) for number in re.findall(r"\d+", str(text))) if text is not None else ()
