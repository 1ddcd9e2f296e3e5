"""Pages that are made from the code: GPUs, ops, models, stacks and evidence; ``generated_code.py`` has the others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import kernelcast
from kernelcast.app.questions.evidence import all_entries
from kernelcast.app.report.kernel import doc_text
from kernelcast.app.report.lists import derived_peaks, op_fields, summed_evidence
from kernelcast.hardware import fabrics, gpu, gpu_ids
from kernelcast.models import hub_name, model, model_ids
from kernelcast.ops import REGISTRY
from kernelcast.stacks import stack, stack_ids

MADE = "*This page is made from the code when the site is built.*\n"
Cell = str | int | float | None


def table(head: Sequence[str], rows: Iterable[Sequence[Cell]], right: Sequence[str] = ()) -> str:
    """A Markdown table; columns of numbers to the right."""
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join("--:" if name in right else "---" for name in head) + "|"]
    lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: Cell) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return value.replace("\n", " ").replace("|", "\\|")


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"


def gpus() -> str:
    """The catalogue, then every GPU's own numbers with their sources."""
    chips = [gpu(name) for name in gpu_ids()]
    measured = {entry.gpu for entry in all_entries()}
    head = ("id", "name", "architecture", "SMs", "GiB", "TB/s", "bf16", "fp8", "fp4", "link GB/s", "W", "measured")
    rows = []
    for chip in chips:
        peaks = derived_peaks(chip)["tensor_flops_per_s"]
        tera = [peaks[name] / 1e12 if peaks.get(name) else None for name in ("bf16", "fp8", "nvfp4")]
        rows.append((
            f"[`{chip.id}`](#{chip.id})", chip.name, chip.architecture, chip.sm_count, round(chip.dram_bytes / 2**30),
            chip.dram_bytes_per_s / 1e12, *(None if x is None else round(x) for x in tera),
            round(chip.link_bytes_per_s / 1e9) or None, round(chip.power_w), "yes" if chip.id in measured else "",
        ))  # fmt: skip
    text = [
        f"# GPUs\n\n{MADE}\n{len(chips)} GPUs, each one TOML file with a source beside every number. bf16, fp8, fp4: "
        "dense tensor peaks in TFLOP/s. *measured*: the weights have seen calls of this GPU; the others borrow from "
        "their kin ([trust](../trust.md)). A GPU of your own: [a new GPU](../new-gpu.md).\n",
        table(head, rows, right=head[3:11]),
        "\n## Links\n",
        table(
            ("fabric", "GB/s a direction", "latency µs", "source"),
            [(f"`{name}`", f.bytes_per_s / 1e9, f.latency_s * 1e6, f.source) for name, f in sorted(_fabrics().items())],
            right=("GB/s a direction", "latency µs"),
        ),
    ]
    for chip in chips:
        text.append(
            f"\n## {chip.name} {{ #{chip.id} }}\n\n`{chip.id}`" + _also(chip.aliases) + '\n\n??? note "Every number"\n'
        )
        rows, sources = _gpu_rows(chip)
        listed = "\n".join(f"{number}. {_linked(source)}" for source, number in sources.items())
        inside = f"{table(('field', 'value', 'source'), rows, right=('value', 'source'))}\n{listed}"
        text.append("\n".join(f"    {line}" for line in inside.splitlines()) + "\n")
    return "\n".join(text)


def _also(aliases: Iterable[str]) -> str:
    names = ", ".join(aliases)
    return f", also called {names}" if names else ""


def _fabrics() -> dict[str, Any]:
    found = fabrics()
    return dict(found) if isinstance(found, dict) else {name: kernelcast.fabric(name) for name in found}


def _gpu_rows(chip: Any) -> tuple[list[tuple[Cell, ...]], dict[str, int]]:
    """Fields that the GPU has, each with the number of its source; and the sources."""
    from kernelcast.app.report.lists import _flat_fields
    from kernelcast.app.report.text import field_text

    rows: list[tuple[Cell, ...]] = []
    notes: dict[str, int] = {}
    for name, value in _flat_fields(chip):
        if value is None:
            continue
        source = chip.sources.get(name, "")
        note = f"[{notes.setdefault(source, len(notes) + 1)}]" if source else ""
        rows.append((f"`{name}`", field_text(name.split(".")[0], value), note))
    return rows, notes


def _linked(text: str) -> str:
    return re.sub(r"(?<![<(])(https?://[^\s,;)]+)", r"<\1>", text)


def ops() -> str:
    """Every op of the registry with its parameters and an example."""
    text = [
        f"# Ops\n\n{MADE}\n{len(REGISTRY)} ops. A parameter has the same name in Python, on the command line "
        "(`--kv-heads` for `kv_heads`) and in tables. From Python an op is a class: `kernelcast.Gemm(m=…, n=…, k=…)`.\n"
    ]
    index = [(f"[`{op}`](#{op})", op_fields(found)["help"]) for op, found in sorted(REGISTRY.items())]
    text.append(table(("op", "what it is"), index))
    for op, found in sorted(REGISTRY.items()):
        fields = op_fields(found)
        text.append(f"\n## {op} {{ #{op} }}\n\n{prose(doc_text(found))}\n")
        rows = [
            (
                f"`{spec['name']}`",
                _range(spec),
                "needed" if spec["required"] else _default(spec["default"]),
                spec["help"],
            )
            for spec in fields["parameters"]
        ]
        text.append(table(("parameter", "is", "default", "what"), rows))
        if fields["examples"]:
            words = " ".join(_flag(name, value) for name, value in fields["examples"][0].items())
            text.append(f"\n```sh\nkernelcast kernel {op} {words} --gpu h200_sxm\n```\n")
    return "\n".join(text)


