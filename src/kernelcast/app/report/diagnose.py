"""A diagnosis as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from kernelcast.app.report.json import attributes
from kernelcast.app.report.plot import picture
from kernelcast.app.report.text import (
    dense_table,
    digits,
    percent,
    plural,
    rate_text,
    show,
    support_text,
    time_text,
    title,
    truncate,
)
from kernelcast.diagnose.diagnose import DiagnosedCall, Diagnosis
from kernelcast.diagnose.reasons import Reason
from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu
from kernelcast.results import support_of

CALL_CHARS = 28
NAME_CHARS = 40
UNMATCHED_ROWS = 8
_SIZES = (("batch", "m", "n", "k"), ("m", "n", "k"), ("rows", "cols"), ("tokens", "hidden"), ("elements",),
          ("batch", "in_channels", "height", "width"))  # fmt: skip
NAMED = 8  # kernels that are named
LEAST_FLOPS_PER_BYTE = 0.05  # kernels without arithmetic stand here, at their rate of bytes
NCU_CLOCKS = "Nsight Compute locks the clocks unless started with --clock-control none: times are longer than in a run"


def fields(diagnosis: Diagnosis) -> dict[str, Any]:
    """Plain values, ready for JSON. Times of a row are of one call; ``total_us`` and ``could_win_us`` of all alike."""
    profile = diagnosis.profile
    return {
        **attributes(diagnosis, "matched_share", "run_dtype", "predictor", gpu="gpu.label",
                     matched_us="measured_matched_us"),
        **attributes(profile, "source", "launches", "gpu_time_us", span_us="duration_us"),
        "measured_on": profile.gpu_name or None,
        "idle_us": profile.idle_us if profile.duration_us is not None else None,
        "launch_bound": diagnosis.idle is not None,
        "predicted_us": diagnosis.total_us("time_us"),
        "ceiling_us": diagnosis.total_us("ceiling_us"),
        "could_win_us": sum(row.total_saving_us for row in diagnosis.matched),
        "kernels": [_row_fields(rank, row) for rank, row in enumerate(diagnosis.matched, start=1)],
        "unmatched": [
            {**_measured_fields(row), "why": row.unmatched, "reasons": [vars(reason) for reason in row.reasons]}
            for row in diagnosis.unmatched
        ],
        "support": _support(diagnosis),
    }  # fmt: skip


def _measured_fields(row: DiagnosedCall) -> dict[str, Any]:
    measured, grid = row.measured, row.metrics.grid
    return {
        **attributes(measured, "name", "shapes", "count", "total_us", "idle_us", measured_us="time_us"),
        "kernels": [
            {"name": kernel.name, "time_us": kernel.time_us, "grid": list(kernel.grid), "block": list(kernel.block)}
            for kernel in measured.kernels
        ],
        "share": row.share,
        "waves": grid.waves or None,
        "tail": grid.tail if grid.waves else None,
        "padding": grid.padding,
        "marks": list(measured.marks),
    }


def _row_fields(rank: int, row: DiagnosedCall) -> dict[str, Any]:
    forecast = row.forecast
    return {
        "rank": rank,
        "op": row.metrics.op,
        "parameters": {name: value for name, value in row.metrics.parameters.items() if name != "op"},
        **_measured_fields(row),
        **attributes(forecast, "low_us", "high_us", "ceiling_us", "bound_us", "bound_by", "flops", "moved_bytes",
                     "support", predicted_us="time_us"),
        **attributes(row, gap_us="metrics.gap_us", could_win_us="total_saving_us"),
        "reasons": [vars(reason) for reason in row.reasons],
    }  # fmt: skip


def _support(diagnosis: Diagnosis) -> str:
    """Of the matched time."""
    return support_of((row.measured.total_us, row.forecast.support) for row in diagnosis.matched)


def print_diagnosis(diagnosis: Diagnosis, name: str, top: int) -> None:
    """The run, its rows by what could be won, what to try, and what could not be matched."""
    profile = diagnosis.profile
    run = f"  {profile.source}, {plural(profile.launches, 'kernel')}, mostly {diagnosis.run_dtype}"
    show(title(name, "", diagnosis.gpu.name, run), *_summary(diagnosis), "")
    shown, rest = diagnosis.matched[:top], diagnosis.matched[top:]
    if shown:
        show(_table(shown), "", *_advice(shown))
        if rest:
            won, share = sum(r.total_saving_us for r in rest), sum(r.share for r in rest)
            show(f"and {len(rest)} more calls with {percent(share)} of the time, where {_us(won)} could be won")
        show("")
    _print_unmatched(diagnosis.unmatched)
    if profile.source == "Nsight Compute":
        show(f"clocks     {NCU_CLOCKS}")
    if diagnosis.matched:
        show(support_text(_support(diagnosis), diagnosis.predictor))


def _summary(diagnosis: Diagnosis) -> list[str]:
    profile = diagnosis.profile
    lines = [
        f"GPU time   {_us(diagnosis.profile.gpu_time_us)}, {percent(diagnosis.matched_share)} of it matched: predicted "
        f"{_us(diagnosis.total_us('time_us'))} for {_us(diagnosis.measured_matched_us)}, "
        f"ceiling {_us(diagnosis.total_us('ceiling_us'))}"
    ]
    if profile.duration_us:
        idle = f"idle       {_us(profile.idle_us)} of {_us(profile.duration_us)}"
        reason = diagnosis.idle
        lines.append(f"{idle}: {reason.name}, {reason.detail}. Try {reason.advice}" if reason else idle)
    if profile.gpu_name and profile.gpu_name not in (diagnosis.gpu.name, diagnosis.gpu.id, *diagnosis.gpu.aliases):
        lines.append(f"measured   on {profile.gpu_name}; predicted for {diagnosis.gpu.name}")
    return lines


def _table(rows: Sequence[DiagnosedCall]) -> Table:
    heads = ("#", "call", "×", "share", "µs", "predicted", "ceiling", "could win", "reason")
    cells = (
        (
            str(rank), truncate(label(row), CALL_CHARS), f"{row.measured.count:,}", percent(row.share),
            *map(digits, (row.measured.time_us, row.forecast.time_us, row.forecast.ceiling_us)),
            _us(row.total_saving_us), row.main.name if row.main else "—",
        )
        for rank, row in enumerate(rows, start=1)
    )  # fmt: skip
    return dense_table(*heads, left=("call", "reason"), rows=cells)


def label(row: DiagnosedCall) -> str:
    """'gemm 2048x4096x14336 bf16': the op with the sizes that matter; a kernel's name where there is none."""
    given, op = row.metrics.parameters, row.metrics.op
    if not op:
        return row.measured.name
    if op in ("attention", "attention_backward"):
        batch, queries, keys = (given.get(name, "…") for name in ("batch", "q_len", "kv_len"))
        return f"{op} {batch}x{queries}:{keys} {given.get('dtype', 'bf16')}"
    name = row.measured.name.removeprefix("aten::") if op == "pointwise" else op  # goes by the op that launched it
    sizes = next((names for names in _SIZES if all(given.get(name) is not None for name in names)), ())
    parts = (name, "x".join(str(given[name]) for name in sizes), str(given.get("dtype", "")))
    return " ".join(part for part in parts if part)


