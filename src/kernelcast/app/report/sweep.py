"""A sweep as text and as JSON: how it went, and rows of it."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from kernelcast.app.report.json import attributes, plain
from kernelcast.app.report.text import dense_table, digits, plural, show, time_text
from kernelcast.search.sweep.file import LAYOUT
from kernelcast.search.sweep.query import Objective, QueryResult
from kernelcast.search.sweep.run import SweepOutcome

_SHOWN = 50  # rows of a query that a terminal gets
_WORD_WIDTH = 40  # of a cell of text
_SHORT = {
    "input_len": "in", "output_len": "out", "micro_batches": "micro", "sequence_parallel": "sp",
    "tokens_per_s_per_gpu": "tokens/s/GPU", "tokens_per_s": "tokens/s", "requests_per_s": "requests/s",
    "dollars_per_million_tokens": "$/M tokens", "memory_bytes": "GiB", "available_bytes": "GiB there",
    "usd_per_hour": "$/h",
}  # fmt: skip
_ALWAYS = ("tokens_per_s_per_gpu", "ttft_s", "tpot_s", "step_s", "mfu", "dollars_per_million_tokens")
_SIZES_OF_ONE = (*LAYOUT, "cp", "expert_tp", "virtual_stages")  # which say nothing


def outcome_fields(outcome: SweepOutcome, statuses: Mapping[str, int]) -> dict[str, Any]:
    figures = attributes(outcome, "settings", "seconds", "settings_per_s", finished_before="before")
    return {"folder": str(outcome.folder), **figures, "statuses": dict(statuses)}


def print_outcome(outcome: SweepOutcome, statuses: Mapping[str, int]) -> None:
    counts = ", ".join(f"{count:,} {status}" for status, count in statuses.items() if count)
    rate = f"{time_text(outcome.seconds)}, {digits(outcome.settings_per_s)} settings/s"
    if outcome.before == outcome.settings:
        rate = "all were there"
    elif outcome.before:
        rate += f", {outcome.before:,} were there"
    show(f"{plural(outcome.settings, 'setting')}: {counts}; {rate}", f"rows in {outcome.folder}")


def print_best(result: QueryResult, title: str, wanted: Sequence[Objective]) -> None:
    """Rows that run: what they share in a line, what they differ in and the objectives in columns."""
    rows = result.fields()
    if not rows:
        show("", f"{title}: no row")
        return
    names = list(rows[0])
    settings = names[: names.index("status")]
    differ = [name for name in settings if len({row[name] for row in rows}) > 1]
    shared = [
        f"{name} {_cell(name, rows[0][name])}" for name in settings
        if name not in (*differ, "setting", "cached", "skew") and rows[0][name] not in (None, False)
        and (name not in _SIZES_OF_ONE or rows[0][name] != 1)
    ]  # fmt: skip
    objectives = [objective.column for objective in wanted]
    shown = ["setting", *differ, *objectives, *_ALWAYS, "bound_by", "support"]
    columns = [name for name in dict.fromkeys(shown) if name in names]
    texts = [name for name in columns if isinstance(rows[0][name], str)]
    table = dense_table(
        *(_SHORT.get(name, name.removesuffix("_s")) for name in columns),
        left=[_SHORT.get(name, name.removesuffix("_s")) for name in texts],
        rows=[[_cell(name, row[name]) for name in columns] for row in rows],
    )
    show("", Text(title, "bold"), *([", ".join(shared)] if shared else []))
    _wide(table)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if name.endswith(("_s", "_s_low", "_s_high")) and "per_s" not in name:
        return time_text(value)
    if name.endswith("_bytes"):
        return f"{value / 2**30:.1f}"
    if isinstance(value, float):
        return digits(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def print_answer(result: QueryResult) -> None:
    """Of a query: at most 50 rows."""
    rows = [["" if cell is None else _cell_text(cell) for cell in row] for row in result.rows[:_SHOWN]]
    texts = [
        name for at, name in enumerate(result.names) if any(isinstance(row[at], str) for row in result.rows[:_SHOWN])
    ]
    _wide(dense_table(*result.names, left=texts, rows=rows))
    if len(result.rows) > _SHOWN:
        show(f"… {plural(len(result.rows) - _SHOWN, 'row')} more: --csv, --json, or a LIMIT")


def _cell_text(cell: Any) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return f"{cell:.5g}"
    text = " ".join(str(cell).split())
    return text if len(text) <= _WORD_WIDTH else text[: _WORD_WIDTH - 1] + "…"


def _wide(table: Any) -> None:
    """Rows are not broken: a pipe gets them whole, a terminal scrolls or wraps."""
    out = Console(width=10_000, highlight=False, markup=False)
    with out.capture() as captured:
        out.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())


def answer_fields(result: QueryResult) -> list[dict[str, Any]]:
    return [plain(row) for row in result.fields()]


def write_csv(result: QueryResult) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(result.names)
    writer.writerows(result.rows)
