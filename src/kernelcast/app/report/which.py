"""Which kernel runs, as a table for a terminal: what the file says, and what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kernelcast.app.report.text import cut, dense_table, show
from kernelcast.forecast.evidence import MeasuredConfiguration
from kernelcast.hardware import gpu
from kernelcast.ops.kernel_selection import kernel_choice_rows

_OP_WIDTH = 20


def runs_fields(
    place: str | None, stacks: Sequence[str], ops: Sequence[str], entries: Sequence[MeasuredConfiguration]
) -> list[dict[str, Any]]:
    """The entries that hold on a GPU (None: all of the file), each with the calls measured there by backend."""
    chip = gpu(place) if place else None
    lines = kernel_choice_rows(chip, stacks, ops)
    return [{**line, "gpu": chip.id, "measured": measured(line, chip.id, entries)} if chip else line for line in lines]


def measured(line: Mapping[str, Any], place: str, entries: Sequence[MeasuredConfiguration]) -> dict[str, int]:
    """Calls on this GPU by backend, of the stack, op and formats of an entry; the most first."""
    found: Counter[str] = Counter()
    for entry in entries:
        same = entry.op == line["op"] and entry.gpu == place and entry.configuration.get("backend")
        if same and all(line[name] in ("*", entry.configuration.get(name)) for name in ("stack", "dtype", "kv_dtype")):
            found[str(entry.configuration["backend"])] += entry.calls
    return dict(found.most_common())


def print_runs(lines: Sequence[Mapping[str, Any]]) -> None:
    """A table a GPU, or of the whole file, a line an entry; then the sources."""
    sources = list(dict.fromkeys(source for line in lines for source in line["sources"]))
    places = dict.fromkeys(line.get("gpu") for line in lines)
    for place in places:
        chip = gpu(place) if place else None
        if chip:
            told = "inherited" if chip.path_inherited else f"compute capability {chip.compute_capability}"
            show(f"{chip.name} ({chip.id}): {chip.instruction_path}, {told}", "")
        heads = ("stack", "op", "format", "kernel", "backend", *(("how", "measured") if chip else ("on",)), "from")
        rows = [_line(line, sources) for line in lines if line.get("gpu") == place]
        show(dense_table(*heads, left=heads, rows=rows), "")
    show(*(f"[{at}] {source}" for at, source in enumerate(sources, start=1)))


def _line(line: Mapping[str, Any], sources: Sequence[str]) -> tuple[str, ...]:
    named = {name: "any" if line[name] == "*" else str(line[name]) for name in ("stack", "dtype", "on")}
    kv = "" if line["kv_dtype"] == "*" else f", kv {line['kv_dtype']}"
    cells = (named["stack"], cut(line["op"], _OP_WIDTH), named["dtype"] + kv, line["family"], line["backend"] or "—")
    where = (line["how"], _backends(line["measured"])) if "gpu" in line else (named["on"],)
    return *cells, *where, ",".join(str(sources.index(source) + 1) for source in line["sources"])


def _backends(calls: Mapping[str, int]) -> str:
    """'trtllm +2': the one with the most calls, and how many others there are."""
    first = next(iter(calls), "—")
    return f"{first} +{len(calls) - 1}" if len(calls) > 1 else first
