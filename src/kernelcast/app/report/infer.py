"""A static batch, aggregated or disaggregated, as text, as JSON and as a plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kernelcast.app.report.json import (
    attributes,
    breakdown_fields,
    interval_fields,
    run_energy_fields,
    support_fields,
)
from kernelcast.app.report.plot import picture
from kernelcast.app.report.text import (
    breakdown_table,
    digits,
    energy_line,
    evidence_lines,
    gib_text,
    joules_text,
    parallel_sizes,
    percent,
    plain_table,
    plural,
    show,
    sizes_text,
    support_lines,
    time_rows,
    time_text,
    times_table,
    title,
)
from kernelcast.inference.deployment import Deployment
from kernelcast.inference.disaggregated import HANDOVER, Disaggregated, PhaseWorkers
from kernelcast.inference.infer import FasterKernel, Inference, faster_kernels
from kernelcast.results import Interval
from kernelcast.schedule import Memory

_LIMITS = {"prefill": "the prefill workers", "decode": "the decode workers", HANDOVER: "the links between the pools"}


def fields(result: Inference | Disaggregated) -> dict[str, Any]:
    """The contract's keys: times with their intervals, rates, memory, breakdown. Of a disaggregated deployment, those
    of the whole, and of each pool under ``prefill`` and ``decode``."""
    if isinstance(result, Disaggregated):
        deployments = [workers.deployment for workers in (result.pools.prefill, result.pools.decode)]
        values = _disaggregated_fields(result)
    else:
        deployments = [result.deployment]
        values = _batch_fields(result)
    return values | {
        "breakdown": breakdown_fields(result.shares),
        **support_fields(result.supports),
        "evidence": result.rests_on.to_dict(),
        "faster_kernels": [faster.as_dict() for faster in _faster(result)],
        "weight_only": list(dict.fromkeys(name for deployment in deployments for name in _weight_only(deployment))),
        "unread": list(deployments[-1].model.unread),
        "predictor": result.predictor,
    }


def _batch_fields(result: Inference) -> dict[str, Any]:
    deployment, workload = result.deployment, result.workload
    gpus = deployment.layout.gpus
    times = {
        "ttft_s": result.prefill, "tpot_s": result.tpot, "prefill_s": result.prefill, "decode_s": result.decode,
        "decode_step_s": result.step, "total_s": result.total,
    }  # fmt: skip
    return {
        **_deployment_fields(deployment),
        "gpus": gpus,
        "model": deployment.model.name,
        "precision": deployment.precision.label,
        "requests": len(workload.inputs),
        "input_tokens": sum(workload.inputs),
        "output_tokens": result.output_tokens,
        "decode_steps": result.steps,
        **_interval_fields(times),
        "mean_ttft_s": float(result.mean_ttft_s),
        "prefill_chunk_tokens": workload.chunk,
        "tokens_per_s": float(result.tokens_per_s),
        "tokens_per_s_per_gpu": float(result.tokens_per_s / gpus),
        "requests_per_s": float(len(workload.inputs) / result.total.value),
        "mfu": float(result.mfu),
        "bandwidth_use": float(result.bandwidth_use),
        **run_energy_fields(result.energy, result.energies.values(), result.total.value, gpus, result.counted_tokens),
        "memory_bytes": float(result.memory.used_bytes),
        "memory": result.memory.fields("available_bytes", "gpu_bytes"),
    }


def _disaggregated_fields(result: Disaggregated) -> dict[str, Any]:
    pools, deployment, transfer = result.pools, result.pools.decode.deployment, result.kv_transfer
    figures = {
        "ttft_s": result.ttft, "tpot_s": result.tpot, "prefill_s": result.prefill, "handover_s": transfer.time,
        "decode_step_s": result.step, "decode_s": result.decode, "total_s": result.total,
        "requests_per_s": result.requests_per_s, "tokens_per_s": result.tokens_per_s,
        "tokens_per_s_per_gpu": result.tokens_per_s_per_gpu,
    }  # fmt: skip
    return {
        "model": deployment.model.name,
        "gpus": pools.gpus,
        "precision": deployment.precision.label,
        "input_tokens_per_request": pools.input_tokens,
        "output_tokens_per_request": pools.output_tokens,
        "prefill_chunk_tokens": result.prefill_batch.workload.chunk,
        **_interval_fields(figures),
        "mean_ttft_s": float(result.mean_ttft_s),
        "limited_by": result.limited_by,
        "prefill_workers_per_decode_worker": float(result.prefill_per_decode),
        "prefill": _pool_fields(result, "prefill", pools.prefill, result.prefill_memory),
        "decode": _pool_fields(result, "decode", pools.decode, result.decode_memory)
        | {"held_requests_per_worker": float(result.held_requests), "steps": result.decode_batch.steps},
        HANDOVER: {
            "fabric": transfer.fabric or pools.prefill.deployment.gpu.link_kind,
            "bytes_per_request": float(transfer.request_bytes),
            "bytes_through_a_port": float(transfer.port_bytes),
            **_rate_fields(result, HANDOVER),
        },
        "memory_bytes": float(max(result.prefill_memory.used_bytes, result.decode_memory.used_bytes)),
        **interval_fields("energy_per_request_j", result.request_energy),
    }


def _interval_fields(figures: dict[str, Interval]) -> dict[str, Any]:
    return {key: value for name, figure in figures.items() for key, value in interval_fields(name, figure).items()}


def _pool_fields(result: Disaggregated, name: str, workers: PhaseWorkers, memory: Memory) -> dict[str, Any]:
    return {
        **attributes(workers, "gpus", "batch", workers="count"),
        **_deployment_fields(workers.deployment),
        **_rate_fields(result, name),
        "memory_bytes": float(memory.used_bytes),
        "memory": memory.fields("available_bytes", "gpu_bytes"),
    }


def _deployment_fields(deployment: Deployment) -> dict[str, Any]:
    layout = attributes(deployment.layout, "tp", "pp", "dp", "ep")
    return {**attributes(deployment, gpu="gpu.label", stack="stack.id"), "layout": layout}


def _rate_fields(result: Disaggregated, part: str) -> dict[str, Any]:
    """Requests a second that a part sustains, and its utilisation."""
    return {**interval_fields("requests_per_s", result.rates[part]), "busy_share": float(result.busy(part))}


def _faster(result: Inference | Disaggregated) -> list[FasterKernel]:
    """Other kernels that would be faster; of a disaggregated deployment those of each pool's phase."""
    if isinstance(result, Inference):
        return faster_kernels(result)
    pairs = (("prefill", result.prefill_batch), ("decode", result.decode_batch))
    return [faster for phase, run in pairs for faster in faster_kernels(run) if faster.phase == phase]