def _us(value_us: float) -> str:
    return time_text(value_us * 1e-6) if value_us > 0 else "0"


def _advice(rows: Sequence[DiagnosedCall]) -> list[Any]:
    """Each reason once: what it sums up to, where it holds, the largest case, and what to try."""
    groups: dict[str, list[tuple[float, int, Reason]]] = {}  # by name: explained in all, place, reason
    for rank, row in enumerate(rows, start=1):
        if row.main is not None:
            explained = row.main.explained_us * row.measured.count
            groups.setdefault(row.main.name, []).append((explained, rank, row.main))
    totals = {name: sum(explained for explained, _, _ in members) for name, members in groups.items()}
    parts: list[Any] = []
    for name in sorted(groups, key=lambda name: -totals[name]):
        ranks = " ".join(f"#{rank}" for _, rank, _ in groups[name])
        _, first, reason = max(groups[name], key=lambda entry: entry[0])
        explains = f", explains {_us(totals[name])}" if totals[name] else ""
        grid = Table.grid(Column(no_wrap=True, justify="right", min_width=5), Column(), padding=(0, 2))
        grid.add_row(f"#{first}", reason.detail)
        grid.add_row("try", Text(reason.advice, "green"))
        parts += [Text.assemble((name, "bold"), f"  {ranks}{explains}"), grid, ""]
    return parts


