"""Traces: files with one request a row, in this project's and published formats, recognised by their columns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError, unknown
from kernelcast.files import TableFile, open_table, quoted
from kernelcast.inference.request_files import cell_text, copy_valid_rows, line_of, numbers, texts, whole_numbers
from kernelcast.serving.load import Load, Pieces

ADVICE = "`skip_bad` leaves such rows out"


@dataclass(frozen=True)
class TraceFormat:
    """Column names of one trace format; the first that a file has is used."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    arrivals: tuple[str, ...]
    unit_s: float = 1.0  # of a time
    dates: bool = False  # times are dates with a time of day
    from_first: bool = False  # times have an arbitrary origin
    blocks: str = ""  # column with the ids of the blocks that a prompt consists of
    block_tokens: int = 0


TRACE_FORMATS: Mapping[str, TraceFormat] = {
    "kernelcast": TraceFormat(
        ("input_tokens", "input_toks", "prompt_tokens"),
        ("output_tokens", "output_toks", "completion_tokens"),
        ("arrival_s", "arrival_time_s"),
    ),
    # Azure Public Dataset, LLM inference traces of 2023 and 2024
    "azure": TraceFormat(("ContextTokens",), ("GeneratedTokens",), ("TIMESTAMP",), dates=True, from_first=True),
    # Mooncake's FAST'25 traces: milliseconds from the start; the same ids mean the same 512 tokens behind the same ones
    "mooncake": TraceFormat(
        ("input_length",), ("output_length",), ("timestamp",), unit_s=1e-3, blocks="hash_ids", block_tokens=512
    ),
    # BurstGPT: seconds from midnight of the first day; requests that failed have 0 response tokens
    "burstgpt": TraceFormat(("Request tokens",), ("Response tokens",), ("Timestamp",), from_first=True),
    "vidur": TraceFormat(("num_prefill_tokens",), ("num_decode_tokens",), ("arrived_at",)),
}
_TEXT = ("conversations", "messages", "prompt", "turns")  # ShareGPT, chats, vLLM's custom datasets


@dataclass(frozen=True, eq=False)
class Trace:
    """The requests of a trace file. ``arrivals_s`` is None where it has no times."""

    path: Path
    layout: str
    inputs: NDArray[np.int64]
    outputs: NDArray[np.int64]
    arrivals_s: NDArray[np.float64] | None
    shared: tuple[Pieces, ...] = ()
    ids: tuple[str, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)  # why rows were left out: how many
    moved: int = 0  # rows that were out of order

    def load(self, max_concurrency: int = 0) -> Load:
        if self.arrivals_s is None:
            raise KernelcastError(f"{self.path} has no arrival_s: give `request_rate`, or a trace with times")
        return Load(self.arrivals_s, self.inputs, self.outputs, self.shared, max_concurrency, self.ids)

    def load_at(self, arrivals_s: NDArray[np.float64], max_concurrency: int = 0) -> Load:
        """Its requests in the order of the file at other arrival times, repeated from the first where the file has
        fewer."""
        rows = np.arange(len(arrivals_s)) % len(self.inputs)
        shared = tuple(self.shared[row] for row in rows) if self.shared else ()
        ids = self.ids if len(self.ids) == len(rows) else ()
        return Load(arrivals_s, self.inputs[rows], self.outputs[rows], shared, max_concurrency, ids)

    def problems(self) -> str:
        """The rows that were left out or reordered, in one line; '' for none."""
        reasons = "; ".join(f"{count} x {reason}" for reason, count in self.skipped.items())
        left_out = [f"{_rows(sum(self.skipped.values()))} left out ({reasons})"] if reasons else []
        return ", ".join(left_out + ([f"{_rows(self.moved)} put in order of arrival"] if self.moved else []))


def _rows(count: int) -> str:
    return f"{count} row{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class _Flaw:
    """Rows with one fault: the reason, and the cells that the message quotes."""

    reason: str
    rows: NDArray[np.bool_]
    cells: NDArray[Any] | None = None

    def of(self, row: int) -> str:
        return self.reason if self.cells is None else f"{self.reason}, not {cell_text(self.cells[row])}"


