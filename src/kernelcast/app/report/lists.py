"""Lists for a terminal: the GPUs of the catalogue, one GPU in full, the ops of the registry."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from kernelcast.app.report.json import attributes
from kernelcast.app.report.kernel import changes_text, doc_text
from kernelcast.app.report.text import (
    WIDTH,
    console,
    dense_table,
    digits,
    field_text,
    percent,
    plain_table,
    show,
    truncate,
)
from kernelcast.forecast.evidence import MeasuredConfiguration
from kernelcast.hardware import Gpu
from kernelcast.hardware import gpu as find_gpu
from kernelcast.models import hub_name
from kernelcast.models.architecture import Architecture
from kernelcast.models.precision import Precision
from kernelcast.ops import Kernel, parameters_of
from kernelcast.ops.kernel_selection import kernel_choice_rows

_HIDDEN = ("origin", "id", "name", "aliases", "sources", "changes")
_IN_FULL = 6  # configurations whose ranges are shown too
_CONFIGURATION_WIDTH = 44
_ORDER = ("stack", "backend", "dtype", "kv_dtype", "phase", "mask", "paged")  # the others after
_USUAL = (None, "no", "equal", "chosen", "own", "dense", "vector", "tn")  # values that go without saying
_OP_WIDTH = 20
_FEW = 30  # lines that may be broken in two
_NAME_WIDTH = 19  # what 100 columns leave


def print_gpus(gpus: Iterable[Gpu]) -> None:
    """The catalogue, one line a GPU."""
    numbers = ("SMs", "GiB", "TB/s", "bf16", "fp16", "fp8", "link", "W")
    labels = ("id", "name", "arch") if console().width >= WIDTH else ("id", "arch")  # the id says the name too
    rows: list[tuple[RenderableType, ...]] = []
    for gpu in gpus:
        peaks = [gpu.tensor_flops_per_s(dtype) / 1e12 for dtype in ("bf16", "fp16", "fp8")]
        name = truncate(gpu.name.removeprefix("NVIDIA ").removeprefix("GeForce ").removeprefix("AMD "), _NAME_WIDTH)
        rows.append(
            (
                Text(gpu.id, "bold cyan"),
                *([name] if "name" in labels else []),
                gpu.architecture,
                str(gpu.sm_count),
                f"{gpu.dram_bytes / 2**30:.0f}",
                f"{gpu.dram_bytes_per_s / 1e12:.2f}",
                *(f"{peak:.0f}" if peak else "—" for peak in peaks),
                f"{gpu.link_bytes_per_s / 1e9:.0f}" if gpu.link_bytes_per_s else "—",
                f"{gpu.power_w:.0f}",
            )
        )
    show(dense_table(*labels, *numbers, left=labels, rows=rows, gap=1))
    show("\nbf16, fp16, fp8: dense tensor peak, TFLOP/s. link: GB/s per direction. More: kernelcast gpu ID")


def print_gpu(gpu: Gpu) -> None:
    """Every number of one GPU with its source, then the peaks that follow from them."""
    title = Text.assemble((gpu.name, "bold"), f" ({gpu.id})")
    if gpu.aliases:
        title.append(f"\nalso called {', '.join(gpu.aliases)}", "dim")
    table = plain_table("field", "value", "source", right=("value", "source"))
    notes: dict[str, int] = {}
    for name, value in _flat_fields(gpu):
        source = gpu.sources.get(name, "")
        note = f"[{notes.setdefault(source, len(notes) + 1)}]" if source else ""
        style = "yellow" if source == "what-if" else ""
        cells = (name, field_text(name.split(".")[0], value), note)
        table.add_row(*(Text(cell, style) for cell in cells))
    sources = Table.grid(Column(justify="right", no_wrap=True), Column(), padding=(0, 1))
    for source, number in notes.items():
        sources.add_row(f" [{number}]", source)
    show(title + changes_text(gpu), "", table, "", _peaks(gpu), "", Text("sources", "bold"), sources)


def _flat_fields(gpu: Gpu) -> Iterator[tuple[str, Any]]:
    """Fields with their values, the tables of one number a dtype taken apart."""
    for spec in dataclasses.fields(gpu):
        value = getattr(gpu, spec.name)
        if spec.name in _HIDDEN:
            continue
        if isinstance(value, Mapping):
            yield from ((f"{spec.name}.{key}", number) for key, number in value.items())
        else:
            yield spec.name, value


def _peaks(gpu: Gpu) -> Table:
    table = plain_table("peak of the GPU", "value", right=("value",))
    for name, value in derived_peaks(gpu).items():
        for key, peak in value.items() if isinstance(value, Mapping) else [("", value)]:
            table.add_row(f"{name}.{key}" if key else name, field_text(name, peak))
    return table


def print_ops(kernels: Iterable[type[Kernel]]) -> None:
    """The registry: every op with its parameters. Those in brackets have a default."""
    table = plain_table("op", "parameters", "what it is")
    table.columns[0].no_wrap = True
    table.columns[1].ratio, table.columns[2].ratio = 2, 3
    for kernel in kernels:
        specs = [spec for spec in parameters_of(kernel).values() if spec.name not in ("dtype", "stack")]
        names = [spec.name if spec.required else f"[{spec.name}]" for spec in specs]
        table.add_row(Text(kernel.op, "bold cyan"), ", ".join(names), first_paragraph(kernel))
    show(table, "\n[…]: optional. All take dtype and stack. More: kernelcast kernel OP --help")


def gpu_fields(gpu: Gpu) -> dict[str, Any]:
    """Every field of a GPU, what follows from them, and the sources."""
    fields = {spec.name: getattr(gpu, spec.name) for spec in dataclasses.fields(gpu)}
    sources, changes, _ = (fields.pop(name) for name in ("sources", "changes", "origin"))
    return {**fields, "derived": derived_peaks(gpu), "changes": changes, "sources": sources}


def derived_peaks(gpu: Gpu) -> dict[str, Any]:
    """Peaks of the whole GPU, per second."""
    return {
        "tensor_flops_per_s": {d: gpu.tensor_flops_per_s(d) for d in gpu.tensor_flops_per_clk_sm},
        "fma_flops_per_s": {d: gpu.fma_flops_per_s(d) for d in gpu.fma_flops_per_clk_sm},
        "xu_ops_per_s": gpu.xu_ops_per_s,
        "issue_warps_per_s": gpu.issue_warps_per_s,
        "smem_bytes_per_s": gpu.smem_bytes_per_s,
        "l2_bytes_per_s": gpu.l2_bytes_per_s,
    }


def architecture_age(gpu: Gpu) -> tuple[str, float, str]:
    """Oldest architecture first: vendors number their capabilities in order (8.9 < 9.0; gfx90a < gfx942)."""
    digits = re.sub(r"^[a-z]+", "", gpu.compute_capability)
    number = float(digits) if digits == gpu.compute_capability else float(int(digits, 16))
    return gpu.vendor, number, gpu.id


def gpu_summary(gpu: Gpu) -> dict[str, Any]:
    """One line of the catalogue."""
    return {
        **attributes(gpu, "id", "name", "vendor", "architecture", "sm_count", "dram_bytes", "dram_bytes_per_s"),
        "tensor_flops_per_s": derived_peaks(gpu)["tensor_flops_per_s"],
        **attributes(gpu, "link_kind", "link_bytes_per_s", "power_w", "aliases"),
    }


def op_fields(kernel: type[Kernel]) -> dict[str, Any]:
    """An op as the registry describes it."""
    return {
        "op": kernel.op,
        "help": first_paragraph(kernel),
        "parameters": [
            {
                "name": spec.name,
                "kind": spec.type,
                "help": spec.help,
                "required": spec.required,
                **({} if spec.required else {"default": spec.default}),
                **({"low": spec.low, "high": spec.high} if spec.type in ("size", "real", "lengths") else {}),
                **({"options": spec.options} if spec.type == "choice" else {}),
            }
            for spec in parameters_of(kernel).values()
        ],
        "examples": [dict(example) for example in kernel.examples],
    }


def first_paragraph(kernel: type[Kernel]) -> str:
    """What an op is, in one line."""
    return " ".join(doc_text(kernel).split("\n\n")[0].split())


def evidence_fields(entries: Sequence[MeasuredConfiguration], by: str) -> dict[str, Any]:
    """Measured configurations, or sums by op, GPU or stack."""
    lines = [entry.to_dict() for entry in entries] if by == "kind" else summed_evidence(entries, by)
    return {"kinds": len(entries), "calls": sum(entry.calls for entry in entries), "by": by, "evidence": lines}


def summed_evidence(entries: Sequence[MeasuredConfiguration], by: str) -> list[dict[str, Any]]:
    """A line for each op, GPU or stack: configurations and calls, mean and worst held-out error."""
    groups: dict[str, list[MeasuredConfiguration]] = {}
    for entry in entries:
        groups.setdefault(str(entry.configuration["stack"]) if by == "stack" else getattr(entry, by), []).append(entry)
    lines = []
    for name, members in sorted(groups.items()):
        tested = [(entry.error, entry.inside or 0.0, entry.tested) for entry in members if entry.error is not None]
        rows = sum(count for *_, count in tested)
        lines.append(
            {
                by: name,
                "kinds": len(members),
                "calls": sum(entry.calls for entry in members),
                "error": sum(error * count for error, _, count in tested) / rows if rows else None,
                "worst_error": max((error for error, *_ in tested), default=None),
                "inside": sum(inside * count for _, inside, count in tested) / rows if rows else None,
                "ops": sorted({entry.op for entry in members}),
                "gpus": sorted({entry.gpu for entry in members}),
                "stacks": sorted({str(entry.configuration["stack"]) for entry in members}),
            }
        )
    return lines


def print_evidence(entries: Sequence[MeasuredConfiguration], by: str) -> None:
    """A line a configuration, or summed by op, GPU or stack."""
    calls = sum(entry.calls for entry in entries)
    show(f"{len(entries):,} configurations, {calls:,} measured calls", "")
    if by == "kind":
        heads = ("op", "GPU", "configuration", "calls", "error", "inside")
        show(dense_table(*heads, left=heads[:3], rows=map(_row, entries)))
        if len(entries) <= _IN_FULL:
            show("", *(f"{entry.op} {entry.gpu} {_configuration_text(entry)}: {_ranges(entry)}" for entry in entries))
    else:
        names = (by, "configurations", "calls", "error", "worst", "inside", "measured on" if by != "gpu" else "ops")
        rows = [_summed(line, by) for line in summed_evidence(entries, by)]
        show(dense_table(*names, left=(by, names[-1]), rows=rows))
    show("\nerror: mean error on held-out calls, worst: of a configuration; inside: share in the 80% interval")


def print_no_evidence(why: str) -> None:
    """Why no configuration fits."""
    show(f"0 configurations: {why}")


def _configuration_text(entry: MeasuredConfiguration) -> str:
    order = [*_ORDER, *(name for name in entry.configuration if name not in _ORDER)]
    values = {name: entry.configuration.get(name) for name in order}
    values["paged"] = "paged" if values["paged"] == "yes" else None
    values["kv_dtype"] = f"kv {values['kv_dtype']}" if values["kv_dtype"] not in (None, values["dtype"]) else None
    return " ".join(str(value) for value in values.values() if value not in _USUAL)


def _ranges(entry: MeasuredConfiguration) -> str:
    """'m 1 to 65,536, n 128 to 8,192, k 4,096'."""
    ranges = []
    for name, (low, high) in entry.ranges.items():
        low_text, high_text = (f"{value:,.0f}" if value == int(value) else digits(value) for value in (low, high))
        ranges.append(f"{name} {low_text}" + (f" to {high_text}" if high > low else ""))
    return ", ".join(ranges)


def _row(entry: MeasuredConfiguration) -> tuple[str, ...]:
    configuration = truncate(_configuration_text(entry), _CONFIGURATION_WIDTH)
    return entry.op, entry.gpu, configuration, f"{entry.calls:,}", *_scores(entry.error, entry.inside)


def _summed(line: dict[str, Any], by: str) -> tuple[str, ...]:
    names = line["ops" if by == "gpu" else "gpus"]
    of_which = f"{len(names)} {'ops' if by == 'gpu' else 'GPUs'}" if len(names) > 2 else ", ".join(names)
    worst = percent(line["worst_error"]) if line["worst_error"] is not None else "—"
    error, inside = _scores(line["error"], line["inside"])
    return str(line[by]), f"{line['kinds']:,}", f"{line['calls']:,}", error, worst, inside, of_which


def _scores(error: float | None, inside: float | None) -> tuple[str, str]:
    return ("—" if error is None else percent(error)), ("—" if inside is None else percent(inside))


def runs_fields(
    name: str | None, stacks: Sequence[str], ops: Sequence[str], entries: Sequence[MeasuredConfiguration]
) -> list[dict[str, Any]]:
    """The entries that hold on a GPU (None: all of the file), each with the calls measured there by backend."""
    target = find_gpu(name) if name else None
    lines = kernel_choice_rows(target, stacks, ops)
    return [
        {**line, "gpu": target.id, "measured": measured(line, target.id, entries)} if target else line for line in lines
    ]


def measured(line: Mapping[str, Any], gpu_id: str, entries: Sequence[MeasuredConfiguration]) -> dict[str, int]:
    """Calls on this GPU by backend, of the stack, op and formats of an entry; the most first."""
    calls: Counter[str] = Counter()
    for entry in entries:
        same = entry.op == line["op"] and entry.gpu == gpu_id and entry.configuration.get("backend")
        if same and all(line[name] in ("*", entry.configuration.get(name)) for name in ("stack", "dtype", "kv_dtype")):
            calls[str(entry.configuration["backend"])] += entry.calls
    return dict(calls.most_common())


def print_runs(lines: Sequence[Mapping[str, Any]]) -> None:
    """A table a GPU, or of the whole file, a line an entry; then the sources."""
    sources = list(dict.fromkeys(source for line in lines for source in line["sources"]))
    names = dict.fromkeys(line.get("gpu") for line in lines)
    for name in names:
        target = find_gpu(name) if name else None
        if target:
            origin = "inherited" if target.path_inherited else f"compute capability {target.compute_capability}"
            show(f"{target.name} ({target.id}): {target.instruction_path}, {origin}", "")
        heads = ("stack", "op", "format", "kernel", "backend", *(("how", "measured") if target else ("on",)), "from")
        rows = [_line(line, sources) for line in lines if line.get("gpu") == name]
        show(dense_table(*heads, left=heads, rows=rows), "")
    show(*(f"[{at}] {source}" for at, source in enumerate(sources, start=1)))


def _line(line: Mapping[str, Any], sources: Sequence[str]) -> tuple[str, ...]:
    named = {name: "any" if line[name] == "*" else str(line[name]) for name in ("stack", "dtype", "on")}
    kv = "" if line["kv_dtype"] == "*" else f", kv {line['kv_dtype']}"
    cells = (
        named["stack"],
        truncate(line["op"], _OP_WIDTH),
        named["dtype"] + kv,
        line["family"],
        line["backend"] or "—",
    )
    where = (line["how"], _backends(line["measured"])) if "gpu" in line else (named["on"],)
    return *cells, *where, ",".join(str(sources.index(source) + 1) for source in line["sources"])


def _backends(calls: Mapping[str, int]) -> str:
    """'trtllm +2': the one with the most calls, and how many others there are."""
    first = next(iter(calls), "—")
    return f"{first} +{len(calls) - 1}" if len(calls) > 1 else first


def model_fields(model: Architecture) -> dict[str, Any]:
    """One line of the bundled models."""
    return {
        "id": hub_name(model.name), "format": format_text(model),
        "parameters": model.parameters.total, "active_parameters": model.active_parameters.total,
        "layers": model.layer_count, **attributes(model, "hidden", "vocab", "max_context"),
    }  # fmt: skip


def format_text(model: Architecture) -> str:
    """The number formats of a checkpoint, or what it ships as where no kernels are known for it."""
    stored = model.quantization
    return Precision.of(model).label if stored is None or stored.weights is not None else str(stored.unknown)


def traced_fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    """One line of the models that are traced alone."""
    return {"id": entry["id"], "parameters": entry["parameters"], "command": "trace"}


def print_models(models: Mapping[str, Mapping[str, Any]]) -> None:
    """A line a model; without the Hugging Face ids where a narrow terminal would break many of them."""
    rows = [(name, entry["id"], f"{entry['parameters'] / 1e9:,.2f} B", entry.get("format", "by `trace` alone"))
            for name, entry in models.items()]  # fmt: skip
    names, width = ("model", "Hugging Face id", "parameters", "format"), console().width
    taken = sum(max(len(line[column]) for line in (names, *rows)) + 2 for column in range(len(names))) - 2
    if taken > width and width < WIDTH and len(rows) > _FEW:
        names, rows = (names[0], *names[2:]), [(row[0], *row[2:]) for row in rows]  # type: ignore[assignment, misc]
    table = dense_table(*names, left=[name for name in names if name != "parameters"], rows=rows)
    table.columns[0].no_wrap = True
    show(table, "\nTuned versions and mirrors of these are found too, with -AWQ, -GPTQ, -FP8 and the like.")
