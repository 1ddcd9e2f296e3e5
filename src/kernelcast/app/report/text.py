"""Text for a terminal: at most 100 columns, colour only where a person looks."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from kernelcast.forecast.end_to_end import RUN_SUPPORT, WholeSupport
from kernelcast.results import SUPPORT, Interval
from kernelcast.schedule import EvidenceSummary, Share

WIDTH = 100
SHORT = {"seen": "seen", "near": "near", "extrapolated": "extr."}  # levels of support in a table
_NARROW_BAR = 3  # columns, on a terminal of fewer than ``WIDTH``
_MANY_PHASES = 3  # beside which a narrow terminal has no room for bars
_LABEL = 11  # columns of a label and the blanks behind it
COMMAND = "command"  # style of a line to copy; a terminal shows it plainly


_DECIMAL = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_BINARY = ((2**40, "Ti"), (2**30, "Gi"), (2**20, "Mi"), (2**10, "Ki"), (1, ""))
_JOULES = ((1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ"), (1.0, "J"), (1e-3, "mJ"), (1e-6, "µJ"))
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))

_EXACT = 0.01  # width of an interval over its value, up to which a fourth digit means something

_taken: ContextVar[list[RenderableType] | None] = ContextVar("taken", default=None)


@contextmanager
def captured() -> Iterator[list[RenderableType]]:
    """What is shown in here is not printed but kept, at the full width: to be shown in another way."""
    parts: list[RenderableType] = []
    before = _taken.set(parts)
    try:
        yield parts
    finally:
        _taken.reset(before)


def console() -> Console:
    """Standard output, as wide as the terminal, 100 columns at most."""
    columns = WIDTH if _taken.get() is not None else shutil.get_terminal_size((WIDTH, 24)).columns
    return Console(width=min(columns, WIDTH), highlight=False, markup=False)


def show(*parts: RenderableType) -> None:
    """Print; without the blanks that Rich pads lines with when a file or a pipe takes them."""
    kept = _taken.get()
    if kept is not None:
        kept.extend(parts)
        return
    out = console()
    parts = tuple(hanging(part, out.width) if isinstance(part, str) else part for part in parts)
    if out.is_terminal:
        for part in parts:
            out.print(part)
        return
    with out.capture() as captured:
        for part in parts:
            out.print(part)
    for line in captured.get().splitlines():
        print(line.rstrip())


def hanging(line: str, width: int) -> str:
    """A line of a label and a text ('evidence   …'), broken with the text below itself."""
    if len(line) <= width or line[_LABEL - 1 : _LABEL] != " " or line[_LABEL : _LABEL + 1] == " ":
        return line
    return textwrap.fill(line, width, subsequent_indent=_LABEL * " ", break_long_words=False, break_on_hyphens=False)


def show_command(line: str) -> None:
    """A line to copy, as it is, however long."""
    kept = _taken.get()
    if kept is None:
        print(f"  {line}")
    else:
        kept.append(Text(line, COMMAND))


def plain_table(*columns: str, right: Sequence[str] = (), rows: Iterable[Sequence[RenderableType]] = ()) -> Table:
    """A line under the names of the columns; those in ``right`` hold numbers. A narrow terminal breaks text, and cuts
    nothing off."""
    table = Table(box=SIMPLE_HEAD, pad_edge=True, padding=(0, 1), header_style="bold", show_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name in right, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def dense_table(*columns: str, left: Sequence[str], rows: Iterable[Sequence[RenderableType]], gap: int = 2) -> Table:
    """One line a row, no lines between; columns but those in ``left`` hold numbers. A narrow terminal breaks text, and
    cuts nothing off."""
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for name in columns:
        text = name in left
        table.add_column(name, justify="left" if text else "right", no_wrap=not text, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def title(name: str, how: str, where: str, more: str = "") -> Text:
    """The first line of an answer: what it is of, and on which GPU."""
    return Text.assemble((name, "bold cyan"), how, ("  on  ", "dim"), (where, "bold"), more)


def parallel_sizes(layout: Any, gap: str = " ") -> list[str]:
    """'tp 2', 'pp 4': the parallel sizes above 1."""
    return [f"{name}{gap}{getattr(layout, name)}" for name in ("tp", "pp", "dp", "ep") if getattr(layout, name) > 1]


def time_rows(rows: Iterable[tuple[str, Interval, str]]) -> list[tuple[str, str, str, str]]:
    """Rows of a ``times_table`` from names, intervals and notes."""
    return [(name, *interval_texts(time.value, time.low, time.high), note) for name, time, note in rows]


def support_lines(supports: WholeSupport, predictor: str) -> list[str]:
    """The evidence of a whole answer: its level and what decided it, and the level of each aspect."""
    aspects = ", ".join(f"{name} {level}" for name, level in supports.to_dict().items())
    return [f"support    {decided(supports)}", f"           {aspects}; {predictor}"]


def decided(supports: WholeSupport) -> str:
    """'near, by the kernels: …': the level of a whole answer, and what decided it."""
    if supports.kernels == supports.run:
        return f"{supports.level}, by kernels and run alike: {SUPPORT[supports.kernels]}"
    if supports.level == supports.kernels:
        return f"{supports.level}, by the kernels: {SUPPORT[supports.kernels]}"
    nearest = f"the nearest one measured end to end differs in {' and '.join(supports.differs)}"
    return f"{supports.level}, by the run: {nearest if supports.differs else RUN_SUPPORT[supports.run]}"


def support_text(level: str, predictor: str) -> str:
    """The last lines of a result: its evidence."""
    return f"support    {level} ({SUPPORT[level]}), {predictor}"


def evidence_lines(evidence: EvidenceSummary) -> list[str]:
    """The evidence behind a result, and what was substituted most."""
    changes = evidence.changes
    more = f"; and {len(changes) - 2} more" if len(changes) > 2 else ""
    return [f"evidence   {evidence.text}"] + ([f"stand-ins  {'; '.join(changes[:2])}{more}"] if changes else [])


def plural(count: int, noun: str) -> str:
    """'1 request', '2 requests'."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def truncate(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def energy_line(energy: Interval | None, gpus: int, seconds: float, tokens: float, support: str | None) -> list[str]:
    """Joules of a run; no line where nobody knows them."""
    if energy is None:
        return []
    low, high = joules_text(energy.low), joules_text(energy.high)
    each = f", {joules_text(energy.value / tokens * 1e6)} a million tokens" if tokens else ""
    watts = f"{energy.value / seconds / gpus:,.0f} W{' a GPU' if gpus > 1 else ''}"
    return [f"energy     {joules_text(energy.value)} ({low} to {high}), {watts}{each}; power model {support}"]


