"""A traced training step on many GPUs: data, tensor, sequence, pipeline and expert parallelism, and ZeRO."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from kernelcast.energy.power import total
from kernelcast.errors import KernelcastError
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict_table import Times
from kernelcast.hardware import Gpu, root_of
from kernelcast.results import Interval, Renamed
from kernelcast.schedule import Event, Lane, Memory, Timeline
from kernelcast.schedule.timeline import INTERFERENCE, Collective, Host, StreamSchedule, schedule_streams, usual_host
from kernelcast.tracing.fusion import FUSED
from kernelcast.tracing.traced import Trace
from kernelcast.training import pipeline
from kernelcast.training.layout import TrainingLayout, collective_launch
from kernelcast.training.pipeline import PipelineSchedule, sent_bytes
from kernelcast.training.placement import is_collective
from kernelcast.training.rank import Rank
from kernelcast.training.step import STEP, LaunchQueue, OpKernels, StepForecast, calibrated_host, gap_s
from kernelcast.training.tensor_parallel import TensorParallelPlan

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
class RankPass:
    """Kernels and collectives of a rank in time, ``count`` times in a step.

    ``name`` with a pipeline: ``forward`` and ``backward`` of one micro-batch through a ``part`` of the model; in
    ``last`` the gradients are sent; ``optimizer``. Without a pipeline ``step`` is the whole step.
    """

    name: str
    part: int
    kernels: tuple[OpKernels, ...]
    run: StreamSchedule
    count: int = 1

    @property
    def behind_s(self) -> float:
        """Time of the last pass's collectives beyond its kernels: the next pass need not wait for them."""
        return self.run.end_s - self.run.compute_end_s if self.name == "last" else 0.0

    def job_events(self, at_s: float) -> list[Event]:
        """Its communication stream, from ``at_s`` on."""
        times = zip(self.run.jobs, self.run.job_starts_s.tolist(), self.run.job_ends_s.tolist(), strict=True)
        return [
            Event(job.name, at_s + start, end - start, "communication", {"sent_bytes": job.sent_bytes})
            for job, start, end in times
        ]

    def kernel_events(self, at_s: float) -> list[Event]:
        """Its compute stream."""
        times = zip(self.kernels, self.run.starts_s.tolist(), self.run.ends_s.tolist(), strict=True)
        return [
            Event(kernel.op.name, at_s + start, end - start, kernel.part,
                  {"phase": kernel.phase, "module": kernel.op.module, "bound_by": kernel.bound_by})
            for kernel, start, end in times
        ]  # fmt: skip


def time_parts(passes: Iterable[RankPass], gap_s: float) -> dict[str, float]:
    """The ``PARTS`` of a rank's time that its passes have."""
    parts_s = dict.fromkeys(PARTS, 0.0)
    for each in passes:
        inside_s = each.run.busy_s  # of it, what the kernels of an op wait for each other's launches
        for kernel in each.kernels:
            part = "optimizer" if kernel.phase == "optimizer" else "kernels"
            parts_s["communication" if is_collective(kernel.op) else part] += each.count * kernel.time_s
            parts_s["gaps"] += each.count * gap_s * kernel.launches
            inside_s -= kernel.time_s + gap_s * kernel.launches
        parts_s["host"] += each.count * (each.run.host_idle_s + inside_s)
        parts_s["slowed"] += each.count * each.run.slowed_s
        parts_s["exposed"] += each.count * (each.run.exposed_s - each.behind_s)
    return {name: float(value) for name, value in parts_s.items()}


@dataclass(frozen=True)
class PipelineStage:
    """A rank of a stage; without a pipeline there is one stage."""

    index: int
    layers: int
    parts_s: dict[str, float]
    memory: Memory
    in_flight: float  # micro-batches whose activations it holds at once; a virtual stage has a part of one
    tied_s: float  # all-reduce of gradients of an embedding that is tied across stages
    passes: tuple[RankPass, ...] = field(repr=False)  # the optimizer's, or the whole step, is the last

    @property
    def time_s(self) -> float:
        return sum(self.parts_s.values())

    @property
    def collectives_s(self) -> float:
        """Time of data-parallel collectives, overlapped or not."""
        return sum(each.count * each.run.jobs_s for each in self.passes) + self.tied_s

    @property
    def sent_bytes(self) -> float:
        """Bytes that a rank sends for data parallelism, in rings."""
        return sum(each.count * job.sent_bytes for each in self.passes for job in each.run.jobs)


