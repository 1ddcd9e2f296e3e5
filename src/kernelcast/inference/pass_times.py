"""Times of forward passes: kernels, what overlaps, what the power limit and the host add, and their intervals.

Some kernels overlap with others on a stream of their own; only what the others do not hide counts. Shared experts run
beside the routed ones where a step is small enough to leave room: engines do so in small steps alone (vLLM up to 256
tokens: VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD; SGLang and TensorRT-LLM in graphs of decode). Routed experts then
keep DRAM busy, and what runs beside them is hidden up to their length, but for the bytes that it reads of its own; in
larger steps both want the same units. With two-batch overlap the dispatch of one half of a batch runs beside all that
the other half does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.energy.power import WINDOW_S, longer_s
from kernelcast.forecast.calibration import UNSCALED, Scale
from kernelcast.forecast.calls import Call, Launch
from kernelcast.forecast.conditions import host_scale
from kernelcast.forecast.predict_table import Gathered, TimeColumns, Times
from kernelcast.inference.batch import Batch, Batches, Rows
from kernelcast.inference.forward import Deployment, forward, forward_many
from kernelcast.inference.workload import Steps, summed
from kernelcast.machine.analyse import PIPELINES
from kernelcast.ops.base import kernel_class
from kernelcast.ops.work import Array
from kernelcast.results import SUPPORT, Interval
from kernelcast.schedule import Event, KernelTime, Lane, Timeline
from kernelcast.stacks import Stack

MOST_TOKENS = 256
SORTS = ("experts", "all")  # beside what


def hides(launch: Launch, sort: str) -> bool:
    """Whether what runs beside this sort may run beside it."""
    return not launch.beside and (sort == "all" or launch.op == "moe")


def visible(sort: str, hiding_s: Any, beside_s: Any, dram_s: Any, tokens: Any) -> Any:
    """The share of what runs beside that is not hidden, where it keeps DRAM busy for ``dram_s``; columns: a column."""
    took_s = np.maximum(beside_s, 1e-12)
    left = np.maximum(0.0, 1.0 - hiding_s / took_s)
    if sort == "all":  # a link's
        return left
    return np.where(np.asarray(tokens) <= MOST_TOKENS, np.clip(dram_s / took_s, left, 1.0), 1.0)


def visible_shares(launches: Sequence[Launch], times: Sequence[tuple[float, float]], tokens: int) -> list[float]:
    """Of each launch of a pass, given what one takes and keeps DRAM busy: the share of its time that counts."""
    took = [(launch, launch.count * each_s) for launch, (each_s, _) in zip(launches, times, strict=True)]
    busy = [(launch, launch.count * dram_s) for launch, (_, dram_s) in zip(launches, times, strict=True)]
    left = {"": 1.0}
    for sort in SORTS:
        hiding = sum(time_s for launch, time_s in took if hides(launch, sort))
        beside = sum(time_s for launch, time_s in took if launch.beside == sort)
        dram = sum(dram_s for launch, dram_s in busy if launch.beside == sort)
        left[sort] = float(visible(sort, hiding, beside, dram, tokens))
    return [left[launch.beside] for launch in launches]


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
    span: Interval
    ran: tuple[KernelTime, ...]


def drawn(one: Pass, times: Times) -> Timeline:
    """A pass, layer by layer: it ends when the pass does."""
    batch, stack = one.run.batch, one.run.deployment.stack
    stack = stack.with_host(host_scale(times.conditions, stack.id).factor)
    gap_s = stack.gap_s if stack.graphs and one.phase == "decode" else 0.0
    at_s, gaps_s, events = 0.0, 0.0, []
    launches = forward(one.run.deployment, batch, in_order=True)
    times.learn(launch.call for launch in launches)
    each = [times[launch.call] for launch in launches]
    visible = visible_shares(launches, [(found.span.value, found.dram_s) for found in each], batch.tokens)
    for launch, found, share in zip(launches, each, visible, strict=True):
        given = {name: list(value) if isinstance(value, tuple) else value for name, value in launch.call.parameters}
        told = {"op": launch.op, **given, "bound_by": found.bound_by, "support": found.support}
        events.append(Event(launch.op, at_s, found.span.value * launch.count * share, launch.part, told))
        at_s, gaps_s = events[-1].end_s + gap_s * launch.count, gaps_s + gap_s * launch.count
    waits = {ran.part: ran.span.value for ran in one.ran if not ran.launches}
    waits["host"] = waits.get("host", 0.0) - gaps_s
    waits["other micro-batches"] = one.span.value - at_s - sum(waits.values())
    for name, time_s in waits.items():
        if time_s > 1e-9 * one.span.value:
            events.append(Event(name, at_s, time_s, name))
            at_s += time_s
    lane = f"{one.phase}, {batch.sequences} request{'s' if batch.sequences > 1 else ''}"
    return Timeline((Lane(one.run.deployment.gpu.name, lane, tuple(events)),))


PHASES = ("prefill", "decode")
_LEVELS = tuple(SUPPORT)


@dataclass(frozen=True)
class Alike:
    """Passes of one form: ``rows`` of the batches, their launches with columns for sizes, where each pass finds its
    entry in them (``Launch.by``), and the row of each entry in the table of calls."""

    rows: Rows
    launches: list[Launch]
    places: dict[str, Rows]
    calls: list[Rows]
    by: dict[str, list[int]] = field(init=False)  # launches that follow the same of a batch

    def __post_init__(self) -> None:
        found: dict[str, list[int]] = {}
        for at, launch in enumerate(self.launches):
            found.setdefault(launch.by, []).append(at)
        object.__setattr__(self, "by", found)

    def launched(self, stack: Stack) -> tuple[float, float]:
        """Launches of a pass, and the host's seconds for them where no graph runs."""
        each = [(launch.count, launch.count * stack.launching_s(launch.op)) for launch in self.launches]
        return sum(count for count, _ in each), sum(time_s for _, time_s in each)

    def sorts(self) -> Iterator[tuple[list[Launch], Rows, Rows]]:
        """Launches that follow the same of a batch, the rows of their calls (launches, entries), and the entry of each
        pass."""
        for by, members in self.by.items():
            calls = np.array(np.broadcast_arrays(*(self.calls[at] for at in members)))
            yield [self.launches[at] for at in members], calls, self.places[by]


