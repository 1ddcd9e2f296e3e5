"""A kernel call, as text and as JSON; the first calls of a table as text."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from kernelcast._version import __version__
from kernelcast.app.report.json import attributes
from kernelcast.app.report.text import (
    WIDTH,
    bar,
    binary_bytes_text,
    console,
    dense_table,
    digits,
    interval_texts,
    joules_text,
    micros,
    percent,
    plain_table,
    rate_text,
    show,
    time_text,
    title,
    truncate,
    value_text,
)
from kernelcast.energy.power import Energy
from kernelcast.forecast.conditions import DEFAULT, Conditions
from kernelcast.forecast.evidence import EvidenceMatch
from kernelcast.forecast.predict import LaunchedKernel, Prediction
from kernelcast.forecast.table import plain
from kernelcast.hardware import Gpu, origin_of
from kernelcast.ops import REGISTRY, Kernel, kernel_class, parameters_of
from kernelcast.results import SUPPORT
from kernelcast.schedule.breakdown import short_name

CALL_WIDTH = 42  # of a row of a table of calls: what 100 columns leave
CACHE = {
    "model": "weights come from DRAM, activations from the kernel before, as in a model of many layers",
    "cold": "weights and activations come from DRAM",
    "warm": "the same call just ran, and L2 kept what it could",
}


def print_prediction(prediction: Prediction, gpu: Gpu, conditions: Conditions, drawn: Energy | None = None) -> None:
    """One call: the answer first, then what limits it, how its tasks fall, and the evidence."""
    show(title(prediction.op, f"  {_given(prediction)}", gpu.name, f" ({gpu.id})") + changes_text(gpu), "")
    show(_answer(prediction, conditions, drawn), "", _pipelines(prediction), "", _kernels(prediction.kernels), "")
    show(_rests_on(prediction, gpu, conditions))


def show_prediction(prediction: Prediction) -> None:
    """The same of a prediction alone, without its conditions."""
    show(title(prediction.op, f"  {_given(prediction)}", prediction.gpu))
    show(_answer(prediction, DEFAULT, None), _pipelines(prediction), _rests_on(prediction))


def _given(prediction: Prediction) -> str:
    return "  ".join(f"{name}={value_text(value)}" for name, value in prediction.parameters.items())


def _answer(prediction: Prediction, conditions: Conditions, drawn: Energy | None) -> Table:
    grid = Table.grid(Column(style="bold"), Column(justify="right", no_wrap=True), Column(style="dim"), padding=(0, 2))
    time, interval = interval_texts(prediction.time_s, prediction.low_s, prediction.high_s)
    grid.add_row("  predicted", Text(time, "bold green"), f"interval {interval.replace(' to ', ' – ')}")
    grid.add_row("  ceiling", time_text(prediction.ceiling_s), "what the best kernels reach for such a call")
    binds = "binds, of the limits that are kept" if conditions.without else _none_faster(prediction.on)
    grid.add_row("  bound", time_text(prediction.bound_s), f"{prediction.bound_by} {binds}")
    grid.add_row("  efficiency", percent(prediction.efficiency), "bound / predicted")
    dram_bytes = sum(phase.dram_bytes for phase in prediction.kernels)
    if dram_bytes > 0:
        rate = rate_text(dram_bytes / prediction.time_s, "B/s")
        grid.add_row("  DRAM", rate, f"{binary_bytes_text(dram_bytes)} in the predicted time")
    if drawn is not None:
        low, high = (joules_text(value) for value in (drawn.joules.low, drawn.joules.high))
        each = time_text(drawn.joules.value / drawn.power_w)
        note = f"interval {low} – {high}, repeated for seconds: {each} a call then"
        grid.add_row("  energy", joules_text(drawn.joules.value), note)
        grid.add_row("  power", f"{drawn.power_w:,.0f} W", _power_text(drawn))
    return grid


def _none_faster(gpu: Gpu) -> str:
    """A card that exceeds its advertised boost clock is bound by the highest that its driver lists."""
    clock = f" at {gpu.clock_max_hz / 1e9:.2f} GHz, its highest clock" if gpu.clock_max_hz else ""
    return f"binds: no kernel can be faster{clock}"


def _power_text(drawn: Energy) -> str:
    limit = f"of {drawn.limit_w:,.0f} W"
    clock = f", which leaves {percent(drawn.clock)} of the clock" if drawn.clock < 1 else ""
    return f"{limit}{clock}; power model {drawn.support}"


def _pipelines(prediction: Prediction) -> Table:
    numbers = ("limit µs", "busiest SM µs", "of bound")
    table = plain_table("pipeline", *numbers, "", right=numbers)
    busiest = busiest_limits(prediction.kernels)
    for name, limit_s in sorted(prediction.limits.items(), key=lambda item: -item[1]):
        share = limit_s / prediction.bound_s if prediction.bound_s else 0.0
        style = "bold" if name == prediction.bound_by else ""
        cells = (name, micros(limit_s), micros(busiest.get(name, limit_s)), percent(share))
        table.add_row(*(Text(cell, style) for cell in cells), Text(bar(share), "green" if style else "blue"))
    return table


def busiest_limits(phases: Sequence[LaunchedKernel]) -> dict[str, float]:
    """What the busiest SM needs on each pipeline, the phases added up."""
    total: dict[str, float] = {}
    for phase in phases:
        for name, limit_s in phase.busiest_sm.items():
            total[name] = total.get(name, 0.0) + limit_s
    return total


def _kernels(phases: Sequence[LaunchedKernel]) -> Table:
    """How the tasks of each kernel fall onto the SMs: a line a kernel, or a column where that is too wide."""
    rows = [_phase_cells(index, phase) for index, phase in enumerate(phases, start=1)]
    again = any(phase.launches != 1 for phase in phases)
    names = [name for name in (rows[0] if rows else ()) if name != "launches" or again]
    if console().width < WIDTH:
        heads = [row[" #"] for row in rows]
        lines = ((name, *(row[name] for row in rows)) for name in names[1:])
        table = plain_table("kernel", *heads, right=heads, rows=lines)
        for column in table.columns[1:]:
            column.no_wrap = False
        return table
    numbers = [name for name in names if name not in (" #", "tile", "by")]
    table = plain_table(*names, right=numbers, rows=([row[name] for name in names] for row in rows))
    table.padding = (0, 1, 0, 0)
    return table


def _phase_cells(index: int, phase: LaunchedKernel) -> dict[str, str]:
    by = max(phase.limits, key=lambda name: phase.limits[name], default="")
    return {
        " #": f" {index}",
        "tile": tile_text(phase.tile),
        "bound µs": micros(phase.limits.get(by, 0.0)),
        "by": by,
        "tasks": f"{phase.tasks:,.0f}",
        "CTAs/SM": short_count(phase.ctas_per_sm),
        "waves": digits(phase.waves, 3),
        "tail": percent(phase.tail),
        "padding": percent(phase.padding),
        "DRAM": binary_bytes_text(phase.dram_bytes),
        "in L2": percent(phase.l2_resident),
        "launches": f"{phase.launches:,.0f}",
    }


def short_count(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else digits(value, 3)


def tile_text(tile: Mapping[str, float]) -> str:
    """'128×256×64, split_k 2': sizes joined, then the rest by name."""
    lengths = ("tile_", "block_")
    sizes = [short_count(value) for name, value in tile.items() if name.startswith(lengths)]
    rest = [f"{name} {short_count(value)}" for name, value in tile.items() if not name.startswith(lengths)]
    return ", ".join((["×".join(sizes)] if sizes else []) + rest) or "—"


def _rests_on(prediction: Prediction, gpu: Gpu | None = None, conditions: Conditions | None = None) -> Table:
    """What is not known is left out."""
    grid = Table.grid(Column(style="bold"), Column(), padding=(0, 2))
    grid.add_row("  support", f"{prediction.support} ({SUPPORT[prediction.support]})")
    grid.add_row("  runs", prediction.runs.text)
    grid.add_row("  evidence", evidence_text(prediction.match))
    if gpu is not None and gpu.unit_of:
        grid.add_row(
            "  unit", f"of {gpu.unit_of}: its forecast, times what physics says of the numbers that were measured"
        )
    elif gpu is not None and gpu.base and origin_of(gpu):
        grid.add_row("  base", f"{gpu.base}: its forecast, times what physics says of the numbers that differ")
    if prediction.match.filled_in:
        grid.add_row("  answered as", prediction.match.filled_in)
    if prediction.match.stand_in:
        grid.add_row("  stand-in", f"{prediction.op} {prediction.match.stand_in}")
    grid.add_row("  predictor", f"{prediction.predictor}, kernelcast {__version__}")
    if gpu is not None and conditions is not None:
        _add_conditions(grid, prediction, gpu, conditions)
    return grid


def _add_conditions(grid: Table, prediction: Prediction, gpu: Gpu, conditions: Conditions) -> None:
    cache = cache_name(conditions)
    calibration = calibration_fields(conditions.calibration, prediction.op)
    if calibration is not None:
        errors = (
            f", error {calibration['error_before']:.1f}% -> {calibration['error_after']:.1f}%"
            if calibration["rows"]
            else ""
        )
        scales = "; by whole runs: " + ", ".join(
            f"{key} x {factor:.3f}" for key, factor in calibration["scales"].items()
        )
        calls = f"by {calibration['rows']:,} measured calls of this family{errors}"
        grid.add_row("  calibrated", calls + (scales if calibration["scales"] else ""))
    grid.add_row("  cache", f"{cache} ({CACHE[cache]})")
    if conditions.without:
        grid.add_row("  left out", Text(", ".join(conditions.without), "yellow"))
    if gpu.changes:
        capped = f"under a limit of {gpu.power_w:,.0f} W" if set(gpu.changes) == {"power_w"} else None
        grid.add_row("  GPU", Text(capped or "changed with --set: not a product that exists", "yellow"))


def print_calls(columns: Mapping[str, Any], results: Mapping[str, Any], most: int) -> None:
    """The first rows of a table of calls with their results, one line a row."""
    count = len(columns["op"])
    rows = []
    for index in range(min(count, most)):
        times = [plain(results[f"{name}_us"][index]) for name in ("predicted", "low", "high", "ceiling", "bound")]
        cells = ["—" if time_us is None else digits(time_us) for time_us in times]
        call = truncate(call_text(columns, index), CALL_WIDTH)
        rows.append((str(index + 1), call, *cells, results["bound_by"][index] or "—"))
    heads = ("row", "call", "time µs", "low", "high", "ceiling", "bound", "by")
    supports = Counter(level or "none" for level in results["support"])
    note = "support: " + ", ".join(f"{number:,} {level}" for level, number in supports.most_common())
    show(dense_table(*heads, left=("call", "by"), rows=rows), "")
    show(f"the first {most} of {count:,} rows; -o FILE writes all. {note}" if count > most else note)


def call_text(columns: Mapping[str, Any], index: int) -> str:
    """'gemm m=4096 n=4096 k=4096 bf16': what a row gives of its op's parameters."""
    op = str(columns["op"][index])
    parts = [op]
    for name in parameters_of(REGISTRY[op]) if op in REGISTRY else ():
        value = plain(columns[name][index]) if name in columns else None
        if value is not None:
            parts.append(value_text(value) if name in ("dtype", "stack") else f"{name}={value_text(value)}")
    return " ".join(parts)