def _print_unmatched(rows: Sequence[DiagnosedCall]) -> None:
    if not rows:
        return
    cells = []
    for row in rows[:UNMATCHED_ROWS]:
        text = "; ".join([row.unmatched, *(f"{reason.name}: {reason.detail}" for reason in row.reasons)])
        name = truncate(f"{row.measured.name} {row.measured.shapes}".strip(), NAME_CHARS)
        cells.append((name, f"{row.measured.count:,}", percent(row.share), digits(row.measured.time_us), text))
    why = "why, and what its launch says"
    table = dense_table("not matched", "×", "share", "µs", why, left=("not matched", why), rows=cells)
    table.columns[-1].no_wrap = False
    more = f", the first {UNMATCHED_ROWS} here" if len(rows) > UNMATCHED_ROWS else ""
    share = percent(sum(row.share for row in rows))
    show(f"{plural(len(rows), 'call')} with {share} of the GPU time could not be matched{more}", "", table, "")


# ---- as a roofline ----
def write_roofline(diagnosis: Diagnosis, path: Path) -> None:
    rows = [(rank, row) for rank, row in enumerate(diagnosis.matched, start=1) if row.forecast.moved_bytes > 0]
    if not rows:
        raise KernelcastError("`plot`: no kernel could be matched, so that none has a place on a roofline")
    with picture(path, (9.5, 6)) as (figure, (axes,)):
        _draw_roofs(axes, diagnosis.gpu, diagnosis.run_dtype, max(point(row)[0] for _, row in rows))
        _draw_kernels(axes, rows)
        axes.set(xscale="log", yscale="log", xlabel="FLOP per byte of its operands", ylabel="FLOP/s")
        share = percent(sum(row.share for _, row in rows))
        calls = plural(len(rows), "call")
        axes.set_title(f"{diagnosis.gpu.name}: {calls} with {share} of the GPU time; area: share of the run")
        axes.grid(True, which="major", alpha=0.25)
        axes.legend(loc="lower right", fontsize=8)
        figure.tight_layout()


def point(row: DiagnosedCall) -> tuple[float, float]:
    """FLOP per byte and FLOP/s of a matched row."""
    forecast = row.forecast
    intensity = max(LEAST_FLOPS_PER_BYTE, forecast.flops / forecast.moved_bytes)
    return intensity, intensity * forecast.moved_bytes / (row.measured.time_us * 1e-6)


def _draw_roofs(axes: Any, gpu: Gpu, dtype: str, most: float) -> None:
    """FLOP/s that do not depend on bytes, and bytes/s; ``most`` FLOP per byte have a place."""
    flat = {
        f"tensor cores, {dtype}": gpu.tensor_flops_per_s(dtype),
        "vector units, fp32": gpu.fma_flops_per_s("fp32"),
    }
    flat = {name: rate for name, rate in flat.items() if rate}
    slopes = {"L2": gpu.l2_bytes_per_s, "DRAM": gpu.dram_bytes_per_s}
    top = max(flat.values())
    right = max(most, top / min(slopes.values())) * 4
    for (name, rate), style in zip(flat.items(), ("-", "--"), strict=False):
        axes.plot([rate / slopes["L2"], right], [rate, rate], style, color="black", linewidth=1.2)
        axes.text(right, rate * 1.06, f"{name} {rate_text(rate, 'FLOP/s')}", ha="right", va="bottom", fontsize=8)
    for (name, rate), style in zip(slopes.items(), (":", "-"), strict=True):
        axes.plot([LEAST_FLOPS_PER_BYTE / 2, top / rate], [rate * LEAST_FLOPS_PER_BYTE / 2, top], style, color="black",
                  linewidth=1.2, label=f"{name} {rate_text(rate, 'B/s')}")  # fmt: skip


def _draw_kernels(axes: Any, rows: list[tuple[int, DiagnosedCall]]) -> None:
    """A colour a reason, an area by the share of the run; the largest with their place in the ranking."""
    groups: dict[str, list[DiagnosedCall]] = {}
    for _, row in rows:
        groups.setdefault(row.main.name if row.main else "near its best", []).append(row)
    for at, (name, mine) in enumerate(groups.items()):
        colour, areas = f"C{at}", [12 + 1200 * row.share for row in mine]  # square points
        axes.scatter(*zip(*map(point, mine), strict=True), s=areas, color=colour, alpha=0.7, edgecolors="white",
                     linewidths=0.5, zorder=3)  # fmt: skip
        axes.scatter([], [], s=40, color=colour, label=name)  # the legend's
    largest = sorted(rows, key=lambda entry: -entry[1].share)[:NAMED]
    for rank, row in largest:
        axes.annotate(f"#{rank}", point(row), ha="center", va="center", fontsize=7, zorder=4)
    largest.sort(key=lambda entry: entry[0])
    legend = "\n".join(f"#{rank}  {label(row)}, {percent(row.share)}" for rank, row in largest)
    axes.text(0.015, 0.985, legend, transform=axes.transAxes, va="top", fontsize=8)
