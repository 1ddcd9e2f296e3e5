"""Passes of a batch laid on the timeline: kernels, what power and the host add, and one of them drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kernelcast.calls import Launch
from kernelcast.networks.forward import Batch, Deployment, forward
from kernelcast.span import Span
from kernelcast.timeline import Event, Lane, Ran, Timeline, joined
from kernelcast.timeline.power import WINDOW_S, limited, throttled_s
from kernelcast.times import Times

# What whole passes are off beyond the intervals of their kernels (clocks, caches, kernels between those that are told):
# set on every second of PipeWeave's measured cases; `kernelcast evaluate served` tells how many of the others it holds.
PASS_SPREAD = (0.045, 0.045)
POWER_LIMIT = "power limit"  # the part of a pass that a lowered clock adds
HOST_RANGE = (0.7, 2.0)  # of a stack's host times, what those of other machines are: seldom faster, often slower


@dataclass(frozen=True)
class Run:
    """One pass as one GPU runs it: ``parts`` micro-batches, each with these launches; ``batch`` is one of them."""

    deployment: Deployment
    batch: Batch
    launches: tuple[Launch, ...]
    parts: int

    @classmethod
    def of(cls, deployment: Deployment, batch: Batch) -> Run:
        """What one GPU runs: the heaviest micro-batch of the heaviest rank, sequences dealt out in turn."""
        layout = deployment.layout
        parts = min(layout.micro_batches, math.ceil(batch.sequences / layout.dp))
        order = sorted(range(batch.sequences), key=lambda i: -(batch.new[i] + batch.past[i]))
        rows = sorted(order[:: layout.dp * parts])
        mine = replace(batch, new=tuple(batch.new[i] for i in rows), past=tuple(batch.past[i] for i in rows))
        return cls(deployment, mine, tuple(forward(deployment, mine)), parts)

    def rounds(self, phase: str) -> float:
        """How often the time of one micro-batch passes. A stage does 1 / pp of the layers; micro-batches follow one
        another, and the first fills the pipeline; in decode stages never drain between steps."""
        stages = self.deployment.layout.pp
        return (max(self.parts, stages) if phase == "decode" else self.parts + stages - 1) / stages

    def host_s(self, phase: str, kernels_s: float) -> float:
        """What the GPU waits for: launches that are slower than the kernels, gaps of a graph."""
        stack, launched = self.deployment.stack, sum(launch.count for launch in self.launches)
        if stack.replays(self.batch.tokens, decodes=phase == "decode"):
            return launched * stack.gap_s
        return max(0.0, launched * stack.launch_s - kernels_s)


@dataclass(frozen=True)
class Pass:
    """A pass on the timeline, which stands for ``count`` like it. ``ran`` adds up to ``span``, both of one pass."""

    phase: str
    run: Run
    count: float
    span: Span
    ran: tuple[Ran, ...]


def laid(phase: str, runs: Sequence[tuple[float, Run]], times: Times, *, draft: bool = False) -> list[Pass]:
    """All passes of a phase; each run stands for so many. ``draft``: of the model that guesses, which the host calls
    together with the other."""
    kernels = [[Ran.of(phase, launch, times, run.rounds(phase)) for launch in run.launches] for _, run in runs]
    spans = [joined(members) for members in kernels]
    lasting = sum(count * span.time_s for (count, _), span in zip(runs, spans, strict=True)) >= WINDOW_S
    found = []
    for (count, run), members, span in zip(runs, kernels, spans, strict=True):
        span = _whole(span)
        beside = _beside(phase, run, times, span.time_s, lasting, draft)
        named = [replace(ran, part="draft model") for ran in members] if draft else members
        found.append(Pass(phase, run, count, sum((ran.span for ran in beside), span), (*named, *beside)))
    return found


def _whole(kernels: Span) -> Span:
    """The kernels of a pass, as far off as whole passes are."""
    low, high = ((kernels.time_s - kernels.low_s), (kernels.high_s - kernels.time_s))
    below, above = (
        math.hypot(own, share * kernels.time_s) for own, share in zip((low, high), PASS_SPREAD, strict=True)
    )
    return Span(kernels.time_s, kernels.time_s - below, kernels.time_s + above)


def _beside(phase: str, run: Run, times: Times, kernels_s: float, lasting: bool, draft: bool) -> list[Ran]:
    """What a pass takes beside its kernels: a lowered clock, and the host."""
    stack, found = run.deployment.stack, []
    if lasting and limited(run.deployment.gpu):
        slower = (x.count * throttled_s(x.call, times[x.call].span.time_s, times) for x in run.launches)
        slower_s = sum(slower) * run.rounds(phase)
        if slower_s:
            found.append(Ran.beside(phase, POWER_LIMIT, Span.exact(slower_s), "power", "near"))
            kernels_s += slower_s
    own_s = 0.0 if draft else stack.step_s if phase == "decode" else stack.prefill_s
    host_s = run.host_s(phase, kernels_s) + own_s
    if host_s:
        found.append(Ran.beside(phase, "host", Span(host_s, host_s * HOST_RANGE[0], host_s * HOST_RANGE[1]), "host"))
    return found


def drawn(one: Pass, times: Times) -> Timeline:
    """A pass, layer by layer: it ends when the pass does."""
    stack, batch = one.run.deployment.stack, one.run.batch
    gap_s = stack.gap_s if stack.graphs and one.phase == "decode" else 0.0
    at_s, gaps_s, events = 0.0, 0.0, []
    for launch in forward(one.run.deployment, batch, in_order=True):
        found = times[launch.call]
        given = {name: list(value) if isinstance(value, tuple) else value for name, value in launch.call.parameters}
        told = {"op": launch.op, **given, "bound_by": found.bound_by, "support": found.support}
        events.append(Event(launch.op, at_s, found.span.time_s * launch.count, launch.part, told))
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
