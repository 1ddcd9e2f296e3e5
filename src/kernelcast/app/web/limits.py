"""What a request may cost, and how many may be in progress."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MIB = 2**20
GIB = 2**30
HEAVY = ("simulate", "compare", "plan", "diagnose", "train")  # questions that keep a worker for seconds
_SECONDS = {"kernel": 10.0, "infer": 30.0, "simulate": 60.0, "compare": 120.0, "plan": 300.0, "diagnose": 120.0,
            "train": 120.0, "list": 60.0}  # fmt: skip


def default_workers() -> int:
    """One a core, and at least two: a long question must leave a worker for the short ones."""
    return min(8, max(2, os.cpu_count() or 2))


@dataclass(frozen=True)
class Limits:
    """Of a server. ``seconds``: by question, from when a worker takes it; what it would still do is stopped then."""

    workers: int = field(default_factory=default_workers)
    body_bytes: int = 1 * MIB
    upload_bytes: int = 64 * MIB  # of a file to diagnose
    unpacked_bytes: int = 256 * MIB  # of the same, decompressed
    body_seconds: float = 30.0  # until the last byte of a body
    seconds: Mapping[str, float] = field(default_factory=lambda: dict(_SECONDS))
    requests: int = 512  # in progress, of any sort
    uploads: int = 4  # of them, with a file
    light_waiting: int = 256  # questions that wait for a worker
    heavy_waiting: int = 16
    waiting_seconds: float = 60.0  # that a question waits at most
    cache_bytes: int = 64 * MIB  # of answers that are kept
    worker_bytes: int = 8 * GIB  # of address space; 0: no limit
    worker_keep_bytes: int = 1536 * MIB  # a worker that once held more is replaced after its answer

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
            "seconds": {name: value for name, value in self.seconds.items() if name != "list"},
            "heavy_at_once": self.heavy_at_once,
        }
