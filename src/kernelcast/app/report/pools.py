"""How a disaggregated deployment runs, as text and as JSON."""

from __future__ import annotations

from typing import Any

from kernelcast.app.report.json import attributes, span_fields
from kernelcast.app.report.run import breakdown_fields, breakdown_table, interval_text, sizes_text, times_table
from kernelcast.app.report.text import evidence_lines, plain_table, show, support_text, title
from kernelcast.app.report.units import binary_bytes_text, bytes_text, digits, joules_text, percent, time_text
from kernelcast.inference.disaggregated import HANDOVER, Disaggregated, PhaseWorkers
from kernelcast.inference.infer import FasterKernel, faster_kernels
from kernelcast.results import Interval
from kernelcast.schedule import Memory

_LIMITS = {"prefill": "the prefill workers", "decode": "the decode workers", HANDOVER: "the ports between the pools"}


def fields(found: Disaggregated) -> dict[str, Any]:
    """The keys of ``infer``, of the whole; what each pool has and does under ``prefill`` and ``decode``."""
    asked, place = found.pools, found.pools.decode.deployment
    times = {
        "ttft_s": found.ttft, "tpot_s": found.tpot, "prefill_s": found.prefill, "handover_s": found.handover.span,
        "decode_step_s": found.step, "decode_s": found.decode, "total_s": found.total,
        "requests_per_s": found.requests_per_s, "tokens_per_s": found.tokens_per_s,
        "tokens_per_s_per_gpu": found.tokens_per_s_per_gpu,
    }  # fmt: skip
    told: dict[str, Any] = {
        "model": place.model.name,
        "gpus": asked.gpus,
        "precision": place.precision.label,
        "input_tokens_per_request": asked.input_tokens,
        "output_tokens_per_request": asked.output_tokens,
        "prefill_chunk_tokens": found.reads.workload.chunk,
    }
    for name, span in times.items():
        told |= span_fields(name, span)
    narrow = [word for workers in (asked.prefill, asked.decode) for word in _narrow(workers)]
    return told | {
        "mean_ttft_s": float(found.mean_ttft_s),
        "limited_by": found.limited_by,
        "prefill_workers_per_decode_worker": float(found.prefill_per_decode),
        "prefill": _pool(asked.prefill, found.rates["prefill"], found.busy("prefill"), found.prefill_memory),
        "decode": _pool(asked.decode, found.rates["decode"], found.busy("decode"), found.decode_memory)
        | {"held_requests_per_worker": float(found.held_requests), "steps": found.decodes.steps},
        HANDOVER: {
            "fabric": found.handover.fabric or asked.prefill.deployment.gpu.link_kind,
            "bytes_per_request": float(found.handover.request_bytes),
            "bytes_through_a_port": float(found.handover.port_bytes),
            **_rate_fields(found.rates[HANDOVER], found.busy(HANDOVER)),
        },
        "memory_bytes": float(max(found.prefill_memory.used_bytes, found.decode_memory.used_bytes)),
        **span_fields("energy_per_request_j", found.request_energy),
        "breakdown": breakdown_fields(found.shares),
        "support": found.support,
        "evidence": found.rests_on.to_dict(),
        "faster_kernels": [one.told() for one in _faster(found)],
        "weight_only": list(dict.fromkeys(narrow)),
        "unread": list(place.model.unread),
        "predictor": found.predictor,
    }


def _pool(workers: PhaseWorkers, rate: Interval, busy: float, memory: Memory) -> dict[str, Any]:
    place = workers.deployment
    return {
        "workers": workers.count,
        "gpu": place.gpu.label,
        "gpus": workers.gpus,
        "stack": place.stack.id,
        "layout": attributes(place.layout, "tp", "pp", "dp", "ep"),
        "batch": workers.batch,
        **_rate_fields(rate, busy),
        "memory_bytes": float(memory.used_bytes),
        "memory": memory.fields("available_bytes", "gpu_bytes"),
    }


def _rate_fields(rate: Interval, busy: float) -> dict[str, Any]:
    """Requests a second that it could take, and the share of it that comes."""
    return {**span_fields("requests_per_s", rate), "busy_share": float(busy)}


def _narrow(workers: PhaseWorkers) -> tuple[str, ...]:
    place = workers.deployment
    return tuple(place.precision.weight_only(place.gpu))


def _faster(found: Disaggregated) -> list[FasterKernel]:
    """Of each pool, its own phase."""
    pairs = (("prefill", found.reads), ("decode", found.decodes))
    return [one for phase, run in pairs for one in faster_kernels(run) if one.phase == phase]


