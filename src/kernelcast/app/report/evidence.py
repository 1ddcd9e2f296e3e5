"""What was measured, as a table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kernelcast.app.report.json import summed_evidence
from kernelcast.app.report.text import cut, dense_table, show
from kernelcast.app.report.units import digits, percent
from kernelcast.forecast.evidence import MeasuredConfiguration

_IN_FULL = 6  # kinds whose ranges are told too
_LINE_WORDS = 44
_ORDER = ("stack", "backend", "dtype", "kv_dtype", "phase", "mask", "paged")  # of the words, the others after
_USUAL = (None, "no", "equal", "chosen", "own", "dense", "vector", "tn")  # words that go without saying


def print_evidence(entries: Sequence[MeasuredConfiguration], by: str) -> None:
    """A line a kind, or summed by op, GPU or stack."""
    calls = sum(entry.calls for entry in entries)
    show(f"{len(entries):,} kinds of calls, {calls:,} measured", "")
    if by == "kind":
        heads = ("op", "GPU", "kind", "calls", "off", "inside")
        show(dense_table(*heads, left=heads[:3], rows=map(_kind, entries)))
        if len(entries) <= _IN_FULL:
            show("", *(f"{entry.op} {entry.gpu} {_words(entry)}: {_ranges(entry)}" for entry in entries))
    else:
        names = (by, "kinds", "calls", "off", "worst", "inside", "measured on" if by != "gpu" else "ops")
        rows = [_summed(line, by) for line in summed_evidence(entries, by)]
        show(dense_table(*names, left=(by, names[-1]), rows=rows))
    show("\noff: mean error on calls of shapes that no fit saw, worst: of a kind; inside: share in the 80% interval")


def _words(entry: MeasuredConfiguration) -> str:
    order = [*_ORDER, *(name for name in entry.configuration if name not in _ORDER)]
    told = {name: entry.configuration.get(name) for name in order}
    told["paged"] = "paged" if told["paged"] == "yes" else None
    told["kv_dtype"] = f"kv {told['kv_dtype']}" if told["kv_dtype"] not in (None, told["dtype"]) else None
    return " ".join(str(word) for word in told.values() if word not in _USUAL)


def _ranges(entry: MeasuredConfiguration) -> str:
    """'m 1 to 65,536, n 128 to 8,192, k 4,096'."""
    told = []
    for name, (low, high) in entry.ranges.items():
        low_text, high_text = (f"{value:,.0f}" if value == int(value) else digits(value) for value in (low, high))
        told.append(f"{name} {low_text}" + (f" to {high_text}" if high > low else ""))
    return ", ".join(told)


def _kind(entry: MeasuredConfiguration) -> tuple[str, ...]:
    words = cut(_words(entry), _LINE_WORDS)
    return entry.op, entry.gpu, words, f"{entry.calls:,}", *_scores(entry.error, entry.inside)


def _summed(line: dict[str, Any], by: str) -> tuple[str, ...]:
    names = line["ops" if by == "gpu" else "gpus"]
    of_which = f"{len(names)} {'ops' if by == 'gpu' else 'GPUs'}" if len(names) > 2 else ", ".join(names)
    worst = percent(line["worst_error"]) if line["worst_error"] is not None else "—"
    error, inside = _scores(line["error"], line["inside"])
    return str(line[by]), f"{line['kinds']:,}", f"{line['calls']:,}", error, worst, inside, of_which


def _scores(error: float | None, inside: float | None) -> tuple[str, str]:
    return ("—" if error is None else percent(error)), ("—" if inside is None else percent(inside))
