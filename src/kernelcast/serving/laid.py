"""Passes of many workloads on one deployment laid out in time, as columns: kernels, what power and the host add."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kernelcast.calls import Call, Launch
from kernelcast.efficiency.run_scales import UNSCALED, Scale
from kernelcast.kernels.base import kernel_class
from kernelcast.kernels.work import Array
from kernelcast.machine.analyse import PIPELINES
from kernelcast.networks.batch import Batches, Rows
from kernelcast.networks.forward import Deployment, forward_many
from kernelcast.serving.asked import summed
from kernelcast.serving.beside import SORTS, hides, visible
from kernelcast.serving.passes import HOST_RANGE, PASS_SPREAD, POWER_LIMIT, Pass, Run
from kernelcast.serving.steps import Steps
from kernelcast.span import Span
from kernelcast.stacks import Stack
from kernelcast.support import SUPPORT
from kernelcast.timeline import Ran
from kernelcast.timeline.power import WINDOW_S, longer_s
from kernelcast.times import Gathered, TimeColumns

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
                Ran(phase, self.part(launch), Span(*times.times_s[:, call].tolist()) * (count * share),
                    count, PIPELINES[times.bound_by[call]], _LEVELS[times.support[call]],
                    kernel_class(launch.op).family, times.standing[call])
            )  # fmt: skip
        if power_s := float(self.power_s[row]):
            ran.append(Ran.beside(phase, POWER_LIMIT, Span.exact(power_s), "power", "near"))
        if host_s := float(self.host_s[row]):
            ran.append(Ran.beside(phase, "host", Span(host_s, *(x * host_s for x in self.host_range)), "host"))
        run = Run(self.deployment, self.batches.batch(row), int(self.parts[row]))
        return Pass(phase, run, float(self.counts[row]), Span(*self.spans_s[:, row].tolist()), tuple(ran))

    def _launches(self, row: int) -> Iterator[tuple[Launch, int, int]]:
        """The launches of a pass, its entry in their columns, and the row of that call."""
        group = next(group for group in self.alike if row in group.rows)
        place = int(np.searchsorted(group.rows, row))
        for launch, calls in zip(group.launches, group.calls, strict=True):
            entry = int(group.places[launch.by][place])
            yield launch, entry, int(calls[entry])
