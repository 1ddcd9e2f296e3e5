"""The accuracy report: tables in Markdown and, where Matplotlib is, plots."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from kernelcast_lab.evaluate.run import GRID_RATIO, GRID_TIME, MAIN, PREDICTORS
from kernelcast_lab.evaluate.scores import Score
from kernelcast_lab.evaluate.splits import TASKS

# What we set out to reach: mean % error of latency, by split and task.
TARGETS = {
    ("shapes", "GEMM bf16+fp8"): 4.5, ("shapes", "attention prefill"): 5.0,
    ("shapes", "attention decode"): 6.0, ("shapes", "fused MoE"): 7.0,
    ("gpu", "GEMM bf16+fp8"): 6.5, ("gpu", "attention prefill"): 9.0,
    ("gpu", "attention decode"): 9.0, ("gpu", "fused MoE"): 11.0,
    ("generation", "GEMM bf16+fp8"): 13.0, ("generation", "attention prefill"): 18.0,
    ("generation", "attention decode"): 18.0, ("generation", "fused MoE"): 22.0,
}  # fmt: skip
SOURCE_TARGETS = {
    ("PipeWeave fp8 GEMM", "overall"): 3.3, ("PipeWeave fp8 GEMM", "unseen H100, H200"): 4.2,
    ("NeuSight fp32 ops", "BMM"): 12.0, ("NeuSight fp32 ops", "linear"): 12.0,
    ("NeuSight fp32 ops", "element-wise"): 8.0, ("NeuSight fp32 ops", "softmax"): 12.0,
    ("NeuSight fp32 ops", "layer norm"): 12.0, ("PipeWeave MoE w13, one GPU out", "w13"): 12.0,
    ("collectives, one fabric out", "all collectives"): 20.0,
}  # fmt: skip
_SAME_FOR_ALL = {"Vidur layers, new token counts": 8.0, "collectives, new sizes": 4.0}


def write_report(found: Sequence[Score], out: Path) -> Path:
    """accuracy.md, and the plots that it shows."""
    out.mkdir(parents=True, exist_ok=True)
    everything = [score for score in found if score.group == "all"]
    parts = [
        "# Accuracy",
        "Mean error of latency in percent (median in brackets), on rows that the fit never saw; made by"
        " `kernelcast evaluate`, every predictor fitted on rows of the same training split. **Bold**: best of a row."
        " Targets are the project's own; a missed one says so. The split `shapes` scores the weights that ship, fitted"
        " on all rows of nine tenths of the shapes; every other line is a fit of its own, on a sample of what the split"
        " leaves, so that two cores can run it: a fit on all rows does better."
        " [Notes](accuracy-notes.md) say what the errors are made of, and how this report was made.",
        "## The main table",
        *_main(everything),
        "## Each thing left out",
        _table([s for s in everything if s.protocol == MAIN]),
        "## The sources' own protocols",
        *_sources(everything),
        "## Where the learned efficiency is not the best",
        _lost(everything),
        "## Intervals",
        _intervals(everything),
        "## By number format, GPU and regime (learned)",
        _groups([s for s in found if s.protocol == MAIN and s.predictor == "learned" and s.group != "all"]),
    ]
    plots = _plots(found, out)
    parts += ["## Plots", *(f"![{name}]({name}.png)" for name in plots)] if plots else []
    path = out / "accuracy.md"
    path.write_text("\n\n".join(part for part in parts if part) + "\n")
    return path


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _mean(scores: Sequence[Score]) -> float:
    return float(np.mean([score.mean for score in scores]))


def _verdict(value: float, target: float | None) -> str:
    return "" if target is None else f"{target:g}, {'met' if value <= target else '**missed**'}"


def _main(everything: Sequence[Score]) -> list[str]:
    """Split by task: the mean over what was left out, target, and each predictor."""
    lines = [_row(["split", "task", "target", *PREDICTORS]), _row(["---"] * (3 + len(PREDICTORS)))]
    for split in dict.fromkeys(s.split for s in everything if s.protocol == MAIN):
        for task in (t.name for t in TASKS):
            rows = [s for s in everything if s.protocol == MAIN and s.split == split and s.task == task]
            means = {p: [s for s in rows if s.predictor == p] for p in PREDICTORS}
            known = {p: _mean(scores) for p, scores in means.items() if scores}
            if not known:
                continue
            target = TARGETS.get((split, task))
            verdict = _verdict(known["learned"], target) if "learned" in known else ""
            lines.append(_row([split, task, verdict, *_cells(known)]))
    return ["\n".join(lines)] if len(lines) > 2 else []


def _cells(known: dict[str, float]) -> list[str]:
    best = min(known.values())
    cells = {p: f"{value:.1f}" for p, value in known.items()}
    return [f"**{cells[p]}**" if known.get(p) == best else cells.get(p, "–") for p in PREDICTORS]


def _table(scores: Sequence[Score]) -> str:
    lines = [_row(["split", "left out", "task", "rows", *PREDICTORS]), _row(["---"] * (4 + len(PREDICTORS)))]
    keys = dict.fromkeys((s.split, s.left_out, s.task) for s in scores)
    for split, left_out, task in keys:
        here = {s.predictor: s for s in scores if (s.split, s.left_out, s.task) == (split, left_out, task)}
        cells = [f"{here[p].mean:.1f} ({here[p].median:.1f})" if p in here else "–" for p in PREDICTORS]
        lines.append(_row([split, left_out, task, f"{next(iter(here.values())).rows:,}", *cells]))
    return "\n".join(lines)


def _sources(everything: Sequence[Score]) -> list[str]:
    parts = []
    for protocol in dict.fromkeys(s.protocol for s in everything if s.protocol != MAIN):
        scores = [s for s in everything if s.protocol == protocol]
        lines = [_row(["task", "target", *PREDICTORS]), _row(["---"] * (2 + len(PREDICTORS)))]
        for task in dict.fromkeys(s.task for s in scores):
            by = {p: [s for s in scores if s.predictor == p and s.task == task] for p in PREDICTORS}
            known = {p: _mean(rows) for p, rows in by.items() if rows}
            target = SOURCE_TARGETS.get((protocol, task), _SAME_FOR_ALL.get(protocol))
            verdict = _verdict(known["learned"], target) if "learned" in known else ""
            lines.append(_row([task, verdict, *_cells(known)]))
        left = [s for s in scores if s.predictor == "learned" and s.split in ("gpu", "fabric")]
        note = "By what was left out: " + ", ".join(f"{s.left_out} {s.mean:.1f}" for s in left) if left else ""
        parts += [f"### {protocol}", "\n".join(lines), note]
    return parts


def _lost(everything: Sequence[Score]) -> str:
    lines = []
    for key in dict.fromkeys((s.protocol, s.split, s.left_out, s.task) for s in everything):
        here = {s.predictor: s.mean for s in everything if (s.protocol, s.split, s.left_out, s.task) == key}
        if "learned" in here and min(here.values()) < here["learned"]:
            best = min(here, key=lambda p: here[p])
            place = f"{key[0]}, {key[1]} {key[2]}, {key[3]}"
            lines.append(f"- {place}: {best} {here[best]:.1f}, learned {here['learned']:.1f}")
    return "\n".join(lines) or "Nowhere."


def _intervals(everything: Sequence[Score]) -> str:
    lines = [_row(["protocol", "split", "left out", "task", "rows inside the 80% interval"]), _row(["---"] * 5)]
    for s in everything:
        if s.predictor == "learned" and s.coverage is not None:
            lines.append(_row([s.protocol, s.split, s.left_out, s.task, f"{s.coverage:.0%}"]))
    return "\n".join(lines) if len(lines) > 2 else ""


def _groups(scores: Sequence[Score]) -> str:
    lines = [_row(["split", "left out", "task", "rows of", "rows", "mean", "median", "p90", "bias"]), _row(["---"] * 9)]
    for s in scores:
        cells = [f"{x:.1f}" for x in (s.mean, s.median, s.p90, s.bias)]
        lines.append(_row([s.split, s.left_out, s.task, s.group, f"{s.rows:,}", *cells]))
    return "\n".join(lines) if len(lines) > 2 else ""


def _plots(found: Sequence[Score], out: Path) -> list[str]:
    if importlib.util.find_spec("matplotlib") is None:
        return []
    import matplotlib

    matplotlib.use("Agg")
    names = [_regime_plot(found, out)] if any(s.group.startswith("regime=") for s in found) else []
    if (out / "density.json").exists():
        names.append(_density_plot(out))
    return names


def _regime_plot(found: Sequence[Score], out: Path) -> str:
    from matplotlib import pyplot as plt

    tasks = [t.name for t in TASKS]
    splits = [s for s in ("shapes", "gpu", "generation") if any(x.split == s for x in found)]
    figure, axes = plt.subplots(1, max(1, len(splits)), figsize=(4.5 * max(1, len(splits)), 3.6), squeeze=False)
    for axis, split in zip(axes[0], splits, strict=False):
        for offset, task in enumerate(tasks):
            rows = [s for s in found if s.protocol == MAIN and s.split == split and s.task == task]
            rows = [s for s in rows if s.predictor == "learned" and s.group.startswith("regime=")]
            regimes = list(dict.fromkeys(s.group[7:] for s in rows))
            heights = [_mean([s for s in rows if s.group[7:] == r]) for r in regimes]
            axis.bar(np.arange(len(regimes)) + 0.2 * offset, heights, 0.2, label=task)
            axis.set_xticks(np.arange(len(regimes)) + 0.3, regimes)
        axis.set_title(f"{split} left out")
        axis.set_ylabel("mean error, %")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(out / "error_by_regime.png", dpi=110)
    plt.close(figure)
    return "error_by_regime"


def _density_plot(out: Path) -> str:
    from matplotlib import pyplot as plt

    grids = json.loads((out / "density.json").read_text())
    lines = [f"{split}, {task.name}" for split in ("shapes: new shapes", "gpu: h200_sxm") for task in TASKS]
    wanted = [name for name in lines if name in grids]
    figure, axes = plt.subplots(2, 4, figsize=(15, 6.2), squeeze=False)
    for axis, name in zip(axes.flat, wanted, strict=False):
        counts = np.array(grids[name]).T
        axis.pcolormesh(10**GRID_TIME, 10**GRID_RATIO, np.log1p(counts), cmap="viridis")
        axis.axhline(1, color="white", linewidth=0.6)
        axis.set(xscale="log", title=name, xlabel="measured, µs", ylabel="predicted / measured")
        axis.title.set_fontsize(8)
    for axis in axes.flat[len(wanted) :]:
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(out / "predicted_against_measured.png", dpi=110)
    plt.close(figure)
    return "predicted_against_measured"