def _weight_only(deployment: Deployment) -> tuple[str, ...]:
    return tuple(deployment.precision.weight_only(deployment.gpu))


def print_inference(result: Inference | Disaggregated) -> None:
    """Times first, then the breakdown, memory, and the evidence."""
    if isinstance(result, Disaggregated):
        deployments = [result.pools.prefill.deployment, result.pools.decode.deployment]
        _print_pools(result)
    else:
        deployments = [result.deployment]
        _print_batch(result)
    show(*support_lines(result.supports, result.predictor), *evidence_lines(result.rests_on))
    show(*_notes(deployments), *(f"faster     {faster.text}" for faster in _faster(result)))


def _notes(deployments: Sequence[Deployment]) -> Iterable[str]:
    """What a reader should know of the model beside the figures."""
    lines = [
        f"weights    {', '.join(narrow)} as weights alone: {deployment.gpu.id} has no such arithmetic"
        for deployment in deployments
        if (narrow := _weight_only(deployment))
    ]
    if unread := deployments[-1].model.unread:
        lines.append(f"not read   {', '.join(unread)}: fields of the config that may change the model")
    return dict.fromkeys(lines)


def _print_batch(result: Inference) -> None:
    deployment, layout, workload = result.deployment, result.deployment.layout, result.workload
    gpus = f"{layout.gpus} x {deployment.gpu.name}" if layout.gpus > 1 else deployment.gpu.name
    how = ", ".join([deployment.stack.name, *parallel_sizes(layout)])
    show(title(deployment.model.name, f"  {deployment.precision.label}", gpus, f"  {how}"))
    requests = plural(len(workload.inputs), "request")
    show(f"{requests}, {_range(workload.inputs)} tokens in, {_range(workload.outputs)} out", "")
    totals_s = {"prefill": result.prefill.value, "decode": result.decode.value}
    show(times_table(_batch_times(result)), "", breakdown_table(result.shares, totals_s, (10, 4)), "")
    parts = zip(("weights", "KV cache", "activations", "stack"), result.memory.parts.values(), strict=True)
    show(f"memory     {_memory_text(result.memory, parts)}; at most {plural(result.largest_batch, 'such request')}")
    supports = [part.support for part in result.energies.values() if part]
    show(*energy_line(result.energy, layout.gpus, result.total.value, result.counted_tokens, *supports[:1] or (None,)))


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _memory_text(memory: Memory, parts: Iterable[tuple[str, float]]) -> str:
    used, available = gib_text(memory.used_bytes), gib_text(memory.available_bytes)
    return f"{used} of {available} a GPU: {sizes_text(parts)}"


