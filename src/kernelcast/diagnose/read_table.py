"""A table of kernel calls with a measured time (as `kernelcast collect` writes it, or any made by hand)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from kernelcast.diagnose.chrome_events import short_name
from kernelcast.diagnose.measured import MeasuredCall, MeasuredKernel, Profile, sizes_in
from kernelcast.errors import KernelcastError
from kernelcast.files import open_table
from kernelcast.forecast.calls import ROTATIONS, Call, Launch
from kernelcast.forecast.table import BadRows, plain
from kernelcast.ops import REGISTRY, parameters_of

TIMES = ("measured_us", "latency_us")
MORE = (*TIMES, *ROTATIONS, "kernel_name", "grid", "block", "registers", "smem_bytes", "count", "status")


def read_table(path: Path) -> Profile:
    """One measured call a row. A row that failed when it was measured (no time) is left out."""
    with open_table(path) as table:
        return table_profile(table.columns(*MORE), path)


def table_profile(columns: Mapping[str, NDArray[Any]], path: Path) -> Profile:
    """The same of a table's columns."""
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
        elif not 0 < (_number(cells, time) or 0.0) < math.inf:
            bad.add([row], f"{time} must be a time above 0, not {columns[time][row]!r}")
        else:
            calls.append(_call(cells, time))
    if bad.found:
        raise KernelcastError(f"{path}: {bad.text()}")
    if not calls:
        raise KernelcastError(f"{path}: no row has a measured time in {time!r}")
    return Profile("table", tuple(calls), launches=sum(call.count for call in calls), gpu_name=_gpu(path, columns))


def _gpu(path: Path, columns: Mapping[str, NDArray[Any]]) -> str:
    names = sorted({str(name) for value in columns.get("gpu", ()) if (name := plain(value)) is not None})
    if len(names) > 1:
        raise KernelcastError(f"{path}: measured on several GPUs ({', '.join(names[:4])}); diagnose one at a time")
    return names[0] if names else ""


def _call(cells: Mapping[str, Any], time: str) -> MeasuredCall:
    """``cells``: of one row, those that are not empty."""
    op = str(cells.get("op"))
    names = parameters_of(REGISTRY[op]) if op in REGISTRY else ()
    kernel = MeasuredKernel(
        name=short_name(str(cells.get("kernel_name", ""))),
        time_us=_number(cells, time) or 0.0,
        grid=sizes_in(str(cells.get("grid", ""))),
        block=sizes_in(str(cells.get("block", ""))),
        registers=int(_number(cells, "registers") or 0),
        smem_bytes=int(_number(cells, "smem_bytes") or 0),
    )
    call = Call.of(op, {name: cells.get(name) for name in names}, *(_number(cells, name) for name in ROTATIONS))
    count = int(_number(cells, "count") or 1)
    return MeasuredCall(name=op, shapes="", kernels=(kernel,), calls=(Launch("", call),), count=count)


def _number(cells: Mapping[str, Any], name: str) -> float | None:
    """None where the cell is empty or no number."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return float(cells[name])
    return None
