"""Results as HTML for notebooks: what the command line prints of them, its tables as tables and its bars as bars.

Nothing has a colour of its own but bars and lines, so that it is read on a light page and on a dark one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape
from importlib import import_module
from itertools import groupby, pairwise
from typing import Any

from rich.table import Table
from rich.text import Text

from kernelcast.app.report.text import COMMAND, captured
from kernelcast.models import hub_name

_STYLE = (
    ".kernelcast{font-size:13px;line-height:1.45;max-width:64em;overflow-x:auto}"
    ".kernelcast p{margin:.2em 0}"
    ".kernelcast table{border-collapse:collapse;border:0;margin:.5em 0;font-size:inherit;color:inherit}"
    ".kernelcast tr,.kernelcast td,.kernelcast th{border:0;background:transparent;color:inherit}"
    ".kernelcast td,.kernelcast th{padding:.1em 1em .1em 0;text-align:left;vertical-align:top;max-width:none}"
    ".kernelcast thead th{border-bottom:1px solid rgba(128,128,128,.6);font-weight:600}"
    ".kernelcast .number{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}"
    ".kernelcast .bar{display:inline-block;height:.7em;background:#4c8fd6;margin-right:.4em}"
    ".kernelcast .label{font-weight:600;white-space:nowrap}"
    ".kernelcast code{white-space:pre-wrap;background:transparent;color:inherit}"
)
_BLOCKS = "▏▎▍▌▋▊▉█"  # eighths of a block, as a terminal draws bars
_BAR = re.compile(f"\\s*([{_BLOCKS}]+)(.*)", re.DOTALL)
_EM_A_BLOCK = 0.6
# 'memory     20.91 GiB of …'
_LABEL = re.compile(r"([A-Za-z\[][\w\].]*(?: \w+)?) {2,}(\S.*)|(throughput) (.*)", re.DOTALL)


def html_of(result: Any) -> str:
    """What a notebook shows of a result."""
    for cls in type(result).__mro__:
        if cls.__name__ in _SHOWN:
            name, more = _SHOWN[cls.__name__]
            module, function = name.split(".")
            with captured() as parts:
                getattr(import_module(f"kernelcast.app.report.{module}"), function)(result, *more(result))
            return f'<div class="kernelcast"><style>{_STYLE}</style>{_blocks(parts)}</div>'
    raise TypeError(f"nobody knows how to show a {type(result).__name__} as HTML")


def _blocks(parts: Sequence[Any]) -> str:
    """Tables, and lines between them; lines with a label stand in a table of their own."""
    lines: list[Any] = []
    for part in parts:
        lines += part.split("\n") if isinstance(part, str) else [part]
    shown = [line for line in lines if isinstance(line, Table) or str(line).strip()]
    blocks = []
    for labelled, group in groupby(shown, key=lambda line: isinstance(line, str) and bool(_LABEL.fullmatch(line))):
        members = list(group)
        blocks.append(_labels(members) if labelled else "".join(map(_block, members)))
    return "".join(blocks)


def _block(part: Any) -> str:
    if isinstance(part, Table):
        return _table(part)
    return "".join(f"<p>{line}</p>" for line in _inline(part).split("\n") if line.strip())


def _labels(lines: Sequence[str]) -> str:
    rows = []
    for line in lines:
        match = _LABEL.fullmatch(line)
        assert match is not None  # that is why it is here
        label, text = match[1] or match[3], match[2] or match[4]
        rows.append(f'<tr><td class="label">{_inline(label)}</td><td>{_inline(text)}</td></tr>')
    return f"<table><tbody>{''.join(rows)}</tbody></table>"


def _table(table: Table) -> str:
    right = [column.justify == "right" for column in table.columns]
    heads = [_inline(column.header) for column in table.columns]
    head = ""
    if table.show_header and any(heads):
        cells = "".join(
            f"<th{_aligned(numeric_head)}>{name}</th>" for name, numeric_head in zip(heads, right, strict=True)
        )
        head = f"<thead><tr>{cells}</tr></thead>"
    bold = ['class="label"' if not at and not head else "" for at in range(len(heads))]
    rows = []
    for row in zip(*(column.cells for column in table.columns), strict=True):
        cells = "".join(
            f"<td {numeric_head}>{_cell(cell)}</td>" if numeric_head else f"<td{_aligned(numeric)}>{_cell(cell)}</td>"
            for cell, numeric, numeric_head in zip(row, right, bold, strict=True)
        )
        rows.append(f"<tr>{cells}</tr>")
    return f"<table>{head}<tbody>{''.join(rows)}</tbody></table>"


def _aligned(right: bool) -> str:
    return ' class="number"' if right else ""


def _cell(cell: Any) -> str:
    """A bar of blocks, and what is written behind it; or text."""
    match = _BAR.fullmatch(str(cell))
    if match is None:
        return _inline(cell)
    wide = _EM_A_BLOCK * sum((_BLOCKS.index(block) + 1) / 8 for block in match[1])
    return f'<span class="bar" style="width:{wide:.2f}em"></span>{_inline(match[2])}'


def _inline(part: Any) -> str:
    """Text with its bold parts, without the blanks that align it in a terminal."""
    if not isinstance(part, Text):
        return re.sub(r"[ \t]+", " ", escape(str(part)).strip())
    if part.style == COMMAND:
        return f"<code>{escape(part.plain)}</code>"
    pieces, plain = [], part.plain
    edges = sorted({0, len(plain), *(edge for span in part.spans for edge in (span.start, span.end))})
    for start, end in pairwise(edges):
        bold = "bold" in str(part.style) or any(
            "bold" in str(span.style) for span in part.spans if span.start <= start and end <= span.end
        )
        text = escape(plain[start:end])
        pieces.append(f"<b>{text}</b>" if bold and text.strip() else text)
    return re.sub(r"[ \t]+", " ", "".join(pieces).strip())


# the functions that show a result in a terminal, by its class, and what they take beside it
_SHOWN: dict[str, tuple[str, Callable[[Any], tuple[Any, ...]]]] = {
    "Prediction": ("kernel.show_prediction", lambda found: ()),
    "Inference": ("infer.print_inference", lambda found: ()),
    "Disaggregated": ("infer.print_inference", lambda found: ()),
    "Simulation": ("simulate.print_simulation", lambda found: ()),
    "Comparison": ("compare.print_comparison", lambda found: ((), "")),
    "TrainingComparison": ("compare_training.print_training", lambda found: ("",)),
    "Plan": ("plan.print_plan", lambda found: (hub_name(found.model.name), [])),
    "Step": ("trace.print_step", lambda found: ()),
    "ScaledStep": ("trace.print_step", lambda found: ()),
    "TrainingRun": ("train.print_run", lambda found: ()),
    "Diagnosis": ("diagnose.print_diagnosis", lambda found: (found.profile.source, 20)),
    "Gpu": ("lists.print_gpu", lambda found: ()),
}
