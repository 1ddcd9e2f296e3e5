"""A comparison of GPUs that serve a model, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from kernelcast.app.report.json import attributes, plain
from kernelcast.app.report.plot import matplotlib_plots, plain_numbers, save
from kernelcast.app.report.text import WIDTH, bar, console, cut, dense_table, digits, plain_table, show, time_text
from kernelcast.hardware import Gpu
from kernelcast.hardware.prices import Price
from kernelcast.results import SUPPORT, Interval
from kernelcast.search.compare.candidates import ServingScenario
from kernelcast.search.compare.compare import Comparison, Row, ServingForecast
from kernelcast.search.compare.sensitivity import MERIT, Gain
from kernelcast.search.goals import Goal

Gains = Sequence[tuple[ServingForecast, tuple[Gain, ...]]]
_BLUE, _GREY, _RED, _INK = "#2b6cb0", "#a0aec0", "#c05621", "#4a5568"
_SEEN = {"seen": 1.0, "near": 0.75, "extrapolated": 0.45}  # how strong a colour is
NAME_WIDTH = 19
SHORT = {"seen": "seen", "near": "near", "extrapolated": "extr."}
BY = {"dollars": "cheapest", "latency": "fastest", "throughput": "most", "joules": "least energy"}


# ---- in words ----
def changes_of(chip: Gpu) -> str:
    """'dram_bytes_per_s*1.5', of a table that grew as a whole one word; nothing where nothing was changed."""
    told: dict[str, None] = {}
    for name, value in chip.changes.items():
        before = chip.origin.number(name) if chip.origin else None
        change = f"*{value / before:.4g}" if before else f"={value:g}"
        table = name.partition(".")[0]
        whole = before and all(f"{table}.{dtype}" in chip.changes for dtype in getattr(chip, table, {})) \
            if "." in name else False  # fmt: skip
        told[f"{table if whole else name}{change}"] = None
    return ", ".join(told)


def gpu_text(chip: Gpu) -> str:
    """'h100_sxm', or 'h100_sxm dram_bytes_per_s*1.5' of a what-if."""
    return f"{chip.id} {changes_of(chip)}".strip()


def layout_text(layout: Any) -> str:
    cuts = [f"{name}{getattr(layout, name)}" for name in ("tp", "pp", "dp", "ep") if getattr(layout, name) > 1]
    return " ".join(cuts) or "tp1"


def way_text(found: ServingForecast) -> str:
    """'4 x tp2': engines and how each is cut."""
    return f"{found.replicas} x {layout_text(found.deployment.layout)}"


def limits_text(goals: Sequence[Goal]) -> str:
    return ", ".join(f"{goal.metric.upper()} {time_text(goal.limit_ms / 1e3)}" for goal in goals)


def _ms(span: Interval) -> str:
    """'139 (128-155)': milliseconds with the interval."""
    if not span.value:
        return "-"
    ends = (1e3 * span.low, 1e3 * span.value, 1e3 * span.high)
    low, mid, high = (f"{value:,.0f}" if ends[0] >= 10 else f"{value:.1f}" for value in ends)
    return f"{mid} ({low}-{high})"


def money(value: float | None) -> str:
    return "-" if value is None else digits(value, 3)


def energy(span: Interval | None) -> str:
    """Megajoules."""
    return "-" if span is None else digits(span.value / 1e6, 3)


def asked_lines(asked: ServingScenario) -> list[Any]:
    """What was asked of every GPU."""
    if asked.batch is not None:
        load = f"one batch of {asked.batch:,}"
    elif asked.rate is not None:
        load = f"{digits(asked.rate, 3)} requests/s"
    else:
        load = "the batch that gives most" + (" within the limits" if asked.goals else "")
    lines: list[Any] = [
        Text.assemble((asked.model.name, "bold cyan"), f"  {asked.stack.name}, {asked.input_len:,} tokens in, "
                      f"{asked.output_len:,} out; {load}; up to {asked.max_gpus} GPUs of a kind"),
    ]  # fmt: skip
    formats = ", ".join(asked.formats) if asked.formats else "as the checkpoint is (--formats allows others)"
    lines.append(f"format     {formats}")
    return lines + ([f"limits     {limits_text(asked.goals)} (mean)"] if asked.goals else [])


def print_comparison(found: Comparison, gains: Gains, kind: str) -> None:
    """The order first, then what does not fit, what one more per cent buys, and what prices and figures rest on."""
    asked = found.scenario
    show(*asked_lines(asked), "", _table(found), "")
    lines = _best_lines(found)
    if any(row.best and not row.meets for row in found.rows):
        lines.append("x          breaks a limit, or needs more GPUs to carry the rate")
    lines += [f"[{at}]        with {text}" for at, text in enumerate(what_ifs(found), start=1)]
    unfit: dict[str, list[str]] = {}
    for row in found.rows:
        if row.best is None:
            unfit.setdefault(row.why, []).append(_name(row.gpu, what_ifs(found)))
    lines += [f"no         {', '.join(names)}: {why}" for why, names in unfit.items()]
    show(*lines)
    if gains:
        show("", _gain_table(gains))
    show("", *price_lines(asked.prices, [row.gpu for row in found.rows], kind))
    levels = sorted({one.support for one in found.fitting}, key=list(SUPPORT).index)
    show(*(f"{SHORT[level]:<10} {SUPPORT[level]}" for level in levels))


def _table(found: Comparison) -> Any:
    """One line a GPU within 100 columns: the last figure is energy where it is known, else memory. The interval of
    TTFT is in JSON and in the picture."""
    asked, variants = found.scenario, what_ifs(found)
    several = len({one.deployment.precision.label for one in found.fitting}) > 1
    powered = any(one.joules_per_million for one in found.fitting)
    rows: list[tuple[str, ...]] = []
    for row in found.rows:
        one = row.best
        if one is None:
            continue
        kind = f"{one.deployment.precision.weights} " if several else ""
        full = f"{one.memory.used_bytes / one.memory.gpu_bytes:.0%}"
        rows.append((
            ("" if row.meets else "x ") + cut(_name(row.gpu, variants), NAME_WIDTH), kind + way_text(one),
            f"{one.batch:,}", digits(one.ttft.value * 1e3, 3), _ms(one.tpot), digits(one.tokens_per_s, 3),
            money(one.usd_per_million),
            energy(one.joules_per_million) if powered else full, next(iter(one.bound_by), "-"), SHORT[one.support],
        ))  # fmt: skip
    rate = "tok/s in" if asked.model.kind == "encoder" else "tok/s"
    spent = "MJ/M" if powered else "mem"
    heads: tuple[str, ...] = ("GPU", "way", "batch", "TTFT ms", "TPOT ms (80%)", rate, "USD/M", spent, "binds", "sure")
    if console().width < WIDTH:  # a narrow terminal has no room for the interval, nor for what binds
        heads = (*heads[:4], "TPOT ms", *heads[5:8], "sure")
        rows = [(*row[:4], row[4].partition(" (")[0], *row[5:8], row[9]) for row in rows]
    return dense_table(*heads, left=("GPU", "way", "binds", "sure"), rows=rows, gap=1)


def what_ifs(found: Comparison) -> list[str]:
    """The changes that rows have, each once."""
    return list(dict.fromkeys(changes_of(row.gpu) for row in found.rows if row.gpu.changes))


def _name(chip: Gpu, variants: Sequence[str]) -> str:
    """'h100_sxm [1]' of a what-if: its changes are told below."""
    return f"{chip.id} [{variants.index(changes_of(chip)) + 1}]" if chip.changes else chip.id


def _best_lines(found: Comparison) -> list[str]:
    """Of the GPUs that there are (what-ifs are not for sale); where the first is far from what was measured, also the
    first that is not."""
    real = [row for row in found.rows if row.best and not row.gpu.changes] or [row for row in found.rows if row.best]
    first, far = real[0], "extrapolated"
    assert first.best is not None
    if not first.meets:
        return [f"best       none does all that is asked; {gpu_text(first.gpu)} is nearest: {short_of(first.best)}"]
    by = found.scenario.by
    word = BY[by or "dollars"] if by or first.best.usd_per_million is not None else "most a GPU"
    lines = [f"best       {word}: {_way_text(found, first)}"]
    nearer = next((row for row in real if row.meets and row.best and row.best.support != far), None)
    if first.best.support == far and nearer is not None:
        lines.append(f"measured   {word} that is near measured calls: {_way_text(found, nearer)}")
    return lines


def _way_text(found: Comparison, row: Row) -> str:
    one = row.best
    assert one is not None
    cost = f", {money(one.usd_per_million)} USD per million tokens" if one.usd_per_million is not None else ""
    if found.scenario.by == "joules" and one.joules_per_million is not None:
        cost = f", {energy(one.joules_per_million)} MJ per million tokens{cost.replace(',', ' and', 1)}"
    if found.scenario.by == "latency":
        cost = f", {time_text(one.e2el.value)} a request{cost}"
    under_way = "in a batch" if found.scenario.batch else "under way"
    return (f"{one.gpus} x {gpu_text(row.gpu)} as {way_text(one)}, {one.deployment.precision.label}, "
            f"{one.batch:,} {under_way} on each{cost}")  # fmt: skip


def short_of(found: ServingForecast) -> str:
    """What a way does not do of what is asked; nothing where it does all."""
    if found.late:
        return f"{found.late.metric.upper()} is {found.share(found.late):.3g} times its limit"
    return "" if found.carries else f"{found.gpus} GPUs would carry the rate"


def _gain_table(gains: Gains) -> Any:
    """A line a spec, a column a GPU, in the order of the first."""
    heads = [gpu_text(one.deployment.gpu) for one, _ in gains]
    by = gains[0][0].scenario.by or "dollars"
    known = [{gain.spec: gain.percent for gain in members} for _, members in gains]
    first = next((own for own in known if own), {})
    most = max(*first.values(), 0.0, 1e-9)
    rows = [
        (spec, *(f"{own[spec]:+.2f}%" if spec in own else "-" for own in known), bar(first[spec] / most, 24))
        for spec in first
    ]
    return plain_table(f"1% more of it buys {MERIT[by]}", *heads, "", right=heads, rows=rows)


def price_lines(prices: Any, chips: Sequence[Gpu], kind: str) -> list[str]:
    """How old prices are, and who has none."""
    ids = list(dict.fromkeys(chip.known_as for chip in chips))
    dated = sorted(prices[name].date for name in ids if name in prices and prices[name].date)
    without = [name for name in ids if name not in prices]
    lines = []
    if any(name in prices for name in ids):
        when = f", read {dated[0]} to {dated[-1]}" if dated else ""
        named = f"{kind.replace('_', ' ')}, " if kind else ""
        lines.append(f"prices     {named}USD a GPU-hour{when}; --json has each with its source")
    if any(chip.changes for chip in chips):
        lines.append("           a what-if costs what the GPU costs that it is of")
    if without:
        more = f" and {len(without) - 6} more" if len(without) > 6 else ""
        lines.append(f"no price   {', '.join(without[:6])}{more} (--price {without[0]}=USD adds one)")
    return lines


# ---- as JSON ----
def spans(name: str, span: Interval | None) -> dict[str, float | None]:
    """``name``, ``name_low``, ``name_high``."""
    if span is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: float(span.value), f"{name}_low": float(span.low), f"{name}_high": float(span.high)}


def price_fields(price: Price | None) -> dict[str, Any] | None:
    return None if price is None else attributes(price, "usd_per_hour", "date", "source")


def fields(found: Comparison, gains: Gains, kind: str) -> dict[str, Any]:
    asked = found.scenario
    told: dict[str, Any] = {
        "model": asked.model.name,
        "stack": asked.stack.id,
        **attributes(asked, "input_len", "output_len", "batch", "rate", "max_gpus"),
        "by": asked.by or "dollars, then tokens_per_s_per_gpu",
        "formats": list(asked.formats) if asked.formats else "as the checkpoint is",
        "goals": [{"key": goal.key, "limit_ms": goal.limit_ms} for goal in asked.goals],
        "price_kind": kind,
        "forecasts": found.forecasts,
        "rows": [{"rank": at, **_row(row)} for at, row in enumerate(found.rows, start=1)],
    }
    if gains:
        told["sensitivity"] = [
            {"gpu": gpu_text(one.deployment.gpu), "of": MERIT[asked.by or "dollars"],
             "percent_per_percent": {gain.spec: gain.percent for gain in members},
             "fields": {gain.spec: list(gain.fields) for gain in members}}
            for one, members in gains
        ]  # fmt: skip
    return dict(plain(told))


def _row(row: Row) -> dict[str, Any]:
    chip, one = row.gpu, row.best
    told: dict[str, Any] = {"gpu": chip.id, "name": gpu_text(chip), "gpu_changes": dict(chip.changes),
                            "fits": one is not None, "meets": row.meets}  # fmt: skip
    if one is None:
        short = row.memory
        needs = {"needed_bytes": short.used_bytes, "available_bytes": short.available_bytes} if short else {}
        return told | {"why": row.why} | needs
    place = one.deployment
    return told | {
        "why": short_of(one),
        "gpus": one.gpus,
        "replicas": one.replicas,
        "layout": attributes(place.layout, "tp", "pp", "dp", "ep", "micro_batches"),
        "precision": place.precision.label,
        "batch": one.batch,
        **spans("ttft_s", one.ttft),
        **spans("tpot_s", one.tpot),
        **spans("e2el_s", one.e2el),
        "tokens_per_s": one.tokens_per_s,
        "tokens_per_s_per_gpu": one.tokens_per_s / one.gpus,
        "requests_per_s": one.requests_per_s,
        "usd_per_hour": one.usd_per_hour,
        "usd_per_million_tokens": one.usd_per_million,
        **spans("joules_per_million_tokens", one.joules_per_million),
        "memory_bytes": one.memory.used_bytes,
        "memory": one.memory.fields("available_bytes", "gpu_bytes"),
        "bound_by": next(iter(one.bound_by), None),
        "bound_shares": one.bound_by,
        "support": one.support,
        "price": price_fields(one.scenario.price(chip)),
    }


# ---- as a plot ----
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
        _plot_times(found, shown, time)
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


def _plot_times(found: Comparison, shown: list[ServingForecast], axes: Any) -> None:
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
