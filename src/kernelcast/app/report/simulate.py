"""A service under load, as text, as JSON, as a table of requests, as a picture over time and as a timeline."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from kernelcast.app.report.json import attributes, support_fields
from kernelcast.app.report.plot import picture
from kernelcast.app.report.text import (
    digits,
    evidence_lines,
    interval_texts,
    parallel_sizes,
    percent,
    plural,
    show,
    support_lines,
    time_text,
    times_table,
    title,
)
from kernelcast.files import complete, quoted
from kernelcast.schedule import Event, Lane, Timeline
from kernelcast.serving.scheduler import UNCHUNKED
from kernelcast.serving.service import EnginePool, Service
from kernelcast.serving.simulate import ATTAINMENT, Simulation

_LATENCIES = {"ttft": "time to first token", "tpot": "time per output token", "itl": "between tokens",
              "e2el": "end to end"}  # fmt: skip
_POINTS = 4000  # that a picture draws of a run
_SELDOM = 0.01  # of a run: waiting for less is not worth a word


def fields(simulation: Simulation) -> dict[str, Any]:
    """vLLM's keys, each with its interval, and what is known beside them."""
    record: dict[str, Any] = dict(simulation.metrics)
    for ending, values in (("low", simulation.low), ("high", simulation.high)):
        record |= {f"{key}_{ending}": value for key, value in values.items() if key in simulation.metrics}
    served, service = simulation.request_times, simulation.service
    inputs = int(served.inputs[served.done].sum())
    record |= {
        "complete": simulation.complete,
        "num_prompts": len(simulation.load),
        "gpus": service.gpus,
        **pool_fields(service.pool),
        "prefill": pool_fields(service.prefill) if service.prefill else None,
        "router": service.router,
        "preemptions": int(served.preempted.sum()),
        "prefix_cache_hit_rate": float(served.cached[served.done].sum() / inputs) if inputs else 0.0,
        "max_kv_cache_usage": max(simulation.step_log.kv_use, default=0.0),
        "engine_busy": simulation.busy,
        "capacity_requests_per_s": simulation.capacity,
        "capacity_share": simulation.capacity_share,
        "goals": [
            {"key": goal.key, "limit_ms": goal.limit_ms, "met": goal.share(simulation.metrics) <= 1}
            for goal in simulation.targets
        ],
        "goodput_share": simulation.attained,
        "meets": simulation.meets,
        "saturated": simulation.saturated,
        "waited_for": simulation.step_log.blocked_s,
        "binding": simulation.binding,
        "verdict": verdict(simulation),
        "advice": advice(simulation),
        **support_fields(simulation.supports),
        "evidence": simulation.rests_on.to_dict() if simulation.rests_on else None,
        "predictor": simulation.predictor,
    }
    if service.offline:
        record |= offline_fields(record, len(simulation.load))
    if simulation.load.stages is not None:
        record["stages"] = [simulation.stage(number) for number in range(int(simulation.load.stages.max()) + 1)]
    return record


_OFFLINE = {"elapsed_time": "duration", "requests_per_second": "request_throughput",
            "tokens_per_second": "total_token_throughput"}  # fmt: skip


def offline_fields(record: dict[str, Any], count: int) -> dict[str, Any]:
    """The keys of `vllm bench throughput`."""
    ends = ("", "_low", "_high")
    named = {f"{key}{end}": record[f"{name}{end}"] for key, name in _OFFLINE.items() for end in ends
             if f"{name}{end}" in record}  # fmt: skip
    tokens = record.get("total_input_tokens", 0) + record.get("total_output_tokens", 0)
    return {"num_requests": count, "total_num_tokens": tokens, **named}


def pool_fields(pool: EnginePool) -> dict[str, Any]:
    """Where a pool runs and how it schedules."""
    deployment, settings = pool.deployment, pool.settings
    return {
        "model": deployment.model.name,
        "gpu": deployment.gpu.label,
        "stack": deployment.stack.id,
        "layout": attributes(deployment.layout, "tp", "pp", "dp", "ep"),
        "replicas": pool.replicas,
        "precision": deployment.precision.label,
        "settings": attributes(settings, "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_blocks",
                               "chunked_prefill", "prefix_caching", "async_scheduling", "capacity", "policy"),
        "kv_cache_tokens": settings.kv_tokens,
    }  # fmt: skip


