"""A training step on many GPUs: its time, where that goes, memory, and rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kernelcast.hardware import Gpu
from kernelcast.networks.aten.flops import op_flops
from kernelcast.networks.traced import Trace
from kernelcast.parallel.training import TrainingLayout
from kernelcast.timeline import Event, Lane, Memory, Share, Timeline
from kernelcast.timeline.streams import Run
from kernelcast.training.pipeline import Timetable
from kernelcast.training.step import OpRan, Step, interval

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
class Piece:
    """One part of the model on a stage: its passes as they ran alone. ``forward`` and ``backward`` of one micro-batch;
    in ``last`` the gradients are sent. Without a pipeline ``step`` is the whole step, and those are empty."""

    units: tuple[int, ...]
    passes: dict[str, Run]
    kernels: dict[str, tuple[OpRan, ...]]


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline (the only one without): a rank of it."""

    index: int
    layers: int
    parts_s: dict[str, float]
    memory: Memory
    in_flight: int  # micro-batches whose activations it holds at once
    collectives_s: float  # of data parallelism, hidden or not
    pieces: tuple[Piece, ...] = field(repr=False)
    optimizer: Run | None = field(default=None, repr=False)
    optimizer_kernels: tuple[OpRan, ...] = field(default=(), repr=False)

    @property
    def time_s(self) -> float:
        return sum(self.parts_s.values())


@dataclass(frozen=True)
class ScaledStep:
    """A step of ``layout.gpus`` GPUs. The trace is one micro-batch of one data-parallel rank."""

    trace: Trace
    cut: Trace  # as one rank runs it
    gpu: Gpu
    layout: TrainingLayout
    time_s: float
    stages: tuple[Stage, ...]
    timetable: Timetable | None
    sample: Step  # one micro-batch of one rank, all stages one after another
    sent_bytes: float  # by a rank for data parallelism, in rings; the mean of the stages
    predictor: str

    @property
    def low_s(self) -> float:
        return self.time_s * self._spread[0]

    @property
    def high_s(self) -> float:
        return self.time_s * self._spread[1]

    @cached_property
    def _spread(self) -> tuple[float, float]:
        return interval(self.sample.kernels, self.sample.host, self.parts_s["host"] / self.time_s)

    @cached_property
    def parts_s(self) -> dict[str, float]:
        """Where the time goes, the mean of the stages; adds up to ``time_s``."""
        return {name: sum(stage.parts_s[name] for stage in self.stages) / len(self.stages) for name in PARTS}

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
    def tokens(self) -> int:
        return self.trace.tokens * self.layout.micro_batches * self.layout.dp

    @property
    def samples(self) -> int:
        return self.trace.samples * self.layout.micro_batches * self.layout.dp

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.time_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens_per_s / self.layout.gpus

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.time_s

    @cached_property
    def flops(self) -> float:
        """Of the whole step on all GPUs, as the trace has them (what checkpointing computes twice counts twice)."""
        once = sum(op_flops(op) for op in self.trace.ops if op.kind == "kernel")
        return float(once) * self.layout.micro_batches * self.layout.dp

    @property
    def mfu(self) -> float:
        return self.flops / (self.time_s * self.layout.gpus * self.gpu.mfu_flops_per_s)

    @property
    def memory(self) -> Memory:
        """Of the fullest stage."""
        return max((stage.memory for stage in self.stages), key=lambda memory: memory.used_bytes)

    @property
    def fits(self) -> bool:
        return all(stage.memory.fits for stage in self.stages)

    @property
    def shares(self) -> tuple[Share, ...]:
        """Kernels of one micro-batch of one rank by phase and kind."""
        return self.sample.shares

    @property
    def support(self) -> str:
        return self.sample.support

    def timeline(self) -> Timeline:
        """A place a stage, with its compute and communication streams. With a pipeline the passes of each stage;
        without one, every kernel."""
        lanes: list[Lane] = []
        for stage in self.stages:
            place = f"stage {stage.index}" if len(self.stages) > 1 else "one rank"
            compute, sent = _passes(self, stage) if self.timetable is not None else _kernels(stage)
            named = (("compute", compute), ("communication", sent))
            lanes += [Lane(f"{place}, {self.gpu.name}", name, tuple(events)) for name, events in named]
        return Timeline(tuple(lanes))


Streams = tuple[list[Event], list[Event]]  # of compute, of communication


def _kernels(stage: Stage) -> Streams:
    piece = stage.pieces[0]
    return _drawn(piece.passes["step"], piece.kernels["step"], 0.0)


def _drawn(run: Run, kernels: Sequence[OpRan], at_s: float) -> Streams:
    compute = [
        Event(one.op.name, at_s + start, end - start, one.part,
              {"phase": one.phase, "module": one.op.module, "bound_by": one.bound_by})
        for one, start, end in zip(kernels, run.starts_s.tolist(), run.ends_s.tolist(), strict=True)
    ]  # fmt: skip
    return compute, _jobs(run, at_s)


def _jobs(run: Run, at_s: float) -> list[Event]:
    return [
        Event(job.name, at_s + start, end - start, "communication", {"sent_bytes": job.sent_bytes})
        for job, start, end in zip(run.jobs, run.job_starts_s.tolist(), run.job_ends_s.tolist(), strict=True)
    ]


def _passes(found: ScaledStep, stage: Stage) -> Streams:
    assert found.timetable is not None
    runs = dict(zip(range(stage.index, found.layout.parts, found.layout.pp), stage.pieces, strict=True))
    compute: list[Event] = []
    sent: list[Event] = []
    for task, start, end in found.timetable.tasks[stage.index]:
        name = "backward" if task.backward else "forward"
        compute.append(Event(f"{name} {task.micro_batch}", start, end - start, name, {"part": task.part}))
        kind = "last" if task.backward and task.micro_batch == found.layout.micro_batches - 1 else name
        sent += _jobs(runs[task.part].passes[kind], start)
    if stage.optimizer is not None and stage.optimizer_kernels:
        last = _drawn(stage.optimizer, stage.optimizer_kernels, found.time_s - stage.optimizer.end_s)
        compute, sent = compute + last[0], sent + last[1]
    return compute, sent
