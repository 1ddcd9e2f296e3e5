"""Measure whole models on a CUDA GPU: ``python -m kernelcast_lab.models.measure --budget 240 -o FILE.jsonl``.

Needs torch and transformers, and no file of any model. A run that is cut off goes on where it stopped: start it again
with the same file. ``--pack FILE.jsonl -o OUT.json.gz`` makes the form that is kept, which ``load_cases`` reads.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from kernelcast.errors import KernelcastError
from kernelcast.measure.session import DeviceLostError
from kernelcast_lab.models.cases import MODELS, Case, chosen, cut, parameter_count
from kernelcast_lab.models.store import (
    Journal,
    Measured,
    ModelCase,
    case_record,
    load_cases,
    one_line,
    pack,
)

__all__ = ["Case", "ModelCase", "load_cases", "main", "measure", "pack"]

FIRST_GUESS_S = 5.0  # what a case takes before any was timed; the first one builds a model and wakes the profiler
Runner = Callable[[Case], Measured]


class Tally(NamedTuple):
    """How a run went. ``left`` were not begun: the budget was spent."""

    measured: int
    failed: int
    left: int


def measure(
    cases: Iterable[Case],
    runner: Runner,
    journal: Journal,
    budget_s: float,
    run: str,
    retry: bool = False,
    clock: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = lambda line: None,
) -> Tally:
    """Run the cases that the journal lacks, a line each, until the next would not fit in the budget."""
    start = clock()
    done = journal.done(retry)
    waiting = [case for case in cases if case.id not in done]
    spent: list[float] = []
    failed = 0
    for at, case in enumerate(waiting):
        expected = sum(spent) / len(spent) if spent else FIRST_GUESS_S
        begin = clock()
        if begin - start + expected > budget_s:
            return Tally(at - failed, failed, len(waiting) - at)
        result, lost = _result(runner, case)
        spent.append(clock() - begin)
        journal.append(case_record(case, run, spent[-1], result))
        failed += isinstance(result, str)
        say(_line(case, result, spent[-1]))
        if lost:
            raise KernelcastError(f"{result}; start again with the same file: what is measured is kept")
    return Tally(len(waiting) - failed, failed, 0)


def _result(runner: Runner, case: Case) -> tuple[Measured | str, bool]:
    """What the runner found, or its error in one line; and whether the device is lost with it."""
    try:
        return runner(case), False
    except Exception as error:  # any failure of a case is a fact about it; the others go on
        return one_line(error), isinstance(error, DeviceLostError)


def _line(case: Case, result: Measured | str, seconds: float) -> str:
    if isinstance(result, str):
        return f"{case.id}: failed after {seconds:.1f} s: {result}"
    kernel_ms, calls = result.profile.kernel_sum_ms, result.profile.kernel_calls
    return f"{case.id}: {result.wall.median_ms:.3f} ms, kernels {kernel_ms:.3f} ms in {calls} ({seconds:.1f} s)"


def _cuda_runner() -> tuple[Runner, Callable[[], dict[str, object]], Callable[[], dict[str, object]]]:
    """The runner, and what describes the machine at start and end; or one line on what is missing."""
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise KernelcastError(f"measuring models needs {package}, which is not installed: pip install {package}")
    import torch

    if not torch.cuda.is_available():
        raise KernelcastError("measuring models needs a CUDA GPU, and torch sees none here; --list works without")
    from kernelcast_lab.models.run import CudaRunner, device_state, environment

    return CudaRunner(torch.device("cuda", 0)), environment, device_state


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kernelcast_lab.models.measure", description=__doc__)
    parser.add_argument("-o", "--out", type=Path, help="JSON lines to append to; with --pack, the .json.gz to write")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds from the start of the run (default 240)")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases whose id holds one of the words")
    parser.add_argument("--retry", action="store_true", help="run cases again that failed before")
    parser.add_argument("--list", action="store_true", help="print the cases in their order, and stop")
    parser.add_argument("--pack", type=Path, metavar="JSONL", help="turn measured JSON lines into the kept form")
    return parser


def _list(cases: Sequence[Case]) -> None:
    for case in cases:
        weights = parameter_count(cut(MODELS[case.model], case.layers))
        print(f"{case.id}  {weights / 1e9:.2f}e9 weights")
    print(f"{len(cases)} cases")


def _run(arguments: argparse.Namespace) -> None:
    begin = time.monotonic()
    cases = chosen(arguments.only)
    if arguments.list:
        return _list(cases)
    if arguments.out is None:
        raise KernelcastError("where to? give -o FILE.jsonl (or -o FILE.json.gz with --pack)")
    if arguments.pack is not None:
        measured, failed = pack(arguments.pack, arguments.out)
        return print(f"{arguments.out}: {measured} cases, {failed} failed, {arguments.out.stat().st_size} bytes")
    runner, environment, device_state = _cuda_runner()
    journal = Journal(arguments.out)
    run = datetime.now(UTC).isoformat(timespec="seconds")
    journal.append({"kind": "environment", "run": run, "facts": {"date": run, **environment()}})
    left_s = arguments.budget - (time.monotonic() - begin)  # importing counts: the device is held meanwhile
    try:
        tally = measure(cases, runner, journal, left_s, run, arguments.retry, say=lambda line: print(line, flush=True))
    finally:
        journal.append({"kind": "environment", "run": run, "facts": {"after": device_state()}})
    print(f"{arguments.out}: {tally.measured} measured, {tally.failed} failed, {tally.left} left for another run")
    return None


def main(words: Sequence[str] | None = None) -> int:
    """Entry: 0, or 2 with one line on stderr."""
    try:
        _run(_parser().parse_args(words))
    except KernelcastError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
