"""Times of forward passes: kernels, what overlaps, what the power limit and the host add, and their intervals.

Some kernels overlap with others on a stream of their own; only what the others do not hide counts. Shared experts run
beside the routed ones where a step is small enough to leave room: engines do so in small steps alone (vLLM up to 256
tokens: VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD; SGLang and TensorRT-LLM in graphs of decode). Routed experts then
keep DRAM busy, and what runs beside them is hidden up to their length, but for the bytes that it reads of its own; in
larger steps both want the same units. With two-batch overlap the dispatch of one half of a batch runs beside all that
the other half does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from kernelcast.energy.power import WINDOW_S, capped, longer_s, under_cap
from kernelcast.errors import KernelcastError
from kernelcast.forecast.calibration import UNSCALED, Scale
from kernelcast.forecast.calls import Call, Launch
from kernelcast.forecast.predict_table import CallTable, TableForecast, Times, refusal
from kernelcast.inference.batch import Batch, BatchColumns, Rows
from kernelcast.inference.forward import Deployment, forward, forward_many
from kernelcast.inference.workload import WorkloadPasses, sum_by_owner
from kernelcast.machine.analyse import PIPELINES
from kernelcast.ops.base import kernel_class
from kernelcast.ops.work import Array
from kernelcast.results import SUPPORT, Interval
from kernelcast.schedule import Event, KernelTime, Lane, Timeline
from kernelcast.stacks import Stack

_SMALL_STEP_TOKENS = 256
OVERLAPS = ("experts", "all")  # kernels that a second stream overlaps with (``Launch.overlaps``)
# Relative error of whole passes beyond the intervals of their kernels (clocks, caches, kernels that are not modelled):
# set on every second of PipeWeave's measured cases, of which 85% are then inside (all others are faster);
# `kernelcast evaluate served` scores its coverage of the others.
PASS_SPREAD = (0.045, 0.025)
POWER_LIMIT = "power limit"  # the part of a pass that a lowered clock adds
HOST_RANGE = (0.7, 2.0)  # host times of other machines over those of the stack: seldom faster, often slower
PHASES = ("prefill", "decode")
_LEVELS = tuple(SUPPORT)


def visible_share(overlap: str, hiding_s: Any, beside_s: Any, dram_s: Any, tokens: Any) -> Any:
    """The share of ``beside_s`` on a second stream that ``hiding_s`` on the first does not hide; ``dram_s``: that the
    second stream's bytes keep DRAM busy. Columns: a column."""
    beside_s = np.maximum(beside_s, 1e-12)
    left = np.maximum(0.0, 1.0 - hiding_s / beside_s)
    if overlap == "all":  # a link's
        return left
    return np.where(np.asarray(tokens) <= _SMALL_STEP_TOKENS, np.clip(dram_s / beside_s, left, 1.0), 1.0)


def pass_deviation(kernels_s: Any, deviation_s: Any, end: int) -> Any:
    """The deviation of a pass below (end 0) or above (1): of its kernels, and of whole passes beyond them."""
    return (deviation_s**2 + (PASS_SPREAD[end] * kernels_s) ** 2) ** 0.5


@dataclass(frozen=True)
class PassGroup:
    """Passes that launch the same kernels: ``rows`` of the batches, their launches with columns for sizes, where each
    pass finds its entry in them (by ``Launch.scales_with``), and the row of each entry in the table of calls."""

    rows: Rows
    launches: list[Launch]
    entries: dict[str, Rows]
    calls: list[Rows]
    by: dict[str, list[int]] = field(init=False)  # launches that scale with the same size of a batch

    def __post_init__(self) -> None:
        members: dict[str, list[int]] = {}
        for at, launch in enumerate(self.launches):
            members.setdefault(launch.scales_with, []).append(at)
        object.__setattr__(self, "by", members)

    def tables(self) -> Iterator[tuple[list[Launch], Rows, Rows]]:
        """Launches that scale with the same size of a batch, the rows of their calls (launches, entries), and the entry
        of each pass."""
        for by, members in self.by.items():
            calls = np.array(np.broadcast_arrays(*(self.calls[at] for at in members)))
            yield [self.launches[at] for at in members], calls, self.entries[by]


