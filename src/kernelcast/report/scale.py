"""A training step on many GPUs, as fields for JSON, as rows of tables, and as a timeline."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from kernelcast.networks.traced import PHASES
from kernelcast.report.text import plain_table, show
from kernelcast.report.units import binary_bytes_text, digits, percent, time_text
from kernelcast.training.memory import Memory
from kernelcast.training.scaled import PARTS, ScaledStep, Stage
from kernelcast.training.step import LAUNCH_BOUND, Kernel
from kernelcast.training.streams import Run

_MOST_EVENTS = 200_000
Row = tuple[str, ...]


def fields(found: ScaledStep) -> dict[str, Any]:
    """Keys of ``--json``."""
    plan, parts = found.plan, found.parts_s
    return {
        "model": found.trace.name,
        "gpu": found.gpu.label,
        "gpus": plan.gpus,
        "plan": {
            "dp": plan.dp, "tp": plan.tp, "pp": plan.pp, "ep": plan.ep, "zero": plan.zero,
            "sequence_parallel": plan.sequence_parallel, "micro_batches": plan.micro_batches,
            "schedule": plan.schedule if plan.pp > 1 else None, "virtual_stages": plan.virtual_stages,
            "bucket_bytes": plan.bucket_bytes, "overlap": plan.overlap, "gpus_per_node": plan.gpus_per_node,
            "between_nodes": plan.between_nodes,
        },
        "time_s": found.time_s,
        "time_s_low": float(found.low_s),
        "time_s_high": float(found.high_s),
        "mode": "training",
        "kernel_time_s": parts["kernels"] + parts["optimizer"],
        **{f"{phase}_s": _kernel_s(found, phase) for phase in PHASES},  # of kernels, a GPU
        "launch_bound": bool(parts["host"] > LAUNCH_BOUND * found.time_s),
        "tokens": found.tokens,
        "samples": found.samples,
        "tokens_per_s": found.tokens_per_s,
        "tokens_per_s_per_gpu": found.tokens_per_s_per_gpu,
        "samples_per_s": found.samples_per_s,
        "mfu": found.mfu,
        "flops": found.flops,
        "exposed_communication_s": found.exposed_s,
        "overlapped_communication_s": found.overlapped_s,
        "bubble_share": found.bubble_share,
        "data_parallel_sent_bytes": found.sent_bytes,
        "parts_s": found.parts_s,
        "memory_bytes": found.memory.used_bytes,
        "memory": memory_fields(found.memory),
        "fits": found.fits,
        "stages": [
            {"stage": s.index, "layers": s.layers, "micro_batches_in_flight": s.in_flight, "parts_s": s.parts_s,
             "memory": memory_fields(s.memory)}
            for s in found.stages
        ],
        "breakdown": [
            {"phase": s.phase, "part": s.part, "time_s": float(s.time_s), "kernels": round(s.kernels),
             "bound_by": s.bound_by, "support": s.support}
            for s in found.shares
        ],
        "predictor": found.predictor,
    }  # fmt: skip


def _kernel_s(found: ScaledStep, phase: str) -> float:
    """Seconds of kernels of a phase, the mean of the GPUs: every micro-batch, a stage's part of the depth."""
    if phase == "optimizer":
        return float(found.parts_s["optimizer"])
    one = sum(share.time_s for share in found.shares if share.phase == phase)
    return float(one * found.plan.micro_batches / found.plan.pp)


def memory_fields(memory: Memory) -> dict[str, Any]:
    names = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "gathered_bytes",
             "input_bytes", "overhead_bytes", "used_bytes", "gpu_bytes", "missing_bytes")  # fmt: skip
    return {name: float(getattr(memory, name)) for name in names} | {"fits": memory.fits}


def answer_rows(found: ScaledStep) -> list[Row]:
    """What was asked: name, value, note."""
    plan = found.plan
    memory = found.memory
    misses = f"misses by {binary_bytes_text(memory.missing_bytes)}"
    room = "fits" if found.fits else misses
    rows: list[Row] = [
        ("step", time_text(found.time_s), f"{time_text(found.low_s)} to {time_text(found.high_s)}"),
        ("samples/s", digits(found.samples_per_s), f"{found.samples:,} a step"),
    ]
    if found.tokens:
        rows.append(("tokens/s", digits(found.tokens_per_s), f"{digits(found.tokens_per_s_per_gpu)} a GPU"))
    return [
        *rows,
        ("MFU", percent(found.mfu), f"{plan.gpus} GPUs: {plan.told}"),
        ("memory a GPU", binary_bytes_text(memory.used_bytes), f"{room} in {binary_bytes_text(memory.gpu_bytes)}"),
    ]