def read_trace(path: Path, layout: str = "", *, skip_bad: bool = False, max_context: int = 0) -> Trace:
    """CSV, JSON lines or Parquet, in a layout of ``LAYOUTS`` (empty: by the names of the columns).

    A bad row is an error that names its line. With ``skip_bad`` it is left out and counted, and rows that are out of
    order are sorted. ``max_context``: prompt and answer together may have so many tokens (0: any number).
    """
    if layout and layout not in TRACE_FORMATS:
        raise unknown("layout of a trace", layout, TRACE_FORMATS)
    _refuse_text_json(path)
    with _opened(path, skip_bad) as (source, unreadable):
        name, form = _layout_of(path, source, layout)
        columns = _columns(source, form)
    if not len(columns["inputs"]):
        raise KernelcastError(f"{path} has no request")
    flaws = _flaws(form, columns, max_context)
    if not skip_bad:
        _refuse_first(path, flaws)
    skipped = {"not readable as a row": unreadable} if unreadable else {}
    good = np.ones(len(columns["inputs"]), dtype=bool)
    for flaw in flaws:
        if count := int(np.count_nonzero(good & flaw.rows)):
            skipped[flaw.reason] = skipped.get(flaw.reason, 0) + count
        good &= ~flaw.rows
    if not good.any():
        raise KernelcastError(f"{path}: no row is left: {'; '.join(f'{n} x {why}' for why, n in skipped.items())}")
    return _by_arrival(_built(path, name, form, columns, good, skipped), skip_bad)


def _refuse_text_json(path: Path) -> None:
    if path.suffix.lower() == ".json" and path.is_file():
        raise KernelcastError(
            f"{path}: a trace is .csv, .jsonl or .parquet; of a dataset in JSON, such as ShareGPT, only the model's"
            " tokenizer knows the lengths: write input_tokens and output_tokens of each request to a table"
        )


@contextmanager
def _opened(path: Path, skip_bad: bool) -> Iterator[tuple[TableFile, int]]:
    """The table, and the number of malformed lines: with ``skip_bad`` the file is read without them."""
    with TemporaryDirectory(prefix="kernelcast-") as folder, ExitStack() as stack:
        left_out = 0
        try:
            source = stack.enter_context(open_table(path))
        except KernelcastError as error:
            if not skip_bad or path.suffix.lower() not in (".csv", ".jsonl") or not path.is_file():
                raise
            readable = Path(folder) / f"mended{path.suffix.lower()}"
            left_out = copy_valid_rows(path, readable)
            try:
                source = stack.enter_context(open_table(readable))
            except KernelcastError:
                raise error from None  # it is not a matter of rows
        yield source, left_out


