"""How a batch runs, as text, as JSON, as a timeline and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernelcast.app.report.json import attributes, run_energy_fields
from kernelcast.app.report.picture import picture
from kernelcast.app.report.run import breakdown_fields, breakdown_table, interval_text, sizes_text, times_table
from kernelcast.app.report.text import energy_line, evidence_lines, show, support_text, title
from kernelcast.app.report.units import binary_bytes_text, digits, percent, time_text
from kernelcast.inference.infer import Inference, faster_kernels
from kernelcast.results import Interval


def fields(found: Inference) -> dict[str, Any]:
    """The contract's keys: times with their intervals, rates, memory, breakdown."""
    memory, layout = found.memory, found.deployment.layout
    times = {
        "ttft": found.prefill, "tpot": found.tpot, "prefill": found.prefill, "decode": found.decode,
        "decode_step": found.step, "total": found.total,
    }  # fmt: skip
    told: dict[str, Any] = {
        "model": found.deployment.model.name,
        "gpu": found.deployment.gpu.label,
        "gpus": layout.gpus,
        "stack": found.deployment.stack.id,
        "layout": attributes(layout, "tp", "pp", "dp", "ep"),
        "precision": found.deployment.precision.label,
        "requests": len(found.workload.inputs),
        "input_tokens": sum(found.workload.inputs),
        "output_tokens": found.output_tokens,
        "decode_steps": found.steps,
    }
    for name, span in times.items():
        for ending, seconds in (("s", span.value), ("s_low", span.low), ("s_high", span.high)):
            told[f"{name}_{ending}"] = float(seconds)
    told["mean_ttft_s"] = float(found.mean_ttft_s)
    told["prefill_chunk_tokens"] = found.workload.chunk
    return told | {
        "tokens_per_s": float(found.tokens_per_s),
        "tokens_per_s_per_gpu": float(found.tokens_per_s / layout.gpus),
        "requests_per_s": float(len(found.workload.inputs) / found.total.value),
        "mfu": float(found.mfu),
        "bandwidth_use": float(found.bandwidth_use),
        **run_energy_fields(found.energy, found.energies.values(), found.total.value, layout.gpus, found.told_tokens),
        "memory_bytes": float(memory.used_bytes),
        "memory": memory.fields("available_bytes", "gpu_bytes"),
        "breakdown": breakdown_fields(found.shares),
        "support": found.support,
        "evidence": found.rests_on.to_dict(),
        "faster_kernels": [one.told() for one in faster_kernels(found)],
        "weight_only": list(found.deployment.precision.weight_only(found.deployment.gpu)),
        "unread": list(found.deployment.model.unread),
        "predictor": found.predictor,
    }


def print_inference(found: Inference) -> None:
    """The answer first, then where the time goes, then memory, then what it rests on."""
    deployment, layout = found.deployment, found.deployment.layout
    cuts = [f"{name} {getattr(layout, name)}" for name in ("tp", "pp", "dp", "ep") if getattr(layout, name) > 1]
    place = f"{layout.gpus} x {deployment.gpu.name}" if layout.gpus > 1 else deployment.gpu.name
    how = ", ".join([deployment.stack.name, *cuts])
    show(title(deployment.model.name, f"  {deployment.precision.label}", place, f"  {how}"))
    workload, count = found.workload, len(found.workload.inputs)
    inputs, outputs = _range(workload.inputs), _range(workload.outputs)
    show(f"{count:,} request{'s' if count > 1 else ''}, {inputs} tokens in, {outputs} out", "")
    totals_s = {"prefill": found.prefill.value, "decode": found.decode.value}
    show(times_table(_times(found)), "", breakdown_table(found.shares, totals_s, (10, 4)), "", _memory(found))
    supports = [part.support for part in found.energies.values() if part]
    show(*energy_line(found.energy, layout.gpus, found.total.value, found.told_tokens, *supports[:1] or (None,)))
    show(support_text(found.support, found.predictor), *evidence_lines(found.rests_on))
    show(*_notes(found))


def _notes(found: Inference) -> list[str]:
    """What a reader should know of the model and of its kernels beside the figures."""
    place = found.deployment
    narrow, unread = place.precision.weight_only(place.gpu), place.model.unread
    told = [f"weights    {', '.join(narrow)} as weights alone: {place.gpu.id} has no such arithmetic"] if narrow else []
    told += [f"not read   {', '.join(unread)}: fields of the config that may change the model"] if unread else []
    return told + [f"faster     {one.text}" for one in faster_kernels(found)]


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _times(found: Inference) -> list[tuple[str, str, str, str]]:
    reads = found.deployment.model.kind == "encoder"
    each = f"{digits(sum(found.workload.inputs) / found.prefill.value)} tokens/s in"
    mfu = f", MFU {percent(found.mfu)}"
    rows: list[tuple[str, Interval, str]] = []
    if reads:
        rows.append(("one pass", found.prefill, each + mfu))
    else:
        several = len(found.workload.inputs) > 1
        note = f"of the whole batch, {time_text(found.mean_ttft_s)} on average; {each}" if several else each
        rows.append(("time to first token", found.prefill, note))
    if found.steps:
        rows += [
            ("time per output token", found.tpot, f"{digits(1 / found.tpot.value)} tokens/s a request"),
            ("decode", found.decode, f"{found.steps:,} steps, {percent(found.bandwidth_use)} of DRAM's peak"),
        ]
    if not reads:
        gpus = found.deployment.layout.gpus
        shared = f", {digits(found.tokens_per_s / gpus)} a GPU" if gpus > 1 else ""
        rows.append(("total", found.total, f"{digits(found.tokens_per_s)} tokens/s{shared}{mfu}"))
    told = [(name, time_text(span.value), interval_text(span.low, span.high), note) for name, span, note in rows]
    speculation = found.workload.speculation
    if speculation and found.steps:
        told.append(("", "", "", f"{speculation.tokens_per_step:.2f} tokens a step by speculation"))
    return told


def _memory(found: Inference) -> str:
    memory = found.memory
    names = ("weights", "KV cache", "activations", "stack")
    used = sizes_text(zip(names, memory.parts.values(), strict=True))
    held, available = binary_bytes_text(memory.used_bytes), binary_bytes_text(memory.available_bytes)
    return f"memory     {held} of {available} a GPU: {used}; at most {found.largest_batch:,} such requests"


def write_plot(found: Inference, path: Path) -> None:
    """Where the time goes: one bar a phase, a colour a part."""
    times_s = {(share.phase, share.part): share.time_s for share in found.shares}
    phases = [phase for phase in ("prefill", "decode") if any(phase == own for own, _ in times_s)]
    parts = sorted({part for _, part in times_s}, key=lambda p: -sum(t for (_, own), t in times_s.items() if own == p))
    with picture(path, (9, 1.6 * len(phases) + 1.0), len(phases)) as (figure, axes):
        from matplotlib import colormaps

        colours = colormaps["tab20"].colors  # type: ignore[attr-defined]
        for axis, phase in zip(axes, phases, strict=True):
            left = 0.0
            for at, part in enumerate(parts):
                own = times_s.get((phase, part), 0.0) * 1e3
                axis.barh([phase], [own], left=left, color=colours[at % 20], label=part)
                left += own
            axis.set(xlabel="ms")
        deployment = found.deployment
        axes[0].set_title(f"{deployment.model.name} on {deployment.layout.gpus} x {deployment.gpu.name}")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncol=min(6, len(labels)), fontsize=8)
        figure.tight_layout(rect=(0, 0.16 if len(labels) > 6 else 0.1, 1, 1))
