"""A step of a traced model, on one GPU or many, as text and as JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kernelcast.app.report.json import attributes, breakdown_fields, run_energy_fields, support_fields
from kernelcast.app.report.text import (
    binary_bytes_text,
    breakdown_table,
    digits,
    energy_line,
    evidence_lines,
    interval_text,
    percent,
    plain_table,
    show,
    sizes_text,
    support_lines,
    time_text,
    times_table,
    title,
)
from kernelcast.schedule import Memory
from kernelcast.tracing.traced import PHASES
from kernelcast.training.scale import PARTS, ScaledStep
from kernelcast.training.step import LAUNCH_BOUND, Step

Row = tuple[str, ...]


def fields(step: Step | ScaledStep) -> dict[str, Any]:
    """The contract's keys: times, what binds, memory, breakdown."""
    values = _scaled_fields(step) if isinstance(step, ScaledStep) else _one_gpu_fields(step)
    return values | {
        **attributes(step, "mfu", "hfu", "flops", "model_flops", "predictor", model="trace.name", gpu="gpu.label",
                     memory_bytes="memory.used_bytes"),
        **({"built": step.trace.built} if step.trace.built else {}),
        "time_s": float(step.time_s),
        "time_s_low": float(step.low_s),
        "time_s_high": float(step.high_s),
        "breakdown": breakdown_fields(step.shares),
        **support_fields(step.supports),
        "evidence": step.rests_on.to_dict(),
    }  # fmt: skip


def print_step(step: Step | ScaledStep) -> None:
    """Times first, then the breakdown, memory, and the evidence."""
    if isinstance(step, ScaledStep):
        _print_scaled(step)
    else:
        _print_one_gpu(step)
    show(*support_lines(step.supports, step.predictor), *evidence_lines(step.rests_on))


def _one_gpu_fields(step: Step) -> dict[str, Any]:
    trace = step.trace
    return {
        **attributes(step, "kernel_time_s", "launch_bound", "idle_s", "coverage", "compiled", mode="trace.mode",
                     parameters="trace.parameters", tokens="trace.tokens", launch_margin="margin",
                     fits="memory.fits", costed_by_bytes="by_bytes", host="host.id"),
        **{f"{phase}_s": step.phase_s(phase) for phase in PHASES},
        **{f"{phase}_kernel_s": step.phase_kernel_s(phase) for phase in PHASES},
        "launch_margin_low": step.margins[0],
        "launch_margin_high": step.margins[1],
        "kernels": round(sum(kernel.launches for kernel in step.kernels)),
        "ops": len(trace.ops),
        **({"notes": list(trace.notes)} if trace.notes else {}),
        "tokens_per_s": trace.tokens / step.time_s,
        "samples_per_s": trace.samples / step.time_s,
        **run_energy_fields(step.energy, [step.drawn], step.time_s, 1, trace.tokens),
        "memory": step.memory.fields("gpu_bytes"),
    }  # fmt: skip


def _print_one_gpu(step: Step) -> None:
    trace = step.trace
    how = ", ".join(mode for mode, on in (("CUDA graph", step.graph), ("compiled", step.compiled)) if on) or "eager"
    show(title(trace.name, f"  {trace.mode}", step.gpu.name, f"  {how}"))
    size = _amount(trace.tokens, trace.samples)
    kernels = round(sum(kernel.launches for kernel in step.kernels))
    show(*built_lines(trace.built), *trace.notes)
    show(f"{size}, {digits(trace.parameters)} parameters, {len(trace.ops):,} ops, {kernels:,} kernels", "")
    present = {share.phase for share in step.shares}
    totals_s = {str(phase): step.kernel_time_s for phase in PHASES if phase in present}
    show(times_table(_times(step)), "", breakdown_table(step.shares, totals_s, (5, 3)), "", _memory(step))
    show(*_launching(step))
    if step.by_bytes:
        worst = sorted(step.by_bytes, key=lambda name: -step.by_bytes[name])[:4]
        share = percent(1 - step.coverage)
        show(f"by bytes   {share} of the kernel time is of ops that have no model of their own: {', '.join(worst)}")
    show(*energy_line(step.energy, 1, step.time_s, trace.tokens, step.drawn.support if step.drawn else None))


