"""Two clocks: kernels that follow one another on the compute stream, and collectives on a stream beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kernelcast.ops.work import Array

# Share of its speed that a kernel loses while a collective runs beside it. NCCL's channels hold 16 to 32 of about a
# hundred SMs and some of L2 and DRAM, but only kernels of many waves feel all of that: an assumption, no measurement.
INTERFERENCE = 0.1


def stream_ends(launched_s: Array, kernel_s: Array) -> Array:
    """When each kernel of a stream ends: it starts when it is launched and the one before has ended.

    end[i] = max over j <= i of (launched[j] + kernel[j] + ... + kernel[i])
    """
    done = np.cumsum(kernel_s)
    return done + np.maximum.accumulate(launched_s - (done - kernel_s))


@dataclass(frozen=True)
class Job:
    """A collective: it may start when kernel ``after`` has ended (-1: at once), and kernel ``before`` waits for it
    (as many as there are kernels: the end of the pass does)."""

    name: str
    time_s: float
    after: int
    before: int
    sent_bytes: float = 0.0


@dataclass(frozen=True)
class Run:
    """A pass as it ran. ``end_s`` = busy + host_idle + slowed + exposed."""

    starts_s: Array = field(repr=False)
    ends_s: Array = field(repr=False)
    jobs: tuple[Job, ...]
    job_starts_s: Array = field(repr=False)
    job_ends_s: Array = field(repr=False)
    busy_s: float  # kernels and the gaps between them
    host_idle_s: float
    slowed_s: float  # what kernels lose to collectives beside them
    exposed_s: float  # waiting for collectives
    compute_end_s: float

    @property
    def end_s(self) -> float:
        return max(self.compute_end_s, float(self.job_ends_s.max(initial=0.0)))

    @property
    def jobs_s(self) -> float:
        return sum(job.time_s for job in self.jobs)

    @property
    def overlapped_s(self) -> float:
        return self.jobs_s - self.exposed_s


def simulate(busy_s: Array, launched_s: Array, jobs: Sequence[Job] = (), interference: float = INTERFERENCE) -> Run:
    """Run kernels in order with ``jobs`` beside them, these in the order in which they may start."""
    queue = sorted(jobs, key=lambda job: job.after)
    if not queue:
        ends = stream_ends(launched_s, busy_s)
        end, busy = (float(ends[-1]), float(busy_s.sum())) if len(ends) else (0.0, 0.0)
        none = np.zeros(0)
        return Run(ends - busy_s, ends, (), none, none, busy, max(0.0, end - busy), 0.0, 0.0, end)
    starts, ends = np.zeros(len(busy_s)), np.zeros(len(busy_s))
    job_starts, job_ends = np.zeros(len(queue)), np.zeros(len(queue))
    waits: dict[int, list[int]] = {}
    for at, job in enumerate(queue):
        waits.setdefault(job.before, []).append(at)
    clock = channel = idle = slowed = exposed = 0.0  # channel: when the stream of collectives is free
    sent = 0
    speed = 1.0 - interference
    for i, (work, launched) in enumerate(zip(busy_s.tolist(), launched_s.tolist(), strict=True)):
        while sent < len(queue) and queue[sent].after < i:
            job_starts[sent] = max(clock, channel)
            channel = job_ends[sent] = float(job_starts[sent]) + queue[sent].time_s
            sent += 1
        start = max(clock, launched)
        idle += start - clock
        needed = max((float(job_ends[at]) for at in waits.get(i, ())), default=0.0)
        if needed > start:
            exposed += needed - start
            start = needed
        beside = max(0.0, channel - start)
        end = start + work / speed if work <= beside * speed else start + work + beside * interference
        slowed += end - start - work
        starts[i], ends[i], clock = start, end, end
    for at in range(sent, len(queue)):
        job_starts[at] = max(clock, channel)
        channel = job_ends[at] = float(job_starts[at]) + queue[at].time_s
    exposed += max(0.0, channel - clock)
    busy = float(busy_s.sum())
    return Run(starts, ends, tuple(queue), job_starts, job_ends, busy, idle, max(0.0, slowed), exposed, clock)
