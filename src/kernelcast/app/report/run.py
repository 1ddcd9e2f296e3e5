"""What is shown alike of a batch that is served and of a step: its times, and where they go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from kernelcast.app.report.text import plain_table
from kernelcast.app.report.units import bar, binary_bytes_text, time_text
from kernelcast.schedule import Share


def interval_text(low_s: float, high_s: float) -> str:
    return f"{time_text(low_s)} to {time_text(high_s)}"


def times_table(rows: Iterable[Sequence[str]]) -> Table:
    """Rows of a name, its time, the interval around it, and a note."""
    return plain_table("", "time", "80% interval", "", right=("time",), rows=rows)


def breakdown_table(found: Iterable[Share], totals_s: Mapping[str, float], chars: tuple[int, int]) -> Table:
    """A row a part, the longest first: its time in each phase, and its share of ``totals_s`` as a bar and a number,
    which are ``chars`` wide."""
    parts: dict[str, dict[str, Share]] = {}
    for share in found:
        parts.setdefault(share.part, {})[share.phase] = share
    heads = [word for phase in totals_s for word in (phase, "")]
    table = plain_table("part", *heads, "bound by", right=tuple(totals_s))
    wide, narrow = chars
    for part, own in sorted(parts.items(), key=lambda item: -sum(share.time_s for share in item[1].values())):
        cells = [part]
        for phase, total_s in totals_s.items():
            if phase not in own:
                cells += ["", ""]
                continue
            portion = own[phase].time_s / total_s if total_s else 0.0
            cells += [time_text(own[phase].time_s), f"{bar(portion, wide):{wide}} {portion:{narrow}.0%}"]
        table.add_row(*cells, " / ".join(dict.fromkeys(share.bound_by for share in own.values())))
    return table


def breakdown_fields(found: Iterable[Share]) -> list[dict[str, Any]]:
    """Where the time goes, by phase and part."""
    return [
        {"phase": s.phase, "part": s.part, "time_s": float(s.time_s), "kernels": round(s.kernels),
         "bound_by": s.bound_by, "support": s.support}
        for s in found
    ]  # fmt: skip


def sizes_text(sizes: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {binary_bytes_text(size)}" for name, size in sizes)