def _launching(step: Step) -> list[str]:
    """Whether the host keeps up, and by how much: a host twice as fast or slow may turn it round."""
    low, high = step.margins
    takes = f"the host takes {step.margin:.2f} times what the GPU does ({low:.2f} to {high:.2f})"
    if step.launch_bound:
        line = f"launch-bound: the GPU waits {percent(step.idle_s / step.time_s)} of the time for the host; {takes}"
        return [line, "a CUDA graph, torch.compile or a larger batch would fill it"]
    return [f"not launch-bound, but close: {takes}; collect --host measures yours"] if high > 1 else []


def built_lines(built: Mapping[str, Any]) -> list[str]:
    """Which class was built, on which inputs, in which formats."""
    if not built:
        return []
    named = built["inputs"]
    inputs = ", ".join(
        f"{'' if name.isdigit() else name + ' '}{'x'.join(map(str, shape))}"  # given by place, or by name
        for name, shape in named.items()
        if isinstance(shape, list)
    )
    what = [f"{built['class']} on {inputs}"]
    if "cache" in built:
        what.append("with a cache" if built["cache"] else "no cache")
    if "logits" in built:
        what.append("the last logits" if built["logits"] == "last" else "all logits")
    precision = f", precision {built['precision']}" if built["precision"] != "pure" or built.get("trains") else ""
    precision += f", products in {built['autocast']}" if "autocast" in built else ""
    return ["; ".join(what), f"weights {built['dtype_why']}{precision}", *built.get("notes", ())]


def _amount(tokens: int, samples: int) -> str:
    """'4,096 tokens', or '1 sample' where no tokens are read."""
    count, unit = (tokens, "token") if tokens else (samples, "sample")
    return f"{count:,} {unit}{'s' * (count != 1)}"


def utilisation(step: Step) -> str:
    """'MFU 41.3%', and of all FLOPs that run where some run again."""
    return f"MFU {percent(step.mfu)}" + (f", HFU {percent(step.hfu)}" if step.recomputes else "")


def _times(step: Step) -> list[tuple[str, ...]]:
    rate, unit = (step.trace.tokens, "tokens") if step.trace.tokens else (step.trace.samples, "samples")
    note = f"{digits(rate / step.time_s)} {unit}/s, {utilisation(step)}"
    phases = PHASES if step.trace.mode == "training" else ()
    return [
        ("step", time_text(step.time_s), interval_text(step.low_s, step.high_s), note),
        ("kernels alone", time_text(step.kernel_time_s), "", ""),
        *((phase, time_text(step.phase_s(phase)), "", "") for phase in phases),
    ]


def _memory(step: Step) -> str:
    memory = step.memory
    names = ("parameters", "gradients", "optimizer", "activations")
    used = sizes_text((name, memory[name]) for name in names if memory[name])
    whole, has = binary_bytes_text(memory.used_bytes), binary_bytes_text(memory.gpu_bytes)
    if memory.fits:
        return f"memory     {whole} of {has} at the peak: {used}"
    over = binary_bytes_text(memory.missing_bytes)
    return f"memory     {whole}, which exceeds the {has} of {step.gpu.id} by {over}: {used}"


# ---- on many GPUs ----
def _scaled_fields(step: ScaledStep) -> dict[str, Any]:
    layout, parts = step.layout, step.parts_s
    return {
        "gpus": layout.gpus,
        "plan": attributes(layout, "dp", "tp", "pp", "ep", "zero", "sequence_parallel", "micro_batches")
        | {"schedule": layout.schedule if layout.pp > 1 else None}
        | attributes(layout, "virtual_stages", "bucket_bytes", "overlap", "gpus_per_node", "between_nodes"),
        "mode": "training",
        "kernel_time_s": parts["kernels"] + parts["optimizer"],
        **{f"{phase}_s": _kernel_s(step, phase) for phase in PHASES},  # of kernels, a GPU
        "launch_bound": bool(parts["host"] > LAUNCH_BOUND * step.time_s),
        "compiled": step.compiled,
        **attributes(step, "tokens", "samples", "tokens_per_s", "tokens_per_s_per_gpu", "samples_per_s"),
        "exposed_communication_s": step.exposed_s,
        "overlapped_communication_s": step.overlapped_s,
        "bubble_share": step.bubble_share,
        "data_parallel_sent_bytes": step.sent_bytes,
        "parts_s": step.parts_s,
        "memory": memory_fields(step.memory),
        "fits": step.fits,
        **({"uncut": replicated_fields(step)} if step.rank_trace.unsharded else {}),
        "stages": [
            {"stage": s.index, "layers": s.layers, "micro_batches_in_flight": s.in_flight, "parts_s": s.parts_s,
             "memory": memory_fields(s.memory)}
            for s in step.stages
        ],
    }  # fmt: skip


