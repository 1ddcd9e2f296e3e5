"""The accuracy report: tables in Markdown and, where Matplotlib is, plots."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kernelcast_lab.evaluate.run import DENSITY, GRID_RATIO, GRID_TIME, PREDICTORS
from kernelcast_lab.evaluate.scores import REGIMES, Score
from kernelcast_lab.evaluate.splits import FRONTIER_NAMES, KNOWN_TASKS, MAIN

# What we set out to reach: mean % error of latency, by split and task.
TARGETS = {
    ("shapes", "GEMM bf16+fp8"): 4.5, ("shapes", "attention prefill"): 5.0,
    ("shapes", "attention decode"): 6.0, ("shapes", "fused MoE"): 7.0,
    ("gpu", "GEMM bf16+fp8"): 6.5, ("gpu", "attention prefill"): 9.0,
    ("gpu", "attention decode"): 9.0, ("gpu", "fused MoE"): 11.0,
    ("generation", "GEMM bf16+fp8"): 13.0, ("generation", "attention prefill"): 18.0,
    ("generation", "attention decode"): 18.0, ("generation", "fused MoE"): 22.0,
    **{("shapes", task): 6.0 for task in FRONTIER_NAMES}, **{("gpu", task): 12.0 for task in FRONTIER_NAMES},
}  # fmt: skip
SOURCE_TARGETS = {
    ("PipeWeave fp8 GEMM", "overall"): 3.3, ("PipeWeave fp8 GEMM", "unseen H100, H200"): 4.2,
    ("NeuSight fp32 ops", "BMM"): 12.0, ("NeuSight fp32 ops", "linear"): 12.0,
    ("NeuSight fp32 ops", "element-wise"): 8.0, ("NeuSight fp32 ops", "softmax"): 12.0,
    ("NeuSight fp32 ops", "layer norm"): 12.0, ("PipeWeave MoE w13, one GPU out", "w13"): 12.0,
    ("collectives, one fabric out", "all collectives"): 20.0,
}  # fmt: skip
_SAME_FOR_ALL = {"Vidur layers, new token counts": 8.0, "collectives, new sizes": 4.0}


def write_report(result: Sequence[Score], out: Path) -> Path:
    """accuracy.md, and the plots that it shows."""
    out.mkdir(parents=True, exist_ok=True)
    everything = [score for score in result if score.group == "all"]
    main = [score for score in everything if score.protocol == MAIN]
    parts = [
        "# Accuracy of kernels",
        "Mean error of latency in percent (median in brackets), on rows that the fit never saw; made by"
        " `kernelcast evaluate`, every predictor fitted on rows of the same training split. **Bold**: best of a row."
        " Targets are the project's own; a missed one says so. The split `shapes` scores the weights that ship, fitted"
        " on all rows of nine tenths of the shapes; every other line is a fit of its own, on a sample of what the split"
        " leaves, so that two cores can run it: a fit on all rows does better."
        " [Notes](accuracy-notes.md) say what the errors are made of, and how this report was made.",
        "## The main table",
        _means(means(main).get(MAIN, []), ["split", "task"]),
        "## Each thing left out",
        _each(main),
        "## The sources' own protocols",
        *_sources(everything),
        "## Where the learned efficiency is not the best",
        _lost(everything),
        "## Intervals",
        _intervals(everything),
        "## By number format, GPU and regime (learned)",
        _groups([s for s in result if s.protocol == MAIN and s.predictor == "learned" and s.group != "all"]),
    ]
    plots = _plots(result, out)
    parts += ["## Plots", *(f"![{name}]({name}.png)" for name in plots)] if plots else []
    path = out / "accuracy.md"
    path.write_text("\n\n".join(part for part in parts if part) + "\n")
    return path


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; nothing where it has no row."""
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]
    return "\n".join(lines) if len(lines) > 2 else ""


def _mean(scores: Sequence[Score]) -> float:
    return float(np.mean([score.mean for score in scores]))


def means(scores: Sequence[Score]) -> dict[str, list[dict[str, Any]]]:
    """By protocol, a line a split and task: its target, and by predictor the mean over all that was left out."""
    result: dict[str, list[dict[str, Any]]] = {}
    whole = [s for s in scores if s.group == "all"]
    for protocol, split in dict.fromkeys((s.protocol, s.split) for s in whole):
        here = [s for s in whole if (s.protocol, s.split) == (protocol, split)]
        for task in sorted({s.task for s in here}, key=[*KNOWN_TASKS, *(s.task for s in here)].index):
            by = {p: [s for s in here if (s.predictor, s.task) == (p, task)] for p in PREDICTORS}
            line = {"split": split, "task": task, "target": _target(protocol, split, task)}
            result.setdefault(protocol, []).append(line | {p: _mean(by[p]) for p in by if by[p]})
    return result


def _target(protocol: str, split: str, task: str) -> float | None:
    if protocol == MAIN:
        return TARGETS.get((split, task))
    return SOURCE_TARGETS.get((protocol, task), _SAME_FOR_ALL.get(protocol))