def print_scaled(found: ScaledStep) -> None:
    """The answer first, then where the time goes, then memory, then what it rests on."""
    plan, trace = found.plan, found.trace
    show(Text.assemble((trace.name, "bold cyan"), "  training", ("  on  ", "dim"),
                       (f"{plan.gpus} x {found.gpu.name}", "bold"), f"  {plan.told}"))  # fmt: skip
    size = f"{found.tokens:,} tokens" if found.tokens else f"{found.samples:,} samples"
    show(f"{size} a step in {plan.micro_batches} x {plan.dp} passes, {digits(trace.parameters)} parameters", "")
    answer = plain_table("", "", "", right=("",))
    for row in answer_rows(found):
        answer.add_row(*row)
    parts = plain_table("part", "time", "share", "", right=("time", "share"))
    for row in part_rows(found):
        parts.add_row(*row)
    heads = ("layers", "in flight", "parameters", "gradients", "optimizer", "activations", "memory")
    memory = plain_table("stage", *heads, right=heads)
    for row in memory_rows(found):
        memory.add_row(*row)
    show(answer, "", parts, "", memory, "", f"weights    {found.predictor}")


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
    kinds = ("parameter", "gradient", "optimizer", "activation", "used")
    return [
        (str(s.index), str(s.layers), str(s.in_flight), *(_size(s.memory, kind) for kind in kinds))
        for s in found.stages
    ]


def _size(memory: Memory, kind: str) -> str:
    return binary_bytes_text(getattr(memory, f"{kind}_bytes"))


def timeline(found: ScaledStep) -> dict[str, Any]:
    """The step for chrome://tracing or Perfetto: a process a stage, with its compute and communication streams. With a
    pipeline the passes of each stage; without one, every kernel."""
    events: list[dict[str, Any]] = []
    for stage in found.stages:
        events += _names(stage, found)
        events += _passes(found, stage) if found.timetable is not None else _kernels(stage)
    return {"traceEvents": events[:_MOST_EVENTS], "displayTimeUnit": "ms"}


def write_timeline(found: ScaledStep, path: Path) -> None:
    path.write_text(json.dumps(timeline(found)))


def _names(stage: Stage, found: ScaledStep) -> Iterator[dict[str, Any]]:
    told = f"stage {stage.index}" if len(found.stages) > 1 else "one rank"
    yield {"ph": "M", "name": "process_name", "pid": stage.index, "args": {"name": f"{told}, {found.gpu.name}"}}
    for at, name in enumerate(("compute", "communication")):
        yield {"ph": "M", "name": "thread_name", "pid": stage.index, "tid": at, "args": {"name": name}}


def _event(name: str, stage: int, stream: int, start_s: float, end_s: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": stage, "tid": stream, "ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6,
            "args": args}  # fmt: skip


def _kernels(stage: Stage) -> Iterator[dict[str, Any]]:
    piece = stage.pieces[0]
    yield from _run(stage.index, piece.passes["step"], piece.kernels["step"], 0.0)


def _run(stage: int, run: Run, kernels: Sequence[Kernel], at_s: float) -> Iterator[dict[str, Any]]:
    for kernel, start, end in zip(kernels, run.starts_s, run.ends_s, strict=True):
        yield _event(kernel.op.name, stage, 0, at_s + float(start), at_s + float(end), phase=kernel.op.phase,
                     module=kernel.op.module, bound_by=kernel.bound_by)  # fmt: skip
    yield from _jobs(stage, run, at_s)


def _jobs(stage: int, run: Run, at_s: float) -> Iterator[dict[str, Any]]:
    for job, start, end in zip(run.jobs, run.job_starts_s, run.job_ends_s, strict=True):
        yield _event(job.name, stage, 1, at_s + float(start), at_s + float(end), sent_bytes=job.sent_bytes)


def _passes(found: ScaledStep, stage: Stage) -> Iterator[dict[str, Any]]:
    assert found.timetable is not None
    tasks = found.timetable.tasks[stage.index]
    runs = dict(zip(range(stage.index, found.plan.parts, found.plan.pp), stage.pieces, strict=True))
    for task, start, end in tasks:
        name = "backward" if task.backward else "forward"
        yield _event(f"{name} {task.micro_batch}", stage.index, 0, start, end, part=task.part)
        kind = "last" if task.backward and task.micro_batch == found.plan.micro_batches - 1 else name
        yield from _jobs(stage.index, runs[task.part].passes[kind], start)
    if stage.optimizer is not None and stage.optimizer_kernels:
        end = found.time_s
        yield from _run(stage.index, stage.optimizer, stage.optimizer_kernels, end - stage.optimizer.end_s)
