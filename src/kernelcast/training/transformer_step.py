"""The time of a training step of a transformer: units of layers, the pipeline's schedule, what no kernel hides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kernelcast.energy.power import held_s
from kernelcast.forecast.calls import Call
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict_table import Times
from kernelcast.hardware import root_of
from kernelcast.hardware.gpu import WGMMA
from kernelcast.ops.dtypes import find_dtype
from kernelcast.ops.work import Array
from kernelcast.schedule import Host
from kernelcast.training import job_work
from kernelcast.training.job import TrainingJob
from kernelcast.training.layer_kernels import CONTEXT, EXPERT, PASSES, TENSOR, Pass, Unit
from kernelcast.training.passes import Builder
from kernelcast.training.schedules import dual_pipe_end, stage_ends
from kernelcast.training.step import STEP, calibrated_host
from kernelcast.training.training_forecast import TrainingForecast

PARTS = (
    "compute", "recompute", TENSOR, CONTEXT, EXPERT, "data parallel", "pipeline", "bubble", "optimizer", "offload",
    "host",
)  # fmt: skip
_KINDS = ("compute", TENSOR, CONTEXT, EXPERT)  # of a pass
# Of Hopper's tensor cores: joules of a FLOP go with the bytes of a number to this power. Products repeated at the limit
# of an H200 do 667 TFLOP/s in bf16 and 1,132 in fp8, medians (validation/power_h200_sxm.parquet).
_NARROWER = 0.76
_BEHIND = 0.9  # of a pass's kernels that exchanges of experts can run beside, where another micro-batch's overlap them


@dataclass(frozen=True)
class UnitTimes:
    """Seconds of a unit by pass and by kind, (4, 4); by pass those of the host, and of gaps between kernels."""

    seconds: Array
    host_s: Array
    gaps_s: Array
    sync_s: float  # of the host with the GPU, forward

    @classmethod
    def of(cls, unit: Unit, job: TrainingJob, times: Times) -> UnitTimes:
        passes = [getattr(unit, name) for name in PASSES]
        seconds = np.array([_seconds(each, job, times) for each in passes])
        ops = np.array([_launches(each, job) for each in passes])
        gaps_s, sync_s = np.zeros(len(PASSES)), unit.syncs * job.stack.sync_s * (job.cuda_graphs != "full")
        if job.stack.host:
            machine = calibrated_host(job.stack.host, times.conditions)
            kernels = np.array([_launches(each, job, times) for each in passes])
            host_s, gaps_s = _eager_s(unit, ops, kernels, job, machine), machine.gap_s * kernels
        else:
            host_s = job.stack.launch_s * ops
        return cls(seconds, host_s, gaps_s, sync_s)


def _eager_s(unit: Unit, ops: Array, kernels: Array, job: TrainingJob, machine: Host) -> Array:
    """Of the host, by pass: kernels, and what PyTorch and Python do for their ops and beside them."""
    recorded_s, backward_s = machine.recorded_s, machine.backward_s
    more_s = (kernels - ops) * (machine.series_s or machine.launch_s)
    seconds = ops * machine.launch_s + more_s + ops * np.array([recorded_s, backward_s, backward_s, recorded_s])
    if not job.cuda_graphs:
        views = job.stack.linear_views
        seconds[0] += unit.linears * (views[0] * machine.view_s + job.stack.linear_calls * machine.python_s)
        seconds[1] += unit.linears * views[1] * machine.backward_view_s
    return seconds


def _launches(one: Pass, job: TrainingJob, times: Times | None = None) -> float:
    """Ops that the host launches one by one, none of what a CUDA graph has; with ``times`` their kernels."""
    if job.cuda_graphs == "full":
        return 0.0
    outside = ("experts", "permutation", EXPERT) if job.cuda_graphs else None
    kernels = sum(
        kernel.launches * (times[kernel.call].launches if times else 1.0)
        for kernel in one.kernels
        if outside is None or kernel.part in outside
    )
    return kernels + sum(len(x.launches) for x in one.exchanges if outside is None or x.part in outside)


def call_s(call: Call, times: Times) -> float:
    """Of a call in a run that lasts: at the GPU's power limit, or at a lower one (``held_s``)."""
    gpu, time_s = times.gpu, times[call].interval.value
    per_j = gpu.sustained_flops_per_j or gpu.tensor_flops_per_j
    if per_j is None or call.op not in ("gemm", "attention"):
        return time_s + held_s(call, time_s, times)
    given = call.arguments
    joules = (find_dtype(given["dtype"]).act_bytes / 2) ** (_NARROWER if gpu.instruction_path == WGMMA else 1.0)
    if call.op == "gemm":
        flops = 2.0 * given["m"] * given["n"] * given["k"]
    else:
        queries, keys = given["q_len"], given["kv_len"]
        seen = keys - (queries - 1) / 2 if given["causal"] else keys
        flops = 4.0 * given["batch"] * given["q_heads"] * given["head_dim"] * queries * seen
    time_s = max(time_s, float(flops * joules / (per_j * root_of(gpu).power_w)))
    return time_s + held_s(call, time_s, times)