def print_pools(found: Disaggregated) -> None:
    """The answer first, then both pools, where the time goes, memory, and what it rests on."""
    asked, place = found.pools, found.pools.decode.deployment
    gpus = {workers.deployment.gpu.name for workers in (asked.prefill, asked.decode)}
    where = f"{asked.gpus} x {gpus.pop()}" if len(gpus) == 1 else f"{asked.gpus} GPUs"
    show(title(place.model.name, f"  {place.precision.label}", where, "  prompts read elsewhere"))
    show(f"{asked.input_tokens:,} tokens in, {asked.output_tokens:,} out", "")
    show(times_table(_times(found)), "", _pools(found), "", *_whole(found), "")
    totals_s = {"prefill": found.prefill.value, "decode": found.decode.value}
    phases = [share for share in found.shares if share.phase in totals_s]
    show(breakdown_table(phases, totals_s, (10, 4)), "", *_memory(found), *_energy(found))
    show(support_text(found.support, found.predictor), *evidence_lines(found.rests_on))
    show(*_notes(found))


def _times(found: Disaggregated) -> list[tuple[str, str, str, str]]:
    asked, sent = found.pools, found.handover
    earlier = found.mean_ttft_s < 0.999 * found.ttft.value  # some prompts of a batch are read before others
    several = f"; {time_text(found.mean_ttft_s)} on average over a batch" if earlier else ""
    fabric = sent.fabric or asked.prefill.deployment.gpu.link_kind
    prompts = f"{asked.prefill.batch:,} prompt{'s' if asked.prefill.batch > 1 else ''} at a time"
    rows = [
        ("time to first token", found.ttft, f"prefill, hand-over, one step; no queue{several}"),
        ("  prefill", found.prefill, prompts),
        ("  hand-over", sent.span, f"{bytes_text(sent.request_bytes)} a request over {fabric}"),
        (
            "  decode step",
            found.step,
            f"{asked.decode.batch:,} request{'s' if asked.decode.batch > 1 else ''} a worker",
        ),
        ("time per output token", found.tpot, f"{digits(1 / found.tpot.value)} tokens/s a request"),
        ("total", found.total, "of a request"),
    ]
    return [(name, time_text(span.value), interval_text(span.low, span.high), note) for name, span, note in rows]


def _pools(found: Disaggregated) -> Any:
    """A row a pool: its workers, what it could take, and how busy it is."""
    rows = []
    for name, workers in (("prefill", found.pools.prefill), ("decode", found.pools.decode)):
        layout = workers.deployment.layout
        cuts = [f"{cut} {getattr(layout, cut)}" for cut in ("tp", "pp", "dp", "ep") if getattr(layout, cut) > 1]
        how = f"{workers.count} x {layout.gpus} {workers.deployment.gpu.id}{', ' if cuts else ''}{', '.join(cuts)}"
        could = found.rates[name]
        rows.append([name, how, f"{workers.batch:,}", digits(could.value), percent(found.busy(name))])
    right = ("batch", "requests/s", "busy")
    return plain_table("pool", "workers", *right, right=right, rows=rows)


def _whole(found: Disaggregated) -> list[str]:
    rate, tokens, each = found.requests_per_s, found.tokens_per_s, found.tokens_per_s_per_gpu
    could = found.prefill_per_decode
    return [
        f"together   {digits(rate.value)} requests/s ({digits(rate.low)} to {digits(rate.high)}), "
        f"{digits(tokens.value)} tokens/s, {digits(each.value)} a GPU",
        f"limited    by {_LIMITS[found.limited_by]}; a decode worker needs {digits(could, 3)} prefill "
        f"worker{'' if could == 1 else 's'}",
    ]


def _memory(found: Disaggregated) -> list[str]:
    lines = []
    for name, memory in (("prefill", found.prefill_memory), ("decode", found.decode_memory)):
        used = sizes_text((part, size) for part, size in memory.parts.items())
        held, available = binary_bytes_text(memory.used_bytes), binary_bytes_text(memory.available_bytes)
        lines.append(f"memory     {name}: {held} of {available} a GPU: {used}")
    return lines


def _energy(found: Disaggregated) -> list[str]:
    drawn = found.request_energy
    if drawn is None:
        return []
    low, high = joules_text(drawn.low), joules_text(drawn.high)
    return [f"energy     {joules_text(drawn.value)} a request ({low} to {high}) while GPUs work"]


def _notes(found: Disaggregated) -> list[str]:
    told = []
    for workers in (found.pools.prefill, found.pools.decode):
        if narrow := _narrow(workers):
            gpu = workers.deployment.gpu.id
            told.append(f"weights    {', '.join(narrow)} as weights alone: {gpu} has no such arithmetic")
    if unread := found.pools.decode.deployment.model.unread:
        told.append(f"not read   {', '.join(unread)}: fields of the config that may change the model")
    return list(dict.fromkeys(told)) + [f"faster     {one.text}" for one in _faster(found)]
