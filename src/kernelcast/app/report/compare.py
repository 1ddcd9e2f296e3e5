"""A comparison of GPUs that serve a model, as text, as JSON and as a plot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from kernelcast.app.report.json import attributes, interval_fields, plain
from kernelcast.app.report.plot import matplotlib_plots, plain_numbers, save
from kernelcast.app.report.text import (
    SHORT,
    WIDTH,
    bar,
    console,
    dense_table,
    digits,
    parallel_sizes,
    plain_table,
    plural,
    show,
    time_text,
)
from kernelcast.hardware import Gpu
from kernelcast.results import LEVELS, SEEN, SUPPORT, Interval
from kernelcast.search.compare.candidates import ServingScenario
from kernelcast.search.compare.compare import Comparison, Row, ServingForecast
from kernelcast.search.compare.sensitivity import MERIT, Gain

Gains = Sequence[tuple[ServingForecast, tuple[Gain, ...]]]
_BLUE, _GREY, _RED, _INK = "#2b6cb0", "#a0aec0", "#c05621", "#4a5568"
_STRENGTH = {"seen": 1.0, "near": 0.75, "extrapolated": 0.45}  # of a colour
_BEST = {"dollars": "cheapest", "latency": "fastest", "throughput": "most", "joules": "least energy"}


def changes_of(gpu: Gpu) -> str:
    """'dram_bytes_per_s*1.5', a table that grew as a whole by its name; nothing where nothing was changed."""
    changes: dict[str, None] = {}
    for name, value in gpu.changes.items():
        before = gpu.origin.number(name) if gpu.origin else None
        change = f"*{value / before:.4g}" if before else f"={value:g}"
        table, dot, _ = name.partition(".")
        whole = dot and before and all(f"{table}.{dtype}" in gpu.changes for dtype in getattr(gpu, table, {}))
        changes[f"{table if whole else name}{change}"] = None
    return ", ".join(changes)


def gpu_text(gpu: Gpu) -> str:
    """'h100_sxm', or 'h100_sxm dram_bytes_per_s*1.5' of a what-if."""
    return f"{gpu.id} {changes_of(gpu)}".strip()


def layout_text(forecast: ServingForecast) -> str:
    """'4 x tp2': replicas, and the parallel sizes of each."""
    return f"{forecast.replicas} x {' '.join(parallel_sizes(forecast.deployment.layout, '')) or 'tp1'}"


def _ms(interval: Interval) -> str:
    """'139 (128-155)': milliseconds with the interval."""
    if not interval.value:
        return "-"
    ends = (1e3 * interval.low, 1e3 * interval.value, 1e3 * interval.high)
    low, mid, high = (f"{value:,.0f}" if ends[0] >= 10 else f"{value:.1f}" for value in ends)
    return f"{mid} ({low}-{high})"


def money(value: float | None) -> str:
    return "-" if value is None else digits(value, 3)


def megajoules(energy: Interval | None) -> str:
    return "-" if energy is None else digits(energy.value / 1e6, 3)


def bottleneck(forecast: Any) -> str:
    return next(iter(forecast.bound_by), "-")


# ---- as text ----
def print_comparison(comparison: Comparison, gains: Gains, price_kind: str) -> None:
    """The order first, then what does not fit, what one more per cent buys, and what prices and figures rest on."""
    variants = list(dict.fromkeys(changes_of(row.gpu) for row in comparison.rows if row.gpu.changes))
    show(*_scenario_lines(comparison.scenario), "", _serving_table(comparison, variants), "", *_best_lines(comparison))
    if any(row.best and not row.meets for row in comparison.rows):
        show("x          breaks a limit, or needs more GPUs to sustain the rate")
    show(*(f"[{at}]        with {text}" for at, text in enumerate(variants, start=1)))
    unfit: dict[str, list[str]] = {}
    for row in comparison.rows:
        if row.best is None:
            unfit.setdefault(row.why, []).append(" ".join(filter(None, (_name(row.gpu, variants), row.format))))
    show(*(f"no         {', '.join(names)}: {why}" for why, names in unfit.items()))
    if gains:
        show("", _gain_table(gains))
    show("")
    print_basis(comparison, price_kind, {forecast.support for forecast in comparison.fitting})


def _scenario_lines(scenario: ServingScenario) -> list[Any]:
    if scenario.batch is not None:
        load = f"one batch of {scenario.batch:,}"
    elif scenario.rate is not None:
        load = f"{digits(scenario.rate, 3)} requests/s"
    else:
        load = "the batch of most throughput" + (" within the limits" if scenario.goals else "")
    lines: list[Any] = [
        Text.assemble((scenario.model.name, "bold cyan"), f"  {scenario.stack.name}, {scenario.input_len:,} tokens in, "
                      f"{scenario.output_len:,} out; {load}; up to {plural(scenario.max_gpus, 'equal GPU')}"),
        f"format     {', '.join(scenario.formats or ()) or 'as the checkpoint is (--formats allows others)'}",
    ]  # fmt: skip
    limits = ", ".join(f"{goal.metric.upper()} {time_text(goal.limit_ms / 1e3)}" for goal in scenario.goals)
    return lines + ([f"limits     {limits} (mean)"] if limits else [])


def _serving_table(comparison: Comparison, variants: Sequence[str]) -> Any:
    """One line a GPU within 100 columns: the last figure is energy where it is known, else memory. The interval of
    TTFT is in JSON and in the plot."""
    fitting = comparison.fitting
    several = bool(comparison.scenario.formats)
    powered = any(forecast.joules_per_million for forecast in fitting)
    rows: list[tuple[str, ...]] = []
    for row in comparison.rows:
        forecast = row.best
        if forecast is None:
            continue
        precision = f"{forecast.deployment.precision.weights} " if several else ""
        memory = f"{forecast.memory.used_bytes / forecast.memory.gpu_bytes:.0%}"
        rows.append((
            ("" if row.meets else "x ") + _name(row.gpu, variants),
            precision + layout_text(forecast),
            f"{forecast.batch:,}", digits(forecast.ttft.value * 1e3, 3), _ms(forecast.tpot),
            digits(forecast.tokens_per_s, 3), money(forecast.usd_per_million),
            megajoules(forecast.joules_per_million) if powered else memory, bottleneck(forecast),
            SHORT[forecast.support],
        ))  # fmt: skip
    rate = "tok/s in" if not comparison.scenario.model.generates else "tok/s"
    heads: tuple[str, ...] = ("GPU", "layout", "batch", "TTFT ms", "TPOT ms (80%)", rate, "USD/M",
                              "MJ/M" if powered else "mem", "bound", "support")  # fmt: skip
    if console().width < WIDTH:  # a narrow terminal has no room for the interval, the bound, and all figures
        energy = 7 if comparison.scenario.by == "joules" else 6  # else dollars
        heads = (*heads[:4], "TPOT ms", heads[5], heads[energy], "support")
        rows = [(*row[:4], row[4].partition(" (")[0], row[5], row[energy], row[9]) for row in rows]
    return dense_table(*heads, left=("GPU", "layout", "bound", "support"), rows=rows, gap=1)


def _name(gpu: Gpu, variants: Sequence[str]) -> str:
    """'h100_sxm [1]' of a what-if, whose changes are listed below the table."""
    return f"{gpu.id} [{variants.index(changes_of(gpu)) + 1}]" if gpu.changes else gpu.id


def _best_lines(comparison: Comparison) -> list[str]:
    """Of the GPUs that there are (what-ifs are not for sale); where the first is not on measured ground, also the first
    of each better level of evidence."""
    fitting = [row for row in comparison.rows if row.best]
    real = [row for row in fitting if not row.gpu.changes] or fitting
    first = real[0]
    assert first.best is not None
    if not first.meets:
        return [f"best       none meets all limits; {gpu_text(first.gpu)} is nearest: {_shortfall(first.best)}"]
    by = comparison.scenario.by
    best = _BEST[by or "dollars"] if by or first.best.usd_per_million is not None else "most a GPU"
    lines = [f"best       {best}: {_forecast_text(comparison, first)}; {first.best.support}"]
    better = LEVELS.index(first.best.support)
    beside: list[str] = []
    for row in real:
        level = LEVELS.index(row.best.support) if row.best and row.meets else len(LEVELS)
        if level < better:
            label, better = "measured" if level == SEEN else LEVELS[level], level
            beside.append(f"{label:<10} {best} on better evidence: {_forecast_text(comparison, row)}")
    if better != SEEN:
        beside.append("measured   none of these was measured as a whole, with its kernels, on its GPU")
    return lines + beside


def _forecast_text(comparison: Comparison, row: Row) -> str:
    forecast, scenario = row.best, comparison.scenario
    assert forecast is not None
    cost = f", {money(forecast.usd_per_million)} USD per million tokens" if forecast.usd_per_million is not None else ""
    if scenario.by == "joules" and forecast.joules_per_million is not None:
        cost = f", {megajoules(forecast.joules_per_million)} MJ per million tokens{cost.replace(',', ' and', 1)}"
    if scenario.by == "latency":
        cost = f", {time_text(forecast.e2el.value)} a request{cost}"
    each = f"{forecast.batch:,} in a batch" if scenario.batch else plural(forecast.batch, "concurrent request")
    return (f"{forecast.gpus} x {gpu_text(row.gpu)} as {layout_text(forecast)}, {forecast.deployment.precision.label}, "
            f"{each} on each{cost}")  # fmt: skip


def _shortfall(forecast: ServingForecast) -> str:
    """Which limit a forecast misses; nothing where it meets all."""
    if forecast.late:
        return f"{forecast.late.metric.upper()} is {forecast.share(forecast.late):.3g} times its limit"
    return "" if forecast.carries else f"{plural(forecast.gpus, 'GPU')} would sustain the rate"


def _gain_table(gains: Gains) -> Any:
    """A line a spec, a column a GPU, in the order of the first."""
    heads = [gpu_text(forecast.deployment.gpu) for forecast, _ in gains]
    by = gains[0][0].scenario.by or "dollars"
    columns = [{gain.spec: gain.percent for gain in members} for _, members in gains]
    first = next((column for column in columns if column), {})
    most = max(*first.values(), 0.0, 1e-9)
    wide = 24 if console().width >= WIDTH else 8
    rows = [
        (spec, *(f"{column[spec]:+.2f}%" if spec in column else "-" for column in columns), bar(percent / most, wide))
        for spec, percent in first.items()
    ]
    return plain_table(f"1% more of it buys {MERIT[by]}", *heads, "", right=heads, rows=rows)


def print_basis(comparison: Any, price_kind: str, levels: Iterable[str]) -> None:
    """How old prices are, who has none, and what the levels of support mean."""
    prices, gpus = comparison.scenario.prices, [row.gpu for row in comparison.rows]
    ids = list(dict.fromkeys(gpu.known_as for gpu in gpus))
    dates = sorted(str(prices[name].date) for name in ids if name in prices and prices[name].date)
    without = [name for name in ids if name not in prices]
    if any(name in prices for name in ids):
        when = f", read {' to '.join(dict.fromkeys((dates[0], dates[-1])))}" if dates else ""
        price_type = f"{price_kind.replace('_', ' ')}, " if price_kind else ""
        show(f"prices     {price_type}USD a GPU-hour{when}; --json has each with its source")
    if any(gpu.changes for gpu in gpus):
        show("           a what-if has the price of its GPU")
    if without:
        more = f" and {len(without) - 6} more" if len(without) > 6 else ""
        show(f"no price   {', '.join(without[:6])}{more} (--price {without[0]}=USD adds one)")
    show(*(f"{SHORT[level]:<10} {SUPPORT[level]}" for level in sorted(levels, key=list(SUPPORT).index)))


# ---- as JSON ----
def fields(comparison: Comparison, gains: Gains, price_kind: str) -> dict[str, Any]:
    scenario = comparison.scenario
    values: dict[str, Any] = {
        "model": scenario.model.name,
        "stack": scenario.stack.id,
        **attributes(scenario, "input_len", "output_len", "batch", "rate", "max_gpus"),
        "by": scenario.by or "dollars, then tokens_per_s_per_gpu",
        "formats": list(scenario.formats) if scenario.formats else "as the checkpoint is",
        "goals": [{"key": goal.key, "limit_ms": goal.limit_ms} for goal in scenario.goals],
        "price_kind": price_kind,
        "forecasts": comparison.forecasts,
        "rows": [
            row_fields(rank, row, _serving_fields) | {"meets": row.meets, "format": row.format} | _needed_memory(row)
            for rank, row in enumerate(comparison.rows, start=1)
        ],
    }
    if gains:
        values["sensitivity"] = [
            {"gpu": gpu_text(forecast.deployment.gpu), "of": MERIT[scenario.by or "dollars"],
             "percent_per_percent": {gain.spec: gain.percent for gain in members},
             "fields": {gain.spec: list(gain.fields) for gain in members}}
            for forecast, members in gains
        ]  # fmt: skip
    return dict(plain(values))


def _needed_memory(row: Row) -> dict[str, Any]:
    short = row.memory if row.best is None else None
    return {"needed_bytes": short.used_bytes, "available_bytes": short.available_bytes} if short else {}


def row_fields(rank: int, row: Any, forecast_fields: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """A GPU, and the forecast of its best deployment."""
    gpu, forecast = row.gpu, row.best
    values = {"rank": rank, "gpu": gpu.id, "name": gpu_text(gpu), "gpu_changes": dict(gpu.changes),
              "fits": forecast is not None, "why": row.why}  # fmt: skip
    if forecast is None:
        return values
    price = forecast.scenario.price(gpu)
    return values | {
        "gpus": forecast.gpus,
        **forecast_fields(forecast),
        "bound_by": next(iter(forecast.bound_by), None),
        "bound_shares": forecast.bound_by,
        "price": None if price is None else attributes(price, "usd_per_hour", "date", "source"),
    }


def _serving_fields(forecast: ServingForecast) -> dict[str, Any]:
    return {
        **attributes(forecast, "replicas", "batch", "tokens_per_s", "requests_per_s", "usd_per_hour", "support",
                     precision="deployment.precision.label", usd_per_million_tokens="usd_per_million",
                     memory_bytes="memory.used_bytes"),
        "why": _shortfall(forecast),
        "layout": attributes(forecast.deployment.layout, "tp", "pp", "dp", "ep", "micro_batches"),
        **interval_fields("ttft_s", forecast.ttft),
        **interval_fields("tpot_s", forecast.tpot),
        **interval_fields("e2el_s", forecast.e2el),
        "tokens_per_s_per_gpu": forecast.tokens_per_s / forecast.gpus,
        **interval_fields("joules_per_million_tokens", forecast.joules_per_million),
        "memory": forecast.memory.fields("available_bytes", "gpu_bytes"),
    }  # fmt: skip


# ---- as a plot ----
def write_plot(comparison: Comparison, gains: Gains, path: Path) -> None:
    """Left: a bar a GPU, by what the order is. Right: its latency. Below: what one per cent more of each spec buys."""
    shown = comparison.fitting[::-1]
    plt = matplotlib_plots()
    high = 1.3 + 0.27 * max(3, len(shown))
    low = 0.9 + 0.24 * max((len(members) for _, members in gains), default=0) if gains else 0.0
    figure = plt.figure(figsize=(11, high + low), layout="constrained")
    try:
        parts = figure.subfigures(2, 1, height_ratios=(high, low)) if gains else [figure]
        value, time = parts[0].subplots(1, 2, sharey=True, width_ratios=(1.25, 1))
        _values(comparison, shown, value)
        _plot_times(comparison, shown, time)
        if gains:
            panels = parts[1].subplots(1, len(gains), squeeze=False)[0]
            for axes, (served, members) in zip(panels, gains, strict=True):
                _tornado(served, members, axes)
        scenario = comparison.scenario
        figure.suptitle(
            f"{scenario.model.name}, {scenario.stack.name}, {scenario.input_len:,} tokens in, "
            f"{scenario.output_len:,} out",
            fontsize=11,
        )
        save(figure, path)
    finally:
        plt.close(figure)


def _values(comparison: Comparison, shown: list[ServingForecast], axes: Any) -> None:
    """Strong colours rest on measured calls; grey ones miss a limit, and their bars end where the others do."""
    by = comparison.scenario.by or "dollars"
    costs = by == "dollars" and any(forecast.usd_per_million is not None for forecast in shown)
    able = [forecast for forecast in shown if forecast.late is None and forecast.carries] or shown
    limit = (
        max((forecast.usd_per_million or 0.0 if costs else forecast.tokens_per_s / forecast.gpus) for forecast in able)
        or 1.0
    )
    for at, forecast in enumerate(shown):
        value = forecast.usd_per_million if costs else forecast.tokens_per_s / forecast.gpus
        broken = forecast.late is not None or not forecast.carries
        colour = _GREY if broken else _BLUE
        if value is not None:
            axes.barh(at, min(value, limit), color=colour, alpha=_STRENGTH[forecast.support], height=0.66)
        each = f"{forecast.tokens_per_s / forecast.gpus:,.0f} tokens/s a GPU"
        cost = f"no price, {each}" if value is None else money(value) if costs else f"{value:,.0f}"
        text = f"{cost}   {layout_text(forecast)}, batch {forecast.batch:,}"
        axes.annotate(text, (min(value or 0.0, limit), at), textcoords="offset points", xytext=(4, 0), va="center",
                      fontsize=7.5, color=_INK)  # fmt: skip
    axes.set_xlim(0, 1.6 * limit)
    axes.set_yticks(range(len(shown)), [_plot_name(comparison, forecast) for forecast in shown], fontsize=8)
    axes.set_ylim(-0.6, len(shown) - 0.4)
    axes.set_xlabel("USD per million tokens" if costs else "tokens/s a GPU", fontsize=9)
    _tidy(axes)


def _plot_name(comparison: Comparison, forecast: ServingForecast) -> str:
    weights = forecast.deployment.precision.weights if comparison.scenario.formats else ""
    return f"{gpu_text(forecast.deployment.gpu)} {weights}".strip()


def _plot_times(comparison: Comparison, shown: list[ServingForecast], axes: Any) -> None:
    """Points with their intervals on a scale of powers."""
    for name, colour, shift in (("ttft", _BLUE, 0.14), ("tpot", _RED, -0.14)):
        intervals = [
            (at, getattr(forecast, name)) for at, forecast in enumerate(shown) if getattr(forecast, name).value
        ]
        if not intervals:
            continue
        likely = [1e3 * interval.value for _, interval in intervals]
        ends = [[1e3 * (interval.value - interval.low) for _, interval in intervals],
                [1e3 * (interval.high - interval.value) for _, interval in intervals]]  # fmt: skip
        axes.errorbar(likely, [at + shift for at, _ in intervals], xerr=ends, fmt="o", ms=4, lw=1.2, capsize=2,
                      color=colour, label=name.upper())  # fmt: skip
        for goal in comparison.scenario.goals:
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
