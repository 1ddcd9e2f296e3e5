"""One traced step on one GPU: the time of every kernel, what the host adds, and what that sums to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu
from kernelcast.kernels.work import Array
from kernelcast.networks.aten import Costed, Settings, cost
from kernelcast.networks.fusion import FUSED
from kernelcast.networks.traced import PHASES, Op, Trace
from kernelcast.predict import Conditions
from kernelcast.span import NOTHING, Span
from kernelcast.support import support_of
from kernelcast.timeline import Event, Host, Lane, Memory, Ran, Share, Timeline, host, joined, shares
from kernelcast.timeline.power import throttled_s
from kernelcast.timeline.streams import stream_ends
from kernelcast.times import Times
from kernelcast.training.memory import check_fits, step_memory

# Eager ops write their results to memory, and what a later op reads of them may have left L2. Campaigns take other
# inputs for every call, so that is the state the learned predictor knows best.
STEP = Conditions(input_rotation=np.inf)
# What whole steps are off beyond their kernels' own intervals (clocks, caches, kernels that no campaign has): of our 73
# measured steps eight of ten had kernels that took 0.91 to 1.06 times the predicted sum when this was set, and take
# 0.90 to 1.04 times that of the present weights.
STEP_SPREAD = (0.09, 0.06)
LAUNCH_BOUND = 0.1  # of the wall time that the GPU waits for the host, from which a run counts as launch-bound


@dataclass(frozen=True, slots=True)
class OpRan(Ran):
    """The kernels that one op of a trace launches. ``by_bytes``: no rule knows the op."""

    op: Op
    by_bytes: bool


@dataclass(frozen=True)
class Step:
    """How a traced step runs."""

    trace: Trace
    gpu: Gpu
    host: Host
    kernels: tuple[OpRan, ...]
    launched_s: Array = field(repr=False)  # on the host's clock, one a kernel
    ends_s: Array = field(repr=False)
    predictor: str = ""
    graph: bool = False
    compiled: bool = False

    @property
    def time_s(self) -> float:
        """Wall time of the step, from the first op to the end of the last kernel."""
        return float(self.ends_s[-1]) if len(self.ends_s) else 0.0

    @cached_property
    def kernel_time_s(self) -> float:
        return sum(kernel.time_s for kernel in self.kernels)

    @property
    def low_s(self) -> float:
        return self.time_s * self.spread[0]

    @property
    def high_s(self) -> float:
        return self.time_s * self.spread[1]

    @cached_property
    def spread(self) -> tuple[float, float]:
        """Factors of the wall time that the 80% interval reaches: kernels, and the host where the GPU waits for it."""
        return interval(self.kernels, self.host, self.idle_s / self.time_s if self.time_s else 0.0)

    @property
    def idle_s(self) -> float:
        """GPU time spent waiting for the host (gaps between kernels that were launched in time not counted)."""
        return max(0.0, self.time_s - self.kernel_time_s - self._gaps_s)

    @property
    def _gaps_s(self) -> float:
        gap = self.host.graph_gap_s if self.graph else self.host.gap_s
        return gap * sum(kernel.launches for kernel in self.kernels)

    @property
    def launch_bound(self) -> bool:
        return bool(self.time_s > 0 and self.idle_s / self.time_s > LAUNCH_BOUND)

    def phase_s(self, phase: str) -> float:
        """Wall time of a phase: until its last kernel ends, from where the phase before ended."""
        ends = [0.0]
        for name in PHASES[: PHASES.index(phase) + 1]:
            mine = [end for kernel, end in zip(self.kernels, self.ends_s, strict=True) if kernel.op.phase == name]
            ends.append(max(mine, default=ends[-1]))
        return float(ends[-1] - ends[-2])

    def phase_kernel_s(self, phase: str) -> float:
        return sum(kernel.time_s for kernel in self.kernels if kernel.op.phase == phase)

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """Where the time of kernels goes; they add up to ``kernel_time_s``."""
        return shares(self.kernels)

    @property
    def support(self) -> str:
        return support_of((share.time_s, share.support) for share in self.shares)

    @property
    def by_bytes(self) -> dict[str, float]:
        """Ops that no rule knows, with their seconds: they count as the bytes they move."""
        found: dict[str, float] = {}
        for kernel in self.kernels:
            if kernel.by_bytes:
                found[kernel.op.name] = found.get(kernel.op.name, 0.0) + kernel.time_s
        return found

    @property
    def coverage(self) -> float:
        """Of the kernel time, the share of ops that a rule knows."""
        return 1 - sum(self.by_bytes.values()) / self.kernel_time_s if self.kernel_time_s else 1.0

    @cached_property
    def flops(self) -> float:
        """Of matrix products, convolutions and attention."""
        from kernelcast.networks.aten.flops import op_flops

        return float(sum(op_flops(kernel.op) for kernel in self.kernels))

    @property
    def mfu(self) -> float:
        return self.flops / (self.time_s * self.gpu.mfu_flops_per_s) if self.time_s else 0.0

    @property
    def memory(self) -> Memory:
        return step_memory(self.trace, self.gpu)

    def timeline(self) -> Timeline:
        """The host's launches on one lane (none from a graph), the GPU's kernels on another."""
        before, launches, kernels = 0.0, [], []
        for one, launched, end in zip(self.kernels, self.launched_s.tolist(), self.ends_s.tolist(), strict=True):
            told = {"module": one.op.module, "phase": one.phase, "bound_by": one.bound_by,
                    "shapes": [list(x.shape) for x in one.op.inputs[:4]]}  # fmt: skip
            launches.append(Event(one.op.name, before, launched - before, one.phase))
            kernels.append(Event(one.op.name, end - one.time_s, one.time_s, one.part, told))
            before = launched
        place = self.gpu.name
        return Timeline(
            (Lane(place, "host", () if self.graph else tuple(launches)), Lane(place, place, tuple(kernels)))
        )


def interval(kernels: Iterable[Ran], machine: Host, waits: float) -> tuple[float, float]:
    """Factors that the 80% interval of a step reaches. ``waits``: share of the time that the GPU waits for the host."""
    whole = joined(kernels)
    total = whole.time_s or 1.0
    low, high = (whole.time_s - whole.low_s) / total, (whole.high_s - whole.time_s) / total
    waits = min(1.0, max(0.0, waits))
    below = float(np.hypot(low, STEP_SPREAD[0])) * (1 - waits) + machine.faster * waits
    above = float(np.hypot(high, STEP_SPREAD[1])) * (1 - waits) + machine.slower * waits
    return 1 - below, 1 + above


def run_step(
    trace: Trace,
    gpu: Gpu,
    conditions: Conditions = STEP,
    *,
    tf32: bool = False,
    graph: bool = False,
    on: str | Host = "server",
    times: Times | None = None,
    oversized: bool = False,
) -> Step:
    """Predict a traced step. ``graph``: its kernels replay from a CUDA graph, so that the host launches once. A step
    that does not fit in the GPU's memory is refused unless ``oversized``."""
    if not trace.kernels:
        raise KernelcastError(f"{trace.name} launches no kernel")
    if not oversized:
        check_fits(trace, gpu)
    machine = host(on) if isinstance(on, str) else on
    times = times or Times(gpu, conditions)
    settings = Settings(tf32=tf32, capability=gpu.compute_capability, l2_bytes=gpu.l2_bytes)
    kernels = predicted([op for op in trace.ops if op.kind == "kernel"], times, lambda op: cost(op, settings))
    launched, ends = _timeline(trace, kernels, machine, graph)
    compiled = any(op.name == FUSED for op in trace.ops)
    return Step(trace, gpu, machine, tuple(kernels), launched, ends, times.predictor, graph, compiled)


