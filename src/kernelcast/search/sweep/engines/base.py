"""What an engine is, the simplest one, and all by name."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kernelcast.errors import KernelcastError, unknown
from kernelcast.search.sweep.space import Chunk
from kernelcast.search.sweep.work import Work

ENGINES = ("processes", "ray", "one")
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # of a worker's NumPy
TRIES = 3  # workers that a chunk may kill


@dataclass(frozen=True)
class Lost:
    """A chunk that nobody could work off, and why."""

    said: str


class Engine(Protocol):
    def run(self, work: Work, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, bytes | Lost]]:
        """The rows of every chunk, as they are finished."""


@dataclass(frozen=True)
class One:
    """This process alone."""

    def run(self, work: Work, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, bytes | Lost]]:
        for chunk in chunks:
            yield chunk, work.rows(chunk)


def engine(name: str, workers: int | None = None, address: str | None = None) -> Engine:
    from kernelcast.search.sweep.engines.on_ray import OnRay
    from kernelcast.search.sweep.engines.processes import Processes

    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    if workers is not None and workers < 1:
        raise KernelcastError(f"--workers is a number of 1 or more, not {workers}")
    if address is not None and name != "ray":
        raise KernelcastError("--address is that of a Ray cluster: give --engine ray too")
    if name == "ray":
        return OnRay(address, workers)
    count = workers or cores()
    return Processes(count) if name == "processes" and count > 1 else One()


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def one_thread() -> None:
    """A worker has a core to itself: it predicts without threads of its own."""
    importlib.import_module("kernelcast.forecast.predict").THREADS = 1  # type: ignore[attr-defined]
