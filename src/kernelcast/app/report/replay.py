"""A server's own benchmark beside its simulation: as text, as JSON and as a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from kernelcast.app.report.plot import picture
from kernelcast.app.report.simulate import head, pool_fields
from kernelcast.app.report.text import console, digits, evidence_lines, percent, plain_table, plural, show, time_text
from kernelcast.ops.work import Array
from kernelcast.serving.calibrate import CalibratedServer
from kernelcast.serving.metrics import BenchResult, RequestTimes
from kernelcast.serving.replay import ENDINGS, MetricComparison, Replay, ReplayPart, named
from kernelcast.serving.service import OVERHEADS, SPREAD

_NAMES = {"ttft": "to first token", "tpot": "per token", "itl": "between tokens", "e2el": "end to end",
          "request_throughput": "requests/s", "output_throughput": "tokens/s out", "total_token_throughput":
          "tokens/s, all"}  # fmt: skip
_TERMS = {
    "request_s": "each request, before the engine",
    "front_s": "front end, for each request",
    "token_s": "front end, for each prompt token",
    "step_s": "host, for each step",
    "sequence_s": "host, for each sequence of a step",
    "prompt_factor": "prefill, over its forecast",
    "decode_factor": "decode, over its forecast",
    "launch_factor": "launches without a graph, over theirs",
}
_MEASURED, _BEFORE, _AFTER = "#1a202c", "#c05621", "#2b6cb0"


def fields(replay: Replay, before: Replay | None = None, fitted: CalibratedServer | None = None) -> dict[str, Any]:
    """Figures by vLLM's names, each measured and predicted; with what was fitted, where something was."""
    bench = replay.bench
    values: dict[str, Any] = {
        "bench": {"file": str(bench.path), "kind": bench.benchmark, "exact": bench.exact, "requests": len(bench.load),
                  "server": dict(bench.server)},
        "gpus": replay.service.gpus,
        **pool_fields(replay.service.pool),
        "prefill": pool_fields(replay.service.prefill) if replay.service.prefill else None,
        "assumed": list(replay.assumed),
        **_part_fields(replay.whole, before.whole if before else None),
        "parts": [_part_fields(part, before.parts[at] if before else None) for at, part in enumerate(replay.parts)],
        "evidence": replay.runs.rests_on.to_dict(),
    }  # fmt: skip
    if fitted:
        values["calibration"] = {
            "on": fitted.part.name,
            "requests": int(fitted.part.rows.sum()),
            "by_request": fitted.by_request,
            "simulations": fitted.runs,
            "error_before": fitted.error_before,
            "error": fitted.error,
            "before": {name: getattr(fitted.before, name) for name in (*OVERHEADS, SPREAD)},
            "terms": {name: getattr(fitted.stack, name) for name in (*OVERHEADS, SPREAD)},
        }
    return values


def _part_fields(part: ReplayPart, before: ReplayPart | None) -> dict[str, Any]:
    figures = {}
    for figure in part.figures:
        values: dict[str, Any] = {"measured": figure.measured, "predicted": figure.predicted, "error": figure.error}
        if figure.inside is not None:
            values |= {"low": figure.low, "high": figure.high, "inside": figure.inside}
        if before:
            values |= {"uncalibrated": before[figure.name].predicted, "uncalibrated_error": before[figure.name].error}
        figures[figure.name] = values
    return {"name": part.name, "requests": part.requests, "figures": figures}


def print_replay(replay: Replay, before: Replay | None = None, fitted: CalibratedServer | None = None) -> None:
    """What the benchmark was, predicted beside measured, what was fitted, and what was assumed."""
    bench, load = replay.bench, replay.bench.load
    show(head(replay.service))
    rate = "all at once" if not np.isfinite(load.request_rate) else f"{digits(load.request_rate, 3)} requests/s"
    loop = f", at most {load.max_concurrency:,} concurrent" if load.max_concurrency else ""
    show(f"{bench.path.name} ({_format(bench)}): {plural(len(load), 'request')}, {rate}{loop};"
         f" {load.inputs.mean():,.0f} tokens in, {load.outputs.mean():,.0f} out on average", "")  # fmt: skip
    if fitted:
        _print_fitted(fitted)
    if replay.parts and not replay.stages:  # what was fitted on, and the rest
        for at, part in enumerate(replay.parts):
            _print_part(part, before.parts[at] if before else None)
    else:
        _print_part(replay.whole, before.whole if before else None)
        _print_stages(replay.parts, fitted)
    for number, line in enumerate(replay.assumed):
        show(_hung(f"{'assumed' if not number else '':10} {line}"))
    show(*evidence_lines(replay.runs.rests_on))