def verdict(simulation: Simulation) -> str:
    """In one sentence: whether it holds the load, and what binds."""
    if not simulation.complete and simulation.request_times.done.all():
        return "interrupted before both ends of the interval were known: these are the likely times"
    if not simulation.complete:
        return (
            f"interrupted: {int(simulation.request_times.done.sum()):,} of {len(simulation.load):,} requests were done"
        )
    if simulation.saturated:
        rate = digits(max(simulation.metrics["request_throughput"], simulation.capacity or 0.0), 3)
        what = f": {simulation.binding} binds" if simulation.binding else ""
        return f"cannot hold this load: at most {rate} requests/s{what}"
    waited = _waited(simulation, simulation.binding)
    if simulation.single_burst:
        return (
            f"all {len(simulation.load):,} requests arrived before one was done: all done in "
            f"{time_text(simulation.metrics['duration'])}; whether the rate can last takes more requests to tell"
        )
    offline = f"all done in {time_text(simulation.metrics['duration'])}"
    result = offline if simulation.service.offline else "holds the load"
    busy = (
        f"requests waited for {simulation.binding} {percent(waited)} of it" if waited > _SELDOM else _idle(simulation)
    )
    if simulation.capacity_share is None:
        return f"{result}; {busy}"
    most = digits(float(simulation.capacity or 0), 3)
    return f"{result}; {busy}, {simulation.capacity_share:.0%} of capacity ({most} requests/s, all at once)"


def _idle(simulation: Simulation) -> str:
    """'never idle' is no sign of a full engine: steps run one after another however few requests are in them."""
    idle = 1 - simulation.busy
    return "never idle" if idle < _SELDOM else f"idle {idle:.0%} of the time"


def goals_text(simulation: Simulation) -> str:
    """Each goal with what it is; empty where none is given."""
    parts = []
    for goal in simulation.targets:
        value = time_text(simulation.metrics.get(goal.key, 0.0) / 1e3, 3)
        missed = "" if goal.share(simulation.metrics) <= 1 else " (missed)"
        parts.append(f"{goal.name} {value} of {time_text(goal.limit_ms / 1e3)}{missed}")
    if simulation.attained is not None:
        within = f"{percent(simulation.attained)} of requests within the limits of goodput"
        parts.append(within if simulation.attained >= ATTAINMENT else f"{within} (missed: below {ATTAINMENT:.0%})")
    verdict = "met" if simulation.meets else "not met"
    return f"goals {verdict}: {'; '.join(parts)}" if parts else ""


def _waited(simulation: Simulation, limit: str) -> float:
    """The share of the run that requests waited for a limit."""
    return float(simulation.step_log.blocked_s.get(limit, 0.0) / simulation.metrics.get("duration", math.inf))


def advice(simulation: Simulation) -> str:
    """The setting to change where prompts that are prefilled whole wait until others have ended; else empty."""
    if _waited(simulation, UNCHUNKED) <= _SELDOM:
        return ""
    log = simulation.step_log
    decoding = np.average(log.decoding, weights=np.array(log.end_s) - np.array(log.start_s))
    settings = (simulation.service.prefill or simulation.service.pool).settings
    longest = int(simulation.load.inputs.max())
    return (
        f"{digits(float(decoding), 2)} requests decoded at a time: a prompt is prefilled whole, and those that decode "
        f"leave too little of max_num_batched_tokens {settings.max_num_batched_tokens:,}. Set enable_chunked_prefill, "
        f"or max_num_batched_tokens to {longest + settings.max_num_seqs:,} (the longest prompt and max_num_seqs)"
    )


def print_simulation(simulation: Simulation) -> None:
    """The verdict and latencies first, then throughput and the bottleneck, then the evidence."""
    show(head(simulation.service))
    load, served = simulation.load, simulation.request_times
    rate = (
        "offline, all at once"
        if simulation.service.offline
        else "all at once"
        if not np.isfinite(load.request_rate)
        else f"{digits(load.request_rate, 3)} requests/s"
    )
    loop = ", offline" if simulation.service.offline else ""
    loop += f", at most {load.max_concurrency:,} concurrent" if load.max_concurrency else ""
    lengths = f"{served.inputs.mean():,.0f} tokens in, {served.outputs.mean():,.0f} out on average"
    said = filter(None, (verdict(simulation), goals_text(simulation), advice(simulation)))
    show(f"{plural(len(load), 'request')}, {rate}{loop}; {lengths}", *said, "")
    show(times_table(_rows(simulation)), "")
    for line in _throughput(simulation):
        show(line)
    if simulation.load.stages is not None:
        _print_stages(simulation)
    if simulation.supports and simulation.rests_on:
        show(*support_lines(simulation.supports, simulation.predictor), *evidence_lines(simulation.rests_on))


