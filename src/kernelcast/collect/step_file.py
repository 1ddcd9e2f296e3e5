"""A file of engine steps as it is measured: a run that was interrupted, or whose time was over, goes on."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelcast.collect.engine_steps import Started, measure_steps, profile_steps
from kernelcast.collect.session import drop_torn_line
from kernelcast.collect.step_plan import EngineLimits, Limits, PlannedStep, planned_steps
from kernelcast.errors import KernelcastError
from kernelcast.serving.step_table import FILE_TYPE, UNFINISHED, is_steps

# Of the first line: what must be as it was for a run to go on
_GIVEN, _CHOSEN = ("gpu", "model", "engine_args"), ("engine", "release", "tp", "max_num_seqs", "max_num_batched_tokens",
                                                    "max_model_len", "cudagraph_mode")  # fmt: skip
_MOST_CHARS = 400  # of an engine's error
Report = Callable[[int, int, str], None]  # steps that are measured, of how many, and what is next


@dataclass(frozen=True)
class StepRun:
    """How many records a file has, and how many steps of the plan it lacks."""

    records: int
    left: int


def write_steps(
    out: Path, about: Mapping[str, Any], start: Callable[[], Started], seconds: float | None = None,
    say: Report = lambda done, total, text: None,
) -> StepRun:  # fmt: skip
    """Measure into ``out`` what it lacks. What is measured when ``seconds`` end is a whole file; a run that was
    interrupted leaves its steps in FILE.progress.jsonl, and the next one goes on with them."""
    until, progress = time.monotonic() + (seconds or float("inf")), progress_of(out)
    earlier = earlier_steps(out, about)
    if earlier and not progress.exists() and not _left(EngineLimits.of(earlier[0]), earlier):
        return StepRun(len(earlier) - 1, left=0)
    with start() as (engine, settings):
        header = {"kind": FILE_TYPE, **about, **settings, "kv_tokens": engine.kv_tokens}
        if earlier:
            _check_same(out, earlier[0], header, _CHOSEN)
        records = earlier or [header]
        progress.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        todo = _left(engine, records)
        total = len(planned_steps(engine))
        done = total - len(todo)

        def report(text: str) -> None:
            say(done, total, text)

        try:
            with progress.open("a", encoding="utf-8") as file:
                for record in itertools.chain(measure_steps(engine, report, todo), profile_steps(engine, report, todo)):
                    print(json.dumps(record), file=file, flush=True)
                    records.append(record)
                    done = total - len(_left(engine, records))
                    if time.monotonic() > until:
                        break
        except Exception as error:  # an engine may raise anything
            raise KernelcastError(f"{message_of(error)}; {how_to_go_on(progress)}") from error
    progress.replace(out)
    return StepRun(len(records) - 1, total - done)


def progress_of(out: Path) -> Path:
    """Where the steps of ``out`` are while they are measured."""
    return out.with_name(out.name.removesuffix(out.suffix) + UNFINISHED)


def how_to_go_on(progress: Path) -> str:
    return f"what was measured is in {progress}: run the same command again to go on with it"


def message_of(error: Exception) -> str:
    """What an engine says, in one line that is not too long."""
    message = str(error) if isinstance(error, KernelcastError) else f"{type(error).__name__}: {error}"
    line = " ".join(message.split())
    return line if len(line) <= _MOST_CHARS else f"{line[:_MOST_CHARS]}…"


def earlier_steps(out: Path, about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The first line and the records of a run that did not end, or of the file that is there; refuses those of another
    model, GPU or engine, and other files."""
    drop_torn_line(progress_of(out))
    records: list[dict[str, Any]] = []
    for path in (path for path in (out, progress_of(out)) if path.exists()):
        records = _earlier(path, about)
    return records


def _earlier(path: Path, about: Mapping[str, Any]) -> list[dict[str, Any]]:
    if not is_steps(path):
        raise KernelcastError(f"{path} is there and has no steps of an engine: give another name, or remove it")
    try:
        records: list[dict[str, Any]] = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        _check_same(path, records[0], about, _GIVEN)
        _left(EngineLimits.of(records[0]), records)
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise KernelcastError(f"{path} is damaged ({type(error).__name__} {error}): remove it to start again") from None
    return records


def _check_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in names:
        if before.get(name) != now.get(name):
            raise KernelcastError(
                f"{path} has steps of {name} {before.get(name)!r}, not of {now.get(name)!r}: give another name, or "
                "remove it"
            )


def _left(limits: Limits, records: Sequence[Mapping[str, Any]]) -> list[PlannedStep]:
    """The steps of the plan that no record is of."""
    known = {PlannedStep.of(record) for record in records[1:]}
    return [step for step in planned_steps(limits) if step not in known]
