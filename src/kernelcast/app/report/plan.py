"""A plan as text, as JSON, and as a picture of cost against latency."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from kernelcast.app.report.json import attributes, plain
from kernelcast.app.report.plot import picture, plain_numbers
from kernelcast.app.report.text import (
    SHORT,
    WIDTH,
    console,
    decided,
    dense_table,
    digits,
    evidence_lines,
    interval_texts,
    parallel_sizes,
    plain_table,
    plural,
    show,
    show_command,
    time_text,
)
from kernelcast.results import LEVELS, SEEN
from kernelcast.search.plan.commands import commands
from kernelcast.search.plan.plan import Headroom, Plan
from kernelcast.search.plan.simulator import SimulatedService
from kernelcast.search.plan.space import EngineOption, ServiceCandidate
from kernelcast.serving.goals import Goal
from kernelcast.serving.load import Load

_BINDS = {
    "KV cache": "the KV cache is full",
    "max_num_seqs": "max_num_seqs keeps requests out",
    "front end": "the front ends (HTTP, tokeniser) bind: more replicas share them",
    "compute": "compute binds",
}
_PLURAL = {
    "does not fit": "do not fit", "meets the goals, but is": "meet the goals, but are",
    "simulated, and misses": "simulated, and miss", "needs more": "need more",
}  # fmt: skip
_LEFT_OUT = 6  # GPUs without a price that are named


# ---- as text ----
def engine_text(setting: ServiceCandidate) -> str:
    """'vLLM fp8, 2 x tp 4': what runs, without the GPU's name."""
    deployment = setting.engine.deployment
    if setting.prefill is None:
        return (
            f"{deployment.stack.name} {deployment.precision.label}, {setting.replicas} x {layout_sizes(setting.engine)}"
        )
    prefill = f"{setting.prefill_replicas} x {layout_sizes(setting.prefill)} prefill"
    return (f"{deployment.stack.name} {deployment.precision.label}, {prefill}, "
            f"{setting.replicas} x {layout_sizes(setting.engine)} decode")  # fmt: skip


def short_text(setting: ServiceCandidate, gap: str = " ") -> str:
    """The same for a table: 'vllm fp8, 4 x tp 1 + 1 x tp 4', prefill engines first; without gaps 'vllm fp8 tp1'."""
    deployment = setting.engine.deployment
    readers = f"{setting.prefill_replicas} x {layout_sizes(setting.prefill, gap)} + " if setting.prefill else ""
    engine = f"{deployment.stack.id} {deployment.precision.label}{',' if gap else ''}"
    count = f"{setting.replicas} x " if gap or readers or setting.replicas > 1 else ""
    return f"{engine} {readers}{count}{layout_sizes(setting.engine, gap)}"


def layout_sizes(candidate: EngineOption, gap: str = " ") -> str:
    return " ".join(parallel_sizes(candidate.deployment.layout, gap)) or f"tp{gap}1"


def limits_text(setting: ServiceCandidate) -> str:
    limits = setting.limits
    return f"max_num_seqs {limits.max_num_seqs:,}, max_num_batched_tokens {limits.max_num_batched_tokens:,}"


def gpus_text(setting: ServiceCandidate) -> str:
    return f"{setting.gpus} x {setting.engine.deployment.gpu.id}"


def load_text(load: Load) -> str:
    if load.max_concurrency:
        rate = plural(load.max_concurrency, "concurrent request")
    else:
        finite = math.isfinite(load.request_rate)
        rate = f"{digits(load.request_rate, 3)} requests/s" if finite else "requests all at once"
    return f"{rate} ({len(load):,} in all; {load.inputs.mean():,.0f} tokens in, {load.outputs.mean():,.0f} out)"


def goals_text(goals: tuple[Goal, ...]) -> str:
    return ", ".join(f"{goal.name} {time_text(goal.limit_ms / 1e3)}" for goal in goals)


def sureness(trial: SimulatedService) -> str:
    """How surely a setting meets its goals."""
    if trial.sure is None:
        return "meets the goals at the likely time; the slow end was not run"
    if trial.sure:
        return "meets the goals at the slow end of the forecast too"
    late = max(trial.goals, key=lambda goal: goal.share(trial.simulation.high))
    slow = time_text(trial.simulation.high[late.key] / 1e3)
    if late.share(trial.simulation.high) <= 1:
        return "meets the goals at the likely time only: at the slow end the queue grows"
    return f"meets the goals at the likely time only: at the slow end {late.name} is {slow}"


def growth_text(growth: Headroom) -> str:
    unit = "concurrent requests" if growth.closed else "requests/s"
    what = f"{growth.goal.name} breaks" if growth.goal else "the queue grows"
    return (f"holds up to {digits(growth.holds, 3)} {unit}; at {digits(growth.breaks, 3)} {what}: "
            f"{_BINDS.get(growth.binds, growth.binds)}")  # fmt: skip