def _layout_of(path: Path, source: TableFile, wanted: str) -> tuple[str, TraceFormat]:
    """The layout, with each of its columns as the file writes it; '' or none for those it lacks."""
    have = {name.lower(): name for name in source.types}

    def of_file(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(have[name.lower()] for name in names if name.lower() in have)

    for name, layout in TRACE_FORMATS.items():
        inputs, outputs = of_file(layout.inputs), of_file(layout.outputs)
        if wanted in ("", name) and inputs and outputs:
            blocks = have.get(layout.blocks, "")
            in_file = replace(layout, inputs=inputs, outputs=outputs, arrivals=of_file(layout.arrivals), blocks=blocks)
            return name, in_file
    columns = ", ".join(source.types)
    if wanted:
        needs = [" or ".join(names) for names in (TRACE_FORMATS[wanted].inputs, TRACE_FORMATS[wanted].outputs)]
        raise KernelcastError(
            f"{path}: a trace in the layout {wanted} has columns {needs[0]}, {needs[1]}; not {columns}"
        )
    if any(name in have for name in _TEXT):
        raise KernelcastError(
            f"{path} has its prompts as text, and only the model's tokenizer knows their lengths: add columns"
            " input_tokens and output_tokens"
        )
    raise KernelcastError(
        f"{path}: a trace needs columns input_tokens and output_tokens, and arrival_s, or those of"
        f" {', '.join(name for name in TRACE_FORMATS if name != 'kernelcast')}; this has {columns}"
    )


def _columns(source: TableFile, layout: TraceFormat) -> dict[str, NDArray[Any]]:
    """The cells by field; dates also as microseconds."""
    names = {"inputs": layout.inputs[0], "outputs": layout.outputs[0]}
    if layout.arrivals:
        names["arrivals"] = layout.arrivals[0]
    if layout.blocks:
        names["blocks"] = layout.blocks
    have = {name.lower(): name for name in source.types}
    names |= {name: have[name] for name in ("request_id", "prefix_id", "prefix_tokens", "session_id") if name in have}
    if "request_id" not in names and "id" in have:
        names["request_id"] = have["id"]
    cells = source.named(*dict.fromkeys(names.values()))
    columns = {meaning: cells[name] for meaning, name in names.items()}
    if layout.dates and layout.arrivals:
        query = f"SELECT epoch_us(TRY_CAST({quoted(layout.arrivals[0])} AS TIMESTAMP)) AS at FROM source"
        columns["dates"] = source.connection.execute(query).fetchnumpy()["at"]
    return columns


def _flaws(layout: TraceFormat, columns: Mapping[str, NDArray[Any]], max_context: int) -> list[_Flaw]:
    """The bad rows by reason; the order is checked when the rest is valid."""
    inputs, outputs = numbers(columns["inputs"]), numbers(columns["outputs"])
    rule = "must be a whole number of tokens from 1 on"
    flaws = [
        _Flaw(f"{layout.inputs[0]} {rule}", ~whole_numbers(inputs, 1), columns["inputs"]),
        _Flaw(f"{layout.outputs[0]} {rule}", ~whole_numbers(outputs, 1), columns["outputs"]),
    ]
    if "arrivals" in columns:
        times = numbers(columns["dates"] if layout.dates else columns["arrivals"])
        with np.errstate(invalid="ignore"):
            good = (times >= 0) & (times < np.inf)
        unit = (
            "a date and time"
            if layout.dates
            else "milliseconds from 0 on"
            if layout.unit_s < 1
            else "seconds from 0 on"
        )
        flaws.append(_Flaw(f"{layout.arrivals[0]} must be {unit}", ~good, columns["arrivals"]))
    if max_context:
        with np.errstate(invalid="ignore"):
            flaws.append(
                _Flaw(f"prompt and answer are longer than {max_context} tokens", inputs + outputs > max_context)
            )
    if "prefix_id" in columns or "prefix_tokens" in columns:
        flaws.append(_prefix_flaw(columns, inputs))
    if "blocks" in columns:
        flaws.append(_block_flaw(layout, columns["blocks"], inputs))
    return flaws


def _block_flaw(layout: TraceFormat, cells: NDArray[Any], inputs: NDArray[np.float64]) -> _Flaw:
    """No list, or more blocks than the prompt has."""
    counts = np.array([np.nan if (blocks := _blocks(cell)) is None else len(blocks) for cell in cells])
    with np.errstate(invalid="ignore"):
        good = counts <= np.ceil(inputs / layout.block_tokens)
    reason = f"{layout.blocks} must be a list of ids, one a block of {layout.block_tokens} tokens"
    return _Flaw(reason, ~good & whole_numbers(inputs, 1), cells)


def _blocks(cell: Any) -> list[Any] | None:
    """The ids of a cell; None where it has something else."""
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except json.JSONDecodeError:
            return None
    blocks = [] if cell is None else cell.tolist() if isinstance(cell, np.ndarray) else cell
    is_list = isinstance(blocks, list) and all(isinstance(block, int | str) for block in blocks)
    return blocks if is_list else None


def _prefix_flaw(columns: Mapping[str, NDArray[Any]], inputs: NDArray[np.float64]) -> _Flaw:
    if "prefix_id" not in columns or "prefix_tokens" not in columns:
        return _Flaw("prefix_id and prefix_tokens are given together", np.ones(len(inputs), dtype=bool))
    named = np.array([name is not None for name in texts(columns["prefix_id"])])
    tokens = numbers(columns["prefix_tokens"])
    with np.errstate(invalid="ignore"):
        good = whole_numbers(tokens, 1) & (tokens <= inputs)
    reason = "prefix_tokens must be a whole number from 1 on, within the prompt"
    return _Flaw(reason, named & ~good, columns["prefix_tokens"])


def _refuse_first(path: Path, flaws: list[_Flaw]) -> None:
    """The first line that is bad, as an error."""
    first = [(int(np.argmax(flaw.rows)), flaw) for flaw in flaws if flaw.rows.any()]
    if first:
        row, flaw = min(first, key=lambda pair: pair[0])
        raise KernelcastError(f"{path}: {line_of(path, row)}: {flaw.of(row)}; {ADVICE}")


def _built(
    path: Path, name: str, layout: TraceFormat, columns: Mapping[str, NDArray[Any]], good: NDArray[np.bool_],
    skipped: Mapping[str, int],
) -> Trace:  # fmt: skip
    inputs = numbers(columns["inputs"])[good].astype(np.int64)
    arrivals = None
    if "arrivals" in columns:
        times = numbers(columns["dates"])[good] if layout.dates else numbers(columns["arrivals"])[good]
        arrivals = (times - (times.min() if layout.from_first else 0.0)) * (1e-6 if layout.dates else layout.unit_s)
    shared: tuple[Pieces, ...] = ()
    if "blocks" in columns:
        shared = _of_blocks(columns["blocks"][good], inputs, layout.block_tokens)
    elif "prefix_id" in columns or "session_id" in columns:
        shared = _of_streams({name: cells[good] for name, cells in columns.items()}, inputs)
    ids = tuple(text or "" for text in texts(columns["request_id"][good])) if "request_id" in columns else ()
    outputs = numbers(columns["outputs"])[good].astype(np.int64)
    return Trace(path, name, inputs, outputs, arrivals, shared if any(shared) else (), ids, skipped)


def _of_streams(columns: Mapping[str, NDArray[Any]], inputs: NDArray[np.int64]) -> tuple[Pieces, ...]:
    """Shared pieces: a named prefix, followed by the conversation so far where there is a session."""
    count = len(inputs)
    prefixes = texts(columns["prefix_id"]) if "prefix_id" in columns else [None] * count
    tokens = numbers(columns["prefix_tokens"]).tolist() if "prefix_tokens" in columns else [0.0] * count
    sessions = texts(columns["session_id"]) if "session_id" in columns else [None] * count
    streams: dict[tuple[str, str], int] = {}
    shared = []
    for prefix, first, session, whole_prompt in zip(prefixes, tokens, sessions, inputs.tolist(), strict=True):
        pieces: list[tuple[int, int]] = []
        if prefix is not None:
            pieces.append((streams.setdefault(("prefix", prefix), len(streams)), int(first)))
        rest = whole_prompt - (int(first) if prefix is not None else 0)
        if session is not None and rest:
            pieces.append((streams.setdefault(("session", session), len(streams)), rest))
        shared.append(tuple(pieces))
    return tuple(shared)


def _of_blocks(cells: NDArray[Any], inputs: NDArray[np.int64], block_tokens: int) -> tuple[Pieces, ...]:
    """Blocks of a prompt, each a stream; the last may be begun only."""
    streams: dict[Any, int] = {}
    shared = []
    for cell, tokens in zip(cells, inputs.tolist(), strict=True):
        pieces = [
            (streams.setdefault(block, len(streams)), min(block_tokens, tokens - number * block_tokens))
            for number, block in enumerate(_blocks(cell) or ())
        ]
        shared.append(tuple(pieces))
    return tuple(shared)


def _by_arrival(trace: Trace, skip_bad: bool) -> Trace:
    """Rows in order of arrival: sorted where bad rows are skipped, else demanded of the file."""
    times = trace.arrivals_s
    if times is None or not (back := np.diff(times) < 0).any():
        return trace
    if not skip_bad:
        row = int(np.argmax(back)) + 1
        raise KernelcastError(
            f"{trace.path}: {line_of(trace.path, row)}: this request arrives {times[row - 1] - times[row]:g} s before"
            " the one in front of it; `skip_bad` sorts them"
        )
    order = np.argsort(times, kind="stable")
    return replace(
        trace,
        inputs=trace.inputs[order],
        outputs=trace.outputs[order],
        arrivals_s=times[order],
        shared=tuple(trace.shared[row] for row in order) if trace.shared else (),
        ids=tuple(trace.ids[row] for row in order) if trace.ids else (),
        moved=int(np.count_nonzero(times < np.maximum.accumulate(times))),
    )
