"""A traced step as text, as JSON and as a timeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelcast.app.report.json import run_energy_fields
from kernelcast.app.report.run import breakdown_fields, breakdown_table, interval_text, sizes_text, times_table
from kernelcast.app.report.text import energy_line, evidence_lines, show, support_text, title
from kernelcast.app.report.units import binary_bytes_text, digits, percent, time_text
from kernelcast.tracing.traced import PHASES
from kernelcast.training.step import Step


def fields(step: Step) -> dict[str, Any]:
    """The contract's keys: times, what binds, memory, breakdown."""
    trace = step.trace
    return {
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
        "launch_margin": step.margin,
        "launch_margin_low": step.margins[0],
        "launch_margin_high": step.margins[1],
        "kernels": round(sum(kernel.launches for kernel in step.kernels)),
        "ops": len(trace.ops),
        "flops": step.flops,
        "mfu": step.mfu,
        **({"built": trace.built} if trace.built else {}),
        **({"notes": list(trace.notes)} if trace.notes else {}),
        "parameters": trace.parameters,
        "tokens": trace.tokens,
        "tokens_per_s": trace.tokens / step.time_s,
        "samples_per_s": trace.samples / step.time_s,
        **run_energy_fields(step.energy, [step.drawn], step.time_s, 1, trace.tokens),
        "memory_bytes": step.memory.used_bytes,
        "fits": step.memory.fits,
        "memory": step.memory.fields("gpu_bytes"),
        "coverage": step.coverage,
        "costed_by_bytes": step.by_bytes,
        "breakdown": breakdown_fields(step.shares),
        "host": step.host.id,
        "compiled": step.compiled,
        "support": step.support,
        "evidence": step.rests_on.to_dict(),
        "predictor": step.predictor,
    }


def print_step(step: Step) -> None:
    """The answer first, then where the time goes, then memory, then what it rests on."""
    trace = step.trace
    how = ", ".join(word for word, on in (("CUDA graph", step.graph), ("compiled", step.compiled)) if on) or "eager"
    show(title(trace.name, f"  {trace.mode}", step.gpu.name, f"  {how}"))
    size = f"{trace.tokens:,} tokens" if trace.tokens else f"{trace.samples:,} samples"
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
    show(support_text(step.support, step.predictor), *evidence_lines(step.rests_on))


def _launching(step: Step) -> list[str]:
    """Whether the host keeps up, and by how much: a host twice as fast or slow may turn it round."""
    low, high = step.margins
    takes = f"the host takes {step.margin:.2f} times what the GPU does ({low:.2f} to {high:.2f})"
    if step.launch_bound:
        told = f"launch-bound: the GPU waits {percent(step.idle_s / step.time_s)} of the time for the host; {takes}"
        return [told, "a CUDA graph, torch.compile or a larger batch would fill it"]
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
    return ["; ".join(what), f"weights {built['dtype_why']}{precision}", *built.get("notes", ())]


def _times(step: Step) -> list[tuple[str, ...]]:
    rate, word = (step.trace.tokens, "tokens") if step.trace.tokens else (step.trace.samples, "samples")
    note = f"{digits(rate / step.time_s)} {word}/s, MFU {percent(step.mfu)}"
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
