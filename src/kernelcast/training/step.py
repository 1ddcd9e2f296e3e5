"""One traced step on one GPU: the time of every kernel, what the host adds, and what that sums to."""

from __future__ import annotations

import bisect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from kernelcast.energy.power import Energy, energy_of, throttled_s, total
from kernelcast.errors import KernelcastError
from kernelcast.forecast.calls import Call, Launch
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.end_to_end import Setting
from kernelcast.forecast.predict_table import Times
from kernelcast.hardware import Gpu, root_of
from kernelcast.hardware import gpu as named_gpu
from kernelcast.ops.work import Array
from kernelcast.results import NOTHING, HtmlRepr, Interval
from kernelcast.schedule import (
    Event,
    Host,
    KernelTime,
    Lane,
    Memory,
    Timeline,
    host,
    usual_host,
)
from kernelcast.schedule.timeline import stream_ends
from kernelcast.stacks import stack as named_stack
from kernelcast.tracing.aten import OpLaunches, OpSettings, op_launches
from kernelcast.tracing.aten.table import model_flops, op_flops, product_format
from kernelcast.tracing.traced import PHASES, Op, Trace
from kernelcast.training.l2_reuse import input_rotations
from kernelcast.training.memory import check_fits, step_memory
from kernelcast.training.placement import of_parameters, parameter_groups
from kernelcast.training.predicted_step import PredictedStep


@dataclass(frozen=True, slots=True)
class OpKernels(KernelTime):
    """The kernels that one op of a trace launches. ``by_bytes``: no rule for the op."""

    op: Op = field(kw_only=True)
    by_bytes: bool = field(kw_only=True)
    launched: tuple[Launch, ...] = field(kw_only=True, default=(), repr=False)


def op_cost(op: Op, settings: OpSettings, gpu: Gpu) -> OpLaunches:
    """The launches of an op. An optimizer's pass over more than any GPU can hold is timed in pieces: whether the step
    fits in memory is checked elsewhere. A kernel's footprint is what it reads and writes, which for a pass in place is
    up to twice what there is."""
    if op.phase != "optimizer" or sum(x.bytes for x in op.inputs) <= gpu.dram_bytes / 2:
        return op_launches(op, settings)
    pieces: list[list[int]] = [[]]
    held = 0
    for at, group in enumerate(parameter_groups(op)):
        size = sum(x.bytes for x in group)
        if pieces[-1] and held + size > gpu.dram_bytes / 2:
            pieces.append([])
            held = 0
        pieces[-1].append(at)
        held += size
    parts = [op_launches(of_parameters(op, piece), settings) for piece in pieces]
    return OpLaunches(tuple(launch for part in parts for launch in part.launches), any(part.by_bytes for part in parts))


def predict_ops(ops: Iterable[Op], times: Times, costs: Callable[[Op], OpLaunches]) -> list[OpKernels | None]:
    """The kernels of each op; None where it launches none. ``costs``: what an op launches."""
    ops = list(ops)
    rotations: list[float | None] = [None] * len(ops)
    repeated = times.conditions.rotation <= 1
    if repeated or times.conditions.input_rotation == np.inf:  # else conditions say what all ops find
        rotations = input_rotations(ops, times.gpu, repeated=repeated)
    costed = [
        (op, _found_in_l2(costs(op), rotation) if op.op_type == "kernel" else None)
        for op, rotation in zip(ops, rotations, strict=True)
    ]
    times.predict(launch.call for _, cost in costed if cost for launch in cost.launches)
    return [_op_kernels(op, cost, times) if cost else None for op, cost in costed]


def _found_in_l2(costed: OpLaunches, rotation: float | None) -> OpLaunches:
    """The launches, with what L2 still holds of their tensors."""
    if rotation is None:
        return costed
    launches = (replace(each, call=replace(each.call, input_rotation=rotation)) for each in costed.launches)
    return replace(costed, launches=tuple(launches))


