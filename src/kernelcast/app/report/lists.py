"""Lists for a terminal: the GPUs of the catalogue, one GPU in full, the ops of the registry."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from kernelcast.app.report.json import derived_peaks, first_paragraph
from kernelcast.app.report.text import WIDTH, changes_text, console, cut, dense_table, plain_table, show
from kernelcast.app.report.units import field_text
from kernelcast.hardware import Gpu
from kernelcast.ops import Kernel, parameters_of

_HIDDEN = ("origin", "id", "name", "aliases", "sources", "changes")
_NAME_WIDTH = 19  # what 100 columns leave


def print_gpus(chips: Iterable[Gpu]) -> None:
    """The catalogue, one line a GPU."""
    numbers = ("SMs", "GiB", "TB/s", "bf16", "fp16", "fp8", "link", "W")
    words = ("id", "name", "arch") if console().width >= WIDTH else ("id", "arch")  # the id says the name too
    rows: list[tuple[RenderableType, ...]] = []
    for chip in chips:
        peaks = [chip.tensor_flops_per_s(dtype) / 1e12 for dtype in ("bf16", "fp16", "fp8")]
        name = cut(chip.name.removeprefix("NVIDIA ").removeprefix("AMD "), _NAME_WIDTH)
        rows.append(
            (
                Text(chip.id, "bold cyan"),
                *([name] if "name" in words else []),
                chip.architecture,
                str(chip.sm_count),
                f"{chip.dram_bytes / 2**30:.0f}",
                f"{chip.dram_bytes_per_s / 1e12:.2f}",
                *(f"{peak:.0f}" if peak else "—" for peak in peaks),
                f"{chip.link_bytes_per_s / 1e9:.0f}" if chip.link_bytes_per_s else "—",
                f"{chip.power_w:.0f}",
            )
        )
    show(dense_table(*words, *numbers, left=words, rows=rows, gap=1))
    show("\nbf16, fp16, fp8: dense tensor peak, TFLOP/s. link: GB/s per direction. More: kernelcast gpu ID")


def print_gpu(chip: Gpu) -> None:
    """Every number of one GPU with its source, then the peaks that follow from them."""
    title = Text.assemble((chip.name, "bold"), f" ({chip.id})")
    if chip.aliases:
        title.append(f"\nalso called {', '.join(chip.aliases)}", "dim")
    table = plain_table("field", "value", "source", right=("value", "source"))
    notes: dict[str, int] = {}
    for name, value in _flat_fields(chip):
        source = chip.sources.get(name, "")
        note = f"[{notes.setdefault(source, len(notes) + 1)}]" if source else ""
        style = "yellow" if source == "what-if" else ""
        cells = (name, field_text(name.split(".")[0], value), note)
        table.add_row(*(Text(cell, style) for cell in cells))
    sources = Table.grid(Column(justify="right", no_wrap=True), Column(), padding=(0, 1))
    for source, number in notes.items():
        sources.add_row(f" [{number}]", source)
    show(title + changes_text(chip), "", table, "", _peaks(chip), "", Text("sources", "bold"), sources)


def _flat_fields(chip: Gpu) -> Iterator[tuple[str, Any]]:
    """Fields with their values, the tables of one number a dtype taken apart."""
    for spec in dataclasses.fields(chip):
        value = getattr(chip, spec.name)
        if spec.name in _HIDDEN:
            continue
        if isinstance(value, Mapping):
            yield from ((f"{spec.name}.{key}", number) for key, number in value.items())
        else:
            yield spec.name, value


def _peaks(chip: Gpu) -> Table:
    table = plain_table("peak of the chip", "value", right=("value",))
    for name, value in derived_peaks(chip).items():
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
        words = [spec.name if spec.required else f"[{spec.name}]" for spec in specs]
        table.add_row(Text(kernel.op, "bold cyan"), ", ".join(words), first_paragraph(kernel))
    show(table, "\n[…]: optional. All take dtype and stack. More: kernelcast kernel OP --help")
