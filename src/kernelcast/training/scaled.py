"""A training step on many GPUs: its time, where that goes, memory, and rates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from kernelcast.energy.power import total
from kernelcast.results import Interval
from kernelcast.schedule import Event, Lane, Memory, Timeline
from kernelcast.schedule.timeline import Run
from kernelcast.tracing.traced import Trace
from kernelcast.training.layout import TrainingLayout
from kernelcast.training.pipeline import Timetable
from kernelcast.training.places import is_collective
from kernelcast.training.queued import OpRan
from kernelcast.training.step import Forecast

# Parts of a stage's time, with what each is; they add up to the step.
PARTS = {
    "kernels": "kernels of the model",
    "optimizer": "kernels of the optimizer",
    "communication": "collectives of tensor and expert parallelism, which the layers wait for",
    "exposed": "waiting for data-parallel collectives",
    "links": "longer than with free links between stages",
    "bubble": "waiting for other stages",
    "slowed": "lost to collectives that run beside kernels",
    "gaps": "between kernels",
    "host": "waiting for the host to launch",
}


@dataclass(frozen=True)
class Played:
    """Kernels and collectives of a rank as they ran, ``count`` times in a step.

    ``name`` with a pipeline: ``forward`` and ``backward`` of one micro-batch through a ``part`` of the model; in
    ``last`` the gradients are sent; ``optimizer``. Without one ``step`` is the whole step.
    """

    name: str
    part: int
    kernels: tuple[OpRan, ...]
    run: Run
    count: int = 1

    @property
    def behind_s(self) -> float:
        """What collectives of the last pass take longer than its kernels: the next pass need not wait for them."""
        return self.run.end_s - self.run.compute_end_s if self.name == "last" else 0.0

    def job_events(self, at_s: float) -> list[Event]:
        """The communication stream of one that starts at ``at_s``."""
        times = zip(self.run.jobs, self.run.job_starts_s.tolist(), self.run.job_ends_s.tolist(), strict=True)
        return [
            Event(job.name, at_s + start, end - start, "communication", {"sent_bytes": job.sent_bytes})
            for job, start, end in times
        ]

    def kernel_events(self, at_s: float) -> list[Event]:
        """Its compute stream."""
        times = zip(self.kernels, self.run.starts_s.tolist(), self.run.ends_s.tolist(), strict=True)
        return [
            Event(one.op.name, at_s + start, end - start, one.part,
                  {"phase": one.phase, "module": one.op.module, "bound_by": one.bound_by})
            for one, start, end in times
        ]  # fmt: skip


def parts_of(played: Iterable[Played], gap_s: float) -> dict[str, float]:
    """``PARTS`` of a rank's time, as far as its own passes tell."""
    found = dict.fromkeys(PARTS, 0.0)
    for one in played:
        inside_s = one.run.busy_s  # of it, what the kernels of one op wait for one another's launches
        for kernel in one.kernels:
            kind = "optimizer" if kernel.phase == "optimizer" else "kernels"
            found["communication" if is_collective(kernel.op) else kind] += one.count * kernel.time_s
            found["gaps"] += one.count * gap_s * kernel.launches
            inside_s -= kernel.time_s + gap_s * kernel.launches
        found["host"] += one.count * (one.run.host_idle_s + inside_s)
        found["slowed"] += one.count * one.run.slowed_s
        found["exposed"] += one.count * (one.run.exposed_s - one.behind_s)
    return {name: float(value) for name, value in found.items()}


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline (the only one without): a rank of it."""

    index: int
    layers: int
    parts_s: dict[str, float]
    memory: Memory
    in_flight: int  # micro-batches whose activations it holds at once
    tied_s: float  # joining gradients of a table that another stage has as well
    played: tuple[Played, ...] = field(repr=False)  # the optimizer's, or the whole step, is the last

    @property
    def time_s(self) -> float:
        return sum(self.parts_s.values())

    @property
    def collectives_s(self) -> float:
        """Of data parallelism, hidden or not."""
        return sum(one.count * one.run.jobs_s for one in self.played) + self.tied_s

    @property
    def sent_bytes(self) -> float:
        """By a rank for data parallelism, in rings."""
        return sum(one.count * job.sent_bytes for one in self.played for job in one.run.jobs)


@dataclass(frozen=True, kw_only=True)
class ScaledStep(Forecast):
    """A step of ``layout.gpus`` GPUs. The trace is one micro-batch of one data-parallel rank; ``kernels`` are those of
    all stages one after another, and the optimizer's."""

    cut: Trace  # as one rank runs it
    layout: TrainingLayout
    stages: tuple[Stage, ...]
    timetable: Timetable | None

    @cached_property
    def energy(self) -> Interval | None:
        """Joules of the step on all GPUs; a rank that waits, or sends beside nothing, draws what rest does."""
        drawn = [self.drawn_by((kernel, run.count) for run in stage.played for kernel in run.kernels)
                 for stage in self.stages]  # fmt: skip
        return total(drawn, self.gpus / len(self.stages))

    @cached_property
    def parts_s(self) -> dict[str, float]:
        """Where the time goes, the mean of the stages; adds up to ``time_s``."""
        return {name: sum(stage.parts_s[name] for stage in self.stages) / len(self.stages) for name in PARTS}

    @property
    def idle_s(self) -> float:
        return self.parts_s["host"]

    @property
    def bubble_share(self) -> float:
        return self.parts_s["bubble"] / self.time_s

    @property
    def exposed_s(self) -> float:
        """Communication that no kernel hides."""
        return self.parts_s["communication"] + self.parts_s["exposed"] + self.parts_s["links"]

    @property
    def overlapped_s(self) -> float:
        """Data-parallel collectives that kernels hide."""
        hidden = sum(s.collectives_s - s.parts_s["exposed"] for s in self.stages) / len(self.stages)
        return max(0.0, hidden)

    @property
    def sent_bytes(self) -> float:
        """By a rank for data parallelism, in rings; the mean of the stages."""
        return sum(stage.sent_bytes for stage in self.stages) / len(self.stages)

    @property
    def tokens(self) -> int:
        return self.trace.tokens * self.passes

    @property
    def samples(self) -> int:
        return self.trace.samples * self.passes

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.time_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens_per_s / self.gpus

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.time_s

    @property
    def memory(self) -> Memory:
        """Of the fullest stage."""
        return max((stage.memory for stage in self.stages), key=lambda memory: memory.used_bytes)

    @property
    def fits(self) -> bool:
        return all(stage.memory.fits for stage in self.stages)

    def timeline(self) -> Timeline:
        """A place a stage, with its compute and communication streams. With a pipeline the passes of each stage;
        without one, every kernel."""
        lanes: list[Lane] = []
        for stage in self.stages:
            place = f"stage {stage.index}" if len(self.stages) > 1 else "one rank"
            compute, sent = self._passes(stage)
            end, start_s = stage.played[-1], self.time_s - stage.played[-1].run.end_s
            named = {
                "compute": compute + end.kernel_events(start_s),
                "communication": sent + end.job_events(start_s),
            }
            lanes += [Lane(f"{place}, {self.gpu.name}", name, tuple(events)) for name, events in named.items()]
        return Timeline(tuple(lanes))

    def _passes(self, stage: Stage) -> tuple[list[Event], list[Event]]:
        """Events of a pipeline's passes: compute, communication."""
        played = {(one.name, one.part): one for one in stage.played}
        compute: list[Event] = []
        sent: list[Event] = []
        for task, start, end in self.timetable.tasks[stage.index] if self.timetable else ():
            name = "backward" if task.backward else "forward"
            compute.append(Event(f"{name} {task.micro_batch}", start, end - start, name, {"part": task.part}))
            kind = "last" if task.backward and task.micro_batch == self.layout.micro_batches - 1 else name
            sent += played[kind, task.part].job_events(start)
        return compute, sent
