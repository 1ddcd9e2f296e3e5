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
from kernelcast.networks.forward import Call
from kernelcast.networks.fusion import FUSED
from kernelcast.networks.kernel_times import KernelTimes
from kernelcast.networks.traced import PHASES, Op, Trace
from kernelcast.predict import Conditions
from kernelcast.training.host import Host, host, stream_ends

# Eager ops write their results to memory, and what a later op reads of them may have left L2. Campaigns take other
# inputs for every call, so that is the state the learned predictor knows best.
STEP = Conditions(input_rotation=np.inf)
# What whole steps are off beyond their kernels' own intervals (clocks, caches, kernels that no campaign has): of our 73
# measured steps eight of ten had kernels that took 0.91 to 1.06 times the predicted sum when this was set, and take
# 0.90 to 1.04 times that of the present weights.
STEP_SPREAD = (0.09, 0.06)
LAUNCH_BOUND = 0.1  # of the wall time that the GPU waits for the host, from which a run counts as launch-bound
_PRODUCTS = ("gemm", "bmm", "moe_gemm")
# Context, cuBLAS and cuDNN workspaces of one process; what the caching allocator cannot use adds a twentieth.
FRAMEWORK_BYTES = 1.2e9
FRAGMENTED = 0.05


@dataclass(frozen=True)
class Kernel:
    """An op's kernels: ``time_s`` of all its calls."""

    op: Op
    part: str
    time_s: float
    low_s: float
    high_s: float
    bound_by: str
    support: str
    by_bytes: bool
    launches: float


@dataclass(frozen=True)
class Share:
    """A part of a phase. Shares add up to ``kernel_time_s``."""

    phase: str
    part: str
    time_s: float
    kernels: float
    bound_by: str
    support: str


@dataclass(frozen=True)
class Step:
    """How a traced step runs."""

    trace: Trace
    gpu: Gpu
    host: Host
    kernels: tuple[Kernel, ...]
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
        sums: dict[tuple[str, str], list[Kernel]] = {}
        for kernel in self.kernels:
            sums.setdefault((kernel.op.phase, kernel.part), []).append(kernel)
        return tuple(_share(phase, part, members) for (phase, part), members in sums.items())

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
        peak = self.gpu.tensor_flops_per_s("bf16") or self.gpu.tensor_flops_per_s("fp16")
        return self.flops / (self.time_s * (peak or self.gpu.fma_flops_per_s("fp32"))) if self.time_s else 0.0

    @property
    def memory_bytes(self) -> float:
        return needed_bytes(self.trace)

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.gpu.dram_bytes


def interval(kernels: Iterable[Kernel], machine: Host, waits: float) -> tuple[float, float]:
    """Factors that the 80% interval of a step reaches. ``waits``: share of the time that the GPU waits for the host."""
    low, high = _kernel_spread(kernels)
    waits = min(1.0, max(0.0, waits))
    below = float(np.hypot(low, STEP_SPREAD[0])) * (1 - waits) + machine.faster * waits
    above = float(np.hypot(high, STEP_SPREAD[1])) * (1 - waits) + machine.slower * waits
    return 1 - below, 1 + above


def _kernel_spread(kernels: Iterable[Kernel]) -> tuple[float, float]:
    """How far below and above their sum kernels may be: the same kernel is wrong the same way wherever it runs;
    different ones are wrong on their own."""
    groups: dict[tuple[str, str], list[float]] = {}
    for kernel in kernels:
        sums = groups.setdefault((kernel.part, kernel.op.phase), [0.0, 0.0, 0.0])
        for place, value in enumerate((kernel.time_s, kernel.low_s, kernel.high_s)):
            sums[place] += value
    total = sum(time for time, _, _ in groups.values()) or 1.0
    low = np.sqrt(sum((time - low) ** 2 for time, low, _ in groups.values())) / total
    high = np.sqrt(sum((high - time) ** 2 for time, _, high in groups.values())) / total
    return float(low), float(high)


def _share(phase: str, part: str, members: list[Kernel]) -> Share:
    bound: dict[str, float] = {}
    support: dict[str, float] = {}
    for kernel in members:
        bound[kernel.bound_by] = bound.get(kernel.bound_by, 0.0) + kernel.time_s
        support[kernel.support] = support.get(kernel.support, 0.0) + kernel.time_s
    return Share(
        phase, part, sum(k.time_s for k in members), sum(k.launches for k in members),
        max(bound, key=lambda name: bound[name]), max(support, key=lambda name: support[name]),
    )  # fmt: skip