_CACHE_BYTES = 2.0  # of a number of the KV cache, in 16 bits


def _least_s(call: Call, reached: Mapping[str, float]) -> Any:
    """``product_flops_per_s``: of products of up to ``product_rows`` rows; ``cache_bytes_per_s``: of the KV cache that
    a decode reads; ``marlin_mxfp4_flops_per_s``: of experts, by backend and format. A column where sizes are some."""
    given = call.arguments
    if call.op == "moe":
        most = reached.get(f"{given.get('backend')}_{given['dtype']}_flops_per_s", np.inf)
        products = (3 if given["gated"] else 2) * given["topk"] / (given["tp"] * given["ep"])
        return 2.0 * products * given["tokens"] * given["hidden"] * given["inter"] / most
    if call.op == "gemm" and "product_flops_per_s" in reached:
        seconds = 2.0 * given["m"] * given["n"] * given["k"] / reached["product_flops_per_s"]
        return np.where(given["m"] <= reached["product_rows"], seconds, 0.0)
    if call.op == "attention" and "kv_len" in given and "cache_bytes_per_s" in reached:
        numbers = 2.0 * given["batch"] * given["kv_len"] * given["kv_heads"] * given["head_dim"]
        return np.where(given["q_len"] == 1, numbers * _CACHE_BYTES / reached["cache_bytes_per_s"], 0.0)
    return 0.0


