"""A traced training step on many GPUs: data, tensor, sequence, pipeline and expert parallelism, and ZeRO."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from kernelcast.calls import Launch
from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu
from kernelcast.networks.aten import Costed, Settings, cost
from kernelcast.networks.traced import Op, Tensor, Trace
from kernelcast.parallel.training import TrainingLayout, send_launch
from kernelcast.predict import Conditions
from kernelcast.timeline.host import Host, host
from kernelcast.timeline.streams import INTERFERENCE, Job, Run, simulate
from kernelcast.times import Times
from kernelcast.training import pipeline
from kernelcast.training.cut import cut_tensors, is_collective
from kernelcast.training.depth import Depth, optimizer_ops, parts, sent_bytes
from kernelcast.training.experts import deal_experts
from kernelcast.training.passes import Pass, moved
from kernelcast.training.ranks import Rank, memory_of
from kernelcast.training.roles import Roles
from kernelcast.training.scaled import PARTS, Piece, ScaledStep, Stage
from kernelcast.training.sharding import Sender, Weight
from kernelcast.training.step import STEP, OpRan, Step, launch_costs, predicted


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
    machine = host(on) if isinstance(on, str) else on
    return _Scaling(
        trace, gpu, layout, machine, graph, tf32, roles, interference, times or Times(gpu, conditions)
    ).run()


class _Scaling:
    """One question under way."""

    def __init__(
        self, trace: Trace, gpu: Gpu, layout: TrainingLayout, machine: Host, graph: bool, tf32: bool,
        roles: Roles | None, interference: float, times: Times,
    ) -> None:  # fmt: skip
        self.trace, self.gpu, self.layout, self.machine, self.graph = trace, gpu, layout, machine, graph
        self.interference, self.times = interference, times
        self.settings = Settings(tf32=tf32, capability=gpu.compute_capability, l2_bytes=gpu.l2_bytes)
        dealt = deal_experts(trace, layout.ep)
        self.experts = [a.elements != b.elements for a, b in zip(trace.gradients, dealt.gradients, strict=True)]
        self.cut = cut_tensors(dealt, layout.tp, layout.sequence_parallel, roles)
        self.depth = Depth(self.cut)
        self.host_s = launch_costs(self.cut, machine)
        self.gap_s = machine.graph_gap_s if graph else machine.gap_s

    # ---- times ----

    def _costs(self, op: Op) -> Costed:
        if op.phase == "optimizer" and not is_collective(op):
            return self._optimizer_costs(op)
        if not is_collective(op):
            return cost(op, self.settings)
        x = op.arguments[0]
        return Costed(tuple(self.layout.group(op.options["group"]).launches(op.name, x.bytes, x.dtype, self.gpu)))

    def _optimizer_costs(self, op: Op) -> Costed:
        """A list of parameters that no GPU holds is timed in pieces: memory is another question, answered apart."""
        pieces = math.ceil(sum(x.bytes for x in op.inputs) / (self.gpu.dram_bytes / 2))
        if pieces <= 1:
            return cost(op, self.settings)
        cuts = [tuple(x[i::pieces] if isinstance(x, tuple) else x for x in op.arguments) for i in range(pieces)]
        found = [cost(replace(op, arguments=cut), self.settings) for cut in cuts if cut[0]]
        return Costed(tuple(launch for one in found for launch in one.launches), any(one.by_bytes for one in found))

    def _collective_s(self, op: str, size_bytes: float, dtype: str, group: str) -> float:
        launches = list(self.layout.group(group).launches(op, size_bytes, dtype, self.gpu))
        return sum(self._alone_s(launch) for launch in launches)

    def _alone_s(self, launch: Launch) -> float:
        self.times.learn([launch.call])
        return self.times[launch.call].span.time_s

    @cached_property
    def kernels(self) -> dict[int, OpRan]:
        """Of forward and backward, by the op's place."""
        places = [at for at, op in enumerate(self.cut.ops) if op.kind == "kernel" and op.phase != "optimizer"]
        return dict(zip(places, predicted([self.cut.ops[at] for at in places], self.times, self._costs), strict=True))

    @cached_property
    def part_of(self) -> list[int]:
        unit_s = [0.0] * (self.depth.layers + 2)
        for at, kernel in self.kernels.items():
            unit_s[self.depth.unit[at]] += kernel.time_s
        return parts(self.depth, unit_s, self.layout.parts, self.layout.stage_layers)

    @cached_property
    def weights(self) -> list[Weight]:
        units = self.depth.gradient_units()
        found = []
        for g, unit, expert in zip(self.cut.gradients, units, self.experts, strict=True):
            dtype = {4: "fp32", 2: "bf16"}.get(g.bytes // max(1, g.elements), "fp32")
            found.append(Weight(g, unit, "expert_dp" if expert else "dp", dtype))
        return found

    @cached_property
    def rank(self) -> Rank:
        return Rank(self.trace, self.depth, self.layout, self.gpu, tuple(self.weights), tuple(self.part_of))

    # ---- passes ----

    def _pass(self, phases: Sequence[str], part: int | None) -> Pass:
        mine = [
            at for at, op in enumerate(self.cut.ops)
            if op.phase in phases and (part is None or self.part_of[self.depth.unit[at]] == part)
        ]  # fmt: skip
        return self._made([(at, self.kernels.get(at)) for at in mine])

    def _optimizer(self, part: Callable[[int], bool] | None) -> Pass:
        """The optimizer's pass over the parameters of one stage, or of their shards."""
        layout = self.layout

        def shards(x: Tensor) -> int:
            if not layout.zero:
                return 1
            return layout.dp // layout.ep if layout.ep > 1 and len(x.shape) == 3 else layout.dp

        found = list(optimizer_ops(self.depth, part, shards))
        kernels = predicted([op for _, op in found if op.kind == "kernel"], self.times, self._costs)
        left = iter(kernels)
        return self._made([(at, next(left) if op.kind == "kernel" else None) for at, op in found])

    def _made(self, found: list[tuple[int, OpRan | None]]) -> Pass:
        chosen = [(at, kernel) for at, kernel in found if kernel is not None]
        clock = np.cumsum(self.host_s[[at for at, _ in found]]) if found else np.zeros(0)
        launched = clock[[i for i, (_, kernel) in enumerate(found) if kernel is not None]] if found else clock
        if self.graph:
            launched = np.full(len(chosen), self.machine.graph_s)
        return Pass(
            kernels=tuple(kernel for _, kernel in chosen),
            places=tuple(at for at, _ in chosen),
            units=tuple(self.depth.unit[at] for at, _ in chosen),
            busy_s=np.array([kernel.time_s + self.gap_s * kernel.launches for _, kernel in chosen]),
            launched_s=launched,
            host_s=0.0 if self.graph or not len(clock) else float(clock[-1]),
        )

    def _sender(self, part: int | None) -> Sender:
        mine = [w for w in self.weights if part is None or self.part_of[w.unit] == part]
        return Sender(self.layout, self._collective_s, mine)

    # ---- without a pipeline: one run ----

    def _one_stage(self) -> tuple[float, Stage, float]:
        layout, both, step = self.layout, self._pass(("forward", "backward"), None), self._optimizer(None)
        sender, n, m = self._sender(None), len(both.kernels), layout.micro_batches
        total = m * n + len(step.kernels)
        jobs: list[Job] = []
        for i in range(m):
            start = i * n
            jobs += [moved(job, start) for job in sender.gathers(both.firsts())]
            found = sender.gradients(both.kernel_at, n - 1, m * n - start, i == m - 1)
            jobs += [moved(job, start) for job in found]
        jobs += sender.parameters(total - 1, total)
        busy = np.concatenate([both.busy_s] * m + [step.busy_s])
        launched = [both.launched_s + i * both.host_s for i in range(m)] + [step.launched_s + m * both.host_s]
        run = simulate(busy, np.concatenate(launched), jobs, self.interference)
        parts_s = self._parts([(both, run, m), (step, None, 1)], run.exposed_s)
        parts_s["host"], parts_s["slowed"] = run.host_idle_s, run.slowed_s
        memory = memory_of(self.rank, None, 1)
        piece = Piece((), {"step": run}, {"step": both.kernels * m + step.kernels})
        stage = Stage(0, self.depth.layers, parts_s, memory, 1, run.jobs_s, (piece,), optimizer_kernels=step.kernels)
        return run.end_s, stage, sum(job.sent_bytes for job in jobs)

    def _parts(self, passes: Sequence[tuple[Pass, Run | None, int]], exposed_s: float) -> dict[str, float]:
        """Sums over passes, each so many times."""
        found = dict.fromkeys(PARTS, 0.0)
        for one, run, times in passes:
            for kernel in one.kernels:
                kind = "communication" if is_collective(kernel.op) else "kernels"
                kind = "optimizer" if kernel.phase == "optimizer" and kind == "kernels" else kind
                found[kind] += times * kernel.time_s
                found["gaps"] += times * self.gap_s * kernel.launches
            if run is not None:
                found["host"] += times * run.host_idle_s
                found["slowed"] += times * run.slowed_s
        found["exposed"] = exposed_s
        return {name: float(value) for name, value in found.items()}

    # ---- with a pipeline: passes of each part, then the schedule ----

    def _part_runs(self, part: int) -> dict[str, tuple[Pass, Run]]:
        forward, backward = self._pass(("forward",), part), self._pass(("backward",), part)
        sender, n = self._sender(part), len(backward.kernels)
        found = {}
        for name, one in (("forward", forward), ("backward", backward), ("last", backward)):
            jobs = list(sender.gathers(one.firsts()))
            if name != "forward":
                jobs += sender.gradients(one.kernel_at, n - 1, n, name == "last")
            found[name] = (one, simulate(one.busy_s, one.launched_s, jobs, self.interference))
        return found

    def _links_s(self) -> list[float]:
        found = []
        for part in range(self.layout.parts - 1):
            size, dtype = sent_bytes(self.depth, self.part_of, part)
            across = self.layout.sends_between_nodes(self.gpu, part)
            found.append(self._alone_s(send_launch(size, dtype, self.layout.between_nodes if across else None)))
        return found

    def _stages(self) -> tuple[float, list[Stage], pipeline.Timetable, float]:
        layout = self.layout
        runs = [self._part_runs(part) for part in range(layout.parts)]
        order = pipeline.orders(layout.schedule, layout.pp, layout.micro_batches, layout.virtual_stages)
        timing = pipeline.Timing(
            [found["forward"][1].end_s for found in runs], [found["backward"][1].end_s for found in runs],
            [found["last"][1].compute_end_s for found in runs], self._links_s(),
        )  # fmt: skip
        table = pipeline.run(order, timing, layout.micro_batches)
        free = pipeline.run(order, replace(timing, send_s=[0.0] * len(timing.send_s)), layout.micro_batches)
        ends = [self._ending(stage, runs) for stage in range(layout.pp)]
        time_s = max(_tail_s(table, s, end, runs) + table.ends_s[s] + end[2] for s, end in enumerate(ends))
        free_s = max(_tail_s(free, s, end, runs) + free.ends_s[s] + end[2] for s, end in enumerate(ends))
        stages = [self._stage(s, runs, ends[s], order[s], free, free_s, time_s) for s in range(layout.pp)]
        sent = [
            job.sent_bytes * _times(name, layout)
            for found in runs
            for name, (_, run) in found.items()
            for job in run.jobs
        ]
        sent += [job.sent_bytes for _, run, _, _ in ends for job in run.jobs]
        return time_s, stages, table, sum(sent) / layout.pp

    def _ending(self, stage: int, runs: list[dict[str, tuple[Pass, Run]]]) -> tuple[Pass, Run, float, float]:
        """The optimizer of a stage, how long it takes with what follows, and what tied tables cost before it."""
        mine = [part for part in range(self.layout.parts) if part % self.layout.pp == stage]
        step = self._optimizer(lambda unit: self.part_of[unit] in mine)
        jobs: list[Job] = []
        for part in mine:
            jobs += self._sender(part).parameters(len(step.kernels) - 1, len(step.kernels))
        run = simulate(step.busy_s, step.launched_s, jobs, self.interference)
        tied = self.depth.tied_bytes() if stage in (0, self.layout.pp - 1) else 0.0
        joined = 0.0
        if tied:  # the first and the last stage add up their gradients of the table
            far = self.layout.gpus > self.layout.gpus_per_node
            joined = self._alone_s(send_launch(tied, "fp32", self.layout.between_nodes if far else None))
        return step, run, run.end_s, joined

    def _stage(
        self, stage: int, runs: list[dict[str, tuple[Pass, Run]]], end: tuple[Pass, Run, float, float],
        order: list[pipeline.Task], free: pipeline.Timetable, free_s: float, time_s: float,
    ) -> Stage:  # fmt: skip
        layout, (step, last, _, _) = self.layout, end
        mine = [part for part in range(layout.parts) if part % layout.pp == stage]
        passes = [(one, run, _times(name, layout)) for part in mine for name, (one, run) in runs[part].items()]
        exposed = sum(times * _inside_s(run, name) for part in mine for name, (_, run) in runs[part].items()
                      for times in (_times(name, layout),))  # fmt: skip
        exposed += _tail_s(free, stage, end, runs) + last.exposed_s
        parts_s = self._parts([*passes, (step, last, 1)], exposed)
        parts_s["links"] = float(time_s - free_s)
        parts_s["bubble"] = max(0.0, free_s - sum(v for name, v in parts_s.items() if name != "links"))
        flight = pipeline.most_in_flight(order)
        memory = memory_of(self.rank, mine, flight)
        layers = sum(1 for unit in range(1, self.depth.layers + 1) if self.part_of[unit] in mine)
        collectives = sum(run.jobs_s * times for _, run, times in passes) + last.jobs_s + end[3]
        pieces = tuple(
            Piece(
                tuple(u for u, p in enumerate(self.part_of) if p == part),
                {name: run for name, (_, run) in runs[part].items()},
                {name: one.kernels for name, (one, _) in runs[part].items()},
            )
            for part in mine
        )
        return Stage(stage, layers, parts_s, memory, flight, collectives, pieces, last, step.kernels)

    # ---- together ----

    def run(self) -> ScaledStep:
        table = None
        if self.layout.pp == 1:
            time_s, stage, sent = self._one_stage()
            stages = [stage]
        else:
            time_s, stages, table, sent = self._stages()
        every = (*self.kernels.values(), *(kernel for stage in stages for kernel in stage.optimizer_kernels))
        sample = Step(
            self.cut, self.gpu, self.machine, every, np.zeros(0), np.zeros(0), self.times.predictor, self.graph
        )
        return ScaledStep(
            self.trace,
            self.cut,
            self.gpu,
            self.layout,
            time_s,
            tuple(stages),
            table,
            sample,
            sent,
            self.times.predictor,
        )


def _times(name: str, layout: TrainingLayout) -> int:
    """How often a stage runs each kind of pass."""
    return {"forward": layout.micro_batches, "backward": layout.micro_batches - 1, "last": 1}[name]


def _inside_s(run: Run, name: str) -> float:
    """Waiting inside a pass; what is left when the last pass ends is counted once, by ``_tail_s``."""
    return run.exposed_s - (run.end_s - run.compute_end_s if name == "last" else 0.0)


def _tail_s(
    table: pipeline.Timetable, stage: int, end: tuple[Pass, Run, float, float], runs: list[dict[str, tuple[Pass, Run]]]
) -> float:
    """What of a stage's collectives is left when its last pass has ended: each part's go on behind its last pass."""
    last = max(task.micro_batch for task, _, _ in table.tasks[stage])
    channel = 0.0
    for task, start, stop in table.tasks[stage]:
        run = runs[task.part]["last"][1]
        if task.backward and task.micro_batch == last and run.jobs:
            channel = max(stop + run.end_s - run.compute_end_s, channel + run.jobs_s, start)
    return max(0.0, channel - table.ends_s[stage]) + end[3]
