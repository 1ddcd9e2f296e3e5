"""A traced step as text, as JSON and as a timeline."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from kernelcast.networks.traced import PHASES
from kernelcast.report.json import breakdown_fields
from kernelcast.report.text import plain_table, show
from kernelcast.report.units import bar, binary_bytes_text, digits, percent, time_text
from kernelcast.support import SUPPORT
from kernelcast.timeline import Share
from kernelcast.training.step import Step


def fields(step: Step) -> dict[str, Any]:
    """The contract's keys: times, what binds, memory, breakdown."""
    trace = step.trace
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
        "memory_bytes": step.memory.used_bytes,
        "fits": step.memory.fits,
        "memory": step.memory.fields("gpu_bytes"),
        "coverage": step.coverage,
        "costed_by_bytes": step.by_bytes,
        "breakdown": breakdown_fields(step.shares),
        "host": step.host.id,
        "compiled": step.compiled,
        "support": step.support,
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
    show(f"support    {step.support} ({SUPPORT[step.support]}), {step.predictor}")


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
    memory = step.memory
    parts = ((name, memory[name]) for name in ("parameters", "gradients", "optimizer", "activations"))
    used = ", ".join(f"{name} {binary_bytes_text(size)}" for name, size in parts if size)
    whole, has = binary_bytes_text(memory.used_bytes), binary_bytes_text(memory.gpu_bytes)
    if memory.fits:
        return Text(f"memory     {whole} of {has} at the peak: {used}")
    over = binary_bytes_text(memory.missing_bytes)
    return Text(f"memory     {whole}, which exceeds the {has} of {step.gpu.id} by {over}: {used}")