class PassKernels:
    """Kernels of many passes of one deployment, an entry a pass; ``by``: only those that scale with this size.
    ``predict`` gives ``kernels_s``, (3, passes): time, low, high; and what power limits add in a run that lasts:
    ``throttled_s`` by all of them, ``capped_s`` by a lower one than the board's alone."""

    def __init__(self, deployment: Deployment, batches: BatchColumns, calls: CallTable, by: str = "") -> None:
        self.deployment, self.batches = deployment, batches
        self.groups = [
            PassGroup(rows, launches, entries, [calls.add(launch.call) for launch in launches])
            for rows, launches, entries in forward_many(deployment, batches, by)
        ]

    def predict(self, times: TableForecast) -> None:
        """Once the times of all calls are known."""
        self.times, count = self._reached(times), len(self.batches)
        self.kernels_s, self.throttled_s, self.capped_s = np.zeros((3, count)), np.zeros(count), np.zeros(count)
        self.visible = {overlap: np.ones(count) for overlap in OVERLAPS}
        for group in self.groups:
            if group.launches:
                self._overlap(group)
                self._add(group)

    def _reached(self, times: TableForecast) -> TableForecast:
        """The forecast with what the engine's kernels reach at most on GPUs that they were not written or tuned for."""
        known, gpu = dict(self.deployment.stack.reaches), self.deployment.gpu
        reached = {**known.get(gpu.vendor, {}), **known.get(gpu.instruction_path, {})}
        if not reached:
            return times
        times_s = times.times_s.copy()
        for group in self.groups:
            for launch, rows in zip(group.launches, group.calls, strict=True):
                times_s[:, rows] *= np.maximum(1.0, _least_s(launch.call, reached) / times_s[0, rows])
        return replace(times, times_s=times_s)

    def _add(self, group: PassGroup) -> None:
        """The kernels of a group. Errors of one network are fully correlated, those of different networks
        independent (``schedule.joined``)."""
        networks: dict[str, Array] = {}
        for launches, calls, entry in group.tables():
            counts = np.array([launch.count for launch in launches])
            seconds = self.seconds(group, launches, calls, entry)
            families = [kernel_class(launch.op).family for launch in launches]
            for name in dict.fromkeys(families):
                of_network = seconds[:, [family == name for family in families]].sum(axis=1)
                networks[name] = networks.get(name, 0.0) + of_network[:, entry]
            self.throttled_s[group.rows] += self._throttled(launches, calls)[entry]
            if self.times.slowdown is not None:
                longer = self.times.times_s[0, calls] * (self.times.slowdown[calls] - 1)
                self.capped_s[group.rows] += (counts @ longer)[entry]
        time, low, high = np.array(list(networks.values())).transpose(1, 0, 2)
        below, above = (np.sqrt((end**2).sum(axis=0)) for end in (time - low, high - time))
        total = time.sum(axis=0)
        self.kernels_s[:, group.rows] = total, total - below, total + above

    def seconds(self, group: PassGroup, launches: Sequence[Launch], calls: Rows, entry: Rows) -> Array:
        """(3, launches, entries): time, low and high of each launch in a pass, without the overlapped part."""
        counts = np.array([launch.count for launch in launches])
        seconds: Array = self.times.times_s[:, calls] * counts[:, None]
        for overlap in OVERLAPS:  # entries are by tokens of passes, and so is the visible share
            beside = [launch.overlaps == overlap for launch in launches]
            if any(beside):
                share = np.ones(seconds.shape[2])
                share[entry] = self.visible[overlap][group.rows]
                seconds[:, beside] *= share
        return seconds

    def _overlap(self, group: PassGroup) -> None:
        """The share of each second stream that the first does not hide."""
        for overlap in OVERLAPS:
            if not any(launch.overlaps == overlap for launch in group.launches):
                continue
            hiding, beside, dram = np.zeros((3, len(group.rows)))
            for launches, calls, entry in group.tables():
                for launch, rows in zip(launches, calls, strict=True):
                    if launch.overlaps == overlap:
                        beside += launch.count * self.times.times_s[0, rows][entry]
                        dram += launch.count * self.times.dram_s[rows][entry]
                    elif not launch.overlaps and (overlap == "all" or launch.op == "moe"):
                        hiding += launch.count * self.times.times_s[0, rows][entry]
            tokens = self.batches.tokens[group.rows]
            self.visible[overlap][group.rows] = visible_share(overlap, hiding, beside, dram, tokens)

    def _throttled(self, launches: Sequence[Launch], calls: Rows) -> Array:
        gpu, longer, held = self.deployment.gpu, np.zeros(calls.shape[1]), self.times.slowdown
        if gpu.tensor_flops_per_j or held is not None:
            for launch, rows in zip(launches, calls, strict=True):
                share = 1.0 if held is None else held[rows]
                longer += launch.count * longer_s(launch.call, self.times.times_s[0, rows], gpu, share)
        return longer

    def launched(self, stack: Stack) -> Array:
        """(3, passes): kernels, the host's seconds to launch them where no graph runs, and those of attention between
        the pieces of a graph, which has the projections of a whole layer."""
        launched = np.zeros((3, len(self.batches)))
        for group in self.groups:
            for launch in group.launches:
                between = "attention" if launch.op.endswith("_layer") else launch.op
                # and then the next piece
                of_attention_s = stack.launching_s(between) + stack.launch_s if launch.scales_with == "lengths" else 0.0
                each = np.array([1.0, stack.launching_s(launch.op), of_attention_s])
                launched[:, group.rows] += launch.count * each[:, None]
        return launched

    def launches(self, row: int) -> Iterator[tuple[Launch, int, int]]:
        """The launches of a pass, its entry in their columns, and the row of that call."""
        group = next(group for group in self.groups if row in group.rows)
        at = int(np.searchsorted(group.rows, row))
        for launch, calls in zip(group.launches, group.calls, strict=True):
            entry = int(group.entries[launch.scales_with][at])
            yield launch, entry, int(calls[entry])

    def refusal(self, rows: Iterable[int]) -> KernelcastError | None:
        """The error of the first of these passes that cannot be predicted."""
        for row in rows:
            for launch, entry, call in self.launches(row):
                if call in self.times.errors.messages:
                    return KernelcastError(refusal(self.times.errors.messages[call], launch.call.row(entry)))
        return None


def predict_calls(calls: CallTable, times: Times) -> TableForecast:
    """All calls in one table, under a power limit where the GPU has a lower one than its board."""
    columns = times.columns(calls)
    return under_cap(calls, columns, times.gpu, times.conditions) if capped(times.gpu) else columns


