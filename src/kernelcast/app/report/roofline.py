"""A roofline with the kernels of a diagnosis on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kernelcast.app.report.diagnose import label
from kernelcast.app.report.picture import picture
from kernelcast.app.report.units import percent, rate_text
from kernelcast.diagnose.diagnose import DiagnosedCall, Diagnosis
from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu

NAMED = 8  # kernels that are named
LEAST_FLOPS_PER_BYTE = 0.05  # kernels without arithmetic stand here, at their rate of bytes


def write_roofline(found: Diagnosis, path: Path) -> None:
    rows = [(place, row) for place, row in enumerate(found.matched, start=1) if row.forecast.moved_bytes > 0]
    if not rows:
        raise KernelcastError("--plot: no kernel could be matched, so that none has a place on a roofline")
    with picture(path, (9.5, 6)) as (figure, (axes,)):
        _draw_roofs(axes, found.gpu, found.run_dtype, max(point(row)[0] for _, row in rows))
        _draw_kernels(axes, rows)
        axes.set(xscale="log", yscale="log", xlabel="FLOP per byte of its operands", ylabel="FLOP/s")
        share = percent(sum(row.share for _, row in rows))
        axes.set_title(f"{found.gpu.name}: {len(rows)} calls with {share} of the GPU time; area: share of the run")
        axes.grid(True, which="major", alpha=0.25)
        axes.legend(loc="lower right", fontsize=8)
        figure.tight_layout()


def point(row: DiagnosedCall) -> tuple[float, float]:
    """FLOP per byte and FLOP/s of a matched row."""
    told = row.forecast
    intensity = max(LEAST_FLOPS_PER_BYTE, told.flops / told.moved_bytes)
    return intensity, intensity * told.moved_bytes / (row.measured.time_us * 1e-6)


def _draw_roofs(axes: Any, chip: Gpu, dtype: str, most: float) -> None:
    """FLOP/s that do not depend on bytes, and bytes/s; ``most`` FLOP per byte have a place."""
    flat = {
        f"tensor cores, {dtype}": chip.tensor_flops_per_s(dtype),
        "vector units, fp32": chip.fma_flops_per_s("fp32"),
    }
    flat = {name: rate for name, rate in flat.items() if rate}
    slopes = {"L2": chip.l2_bytes_per_s, "DRAM": chip.dram_bytes_per_s}
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
    largest = sorted(rows, key=lambda one: -one[1].share)[:NAMED]
    for place, row in largest:
        axes.annotate(f"#{place}", point(row), ha="center", va="center", fontsize=7, zorder=4)
    largest.sort(key=lambda one: one[0])
    told = "\n".join(f"#{place}  {label(row)}, {percent(row.share)}" for place, row in largest)
    axes.text(0.015, 0.985, told, transform=axes.transAxes, va="top", fontsize=8)
