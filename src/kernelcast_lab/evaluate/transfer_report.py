"""Pieces of `kernelcast evaluate transfer` -> tables in Markdown and, where Matplotlib is, the learning curve.

Errors are means: over draws of the calls, then over the GPUs of a group, then over the generations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from kernelcast.app.report.text import dense_table
from kernelcast.errors import KernelcastError
from kernelcast_lab.evaluate.report import markdown, saved_plot
from kernelcast_lab.evaluate.scores import read_kept
from kernelcast_lab.evaluate.splits import GENERATIONS
from kernelcast_lab.evaluate.transfer import (
    CALLS,
    CATALOGUE,
    COLUMN_NAMES,
    LEFT_OUT,
    NEW,
    RANDOM,
    SHARED,
    SIBLINGS,
    SPECS,
    TransferPoint,
    read_piece,
)

SINGLE_GPU, GENERATION = "a GPU, siblings in the data", "a generation"
_MAIN = ("GEMM bf16+fp8", "prefill", "decode", "fused MoE")
# What we set out to reach: mean % error, by what is left out and what is known of it.
TARGETS: Mapping[tuple[str, str], Mapping[str, float]] = {
    key: dict(zip(_MAIN, values, strict=True))
    for key, values in {
        (SINGLE_GPU, CATALOGUE): (5.5, 5.5, 6.0, 8.0),
        (GENERATION, CATALOGUE): (12.0, 17.0, 17.0, 19.0),
        (GENERATION, SPECS): (10.0, 14.0, 14.0, 16.0),
        (GENERATION, "30 calls"): (8.0, 10.0, 10.0, 11.0),
        (GENERATION, "300 calls"): (5.5, 6.0, 6.0, 7.0),
    }.items()
}
PIECES, PLOT = "transfer-*.json", "transfer.png"


@dataclass(frozen=True)
class Mean:
    """Of several points, ``parts`` of them, each of which counts the same; ``rows``: test calls of all of them."""

    mean: float
    median: float
    bias: float
    coverage: float
    rows: int
    parts: int

    @staticmethod
    def of(points: Sequence[Any]) -> Mean:
        mean, median, bias, coverage = (
            float(np.mean([getattr(point, name) for point in points]))
            for name in ("mean", "median", "bias", "coverage")
        )
        return Mean(mean, median, bias, coverage, sum(point.rows for point in points), len(points))


Means = dict[tuple[str, str, str], Mean]  # by what is left out, what is known, column


def read_pieces(folder: Path) -> list[TransferPoint]:
    """The points of every piece in a folder."""
    points = [point for path in sorted(folder.glob(PIECES)) for point in read_piece(path)]
    if not points:
        raise KernelcastError(f"no pieces in {folder}: `kernelcast evaluate transfer -o DIR` makes them")
    return points


def made_by(folder: Path) -> str:
    """The settings of the pieces in a folder; where they differ, all of them."""
    result: dict[str, list[str]] = {}
    for path in sorted(folder.glob(PIECES)):
        for name, value in read_kept(path, {})["settings"].items():
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            if value is not None and text not in result.setdefault(name, []):
                result[name].append(text)
    return "; ".join(f"{name.replace('_', ' ')} {' or '.join(values)}" for name, values in result.items() if values)


def knows(point: TransferPoint) -> str:
    """What is known of the GPU, as a row of the table says it."""
    if point.knows != CALLS:
        return point.knows
    return f"{point.calls} calls" if point.drawn == RANDOM else f"{point.calls} {point.drawn} calls"


def group_means(points: Sequence[TransferPoint], kernels: str = SHARED) -> Means:
    """Of each left-out group: over draws, then over its GPUs."""
    by: dict[tuple[str, str, str], dict[str, list[TransferPoint]]] = {}
    for point in points:
        if point.kernels == kernels:
            key = point.left_out, knows(point), point.column
            by.setdefault(key, {}).setdefault(point.gpu, []).append(point)
    return {key: Mean.of([_over_draws(members) for members in gpus.values()]) for key, gpus in by.items()}


def _over_draws(points: Sequence[TransferPoint]) -> Mean:
    """The test calls are the same each time."""
    return replace(Mean.of(points), rows=points[0].rows)


def overall_means(means: Means) -> Means:
    """Over the GPUs that were left out alone, and over the generations."""
    by: dict[tuple[str, str, str], list[Mean]] = {}
    for (left_out, known, column), mean in means.items():
        group = GENERATION if left_out in GENERATIONS else SINGLE_GPU
        by.setdefault((group, known, column), []).append(mean)
    return {key: Mean.of(result) for key, result in by.items()}


def _order(means: Means) -> tuple[list[str], list[str], list[str]]:
    """What is left out, what is known and the columns, as the tables list them."""
    left_out, known, columns = (list(dict.fromkeys(key[at] for key in means)) for at in range(3))
    usual = [SINGLE_GPU, *LEFT_OUT, GENERATION]
    left_out.sort(key=[*usual, *left_out].index)
    return left_out, known, [name for name in COLUMN_NAMES if name in columns]


def lines(points: Sequence[TransferPoint]) -> list[dict[str, Any]]:
    """A line for each thing left out and what is known of it: the mean error of every column."""
    results = []
    groups = group_means(points)
    for means in (overall_means(groups), groups):
        left_out, known, columns = _order(means)
        for name in left_out:
            for knowing in known:
                cells = {c: means[name, knowing, c].mean for c in columns if (name, knowing, c) in means}
                if cells:
                    results.append({"left out": name, "knows": knowing, **cells})
    return results


def as_table(points: Sequence[TransferPoint]) -> Table:
    """The same for a terminal of 100 columns: mean errors in percent, the formats by their short names."""
    result = lines(points)
    shown = [name for name in COLUMN_NAMES if any(line.get(name) is not None for line in result)]
    heads = [name.removeprefix("fused ").split()[-1].replace("bf16+fp8", "GEMM").replace("fp8_", "") for name in shown]
    labels = [name for name in result[0] if name not in COLUMN_NAMES] if result else []
    rows = [
        [*(str(line[label]) for label in labels), *("–" if name not in line else f"{line[name]:.1f}" for name in shown)]
        for line in result
    ]
    return dense_table(*labels, *heads, left=labels, rows=rows)


def write_transfer(points: Sequence[TransferPoint], out: Path) -> Path:
    """transfer.md, and the plot that it shows, beside the pieces."""
    groups, new = group_means(points), group_means(points, NEW)
    whole = overall_means(groups)
    parts = [
        _summary(points),
        f"Made by `kernelcast evaluate transfer`: {made_by(out)}." if any(out.glob(PIECES)) else "",
        "### Mean error, percent",
        _table(whole, _with_target),
        "### Share of the calls inside the 80% interval",
        _table(whole, lambda key, mean: f"{mean.coverage:.0%}"),
        "### Each thing left out: mean error, percent",
        _table(groups, lambda key, mean: f"{mean.mean:.1f}"),
        "### Kernels that no GPU of the fit runs: mean error, percent",
        _table(new, lambda key, mean: f"{mean.mean:.1f}") or "There are none.",
        "### Error against calls measured",
        f"![Error against calls measured]({PLOT})",
        "### In detail",
        _detail(groups),
    ]
    out.mkdir(parents=True, exist_ok=True)
    path = out / "transfer.md"
    path.write_text("\n\n".join(part for part in parts if part) + "\n")
    _plot(groups, out / PLOT)
    return path


def _summary(points: Sequence[TransferPoint]) -> str:
    left_out = _order(group_means(points))[0]
    alone = [name for name in left_out if name not in GENERATIONS]
    whole = [name for name in left_out if name in GENERATIONS]
    message = [f"{SINGLE_GPU}: {', '.join(alone)}"] * bool(alone) + [f"{GENERATION}: {', '.join(whole)}"] * bool(whole)
    return (
        f"Left out: {'; '.join(message)}. A mean is over those of them that were measured in the format."
        " In brackets: what we set out to reach."
    )


def _with_target(key: tuple[str, str, str], mean: Mean) -> str:
    """Nothing is met or missed before all was left out that the goal is a mean of."""
    target = TARGETS.get(key[:2], {}).get(key[2])
    if target is None or mean.parts != len(GENERATIONS if key[0] == GENERATION else SIBLINGS):
        return f"{mean.mean:.1f}"
    return f"{mean.mean:.1f} ({target:g}, {'met' if mean.mean <= target else '**missed**'})"


def _table(means: Means, cell: Any) -> str:
    left_out, known, columns = _order(means)
    rows = []
    for name in left_out:
        for knowing in known:
            keys = [(name, knowing, column) for column in columns]
            cells = [cell(key, means[key]) if key in means else "–" for key in keys]
            if any(key in means for key in keys):
                rows.append([name, knowing, *cells])
    return markdown(["left out", "knows", *columns], rows)


def _detail(means: Means) -> str:
    left_out, known, columns = _order(means)
    rows = []
    for key in ((name, knowing, column) for name in left_out for column in columns for knowing in known):
        if key in means:
            each = means[key]
            numbers = [f"{value:.1f}" for value in (each.mean, each.median, each.bias)]
            rows.append([key[0], key[2], key[1], *numbers, f"{each.coverage:.0%}", f"{each.rows:,}"])
    return markdown(["left out", "column", "knows", "mean", "median", "bias", "inside 80%", "test calls"], rows)


def _plot(means: Means, path: Path) -> None:
    """A panel a column, a line for each thing left out."""
    left_out, known, columns = _order(means)
    known = [name for name in known if name in (CATALOGUE, SPECS) or name.split()[1] == CALLS]  # random draws

    def draw(axes: Any) -> None:
        for axis, column in zip(axes.flat, columns, strict=False):
            for number, name in enumerate(left_out):  # also where it has no point: one legend serves all panels
                at = [position for position, knowing in enumerate(known) if (name, knowing, column) in means]
                heights = [means[name, known[position], column].mean for position in at]
                style = "o-" if name in GENERATIONS else "s:"
                axis.plot(at, heights, style, color=f"C{number}", label=name)
            axis.set_xticks(range(len(known)), [name.removesuffix(" calls") for name in known], fontsize=8)
            axis.set(title=column, ylabel="mean error, %", ylim=(0, None), xlabel="known: calls of each op and format")
        for axis in axes.flat[len(columns) :]:
            axis.axis("off")
        axes.flat[0].legend(fontsize=7, title="left out", title_fontsize=7)

    high = -(-len(columns) // 4)
    wide = min(4, len(columns))
    saved_plot(path, high, wide, (4.2 * wide, 3.4 * high), draw)