def head(service: Service) -> Any:
    """The first line of an answer: the model, where, and what serves it."""
    pool = service.pool
    deployment, layout = pool.deployment, pool.deployment.layout
    sizes = parallel_sizes(layout)
    copies = [f"{pool.replicas} replicas"] if pool.replicas > 1 else []
    if service.prefill:
        copies = [f"{service.prefill.replicas} prefill, {pool.replicas} decode replicas"]
    where = f"{service.gpus} x {deployment.gpu.name}" if service.gpus > 1 else deployment.gpu.name
    return title(deployment.model.name, f"  {deployment.precision.label}", where,
                 f"  {', '.join([deployment.stack.name, *sizes, *copies])}")  # fmt: skip


def _rows(simulation: Simulation) -> list[tuple[str, str, str, str]]:
    rows = []
    streamed = not simulation.service.offline  # else a user sees nothing before a request ends
    for name, label in _LATENCIES.items() if streamed else [("e2el", _LATENCIES["e2el"])]:
        for ending in ("mean", "p50", "p90", "p99"):
            key = f"{ending}_{name}_ms"
            if key not in simulation.metrics:
                continue
            value = simulation.metrics[key]
            ends = (values.get(key, value) / 1e3 for values in (simulation.low, simulation.high))
            rows.append((label if ending == "mean" else "", *interval_texts(value / 1e3, *ends), ending))
    return rows


def _throughput(simulation: Simulation) -> list[str]:
    metrics, service = simulation.metrics, simulation.service
    if not metrics.get("completed"):
        return ["throughput no request was done"]
    goodput = f", {digits(metrics['request_goodput'], 3)} within goals" if "request_goodput" in metrics else ""
    each = f", {digits(metrics['output_throughput'] / service.gpus, 3)} a GPU" if service.gpus > 1 else ""
    settings, served = service.pool.settings, simulation.request_times
    used = max(simulation.step_log.kv_use, default=0.0)
    lines = [
        f"throughput {_rate(simulation, 'request_throughput')} requests/s{goodput}, "
        f"{_rate(simulation, 'output_throughput')} tokens/s out{each}",
        f"KV cache   {settings.kv_tokens:,} tokens an engine, at most {percent(used)} in use; "
        f"{plural(int(served.preempted.sum()), 'request')} preempted",
    ]
    if served.cached.any():
        share = served.cached[served.done].sum() / served.inputs[served.done].sum()
        lines.append(f"prefixes   {percent(float(share))} of prompt tokens found in the cache")
    return lines


def _rate(simulation: Simulation, key: str) -> str:
    """'7.78 (7.75 to 7.79)': with the interval, where it is known."""
    value = digits(simulation.metrics[key], 3)
    if key not in simulation.low:
        return value
    ends = (digits(values[key], 3) for values in (simulation.low, simulation.high))
    return f"{value} ({' to '.join(ends)})"


def _print_stages(simulation: Simulation) -> None:
    assert simulation.load.stages is not None
    for number in range(int(simulation.load.stages.max()) + 1):
        stage = simulation.stage(number)
        if stage.get("completed"):
            latencies = ", ".join(f"{name} {time_text(stage[f'mean_{name}_ms'] / 1e3)} (p90 "
                             f"{time_text(stage[f'p90_{name}_ms'] / 1e3)})" for name in ("ttft", "tpot", "e2el")
                             if f"mean_{name}_ms" in stage)  # fmt: skip
            show(f"stage {number}    {latencies}")


def write_requests(simulation: Simulation, path: Path) -> None:
    """One row a request: a trace, and a benchmark's result, that `simulate` and `replay` read back."""
    import duckdb

    served, load = simulation.request_times, simulation.load
    columns: dict[str, Any] = {
        "request_id": np.array(load.ids or [str(at) for at in range(len(load))], dtype=object),
        "arrival_s": served.arrival_s,
        "scheduled_s": served.scheduled_s,
        "first_token_s": served.first_token_s,
        "last_token_s": served.last_token_s,
        "input_tokens": served.inputs,
        "output_tokens": served.outputs,
        "cached_tokens": served.cached,
        "preemptions": served.preempted,
        "replica": served.replica,
    }
    if load.stages is not None:
        columns["stage"] = load.stages
    formats = {".parquet": "FORMAT parquet, COMPRESSION zstd", ".csv": "FORMAT csv, HEADER", ".jsonl": "FORMAT json"}
    select = ", ".join(_cell(name, values) for name, values in columns.items())
    with complete(path) as part, duckdb.connect() as connection:
        connection.register("requests", columns)
        connection.execute(f"COPY (SELECT {select} FROM requests) TO '{str(part).replace(chr(39), 2 * chr(39))}' "
                           f"({formats[path.suffix]})")  # fmt: skip


