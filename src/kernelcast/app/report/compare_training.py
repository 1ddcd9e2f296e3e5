"""A comparison of GPUs that train a model, as text, as JSON and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.text import Text

from kernelcast.app.report.compare import NAME_WIDTH, SHORT, energy, gpu_text, money, price_fields, price_lines, spans
from kernelcast.app.report.json import attributes, plain
from kernelcast.app.report.plot import picture
from kernelcast.app.report.text import binary_bytes_text, cut, dense_table, digits, show, time_text
from kernelcast.app.report.trace import built_lines
from kernelcast.results import SUPPORT
from kernelcast.search.compare.training import TrainingComparison, TrainingRow


def whole_text(found: TrainingComparison) -> str:
    """'1e+12 tokens'"""
    return f"{found.scenario.whole:g} {found.scenario.unit}"


def print_training(found: TrainingComparison, kind: str) -> None:
    """The order first, then what does not fit, and what prices and figures rest on."""
    asked, trace = found.scenario, found.scenario.trace
    size = f"{trace.tokens:,} tokens" if trace.tokens else f"{trace.samples:,} samples"
    how = asked.layout.told if asked.layout else f"the best layout of up to {asked.max_gpus} GPUs of a kind"
    show(Text.assemble((trace.name, "bold cyan"), f"  training, {size} a pass, {digits(trace.parameters)} parameters"),
         *built_lines(trace.built), f"{how}; {whole_text(found)} in all", "", _table(found), "")  # fmt: skip
    show(*(f"no         {gpu_text(row.gpu)}: {row.why}" for row in found.rows if row.best is None))
    show(*price_lines(asked.prices, [row.gpu for row in found.rows], kind))
    levels = sorted({one.step.support for one in found.fitting}, key=list(SUPPORT).index)
    show(*(f"{SHORT[level]:<10} {SUPPORT[level]}" for level in levels))


def _table(found: TrainingComparison) -> Any:
    unit = found.scenario.unit
    rows = []
    for one in found.fitting:
        low, high = (time_text(value) for value in (one.span.low, one.span.high))
        rows.append((
            cut(gpu_text(one.gpu), NAME_WIDTH if not one.gpu.changes else 34), str(one.gpus), cut(one.layout.told, 14),
            time_text(one.step.time_s), f"{low}-{high}", digits(one.units_per_s, 3), digits(one.hours / 24, 3),
            money(one.usd), energy(one.joules), binary_bytes_text(one.step.memory.used_bytes).replace("iB", ""),
            next(iter(one.bound_by), "-"), SHORT[one.step.support],
        ))  # fmt: skip
    heads = ("GPU", "n", "way", "step", "80%", f"{unit}/s", "days", "USD", "MJ", "mem", "binds", "sure")
    return dense_table(*heads, left=("GPU", "way", "binds", "sure"), rows=rows, gap=1)


def fields(found: TrainingComparison, kind: str) -> dict[str, Any]:
    asked = found.scenario
    told = {
        "model": asked.trace.name,
        "mode": "training",
        "by": asked.by or "dollars, then samples a second and GPU",
        "max_gpus": asked.max_gpus,
        asked.unit: asked.whole,
        "price_kind": kind,
        **({"built": asked.trace.built} if asked.trace.built else {}),
        "rows": [{"rank": at, **_row(row)} for at, row in enumerate(found.rows, start=1)],
    }
    return dict(plain(told))


def _row(row: TrainingRow) -> dict[str, Any]:
    chip, one = row.gpu, row.best
    told = {"gpu": chip.id, "name": gpu_text(chip), "gpu_changes": dict(chip.changes), "fits": one is not None,
            "why": row.why}  # fmt: skip
    if one is None:
        return told
    step, memory, unit = one.step, one.step.memory, one.scenario.unit
    return told | {
        "gpus": one.gpus,
        "plan": attributes(one.layout, "dp", "tp", "pp", "ep", "zero", "micro_batches"),
        **spans("time_s", one.span),
        f"{unit}_per_s": one.units_per_s,
        f"{unit}_per_s_per_gpu": one.units_per_s / one.gpus,
        "mfu": step.mfu,
        "hours": one.hours,
        "usd": one.usd,
        **spans("joules", one.joules),
        "memory_bytes": memory.used_bytes,
        "memory": memory.fields("gpu_bytes"),
        "launch_bound": step.launch_bound,
        "bound_by": next(iter(one.bound_by), None),
        "bound_shares": one.bound_by,
        "support": step.support,
        "price": price_fields(one.scenario.price(chip)),
    }


def write_plot(found: TrainingComparison, path: Path) -> None:
    """A bar a GPU: tokens or samples a second and GPU with the interval, and what the training costs beside it."""
    shown = found.fitting[::-1]
    with picture(path, (8.5, 1.4 + 0.3 * len(shown))) as (figure, (axes,)):
        rates = [one.units_per_s / one.gpus for one in shown]
        below = [rate - rate * one.step.time_s / one.span.high for rate, one in zip(rates, shown, strict=True)]
        above = [rate * one.step.time_s / one.span.low - rate for rate, one in zip(rates, shown, strict=True)]
        axes.barh([gpu_text(one.gpu) for one in shown], rates, xerr=[below, above], color="#2b6cb0", height=0.62,
                  error_kw={"lw": 1, "capsize": 2, "ecolor": "#1a202c"})  # fmt: skip
        for at, (one, rate, up) in enumerate(zip(shown, rates, above, strict=True)):
            cost = f"{money(one.usd)} USD" if one.usd is not None else "no price"
            axes.annotate(f"{one.layout.told}, {cost}", (rate + up, at), textcoords="offset points", xytext=(5, 0),
                          va="center", fontsize=8, color="#4a5568")  # fmt: skip
        axes.set_xlabel(f"{found.scenario.unit}/s a GPU, 80% interval; cost of {whole_text(found)}")
        axes.set_title(f"{found.scenario.trace.name}, training", fontsize=10)
        axes.set_xlim(0, 1.45 * max(rate + up for rate, up in zip(rates, above, strict=True)))
        axes.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