def verdict(plan: Plan) -> str:
    """The answer in one sentence."""
    if plan.choice is not None:
        setting = plan.choice.candidate
        so_far = "" if plan.complete else " so far (interrupted)"
        return f"cheapest{so_far}: {gpus_text(setting)}, {setting.usd_per_hour:.2f} USD/h; {sureness(plan.choice)}"
    if not plan.complete:
        return "interrupted before any setting met the goals"
    most, within = plan.best_effort, f"no setting within {plural(plan.space.max_gpus, 'GPU')}"
    if math.isfinite(plan.space.budget):
        within += f" and {plan.space.budget:.2f} USD/h"
    if most is not None and most.binds == "budget":
        return f"{within} holds {plan.model.name}: every engine costs more"
    if most is None or most.nearest is None:
        return f"{within} holds {plan.model.name}: its weights do not fit, or no GPU here has the format"
    where = f"{gpus_text(most.nearest.candidate)} ({engine_text(most.nearest.candidate)})"
    if most.rate:
        return f"{within} holds this: at most {digits(most.rate, 3)} requests/s on {where}: {most.binds} binds"
    goal = most.nearest.nearest
    least = time_text(most.nearest.simulation.metrics.get(goal.key, 0.0) / 1e3)
    return (f"{within} meets these goals at any load: with hardly a request {goal.name} is {least} at best, on "
            f"{where}, and the goal is {time_text(goal.limit_ms / 1e3)}")  # fmt: skip


def print_plan(plan: Plan, hub_name: str, unpriced: list[str]) -> None:
    """The choice first, then how surely, where it breaks, what else there is, and how to start it."""
    end = ", at the slow end of the forecast" if plan.sure else ""
    show(Text.assemble((plan.model.name, "bold cyan"), f"  {load_text(plan.load)}"))
    show(f"goals      {goals_text(plan.goals)}{end}", "")
    if plan.choice is None:
        show(Text(verdict(plan), "bold"))
    else:
        _print_choice(plan, plan.choice)
    if plan.front:
        show("", *_front(plan))
    if plan.choice is not None:
        show("", "start it")
        for line in commands(plan.choice.candidate, hub_name):
            show_command(line)
    show("", *_searched(plan), *_unpriced(unpriced))


def _print_choice(plan: Plan, choice: SimulatedService) -> None:
    setting = choice.candidate
    name = setting.engine.deployment.gpu.name
    so_far = "" if plan.complete else " so far (interrupted)"
    first = Text.assemble((f"cheapest{so_far}   ", ""), (f"{setting.gpus} x {name}", "bold"), "   ",
                          (f"{setting.usd_per_hour:.2f} USD/h", "bold green"))  # fmt: skip
    tokens = f"   {digits(choice.usd_per_million, 3)} USD per million tokens out"
    below = len(first) + len(tokens) > console().width  # a long name of a GPU
    show(first if below else first + Text(tokens), *([f"        {tokens}"] if below else []),
         f"           {engine_text(setting)}; {limits_text(setting)}",
         f"           {sureness(choice)}", *_evidence(plan, choice))  # fmt: skip
    metrics, low, high = choice.simulation.metrics, choice.simulation.low, choice.simulation.high
    shown = [(goal.name, time_text(goal.limit_ms / 1e3), goal.key) for goal in choice.goals]
    rows = []
    for name, limit, key in (*shown, *((name, "", key) for name, key in _also(plan))):
        value_s, low_s, high_s = (ends.get(key, metrics.get(key, 0.0)) / 1e3 for ends in (metrics, low, high))
        rows.append((name, limit, *interval_texts(value_s, low_s, high_s)))
    show("", plain_table("", "goal", "time", "80% interval", right=("goal", "time"), rows=rows), "")
    if plan.headroom is not None:
        show(f"more load  {growth_text(plan.headroom)}")


def _also(plan: Plan) -> list[tuple[str, str]]:
    """Names and keys of the mean latencies that are shown beside the goals: those of which none is a goal's."""
    given = {goal.metric for goal in plan.goals}
    return [(f"{name.upper()} mean", f"mean_{name}_ms") for name in ("ttft", "tpot") if name not in given]