def _cell(name: str, values: Any) -> str:
    """A request that was not done has no times."""
    if values.dtype.kind == "f":
        return f"CASE WHEN isfinite({quoted(name)}) THEN {quoted(name)} END AS {quoted(name)}"
    return quoted(name)


def write_plot(simulation: Simulation, path: Path) -> None:
    """Over time: requests that run and wait, the KV cache in use, how long a step takes, and latencies as they were."""
    notes, served = simulation.step_log, simulation.request_times
    at = np.array(notes.end_s)
    order = np.argsort(at, kind="stable")
    order = order[:: max(1, len(order) // _POINTS)]
    with picture(path, (9.0, 9.0), rows=4) as (figure, (requests, cache, steps, latency)):
        requests.step(at[order], np.array(notes.decoding)[order], where="post", label="decoding", color="#2b6cb0", lw=1)
        requests.step(at[order], np.array(notes.waiting)[order], where="post", label="waiting", color="#c05621", lw=1)
        requests.set_ylabel("requests of an engine")
        requests.legend(loc="upper right", frameon=False)
        cache.fill_between(at[order], 100 * np.array(notes.kv_use)[order], color="#4a7c59", alpha=0.6, lw=0)
        cache.set_ylabel("KV cache, %")
        cache.set_ylim(0, 105)
        lasted = (at - np.array(notes.start_s)) / np.maximum(1, np.array(notes.steps)) * 1e3
        prompts = np.array(notes.prompt_tokens) > 0
        for mask, name, color in ((~prompts, "decode alone", "#2b6cb0"), (prompts, "with prompts", "#c05621")):
            chosen = order[mask[order]]
            steps.plot(at[chosen], lasted[chosen], ".", ms=2, label=name, color=color)
        steps.set_ylabel("a step, ms")
        steps.legend(loc="upper right", frameon=False)
        done = np.flatnonzero(served.done)[:: max(1, len(served.done) // _POINTS)]
        latency.plot(served.arrival_s[done], served.ttft_s[done], ".", ms=3, color="#553c9a")
        latency.set_yscale("log")
        latency.set_ylabel("first token, s")
        latency.set_xlabel("seconds")
        for axes in (requests, cache, steps, latency):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.2)
        deployment = simulation.service.pool.deployment
        figure.suptitle(
            f"{deployment.model.name} on {simulation.service.gpus} x {deployment.gpu.name}, {deployment.stack.name}"
        )
        figure.tight_layout()


def window(simulation: Simulation, start_s: float, end_s: float) -> Timeline:
    """The steps of every engine, and the requests, between two moments."""
    notes, served = simulation.step_log, simulation.request_times
    lanes = []
    for engine in sorted(set(notes.engine)):
        events = []
        for i in range(len(notes.steps)):
            if notes.engine[i] != engine or notes.end_s[i] < start_s or notes.start_s[i] > end_s:
                continue
            prompts, decoding, count = notes.prompt_tokens[i], notes.decoding[i], notes.steps[i]
            name = f"prompts {prompts:,} + decode {decoding}" if prompts else f"decode {decoding} x {count}"
            arguments = {"steps": count, "decoding": decoding, "prompt_tokens": prompts, "waiting": notes.waiting[i],
                    "kv_use": round(notes.kv_use[i], 4)}  # fmt: skip
            part = "prompts" if prompts else "decode"
            events.append(Event(name, notes.start_s[i], notes.end_s[i] - notes.start_s[i], part, arguments))
        lanes.append(Lane("engines", f"engine {engine}", tuple(events)))
    inside = np.flatnonzero(served.done & (served.last_token_s >= start_s) & (served.arrival_s <= end_s))
    for at in inside[:500].tolist():
        marks = (served.arrival_s[at], served.scheduled_s[at], served.first_token_s[at], served.last_token_s[at])
        events = [Event(name, float(a), max(0.0, float(b - a)), name)
                  for name, a, b in zip(("queued", "prefill", "decode"), marks, marks[1:], strict=False)]  # fmt: skip
        lanes.append(
            Lane("requests", f"request {simulation.load.ids[at] if simulation.load.ids else at}", tuple(events))
        )
    return Timeline(tuple(lanes))