def interval_text(low_s: float, high_s: float, most: int = 4) -> str:
    return f"{time_text(low_s, most)} to {time_text(high_s, most)}"


def interval_texts(value_s: float, low_s: float, high_s: float) -> tuple[str, str]:
    """A time and its interval, with the digits that the interval leaves a meaning."""
    exact = high_s - low_s <= _EXACT * value_s
    most = 4 if exact else 3
    return time_text(value_s, most), "" if low_s == high_s == value_s else interval_text(low_s, high_s, most)


def times_table(rows: Iterable[Sequence[str]]) -> Table:
    """Rows of a name, its time, the interval around it, and a note."""
    return plain_table("", "time", "80% interval", "", right=("time",), rows=rows)


def breakdown_table(shares: Iterable[Share], totals_s: Mapping[str, float], chars: tuple[int, int]) -> Table:
    """A row a part, the longest first: its time in each phase, and its share of ``totals_s`` as a bar and a number,
    which are ``chars`` wide."""
    parts: dict[str, dict[str, Share]] = {}
    for share in shares:
        parts.setdefault(share.part, {})[share.phase] = share
    totals_s = {phase: total_s for phase, total_s in totals_s.items() if any(phase in each for each in parts.values())}
    wide, narrow = chars
    if len(totals_s) > _MANY_PHASES:  # no room for bars, nor in a narrow terminal for shares
        wide, narrow = 0, narrow if console().width >= WIDTH else 0
    elif console().width < WIDTH:
        wide = min(wide, _NARROW_BAR) if len(totals_s) < _MANY_PHASES else 0
    heads = [head for phase in totals_s for head in ((phase, "") if narrow else (phase,))]
    table = plain_table("part", *heads, "bound by", right=tuple(totals_s))
    for column in table.columns[:-1]:
        column.no_wrap = True
    for part, phases in sorted(parts.items(), key=lambda item: -sum(share.time_s for share in item[1].values())):
        cells = [part]
        for phase, total_s in totals_s.items():
            time_s = phases[phase].time_s if phase in phases else None
            cells.append("" if time_s is None else time_text(time_s, 3))
            portion = time_s / total_s if time_s and total_s else 0.0
            if narrow:
                cells.append("" if time_s is None else f"{bar(portion, wide):{wide}} {portion:{narrow}.0%}"[not wide :])
        table.add_row(*cells, " / ".join(dict.fromkeys(share.bound_by for share in phases.values())))
    return table


