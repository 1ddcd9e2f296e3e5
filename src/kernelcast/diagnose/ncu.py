"""A CSV of Nsight Compute (``ncu --csv``, pages details and raw) -> measured kernels.

The sizes of a product cannot be read from names and grids: its inner axis is in neither. Such kernels are listed
without a prediction, with what their launch and counters say. A vectorised element-wise kernel of PyTorch is matched by
its grid.
"""

from __future__ import annotations

import contextlib
import csv
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kernelcast.diagnose.chrome_events import short_name
from kernelcast.diagnose.kernel_names import MATRIX_CATEGORIES, parse_kernel_name
from kernelcast.diagnose.measured import MeasuredCall, MeasuredKernel, Profile, parse_sizes
from kernelcast.errors import KernelcastError
from kernelcast.forecast.calls import Launch
from kernelcast.tracing.aten.table import pointwise

_NAME, _GRID, _BLOCK = "Kernel Name", "Grid Size", "Block Size"
_METRIC, _UNIT, _VALUE = "Metric Name", "Metric Unit", "Metric Value"
# the names of a metric on the command line and on the details page
_TIME = ("gpu__time_duration.sum", "Duration", "gpu__time_duration.avg")
_REGISTERS = ("launch__registers_per_thread", "Registers Per Thread")
_SMEM = ("launch__shared_mem_per_block", "Dynamic Shared Memory Per Block", "launch__shared_mem_per_block_dynamic")
_COUNTERS = {
    "dram_bytes": ("dram__bytes.sum",),
    "l2_hit_share": ("lts__t_sector_hit_rate.pct", "L2 Hit Rate"),
    "occupancy": ("sm__warps_active.avg.pct_of_peak_sustained_active", "Achieved Occupancy"),
}
# microseconds and bytes in a unit; all others (%, register/thread) as they are
_UNITS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "µs": 1.0, "ms": 1e3, "msecond": 1e3, "s": 1e6,
          "second": 1e6, "byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9}  # fmt: skip
# PyTorch 2.11: a CTA of 128 threads takes 1,024 elements (checked on grids of known sizes); before 2.6 it took 512
_VECTORISED = re.compile(r"vectorized_elementwise_kernel<\d+, .*?array<char ?\*, (\d+)")
_ELEMENTS_A_THREAD = 8


def has_ncu_header(text: str) -> bool:
    """Whether one of the first lines is a header of Nsight Compute, after what ncu itself prints."""
    return any(_is_header(line) for line in text.splitlines()[:200])


def ncu_profile(text: str, path: Path) -> Profile:
    """The kernels in what ncu printed."""
    header, rows = _table(text, path)
    groups: dict[KernelLaunch, list[Metrics]] = {}
    for launched, metrics in (_from_details if _METRIC in header else _from_raw)(header, rows):
        if _metric(metrics, _TIME) is None:
            raise KernelcastError(
                f"{path}: no time of {short_name(launched[0])[:60]}: profile with --metrics gpu__time_duration.sum, or "
                "with the section SpeedOfLight"
            )
        groups.setdefault(launched, []).append(metrics)
    if not groups:
        raise KernelcastError(f"{path}: the CSV has no kernels under its header")
    calls = tuple(_call(*launched, members) for launched, members in groups.items())
    return Profile(source="Nsight Compute", calls=calls, launches=sum(call.count for call in calls))


Metrics = dict[str, tuple[str, str]]  # name -> value, unit
KernelLaunch = tuple[str, str, str]  # a kernel's name, its grid and its block


def _is_header(line: str) -> bool:
    return f'"{_NAME}"' in line and (f'"{_GRID}"' in line or f'"{_METRIC}"' in line)


