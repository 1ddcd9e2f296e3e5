"""How a batch runs, as text, as JSON, as a timeline and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from kernelcast.errors import KernelcastError
from kernelcast.report.json import breakdown_fields
from kernelcast.report.text import plain_table, show
from kernelcast.report.units import bar, binary_bytes_text, digits, percent, time_text
from kernelcast.serving.result import Inference
from kernelcast.span import Span
from kernelcast.support import SUPPORT
from kernelcast.timeline import Share


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
        "layout": {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "ep": layout.ep},
        "precision": found.deployment.precision.label,
        "requests": len(found.workload.inputs),
        "input_tokens": sum(found.workload.inputs),
        "output_tokens": found.output_tokens,
        "decode_steps": found.steps,
    }
    for name, span in times.items():
        told |= {f"{name}_s": float(span.time_s), f"{name}_s_low": float(span.low_s)}
        told[f"{name}_s_high"] = float(span.high_s)
    return told | {
        "tokens_per_s": float(found.tokens_per_s),
        "tokens_per_s_per_gpu": float(found.tokens_per_s / layout.gpus),
        "requests_per_s": float(len(found.workload.inputs) / found.total.time_s),
        "mfu": float(found.mfu),
        "bandwidth_use": float(found.bandwidth_use),
        "memory_bytes": float(memory.used_bytes),
        "memory": memory.fields("available_bytes", "gpu_bytes"),
        "breakdown": breakdown_fields(found.shares),
        "support": found.support,
        "predictor": found.predictor,
    }  # fmt: skip


def print_inference(found: Inference) -> None:
    """The answer first, then where the time goes, then memory, then what it rests on."""
    deployment, layout = found.deployment, found.deployment.layout
    cuts = [f"{name} {getattr(layout, name)}" for name in ("tp", "pp", "dp", "ep") if getattr(layout, name) > 1]
    place = f"{layout.gpus} x {deployment.gpu.name}" if layout.gpus > 1 else deployment.gpu.name
    show(Text.assemble((deployment.model.name, "bold cyan"), f"  {deployment.precision.label}", ("  on  ", "dim"),
                       (place, "bold"), f"  {', '.join([deployment.stack.name, *cuts])}"))  # fmt: skip
    workload = found.workload
    inputs, outputs = _range(workload.inputs), _range(workload.outputs)
    count = len(workload.inputs)
    show(f"{count:,} request{'s' if count > 1 else ''}, {inputs} tokens in, {outputs} out", "")
    show(_answer(found), "", _breakdown(found), "", _memory(found))
    show(f"support    {found.support} ({SUPPORT[found.support]}), {found.predictor}")


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _answer(found: Inference) -> Any:
    table = plain_table("", "time", "80% interval", "", right=("time",))
    reads = found.deployment.model.kind == "encoder"
    each = f"{digits(sum(found.workload.inputs) / found.prefill.time_s)} tokens/s in"
    rows: list[tuple[str, Span, str]] = [("one pass" if reads else "time to first token", found.prefill, each)]
    if reads:
        rows = [(rows[0][0], found.prefill, f"{each}, MFU {percent(found.mfu)}")]
    if found.steps:
        rows += [
            ("time per output token", found.tpot, f"{digits(1 / found.tpot.time_s)} tokens/s a request"),
            ("decode", found.decode, f"{found.steps:,} steps, {percent(found.bandwidth_use)} of DRAM's peak"),
        ]
    if not reads:
        gpus = found.deployment.layout.gpus
        shared = f", {digits(found.tokens_per_s / gpus)} a GPU" if gpus > 1 else ""
        rows.append(("total", found.total, f"{digits(found.tokens_per_s)} tokens/s{shared}, MFU {percent(found.mfu)}"))
    for name, span, note in rows:
        table.add_row(name, time_text(span.time_s), f"{time_text(span.low_s)} to {time_text(span.high_s)}", note)
    if found.workload.speculation and found.steps:
        table.add_row("", "", "", f"{found.workload.speculation.tokens_per_step:.2f} tokens a step by speculation")
    return table


def _breakdown(found: Inference) -> Any:
    table = plain_table("part", "prefill", "", "decode", "", "bound by", right=("prefill", "decode"))
    totals = {"prefill": found.prefill.time_s, "decode": found.decode.time_s}
    parts: dict[str, dict[str, Share]] = {}
    for share in found.shares:
        parts.setdefault(share.part, {})[share.phase] = share
    order = sorted(parts, key=lambda part: -sum(s.time_s for s in parts[part].values()))
    for part in order:
        cells: list[str] = [part]
        for phase in ("prefill", "decode"):
            own = parts[part].get(phase)
            portion = own.time_s / totals[phase] if own and totals[phase] else 0.0
            cells += [time_text(own.time_s), f"{bar(portion, 10):10} {portion:4.0%}"] if own else ["", ""]
        bounds = dict.fromkeys(s.bound_by for s in parts[part].values())
        table.add_row(*cells, " / ".join(bounds))
    return table


def _memory(found: Inference) -> Text:
    memory = found.memory
    used = ", ".join(
        f"{name} {binary_bytes_text(size)}"
        for name, size in zip(("weights", "KV cache", "activations", "stack"), memory.parts.values(), strict=True)
    )
    held, available = binary_bytes_text(memory.used_bytes), binary_bytes_text(memory.available_bytes)
    return Text(f"memory     {held} of {available} a GPU: {used}; at most {found.largest_batch:,} such requests")


def write_plot(found: Inference, path: Path) -> None:
    """Where the time goes: one bar a phase, a colour a part."""
    try:
        import matplotlib
    except ImportError:
        raise KernelcastError("--plot needs Matplotlib: pip install 'kernelcast[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    phases = [phase for phase in ("prefill", "decode") if any(s.phase == phase for s in found.shares)]
    parts = sorted({s.part for s in found.shares}, key=lambda p: -sum(s.time_s for s in found.shares if s.part == p))
    colours = plt.get_cmap("tab20").colors  # type: ignore[attr-defined]
    figure, axes = plt.subplots(len(phases), 1, figsize=(9, 1.6 * len(phases) + 1.0), squeeze=False)
    for axis, phase in zip(axes[:, 0], phases, strict=True):
        left = 0.0
        for at, part in enumerate(parts):
            own = sum(s.time_s for s in found.shares if s.phase == phase and s.part == part) * 1e3
            axis.barh([phase], [own], left=left, color=colours[at % 20], label=part)
            left += own
        axis.set(xlabel="ms")
    axes[0, 0].set_title(
        f"{found.deployment.model.name} on {found.deployment.layout.gpus} x {found.deployment.gpu.name}"
    )
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=min(6, len(labels)), fontsize=8)
    figure.tight_layout(rect=(0, 0.16 if len(labels) > 6 else 0.1, 1, 1))
    try:
        figure.savefig(path, dpi=110)
    except ValueError as error:  # an ending that names no format
        raise KernelcastError(f"--plot {path}: {error}") from None
    finally:
        plt.close(figure)