def _batch_times(result: Inference) -> list[tuple[str, str, str, str]]:
    encoder = not result.deployment.model.generates
    each = f"{digits(sum(result.workload.inputs) / result.prefill.value, 3)} tokens/s in"
    mfu = f", MFU {percent(result.mfu)}"
    rows: list[tuple[str, Interval, str]] = []
    if encoder:
        rows.append(("one pass", result.prefill, each + mfu))
    else:
        several = len(result.workload.inputs) > 1
        note = f"of the whole batch, {time_text(result.mean_ttft_s, 3)} on average; {each}" if several else each
        rows.append(("time to first token", result.prefill, note))
    if result.steps:
        steps = plural(result.steps, "step")
        rows += [
            ("time per output token", result.tpot, f"{digits(1 / result.tpot.value, 3)} tokens/s a request"),
            ("decode", result.decode, f"{steps}, {percent(result.bandwidth_use)} of DRAM's peak"),
        ]
    if not encoder:
        gpus = result.deployment.layout.gpus
        shared = f", {digits(result.tokens_per_s / gpus, 3)} a GPU" if gpus > 1 else ""
        rows.append(("total", result.total, f"{digits(result.tokens_per_s, 3)} tokens/s{shared}{mfu}"))
    lines = time_rows(rows)
    speculation = result.workload.speculation
    if speculation and result.steps:
        lines.append(("", "", "", f"{speculation.tokens_per_step:.2f} tokens a step by speculation"))
    return lines


def _print_pools(result: Disaggregated) -> None:
    pools, deployment = result.pools, result.pools.decode.deployment
    names = {workers.deployment.gpu.name for workers in (pools.prefill, pools.decode)}
    gpus = f"{pools.gpus} x {names.pop()}" if len(names) == 1 else f"{pools.gpus} GPUs"
    show(title(deployment.model.name, f"  {deployment.precision.label}", gpus, "  disaggregated prefill"))
    show(f"{pools.input_tokens:,} tokens in, {pools.output_tokens:,} out", "")
    show(times_table(_pool_times(result)), "", _pool_table(result), "", *_limits(result), "")
    totals_s = {"prefill": result.prefill.value, "decode": result.decode.value}
    shares = [share for share in result.shares if share.phase in totals_s]
    show(breakdown_table(shares, totals_s, (10, 4)), "")
    for name, memory in (("prefill", result.prefill_memory), ("decode", result.decode_memory)):
        show(f"memory     {name}: {_memory_text(memory, memory.parts.items())}")
    if energy := result.request_energy:
        low, high = joules_text(energy.low), joules_text(energy.high)
        show(f"energy     {joules_text(energy.value)} a request ({low} to {high}) while GPUs work")