def _hung(line: str) -> str:
    """Broken where a terminal would, after the label."""
    return textwrap.fill(line, console().width, subsequent_indent=" " * 11)


def _format(bench: BenchResult) -> str:
    names = {"vllm": "vllm bench serve", "sglang": "SGLang bench_serving", "requests": "served requests"}
    return names.get(bench.benchmark, bench.benchmark)


def _print_fitted(fitted: CalibratedServer) -> None:
    how = "each request" if fitted.by_request else "the summary"
    show(f"calibrated on {fitted.part.name} ({how}): {percent(fitted.error_before)} off before, "
         f"{percent(fitted.error)} after", "")  # fmt: skip
    rows = [(_TERMS[name], *(_value(name, getattr(stack, name)) for stack in (fitted.before, fitted.stack)), name)
            for name in OVERHEADS]  # fmt: skip
    rows.append(("how far its steps may be off", "", f"{fitted.stack.spread:.1%}", SPREAD))
    show(plain_table("", "before", "fitted", "", right=("before", "fitted"), rows=rows), "")


def _value(name: str, value: float) -> str:
    if name.endswith("factor"):
        return f"x {value:.3f}"
    return time_text(value) if value >= 1e-9 else "0"


def _print_part(part: ReplayPart, before: ReplayPart | None) -> None:
    if part.name != "all requests":
        show(f"{part.name}:", "")
    show(_table(part, before), verdict(part), "")


def verdict(part: ReplayPart) -> str:
    """In one line: how far off, and how many figures lie in their intervals."""
    if not part.figures:
        return "the file has no figure that is predicted"
    typical = float(np.median([abs(figure.error) for figure in part.figures]))
    inside = [figure.inside for figure in part.figures if figure.inside is not None]
    held = f"; {sum(inside)} of {len(inside)} lie in their 80% intervals" if inside else ""
    return f"figures are off by {percent(typical)} (median){held}"


def _table(part: ReplayPart, before: ReplayPart | None) -> Table:
    earlier = ("before",) if before else ()
    columns = ("", "", "measured", *earlier, "predicted", "error", "80% interval", "")
    rows, last = [], ""
    for figure in part.figures:
        ending, name = _split(figure.name)
        was = (_error(before[figure.name]),) if before else ()
        rows.append((_NAMES[name] if name != last else "", ending, _text(figure, figure.measured), *was,
                     _text(figure, figure.predicted), _error(figure), _interval(figure), _inside(figure)))  # fmt: skip
        last = name
    return plain_table(*columns, right=("measured", *earlier, "predicted", "error"), rows=rows)


def _split(name: str) -> tuple[str, str]:
    for ending in ENDINGS:
        if name.startswith(f"{ending}_"):
            return ending, name.removeprefix(f"{ending}_").removesuffix("_ms")
    return "", name


def _text(figure: MetricComparison, value: float) -> str:
    return time_text(value / 1e3) if figure.name.endswith("_ms") else digits(value)


def _error(figure: MetricComparison) -> str:
    return f"{figure.error:+.1%}"


def _interval(figure: MetricComparison) -> str:
    if figure.low is None or figure.high is None:
        return ""
    if figure.name.endswith("_ms"):
        low, high = (time_text(value / 1e3) for value in (figure.low, figure.high))
        unit = high.rpartition(" ")[2]
        return f"{low.removesuffix(f' {unit}')} to {high}"
    return f"{digits(figure.low)} to {digits(figure.high)}"


def _inside(figure: MetricComparison) -> str:
    """Of what was measured, where it is not as forecast."""
    return "outside" if figure.inside is False else ""


