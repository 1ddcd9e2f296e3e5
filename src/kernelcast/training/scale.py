"""A traced training step on many GPUs: data, tensor, sequence, pipeline and expert parallelism, and ZeRO."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kernelcast.errors import KernelcastError
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict_table import Times
from kernelcast.hardware import Gpu
from kernelcast.schedule.timeline import INTERFERENCE, Host, Job, simulate
from kernelcast.tracing.traced import Trace
from kernelcast.training import pipeline
from kernelcast.training.depth import sent_bytes
from kernelcast.training.layout import TrainingLayout, collective_launch
from kernelcast.training.queued import Queue, gap_s, machine_of
from kernelcast.training.ranks import Rank
from kernelcast.training.roles import Roles
from kernelcast.training.scaled import Played, ScaledStep, Stage, parts_of
from kernelcast.training.step import STEP


def scale(
    trace: Trace,
    gpu: Gpu,
    layout: TrainingLayout,
    conditions: Conditions = STEP,
    *,
    tf32: bool = False,
    graph: bool = False,
    on: str | Host = "server",
    roles: Roles | None = None,
    interference: float = INTERFERENCE,
    times: Times | None = None,
) -> ScaledStep:
    """Predict a step of ``layout.gpus`` GPUs. ``trace`` is ONE micro-batch of ONE data-parallel rank, of the whole
    model: a step reads ``layout.dp * layout.micro_batches`` times its tokens. ``roles``: the table of names by which
    tensor parallelism cuts layers. ``interference``: share of their speed that kernels lose beside a collective.
    """
    if trace.mode != "training" or not trace.gradients:
        raise KernelcastError(f"{trace.name} is no trace of a training step; trace it with mode='training'")
    if not 0 <= interference < 1:
        raise KernelcastError(f"interference is a share from 0 to below 1, not {interference}")
    machine = machine_of(on, conditions)
    rank = Rank(trace, layout, times or Times(gpu, conditions), machine, graph, tf32, roles)
    if layout.pp == 1:
        table, stages = None, [_whole_step(rank, interference)]
        time_s = stages[0].played[0].run.end_s
    else:
        time_s, table, stages = _Pipeline(rank, interference).run()
    passes = [kernel for kernel in rank.kernels.values() if kernel is not None]
    ends = [kernel for stage in stages for kernel in stage.played[-1].kernels if kernel.phase == "optimizer"]
    return ScaledStep(
        trace=trace, cut=rank.cut, gpu=gpu, host=machine, layout=layout, gpus=layout.gpus,
        passes=layout.micro_batches * layout.dp, time_s=time_s, stages=tuple(stages), timetable=table,
        kernels=(*passes, *ends), predictor=rank.times.predictor, times=rank.times,
    )  # fmt: skip


def _whole_step(rank: Rank, interference: float) -> Stage:
    """Without a pipeline: all micro-batches and the optimizer in one run."""
    both, step, sender = rank.queue(0, "forward", "backward"), rank.optimizer(0), rank.sender(0)
    count, kernels = rank.layout.micro_batches, len(both.kernels)
    jobs: list[Job] = []
    for i in range(count):
        start = i * kernels
        found = [*sender.gathers(both), *sender.gradients(both, count * kernels - start, final=i == count - 1)]
        jobs += [replace(job, after=job.after + start, before=job.before + start) for job in found]
    jobs += sender.parameters(count * kernels + len(step.kernels))
    busy = np.concatenate([both.busy_s] * count + [step.busy_s])
    launched = [both.launched_s + i * both.host_s for i in range(count)] + [step.launched_s + count * both.host_s]
    run = simulate(busy, np.concatenate(launched), jobs, interference)
    played = Played("step", 0, both.kernels * count + step.kernels, run)
    parts_s = parts_of([played], gap_s(rank.machine, rank.graph))
    return Stage(0, rank.depth.layers, parts_s, rank.memory(0, 1), 1, 0.0, (played,))


class _Pipeline:
    """Passes of each part of the model run alone, then the schedule orders them."""

    def __init__(self, rank: Rank, interference: float) -> None:
        self.rank, self.layout, self.interference = rank, rank.layout, interference
        self.passes = [self._passes(part) for part in range(self.layout.parts)]
        self.ends = [self._end(stage) for stage in range(self.layout.pp)]
        self.tied_s = [self._tied_s(stage) for stage in range(self.layout.pp)]

    def run(self) -> tuple[float, pipeline.Timetable, list[Stage]]:
        layout = self.layout
        order = pipeline.orders(layout.schedule, layout.pp, layout.micro_batches, layout.virtual_stages)
        timing = pipeline.Timing(
            forward_s=[found["forward"].run.end_s for found in self.passes],
            backward_s=[found["backward"].run.end_s for found in self.passes],
            last_backward_s=[found["last"].run.compute_end_s for found in self.passes],
            send_s=[self._link_s(part) for part in range(layout.parts - 1)],
        )
        table = pipeline.run(order, timing, layout.micro_batches)
        free = pipeline.run(order, replace(timing, send_s=[0.0] * len(timing.send_s)), layout.micro_batches)
        time_s, free_s = self._end_s(table), self._end_s(free)
        stages = [
            self._stage(stage, pipeline.most_in_flight(order[stage]), free, free_s, time_s - free_s)
            for stage in range(layout.pp)
        ]
        return time_s, table, stages

    def _played(self, name: str, part: int, queue: Queue, jobs: list[Job], count: int) -> Played:
        run = simulate(queue.busy_s, queue.launched_s, jobs, self.interference)
        return Played(name, part, queue.kernels, run, count)

    def _passes(self, part: int) -> dict[str, Played]:
        """Each kind of pass through a part, with how often it runs."""
        forward, backward = self.rank.queue(part, "forward"), self.rank.queue(part, "backward")
        sender, count, kernels = self.rank.sender(part), self.layout.micro_batches, len(backward.kernels)
        gathers = list(sender.gathers(backward))
        early, last = (gathers + list(sender.gradients(backward, kernels, final)) for final in (False, True))
        found = (
            self._played("forward", part, forward, list(sender.gathers(forward)), count),
            self._played("backward", part, backward, early, count - 1),
            self._played("last", part, backward, last, 1),
        )
        return {one.name: one for one in found}

    def _end(self, stage: int) -> Played:
        """The optimizer of a stage, and what follows it."""
        step = self.rank.optimizer(stage)
        parts = self.rank.parts_of(stage)
        jobs = [job for part in parts for job in self.rank.sender(part).parameters(len(step.kernels))]
        return self._played("optimizer", -1, step, jobs, 1)

    def _tied_s(self, stage: int) -> float:
        """The first and the last stage add up their gradients of a table that both have."""
        tied = self.rank.depth.tied_bytes() if stage in (0, self.layout.pp - 1) else 0.0
        return self._sent_s(tied, "fp32", self.layout.gpus > self.layout.gpus_per_node) if tied else 0.0

    def _link_s(self, part: int) -> float:
        """To send a part's result on to the next."""
        size, dtype = sent_bytes(self.rank.depth, self.rank.part_of, part)
        return self._sent_s(size, dtype, self.layout.sends_between_nodes(self.rank.gpu, part))

    def _sent_s(self, size_bytes: float, dtype: str, across: bool) -> float:
        fabric = self.layout.between_nodes if across else None
        return self.rank.launches_s([collective_launch("send_recv", size_bytes, 2, dtype, fabric)])

    def _end_s(self, table: pipeline.Timetable) -> float:
        """When the last stage has ended, its optimizer included."""
        ends = enumerate(table.ends_s)
        return max(self._tail_s(table, stage) + end_s + self.ends[stage].run.end_s for stage, end_s in ends)

    def _tail_s(self, table: pipeline.Timetable, stage: int) -> float:
        """What of a stage's collectives is left when its last pass has ended: each part's go on behind its last
        pass."""
        channel_s = 0.0
        for task, start, stop in table.tasks[stage]:
            last = self.passes[task.part]["last"]
            if task.backward and task.micro_batch == self.layout.micro_batches - 1 and last.run.jobs:
                channel_s = max(stop + last.behind_s, channel_s + last.run.jobs_s, start)
        return max(0.0, channel_s - table.ends_s[stage]) + self.tied_s[stage]

    def _stage(self, stage: int, in_flight: int, free: pipeline.Timetable, free_s: float, links_s: float) -> Stage:
        """``free``: the timetable with links that cost nothing, and when that ends."""
        rank, mine = self.rank, self.rank.parts_of(stage)
        played = [one for part in mine for one in self.passes[part].values()] + [self.ends[stage]]
        parts_s = parts_of(played, gap_s(rank.machine, rank.graph))
        parts_s["exposed"] += self._tail_s(free, stage)
        parts_s["bubble"] = max(0.0, free_s - sum(parts_s.values()))
        parts_s["links"] = links_s
        layers = sum(rank.part_of[unit] in mine for unit in range(1, rank.depth.layers + 1))
        memory = rank.memory(stage, in_flight)
        return Stage(stage, layers, parts_s, memory, in_flight, self.tied_s[stage], tuple(played))