class Laid:
    """Passes of one deployment; ``owner``: the workload of each. ``label``: the part that all of it is, where it is not
    the model itself (one that guesses, one that reads images), which the host calls together with it."""

    def __init__(self, deployment: Deployment, steps: Sequence[Steps], gathered: Gathered, label: str = "") -> None:
        layout = deployment.layout
        self.deployment, self.label, self.count = deployment, label, len(steps)
        self.batches, self.parts = Batches.joined([one.batches for one in steps]).shared(
            layout.dp, layout.micro_batches
        )
        self.counts = np.concatenate([one.counts for one in steps])
        self.decodes = np.concatenate([one.decodes for one in steps])
        self.owner = np.repeat(np.arange(self.count), [len(one.counts) for one in steps])
        self.starts = np.searchsorted(self.owner, np.arange(self.count + 1))
        # How often the time of one micro-batch passes. A stage does 1 / pp of the layers; micro-batches follow one
        # another, and the first fills the pipeline; in decode stages never drain between steps.
        self.rounds = np.where(self.decodes, np.maximum(self.parts, layout.pp), self.parts + layout.pp - 1) / layout.pp
        self.alike = [
            Alike(rows, launches, places, [gathered.rows(launch.call) for launch in launches])
            for rows, launches, places in forward_many(deployment, self.batches)
        ]

    def lay(self, times: TimeColumns, host: Scale = UNSCALED) -> None:
        """Once the times of all calls are known: those of all passes. ``spans_s``: time, low, high. ``host``: what
        measured runs say of the host."""
        self.times = times
        self.stack, self.host_range = self.deployment.stack.with_host(host.factor), [x**host.reach for x in HOST_RANGE]
        kernels, slower, held = np.empty((3, len(self.owner))), np.zeros(len(self.owner)), np.zeros(len(self.owner))
        launched, self.visible = np.empty((2, len(self.owner))), {sort: np.ones(len(self.owner)) for sort in SORTS}
        for group in self.alike:
            kernels[:, group.rows], slower[group.rows], held[group.rows] = self._kernels(group)
            launched[:, group.rows] = np.array([group.launched(self.stack)]).T
        kernels *= self.rounds
        # a service under a lower limit than the board's is at it before a batch begins
        self.power_s = np.where(self._lasting(kernels[0])[self._segment], slower, held) * self.rounds
        self.host_s = self._host_s(launched, kernels[0] + self.power_s)
        below, above = (
            np.hypot(end, share * kernels[0])
            for end, share in zip((kernels[0] - kernels[1], kernels[2] - kernels[0]), PASS_SPREAD, strict=True)
        )
        whole = np.array([kernels[0], kernels[0] - below, kernels[0] + above])
        self.spans_s = whole + self.power_s + self.host_s * np.array([[1.0], *([x] for x in self.host_range)])

    def _kernels(self, group: Alike) -> tuple[Array, Array, Array]:
        """Of each pass, one micro-batch: time, low and high of its kernels, and what power limits would add: all of
        them, and a lower one than the board's alone. What one
        network says is wrong the same way wherever it runs, different networks are wrong on their own
        (``timeline.joined``)."""
        networks: dict[str, Array] = {}
        slower, held = np.zeros(len(group.rows)), np.zeros(len(group.rows))
        self._visible(group)
        for launches, calls, at in group.sorts():
            counts = np.array([launch.count for launch in launches])
            seconds = self.seconds(group, launches, calls, at)
            families = [kernel_class(launch.op).family for launch in launches]
            for name in dict.fromkeys(families):
                own = seconds[:, [family == name for family in families]].sum(axis=1)
                networks[name] = networks.get(name, 0.0) + own[:, at]
            slower += self._slower(launches, calls)[at]
            if self.times.held is not None:
                held += (counts @ (self.times.times_s[0, calls] * (self.times.held[calls] - 1)))[at]
        time, low, high = np.array(list(networks.values())).transpose(1, 0, 2)
        below, above = (np.sqrt((end**2).sum(axis=0)) for end in (time - low, high - time))
        total = time.sum(axis=0)
        return np.array([total, total - below, total + above]), slower, held

    def seconds(self, group: Alike, launches: Sequence[Launch], calls: Rows, at: Rows) -> Array:
        """(3, launches, entries): time, low and high of all that a pass launches of each, without what is hidden."""
        counts = np.array([launch.count for launch in launches])
        found: Array = self.times.times_s[:, calls] * counts[:, None]
        for sort in SORTS:  # entries follow the tokens of passes, and so does what is visible
            beside = [launch.beside == sort for launch in launches]
            if any(beside):
                share = np.ones(found.shape[2])
                share[at] = self.visible[sort][group.rows]
                found[:, beside] *= share
        return found

    def _visible(self, group: Alike) -> None:
        """Of the passes of a group: the share of what runs beside others that these do not hide."""
        for sort in SORTS:
            if not any(launch.beside == sort for launch in group.launches):
                continue
            hiding, beside, dram = np.zeros((3, len(group.rows)))
            for launches, calls, at in group.sorts():
                for launch, rows in zip(launches, calls, strict=True):
                    if hides(launch, sort) or launch.beside == sort:
                        into = beside if launch.beside == sort else hiding
                        into += launch.count * self.times.times_s[0, rows][at]
                    if launch.beside == sort:
                        dram += launch.count * self.times.dram_s[rows][at]
            tokens = self.batches.tokens[group.rows]
            self.visible[sort][group.rows] = visible(sort, hiding, beside, dram, tokens)

    def _slower(self, launches: Sequence[Launch], calls: Rows) -> Array:
        gpu, found = self.deployment.gpu, np.zeros(calls.shape[1])
        held = self.times.held
        if gpu.tensor_flops_per_j or held is not None:
            for launch, rows in zip(launches, calls, strict=True):
                share = 1.0 if held is None else held[rows]
                found += launch.count * longer_s(launch.call, self.times.times_s[0, rows], gpu, share)
        return found

    @property
    def _segment(self) -> Rows:
        """Of each pass: its workload and phase."""
        return 2 * self.owner + self.decodes

    def _lasting(self, kernels_s: Array) -> NDArray[np.bool_]:
        """Phases that are long enough for a GPU to lower its clock."""
        return summed(self._segment, self.counts * kernels_s, 2 * self.count) >= WINDOW_S

    def _host_s(self, launched: Array, kernels_s: Array) -> Array:
        """What the GPU waits for: launches that are slower than the kernels, gaps of a graph; and the host's own."""
        stack, (launches, launching_s) = self.stack, launched
        graph = stack.replays(self.batches.tokens, decodes=self.decodes)
        waits = np.where(graph, launches * stack.gap_s, np.maximum(0.0, launching_s - kernels_s))
        return waits if self.label else waits + np.where(self.decodes, stack.step_s, stack.prefill_s)

    def part(self, launch: Launch) -> str:
        return self.label or launch.part

    # ---- of each workload ----

    def phase_s(self, decode: bool) -> Array:
        """(3, workloads): the passes of one phase, one after another."""
        weights = self.counts * (self.decodes == decode)
        return np.array([summed(self.owner, weights * end, self.count) for end in self.spans_s])

    def refused(self, at: int) -> tuple[str, Call] | None:
        """Why a workload cannot be predicted, and the call that asks for it."""
        for row in range(*self.starts[at : at + 2]):
            for launch, entry, call in self._launches(row):
                if call in self.times.refused:
                    return self.times.refused[call], launch.call.entry(entry)
        return None

    def passes(self, at: int) -> list[Pass]:
        """The passes of a workload, kernel by kernel."""
        return [self._pass(row) for row in range(*self.starts[at : at + 2])]

    def _pass(self, row: int) -> Pass:
        phase, rounds, times = PHASES[int(self.decodes[row])], float(self.rounds[row]), self.times
        ran = []
        for launch, _, call in self._launches(row):
            count = launch.count * rounds
            share = float(self.visible[launch.beside][row]) if launch.beside else 1.0
            ran.append(
                KernelTime(phase, self.part(launch), Interval(*times.times_s[:, call].tolist()) * (count * share),
                    count, PIPELINES[times.bound_by[call]], _LEVELS[times.support[call]],
                    kernel_class(launch.op).family, times.match[call])
            )  # fmt: skip
        if power_s := float(self.power_s[row]):
            ran.append(KernelTime.beside(phase, POWER_LIMIT, Interval.exact(power_s), "power", "near"))
        if host_s := float(self.host_s[row]):
            ran.append(
                KernelTime.beside(phase, "host", Interval(host_s, *(x * host_s for x in self.host_range)), "host")
            )
        run = Run(self.deployment, self.batches.batch(row), int(self.parts[row]))
        return Pass(phase, run, float(self.counts[row]), Interval(*self.spans_s[:, row].tolist()), tuple(ran))

    def _launches(self, row: int) -> Iterator[tuple[Launch, int, int]]:
        """The launches of a pass, its entry in their columns, and the row of that call."""
        group = next(group for group in self.alike if row in group.rows)
        place = int(np.searchsorted(group.rows, row))
        for launch, calls in zip(group.launches, group.calls, strict=True):
            entry = int(group.places[launch.by][place])
            yield launch, entry, int(calls[entry])