@dataclass(frozen=True, kw_only=True)
class ScaledStep(StepForecast, Renamed):
    """A step of ``layout.gpus`` GPUs. The trace is one micro-batch of one data-parallel rank; ``kernels`` are those of
    all stages one after another, and the optimizer's."""

    _renamed = {"cut": "rank_trace", "timetable": "schedule"}

    rank_trace: Trace  # as one rank runs it
    layout: TrainingLayout
    stages: tuple[PipelineStage, ...]
    schedule: PipelineSchedule | None
    compiled: bool = False

    @cached_property
    def energy(self) -> Interval | None:
        """Joules of the step on all GPUs; a rank that waits, or only communicates, draws idle power."""
        drawn = [self.drawn_by((kernel, run.count) for run in stage.passes for kernel in run.kernels)
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
        """Bytes that a rank sends for data parallelism, in rings; the mean of the stages."""
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
        """Memory of the fullest stage."""
        return max((stage.memory for stage in self.stages), key=lambda memory: memory.used_bytes)

    @property
    def fits(self) -> bool:
        return all(stage.memory.fits for stage in self.stages)

    def timeline(self) -> Timeline:
        """Compute and communication streams of each stage: the passes of a pipeline; without one, every kernel."""
        lanes: list[Lane] = []
        for stage in self.stages:
            name = f"stage {stage.index}" if len(self.stages) > 1 else "one rank"
            compute, sent = self._passes(stage)
            end, start_s = stage.passes[-1], self.time_s - stage.passes[-1].run.end_s
            streams = {
                "compute": compute + end.kernel_events(start_s),
                "communication": sent + end.job_events(start_s),
            }
            lanes += [Lane(f"{name}, {self.gpu.name}", stream, tuple(events)) for stream, events in streams.items()]
        return Timeline(tuple(lanes))

    def _passes(self, stage: PipelineStage) -> tuple[list[Event], list[Event]]:
        """Events of a pipeline's passes: compute, communication."""
        passes = {(each.name, each.part): each for each in stage.passes}
        compute: list[Event] = []
        sent: list[Event] = []
        for task, start, end in self.schedule.tasks[stage.index] if self.schedule else ():
            name = "backward" if task.backward else "forward"
            compute.append(Event(f"{name} {task.micro_batch}", start, end - start, name, {"part": task.part}))
            key = "last" if task.backward and task.micro_batch == self.layout.micro_batches - 1 else name
            sent += passes[key, task.part].job_events(start)
        return compute, sent


def scale(
    trace: Trace,
    gpu: Gpu,
    layout: TrainingLayout,
    conditions: Conditions = STEP,
    *,
    tf32: bool = False,
    graph: bool = False,
    on: str | Host | None = None,
    tp_plan: TensorParallelPlan | None = None,
    compiled: bool = False,
    interference: float = INTERFERENCE,
    times: Times | None = None,
) -> ScaledStep:
    """Predict a step of ``layout.gpus`` GPUs. ``trace`` is ONE micro-batch of ONE data-parallel rank, of the whole
    model: a step reads ``layout.dp * layout.micro_batches`` times its tokens. ``tp_plan``: which layers are
    sharded, and how. ``compiled``: each rank's ops are fused, as torch.compile does. ``interference``: share of their
    speed that kernels lose beside a collective.
    """
    if any(op.name == FUSED for op in trace.ops):
        raise KernelcastError(f"{trace.name} is fused already: give the trace as it was, and compiled=True")
    if trace.mode != "training" or not trace.gradients:
        raise KernelcastError(f"{trace.name} is no trace of a training step; trace it with mode='training'")
    if layout.dp % layout.ep or layout.expert_tp > 1 or layout.cp > 1:
        raise KernelcastError(
            f"a traced model takes ep that divides dp, no expert_tp and no cp, not {layout.label}: give a bundled model"
        )
    if not 0 <= interference < 1:
        raise KernelcastError(f"interference is a share from 0 to below 1, not {interference}")
    machine = calibrated_host(on or usual_host(root_of(gpu).id), conditions)
    rank = Rank(trace, layout, times or Times(gpu, conditions), machine, graph, tf32, tp_plan, compiled)
    if layout.pp == 1:
        table, stages = None, [_whole_step(rank, interference)]
        time_s = stages[0].passes[0].run.end_s
    else:
        time_s, table, stages = _Pipeline(rank, interference).run()
    passes = [kernel for kernel in rank.kernels.values() if kernel is not None]
    ends = [kernel for stage in stages for kernel in stage.passes[-1].kernels if kernel.phase == "optimizer"]
    return ScaledStep(
        trace=trace, rank_trace=rank.rank_trace, gpu=gpu, host=machine, layout=layout, gpus=layout.gpus,
        passes=layout.micro_batches * layout.dp, time_s=time_s, stages=tuple(stages), schedule=table,
        kernels=(*passes, *ends), predictor=rank.times.predictor, times=rank.times, tf32=tf32, compiled=compiled,
    )  # fmt: skip


def _whole_step(rank: Rank, interference: float) -> PipelineStage:
    """Without a pipeline: all micro-batches and the optimizer in one run."""
    both, step, sender = rank.queue(0, "forward", "backward"), rank.optimizer(0), rank.sender(0)
    count, kernels = rank.layout.micro_batches, len(both.kernels)
    jobs: list[Collective] = []
    for i in range(count):
        start = i * kernels
        added = [*sender.gathers(both), *sender.gradients(both, count * kernels - start, final=i == count - 1)]
        jobs += [replace(job, after=job.after + start, before=job.before + start) for job in added]
    jobs += sender.parameters(count * kernels + len(step.kernels))
    busy = np.concatenate([both.busy_s] * count + [step.busy_s])
    launched = [both.launched_s + i * both.host_s for i in range(count)] + [step.launched_s + count * both.host_s]
    run = schedule_streams(busy, np.concatenate(launched), jobs, interference)
    whole = RankPass("step", 0, both.kernels * count + step.kernels, run)
    parts_s = time_parts([whole], gap_s(rank.machine, rank.graph))
    memory = rank.memory(0, [pipeline.PipelineTask(backward, 0, 0) for backward in (False, True)])
    return PipelineStage(0, rank.layers.count, parts_s, memory, 1, 0.0, (whole,))


class _Pipeline:
    """Passes of each part of the model run alone, then the schedule orders them."""

    def __init__(self, rank: Rank, interference: float) -> None:
        self.rank, self.layout, self.interference = rank, rank.layout, interference
        self.passes = [self._passes(part) for part in range(self.layout.parts)]
        self.ends = [self._end(stage) for stage in range(self.layout.pp)]
        self.tied_s = [self._tied_s(stage) for stage in range(self.layout.pp)]

    def run(self) -> tuple[float, pipeline.PipelineSchedule, list[PipelineStage]]:
        layout = self.layout
        order = pipeline.orders(layout.schedule, layout.pp, layout.micro_batches, layout.virtual_stages)
        timing = pipeline.PipelineTimes(
            forward_s=[passes["forward"].run.end_s for passes in self.passes],
            backward_s=[passes["backward"].run.end_s for passes in self.passes],
            last_backward_s=[passes["last"].run.compute_end_s for passes in self.passes],
            send_s=[self._link_s(part) for part in range(layout.parts - 1)],
        )
        table = pipeline.run(order, timing, layout.micro_batches)
        free = pipeline.run(order, replace(timing, send_s=[0.0] * len(timing.send_s)), layout.micro_batches)
        time_s, free_s = self._end_s(table), self._end_s(free)
        stages = [self._stage(stage, order[stage], free, free_s, time_s - free_s) for stage in range(layout.pp)]
        return time_s, table, stages

    def _pass(self, name: str, part: int, queue: LaunchQueue, jobs: list[Collective], count: int) -> RankPass:
        run = schedule_streams(queue.busy_s, queue.launched_s, jobs, self.interference)
        return RankPass(name, part, queue.kernels, run, count)

    def _passes(self, part: int) -> dict[str, RankPass]:
        """Passes through a part by name, with how often each runs."""
        forward, backward = self.rank.queue(part, "forward"), self.rank.queue(part, "backward")
        sender, count, kernels = self.rank.sender(part), self.layout.micro_batches, len(backward.kernels)
        gathers = list(sender.gathers(backward))
        early, last = (gathers + list(sender.gradients(backward, kernels, final)) for final in (False, True))
        passes = (
            self._pass("forward", part, forward, list(sender.gathers(forward)), count),
            self._pass("backward", part, backward, early, count - 1),
            self._pass("last", part, backward, last, 1),
        )
        return {each.name: each for each in passes}

    def _end(self, stage: int) -> RankPass:
        """The optimizer of a stage, and what follows it."""
        step = self.rank.optimizer(stage)
        parts = self.rank.parts_of(stage)
        jobs = [job for part in parts for job in self.rank.sender(part).parameters(len(step.kernels))]
        return self._pass("optimizer", -1, step, jobs, 1)

    def _tied_s(self, stage: int) -> float:
        """The first and the last stage all-reduce their gradients of a tied embedding."""
        tied = self.rank.layers.tied_bytes(frozen=False) if stage in (0, self.layout.pp - 1) else 0.0
        return self._sent_s(tied, "fp32", self.layout.gpus > self.layout.gpus_per_node) if tied else 0.0

    def _link_s(self, part: int) -> float:
        """To send a part's result on to the next."""
        size, dtype = sent_bytes(self.rank.layers, self.rank.part_of, part)
        return self._sent_s(size, dtype, self.layout.sends_between_nodes(self.rank.gpu, part))

    def _sent_s(self, size_bytes: float, dtype: str, across: bool) -> float:
        fabric = self.layout.between_nodes if across else None
        return self.rank.launches_s([collective_launch("send_recv", size_bytes, 2, dtype, fabric)])

    def _end_s(self, table: pipeline.PipelineSchedule) -> float:
        """When the last stage has ended, its optimizer included."""
        ends = enumerate(table.ends_s)
        return max(self._tail_s(table, stage) + end_s + self.ends[stage].run.end_s for stage, end_s in ends)

    def _tail_s(self, table: pipeline.PipelineSchedule, stage: int) -> float:
        """Time of a stage's collectives after its last pass has ended: those of each part continue behind its last
        pass."""
        channel_s = 0.0
        for task, start, stop in table.tasks[stage]:
            last = self.passes[task.part]["last"]
            if task.backward and task.micro_batch == self.layout.micro_batches - 1 and last.run.jobs:
                channel_s = max(stop + last.behind_s, channel_s + last.run.jobs_s, start)
        return max(0.0, channel_s - table.ends_s[stage]) + self.tied_s[stage]

    def _stage(
        self, stage: int, order: Sequence[pipeline.PipelineTask], free: pipeline.PipelineSchedule, free_s: float,
        links_s: float,
    ) -> PipelineStage:  # fmt: skip
        """``free``: the schedule with links that cost nothing, and when that ends."""
        rank, mine = self.rank, self.rank.parts_of(stage)
        passes = [each for part in mine for each in self.passes[part].values()] + [self.ends[stage]]
        parts_s = time_parts(passes, gap_s(rank.machine, rank.graph))
        parts_s["exposed"] += self._tail_s(free, stage)
        parts_s["bubble"] = max(0.0, free_s - sum(parts_s.values()))
        parts_s["links"] = links_s
        layers = sum(rank.part_of[unit] in mine for unit in range(1, rank.layers.count + 1))
        in_flight = pipeline.most_in_flight(order) / self.layout.virtual_stages
        return PipelineStage(
            stage, layers, parts_s, rank.memory(stage, order), in_flight, self.tied_s[stage], tuple(passes)
        )
