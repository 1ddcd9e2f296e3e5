"""Measure calls one after another, each result kept at once, until all are done or the budget is.

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

from kernelcast.collect.choose import Wanted
from kernelcast.errors import KernelcastError

BATCH = 256  # calls that are profiled together


class DeviceLostError(KernelcastError):
    """The GPU can run nothing more in this process."""


class Device(Protocol):
    """What measures: a CUDA GPU, or something that stands in for it in a test."""

    def measure(self, wanted: Wanted) -> dict[str, Any]:
        """Times one call: latency_us, spread, …. Raises an exception for a call that cannot run."""
        ...

    def describe(self, batch: Sequence[Wanted]) -> list[dict[str, Any]]:
        """Kernel names and grids of each call of a batch that was measured."""
        ...


@dataclass
class Progress:
    """How far a run is."""

    done: int
    total: int
    failed: int
    seconds: float


@dataclass
class Session:
    """One measuring of calls into a file of lines. ``seconds``: stop in time for this; None: go to the end."""

    device: Device
    lines: Path
    seconds: float | None = None
    clock: Callable[[], float] = time.monotonic
    say: Callable[[Progress], None] = lambda progress: None
    earlier: Sequence[dict[str, Any]] = ()  # results of a run that ended
    _reserve: float = field(default=2.0, init=False)  # for looking at the kernels of a batch

    def run(self, calls: Sequence[Wanted]) -> Progress:
        """Measures what the file does not have yet."""
        start = self.clock()
        known = {record["key"]: record["status"] for record in (*self.earlier, *read_lines(self.lines))}
        todo = [wanted for wanted in calls if wanted.key not in known]
        failed = sum(known.get(wanted.key, "ok") != "ok" for wanted in calls)
        progress = Progress(len(calls) - len(todo), len(calls), failed, 0.0)
        self.lines.parent.mkdir(parents=True, exist_ok=True)
        with self.lines.open("a") as file:
            for at in range(0, len(todo), BATCH):
                ran = []
                for wanted in todo[at : at + BATCH]:
                    progress.seconds = self.clock() - start
                    if self._over(progress.seconds):
                        break
                    record, lost = self._measured(wanted, progress.seconds)
                    file.write(json.dumps(record) + "\n")
                    if lost:
                        told = ", ".join(f"{name}={value}" for name, value in wanted.parameters.items())
                        raise DeviceLostError(f"{told} broke the GPU's context ({lost}); run again to go on")
                    progress.done += 1
                    progress.failed += record["status"] != "ok"
                    ran += [wanted] if record["status"] == "ok" else []
                    self.say(progress)
                file.flush()
                before = self.clock()
                for wanted, details in zip(ran, self.device.describe(ran), strict=True):
                    file.write(json.dumps({"key": wanted.key, "details": details}) + "\n")
                file.flush()
                self._reserve = self.clock() - before
                progress.seconds = self.clock() - start
                if self._over(progress.seconds):
                    break
        return progress

    def _over(self, seconds: float) -> bool:
        return self.seconds is not None and seconds + self._reserve >= self.seconds

    def _measured(self, wanted: Wanted, now: float) -> tuple[dict[str, Any], DeviceLostError | None]:
        """The call's result, and what broke the GPU, if it did."""
        record = {"key": wanted.key, "family": wanted.family, "warm": wanted.warm, "call": wanted.parameters,
                  "at_s": round(now, 3)}  # fmt: skip
        try:
            return record | {"status": "ok", **self.device.measure(wanted)}, None
        except Exception as error:  # whatever a library raises is this call's result
            told = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            lost = error if isinstance(error, DeviceLostError) else None
            return record | {"status": "failed", "error": told}, lost


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Records so far, each with what was seen of its kernels; a last line that was cut short is left out."""
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