def prose(text: str) -> str:
    """A docstring's paragraphs; indented lines stay code."""
    return "\n\n".join(" ".join(part.split()) if not part.startswith(" ") else part for part in text.split("\n\n"))


def _range(spec: dict[str, Any]) -> str:
    if spec["kind"] == "choice":
        return ", ".join(f"`{option}`" for option in spec["options"])
    low, high = spec.get("low"), spec.get("high")
    if low is None and high is None:
        return str(spec["kind"])
    return (
        f"{spec['kind']}, {low:,g} to {high:,g}"
        if high not in (None, float("inf"))
        else f"{spec['kind']}, from {low:,g}"
    )


def _default(value: Any) -> str:
    return "–" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _flag(name: str, value: Any) -> str:
    shown = (
        ",".join(map(str, value))
        if isinstance(value, (list, tuple))
        else str(value).lower()
        if isinstance(value, bool)
        else value
    )
    return f"--{name.replace('_', '-')} {shown}"


def models() -> str:
    found = [(name, model(name)) for name in model_ids()]
    head = ("model", "Hugging Face id", "parameters", "active", "layers", "hidden", "vocabulary", "context")
    rows = [
        (f"`{name}`", hub_name(name), f"{one.parameters.total / 1e9:,.2f} B",
         f"{one.active_parameters.total / 1e9:,.2f} B", one.layer_count, one.hidden, one.vocab, one.max_context)
        for name, one in found
    ]  # fmt: skip
    return (
        f"# Models\n\n{MADE}\n{len(rows)} checkpoints, each the public config.json of its model. Any other config.json "
        "of their types works by its path: `kernelcast infer path/to/config.json`. Fine-tunes, mirrors and quantised "
        "versions are found by [name](../infer.md#names). [Whole models](../infer.md) has how "
        "one is forecast, [frontier models](../frontier.md) the newest kinds; any other network can be "
        "[traced](../trace.md).\n\n" + table(head, rows, right=head[2:])
    )


def stacks() -> str:
    shown = ("kernels", "mla_kernels", "small_ops", "page_size", "graphs", "mixed_steps", "exchange", "fused_residual",
             "fused_activation", "fused_quantisation", "step_s", "launch_s", "request_s", "front_s", "used_share",
             "reserved_bytes")  # fmt: skip
    found = [stack(name) for name in stack_ids()]
    rows: list[list[Cell]] = [[f"`{field}`", *(str(getattr(one, field)) for one in found)] for field in shown]
    keys = sorted({key for one in found for key, _ in one.scheduler})
    limits: list[list[Cell]] = [
        [f"`{key}`", *(str(dict(one.scheduler).get(key, "–")) for one in found)] for key in keys
    ]
    names = [f"{one.name} (`{one.id}`)" for one in found]
    sources = [f"- {one.name}, {key}: {_linked(text)}" for one in found for key, text in one.sources]
    return "\n".join([
        f"# Stacks\n\n{MADE}\nThe software that serves a model (`--stack`), as data: one TOML file each. Which "
        "kernel each runs on which GPU: [kernel selection](../which-kernel.md), and `kernelcast evidence --runs`.\n",
        table(("what the file says", *names), rows),
        "\n## Schedulers\n\nDefaults of [`kernelcast simulate`](../simulate.md); every one has an option.\n",
        table(("default", *names), limits),
        "\n## Sources\n", *sources, "",
    ])  # fmt: skip


def evidence() -> str:
    """What was measured, by op, GPU and stack; then each op by GPU."""
    entries = all_entries()
    text = [
        f"# Evidence\n\n{MADE}\n{sum(e.calls for e in entries):,} measured calls of {len(entries):,} kinds, as the "
        "weights that ship keep them: figures, no rows. A kind is an op on a GPU and all its words together (stack, "
        "backend, formats, prefill or decode, …). *off*: mean error on calls of shapes that no fit saw, by calls; "
        "*worst*: of a kind; *inside*: share of them in the 80% interval. `kernelcast evidence --op moe --gpu "
        "h200_sxm` lists kinds one by one; [trust](../trust.md) says what follows from it, [accuracy](../accuracy.md) "
        "how forecasts do where a GPU, a generation or a stack was left out.\n"
    ]
    for by, title in (("op", "By op"), ("gpu", "By GPU"), ("stack", "By stack")):
        rows = [
            (
                f"`{line[by]}`",
                line["kinds"],
                line["calls"],
                _percent(line["error"]),
                _percent(line["worst_error"]),
                _percent(line["inside"]),
            )
            for line in summed_evidence(entries, by)
        ]
        head = (by, "kinds", "calls", "off", "worst", "inside")
        text.append(f"\n## {title}\n\n" + table(head, rows, right=head[1:]))
    text.append("\n## Op by GPU\n\nCalls, and how far forecasts are off on those left out.\n")
    for op in sorted({entry.op for entry in entries}):
        lines = summed_evidence([entry for entry in entries if entry.op == op], "gpu")
        cells = "; ".join(f"`{line['gpu']}` {line['calls']:,} ({_percent(line['error'])})" for line in lines)
        text.append(f"- **{op}**: {cells}")
    return "\n".join(text) + "\n"
