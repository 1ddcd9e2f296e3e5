"""What a request may cost, and how many may be in progress."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIB = 2**20
GIB = 2**30
HEAVY = ("simulate", "compare", "plan", "diagnose", "train")  # questions that keep a worker for seconds
_SECONDS = {"kernel": 10.0, "infer": 30.0, "curves": 60.0, "simulate": 60.0, "compare": 120.0, "plan": 300.0,
            "diagnose": 25.0, "train": 120.0, "list": 60.0}  # fmt: skip


RESTARTED = ("kernel", "infer", "curves")  # short as a rule; one that is not is asked again among the long ones
# that shorter questions may come later and go first
PATIENCE_S = dict.fromkeys(("infer", "curves", "simulate", "compare", "plan", "train", "diagnose"), 5.0)
# what a worker is told
WORKER_LIMITS = ("worker_bytes", "worker_keep_bytes", "unpacked_bytes", "file_rows", "file_events", "file_bytes")
_MACHINE_SHARE = 0.6  # of its memory that all workers together may hold


def machine_bytes() -> int:
    """Memory of this machine, or of the container that this is; 0 where nobody says."""
    sizes = []
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(OSError, ValueError):  # "max" where the container has no limit
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8")))
    return min(sizes, default=0)


def default_workers() -> int:
    """One a core, and at least two: a long question must leave a worker for the short ones."""
    return min(8, max(2, os.cpu_count() or 2))


@dataclass(frozen=True)
class Limits:
    """Of a server. ``seconds``: by question, from when a worker takes it; what it would still do is stopped then."""

    workers: int = field(default_factory=default_workers)
    body_bytes: int = 1 * MIB
    upload_bytes: int = 64 * MIB  # of a file to diagnose
    unpacked_bytes: int = 128 * MIB  # of the same, decompressed
    file_rows: int = 20_000  # of a table, whatever their size
    file_events: int = 500_000  # of a trace, lines of a table of Nsight Compute
    file_bytes: int = 768 * MIB  # of memory that reading and diagnosing it may take
    header_seconds: float = 10.0  # until the last line of a request's header, from its first byte or the connection
    connections: int = 1024  # open at once; more are closed
    body_seconds: float = 30.0  # until the last byte of a body
    seconds: Mapping[str, float] = field(default_factory=lambda: dict(_SECONDS))
    requests: int = 512  # in progress, of any sort
    uploads: int = 3  # of them, with a file
    light_waiting: int = 256  # questions that wait for a worker
    heavy_waiting: int = 16
    waiting_seconds: float = 60.0  # that a question waits at most
    cache_bytes: int = 64 * MIB  # of answers that are kept
    brief_seconds: float = 2.0  # a kernel or a batch that takes longer waits its turn among the long questions
    stop_seconds: float = 4.0  # that a worker has to leave a question whose client is gone, before it is killed
    start_seconds: float = 60.0  # that a new worker may load what it needs, before it turns to a question
    worker_bytes: int = 0  # of memory that a worker may hold; 0: its share of this machine's
    worker_keep_bytes: int = 512 * MIB  # a worker that holds more after an answer is replaced

    def __post_init__(self) -> None:
        if not self.worker_bytes and (total := machine_bytes()):
            share = int(total * _MACHINE_SHARE / self.workers)
            object.__setattr__(self, "worker_bytes", min(8 * GIB, max(GIB, share)))

    @property
    def heavy_at_once(self) -> int:
        """Long questions that run at the same time: a worker is always free for short ones."""
        return max(1, self.workers - 1)

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "body_bytes": self.body_bytes,
            "upload_bytes": self.upload_bytes,
            "unpacked_bytes": self.unpacked_bytes,
            "file_rows": self.file_rows,
            "file_events": self.file_events,
            "seconds": {name: value for name, value in self.seconds.items() if name != "list"},
            "heavy_at_once": self.heavy_at_once,
        }