def _op_kernels(op: Op, costed: OpLaunches, times: Times) -> OpKernels:
    """The bound and the support of an op are those of its longest call. A step that runs repeatedly keeps the GPU at
    its power limit."""
    total, longest = NOTHING, KernelTime(op.phase, "other", Interval.exact(-1.0), 0.0, "launch", "seen")
    for launch in costed.launches:
        kernel = KernelTime.of(op.phase, launch, times)
        longest = kernel if kernel.time_s > longest.time_s else longest
        time_s = times[launch.call].interval.value
        total += kernel.interval * (1 + throttled_s(launch.call, time_s, times) / time_s)
    launches = sum(launch.count * times[launch.call].launches for launch in costed.launches)
    return OpKernels(
        op.phase, longest.part, total, launches, longest.bound_by, longest.support, longest.network, longest.match,
        op=op, by_bytes=costed.by_bytes, launched=tuple(costed.launches),
    )  # fmt: skip


def calibrated_host(on: str | Host, conditions: Conditions) -> Host:
    """The host, with its scales from measured runs."""
    chosen = host(on) if isinstance(on, str) else on
    return chosen.scaled(conditions.host_scale(chosen.id))


def gap_s(machine: Host, graph: bool) -> float:
    """The gap between two kernels of a stream, both launched in time."""
    return machine.graph_gap_s if graph else machine.gap_s


def host_counts(trace: Trace) -> dict[str, Array]:
    """How often each op of a trace has each host cost, by its name in ``Host``; kernels are counted
    apart, where they are known."""
    phase = np.array([op.phase for op in trace.ops])
    kernel = np.array([op.op_type == "kernel" for op in trace.ops], dtype=bool)
    view = np.array([op.op_type == "view" for op in trace.ops], dtype=bool)
    forward, backward, optimizer = (phase == name for name in PHASES)
    # ops that were created after tracing (a fused kernel) have no position in the program
    calls = np.maximum.accumulate([op.at for op in trace.ops])
    updates = optimizer & (np.cumsum(optimizer) == 1)
    return {
        "step_s": np.arange(len(trace.ops)) == 0,
        "view_s": view & ~backward,
        "python_s": np.diff(calls, prepend=0),
        "recorded_s": kernel & forward & (trace.mode == "training"),
        "backward_s": kernel & backward,
        "backward_view_s": view & backward,
        "parameter_s": updates * float(trace.parameter_tensors),
    }


def launch_costs(trace: Trace, machine: Host) -> Array:
    """Host time of each op of a trace before the next, beside launching its kernels. What a program does around a step
    grows with it: around a few ops it takes no longer than these."""
    costs = {name: getattr(machine, name) * count for name, count in host_counts(trace).items()}
    ops_s = sum(float(np.sum(cost)) for name, cost in costs.items() if name != "step_s")
    ops_s += machine.launch_s * sum(op.op_type == "kernel" for op in trace.ops)
    costs["step_s"] = np.minimum(costs["step_s"], ops_s)
    if trace.compiled:
        costs["compiled_s"] = machine.compiled_s * (np.arange(len(trace.ops)) == 0)
    total: Array = np.sum(list(costs.values()), axis=0)
    return total


def launching_s(launches: float, machine: Host) -> float:
    """Host time of the kernels that one op launches: PyTorch's dispatcher once, for each more the library's launch."""
    each_s = machine.series_s or machine.launch_s
    return machine.launch_s * min(launches, 1.0) + each_s * max(0.0, launches - 1)