def kernel_tables(
    deployment: Deployment, passes: Sequence[tuple[str, BatchColumns]], times: Times
) -> list[PassKernels]:
    """The kernels of several lists of passes that scale with ``by`` alone (see ``PassKernels``). Raises where a
    pass is refused."""
    calls = CallTable()
    tables = [PassKernels(deployment, batches, calls, by) for by, batches in passes]
    columns = predict_calls(calls, times)
    for table in tables:
        table.predict(columns)
        if columns.errors.messages and (error := table.refusal(np.flatnonzero(np.isnan(table.kernels_s[0])).tolist())):
            raise error
    return tables


@dataclass(frozen=True)
class PassTime:
    """One pass of a workload, which represents ``count`` equal ones: ``micro_batches`` of ``batch`` in sequence.
    ``kernels`` (and what is beside them) add up to ``interval``."""

    phase: str
    batch: Batch
    micro_batches: int
    count: float
    interval: Interval
    kernels: tuple[KernelTime, ...]
    passes: PassTimes = field(repr=False, compare=False)
    row: int = field(repr=False, compare=False)

    @property
    def deployment(self) -> Deployment:
        return self.passes.deployment

    @cached_property
    def launches(self) -> tuple[Launch, ...]:
        """The launches of one micro-batch, in the order of ``kernels``."""
        launches = self.passes.launches(self.row)
        return tuple(replace(launch, call=launch.call.row(entry)) for launch, entry, _ in launches)

    def timeline(self) -> Timeline:
        """Layer by layer; it ends when the pass does."""
        stack, at_s, gaps_s, events = self.passes.stack, 0.0, 0.0, []
        replays = stack.replays(self.batch.tokens, self.batch.sequences, decodes=self.phase == "decode")
        gap_s = stack.gap_s if replays else 0.0
        known = {(launch.part, launch.call, launch.overlaps): kernel
                 for launch, kernel in zip(self.launches, self.kernels, strict=False)}  # fmt: skip
        for launch in forward(self.deployment, self.batch, in_order=True):
            kernel = known[launch.part, launch.call, launch.overlaps]
            parameters = {name: list(value) if isinstance(value, tuple) else value
                          for name, value in launch.call.parameters}  # fmt: skip
            details = {"op": launch.op, **parameters, "bound_by": kernel.bound_by, "support": kernel.support}
            time_s = kernel.time_s / kernel.launches * launch.count
            events.append(Event(launch.op, at_s, time_s, launch.part, details))
            at_s, gaps_s = events[-1].end_s + gap_s * launch.count, gaps_s + gap_s * launch.count
        waits = {kernel.part: kernel.time_s for kernel in self.kernels if not kernel.launches}
        waits["host"] = waits.get("host", 0.0) - gaps_s
        waits["other micro-batches"] = self.interval.value - at_s - sum(waits.values())
        for name, time_s in waits.items():
            if time_s > 1e-9 * self.interval.value:
                events.append(Event(name, at_s, time_s, name))
                at_s += time_s
        requests = self.batch.sequences
        lane = f"{self.phase}, {requests} request{'s' if requests > 1 else ''}"
        return Timeline((Lane(self.deployment.gpu.name, lane, tuple(events)),))