def _seconds(one: Pass, job: TrainingJob, times: Times) -> list[float]:
    """Of a pass: its kernels, and by kind what exchanges add: what no kernel hides, and what the kernels beside them
    lose to the SMs and the memory that a collective takes."""
    by_kind = dict.fromkeys(_KINDS, 0.0)
    by_kind["compute"] = sum(k.count * call_s(k.call, times) for k in one.kernels)
    for exchange in one.exchanges:
        sent = sum(job_work.exchange_s(launch, times) for launch in exchange.launches)
        beside = sum(k.count * call_s(k.call, times) for k in exchange.beside)
        hidden = min(sent, beside)
        first = hidden / exchange.pieces if exchange.pieces else 0.0
        by_kind[exchange.part] += sent - hidden + first + job.stack.interference * (hidden - first)
        if not exchange.beside and job.cuda_graphs != "full":
            by_kind[exchange.part] += job.stack.skew_s
    return list(by_kind.values())


def _calls(unit: Unit) -> Iterable[Call]:
    for name in PASSES:
        one: Pass = getattr(unit, name)
        for kernel in one.kernels:
            yield kernel.call
        for exchange in one.exchanges:
            for launch in exchange.launches:
                yield launch.call


class Plan:
    """A job as its units, before anything is timed. Units of equal jobs are built once (``built``)."""

    def __init__(self, job: TrainingJob, built: dict[Any, Any]) -> None:
        self.job, layout = job, job.layout
        shape = _shape(job)
        self.units: Mapping[Any, Unit] = built.get(shape) or built.setdefault(shape, _units(job))
        self.shape = shape
        self.parts: list[dict[Any, int]] = []  # units of each part of the model, with their count
        layers, at = [run.layer for run in job.model.layers for _ in range(run.count)], 0
        for part, count in enumerate(job.part_layers):
            some: dict[Any, int] = {}
            for layer in layers[at : at + count]:
                some[id(layer)] = some.get(id(layer), 0) + 1
            at += count
            if part == 0:
                some["embedding"] = 1
            if part == layout.parts - 1:
                modules = job.model.mtp_layers if job.mtp else 0
                some["head"] = 1 + modules
                if modules:
                    some["mtp"] = modules
                for run in job.model.mtp_module if modules else ():
                    some[id(run.layer)] = some.get(id(run.layer), 0) + modules * run.count
            self.parts.append(some)
        self.work = job_work.Work(job, self.parts)

    def calls(self) -> Iterable[Call]:
        yield from self.work.calls()

    def layers_again(self, part: int) -> float:
        """The share of a part's layers whose forward pass runs again as a whole."""
        again = self.job.recompute
        layers = sum(count for name, count in self.parts[part].items() if isinstance(name, int))
        if again.mode != "full" or not layers:
            return 0.0
        return min(1.0, again.layers / layers) if again.method == "block" and again.layers else 1.0

    def passes(self, stage: int) -> Iterable[tuple[str, Pass, float]]:
        """Of a stage: each pass of its units, with how often it runs in a step."""
        for part in range(stage, self.job.layout.parts, self.job.layout.pp):
            again = self.layers_again(part)
            for name, count in self.parts[part].items():
                unit, times = self.units[name], count * self.job.layout.micro_batches
                yield from ((phase, getattr(unit, phase), times) for phase in PASSES)
                if again and isinstance(name, int):
                    yield "recompute", unit.forward, times * again


def _shape(job: TrainingJob) -> tuple[Any, ...]:
    """What decides the units: the same for many layouts."""
    layout = job.layout
    return (
        id(job.model), job.gpu.id, job.seq, job.micro_batch, layout.tp, layout.cp, layout.cp_comm, layout.ep,
        layout.expert_tp, layout.sequence_parallel, layout.gpus_per_node, layout.between_nodes, job.stack,
        job.precision, job.recompute.mode == "selective" and job.recompute.modules, job.lora, job.tp_overlap,
        job.routing, job.packed and job.mean_length, job.dispatcher, job.cuda_graphs, job.mtp, job.expert_overlap,
        layout.micro_batches > 1,
    )  # fmt: skip


def _units(job: TrainingJob) -> dict[Any, Unit]:
    builder = Builder(job)
    units: dict[Any, Unit] = {id(run.layer): builder.layer(run.layer) for run in job.model.layers}
    units |= {"embedding": builder.embedding(), "head": builder.head()}
    if job.mtp:
        units |= {id(run.layer): builder.layer(run.layer) for run in job.model.mtp_module}
        units["mtp"] = builder.joined()
    return units