@dataclass(frozen=True)
class LaunchQueue:
    """Kernels in sequence on one GPU, and when the host has launched each."""

    kernels: tuple[OpKernels, ...]
    indices: tuple[int, ...]  # of their ops in the trace
    busy_s: Array  # each with the gap behind it
    launched_s: Array
    host_s: float  # of all its ops

    @classmethod
    def of(
        cls, kernels_by_op: Sequence[tuple[int, OpKernels | None]], costs_s: Array, machine: Host, graph: bool,
        compiled: bool = False,
    ) -> LaunchQueue:  # fmt: skip
        """``kernels_by_op``: indices of ops in a trace and what they launch; ``costs_s``: its ``launch_costs``.
        ``graph``: kernels replay from a CUDA graph, so that the host launches once, from a ``compiled`` step's wrapper
        where that captured it."""
        launches_s = np.array([launching_s(kernel.launches, machine) if kernel else 0.0 for _, kernel in kernels_by_op])
        clock = np.cumsum(costs_s[[at for at, _ in kernels_by_op]] + launches_s)
        launching = [i for i, (_, kernel) in enumerate(kernels_by_op) if kernel is not None]
        kernels = tuple(kernel for _, kernel in kernels_by_op if kernel is not None)
        busy_s = np.array([kernel.time_s + gap_s(machine, graph) * kernel.launches for kernel in kernels])
        # the first of many kernels runs while the others are launched, no faster than that
        more_s = np.maximum(0.0, launches_s[launching] - machine.launch_s) * (not graph)
        # torch.compile copies a call's inputs to where the graph reads them (cudagraph_trees.py)
        once_s = machine.graph_s + (machine.compiled_s + machine.launch_s) * compiled
        return cls(
            kernels=kernels,
            indices=tuple(kernels_by_op[i][0] for i in launching),
            busy_s=np.maximum(busy_s, more_s),
            launched_s=np.full(len(kernels), once_s) if graph else clock[launching] - more_s,
            host_s=0.0 if graph or not len(clock) else float(clock[-1]),
        )

    def kernel_at(self, op: int) -> int:
        """The last kernel at or before an op of the trace."""
        return bisect.bisect_right(self.indices, op) - 1


# Campaigns take other inputs for every call, so the learned predictor is most accurate in that state; what L2 still
# holds of what an op before has made, `l2_reuse` finds out.
STEP = Conditions(input_rotation=np.inf)
LAUNCH_BOUND = 0.1  # of the wall time that the GPU waits for the host, from which a run counts as launch-bound


@dataclass(frozen=True, kw_only=True)
class StepForecast(HtmlRepr, PredictedStep):
    """A traced step, on one GPU or on many: its time, and where that goes."""

    trace: Trace
    gpu: Gpu
    host: Host
    time_s: float  # from the first op to the end of the last kernel
    kernels: tuple[OpKernels, ...]
    predictor: str
    times: Times = field(repr=False, compare=False)
    tf32: bool = False  # products of fp32 run on tensor cores
    gpus: int = 1
    passes: int = 1  # of the trace in a step, on all GPUs

    @property
    @abstractmethod
    def idle_s(self) -> float:
        """GPU time spent waiting for the host (gaps between kernels that were launched in time not counted)."""

    @cached_property
    def spread(self) -> tuple[float, float]:
        """Factors of the time that the 80% interval reaches: kernels, and the host where the GPU waits for it."""
        waits = min(1.0, self.idle_s / self.time_s) if self.time_s else 0.0
        low, high = self.kernel_spread
        return 1 - (low * (1 - waits) + self.host.faster * waits), 1 + (high * (1 - waits) + self.host.slower * waits)

    def drawn_by(self, kernels: Iterable[tuple[OpKernels, int]]) -> Energy | None:
        """Energy of one GPU that runs these kernels, so many times each, and idles for the rest of the step."""
        launched: dict[Call, tuple[float, float]] = {}
        busy_s = 0.0
        for kernel, times in kernels:
            busy_s += times * kernel.time_s
            for launch in kernel.launched:
                count, _ = launched.get(launch.call, (0.0, 0.0))
                launched[launch.call] = count + times * launch.count, self.times[launch.call].interval.value
        return energy_of(launched, self.times, self.time_s - busy_s, Interval(self.time_s, self.low_s, self.high_s))

    @property
    def launch_bound(self) -> bool:
        return bool(self.idle_s > LAUNCH_BOUND * self.time_s)

    @cached_property
    def setting(self) -> Setting:
        """What decides, beside the kernels, whether such a step was measured."""
        names = {"inference": "inference step", "training": "training step" if self.gpus == 1 else "training at scale"}
        experts = any("experts" in op.module.split(".") for op in self.trace.ops)
        workload = names[self.trace.mode] + ", experts" * experts + ", launch-bound" * self.launch_bound
        stack = named_stack("torch")
        layout = getattr(self, "layout", None)
        return Setting.of(workload, self.gpu, stack.id, stack.release, "PyTorch module", layout, "")

    @cached_property
    def flops(self) -> float:
        """FLOPs of matrix products, convolutions and attention that run, recomputed ones among them."""
        return float(sum(op_flops(op) for op in self.trace.kernels)) * self.passes

    @cached_property
    def model_flops(self) -> float:
        """The same without recomputation."""
        return float(sum(model_flops(op) for op in self.trace.kernels)) * self.passes

    @property
    def recomputes(self) -> bool:
        """Whether activations are checkpointed."""
        return any(op.recomputed for op in self.trace.ops)

    @cached_property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the share of the step that its model FLOPs take at the peak of their formats."""
        return self._utilisation(model_flops)

    @cached_property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation: the same of all FLOPs that run."""
        return self._utilisation(op_flops)

    def _utilisation(self, flops: Callable[[Op], int]) -> float:
        counts: dict[str, int] = {}
        for op in self.trace.kernels:
            count = flops(op)
            if count:
                dtype = product_format(op, self.settings)
                counts[dtype] = counts.get(dtype, 0) + count
        at_peak_s = sum(count / self.gpu.product_flops_per_s(dtype) for dtype, count in counts.items())
        return at_peak_s * self.passes / (self.time_s * self.gpus) if self.time_s else 0.0

    @property
    def settings(self) -> OpSettings:
        return OpSettings(tf32=self.tf32, capability=self.gpu.compute_capability, l2_bytes=self.gpu.l2_bytes)


