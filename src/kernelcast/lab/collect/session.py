"""Measure a plan: call after call, each result kept at once, until the plan or the budget is done.

Results are lines of JSON beside the output, written as they come: a run that was interrupted, or whose budget ended,
goes on where it stopped. The Parquet is made from all lines.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kernelcast.errors import KernelcastError
from kernelcast.lab.collect.plan import Planned

BATCH = 64  # calls that are profiled together


class Device(Protocol):
    """What measures: a CUDA GPU, or something that stands in for it in a test."""

    def measure(self, planned: Planned) -> dict[str, Any]:
        """Times one call: latency_us, spread, …. Raises an exception for a call that cannot run."""
        ...

    def describe(self, batch: Sequence[Planned]) -> list[dict[str, Any]]:
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
    """One measuring of a plan into a file of lines. ``seconds``: stop in time for this; None: go to the end."""

    device: Device
    lines: Path
    seconds: float | None = None
    clock: Callable[[], float] = time.monotonic
    say: Callable[[Progress], None] = lambda progress: None
    _slowest_batch: float = field(default=0.0, init=False)

    def run(self, plan: Sequence[Planned]) -> Progress:
        """Measures what the file does not have yet."""
        start = self.clock()
        known = {record["key"]: record["status"] for record in read_lines(self.lines)}
        todo = [planned for planned in plan if planned.key not in known]
        progress = Progress(len(plan) - len(todo), len(plan), sum(known.get(p.key, "ok") != "ok" for p in plan), 0.0)
        self.lines.parent.mkdir(parents=True, exist_ok=True)
        with self.lines.open("a") as file:
            for at in range(0, len(todo), BATCH):
                before = self.clock()
                if self.seconds is not None and before - start + self._slowest_batch > self.seconds:
                    break
                for record in self._batch(todo[at : at + BATCH], start):
                    file.write(json.dumps(record) + "\n")
                    progress.done += 1
                    progress.failed += record["status"] != "ok"
                    progress.seconds = self.clock() - start
                    self.say(progress)
                file.flush()
                self._slowest_batch = max(self._slowest_batch, self.clock() - before)
        return progress

    def _batch(self, batch: Sequence[Planned], start: float) -> Iterator[dict[str, Any]]:
        """Times each call, then looks at the kernels of those that ran."""
        records = []
        for planned in batch:
            record: dict[str, Any] = {
                "key": planned.key, "family": planned.family, "warm": planned.warm, "call": planned.parameters,
                "at_s": round(self.clock() - start, 3),
            }  # fmt: skip
            try:
                record |= {"status": "ok", **self.device.measure(planned)}
            except Exception as error:  # whatever a library raises is this call's result
                record |= {"status": "failed", "error": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
            records.append(record)
        ran = [(planned, record) for planned, record in zip(batch, records, strict=True) if record["status"] == "ok"]
        for (_, record), details in zip(ran, self.device.describe([p for p, _ in ran]), strict=True):
            record |= details
        yield from records


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Records so far; a last line that was cut short is left out."""
    if not path.exists():
        return
    with path.open() as file:
        for number, line in enumerate(file, 1):
            try:
                yield json.loads(line)
            except ValueError:
                if line.endswith("\n"):
                    raise KernelcastError(f"{path}: line {number} is no result of kernelcast collect") from None