def _table(text: str, path: Path) -> tuple[list[str], list[list[str]]]:
    """The CSV part of the file: ncu prints other lines, and the program's, around it."""
    lines = text.splitlines()
    start = next((at for at, line in enumerate(lines) if _is_header(line)), None)
    if start is None:
        raise KernelcastError(f"{path}: no table of Nsight Compute: it needs a header with {_NAME!r} and {_GRID!r}")
    rows = list(csv.reader(line for line in lines[start:] if line.startswith('"')))
    header = rows[0]
    for wanted in (_NAME, _GRID, _BLOCK):
        if wanted not in header:
            raise KernelcastError(f"{path}: the table of Nsight Compute has no column {wanted!r}")
    return header, rows[1:]


def _from_details(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[tuple[KernelLaunch, Metrics]]:
    """One row a metric (the details page): rows of one ID are one kernel."""
    at = [header.index(name) for name in (_NAME, _GRID, _BLOCK, _METRIC, _UNIT, _VALUE)]
    key = header.index("ID") if "ID" in header else at[0]
    kernels: dict[str, tuple[KernelLaunch, Metrics]] = {}
    for row in rows:
        if len(row) <= max(at):
            continue  # a rule's text has no metric
        name, grid, block, metric, unit, value = (row[column] for column in at)
        _, metrics = kernels.setdefault(row[key], ((name, grid, block), {}))
        if metric:
            metrics.setdefault(metric, (value, unit))
    yield from kernels.values()


def _from_raw(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[tuple[KernelLaunch, Metrics]]:
    """One row a kernel, one column a metric (the raw page); the first row has the units."""
    name, grid, block = (header.index(column) for column in (_NAME, _GRID, _BLOCK))
    units: Sequence[str] = [""] * len(header)
    for at, row in enumerate(rows):
        if at == 0 and not row[name]:
            units = row
        elif len(row) == len(header):
            metrics = {metric: (value, unit) for metric, value, unit in zip(header, row, units, strict=False)}
            yield (row[name], row[grid], row[block]), metrics


def _metric(metrics: Metrics, names: Sequence[str]) -> float | None:
    """The first of these metrics that is a number."""
    for name in names:
        text, unit = metrics.get(name, ("", ""))
        with contextlib.suppress(ValueError):
            return float(text.replace(",", "")) * _UNITS.get(unit.split("/")[0].lower(), 1.0)
    return None


def _call(name: str, grid: str, block: str, members: Sequence[Metrics]) -> MeasuredCall:
    """Launches of one kernel with one grid: the mean of each metric."""

    def mean(names: Sequence[str]) -> float | None:
        values = [value for m in members if (value := _metric(m, names)) is not None]
        return math.fsum(values) / len(values) if values else None

    counted = {key: value for key, names in _COUNTERS.items() if (value := mean(names)) is not None}
    kernel = MeasuredKernel(
        name=short_name(name),
        time_us=mean(_TIME) or 0.0,
        grid=parse_sizes(grid),
        block=parse_sizes(block),
        registers=int(mean(_REGISTERS) or 0),
        smem_bytes=int(mean(_SMEM) or 0),
        counters={key: value if key == "dram_bytes" else value / 100 for key, value in counted.items()},
    )
    calls, why = _match(name, kernel)
    return MeasuredCall(kernel.name, "", (kernel,), calls, why, count=len(members))


def _match(name: str, kernel: MeasuredKernel) -> tuple[tuple[Launch, ...], str]:
    parsed = parse_kernel_name(name)
    match = _VECTORISED.search(name)
    if match and parsed.dtype in ("fp32", "bf16", "fp16"):
        elements, tensors = kernel.ctas * kernel.threads * _ELEMENTS_A_THREAD, int(match[1])
        each = float(elements * (4 if parsed.dtype == "fp32" else 2))
        call = pointwise("element-wise", elements, parsed.dtype, read_bytes=each * (tensors - 1),
                         written_bytes=each)  # fmt: skip
        return (call,), ""
    if parsed.category not in MATRIX_CATEGORIES:
        return (), "its sizes are not in its name and grid"
    if parsed.tile_m and parsed.tile_n and not parsed.persistent:
        results = kernel.ctas * parsed.tile_m * parsed.tile_n
        return (), f"m x n is at most {results:,} by its tiles and grid; k is in neither"
    return (), "its sizes are not in its name and grid: k is in neither"
