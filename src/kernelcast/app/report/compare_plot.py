"""A comparison of GPUs that serve a model, as a picture: cost and throughput, latency, and a tornado of specs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kernelcast.app.report.compare import Gains, gpu_text, money, way_text
from kernelcast.app.report.picture import matplotlib_plots, plain_numbers, save
from kernelcast.search.compare.compare import Comparison, ServingForecast
from kernelcast.search.compare.sensitivity import MERIT, Gain

_BLUE, _GREY, _RED, _INK = "#2b6cb0", "#a0aec0", "#c05621", "#4a5568"
_SEEN = {"seen": 1.0, "near": 0.75, "extrapolated": 0.45}  # how strong a colour is


def write_plot(found: Comparison, gains: Gains, path: Path) -> None:
    """Left: a bar a GPU, by what the order is. Right: its latency. Below: what one per cent more of each spec buys."""
    shown = found.fitting[::-1]
    plt = matplotlib_plots()
    high = 1.3 + 0.27 * max(3, len(shown))
    low = 0.9 + 0.24 * max((len(members) for _, members in gains), default=0) if gains else 0.0
    figure = plt.figure(figsize=(11, high + low), layout="constrained")
    try:
        parts = figure.subfigures(2, 1, height_ratios=(high, low)) if gains else [figure]
        value, time = parts[0].subplots(1, 2, sharey=True, width_ratios=(1.25, 1))
        _values(found, shown, value)
        _times(found, shown, time)
        if gains:
            panels = parts[1].subplots(1, len(gains), squeeze=False)[0]
            for axes, (served, members) in zip(panels, gains, strict=True):
                _tornado(served, members, axes)
        asked = found.scenario
        figure.suptitle(
            f"{asked.model.name}, {asked.stack.name}, {asked.input_len:,} tokens in, {asked.output_len:,} out",
            fontsize=11,
        )
        save(figure, path)
    finally:
        plt.close(figure)


def _values(found: Comparison, shown: list[ServingForecast], axes: Any) -> None:
    """Strong colours rest on measured calls; grey ones do not do all that is asked, and are cut off at the others."""
    by = found.scenario.by or "dollars"
    costs = by == "dollars" and any(one.usd_per_million is not None for one in shown)
    able = [one for one in shown if one.late is None and one.carries] or shown
    limit = max((one.usd_per_million or 0.0 if costs else one.tokens_per_s / one.gpus) for one in able) or 1.0
    for at, one in enumerate(shown):
        value = one.usd_per_million if costs else one.tokens_per_s / one.gpus
        broken = one.late is not None or not one.carries
        colour = _GREY if broken else _BLUE
        if value is not None:
            axes.barh(at, min(value, limit), color=colour, alpha=_SEEN[one.support], height=0.66)
        each = f"{one.tokens_per_s / one.gpus:,.0f} tokens/s a GPU"
        cost = f"no price, {each}" if value is None else money(value) if costs else f"{value:,.0f}"
        text = f"{cost}   {way_text(one)}, batch {one.batch:,}"
        axes.annotate(text, (min(value or 0.0, limit), at), textcoords="offset points", xytext=(4, 0), va="center",
                      fontsize=7.5, color=_INK)  # fmt: skip
    axes.set_xlim(0, 1.6 * limit)
    axes.set_yticks(range(len(shown)), [gpu_text(one.deployment.gpu) for one in shown], fontsize=8)
    axes.set_ylim(-0.6, len(shown) - 0.4)
    axes.set_xlabel("USD per million tokens" if costs else "tokens/s a GPU", fontsize=9)
    _tidy(axes)


def _times(found: Comparison, shown: list[ServingForecast], axes: Any) -> None:
    """Points with their intervals on a scale of powers."""
    for name, colour, shift in (("ttft", _BLUE, 0.14), ("tpot", _RED, -0.14)):
        intervals = [(at, getattr(one, name)) for at, one in enumerate(shown) if getattr(one, name).value]
        if not intervals:
            continue
        likely = [1e3 * interval.value for _, interval in intervals]
        ends = [[1e3 * (interval.value - interval.low) for _, interval in intervals],
                [1e3 * (interval.high - interval.value) for _, interval in intervals]]  # fmt: skip
        axes.errorbar(likely, [at + shift for at, _ in intervals], xerr=ends, fmt="o", ms=4, lw=1.2, capsize=2,
                      color=colour, label=name.upper())  # fmt: skip
        for goal in found.scenario.goals:
            if goal.metric == name:
                axes.axvline(goal.limit_ms, color=colour, lw=1, ls="--", label=f"{name.upper()} limit")
    axes.set_xscale("log")
    plain_numbers(axes.xaxis)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("ms, 80% interval", fontsize=9)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncol=4, frameon=False, fontsize=8)
    _tidy(axes)


def _tornado(served: ServingForecast, members: tuple[Gain, ...], axes: Any) -> None:
    ordered = members[::-1]
    axes.barh([gain.spec for gain in ordered], [gain.percent for gain in ordered], color=_BLUE, height=0.66)
    for at, gain in enumerate(ordered):
        axes.annotate(f"{gain.percent:.2f}%", (gain.percent, at), textcoords="offset points", xytext=(3, 0),
                      va="center", fontsize=7, color=_INK)  # fmt: skip
    axes.set_xlim(0, 1.2 * max(0.05, *(gain.percent for gain in ordered)))
    axes.set_title(gpu_text(served.deployment.gpu), fontsize=9)
    axes.set_xlabel(f"% more {MERIT[served.scenario.by or 'dollars']} for 1% more", fontsize=8)
    axes.tick_params(labelsize=8)
    _tidy(axes)


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
