"""One pass of a batch on the timeline: its kernels, what power and the host add, and how it is drawn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kernelcast.calls import Launch
from kernelcast.networks.batch import Batch
from kernelcast.networks.forward import Deployment, forward
from kernelcast.predict import host_scale
from kernelcast.serving.beside import shares
from kernelcast.span import Span
from kernelcast.timeline import Event, Lane, Ran, Timeline
from kernelcast.times import Times

# What whole passes are off beyond the intervals of their kernels (clocks, caches, kernels between those that are told):
# set on every second of PipeWeave's measured cases; `kernelcast evaluate served` tells how many of the others it holds.
PASS_SPREAD = (0.025, 0.025)
POWER_LIMIT = "power limit"  # the part of a pass that a lowered clock adds
HOST_RANGE = (0.7, 2.0)  # of a stack's host times, what those of other machines are: seldom faster, often slower


@dataclass(frozen=True)
class Run:
    """One pass as one GPU runs it: ``parts`` micro-batches, each with these launches; ``batch`` is one of them."""

    deployment: Deployment
    batch: Batch
    parts: int

    @cached_property
    def launches(self) -> tuple[Launch, ...]:
        return tuple(forward(self.deployment, self.batch))


@dataclass(frozen=True)
class Pass:
    """A pass on the timeline, which stands for ``count`` like it. ``ran`` adds up to ``span``, both of one pass."""

    phase: str
    run: Run
    count: float
    span: Span
    ran: tuple[Ran, ...]


def drawn(one: Pass, times: Times) -> Timeline:
    """A pass, layer by layer: it ends when the pass does."""
    batch, stack = one.run.batch, one.run.deployment.stack
    stack = stack.with_host(host_scale(times.conditions, stack.id).factor)
    gap_s = stack.gap_s if stack.graphs and one.phase == "decode" else 0.0
    at_s, gaps_s, events = 0.0, 0.0, []
    launches = forward(one.run.deployment, batch, in_order=True)
    times.learn(launch.call for launch in launches)
    each = [times[launch.call] for launch in launches]
    visible = shares(launches, [(found.span.time_s, found.dram_s) for found in each], batch.tokens)
    for launch, found, share in zip(launches, each, visible, strict=True):
        given = {name: list(value) if isinstance(value, tuple) else value for name, value in launch.call.parameters}
        told = {"op": launch.op, **given, "bound_by": found.bound_by, "support": found.support}
        events.append(Event(launch.op, at_s, found.span.time_s * launch.count * share, launch.part, told))
        at_s, gaps_s = events[-1].end_s + gap_s * launch.count, gaps_s + gap_s * launch.count
    waits = {ran.part: ran.span.time_s for ran in one.ran if not ran.launches}
    waits["host"] = waits.get("host", 0.0) - gaps_s
    waits["other micro-batches"] = one.span.time_s - at_s - sum(waits.values())
    for name, time_s in waits.items():
        if time_s > 1e-9 * one.span.time_s:
            events.append(Event(name, at_s, time_s, name))
            at_s += time_s
    lane = f"{one.phase}, {batch.sequences} request{'s' if batch.sequences > 1 else ''}"
    return Timeline((Lane(one.run.deployment.gpu.name, lane, tuple(events)),))
