"""Kernels of a traced step in the order in which the host queues them: what each op launches, and when."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kernelcast.energy.power import throttled_s
from kernelcast.forecast.calls import Launch
from kernelcast.forecast.conditions import Conditions, host_scale
from kernelcast.forecast.predict_table import Times
from kernelcast.hardware import Gpu
from kernelcast.ops.work import Array
from kernelcast.results import NOTHING, Interval
from kernelcast.schedule import Host, KernelTime, host
from kernelcast.tracing.aten import Costed, Settings, cost
from kernelcast.tracing.traced import PHASES, Op, Trace


@dataclass(frozen=True, slots=True)
class OpRan(KernelTime):
    """The kernels that one op of a trace launches. ``by_bytes``: no rule knows the op."""

    op: Op = field(kw_only=True)
    by_bytes: bool = field(kw_only=True)
    launched: tuple[Launch, ...] = field(kw_only=True, default=(), repr=False)


def cost_in_pieces(op: Op, settings: Settings, gpu: Gpu) -> Costed:
    """What an op launches; an optimizer's pass over lists of which no GPU could hold what moves is timed in pieces:
    whether the step fits is another question, answered apart."""
    size = sum(x.bytes for x in op.inputs) if op.phase == "optimizer" else 0
    pieces = math.ceil(size / (gpu.dram_bytes / 2))
    if pieces <= 1:
        return cost(op, settings)
    cuts = [tuple(x[i::pieces] if isinstance(x, (tuple, list)) else x for x in op.arguments) for i in range(pieces)]
    found = [
        cost(replace(op, arguments=cut, outputs=op.outputs[i::pieces]), settings)
        for i, cut in enumerate(cuts)
        if cut[0]
    ]
    return Costed(tuple(launch for one in found for launch in one.launches), any(one.by_bytes for one in found))


def predicted(ops: Iterable[Op], times: Times, costs: Callable[[Op], Costed]) -> list[OpRan | None]:
    """The kernels of each op; None where it launches none. ``costs``: what an op launches."""
    costed = [(op, costs(op) if op.kind == "kernel" else None) for op in ops]
    times.learn(launch.call for _, found in costed if found for launch in found.launches)
    return [_ran(op, found, times) if found else None for op, found in costed]


def _ran(op: Op, costed: Costed, times: Times) -> OpRan:
    """What binds and supports the longest call of an op is told for the whole. A step that runs again and again keeps
    the GPU at its power limit."""
    span, longest = NOTHING, KernelTime(op.phase, "other", Interval.exact(-1.0), 0.0, "launch", "seen")
    for launch in costed.launches:
        one = KernelTime.of(op.phase, launch, times)
        longest = one if one.time_s > longest.time_s else longest
        time_s = times[launch.call].span.value
        span += one.span * (1 + throttled_s(launch.call, time_s, times) / time_s)
    launches = sum(launch.count * times[launch.call].launches for launch in costed.launches)
    return OpRan(
        op.phase, longest.part, span, launches, longest.bound_by, longest.support, longest.network, longest.match,
        op=op, by_bytes=costed.by_bytes, launched=tuple(costed.launches),
    )  # fmt: skip


def machine_of(on: str | Host, conditions: Conditions) -> Host:
    """The host that launches, with what measured runs say of it."""
    found = host(on) if isinstance(on, str) else on
    return found.scaled(host_scale(conditions, found.id))


def gap_s(machine: Host, graph: bool) -> float:
    """Between two kernels of a stream, both launched in time."""
    return machine.graph_gap_s if graph else machine.gap_s


def host_counts(trace: Trace) -> dict[str, Array]:
    """By the name of what the host spends on it (``Host``), how often each op of a trace has it; kernels are counted
    apart, where they are known."""
    phase = np.array([op.phase for op in trace.ops])
    kernel = np.array([op.kind == "kernel" for op in trace.ops], dtype=bool)
    view = np.array([op.kind == "view" for op in trace.ops], dtype=bool)
    forward, backward, optimizer = (phase == name for name in PHASES)
    # ops that were made after tracing (a fused kernel) have no place in the program
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
    """What the host spends on each op of a trace before the next, beside launching its kernels."""
    return np.sum([getattr(machine, name) * count for name, count in host_counts(trace).items()], axis=0)


@dataclass(frozen=True)
class Queue:
    """Kernels that follow one another on one GPU, and when the host has launched each from the start."""

    kernels: tuple[OpRan, ...]
    places: tuple[int, ...]  # of their ops in the trace
    busy_s: Array  # each with the gap behind it
    launched_s: Array
    host_s: float  # of all its ops

    @classmethod
    def of(cls, found: Sequence[tuple[int, OpRan | None]], costs_s: Array, machine: Host, graph: bool) -> Queue:
        """``found``: places of ops in a trace and what they launch; ``costs_s``: ``launch_costs`` of that trace.
        ``graph``: kernels replay from a CUDA graph, so that the host launches once."""
        launching_s = np.array([machine.launch_s * kernel.launches if kernel else 0.0 for _, kernel in found])
        clock = np.cumsum(costs_s[[at for at, _ in found]] + launching_s)
        launching = [i for i, (_, kernel) in enumerate(found) if kernel is not None]
        kernels = tuple(kernel for _, kernel in found if kernel is not None)
        busy_s = np.array([kernel.time_s + gap_s(machine, graph) * kernel.launches for kernel in kernels])
        # the first of many kernels runs while the others are launched, no faster than that
        more_s = np.maximum(0.0, launching_s[launching] - machine.launch_s) * (not graph)
        return cls(
            kernels=kernels,
            places=tuple(found[i][0] for i in launching),
            busy_s=np.maximum(busy_s, more_s),
            launched_s=np.full(len(kernels), machine.graph_s) if graph else clock[launching] - more_s,
            host_s=0.0 if graph or not len(clock) else float(clock[-1]),
        )

    def kernel_at(self, place: int) -> int:
        """The last kernel at or before an op of the trace."""
        return bisect.bisect_right(self.places, place) - 1
