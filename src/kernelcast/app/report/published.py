"""Errors of whole answers on published results and live runs, for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelcast.app.report.text import dense_table, digits, show, truncate
from kernelcast.forecast.end_to_end import EndToEnd

HEADS = ("quantity", "results", "mean error", "median", "bias", "in interval")
NOTE = (
    "Errors are in percent of what was measured; a bias above 0 means forecast too slow (of a throughput: too high)."
    " In interval: share inside the 80% interval, of the half of the results that its width was not set on."
)
NOTHING = "No published result was scored."
_NAME_WIDTH = 24  # of a model: what 100 columns leave


def published_fields(evidence: EndToEnd, by: str) -> dict[str, Any]:
    return {"by": by, "about": dict(evidence.about), "errors": evidence.error_lines(by)}


def error_cells(line: Mapping[str, Any]) -> list[str]:
    """A line of errors under ``HEADS``."""
    inside = "—" if line["coverage"] is None else f"{line['coverage']:.0%} of {line['held_out']:,}"
    size = [digits(line[name], 3) + "%" for name in ("mean", "median")]
    return [line["quantity"], f"{line['rows']:,}", *size, f"{line['bias']:+.0f}%", inside]


def print_published(evidence: EndToEnd, by: str) -> None:
    """A line a source and quantity, or one for each GPU, model, stack or level of support."""
    lines = evidence.error_lines(by)
    if not lines:
        show(NOTHING)
        return
    groups = ("source",) if by == "source" else (by, "source")
    rows = [[*(truncate(line[name], _NAME_WIDTH) for name in groups), *error_cells(line)] for line in lines]
    show(dense_table(*groups, *HEADS, left=(*groups, HEADS[0]), rows=rows), "")
    if by == "source":
        titles = {line["source"]: line["title"] for line in lines}
        width = max(map(len, titles))
        show(*(f"{source:{width}}  {title}" for source, title in titles.items()), "")
    show(NOTE)
