"""A pass of one rank: kernels in order, with the host that launches them."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace

from kernelcast.kernels.work import Array
from kernelcast.timeline.streams import Job
from kernelcast.training.step import OpRan


@dataclass(frozen=True)
class Pass:
    """Kernels that follow one another on one rank, and when the host has launched each from the pass's start."""

    kernels: tuple[OpRan, ...]
    places: tuple[int, ...]  # of their ops in the trace
    units: tuple[int, ...]
    busy_s: Array
    launched_s: Array
    host_s: float  # of all its ops

    def kernel_at(self, place: int) -> int:
        """The last kernel at or before an op of the trace."""
        return bisect.bisect_right(self.places, place) - 1

    def firsts(self) -> list[tuple[int, int]]:
        """Each unit with its first kernel, forward and backward apart."""
        found: dict[tuple[str, int], int] = {}
        for at, (kernel, unit) in enumerate(zip(self.kernels, self.units, strict=True)):
            found.setdefault((kernel.phase, unit), at)
        return sorted(((unit, at) for (_, unit), at in found.items()), key=lambda pair: pair[1])


def moved(job: Job, by: int) -> Job:
    """The job in a run where its pass comes ``by`` kernels later."""
    return replace(job, after=job.after + by, before=job.before + by)
