"""Measure tasks in sequence, each result saved at once, until all are done or the time budget is spent.

Results are lines of JSON beside the output, written as they come: a run that was interrupted, or whose budget ended,
goes on where it stopped. The Parquet is made from all lines.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kernelcast.errors import KernelcastError

BATCH = 256  # tasks that are profiled together


class DeviceLostError(KernelcastError):
    """The GPU can run nothing more in this process."""


class Task(Protocol):
    """A call to time, or work to measure the power of."""

    @property
    def key(self) -> str: ...

    @property
    def record(self) -> dict[str, Any]:
        """Its fields in a line of results: key, call, …"""
        ...


class Device(Protocol):
    """The device that measures: a CUDA GPU, or a fake in a test."""

    def measure(self, task: Any) -> dict[str, Any]:
        """Measures a task: latency_us, spread, …. Raises an exception for a call that cannot run."""
        ...

    def describe(self, batch: Sequence[Any]) -> list[dict[str, Any]]:
        """Kernel names and grids of each task of a batch that was measured; nothing where they are not profiled."""
        ...


@dataclass
class Progress:
    """Progress of a run."""

    done: int
    total: int
    failed: int
    seconds: float


@dataclass
class Session:
    """Measures tasks into a file of lines. ``seconds``: stop in time for this; None: go to the end."""

    device: Device
    lines: Path
    seconds: float | None = None
    clock: Callable[[], float] = time.monotonic
    say: Callable[[Progress], None] = lambda progress: None
    earlier: Sequence[dict[str, Any]] = ()  # results of a run that ended
    _reserve: float = field(default=2.0, init=False)  # for profiling the kernels of a batch

    def run(self, tasks: Sequence[Task]) -> Progress:
        """Measure the tasks that the file does not have yet."""
        start = self.clock()
        known = {record["key"]: record["status"] for record in (*self.earlier, *read_lines(self.lines))}
        todo = [task for task in tasks if task.key not in known]
        failed = sum(known.get(task.key, "ok") != "ok" for task in tasks)
        progress = Progress(len(tasks) - len(todo), len(tasks), failed, 0.0)
        self.lines.parent.mkdir(parents=True, exist_ok=True)
        drop_torn_line(self.lines)
        with self.lines.open("a") as file:
            for first in range(0, len(todo), BATCH):
                measured = []
                for task in todo[first : first + BATCH]:
                    progress.seconds = self.clock() - start
                    if self._over(progress.seconds):
                        break
                    record, lost = self._measured(task, progress.seconds)
                    file.write(json.dumps(record) + "\n")
                    file.flush()
                    if lost:
                        call = ", ".join(f"{name}={value}" for name, value in record["call"].items())
                        raise DeviceLostError(f"{call} broke the GPU's context ({lost}); run again to go on")
                    progress.done += 1
                    progress.failed += record["status"] != "ok"
                    measured += [task] if record["status"] == "ok" else []
                    self.say(progress)
                before = self.clock()
                if details := self.device.describe(measured):
                    for task, profile in zip(measured, details, strict=True):
                        file.write(json.dumps({"key": task.key, "details": profile}) + "\n")
                    file.flush()
                    self._reserve = self.clock() - before
                progress.seconds = self.clock() - start
                if self._over(progress.seconds):
                    break
        return progress

    def _over(self, seconds: float) -> bool:
        return self.seconds is not None and seconds + self._reserve >= self.seconds

    def _measured(self, task: Task, now: float) -> tuple[dict[str, Any], DeviceLostError | None]:
        """The task's result, and the error that broke the CUDA context, if any."""
        record = task.record | {"at_s": round(now, 3)}
        try:
            return record | {"status": "ok", **self.device.measure(task)}, None
        except Exception as error:  # any exception is this task's result
            message = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            lost = error if isinstance(error, DeviceLostError) else None
            return record | {"status": "failed", "error": message}, lost


def drop_torn_line(path: Path) -> None:
    """Remove an unfinished last line, which would spoil the next line."""
    if path.exists() and (text := path.read_bytes()) and not text.endswith(b"\n"):
        path.write_bytes(text[: text.rfind(b"\n") + 1])


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Records so far, each with the profile of its kernels; an unfinished last line is left out."""
    records: dict[str, dict[str, Any]] = {}
    if not path.exists():
        return []
    with path.open() as file:
        for number, line in enumerate(file, 1):
            try:
                entry = json.loads(line)
                if "details" in entry:
                    records[entry["key"]] |= entry["details"]
                else:
                    records[entry["key"]] = {**entry, "call": dict(entry["call"])}
            except (ValueError, KeyError, TypeError):
                if line.endswith("\n"):
                    raise KernelcastError(f"{path}: line {number} is no result of kernelcast collect") from None
    return list(records.values())
