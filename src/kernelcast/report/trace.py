"""A traced step as text, as JSON and as a timeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.text import Text

from kernelcast.networks.traced import PHASES
from kernelcast.report.text import SUPPORT, plain_table, show, support_of
from kernelcast.report.units import bar, binary_bytes_text, digits, percent, time_text
from kernelcast.training.step import Share, Step


def fields(step: Step) -> dict[str, Any]:
    """The contract's keys: times, what binds, memory, breakdown."""
    trace, held = step.trace, step.trace.footprint
    told: dict[str, Any] = {
        "model": trace.name,
        "mode": trace.mode,
        "gpu": step.gpu.label,
        "time_s": step.time_s,
        "time_s_low": step.low_s,
        "time_s_high": step.high_s,
        "kernel_time_s": step.kernel_time_s,
        **{f"{phase}_s": step.phase_s(phase) for phase in PHASES},
        **{f"{phase}_kernel_s": step.phase_kernel_s(phase) for phase in PHASES},
        "launch_bound": step.launch_bound,
        "idle_s": step.idle_s,
        "kernels": round(sum(kernel.launches for kernel in step.kernels)),
        "ops": len(trace.ops),
        "flops": step.flops,
        "mfu": step.mfu,
        "parameters": trace.parameters,
        "tokens": trace.tokens,
        "tokens_per_s": trace.tokens / step.time_s,
        "samples_per_s": trace.samples / step.time_s,
        "memory_bytes": step.memory_bytes,
        "fits": step.fits,
        "memory": {
            "parameters_bytes": held.parameters, "gradients_bytes": held.gradients,
            "optimizer_bytes": held.optimizer, "inputs_bytes": held.inputs,
            "activations_bytes": held.activations, "gpu_bytes": step.gpu.dram_bytes,
        },
        "coverage": step.coverage,
        "costed_by_bytes": step.by_bytes,
        "breakdown": [
            {"phase": s.phase, "part": s.part, "time_s": s.time_s, "kernels": round(s.kernels), "bound_by": s.bound_by,
             "support": s.support}
            for s in step.shares
        ],
        "host": step.host.id,
        "compiled": step.compiled,
        "support": support_of((s.time_s, s.support) for s in step.shares),
        "predictor": step.predictor,
    }  # fmt: skip
    return told


def print_step(step: Step) -> None:
    """The answer first, then where the time goes, then memory, then what it rests on."""
    trace = step.trace
    how = ", ".join(word for word, on in (("CUDA graph", step.graph), ("compiled", step.compiled)) if on) or "eager"
    show(Text.assemble((trace.name, "bold cyan"), f"  {trace.mode}", ("  on  ", "dim"), (step.gpu.name, "bold"),
                       f"  {how}"))  # fmt: skip
    size = f"{trace.tokens:,} tokens" if trace.tokens else f"{trace.samples:,} samples"
    kernels = round(sum(kernel.launches for kernel in step.kernels))
    show(f"{size}, {digits(trace.parameters)} parameters, {len(trace.ops):,} ops, {kernels:,} kernels", "")
    show(_answer(step), "", _breakdown(step), "", _memory(step))
    if step.launch_bound:
        show(f"launch-bound: the GPU waits {percent(step.idle_s / step.time_s)} of the time for the host; "
             "a CUDA graph, torch.compile or a larger batch would fill it")  # fmt: skip
    if step.by_bytes:
        worst = sorted(step.by_bytes, key=lambda name: -step.by_bytes[name])[:4]
        share = percent(1 - step.coverage)
        show(f"by bytes   {share} of the kernel time is of ops that have no model of their own: {', '.join(worst)}")
    level = support_of((s.time_s, s.support) for s in step.shares)
    show(f"support    {level} ({SUPPORT[level]}), {step.predictor}")


def _answer(step: Step) -> Any:
    table = plain_table("", "time", "80% interval", "", right=("time",))
    rate = step.trace.tokens or step.trace.samples
    word = "tokens" if step.trace.tokens else "samples"
    table.add_row("step", time_text(step.time_s), f"{time_text(step.low_s)} to {time_text(step.high_s)}",
                  f"{digits(rate / step.time_s)} {word}/s, MFU {percent(step.mfu)}")  # fmt: skip
    table.add_row("kernels alone", time_text(step.kernel_time_s), "", "")
    if step.trace.mode == "training":
        for phase in PHASES:
            table.add_row(phase, time_text(step.phase_s(phase)), "", "")
    return table


def _breakdown(step: Step) -> Any:
    phases = [phase for phase in PHASES if any(s.phase == phase for s in step.shares)]
    heads = [word for phase in phases for word in (phase, "")]
    table = plain_table("part", *heads, "bound by", right=tuple(phases))
    parts: dict[str, dict[str, Share]] = {}
    for share in step.shares:
        parts.setdefault(share.part, {})[share.phase] = share
    total = step.kernel_time_s
    for part in sorted(parts, key=lambda name: -sum(s.time_s for s in parts[name].values())):
        cells = [part]
        for phase in phases:
            own = parts[part].get(phase)
            portion = own.time_s / total if own else 0.0
            cells += [time_text(own.time_s), f"{bar(portion, 5):5} {portion:3.0%}"] if own else ["", ""]
        table.add_row(*cells, " / ".join(dict.fromkeys(s.bound_by for s in parts[part].values())))
    return table


def _memory(step: Step) -> Text:
    held = step.trace.footprint
    parts = (("parameters", held.parameters), ("gradients", held.gradients), ("optimizer", held.optimizer),
             ("activations", held.activations))  # fmt: skip
    used = ", ".join(f"{name} {binary_bytes_text(size)}" for name, size in parts if size)
    whole, has = binary_bytes_text(step.memory_bytes), binary_bytes_text(step.gpu.dram_bytes)
    if step.fits:
        return Text(f"memory     {whole} of {has} at the peak: {used}")
    over = binary_bytes_text(step.memory_bytes - step.gpu.dram_bytes)
    return Text(f"memory     {whole}, which exceeds the {has} of {step.gpu.id} by {over}: {used}")


def write_timeline(step: Step, path: Path) -> int:
    """The step for chrome://tracing or Perfetto: the host's launches on one row, the GPU's kernels on another."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": name}}
        for tid, name in ((0, "host"), (1, step.gpu.name))
    ]
    before = 0.0
    for kernel, launched, end in zip(step.kernels, step.launched_s, step.ends_s, strict=True):
        told = {"module": kernel.op.module, "phase": kernel.op.phase, "bound_by": kernel.bound_by,
                "shapes": [list(x.shape) for x in kernel.op.inputs[:4]]}  # fmt: skip
        if not step.graph:
            events.append({"ph": "X", "pid": 0, "tid": 0, "name": kernel.op.name, "cat": kernel.op.phase,
                           "ts": round(before * 1e6, 3), "dur": round((launched - before) * 1e6, 3)})  # fmt: skip
            before = float(launched)
        events.append({"ph": "X", "pid": 0, "tid": 1, "name": kernel.op.name, "cat": kernel.part,
                       "ts": round((end - kernel.time_s) * 1e6, 3), "dur": round(kernel.time_s * 1e6, 3),
                       "args": told})  # fmt: skip
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return len(events)
