"""A comparison of GPUs that train a model, as text, as JSON and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.text import Text

from kernelcast.app.report.compare import (
    bottleneck,
    gpu_text,
    megajoules,
    money,
    print_basis,
    row_fields,
)
from kernelcast.app.report.json import attributes, interval_fields, plain
from kernelcast.app.report.plot import picture
from kernelcast.app.report.text import (
    SHORT,
    WIDTH,
    console,
    dense_table,
    digits,
    plural,
    show,
    time_text,
)
from kernelcast.app.report.trace import built_lines
from kernelcast.search.compare.training import TrainingComparison, TrainingForecast


def print_training(comparison: TrainingComparison, price_kind: str) -> None:
    """The order first, then what does not fit, and what prices and figures rest on."""
    scenario = comparison.scenario
    tokens, samples = scenario.pass_tokens, scenario.pass_samples
    size = plural(tokens, "token") if tokens else plural(samples, "sample")
    most = plural(scenario.max_gpus, "equal GPU")
    layout = scenario.layout.label if scenario.layout else f"the best layout of up to {most}"
    how = f"  training, {size} a pass, {digits(scenario.parameters)} parameters"
    name = Text.assemble((scenario.name, "bold cyan"), how)
    show(name, *built_lines(scenario.built), f"{layout}; {_whole_text(comparison)} in all", "",
         _training_table(comparison), "")  # fmt: skip
    show(*(f"no         {gpu_text(row.gpu)}: {row.why}" for row in comparison.rows if row.best is None))
    print_basis(comparison, price_kind, {forecast.step.support for forecast in comparison.fitting})


def _training_table(comparison: TrainingComparison) -> Any:
    rows: list[tuple[str, ...]] = [
        (
            gpu_text(forecast.gpu), str(forecast.gpus),
            forecast.layout.label, time_text(forecast.step.time_s, 3),
            f"{time_text(forecast.interval.low, 3)}-{time_text(forecast.interval.high, 3)}",
            digits(forecast.units_per_s, 3), digits(forecast.hours / 24, 3), money(forecast.usd),
            megajoules(forecast.joules),
            digits(forecast.memory.used_bytes / 2**30, 3), bottleneck(forecast),
            SHORT[forecast.step.support],
        )
        for forecast in comparison.fitting
    ]  # fmt: skip
    heads: tuple[str, ...] = ("GPU", "n", "layout", "step", "80%", f"{comparison.scenario.unit}/s", "days", "USD", "MJ",
                              "GiB", "bound", "supp.")  # fmt: skip
    if console().width < WIDTH:  # a narrow terminal has no room for the interval, what binds, and all figures
        heads, *rows = [(*row[:4], *row[5:8], row[9], row[11]) for row in (heads, *rows)]
    return dense_table(*heads, left=("GPU", "layout", "bound", "supp."), rows=rows, gap=1)


def _whole_text(comparison: TrainingComparison) -> str:
    """'1e+12 tokens'"""
    return f"{comparison.scenario.whole:g} {comparison.scenario.unit}"


def fields(comparison: TrainingComparison, price_kind: str) -> dict[str, Any]:
    scenario = comparison.scenario
    values = {
        "model": scenario.name,
        "mode": "training",
        "by": scenario.by or "dollars, then samples a second and GPU",
        "max_gpus": scenario.max_gpus,
        scenario.unit: scenario.whole,
        "price_kind": price_kind,
        **({"built": scenario.built} if scenario.built else {}),
        "rows": [row_fields(rank, row, _training_fields) for rank, row in enumerate(comparison.rows, start=1)],
    }
    return dict(plain(values))


def _training_fields(forecast: TrainingForecast) -> dict[str, Any]:
    step, unit = forecast.step, forecast.scenario.unit
    return {
        "plan": attributes(forecast.layout, "dp", "tp", "pp", "ep", "zero", "micro_batches"),
        **interval_fields("time_s", forecast.interval),
        f"{unit}_per_s": forecast.units_per_s,
        f"{unit}_per_s_per_gpu": forecast.units_per_s / forecast.gpus,
        **attributes(forecast, "hours", "usd"),
        **attributes(step, "mfu", "support"),
        **attributes(forecast, "launch_bound", memory_bytes="memory.used_bytes"),
        **interval_fields("joules", forecast.joules),
        "memory": forecast.memory.fields("gpu_bytes"),
    }


def write_plot(comparison: TrainingComparison, path: Path) -> None:
    """A bar a GPU: tokens or samples a second and GPU with the interval, and what the training costs beside it."""
    shown = comparison.fitting[::-1]
    with picture(path, (8.5, 1.4 + 0.3 * len(shown))) as (figure, (axes,)):
        rates = [forecast.units_per_s / forecast.gpus for forecast in shown]
        below = [
            rate - rate * forecast.step.time_s / forecast.interval.high
            for rate, forecast in zip(rates, shown, strict=True)
        ]
        above = [
            rate * forecast.step.time_s / forecast.interval.low - rate
            for rate, forecast in zip(rates, shown, strict=True)
        ]
        names = [gpu_text(forecast.gpu) for forecast in shown]
        axes.barh(names, rates, xerr=[below, above], color="#2b6cb0", height=0.62,
                  error_kw={"lw": 1, "capsize": 2, "ecolor": "#1a202c"})  # fmt: skip
        for at, (forecast, rate, up) in enumerate(zip(shown, rates, above, strict=True)):
            cost = f"{money(forecast.usd)} USD" if forecast.usd is not None else "no price"
            axes.annotate(f"{forecast.layout.label}, {cost}", (rate + up, at), textcoords="offset points",
                          xytext=(5, 0), va="center", fontsize=8, color="#4a5568")  # fmt: skip
        axes.set_xlabel(f"{comparison.scenario.unit}/s a GPU, 80% interval; cost of {_whole_text(comparison)}")
        axes.set_title(f"{comparison.scenario.name}, training", fontsize=10)
        axes.set_xlim(0, 1.45 * max(rate + up for rate, up in zip(rates, above, strict=True)))
        axes.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