def run_step(
    trace: Trace,
    gpu: Gpu,
    conditions: Conditions = STEP,
    *,
    tf32: bool = False,
    graph: bool = False,
    on: str | Host = "server",
    times: KernelTimes | None = None,
    oversized: bool = False,
) -> Step:
    """Predict a traced step. ``graph``: its kernels replay from a CUDA graph, so that the host launches once. A step
    that does not fit in the GPU's memory is refused unless ``oversized``."""
    if not trace.kernels:
        raise KernelcastError(f"{trace.name} launches no kernel")
    if not oversized:
        _check_fits(trace, gpu)
    machine = host(on) if isinstance(on, str) else on
    times = times or KernelTimes(gpu, conditions)
    settings = Settings(tf32=tf32, capability=gpu.compute_capability, l2_bytes=gpu.l2_bytes)
    kernels = predicted([op for op in trace.ops if op.kind == "kernel"], times, lambda op: cost(op, settings))
    launched, ends = _timeline(trace, kernels, machine, graph)
    compiled = any(op.name == FUSED for op in trace.ops)
    return Step(trace, gpu, machine, tuple(kernels), launched, ends, times.predictor, graph, compiled)


def needed_bytes(trace: Trace) -> float:
    """Of the GPU's memory, at the peak of the step."""
    return trace.footprint.peak * (1 + FRAGMENTED) + FRAMEWORK_BYTES


def _check_fits(trace: Trace, gpu: Gpu) -> None:
    needed = needed_bytes(trace)
    if needed > gpu.dram_bytes:
        held = trace.footprint
        parts = {"parameters": held.parameters, "gradients": held.gradients, "optimizer": held.optimizer,
                 "activations": held.activations}  # fmt: skip
        told = ", ".join(f"{name} {size / 1e9:,.1f}" for name, size in parts.items() if size)
        over = f"{(needed - gpu.dram_bytes) / 1e9:,.1f} GB more than {gpu.id} has"
        raise KernelcastError(
            f"{trace.name} needs {needed / 1e9:,.1f} GB at its peak ({told}), {over}; "
            "a smaller batch, checkpointing, or several GPUs (dp with zero, tp, pp) need less of each"
        )


def predicted(ops: Iterable[Op], times: KernelTimes, costs: Callable[[Op], Costed]) -> list[Kernel]:
    """The kernels of each op. ``costs``: what an op launches."""
    costed = [(op, costs(op)) for op in ops]
    times.learn(call for _, found in costed for call in found.calls)
    return [_kernel(op, found.calls, times, times.gpu, found.by_bytes) for op, found in costed]


def _kernel(op: Op, calls: Iterable[Call], times: KernelTimes, gpu: Gpu, by_bytes: bool) -> Kernel:
    total = low = high = launches = 0.0
    longest, bound, support, part = -1.0, "launch", "seen", "other"
    for call in calls:
        found = times[call]
        time_s = call.count * found.time_s
        slower = _power_factor(call, found.time_s, gpu)
        total, low, high = (
            total + time_s * slower, low + call.count * found.low_s * slower, high + call.count * found.high_s * slower,
        )  # fmt: skip
        launches += call.count
        if time_s > longest:
            longest, bound, support, part = time_s, found.bound_by, found.support, call.part
    return Kernel(op, part, float(total), float(low), float(high), bound, support, by_bytes, launches)


def _power_factor(call: Call, time_s: float, gpu: Gpu) -> float:
    """A step that runs again and again keeps the GPU at its power limit, which caps the rate of matrix products."""
    if not gpu.tensor_flops_per_j or call.op not in _PRODUCTS:
        return 1.0
    given = dict(call.parameters)
    if given.get("dtype") not in ("bf16", "fp16"):
        return 1.0
    flops = 2.0 * given.get("batch", 1) * given.get("m", 0) * given["n"] * given["k"]
    return max(1.0, flops / (gpu.tensor_flops_per_j * gpu.power_w) / time_s)


def _timeline(trace: Trace, kernels: list[Kernel], machine: Host, graph: bool) -> tuple[Array, Array]:
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
