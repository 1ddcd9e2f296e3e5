"""A CSV of Nsight Compute (``ncu --csv``, pages details and raw) -> measured kernels.

Names and grids do not tell the sizes of a product: its inner axis is in neither. Such kernels are listed without a
prediction, with what their launch and counters say. A vectorised element-wise kernel of PyTorch is matched by its grid.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from kernelcast.advise.chrome_events import short_name
from kernelcast.advise.kernel_names import MATRIX_KINDS, read_name
from kernelcast.advise.measured import MeasuredCall, MeasuredKernel, Profile
from kernelcast.calls import Launch
from kernelcast.errors import KernelcastError
from kernelcast.networks.aten.table import Settings, pointwise

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
_MICROSECONDS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "µs": 1.0, "ms": 1e3, "msecond": 1e3, "s": 1e6,
                 "second": 1e6}  # fmt: skip
_BYTES = {"byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9}
# PyTorch 2.11: a CTA of 128 threads takes 1,024 elements (checked on grids of known sizes); before 2.6 it took 512
_VECTORISED = re.compile(r"vectorized_elementwise_kernel<\d+, .*?array<char ?\*, (\d+)")
_ELEMENTS_A_THREAD = 8


def is_ncu(path: Path) -> bool:
    """A CSV whose header is Nsight Compute's, after what ncu itself prints."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return any(_is_header(line) for line, _ in zip(file, range(200), strict=False))


def read_ncu(path: Path) -> Profile:
    header, rows = _table(path)
    kernels = list(_long(header, rows) if _METRIC in header else _wide(path, header, rows))
    if not kernels:
        raise KernelcastError(f"{path}: the CSV has no kernels under its header")
    without = [name for name, metrics, _ in kernels if _time_us(metrics) is None]
    if without:
        raise KernelcastError(
            f"{path}: no time of {short_name(without[0])[:60]}: profile with --metrics gpu__time_duration.sum, or with "
            "the section SpeedOfLight"
        )
    groups: dict[tuple[str, str, str], list[dict[str, tuple[str, str]]]] = {}
    for name, metrics, (grid, block) in kernels:
        groups.setdefault((name, grid, block), []).append(metrics)
    calls = tuple(_call(*key, members) for key, members in groups.items())
    return Profile(source="Nsight Compute", calls=calls, launches=len(kernels))


Metrics = dict[str, tuple[str, str]]  # name -> value, unit


def _is_header(line: str) -> bool:
    return f'"{_NAME}"' in line and (f'"{_GRID}"' in line or f'"{_METRIC}"' in line)


def _table(path: Path) -> tuple[list[str], list[list[str]]]:
    """The CSV part of the file: ncu prints lines of its own, and those of the program, around it."""
    lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    start = next((at for at, line in enumerate(lines) if _is_header(line)), None)
    if start is None:
        raise KernelcastError(f"{path}: no table of Nsight Compute: it needs a header with {_NAME!r} and {_GRID!r}")
    rows = list(csv.reader(line for line in lines[start:] if line.startswith('"')))
    header = rows[0]
    for wanted in (_NAME, _GRID, _BLOCK):
        if wanted not in header:
            raise KernelcastError(f"{path}: the table of Nsight Compute has no column {wanted!r}")
    return header, rows[1:]


def _long(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[tuple[str, Metrics, tuple[str, str]]]:
    """One row a metric (the details page): rows of one ID are one kernel."""
    at = {name: header.index(name) for name in (_NAME, _GRID, _BLOCK, _METRIC, _UNIT, _VALUE)}
    key = header.index("ID") if "ID" in header else at[_NAME]
    found: dict[str, tuple[str, Metrics, tuple[str, str]]] = {}
    for row in rows:
        if len(row) <= max(at.values()):
            continue  # a rule's text has no metric
        one = found.setdefault(row[key], (row[at[_NAME]], {}, (row[at[_GRID]], row[at[_BLOCK]])))
        if row[at[_METRIC]]:
            one[1].setdefault(row[at[_METRIC]], (row[at[_VALUE]], row[at[_UNIT]]))
    yield from found.values()


def _wide(
    path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]
) -> Iterator[tuple[str, Metrics, tuple[str, str]]]:
    """One row a kernel, one column a metric (the raw page); the first row has the units."""
    name, grid, block = (header.index(word) for word in (_NAME, _GRID, _BLOCK))
    if not rows:
        raise KernelcastError(f"{path}: the CSV has no kernels under its header")
    units = rows[0] if not rows[0][name] else [""] * len(header)
    for row in rows[1:] if not rows[0][name] else rows:
        if len(row) == len(header):
            metrics = {word: (value, unit) for word, value, unit in zip(header, row, units, strict=False)}
            yield row[name], metrics, (row[grid], row[block])


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _metric(metrics: Metrics, names: Sequence[str], units: dict[str, float] | None = None) -> float | None:
    for name in names:
        if name in metrics:
            text, unit = metrics[name]
            value = _number(text)
            if value is not None:
                return value * (units or {}).get(unit.split("/")[0].lower(), 1.0)
    return None


def _time_us(metrics: Metrics) -> float | None:
    return _metric(metrics, _TIME, _MICROSECONDS)


def _sizes(text: str) -> tuple[int, ...]:
    """'(16384, 1, 1)' -> (16384, 1, 1)"""
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _call(name: str, grid: str, block: str, members: Sequence[Metrics]) -> MeasuredCall:
    """Launches of one kernel with one grid: the mean of each metric."""

    def mean(names: Sequence[str], units: dict[str, float] | None = None) -> float | None:
        values = [value for m in members if (value := _metric(m, names, units)) is not None]
        return math.fsum(values) / len(values) if values else None

    counters = {key: mean(names, _BYTES) for key, names in _COUNTERS.items()}
    shares = {
        key: value / 100 if key != "dram_bytes" else value for key, value in counters.items() if value is not None
    }
    kernel = MeasuredKernel(
        name=short_name(name),
        time_us=mean(_TIME, _MICROSECONDS) or 0.0,
        grid=_sizes(grid),
        block=_sizes(block),
        registers=int(mean(_REGISTERS) or 0),
        smem_bytes=int(mean(_SMEM, _BYTES) or 0),
        counters=shares,
    )
    calls, why = _kernel_call(name, kernel)
    return MeasuredCall(kernel.name, "", (kernel,), calls, why, count=len(members))


def _kernel_call(name: str, kernel: MeasuredKernel) -> tuple[tuple[Launch, ...], str]:
    said = read_name(name)
    found = _VECTORISED.search(name)
    if found and said.dtype in ("fp32", "bf16", "fp16"):
        elements, tensors = kernel.ctas * kernel.threads * _ELEMENTS_A_THREAD, int(found[1])
        each = float(elements * (4 if said.dtype == "fp32" else 2))
        call = pointwise("element-wise", Settings(), elements, said.dtype, read_bytes=each * (tensors - 1),
                         written_bytes=each)  # fmt: skip
        return (call,), ""
    if said.kind not in MATRIX_KINDS:
        return (), "its sizes are not in its name and grid"
    if said.tile_m and said.tile_n and not said.persistent:
        results = kernel.ctas * said.tile_m * said.tile_n
        return (), f"m x n is at most {results:,} by its tiles and grid; k is in neither"
    return (), "its sizes are not in its name and grid: k is in neither"