def _pool_times(result: Disaggregated) -> list[tuple[str, str, str, str]]:
    pools, transfer = result.pools, result.kv_transfer
    earlier = result.mean_ttft_s < 0.999 * result.ttft.value  # some prompts of a batch are prefilled before others
    several = f"; {time_text(result.mean_ttft_s, 3)} on average over a batch" if earlier else ""
    fabric = transfer.fabric or pools.prefill.deployment.gpu.link_kind
    return time_rows([
        ("time to first token", result.ttft, f"prefill, transfer, one step; no queue{several}"),
        ("  prefill", result.prefill, f"{plural(pools.prefill.batch, 'prompt')} at a time"),
        ("  transfer", transfer.time, f"{gib_text(transfer.request_bytes)} a request over {fabric}"),
        ("  decode step", result.step, f"{plural(pools.decode.batch, 'request')} a worker"),
        ("time per output token", result.tpot, f"{digits(1 / result.tpot.value, 3)} tokens/s a request"),
        ("total", result.total, "of a request"),
    ])  # fmt: skip


def _pool_table(result: Disaggregated) -> Any:
    """A row a pool: its workers, what it sustains, and its utilisation."""
    rows = []
    for name, workers in (("prefill", result.pools.prefill), ("decode", result.pools.decode)):
        layout = workers.deployment.layout
        how = ", ".join([f"{workers.count} x {layout.gpus} {workers.deployment.gpu.id}", *parallel_sizes(layout)])
        rate = digits(result.rates[name].value, 3)
        rows.append([name, how, f"{workers.batch:,}", rate, percent(result.busy(name))])
    right = ("batch", "requests/s", "busy")
    return plain_table("pool", "workers", *right, right=right, rows=rows)


def _limits(result: Disaggregated) -> list[str]:
    rate, tokens, each = result.requests_per_s, result.tokens_per_s, result.tokens_per_s_per_gpu
    needed = result.prefill_per_decode
    return [
        f"together   {digits(rate.value, 3)} requests/s ({digits(rate.low, 3)} to {digits(rate.high, 3)}), "
        f"{digits(tokens.value, 3)} tokens/s, {digits(each.value, 3)} a GPU",
        f"limited    by {_LIMITS[result.limited_by]}; a decode worker needs {digits(needed, 3)} prefill "
        f"worker{'' if needed == 1 else 's'}",
    ]


def write_plot(result: Inference, path: Path) -> None:
    """Where the time goes: one bar a phase, a colour a part."""
    times_s = {(share.phase, share.part): share.time_s for share in result.shares}
    phases = [phase for phase in ("prefill", "decode") if any(phase == key for key, _ in times_s)]
    totals_s: dict[str, float] = {}
    for (_, part), time_s in times_s.items():
        totals_s[part] = totals_s.get(part, 0.0) + time_s
    with picture(path, (9, 1.6 * len(phases) + 1.0), len(phases)) as (figure, axes):
        from matplotlib import colormaps

        colours = colormaps["tab20"].colors  # type: ignore[attr-defined]
        for axis, phase in zip(axes, phases, strict=True):
            left = 0.0
            for at, part in enumerate(sorted(totals_s, key=lambda part: -totals_s[part])):
                time_ms = times_s.get((phase, part), 0.0) * 1e3
                axis.barh([phase], [time_ms], left=left, color=colours[at % 20], label=part)
                left += time_ms
            axis.set(xlabel="ms")
        deployment = result.deployment
        axes[0].set_title(f"{deployment.model.name} on {deployment.layout.gpus} x {deployment.gpu.name}")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncol=min(6, len(labels)), fontsize=8)
        figure.tight_layout(rect=(0, 0.16 if len(labels) > 6 else 0.1, 1, 1))