def _evidence(plan: Plan, choice: SimulatedService) -> list[str]:
    """What the choice rests on, and what is better known or surer beside it."""
    lines = []
    if choice.simulation.supports is not None:
        lines.append(f"           support {decided(choice.simulation.supports)}")
    lines += [f"{'measured' if each.support == LEVELS[SEEN] else each.support:<10} {_beside(each)}"
              for each in plan.better_known]  # fmt: skip
    if choice.support != LEVELS[SEEN] and plan.measured is None and plan.complete:
        lines.append("measured   no setting that was measured end to end on its GPU, and its kernels, meets the goals")
    surer = plan.surer
    if surer is not None and surer not in plan.better_known:
        lines.append(f"surer      {_beside(surer)} (--sure looks for the cheapest that does)")
    return lines


def _beside(trial: SimulatedService) -> str:
    setting = trial.candidate
    return f"{gpus_text(setting)}, {setting.usd_per_hour:.2f} USD/h, {engine_text(setting)}; {sureness(trial)}"


def _front(plan: Plan) -> list[Any]:
    columns = [(goal.name, goal.key) for goal in plan.goals] + [each for each in _also(plan) if "tpot" in each[1]]
    names, wide = [name for name, _ in columns], console().width >= WIDTH
    rows = []
    for trial in plan.front:
        times = [time_text(trial.simulation.metrics.get(key, 0.0) / 1e3, 3) for _, key in columns]
        verdict = (
            "the choice" if trial is plan.choice else "surely" if trial.sure else "likely" if trial.meets else "misses"
        )
        support = trial.support or ""
        engine = short_text(trial.candidate, " " if wide else "")
        rows.append((f"{trial.usd_per_hour:.2f}", gpus_text(trial.candidate), engine, *times, f"{trial.share:.0%}",
                     support if wide else SHORT.get(support, ""), verdict))  # fmt: skip
    heads = ("USD/h", "GPUs", "engine", *names, "of goal", "support", "meets")
    count = plural(len(rows), "setting")
    return [f"cost against latency ({count} that no other beats in both)",
            dense_table(*heads, left=("GPUs", "engine", "support", "meets"), rows=rows, gap=1)]  # fmt: skip


def _searched(plan: Plan) -> list[str]:
    counts = sorted(plan.discarded.items(), key=lambda item: -item[1])
    counted = "; ".join(f"{count:,} {reason(why, count)}" for why, count in counts)
    work = f"{plural(plan.settings, 'setting')}, {plural(plan.runs, 'simulation')}, {plan.seconds:.0f} s"
    lines = [f"searched   {work}: {counted}"]
    trial = plan.choice
    if trial is not None:
        candidate = trial.candidate.engine
        when = f", {candidate.price.date}" if candidate.price.date else ""
        price = f"{candidate.deployment.gpu.id} {candidate.price.usd_per_hour:.2f} USD a GPU-hour"
        lines.append(f"price      {price}{when}, {candidate.price.source}")
        if trial.simulation.rests_on is not None:
            lines += evidence_lines(trial.simulation.rests_on)
    return lines


def reason(why: str, count: int) -> str:
    """Why settings were discarded, after their number."""
    for one, many in _PLURAL.items() if count != 1 else ():
        why = why.replace(one, many)
    return why


def _unpriced(names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _LEFT_OUT} more" if len(names) > _LEFT_OUT else ""
    return [f"no price   {', '.join(names[:_LEFT_OUT])}{more}: left out (--price {names[0]}=USD adds one)"]


# ---- as JSON ----
def fields(plan: Plan, hub_name: str, unpriced: list[str]) -> dict[str, Any]:
    choice, growth, most = plan.choice, plan.headroom, plan.best_effort
    values: dict[str, Any] = {
        "model": plan.model.name,
        "goals": [{"key": goal.key, "limit_ms": goal.limit_ms} for goal in plan.goals],
        "load": {"request_rate": plan.load.request_rate, "max_concurrency": plan.load.max_concurrency,
                 "num_prompts": len(plan.load), "input_tokens": float(plan.load.inputs.mean()),
                 "output_tokens": float(plan.load.outputs.mean())},
        "answer": verdict(plan),
        "complete": plan.complete,
        "choice": _trial(choice) if choice else None,
        "commands": commands(choice.candidate, hub_name) if choice else [],
        "measured": _trial(plan.measured) if plan.measured else None,
        "better_known": [_trial(trial) for trial in plan.better_known],
        "surer": _trial(plan.surer) if plan.surer else None,
        "front": [_trial(trial) for trial in plan.front],
        "growth": {"holds": growth.holds, "breaks": growth.breaks, "unit": "requests under way" if growth.closed else
                   "requests/s", "goal": growth.goal.key if growth.goal else None, "binds": growth.binds,
                   "text": growth_text(growth)} if growth else None,
        "most": {"request_rate": most.rate, "binds": most.binds,
                 "setting": _trial(most.nearest) if most.nearest else None} if most else None,
        "searched": {"settings": plan.settings, "simulations": plan.runs, "seconds": plan.seconds,
                     "max_gpus": plan.space.max_gpus, "budget_usd_per_hour": plan.space.budget,
                     "fell_out": dict(plan.discarded)},
        "prices": {gpu.id: attributes(price, "usd_per_hour", "date", "source") for gpu, price in plan.space.gpus},
        "without_price": unpriced,
    }  # fmt: skip
    if choice and choice.simulation.rests_on:
        values["evidence"] = choice.simulation.rests_on.to_dict()
    return dict(plain(values))