def forecast(job: TrainingJob, conditions: Conditions = STEP, times: Times | None = None) -> TrainingForecast:
    """Predict a step."""
    return forecast_many([job], conditions, times)[0]


def forecast_many(
    jobs: Sequence[TrainingJob], conditions: Conditions = STEP, times: Times | None = None
) -> list[TrainingForecast]:
    """Predict a step of each job; every distinct kernel call of all of them is predicted once, together. ``times``: of
    the jobs' GPU."""
    built: dict[Any, Any] = {}
    plans = [Plan(job, built) for job in jobs]
    by_gpu: dict[str, Times] = {times.gpu.id: times} if times else {}
    calls: dict[str, dict[Call, None]] = {}
    seen: set[Any] = set()
    for plan in plans:
        gpu = plan.job.gpu
        by_gpu.setdefault(gpu.id, Times(gpu, conditions))
        some = calls.setdefault(gpu.id, {})
        some.update(dict.fromkeys(plan.calls()))
        if plan.shape not in seen:
            seen.add(plan.shape)
            some.update(dict.fromkeys(call for unit in plan.units.values() for call in _calls(unit)))
    for gpu_id, wanted in calls.items():
        by_gpu[gpu_id].predict(wanted)
    timed: dict[Any, dict[Any, UnitTimes]] = {}
    stages = [_Stages(plan, by_gpu[plan.job.gpu.id], timed) for plan in plans]
    _schedule(stages)
    return [each.result() for each in stages]