def replicated_fields(step: ScaledStep) -> list[dict[str, Any]]:
    """What tensor parallelism leaves whole on every rank: modules, with their share of parameters and kernel time."""
    time_s: dict[str, float] = {}
    for kernel in step.kernels:
        name = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", kernel.op.module)
        time_s[name] = time_s.get(name, 0.0) + kernel.time_s
    whole_s = sum(time_s.values()) or 1.0
    return [
        {"module": name, "parameters": size, "share_of_parameters": size / max(1, step.trace.parameters),
         "share_of_kernel_time": time_s.get(name, 0.0) / whole_s}
        for name, size in step.rank_trace.unsharded
    ]  # fmt: skip


def _unsharded_text(step: ScaledStep) -> list[str]:
    rows = replicated_fields(step)
    modules = ", ".join(
        f"{row['module']} ({percent(row['share_of_parameters'])} of the parameters, "
        f"{percent(row['share_of_kernel_time'])} of the kernel time)" for row in rows[:6]
    )  # fmt: skip
    more = f", and {len(rows) - 6} more" if len(rows) > 6 else ""
    return [f"replicated every GPU has all of {modules}{more}; --tp-plan shards them"] if rows else []


def _kernel_s(step: ScaledStep, phase: str) -> float:
    """Seconds of kernels of a phase, the mean of the GPUs: every micro-batch, a stage's part of the depth."""
    if phase == "optimizer":
        return float(step.parts_s["optimizer"])
    pass_s = sum(share.time_s for share in step.shares if share.phase == phase)
    return float(pass_s * step.layout.micro_batches / step.layout.pp)


def memory_fields(memory: Memory) -> dict[str, Any]:
    return memory.fields("used_bytes", "gpu_bytes", "missing_bytes") | {"fits": memory.fits}


def answer_rows(step: ScaledStep) -> list[Row]:
    """The figures first: name, value, note."""
    layout, memory = step.layout, step.memory
    room = "fits" if step.fits else f"misses by {binary_bytes_text(memory.missing_bytes)}"
    recomputed = [f"HFU {percent(step.hfu)} with recomputation"] if step.recomputes else []
    tokens = ("tokens/s", digits(step.tokens_per_s), f"{digits(step.tokens_per_s_per_gpu)} a GPU")
    return [
        ("step", time_text(step.time_s), interval_text(step.low_s, step.high_s)),
        ("samples/s", digits(step.samples_per_s), f"{step.samples:,} a step"),
        *([tokens] if step.tokens else []),
        ("MFU", percent(step.mfu), ", ".join([*recomputed, f"{layout.gpus} GPUs: {layout.label}"])),
        ("memory a GPU", binary_bytes_text(memory.used_bytes), f"{room} in {binary_bytes_text(memory.gpu_bytes)}"),
    ]


def _print_scaled(step: ScaledStep) -> None:
    layout, trace = step.layout, step.trace
    label = layout.label + (", compiled" if step.compiled else "")
    show(title(trace.name, "  training", f"{layout.gpus} x {step.gpu.name}", f"  {label}"))
    show(*built_lines(trace.built), *trace.notes)
    size = _amount(step.tokens, step.samples)
    show(f"{size} a step in {layout.micro_batches} x {layout.dp} passes, {digits(trace.parameters)} parameters", "")
    answer = plain_table("", "a step", " ", right=("a step",), rows=answer_rows(step))
    parts = plain_table("part", "time", "share", "", right=("time", "share"), rows=part_rows(step))
    heads = ("layers", "in flight", "parameters", "gradients", "optimizer", "activations", "memory")
    memory = plain_table("stage", *heads, right=heads, rows=memory_rows(step))
    show(answer, "", parts, "", memory, "", *_unsharded_text(step))


def part_rows(step: ScaledStep) -> list[Row]:
    """Where the time goes: part, time, share, what it is. Adds up to the step."""
    parts = step.parts_s
    return [
        (name, time_text(parts[name]), percent(parts[name] / step.time_s), PARTS[name])
        for name in PARTS
        if parts[name] > 0
    ]


def memory_rows(step: ScaledStep) -> list[Row]:
    """Each stage: layers, micro-batches in flight, and its memory by part."""
    parts = ("parameter", "gradient", "optimizer", "activation")
    rows = []
    for s in step.stages:
        sizes = (*(s.memory[part] for part in parts), s.memory.used_bytes)
        rows.append((str(s.index), str(s.layers), f"{s.in_flight:g}", *map(binary_bytes_text, sizes)))
    return rows