def _trial(trial: SimulatedService) -> dict[str, Any]:
    setting, outcome = trial.candidate, trial.simulation
    metrics: dict[str, Any] = dict(outcome.metrics)
    for ending, values in (("low", outcome.low), ("high", outcome.high)):
        metrics |= {f"{key}_{ending}": value for key, value in values.items()}
    return {
        **attributes(setting, "usd_per_hour", "gpus", kv_cache_tokens="limits.kv_tokens"),
        **attributes(trial, "meets", "support", usd_per_million_output_tokens="usd_per_million",
                     meets_at_slow_end="sure", share_of_goal="share", nearest_goal="nearest.key"),
        **_engine(setting.engine, setting.replicas, setting.limits),
        "prefill": _engine(setting.prefill, setting.prefill_replicas, setting.prefill_limits) if setting.prefill
                   else None,
        "metrics": metrics,
    }  # fmt: skip


def _engine(candidate: EngineOption, replicas: int, limits: Any) -> dict[str, Any]:
    return {
        **attributes(candidate.deployment, gpu="gpu.id", stack="stack.id", precision="precision.label"),
        "layout": attributes(candidate.deployment.layout, "tp", "pp", "dp", "ep"),
        "replicas": replicas,
        **attributes(limits, "max_num_seqs", "max_num_batched_tokens"),
        "price": attributes(candidate.price, "usd_per_hour", "date", "source"),
    }


# ---- as a picture ----
def write_plot(plan: Plan, path: Path) -> None:
    """A panel a goal: cost against that latency, all that was run, the front with its intervals, and the goal."""
    with picture(path, (8.5, 1.0 + 3.4 * len(plan.goals)), rows=len(plan.goals)) as (figure, panels):
        for goal, axes in zip(plan.goals, panels, strict=True):
            _panel(plan, goal, axes)
        panels[-1].set_xlabel("USD per hour")
        figure.suptitle(f"{plan.model.name}, {load_text(plan.load)}", fontsize=10)
        figure.tight_layout()


def _panel(plan: Plan, goal: Goal, axes: Any) -> None:
    cloud = [(point.usd_per_hour, point.metrics[goal.key]) for point in plan.points if math.isfinite(point.share)]
    if cloud:
        axes.plot(*np.array(cloud).T, ".", color="#a0aec0", ms=4, label="simulated", zorder=1)
    if plan.front:
        cost = [trial.usd_per_hour for trial in plan.front]
        time_ms = [trial.simulation.metrics.get(goal.key, 0.0) for trial in plan.front]
        ends = [_around(trial, goal) for trial in plan.front]
        axes.errorbar(cost, time_ms, yerr=np.array(ends).T, fmt="o-", color="#2b6cb0", ms=5, lw=1, capsize=3,
                      label="front, 80% interval", zorder=2)  # fmt: skip
        for at, (trial, x, y) in enumerate(zip(plan.front, cost, time_ms, strict=True)):
            below = -11 if at % 2 else 6  # names of neighbours do not meet
            axes.annotate(gpus_text(trial.candidate), (x, y), textcoords="offset points", xytext=(5, below), fontsize=7)
    if plan.choice is not None:
        value = plan.choice.simulation.metrics.get(goal.key, 0.0)
        axes.plot([plan.choice.usd_per_hour], [value], "*", color="#c05621", ms=15, label="the choice", zorder=3)
    axes.axhline(goal.limit_ms, color="#c53030", lw=1, ls="--", label="goal")
    axes.set_yscale("log")
    axes.set_xscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        plain_numbers(axis)
    shown = [trial.simulation.metrics.get(goal.key, 0.0) for trial in plan.front] + [goal.limit_ms]
    axes.set_ylim(min(shown) / 2, max(shown) * 4)
    axes.set_ylabel(f"{goal.name}, ms")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2, which="both")
    axes.legend(loc="upper right", frameon=False, fontsize=8)


def _around(trial: SimulatedService, goal: Goal) -> tuple[float, float]:
    """How far below and above the likely time its ends are."""
    value = trial.simulation.metrics.get(goal.key, 0.0)

    def end(values: Mapping[str, float]) -> float:
        return abs(values.get(goal.key, value) - value)

    return end(trial.simulation.low), end(trial.simulation.high)
