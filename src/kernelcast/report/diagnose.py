"""A diagnosis as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from kernelcast.advise.diagnose import Diagnosis, Row
from kernelcast.advise.reasons import Reason
from kernelcast.report.text import cut, show
from kernelcast.report.units import digits, percent, time_text
from kernelcast.support import SUPPORT, support_of

CALL_CHARS = 28
NAME_CHARS = 58
UNMATCHED_ROWS = 8
NCU_CLOCKS = "Nsight Compute holds the clocks down unless told --clock-control none: times are longer than in a run"


def fields(found: Diagnosis) -> dict[str, Any]:
    """Plain values, ready for JSON. Times of a row are of one call; ``total_us`` and ``could_win_us`` of all alike."""
    profile = found.profile
    return {
        "gpu": found.gpu.label,
        "measured_on": profile.gpu_name or None,
        "source": profile.source,
        "launches": profile.launches,
        "gpu_time_us": found.gpu_time_us,
        "span_us": profile.span_us,
        "idle_us": profile.idle_us if profile.span_us is not None else None,
        "launch_bound": found.idle is not None,
        "matched_share": found.matched_share,
        "matched_us": found.measured_matched_us,
        "predicted_us": found.total_us("time_us"),
        "ceiling_us": found.total_us("ceiling_us"),
        "could_win_us": sum(row.win_total_us for row in found.matched),
        "run_dtype": found.run_dtype,
        "kernels": [_row_fields(place, row) for place, row in enumerate(found.matched, start=1)],
        "unmatched": [
            {**_measured_fields(row), "why": row.unmatched, "reasons": [vars(reason) for reason in row.reasons]}
            for row in found.unmatched
        ],
        "support": _support(found),
        "predictor": found.predictor,
    }


def _measured_fields(row: Row) -> dict[str, Any]:
    measured, launch = row.measured, row.facts.launch
    return {
        "name": measured.name,
        "shapes": measured.shapes,
        "kernels": [
            {"name": kernel.name, "time_us": kernel.time_us, "grid": list(kernel.grid), "block": list(kernel.block)}
            for kernel in measured.kernels
        ],
        "count": measured.count,
        "measured_us": measured.time_us,
        "total_us": measured.total_us,
        "share": row.share,
        "idle_us": measured.idle_us,
        "waves": launch.waves or None,
        "tail": launch.tail if launch.waves else None,
        "padding": launch.padding,
        "marks": list(measured.marks),
    }


def _row_fields(place: int, row: Row) -> dict[str, Any]:
    told = row.predicted
    assert told is not None  # a matched row
    return {
        "rank": place,
        "op": row.facts.op,
        "parameters": {name: value for name, value in row.facts.parameters.items() if name != "op"},
        **_measured_fields(row),
        "predicted_us": told.time_us,
        "low_us": told.low_us,
        "high_us": told.high_us,
        "ceiling_us": told.ceiling_us,
        "bound_us": told.bound_us,
        "bound_by": told.bound_by,
        "gap_us": row.facts.gap_us,
        "could_win_us": row.win_total_us,
        "flops": told.flops,
        "moved_bytes": told.moved_bytes,
        "support": told.support,
        "reasons": [vars(reason) for reason in row.reasons],
    }


def _support(found: Diagnosis) -> str:
    """Of the matched time."""
    return support_of((r.measured.total_us, r.predicted.support) for r in found.matched if r.predicted)


def print_diagnosis(found: Diagnosis, title: str, top: int) -> None:
    """The run, its rows by what could be won, what to try, and what could not be matched."""
    profile = found.profile
    show(Text.assemble((title, "bold cyan"), ("  on  ", "dim"), (found.gpu.name, "bold"),
                       f"  {profile.source}, {profile.launches:,} kernels, mostly {found.run_dtype}"))  # fmt: skip
    show(_summary(found), "")
    shown = found.matched[:top]
    if shown:
        show(_table(shown), "", *_advice(shown))
        if len(found.matched) > len(shown):
            rest = found.matched[len(shown) :]
            won, share = sum(r.win_total_us for r in rest), sum(r.share for r in rest)
            show(f"and {len(rest)} more calls with {percent(share)} of the time, where {_us(won)} could be won")
        show("")
    _print_unmatched(found)
    if profile.source == "Nsight Compute":
        show(f"clocks     {NCU_CLOCKS}")
    if found.matched:
        level = _support(found)
        show(f"support    {level} ({SUPPORT[level]}), {found.predictor}")


def _summary(found: Diagnosis) -> str:
    profile = found.profile
    lines = [
        f"GPU time   {_us(found.gpu_time_us)}, {percent(found.matched_share)} of it matched: predicted "
        f"{_us(found.total_us('time_us'))} for {_us(found.measured_matched_us)}, "
        f"ceiling {_us(found.total_us('ceiling_us'))}"
    ]
    if profile.span_us:
        idle = f"idle       {_us(profile.idle_us)} of {_us(profile.span_us)}"
        reason = found.idle
        lines.append(f"{idle}: {reason.name}, {reason.detail}. Try {reason.advice}" if reason else idle)
    if profile.gpu_name and profile.gpu_name not in (found.gpu.name, found.gpu.id, *found.gpu.aliases):
        lines.append(f"measured   on {profile.gpu_name}; predicted for {found.gpu.name}")
    return "\n".join(lines)


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("#", "call", "×", "share", "µs", "predicted", "ceiling", "could win", "reason"):
        left = name in ("call", "reason")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for place, row in enumerate(rows, start=1):
        told = row.predicted
        assert told is not None
        table.add_row(
            str(place), cut(label(row), CALL_CHARS), f"{row.measured.count:,}", percent(row.share),
            digits(row.measured.time_us), digits(told.time_us), digits(told.ceiling_us), _us(row.win_total_us),
            row.main.name if row.main else "—",
        )  # fmt: skip
    return table


def label(row: Row) -> str:
    """'gemm 2048x4096x14336 bf16': the op with the sizes that matter; a kernel's name where there is none."""
    given = row.facts.parameters
    op = row.facts.op
    if not op:
        return row.measured.name
    if op in ("attention", "attention_backward"):
        lengths = f"{given.get('q_len', '…')}:{given.get('kv_len', '…')}"
        return f"{op} {given.get('batch', '…')}x{lengths} {given.get('dtype', 'bf16')}"
    return " ".join(word for word in (_op_word(row, op), _sizes(given), str(given.get("dtype", ""))) if word)