@dataclass(frozen=True, kw_only=True)
class Step(StepForecast):
    """How a traced step runs on one GPU."""

    launched_s: Array = field(repr=False)  # on the host's clock, one a kernel
    busy_s: Array = field(repr=False)  # on the GPU's, with the gap behind each
    ends_s: Array = field(repr=False)
    graph: bool
    compiled: bool

    @cached_property
    def energy(self) -> Interval | None:
        """Joules of the step, in a series of such steps; None without a power model."""
        return total([self.drawn])

    @cached_property
    def drawn(self) -> Energy | None:
        return self.drawn_by((kernel, 1) for kernel in self.kernels)

    @cached_property
    def kernel_time_s(self) -> float:
        return sum(kernel.time_s for kernel in self.kernels)

    @property
    def idle_s(self) -> float:
        gaps_s = gap_s(self.host, self.graph) * sum(kernel.launches for kernel in self.kernels)
        return max(0.0, self.time_s - self.kernel_time_s - gaps_s)

    def ends(self, host: float = 1.0, gpu: float = 1.0) -> float:
        """When the step would end with the times of the host and the GPU multiplied by these factors."""
        return float(stream_ends(self.launched_s * host, self.busy_s * gpu)[-1])

    @cached_property
    def spread(self) -> tuple[float, float]:
        """Errors of the host and of the kernels, each propagated through the step: only the critical path counts."""
        kernels = 1 - self.kernel_spread[0], 1 + self.kernel_spread[1]
        host = (1.0, 1.0) if self.graph else (1 - self.host.faster, 1 + self.host.slower)
        below = np.hypot(1 - self.ends(host=host[0]) / self.time_s, 1 - self.ends(gpu=kernels[0]) / self.time_s)
        above = np.hypot(self.ends(host=host[1]) / self.time_s - 1, self.ends(gpu=kernels[1]) / self.time_s - 1)
        return 1 - float(below), 1 + float(above)

    @property
    def margin(self) -> float:
        """Host time of all launches over GPU time; above 1 the step is launch-bound."""
        return 0.0 if self.graph else float(self.launched_s[-1] / self.busy_s.sum())

    @property
    def margins(self) -> tuple[float, float]:
        """The margin with the host as fast and as slow as it may be."""
        return self.margin * (1 - self.host.faster), self.margin * (1 + self.host.slower)

    def phase_s(self, phase: str) -> float:
        """Wall time of a phase: of each of its kernels, from where the one before ended. Passes of accumulated
        gradients take turns."""
        lasted = np.diff(np.maximum.accumulate(np.asarray(self.ends_s, dtype=float)), prepend=0.0)
        return float(sum(lasted[at] for at, kernel in enumerate(self.kernels) if kernel.phase == phase))

    def phase_kernel_s(self, phase: str) -> float:
        return sum(kernel.time_s for kernel in self.kernels if kernel.phase == phase)

    @property
    def by_bytes(self) -> dict[str, float]:
        """Ops without a rule, with their seconds: they are timed by the bytes they move."""
        seconds: dict[str, float] = {}
        for kernel in self.kernels:
            if kernel.by_bytes:
                seconds[kernel.op.name] = seconds.get(kernel.op.name, 0.0) + kernel.time_s
        return seconds

    @property
    def coverage(self) -> float:
        """The share of kernel time of ops with a rule."""
        return 1 - sum(self.by_bytes.values()) / self.kernel_time_s if self.kernel_time_s else 1.0

    @property
    def memory(self) -> Memory:
        return step_memory(self.trace, self.gpu)

    def timeline(self) -> Timeline:
        """The host's launches on one lane (none from a graph), the GPU's kernels on another."""
        before, launches, kernels = 0.0, [], []
        for kernel, launched, end in zip(self.kernels, self.launched_s.tolist(), self.ends_s.tolist(), strict=True):
            details = {"module": kernel.op.module, "phase": kernel.phase, "bound_by": kernel.bound_by,
                       "shapes": [list(x.shape) for x in kernel.op.inputs[:4]]}  # fmt: skip
            launches.append(Event(kernel.op.name, before, launched - before, kernel.phase))
            kernels.append(Event(kernel.op.name, end - kernel.time_s, kernel.time_s, kernel.part, details))
            before = launched
        gpu = self.gpu.name
        return Timeline((Lane(gpu, "host", () if self.graph else tuple(launches)), Lane(gpu, gpu, tuple(kernels))))