def _print_stages(parts: tuple[ReplayPart, ...], fitted: CalibratedServer | None) -> None:
    """Means and 90th percentiles of each stage, measured, and how far the forecast is off."""
    rows = []
    for part in parts:
        here = " (fitted)" if fitted and fitted.part.name == part.name else ""
        first = (f"{part.name}{here}", f"{part.requests:,}")
        figures = {figure.name: figure for figure in part.figures}
        for name in ("ttft", "tpot", "e2el"):
            pair = [figures.get(f"{ending}_{name}_ms") for ending in ("mean", "p90")]
            cells = [(_text(figure, figure.measured), _error(figure)) if figure else ("", "") for figure in pair]
            rows.append((*first, _NAMES[name], *cells[0], *cells[1]))
            first = ("", "")
    if rows:
        heads = ("", "requests", "", "mean", "error", "p90", "error")
        show(plain_table(*heads, right=("requests", "mean", "p90", "error"), rows=rows), "")


def write_plot(replay: Replay, path: Path, before: Replay | None = None) -> None:
    """How latencies are spread, measured and predicted; and, request by request, over time."""
    bench, served = replay.bench, replay.runs.served
    compared = bench.exact and bench.e2el_s is not None
    with picture(path, (8.0, 10.0 if compared else 7.0), rows=3 if compared else 2) as (figure, axes):
        for axis, name in zip(axes, ("ttft", "tpot"), strict=False):
            _draw_spread(axis, name, bench, served, before.runs.served if before else None)
            axis.set_xlabel(f"{_NAMES[name]}, ms")
            axis.set_ylabel("requests, %")
        if compared:
            _draw_times(axes[2], bench, served["likely"], before.runs.served["likely"] if before else None)
        for axis in axes:
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(alpha=0.2)
        axes[0].legend(loc="lower right", frameon=False)
        deployment = replay.service.pool.deployment
        figure.suptitle(
            f"{deployment.model.name} on {replay.service.gpus} x {deployment.gpu.name}, {deployment.stack.name}"
        )
        figure.tight_layout()


def _draw_spread(axis: Any, name: str, bench: BenchResult, served: Mapping[str, RequestTimes],
                 before: Mapping[str, RequestTimes] | None) -> None:  # fmt: skip
    times_ms = _measured(bench).get(name)
    if times_ms is not None:
        axis.plot(*_shares(times_ms), color=_MEASURED, lw=2, label="measured")
    else:
        points = [(value, p) for p in (50, 90, 95, 99) if (value := named(bench.metrics, f"p{p}_{name}_ms"))]
        axis.plot(*zip(*points, strict=True), "o", color=_MEASURED, label="measured") if points else None
    if before:
        axis.plot(*_shares(_times(before["likely"], name)), color=_BEFORE, lw=1.2, ls="--", label="uncalibrated")
    if "low" in served:
        low, high = (_shares(_times(served[variant], name)) for variant in ("low", "high"))
        axis.fill_betweenx(low[1], low[0], high[0], color=_AFTER, alpha=0.15, lw=0, label="80% interval")
    axis.plot(*_shares(_times(served["likely"], name)), color=_AFTER, lw=1.5, label="predicted")
    axis.set_ylim(0, 101)


def _draw_times(axis: Any, bench: BenchResult, served: RequestTimes, before: RequestTimes | None) -> None:
    axis.plot(bench.load.arrivals_s, bench.e2el_s, "o", ms=5, mfc="none", color=_MEASURED, label="measured")
    if before:
        axis.plot(before.arrival_s, before.e2el_s, ".", ms=3, color=_BEFORE, alpha=0.6, label="uncalibrated")
    axis.plot(served.arrival_s, served.e2el_s, ".", ms=3, color=_AFTER, label="predicted")
    axis.set_xlabel("sent at, s")
    axis.set_ylabel("end to end, s")


def _measured(bench: BenchResult) -> dict[str, Array]:
    """Milliseconds of each request, where the file has them."""
    times_ms: dict[str, Array] = {}
    if bench.ttft_s is not None:
        times_ms["ttft"] = bench.ttft_s * 1e3
        if bench.e2el_s is not None:
            several = bench.load.outputs > 1
            times_ms["tpot"] = (bench.e2el_s - bench.ttft_s)[several] / (bench.load.outputs[several] - 1) * 1e3
    return times_ms


def _times(served: RequestTimes, name: str) -> Array:
    return (served.ttft_s if name == "ttft" else served.tpot_s) * 1e3


def _shares(values: Array) -> tuple[Array, Array]:
    """The distribution at even shares of the requests."""
    shares = np.linspace(0, 100, 201)
    return np.nanpercentile(values, shares), shares
