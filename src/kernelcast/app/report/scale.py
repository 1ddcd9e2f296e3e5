"""A training step on many GPUs, as fields for JSON, as rows of tables, and as a timeline."""

from __future__ import annotations

import re
from typing import Any

from kernelcast.app.report.json import attributes
from kernelcast.app.report.run import breakdown_fields, interval_text
from kernelcast.app.report.text import evidence_lines, plain_table, show, support_text, title
from kernelcast.app.report.trace import built_lines
from kernelcast.app.report.units import binary_bytes_text, digits, percent, time_text
from kernelcast.schedule import Memory
from kernelcast.tracing.traced import PHASES
from kernelcast.training.scale import PARTS, ScaledStep
from kernelcast.training.step import LAUNCH_BOUND

Row = tuple[str, ...]


def fields(found: ScaledStep) -> dict[str, Any]:
    """Keys of ``--json``."""
    layout, parts = found.layout, found.parts_s
    return {
        "model": found.trace.name,
        "gpu": found.gpu.label,
        "gpus": layout.gpus,
        "plan": attributes(layout, "dp", "tp", "pp", "ep", "zero", "sequence_parallel", "micro_batches")
        | {"schedule": layout.schedule if layout.pp > 1 else None}
        | attributes(layout, "virtual_stages", "bucket_bytes", "overlap", "gpus_per_node", "between_nodes"),
        "time_s": found.time_s,
        "time_s_low": float(found.low_s),
        "time_s_high": float(found.high_s),
        "mode": "training",
        "kernel_time_s": parts["kernels"] + parts["optimizer"],
        **{f"{phase}_s": _kernel_s(found, phase) for phase in PHASES},  # of kernels, a GPU
        "launch_bound": bool(parts["host"] > LAUNCH_BOUND * found.time_s),
        **attributes(found, "tokens", "samples", "tokens_per_s", "tokens_per_s_per_gpu", "samples_per_s"),
        **attributes(found, "mfu", "flops"),
        "exposed_communication_s": found.exposed_s,
        "overlapped_communication_s": found.overlapped_s,
        "bubble_share": found.bubble_share,
        "data_parallel_sent_bytes": found.sent_bytes,
        "parts_s": found.parts_s,
        **({"built": found.trace.built} if found.trace.built else {}),
        "memory_bytes": found.memory.used_bytes,
        "memory": memory_fields(found.memory),
        "fits": found.fits,
        **({"uncut": uncut_fields(found)} if found.cut.uncut else {}),
        "stages": [
            {"stage": s.index, "layers": s.layers, "micro_batches_in_flight": s.in_flight, "parts_s": s.parts_s,
             "memory": memory_fields(s.memory)}
            for s in found.stages
        ],
        "breakdown": breakdown_fields(found.shares),
        "support": found.support,
        "evidence": found.rests_on.to_dict(),
        "predictor": found.predictor,
    }  # fmt: skip


def uncut_fields(found: ScaledStep) -> list[dict[str, Any]]:
    """What tensor parallelism leaves whole on every rank: modules, with their share of parameters and kernel time."""
    time_s: dict[str, float] = {}
    for kernel in found.kernels:
        name = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", kernel.op.module)
        time_s[name] = time_s.get(name, 0.0) + kernel.time_s
    whole_s = sum(time_s.values()) or 1.0
    return [
        {"module": name, "parameters": size, "share_of_parameters": size / max(1, found.trace.parameters),
         "share_of_kernel_time": time_s.get(name, 0.0) / whole_s}
        for name, size in found.cut.uncut
    ]  # fmt: skip


def _uncut_text(found: ScaledStep) -> list[str]:
    rows = uncut_fields(found)
    told = ", ".join(
        f"{row['module']} ({percent(row['share_of_parameters'])} of the parameters, "
        f"{percent(row['share_of_kernel_time'])} of the kernel time)" for row in rows[:6]
    )  # fmt: skip
    more = f", and {len(rows) - 6} more" if len(rows) > 6 else ""
    return [f"uncut      every GPU has all of {told}{more}; --tp-plan cuts them"] if rows else []


def _kernel_s(found: ScaledStep, phase: str) -> float:
    """Seconds of kernels of a phase, the mean of the GPUs: every micro-batch, a stage's part of the depth."""
    if phase == "optimizer":
        return float(found.parts_s["optimizer"])
    one = sum(share.time_s for share in found.shares if share.phase == phase)
    return float(one * found.layout.micro_batches / found.layout.pp)


def memory_fields(memory: Memory) -> dict[str, Any]:
    return memory.fields("used_bytes", "gpu_bytes", "missing_bytes") | {"fits": memory.fits}


def answer_rows(found: ScaledStep) -> list[Row]:
    """What was asked: name, value, note."""
    layout, memory = found.layout, found.memory
    room = "fits" if found.fits else f"misses by {binary_bytes_text(memory.missing_bytes)}"
    tokens = ("tokens/s", digits(found.tokens_per_s), f"{digits(found.tokens_per_s_per_gpu)} a GPU")
    return [
        ("step", time_text(found.time_s), interval_text(found.low_s, found.high_s)),
        ("samples/s", digits(found.samples_per_s), f"{found.samples:,} a step"),
        *([tokens] if found.tokens else []),
        ("MFU", percent(found.mfu), f"{layout.gpus} GPUs: {layout.told}"),
        ("memory a GPU", binary_bytes_text(memory.used_bytes), f"{room} in {binary_bytes_text(memory.gpu_bytes)}"),
    ]


def print_scaled(found: ScaledStep) -> None:
    """The answer first, then where the time goes, then memory, then what it rests on."""
    layout, trace = found.layout, found.trace
    show(title(trace.name, "  training", f"{layout.gpus} x {found.gpu.name}", f"  {layout.told}"))
    show(*built_lines(trace.built), *trace.notes)
    size = f"{found.tokens:,} tokens" if found.tokens else f"{found.samples:,} samples"
    show(f"{size} a step in {layout.micro_batches} x {layout.dp} passes, {digits(trace.parameters)} parameters", "")
    answer = plain_table("", "", "", right=("",), rows=answer_rows(found))
    parts = plain_table("part", "time", "share", "", right=("time", "share"), rows=part_rows(found))
    heads = ("layers", "in flight", "parameters", "gradients", "optimizer", "activations", "memory")
    memory = plain_table("stage", *heads, right=heads, rows=memory_rows(found))
    show(answer, "", parts, "", memory, "", *_uncut_text(found), support_text(found.support, found.predictor))
    show(*evidence_lines(found.rests_on))


def part_rows(found: ScaledStep) -> list[Row]:
    """Where the time goes: part, time, share, what it is. Adds up to the step."""
    parts = found.parts_s
    return [
        (name, time_text(parts[name]), percent(parts[name] / found.time_s), PARTS[name])
        for name in PARTS
        if parts[name] > 0
    ]


def memory_rows(found: ScaledStep) -> list[Row]:
    """Each stage: layers, micro-batches in flight, and its memory by kind."""
    kinds = ("parameter", "gradient", "optimizer", "activation")
    rows = []
    for s in found.stages:
        sizes = (*(s.memory[kind] for kind in kinds), s.memory.used_bytes)
        rows.append((str(s.index), str(s.layers), str(s.in_flight), *map(binary_bytes_text, sizes)))
    return rows