class _Stages:
    """Seconds of the parts of a job's model, (parts, passes, kinds), and of what a stage does once a step. ``ends``:
    when each stage has done its passes, with links and with links that cost nothing; ``_schedule`` says."""

    ends: tuple[list[float], list[float]]

    def __init__(self, plan: Plan, times: Times, timed: dict[Any, dict[Any, UnitTimes]]) -> None:
        self.plan, self.job, self.times = plan, plan.job, times
        job, layout = plan.job, plan.job.layout
        if plan.shape not in timed:
            timed[plan.shape] = {name: UnitTimes.of(unit, job, times) for name, unit in plan.units.items()}
        units = timed[plan.shape]
        self.seconds = np.zeros((layout.parts, 4, 4))
        for part, some in enumerate(plan.parts):
            for name, count in some.items():
                self.seconds[part] += count * units[name].seconds
        self.again = self._recomputed(units)  # (parts,): of the backward pass
        self.units = units
        self.host, self.update_host_s = self._waits()
        if job.expert_overlap or layout.schedule == "dualpipe":
            self._overlap_experts()
        self.sharded = plan.work.sharded_s(self.times, self._pass_s(), units)  # (parts, 2): of FSDP, each pass
        busy = self._pass_s() + np.pad(self.sharded, ((0, 0), (0, 1)))
        self.tasks = (busy + self.host).T  # (3, parts)
        self.offload_s = plan.work.activation_offload_s(self.tasks)
        self.tasks = self.tasks + self.offload_s
        self.send_s = plan.work.send_s(times)

    @cached_property
    def machine(self) -> Host | None:
        return calibrated_host(self.job.stack.host, self.times.conditions) if self.job.stack.host else None

    def _waits(self, slower: float = 1.0) -> tuple[Array, Array]:
        """What the GPU waits for the host, (parts, 3), and before the update, (parts,): the host runs ahead of a pass
        whose kernels take longer, and the GPU has what it launched then. ``slower``: the host's times so many times."""
        waits, update_s = np.zeros((len(self.plan.parts), 3)), np.zeros(len(self.plan.parts))
        units, machine = self.units, self.machine
        for part, some in enumerate(self.plan.parts):
            order = sorted(some.items(), key=lambda each: each[0] == "head")
            host = gpu = 0.0
            for at, mine, passes in ((0, order, [0]), (1, order[::-1], [1, 2, 3])):
                busy, start = 0.0, gpu
                again = self.plan.layers_again(part) if at else 0.0
                for name, count in mine:
                    unit, runs = units[name], np.zeros(len(PASSES))
                    runs[passes] = count
                    runs[0] += again * count * isinstance(name, int)
                    host += slower * float(unit.host_s @ runs)
                    own = float(unit.seconds.sum(axis=1) @ runs)
                    gpu = max(gpu + own + float(unit.gaps_s @ runs), host)
                    busy += own
                waits[part, at] = gpu - start - busy
            waits[part, 0] += sum(count * units[name].sync_s for name, count in some.items())
            if machine and self.job.cuda_graphs != "full":
                tensors = sum(count * self.plan.units[name].tensors for name, count in some.items())
                each_s = machine.parameter_s + self.job.stack.parameter_calls * machine.python_s
                update_s[part] = max(0.0, host + slower * each_s * tensors - gpu)
        return waits, update_s

    def _recomputed(self, units: Mapping[Any, UnitTimes]) -> Array:
        again = self.seconds[:, 3].sum(axis=1)
        for part, some in enumerate(self.plan.parts):
            share = self.plan.layers_again(part)
            for name, count in some.items():
                again[part] += share * count * units[name].seconds[0].sum() if isinstance(name, int) else 0.0
        return again

    def _overlap_experts(self) -> None:
        """Dispatch and combine run beside kernels of another micro-batch."""
        at, lost = _KINDS.index(EXPERT), self.job.stack.interference
        for name in (0, 1):
            sent = self.seconds[:, name, at]
            hidden = np.minimum(sent, _BEHIND * self.seconds[:, name, 0])
            self.seconds[:, name, at] = sent - hidden + lost * hidden

    def _pass_s(self) -> Array:
        """(parts, 3): forward, backward with what is recomputed, gradients of weights."""
        whole = self.seconds.sum(axis=2)
        return np.stack([whole[:, 0], whole[:, 1] + self.again, whole[:, 2]], axis=1)

    def of_stage(self, stage: int) -> slice:
        return slice(stage, None, self.job.layout.pp)

    def result(self) -> TrainingForecast:
        job, layout, work, ends = self.job, self.job.layout, self.plan.work, self.ends
        count, pp = layout.micro_batches, layout.pp
        per_stage = np.stack([self.tasks[:, self.of_stage(s)].sum(axis=1) for s in range(pp)])  # (stages, 3)
        reduce_s, gather_s = work.reduce_s(self.times, per_stage), work.gather_s(self.times, per_stage)
        update_s = work.optimizer_s(self.times)
        tails = [ends[0][s] + reduce_s[s] for s in range(pp)]
        slowest = int(np.argmax(per_stage.sum(axis=1)))
        mine = self.of_stage(slowest)
        kinds = count * self.seconds[mine, :3].sum(axis=(0, 1))
        parts_s = dict.fromkeys(PARTS, 0.0)
        parts_s |= dict(zip(_KINDS, kinds.tolist(), strict=True))
        parts_s["recompute"] = count * float(self.again[mine].sum())
        parts_s["offload"] = count * float(self.offload_s[:, mine].sum()) + work.optimizer_offload_s()
        parts_s["optimizer"] = max(update_s)
        parts_s["host"] = self._host_s(mine)
        schedule_s, free_s = max(ends[0]), max(ends[1])
        parts_s["pipeline"] = schedule_s - free_s
        parts_s["bubble"] = max(0.0, free_s - count * float(per_stage[slowest].sum()))
        parts_s["data parallel"] = (
            max(tails) - schedule_s + gather_s[0] + count * float(self.sharded[mine].sum())
        )  # fmt: skip
        parts_s = {name: float(seconds) for name, seconds in parts_s.items()}
        host = self.machine
        factors = (1 - host.faster, 1 + host.slower) if host else ()
        reach_s = tuple(abs(self._host_s(mine, each) - parts_s["host"]) for each in factors)
        return TrainingForecast(job=job, parts_s=parts_s, times=self.times, plan=self.plan, slowest=slowest,
                                host_reach_s=reach_s)  # fmt: skip

    def _host_s(self, parts: slice, slower: float = 1.0) -> float:
        waits, update_s = self._waits(slower) if slower != 1 else (self.host, self.update_host_s)
        step_s = slower * self.machine.step_s if self.machine else self.job.stack.step_s
        return self.job.layout.micro_batches * float(waits[parts].sum()) + float(update_s[parts].sum()) + step_s


def _schedule(stages: Sequence[_Stages]) -> None:
    """Schedules of equal shape run together."""
    groups: dict[Any, list[_Stages]] = {}
    for each in stages:
        layout = each.job.layout
        groups.setdefault((layout.schedule, layout.pp, layout.micro_batches, layout.virtual_stages), []).append(each)
    for (schedule, pp, count, virtual), some in groups.items():
        times_s = np.stack([each.tasks for each in some], axis=-1)
        if schedule == "dualpipe":
            ends = dual_pipe_end(pp, count, times_s)
            free = ends
        else:
            send_s = np.stack([each.send_s for each in some], axis=-1)
            both = np.concatenate([send_s, 0 * send_s], axis=-1)
            ends = stage_ends(schedule, pp, count, virtual, np.concatenate([times_s, times_s], axis=-1), both)
            ends, free = ends[:, : len(some)], ends[:, len(some) :]
        for at, each in enumerate(some):
            each.ends = (ends[:, at].tolist(), free[:, at].tolist())