def _op_word(row: Row, op: str) -> str:
    """A generic kernel goes by the op that launched it."""
    return row.measured.name.removeprefix("aten::") if op == "pointwise" else op


def _sizes(given: Mapping[str, Any]) -> str:
    for names in (("batch", "m", "n", "k"), ("m", "n", "k"), ("rows", "cols"), ("tokens", "hidden"), ("elements",),
                  ("batch", "in_channels", "height", "width")):  # fmt: skip
        if all(given.get(name) is not None for name in names):
            return "x".join(str(given[name]) for name in names)
    return ""


def _us(value_us: float) -> str:
    return time_text(value_us * 1e-6) if value_us > 0 else "0"


def _advice(rows: Sequence[Row]) -> list[Any]:
    """Each reason once: what it sums up to, where it holds, the largest case, and what to try."""
    groups: dict[str, list[tuple[int, Row, Reason]]] = {}
    for place, row in enumerate(rows, start=1):
        if row.main is not None:
            groups.setdefault(row.main.name, []).append((place, row, row.main))
    parts: list[Any] = []
    for name, members in sorted(groups.items(), key=lambda item: -_explained(item[1])):
        places = " ".join(f"#{place}" for place, _, _ in members)
        first, _, reason = max(members, key=lambda one: one[2].explained_us * one[1].measured.count)
        explains = f", explains {_us(_explained(members))}" if _explained(members) else ""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True, justify="right", min_width=5)
        grid.add_column()
        grid.add_row(f"#{first}", reason.detail)
        grid.add_row("try", Text(reason.advice, "green"))
        parts += [Text.assemble((name, "bold"), f"  {places}{explains}"), grid, ""]
    return parts


def _explained(members: Sequence[tuple[int, Row, Reason]]) -> float:
    return sum(reason.explained_us * row.measured.count for _, row, reason in members)


def _print_unmatched(found: Diagnosis) -> None:
    rows = found.unmatched
    if not rows:
        return
    share = sum(row.share for row in rows)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("not matched", "×", "share", "µs"):
        table.add_column(name, justify="left" if name == "not matched" else "right", no_wrap=True)
    table.add_column("why, and what its launch says")
    for row in rows[:UNMATCHED_ROWS]:
        said = "; ".join([row.unmatched, *(f"{reason.name}: {reason.detail}" for reason in row.reasons)])
        name = f"{row.measured.name} {row.measured.shapes}".strip()
        table.add_row(cut(name, NAME_CHARS if not said else 40), f"{row.measured.count:,}", percent(row.share),
                      digits(row.measured.time_us), said)  # fmt: skip
    more = f", the first {UNMATCHED_ROWS} here" if len(rows) > UNMATCHED_ROWS else ""
    show(f"{len(rows)} calls with {percent(share)} of the GPU time could not be matched{more}", "", table, "")