def predicted(ops: Iterable[Op], times: Times, costs: Callable[[Op], Costed]) -> list[OpRan]:
    """The kernels of each op. ``costs``: what an op launches."""
    costed = [(op, costs(op)) for op in ops]
    times.learn(launch.call for _, found in costed for launch in found.launches)
    return [_ran(op, found, times) for op, found in costed]


def _ran(op: Op, costed: Costed, times: Times) -> OpRan:
    """What binds and supports the longest call of an op is told for the whole. A step that runs again and again keeps
    the GPU at its power limit."""
    span, longest = NOTHING, Ran(op.phase, "other", Span.exact(-1.0), 0.0, "launch", "seen")
    for launch in costed.launches:
        one = Ran.of(op.phase, launch, times)
        longest = one if one.time_s > longest.time_s else longest
        time_s = times[launch.call].span.time_s
        span += one.span * (1 + throttled_s(launch.call, time_s, times.gpu) / time_s)
    launches = sum(launch.count for launch in costed.launches)
    return OpRan(op.phase, longest.part, span, launches, longest.bound_by, longest.support, op, costed.by_bytes)


def _timeline(trace: Trace, kernels: list[OpRan], machine: Host, graph: bool) -> tuple[Array, Array]:
    """When the host has launched each op's kernels, and when they end on the GPU."""
    gap = machine.graph_gap_s if graph else machine.gap_s
    busy = np.array([kernel.time_s + gap * kernel.launches for kernel in kernels])
    if graph:
        launched = np.full(len(kernels), machine.graph_s)
        return launched, stream_ends(launched, busy)
    ready = np.cumsum(launch_costs(trace, machine))
    launched = ready[[at for at, op in enumerate(trace.ops) if op.kind == "kernel"]]
    return launched, stream_ends(launched, busy)


def launch_costs(trace: Trace, machine: Host) -> Array:
    """What the host spends on each op of a trace before the next."""
    forward = max(1, sum(op.phase == "forward" for op in trace.ops))
    python_s = machine.module_s * trace.module_calls.get("forward", 0) / forward
    costs = {
        ("forward", True): machine.kernel_s + python_s, ("forward", False): machine.view_s + python_s,
        ("backward", True): machine.backward_kernel_s, ("backward", False): machine.backward_view_s,
        ("optimizer", True): machine.kernel_s, ("optimizer", False): machine.view_s,
    }  # fmt: skip
    return np.array([costs[op.phase, op.kind == "kernel"] for op in trace.ops])
