"""Measure whole models on a CUDA GPU, as ``kernelcast collect-models`` does. Needs torch and transformers, and no file
of any model. An interrupted run goes on where it stopped: start it again with the same file."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Protocol

from kernelcast.collect.session import DeviceLostError
from kernelcast.errors import KernelcastError
from kernelcast_lab.collect.cases import Case
from kernelcast_lab.collect.store import Journal, Measured, Timing, case_record, error_line

FIRST_GUESS_S = 5.0  # what a case takes before any was timed; the first one builds a model and wakes the profiler
Runner = Callable[[Case], Timing]
Say = Callable[[str], None]


class PartRunner(Protocol):
    """What measures a case in two parts."""

    def timed(self, case: Case) -> Timing: ...

    def profiled(self, case: Case, timing: Timing) -> Measured: ...


class Tally(NamedTuple):
    """How a run went. ``left`` were not begun: the budget was spent."""

    measured: int
    failed: int
    left: int


def measured_here() -> None:
    """Refuse where models cannot be measured."""
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise KernelcastError(f"measuring models needs {package}, which is not installed: pip install {package}")
    import torch

    if not torch.cuda.is_available():
        raise KernelcastError("measuring models needs a CUDA GPU, and torch sees none here; --list works without")


def measure_here(cases: Iterable[Case], out: Path, budget_s: float, retry: bool, say: Say) -> Tally:
    """Measure cases on this machine's GPU into a journal; or one line on what is missing."""
    begin = time.monotonic()
    measured_here()
    import torch

    from kernelcast_lab.collect.run import CudaRunner, device_state, environment

    journal = Journal(out)
    run = datetime.now(UTC).isoformat(timespec="seconds")
    journal.append({"kind": "environment", "run": run, "facts": {"date": run, **environment()}})
    runner = CudaRunner(torch.device("cuda", 0))

    def left_s() -> float:
        return budget_s - (time.monotonic() - begin)  # importing counts: the device is held meanwhile

    try:
        return measure_parts(list(cases), runner, journal, left_s, run, retry, say)
    finally:
        journal.append({"kind": "environment", "run": run, "facts": {"after": device_state()}})


def measure_parts(
    cases: Sequence[Case],
    runner: PartRunner,
    journal: Journal,
    left_s: Callable[[], float],
    run: str,
    retry: bool = False,
    say: Say = lambda line: None,
) -> Tally:
    """All cases timed, then all profiled: a profiler that ran once slows every launch of its process."""
    timed = measure(cases, runner.timed, journal, left_s(), run, retry, say=say, record_type="timing")
    timings = journal.timings()
    if timed.left:
        return Tally(0, 0, len(cases))

    def profiled(case: Case) -> Measured:
        if case.id not in timings:
            raise KernelcastError("its steps could not be timed")
        return runner.profiled(case, timings[case.id])

    return measure(cases, profiled, journal, left_s(), run, retry, say=say)


def measure(
    cases: Iterable[Case],
    runner: Runner,
    journal: Journal,
    budget_s: float,
    run: str,
    retry: bool = False,
    clock: Callable[[], float] = time.monotonic,
    say: Say = lambda line: None,
    record_type: str = "case",
) -> Tally:
    """Run the cases that the journal lacks, a line each, until the next would not fit in the budget."""
    start = clock()
    done = journal.done(record_type, retry)
    waiting = [case for case in cases if case.id not in done]
    spent: list[float] = []
    failed = 0
    for at, case in enumerate(waiting):
        expected = sum(spent) / len(spent) if spent else FIRST_GUESS_S
        begin = clock()
        if begin - start + expected > budget_s:
            return Tally(at - failed, failed, len(waiting) - at)
        lost = False
        result: Timing | str
        try:
            result = runner(case)
        except Exception as error:  # any failure of a case is a fact about it; the others go on
            result, lost = error_line(error), isinstance(error, DeviceLostError)
        spent.append(clock() - begin)
        journal.append(case_record(case, run, spent[-1], result, record_type))
        failed += isinstance(result, str)
        say(_line(case, result, spent[-1]))
        if lost:
            raise KernelcastError(f"{result}; start again with the same file: what is measured is kept")
    return Tally(len(waiting) - failed, failed, 0)


def _line(case: Case, result: Timing | str, seconds: float) -> str:
    if isinstance(result, str):
        return f"{case.id}: failed after {seconds:.1f} s: {result}"
    kernels = ""
    if isinstance(result, Measured):
        kernels = f", kernels {result.profile.kernel_sum_ms:.3f} ms in {result.profile.kernel_calls}"
    return f"{case.id}: {result.wall.median_ms:.3f} ms{kernels} ({seconds:.1f} s)"
