"""Workloads on one deployment and their times, as columns: one entry a workload; and where the time goes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.forecast.end_to_end import EXACT, Setting, Spread, end_to_end, widened, worse
from kernelcast.forecast.predict_table import CallTable, TableForecast, Times
from kernelcast.inference.batch import Ints
from kernelcast.inference.forward import Deployment
from kernelcast.inference.memory import cache_bytes, does_not_fit, read_weight_bytes, workload_memory
from kernelcast.inference.pass_times import PHASES, PassGroup, PassTime, PassTimes
from kernelcast.inference.workload import RequestColumns, Workload, image_passes, sum_by_owner, workload_passes
from kernelcast.machine.analyse import PIPELINES
from kernelcast.ops.dtypes import find_dtype
from kernelcast.ops.work import Array
from kernelcast.results import MOST, SUPPORT
from kernelcast.schedule import Memory, Share

_BOUND = (*PIPELINES, "power", "host")
_LEVELS = tuple(SUPPORT)


class _PartTimes:
    """One part in one phase: seconds by bound and by support, and kernels, one entry per workload."""

    def __init__(self, count: int) -> None:
        self.bound_s, self.support_s = np.zeros((len(_BOUND), count)), np.zeros((len(_LEVELS), count))
        self.kernels = np.zeros(count)

    def add(self, bound: int, support: int, time_s: Array) -> None:
        self.bound_s[bound] += time_s
        self.support_s[support] += time_s

    @property
    def time_s(self) -> Array:
        return self.support_s.sum(axis=0)


class BreakdownColumns:
    """Where the time of ``count`` workloads goes; ``members``: passes, and the workload of each of their owners."""

    def __init__(self, count: int, members: Iterable[tuple[PassTimes, Ints]]) -> None:
        self.count, self.parts = count, dict[tuple[str, str], _PartTimes]()
        for passes, owners in members:
            for phase in PHASES:  # in the order of appearance
                self._add(phase, passes, owners)

    def _add(self, phase: str, passes: PassTimes, owners: Ints) -> None:
        weights = passes.counts * (passes.decodes == (phase == "decode"))
        if not weights.any():
            return
        owner = owners[passes.owner]
        for group in passes.groups:
            if weights[group.rows].any():
                kernel_weights = (weights * passes.rounds)[group.rows]
                self._kernels(phase, passes, group, owner[group.rows], kernel_weights)
        for name, bound, support, time_s in (
            ("power limit", "power", "near", passes.power_s), ("host", "host", "seen", passes.host_s),
        ):  # fmt: skip
            if time_s.any():
                each = sum_by_owner(owner, weights * time_s, self.count)
                self._part(phase, name).add(_BOUND.index(bound), _LEVELS.index(support), each)

    def _kernels(self, phase: str, passes: PassTimes, group: PassGroup, owner: Ints, weights: Array) -> None:
        each = sum_by_owner(owner, weights, self.count)
        for launch in group.launches:
            self._part(phase, passes.part(launch)).kernels += launch.count * each
        times = passes.times
        for launches, calls, at in group.tables():
            seconds = passes.seconds(group, launches, calls, at)[0]
            parts = list(dict.fromkeys(map(passes.part, launches)))
            which = [[parts.index(passes.part(launch))] for launch in launches]
            labels = (np.array(which) * len(_BOUND) + times.bound_by[calls]) * len(_LEVELS) + times.support[calls]
            for label in np.unique(labels).tolist():
                rest, support = divmod(label, len(_LEVELS))
                part, bound = divmod(rest, len(_BOUND))
                labelled = np.where(labels == label, seconds, 0.0).sum(axis=0)
                self._part(phase, parts[part]).add(
                    bound, support, sum_by_owner(owner, labelled[at] * weights, self.count)
                )

    def _part(self, phase: str, name: str) -> _PartTimes:
        return self.parts.setdefault((phase, name), _PartTimes(self.count))

    def of(self, at: int) -> tuple[Share, ...]:
        """The breakdown of one workload; adds up to its time."""
        return tuple(
            Share(phase, name, float(part.time_s[at]), float(part.kernels[at]),
                  _BOUND[int(part.bound_s[:, at].argmax())], _LEVELS[int(part.support_s[:, at].argmax())])
            for (phase, name), part in self.parts.items()
            if part.kernels[at] or part.time_s[at]
        )  # fmt: skip

    @property
    def bound_by(self) -> NDArray[np.object_]:
        """The largest bound of each workload, by time."""
        sums = np.sum([part.bound_s for part in self.parts.values()], axis=0)
        return np.array(_BOUND, dtype=object)[sums.argmax(axis=0)]

    @property
    def support(self) -> NDArray[np.object_]:
        """The support of each workload, as ``support_of`` its shares."""
        levels = np.zeros((len(_LEVELS), self.count))
        for part in self.parts.values():
            levels[part.support_s.argmax(axis=0), np.arange(self.count)] += part.time_s
        reached = np.cumsum(levels, axis=0) >= MOST * levels.sum(axis=0)
        reached[-1] = True
        return np.array(_LEVELS, dtype=object)[reached.argmax(axis=0)]


class BatchResults:
    """Create it, predict the ``calls`` it gathers, then compute the passes once their times are known. Times are (3,
    workloads): time, low, high; of a workload that ``refused`` names they are NaN."""

    def __init__(self, deployment: Deployment, workloads: Sequence[Workload]) -> None:
        self.deployment, self.workloads = deployment, workloads
        self.requests = RequestColumns(workloads)
        self.memory = workload_memory(deployment, self.requests)
        self.refused: dict[int, KernelcastError] = dict(self._refusals())
        self.accepted = np.array([at for at in range(len(workloads)) if at not in self.refused], dtype=np.int64)
        self.steps = np.zeros(len(workloads), dtype=np.int64)
        self.passes: list[tuple[PassTimes, Ints]] = []  # and the workload of each owner; the model itself first
        self.times: Times | None = None

    def _refusals(self) -> Iterator[tuple[int, KernelcastError]]:
        model, requests = self.deployment.model, self.requests
        encoder, fits = not model.generates, self.memory.fits
        outputs, longest = (
            requests.most(requests.outputs),
            requests.most(requests.inputs + (0 if encoder else requests.outputs)),
        )
        for at in np.flatnonzero(~fits | (encoder & (outputs > 1)) | (longest > model.max_context)).tolist():
            if not fits[at]:
                yield at, does_not_fit(self.deployment, self.workloads[at], self.memory_of(at))
                continue
            why = f"a request of {longest[at]:,} tokens exceeds the context of {model.name}, {model.max_context:,}"
            if encoder and outputs[at] > 1:
                why = f"{model.name} is an encoder: it does not decode; `output_len` must be 1"
            yield at, KernelcastError(why)

    def gather(self, calls: CallTable) -> None:
        """The passes of accepted workloads, and their calls."""
        steps = [workload_passes(self.workloads[at]) for at in self.accepted.tolist()]
        self.steps[self.accepted] = [each.count for each in steps]
        self.order = dict(zip(self.accepted.tolist(), (each.order for each in steps), strict=True))
        if not len(self.accepted):
            return
        try:
            self.passes.append((PassTimes(self.deployment, steps, calls), self.accepted))
            by_workload = dict(zip(self.accepted.tolist(), steps, strict=True))
            for draft, members in self.requests.drafts():
                decoding = np.array([at for at in members.tolist() if self.steps[at]], dtype=np.int64)
                if len(decoding):
                    guessed = [
                        by_workload[at].drafted(int(self.requests.verified_tokens[at]) - 1) for at in decoding.tolist()
                    ]
                    self.passes.append((PassTimes(draft, guessed, calls, "draft model"), decoding))
            for tower, seeing in self.requests.towers():
                read = np.array([at for at in seeing if at not in self.refused], dtype=np.int64)
                images = [image_passes(self.workloads[at], tower) for at in read.tolist()]
                self.passes.append((PassTimes(tower, images, calls, "images"), read))
        except KernelcastError as error:  # no kernel for a part of the model
            self.passes, self.refused = [], dict.fromkeys(range(len(self.workloads)), error) | self.refused

    def predict(self, columns: TableForecast, times: Times) -> None:
        self.times = times
        for passes, owners in self.passes:
            passes.predict(columns, times.conditions.host_scale(passes.deployment.stack.id))
            for at in np.flatnonzero(np.isnan(passes.phase_s(False)[0] + passes.phase_s(True)[0])).tolist():
                if error := passes.refused(at):
                    self.refused.setdefault(int(owners[at]), error)

    # ---- columns ----

    @cached_property
    def answered(self) -> NDArray[np.bool_]:
        return np.array([at not in self.refused for at in range(len(self.workloads))], dtype=bool)

    @cached_property
    def setting(self) -> Setting:
        return self.deployment.setting("static batch")

    @cached_property
    def spread(self) -> Spread:
        """Of whole runs beyond their kernels; none where this server was measured."""
        measured = self.deployment.stack.spread or (self.times and self.times.conditions.runs_measured)
        return EXACT if measured else end_to_end().spread(self.setting)

    @cached_property
    def support(self) -> NDArray[np.object_]:
        """The level of each workload: the worse of its kernels and of the whole."""
        run = end_to_end().level(self.setting)
        return np.array([worse(kernels, run) for kernels in self.shares.support], dtype=object)

    @cached_property
    def prefill_s(self) -> Array:
        return self._phase_s(False)

    @cached_property
    def decode_s(self) -> Array:
        return self._phase_s(True)

    def _phase_s(self, decode: bool) -> Array:
        seconds = np.zeros((3, len(self.workloads)))
        for passes, owners in self.passes:
            seconds[:, owners] += passes.phase_s(decode)
        seconds[:, ~self.answered] = np.nan
        return widened(seconds, self.spread)

    @cached_property
    def total_s(self) -> Array:
        return self.prefill_s + self.decode_s

    @cached_property
    def step_s(self) -> Array:
        """The mean decode step; with speculation a step may give several tokens."""
        return self.decode_s / np.maximum(self.steps, 1)

    @cached_property
    def tpot_s(self) -> Array:
        """Mean time of an output token after the first."""
        return self.decode_s / np.maximum(self.requests.most(self.requests.outputs) - 1, 1)

    @cached_property
    def output_tokens(self) -> Array:
        return self.requests.total(self.requests.outputs)

    @cached_property
    def tokens_per_s(self) -> Array:
        return self.output_tokens / self.total_s[0]

    @cached_property
    def flops(self) -> Array:
        """Model FLOPs: 2 for each weight that a token passes, and attention's scores and values (docs/method.md)."""
        return np.sum([flops for _, flops in self._products()], axis=0)

    def _products(self) -> Iterator[tuple[str, Array]]:
        """Model FLOPs of each workload, by the format that they multiply in."""
        model, requests, precision = self.deployment.model, self.requests, self.deployment.precision
        active, new, steps = model.active_parameters, requests.inputs - requests.cached, requests.outputs - 1
        tokens = requests.total(new + steps)
        yield precision.weights, 2.0 * active.attention * tokens
        yield precision.mlp_weights, 2.0 * active.mlp * tokens
        yield precision.expert_weights, 2.0 * active.experts * tokens
        yield "bf16", 2.0 * model.hidden * model.vocab * self.output_tokens
        for run in model.distinct_layers:
            if run.layer.attention:  # a causal mask is not subtracted
                prefill = new * run.layer.attention.query_flops(requests.inputs)
                decode = steps * run.layer.attention.query_flops(requests.inputs + requests.outputs / 2)
                yield "bf16", run.count * requests.total(prefill + decode)

    @cached_property
    def mfu(self) -> Array:
        """Model FLOPs utilisation: the share of the time that the model FLOPs take at the peak of their formats."""
        at_peak_s = np.sum([flops / self._peak(dtype) for dtype, flops in self._products()], axis=0)
        return np.asarray(at_peak_s / (self.total_s[0] * self.deployment.layout.gpus))

    def _peak(self, dtype: str) -> float:
        """FLOP/s of products in a format, as this GPU runs it; of 16 bits where it has no such products."""
        gpu = self.deployment.gpu
        runs = find_dtype(self.deployment.precision.runs(dtype, gpu))
        return gpu.tensor_flops_per_s(runs.math) or gpu.mfu_flops_per_s

    @cached_property
    def decode_bytes(self) -> Array:
        """Weights and cache that one GPU reads in all decode steps. Every step reads the weights that its tokens use; a
        request's cache is read while it decodes."""
        requests, steps = self.requests, np.maximum(self.steps, 1)
        per_token = self.steps / np.maximum(requests.most(requests.outputs) - 1, 1)
        taking_part = (requests.outputs - 1) * per_token[requests.owner]  # steps of each request
        cache = requests.total(taking_part * cache_bytes(self.deployment, requests.inputs + requests.outputs // 2))
        tokens = requests.total(taking_part) / steps  # in a mean step
        return self.steps * read_weight_bytes(self.deployment, tokens * requests.verified_tokens) + cache

    @cached_property
    def bandwidth_use(self) -> Array:
        """Share of the peak DRAM bandwidth that reading weights and cache takes in the decode steps."""
        busy_s = np.where(self.decode_s[0] == 0, 1.0, self.decode_s[0])
        return self.decode_bytes / busy_s / self.deployment.gpu.dram_bytes_per_s

    @cached_property
    def shares(self) -> BreakdownColumns:
        return BreakdownColumns(len(self.workloads), self.passes)

    # ---- of one workload ----

    def memory_of(self, at: int) -> Memory:
        parts = {name: float(column[at]) for name, column in self.memory.parts.items()}
        return Memory(parts, self.memory.gpu_bytes, self.memory.available_bytes)

    def passes_of(self, at: int) -> tuple[PassTime, ...]:
        """The passes of prefill, then decode, then the draft model."""
        known: list[PassTime] = []
        for passes, owners in self.passes:
            for member in np.flatnonzero(owners == at).tolist():
                known += passes.of(member)
        return tuple(known)

    def mean_ttft_s(self, at: int) -> float:
        """Mean over requests: a prompt of an early chunk does not wait for the others."""
        (passes, owners), *drafts = self.passes
        start = passes.starts[np.searchsorted(owners, at)]
        ends = np.cumsum(passes.intervals_s[0, start + self.order[at]])
        drafted = sum(float(draft.phase_s(False)[0, owners == at].sum()) for draft, owners in drafts)
        return float(ends[self.workloads[at].first_tokens()].mean()) + drafted  # the draft model prefills too
