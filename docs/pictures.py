"""Draws the pictures of method.md from forecasts as they are: `python docs/pictures.py` writes docs/pictures/*.png."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import kernelcast as kc
from kernelcast.app.questions.evidence import all_entries

FOLDER = Path(__file__).with_name("pictures")
TEAL, ORANGE, GREY, PALE = "#00796b", "#e65100", "#607d8b", "#b2dfdb"
STYLE: Any = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#444", "figure.dpi": 110,
    "axes.titlesize": 10, "axes.titleweight": "bold", "legend.frameon": False,
}  # fmt: skip


def limits_of_a_gemm() -> Any:
    """Limits of a prefill's product and of a decode's, with bound, ceiling and forecast."""
    gpu = kc.gpu("h200_sxm")
    figure, both = plt.subplots(1, 2, figsize=(8.4, 2.9))
    for axes, m, what in zip(both, (4096, 16), ("prefill", "decode"), strict=True):
        p = kc.predict(kc.Gemm(m=m, n=4096, k=4096, dtype="bf16"), gpu)
        limits = sorted(((name, time * 1e6) for name, time in p.limits.items() if time > 0), key=lambda item: item[1])
        colours = [ORANGE if name == p.bound_by else PALE for name, _ in limits]
        axes.barh([name for name, _ in limits], [time for _, time in limits], color=colours, height=0.66)
        for time, name, style in ((p.ceiling_s, "ceiling", ":"), (p.time_s, "forecast", "-")):
            axes.axvline(time * 1e6, color=TEAL, linestyle=style, linewidth=1.6, label=f"{name} {time * 1e6:.1f} µs")
        axes.axvspan(p.low_s * 1e6, p.high_s * 1e6, color=TEAL, alpha=0.12, linewidth=0, label="80% interval")
        axes.set(title=f"{what}: {m} x 4096 x 4096, bf16, H200", xlabel="µs", xlim=(0, p.high_s * 1e6 * 1.04))
        axes.legend(loc="lower center", fontsize=7.5)
    return figure


def efficiency_over_a_sweep() -> Any:
    """Bound over forecast as a product grows, on four GPUs."""
    m = np.unique(np.round(2 ** np.linspace(0, 14, 113)).astype(int))
    figure, axes = plt.subplots(figsize=(8.4, 3.1))
    for name, colour in (("a100_sxm", GREY), ("l40s", "#f9a825"), ("h100_sxm", TEAL), ("b200_sxm", ORANGE)):
        table = {
            "op": ["gemm"] * len(m),
            "m": m,
            "n": [8192] * len(m),
            "k": [8192] * len(m),
            "dtype": ["bf16"] * len(m),
        }
        found = kc.predict_table(table, name)
        share = np.asarray(found["bound_us"], float) / np.asarray(found["predicted_us"], float)
        axes.plot(m, 100 * share, color=colour, linewidth=1.5, label=kc.gpu(name).name)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="rows m of a product m x 8192 x 8192, bf16", ylabel="efficiency, %", ylim=(0, 100), xlim=(1, 2**14))
    axes.axvspan(64, 512, color="#eee", zorder=0)
    axes.text(180, 4, "DRAM hands over to tensor cores", ha="center", fontsize=7.5, color="#555")
    axes.legend(loc="lower right", fontsize=7.5)
    return figure


def interval_coverage() -> Any:
    """Of every measured kind: the share of left-out calls inside the 80% interval, and the error."""
    kinds = [entry for entry in all_entries() if entry.error is not None and entry.tested >= 30]
    inside = np.array([100 * (entry.inside or 0.0) for entry in kinds])
    error = np.array([100 * (entry.error or 0.0) for entry in kinds])
    calls = np.array([entry.calls for entry in kinds], float)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 2.9))
    left.hist(inside, bins=np.arange(40, 101, 2.5), weights=calls / calls.sum() * 100, color=PALE, edgecolor=TEAL)
    mean = float(np.average(inside, weights=calls))
    left.axvline(80, color=ORANGE, linewidth=1.6, label="promised: 80%")
    left.axvline(mean, color=TEAL, linestyle=":", linewidth=1.6, label=f"mean: {mean:.0f}%")
    left.set(
        title=f"{len(kinds):,} kinds, calls of unseen shapes",
        xlabel="inside the 80% interval, %",
        ylabel="% of measured calls",
    )
    left.legend(fontsize=7.5, loc="upper left")
    order = np.sort(error)
    right.plot(order, 100 * np.arange(1, len(order) + 1) / len(order), color=TEAL, linewidth=1.6)
    right.set(
        title="mean error of a kind",
        xlabel="% of the measured time",
        ylabel="% of kinds below",
        xlim=(0, 20),
        ylim=(0, 100),
    )
    right.grid(alpha=0.3)
    return figure


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with plt.rc_context(STYLE):
        for draw in (limits_of_a_gemm, efficiency_over_a_sweep, interval_coverage):
            figure = draw()
            figure.tight_layout()
            figure.savefig(FOLDER / f"{draw.__name__}.png", metadata={"Software": None})
            plt.close(figure)


if __name__ == "__main__":
    main()