def _means(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    rows = []
    for line in lines:
        target, known = line["target"], {p: line[p] for p in PREDICTORS if p in line}
        verdict = ""
        if target is not None and "learned" in known:
            verdict = f"{target:g}, {'met' if known['learned'] <= target else '**missed**'}"
        best = min(known.values())
        cells = {p: f"**{value:.1f}**" if value == best else f"{value:.1f}" for p, value in known.items()}
        rows.append([*(line[name] for name in names), verdict, *(cells.get(p, "–") for p in PREDICTORS)])
    return markdown([*names, "target", *PREDICTORS], rows)


def _each(scores: Sequence[Score]) -> str:
    rows = []
    for key in dict.fromkeys((s.split, s.left_out, s.task) for s in scores):
        here = {s.predictor: s for s in scores if (s.split, s.left_out, s.task) == key}
        cells = [f"{here[p].mean:.1f} ({here[p].median:.1f})" if p in here else "–" for p in PREDICTORS]
        rows.append([*key, f"{next(iter(here.values())).rows:,}", *cells])
    return markdown(["split", "left out", "task", "rows", *PREDICTORS], rows)


def _sources(everything: Sequence[Score]) -> list[str]:
    parts = []
    for protocol, lines in means([s for s in everything if s.protocol != MAIN]).items():
        left = [s for s in everything if s.protocol == protocol and s.predictor == "learned"]
        left = [s for s in left if s.split in ("gpu", "fabric")]
        note = "By what was left out: " + ", ".join(f"{s.left_out} {s.mean:.1f}" for s in left) if left else ""
        parts += [f"### {protocol}", _means(lines, ["task"]), note]
    return parts


def _lost(everything: Sequence[Score]) -> str:
    lines = []
    for key in dict.fromkeys((s.protocol, s.split, s.left_out, s.task) for s in everything):
        here = {s.predictor: s.mean for s in everything if (s.protocol, s.split, s.left_out, s.task) == key}
        if "learned" in here and min(here.values()) < here["learned"]:
            best = min(here, key=lambda p: here[p])
            where = f"{key[0]}, {key[1]} {key[2]}, {key[3]}"
            lines.append(f"- {where}: {best} {here[best]:.1f}, learned {here['learned']:.1f}")
    return "\n".join(lines) or "Nowhere."


def _intervals(everything: Sequence[Score]) -> str:
    rows = [
        (s.protocol, s.split, s.left_out, s.task, f"{s.coverage:.0%}")
        for s in everything
        if s.predictor == "learned" and s.coverage is not None
    ]
    return markdown(["protocol", "split", "left out", "task", "rows inside the 80% interval"], rows)


def _groups(scores: Sequence[Score]) -> str:
    rows = [
        (s.split, s.left_out, s.task, s.group, f"{s.rows:,}", *(f"{x:.1f}" for x in (s.mean, s.median, s.p90, s.bias)))
        for s in scores
    ]
    return markdown(["split", "left out", "task", "rows of", "rows", "mean", "median", "p90", "bias"], rows)


def saved_plot(path: Path, rows: int, columns: int, size: tuple[float, float], draw: Callable[[Any], None]) -> None:
    """A picture of rows by columns, drawn by a function that gets the axes; nothing where Matplotlib is not."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False)
    draw(axes)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _plots(result: Sequence[Score], out: Path) -> list[str]:
    """Their names, without the ending."""
    _regime_plot([s for s in result if s.protocol == MAIN and s.group.startswith("regime=")], out)
    if (out / DENSITY).exists():
        _density_plot(out)
    return [name for name in ("error_by_regime", "predicted_against_measured") if (out / f"{name}.png").exists()]


def _regime_plot(result: Sequence[Score], out: Path) -> None:
    splits = [s for s in ("shapes", "gpu", "generation") if any(x.split == s for x in result)]
    tasks = [task for task in KNOWN_TASKS if any(s.task == task for s in result)]
    wide = 0.8 / max(len(tasks), 1)  # of a bar: those of a regime fill four fifths of its place

    def draw(axes: Any) -> None:
        for axis, split in zip(axes[0], splits, strict=True):
            for offset, task in enumerate(tasks):
                rows = [s for s in result if (s.split, s.task, s.predictor) == (split, task, "learned")]
                position = {at: [s for s in rows if s.group[7:] == regime] for at, regime in enumerate(REGIMES)}
                heights = {at + wide * offset: _mean(those) for at, those in position.items() if those}
                axis.bar(list(heights), list(heights.values()), wide, label=task)
            axis.set_xticks(np.arange(len(REGIMES)) + 0.4 - wide / 2, list(REGIMES))
            axis.set(title=f"{split} left out", ylabel="mean error, %")
        axes[0][0].legend(fontsize=7)

    if splits:
        saved_plot(out / "error_by_regime.png", 1, len(splits), (4.5 * len(splits), 3.6), draw)


def _density_plot(out: Path) -> None:
    grids = json.loads((out / DENSITY).read_text())
    lines = [f"{split}, {task}" for split in ("shapes: new shapes", "gpu: h200_sxm") for task in KNOWN_TASKS]
    wanted = [name for name in lines if name in grids]

    def draw(axes: Any) -> None:
        for axis, name in zip(axes.flat, wanted, strict=False):
            counts = np.array(grids[name]).T
            axis.pcolormesh(10**GRID_TIME, 10**GRID_RATIO, np.log1p(counts), cmap="viridis")
            axis.axhline(1, color="white", linewidth=0.6)
            axis.set(xscale="log", title=name, xlabel="measured, µs", ylabel="predicted / measured")
            axis.title.set_fontsize(8)
        for axis in axes.flat[len(wanted) :]:
            axis.axis("off")

    lines_of_four = -(-len(wanted) // 4)
    if wanted:
        saved_plot(out / "predicted_against_measured.png", lines_of_four, 4, (15, 3.1 * lines_of_four), draw)