def sizes_text(sizes: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {gib_text(size)}" for name, size in sizes)


# ---- numbers ----
def digits(value: float, most: int = 4) -> str:
    """About four digits, never an exponent."""
    if value == 0:
        return "0"
    decimals = max(0, most - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 6)}f}"


def short(value: float) -> str:
    """As ``digits``, without zeros at the end: for specifications."""
    text = digits(value)
    return text.rstrip("0").rstrip(".") if "." in text else text


def time_text(seconds: float, most: int = 4) -> str:
    unit, symbol = next(((u, w) for u, w in _TIMES if seconds >= u), _TIMES[-1])
    return f"{digits(seconds / unit, most)} {symbol}"


def micros(seconds: float) -> str:
    return digits(seconds * 1e6)


def rate_text(value: float, unit: str) -> str:
    """'3.35 TB/s'"""
    scale, prefix = next(((s, p) for s, p in _DECIMAL if abs(value) >= s), _DECIMAL[-1])
    return f"{short(value / scale)} {prefix}{unit}"


def joules_text(value: float) -> str:
    """'3.70 kJ', '0.55 J', '820 µJ'."""
    unit, symbol = next(((u, w) for u, w in _JOULES if value >= u), _JOULES[-1])
    return f"{digits(value / unit, 3)} {symbol}"


def gib_text(value: float) -> str:
    """'73.6 GiB': of memory, where one unit lets figures be compared."""
    return f"{digits(value / 2**30, 3)} GiB"


def binary_bytes_text(value: float) -> str:
    """'50 MiB': for sizes and capacities."""
    scale, prefix = next(((s, p) for s, p in _BINARY if value >= s), _BINARY[-1])
    return f"{short(value / scale)} {prefix}B"


def percent(share: float) -> str:
    return f"{share:.1%}" if 0 < share < 0.995 else f"{share:.0%}"


def bar(share: float, width: int = 20) -> str:
    """A bar of eighths of a block."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")


def field_text(name: str, value: Any) -> str:
    """A GPU's field with the unit that its name says."""
    if value is None:
        return "—"
    if isinstance(value, str | Sequence):
        return value if isinstance(value, str) else ", ".join(map(str, value)) or "—"
    if name.endswith(("_per_clk_sm", "_per_clk")):
        return f"{short(value)} {name.split('_per_clk')[0].split('_')[-1]}/clk"
    for ending, unit in (("flops_per_s", "FLOP/s"), ("bytes_per_s", "B/s"), ("_per_s", "/s"), ("_hz", "Hz")):
        if name.split(".")[0].endswith(ending):
            return rate_text(value, unit)
    if "bytes" in name:
        return binary_bytes_text(value)
    if name.endswith(("_fraction", "_fractions")):
        return percent(value)
    for ending, unit in (("_w", " W"), ("_usd", " USD")):
        if name.endswith(ending):
            return f"{short(value)}{unit}"
    return time_text(value) if name.endswith("_s") else f"{value:,}"


def value_text(value: Any) -> str:
    """A parameter's value; a long list is shortened."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        shown = ", ".join(map(str, value[:6]))
        return f"[{shown}]" if len(value) <= 6 else f"[{shown}, … {len(value) - 6} more]"
    return f"{value:g}" if isinstance(value, float) else str(value)
