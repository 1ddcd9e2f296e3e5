"""The accuracy page: how far forecasts are off, for a reader with a GPU and a model in mind."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernelcast.app.questions.evidence import evidence as kernel_evidence
from kernelcast.app.report.published import HEADS, error_cells
from kernelcast.files import complete
from kernelcast.forecast.end_to_end import EndToEnd
from kernelcast_lab.evaluate.report import markdown

_BEGIN, _END = "<!-- accuracy: made by kernelcast evaluate public --report README.md -->", "<!-- end of accuracy -->"
MARKED = re.compile(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", re.DOTALL)
_SHORT = ("source", *HEADS[:-1], "inside the 80% interval")


def write_page(evidence: EndToEnd, path: Path) -> Path:
    """``evidence``: with the errors that `kernelcast evaluate public --fit` wrote. Of a page with a marked table (the
    README) only that is replaced."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    marked = MARKED.search(text)
    with complete(path) as part:
        table = f"{_BEGIN}\n{short_table(evidence)}\n{_END}"
        part.write_text(MARKED.sub(lambda _: table, text) if marked else page(evidence), encoding="utf-8")
    return path


def short_table(evidence: EndToEnd) -> str:
    """A line a source: of the quantity that is published of all its rows and has an interval (memory has none)."""
    lines = [line for line in evidence.error_lines("source") if line["coverage"] is not None]
    first = {line["source"]: line for line in reversed(lines)}
    rows = ([line["title"], f"{line['rows']:,}", line["quantity"], f"{line['mean']:.0f} ({line['median']:.0f})%",
             f"{line['coverage']:.0%}"]
            for line in reversed(first.values()))  # fmt: skip
    return markdown(["published", "results", "quantity", "mean (median) error", "inside the 80% interval"], rows)


def page(evidence: EndToEnd) -> str:
    errors, about = evidence.errors, evidence.about
    made = f"{about.get('made', 'never')} with kernelcast {about.get('version', '')}: `{about.get('command', '')}`"
    parts = [
        "# How accurate is it?",
        "Errors are in percent of what was measured; a bias above 0 means forecast too slow (of a throughput: too"
        " high). No network was fitted on these results. The spread of whole answers is set on half of each source;"
        " the share"
        f" inside the 80% interval is that of the other half. Made on {made}. [How a published row becomes a"
        " question](published.md) is fixed for each source; [kernels alone](accuracy-kernels.md) are scored on measured"
        " tables.",
        "## Published results and live runs",
        summary(evidence),
        "## By GPU",
        "Which GPU do you have in mind? A line is a source and what it measured.",
        _groups(evidence, "gpu"),
        "## By model",
        _groups(evidence, "model", fewest=3),
        "## By engine",
        _groups(evidence, "stack"),
        "## By level of support",
        "What `support` says of an answer, and how far such answers are off.",
        _groups(evidence, "support"),
        "## The worst",
        "The rows that are furthest off, and the part with most of the forecast time.",
        _worst(errors.get("worst", ())),
        "## What could not be asked",
        _not_asked(errors.get("not_asked", ())),
        "## Kernels, by op and GPU",
        "Held-out error of the weights that ship, in percent (`kernelcast evidence`).",
        _kernels(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def summary(evidence: EndToEnd) -> str:
    """The table that README shows too."""
    return markdown(_SHORT, ([line["title"], *error_cells(line)] for line in evidence.error_lines()))


def _groups(evidence: EndToEnd, by: str, fewest: int = 1) -> str:
    rows = (line for line in evidence.error_lines(by) if line["rows"] >= fewest)
    return markdown([by, *_SHORT], ([line[by], line["source"], *error_cells(line)] for line in rows))


def _worst(lines: Iterable[Mapping[str, Any]]) -> str:
    rows = ([x["source"], x["gpu"], x["model"], x["stack"], x["quantity"], f"{x['error']:+.0f}%", x["support"],
             x["longest_part"] or "–"] for x in lines)  # fmt: skip
    return markdown(["source", "GPU", "model", "engine", "quantity", "error", "support", "longest part"], rows)


def _not_asked(lines: Sequence[Mapping[str, Any]]) -> str:
    rows = ([x["source"], f"{x['rows']:,} of {x['of']:,}", x["reason"].replace("|", "/")] for x in lines)
    return markdown(["source", "rows", "why"], rows)


_OPS = ("gemm", "attention", "mla", "moe", "all_reduce")


def _kernels() -> str:
    """Held-out error by GPU and op, weighted by calls."""
    sums: dict[str, dict[str, list[float]]] = {}
    for entry in kernel_evidence():
        if entry.error is not None:
            name = entry.op if entry.op in _OPS else "others"
            known = sums.setdefault(entry.gpu, {}).setdefault(name, [0.0, 0.0])
            known[:] = known[0] + 100 * entry.error * entry.calls, known[1] + entry.calls
    rows = (
        [gpu, f"{sum(calls for _, calls in ops.values()):,.0f}",
         *(f"{ops[name][0] / ops[name][1]:.1f}" if name in ops else "–" for name in (*_OPS, "others"))]
        for gpu, ops in sorted(sums.items())
    )  # fmt: skip
    return markdown(["GPU", "calls", *_OPS, "other ops"], rows)