def run_step(
    trace: Trace,
    gpu: Gpu | str,
    conditions: Conditions = STEP,
    *,
    tf32: bool = False,
    graph: bool = False,
    on: str | Host | None = None,
    times: Times | None = None,
    oversized: bool = False,
) -> Step:
    """Predict a traced step. ``graph``: its kernels replay from a CUDA graph, so that the host launches once. A step
    that does not fit in the GPU's memory is refused unless ``oversized``."""
    gpu = named_gpu(gpu)
    if not trace.kernels:
        raise KernelcastError(f"{trace.name} launches no kernel")
    if not oversized:
        check_fits(trace, gpu)
    machine = calibrated_host(on or usual_host(root_of(gpu).id), conditions)
    times = times or Times(gpu, conditions)
    settings = OpSettings(tf32=tf32, capability=gpu.compute_capability, l2_bytes=gpu.l2_bytes)
    kernels = list(enumerate(predict_ops(trace.ops, times, lambda op: op_cost(op, settings, gpu))))
    queue = LaunchQueue.of(kernels, launch_costs(trace, machine), machine, graph, trace.compiled)
    ends = stream_ends(queue.launched_s, queue.busy_s)
    return Step(
        trace=trace, gpu=gpu, host=machine, time_s=float(ends[-1]), kernels=queue.kernels, predictor=times.predictor,
        launched_s=queue.launched_s, busy_s=queue.busy_s, ends_s=ends, graph=graph,
        compiled=trace.compiled, times=times, tf32=tf32,
    )  # fmt: skip