def evidence_text(match: EvidenceMatch) -> str:
    """'12,480 calls of this configuration on b200_sxm; held-out error 3.1%'; of another GPU, whose it is."""
    entry = match.entry
    if entry is None:
        return "no measured call of this configuration"
    if match.borrowed:
        off = f", where the held-out error is {entry.error:.1%}" if entry.error is not None else ""
        what = "nothing" if match.gpu_is_new else "this configuration was not"
        return f"{what} measured on {short_name(match.gpu)}; borrowed from {short_name(entry.gpu)}{off}"
    off = f"; held-out error {100 * entry.error:.1f}%" if entry.error is not None else ""
    configuration = "this configuration" if not match.substituted else "the nearest configuration"
    return f"{entry.calls:,} calls of {configuration} on {entry.gpu}{off}"


def changes_text(gpu: Gpu) -> Text:
    """What a GPU of the catalogue was changed in, as a line of its own; nothing where it was not."""
    changed = ", ".join(f"{name}={value:g}" for name, value in gpu.changes.items())
    return Text(f"\nwhat if: {changed}" if changed else "", "yellow")


def prediction_fields(prediction: Prediction, gpu: Gpu, conditions: Conditions) -> dict[str, Any]:
    """A prediction, and its conditions."""
    return {
        **prediction.to_dict(),
        "gpu_id": gpu.id,
        "gpu_unit_of": gpu.unit_of,
        "gpu_base": gpu.base if origin_of(gpu) else None,
        "gpu_changes": dict(gpu.changes),
        "cache": cache_name(conditions),
        "without": list(conditions.without),
        "calibration": calibration_fields(conditions.calibration, prediction.op),
    }


def calibration_fields(calibration: Any, op: str) -> dict[str, Any] | None:
    """The measurements of a calibration for the family of this op; None without one."""
    if calibration is None:
        return None
    name = kernel_class(op).family
    family = calibration.families.get(name)
    errors = attributes(family, "rows", "error_before", "error_after") if family else {"rows": 0}
    scales = {key: scale.factor for key, scale in calibration.scales.items() if key.startswith(f"{name} ")}
    return {"gpu": calibration.gpu, "predictor": calibration.predictor, **errors, "scales": scales}


def cache_name(conditions: Conditions) -> str:
    if not math.isinf(conditions.rotation):
        return "warm"
    return "cold" if math.isinf(conditions.input_rotation) else "model"


def doc_text(kernel: type[Kernel]) -> str:
    """An op's docstring as plain text. A dataclass without one has its signature there, which is no help."""
    text = inspect.cleandoc(kernel.__doc__ or "").replace("``", "")
    return kernel.op if not text or text.startswith(f"{kernel.__name__}(") else text