class PassTimes(PassKernels):
    """All passes of workloads on one deployment; ``owner``: the workload of each. ``label``: the part that all of it
    is, where it is not the model itself (a draft model, a vision tower), which the host launches together with it."""

    def __init__(
        self, deployment: Deployment, steps: Sequence[WorkloadPasses], calls: CallTable, label: str = ""
    ) -> None:
        layout = deployment.layout
        batches, self.micro_batches = BatchColumns.concatenate([each.batches for each in steps]).heaviest_part(
            layout.dp, layout.micro_batches
        )
        super().__init__(deployment, batches, calls)
        self.label, self.count = label, len(steps)
        self.counts = np.concatenate([each.counts for each in steps])
        self.decodes = np.concatenate([each.decodes for each in steps])
        self.owner = np.repeat(np.arange(self.count), [len(each.counts) for each in steps])
        self.starts = np.searchsorted(self.owner, np.arange(self.count + 1))
        # How often the time of one micro-batch passes. A stage does 1 / pp of the layers; micro-batches follow one
        # another, and the first fills the pipeline; in decode stages never drain between steps.
        parts = self.micro_batches
        self.rounds = np.where(self.decodes, np.maximum(parts, layout.pp), parts + layout.pp - 1) / layout.pp

    def predict(self, times: TableForecast, host: Scale = UNSCALED) -> None:
        """``intervals_s``: time, low, high of each pass. ``host``: the host's scales from measured runs."""
        super().predict(times)
        self.stack, self.host_range = self.deployment.stack.with_host(host.factor), [x**host.reach for x in HOST_RANGE]
        kernels = self.kernels_s * self.rounds
        # a service under a lower limit than the board's is at it before a batch begins
        segment = 2 * self.owner + self.decodes  # workload and phase
        lasting = (
            sum_by_owner(segment, self.counts * kernels[0], 2 * self.count) >= WINDOW_S
        )  # a clock is lowered by then
        self.power_s = np.where(lasting[segment], self.throttled_s, self.capped_s) * self.rounds
        self.host_s = self._host_s(kernels[0] + self.power_s)
        whole = np.array([
            kernels[0],
            kernels[0] - pass_deviation(kernels[0], kernels[0] - kernels[1], 0),
            kernels[0] + pass_deviation(kernels[0], kernels[2] - kernels[0], 1),
        ])  # fmt: skip
        self.intervals_s = whole + self.power_s + self.host_s * np.array([[1.0], *([x] for x in self.host_range)])

    def _host_s(self, kernels_s: Array) -> Array:
        """The time that the GPU waits: launches slower than the kernels, gaps of a graph, the engine's host work."""
        sequences = self.batches.sequences
        graph = self.stack.replays(self.batches.tokens, sequences, decodes=self.decodes)
        stack = replace(self.stack, overlapped_step_s=0.0, overlapped_sequence_s=0.0) if self.label else self.stack
        launched = self.launched(stack)
        waits: Array = stack.waits_s(kernels_s, launched, sequences, graph=graph, decodes=self.decodes)
        if self.label:
            return waits
        return waits + np.where(self.decodes, stack.step_s, stack.prefill_s) + stack.sequence_s * sequences

    def part(self, launch: Launch) -> str:
        return self.label or launch.part

    def phase_s(self, decode: bool) -> Array:
        """(3, workloads): the passes of one phase, one after another."""
        weights = self.counts * (self.decodes == decode)
        return np.array([sum_by_owner(self.owner, weights * end, self.count) for end in self.intervals_s])

    def refused(self, at: int) -> KernelcastError | None:
        """The reason why a workload cannot be predicted."""
        return self.refusal(range(*self.starts[at : at + 2]))

    def of(self, at: int) -> list[PassTime]:
        """The passes of a workload, kernel by kernel."""
        return [self._pass(row) for row in range(*self.starts[at : at + 2])]

    def _pass(self, row: int) -> PassTime:
        phase, rounds, times = PHASES[int(self.decodes[row])], float(self.rounds[row]), self.times
        kernels = []
        for launch, _, call in self.launches(row):
            count = launch.count * rounds
            share = float(self.visible[launch.overlaps][row]) if launch.overlaps else 1.0
            kernels.append(
                KernelTime(phase, self.part(launch), Interval(*times.times_s[:, call].tolist()) * (count * share),
                    count, PIPELINES[times.bound_by[call]], _LEVELS[times.support[call]],
                    kernel_class(launch.op).family, times.match[call])
            )  # fmt: skip
        if power_s := float(self.power_s[row]):
            kernels.append(KernelTime.beside(phase, POWER_LIMIT, Interval.exact(power_s), "power", "near"))
        if host_s := float(self.host_s[row]):
            interval = Interval(host_s, *(x * host_s for x in self.host_range))
            kernels.append(KernelTime.beside(phase, "host", interval, "host"))
        return PassTime(phase, self.batches.batch(row), int(self.micro_batches[row]), float(self.counts[row]),
                        Interval(*self.intervals_s[:, row].tolist()), tuple(kernels), self, row)  # fmt: skip
