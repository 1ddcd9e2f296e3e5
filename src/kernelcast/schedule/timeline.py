"""Kernels on a compute stream with collectives on a stream beside it, the host that launches them, and the timeline of
events that a person looks at."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kernelcast.errors import KernelcastError
from kernelcast.forecast.calibration import UNSCALED, Scale
from kernelcast.ops.work import Array
from kernelcast.toml_folder import ids_in, read_from

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
class Collective:
    """A collective: it may start when kernel ``after`` has ended (-1: at once), and kernel ``before`` waits for it
    (as many as there are kernels: the end of the pass does)."""

    name: str
    time_s: float
    after: int
    before: int
    sent_bytes: float = 0.0


@dataclass(frozen=True)
class StreamSchedule:
    """A pass as it ran. ``end_s`` = busy + host_idle + slowed + exposed."""

    starts_s: Array = field(repr=False)
    ends_s: Array = field(repr=False)
    jobs: tuple[Collective, ...]
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


def schedule_streams(
    busy_s: Array, launched_s: Array, jobs: Sequence[Collective] = (), interference: float = INTERFERENCE
) -> StreamSchedule:
    """Run kernels in order with ``jobs`` beside them, these in the order in which they may start."""
    queue = sorted(jobs, key=lambda job: job.after)
    if not queue:
        ends = stream_ends(launched_s, busy_s)
        end, busy = (float(ends[-1]), float(busy_s.sum())) if len(ends) else (0.0, 0.0)
        none = np.zeros(0)
        return StreamSchedule(ends - busy_s, ends, (), none, none, busy, max(0.0, end - busy), 0.0, 0.0, end)
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
    return StreamSchedule(
        starts, ends, tuple(queue), job_starts, job_ends, busy, idle, max(0.0, slowed), exposed, clock
    )


_FOLDER = Path(__file__).parents[1] / "stacks" / "hosts"


@dataclass(frozen=True)
class Host:
    """One file of ``hosts/``, or of `kernelcast collect --host`: seconds of one thread of Python and PyTorch."""

    id: str
    name: str
    step_s: float  # a step, whatever it does
    launch_s: float  # a kernel, with its share of the op that launches it
    view_s: float  # an op of the forward pass that launches none
    python_s: float  # a call of a Python function of the program, beside its ops
    recorded_s: float  # what autograd adds to an op of the forward pass
    backward_s: float  # an op of the backward pass, beside its kernels
    backward_view_s: float
    parameter_s: float  # a tensor of parameters in a training step: its gradient kept, its update listed
    gap_s: float  # between two kernels of a stream, both launched in time
    graph_gap_s: float  # between two kernels of a CUDA graph
    graph_s: float  # to launch a graph
    faster: float  # share of its time that it may need less, eight times of ten
    slower: float  # and more
    sources: tuple[tuple[str, str], ...]
    series_s: float = 0.0  # each further kernel that a library launches for the same op; 0: as launch_s
    compiled_s: float = 0.0  # a call of a compiled step: guards, and the wrapper around its kernels
    gpus: Sequence[str] = ()  # that such machines are sold or rented with

    def scaled(self, scale: Scale) -> Host:
        """As measured runs found it: its launches so many times as long, and how sure that is."""
        if scale == UNSCALED:
            return self
        costs: dict[str, Any] = {name: getattr(self, name) * scale.factor for name in (*COSTS, *WITH_LAUNCHES)}
        faster, slower = 1 - (1 - self.faster) ** scale.reach, (1 + self.slower) ** scale.reach - 1
        return replace(self, **costs, faster=faster, slower=slower)


COSTS = ("step_s", "launch_s", "view_s", "python_s", "recorded_s", "backward_s", "backward_view_s", "parameter_s")
WITH_LAUNCHES = ("series_s", "compiled_s")  # no program of `kernelcast collect --host` has them: scaled like launches


def host_ids() -> list[str]:
    return ids_in(_FOLDER)


@functools.cache
def usual_host(gpu: str) -> Host:
    """What launches the kernels of a GPU where nobody says: a CPU of its years."""
    return next((each for each in map(host, host_ids()) if gpu in each.gpus), host("server"))


@functools.cache
def host(name: str) -> Host:
    """The host called ``name``, or that of a file NAME.toml."""
    if not name.endswith(".toml"):
        return read_from(_FOLDER, Host, name)
    path = Path(name)
    if not path.is_file():
        raise KernelcastError(f"no file {name}; kernelcast collect --host -o {name} measures one")
    try:
        return read_from(path.parent, Host, path.stem)
    except tomllib.TOMLDecodeError as error:
        raise KernelcastError(f"{name}: {error}") from None


@dataclass(frozen=True, slots=True)
class Event:
    """Something that runs from ``start_s`` for ``time_s``."""

    name: str
    start_s: float
    time_s: float
    part: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def end_s(self) -> float:
        return self.start_s + self.time_s


@dataclass(frozen=True)
class Lane:
    """A stream, a link or a thread of the host, of one ``place`` (a GPU, a stage)."""

    process: str
    name: str
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Timeline:
    lanes: tuple[Lane, ...]

    @property
    def end_s(self) -> float:
        return max((event.end_s for lane in self.lanes for event in lane.events), default=0.0)
