"""Times of engine steps of any batch: a few hundred passes predicted in bulk, interpolated between them.

Most kernels of a step scale with its tokens alone; the head with its sequences; attention with the new and past tokens
of each sequence. So a step is the sum of three tables:

    step(batch) = tokens(T) + rows(R) + attention(decodes, their mean context; prompt tokens, their mean past)

Tokens have a second table where a step that only decodes has other kernels for them (DeepEP's low-latency mode).
Where one launch takes prompts and decodes together, attention is the sum of both times a fourth table: the ratio of the
joint launch to the two. Several prompts of a step are one of as many tokens times a fifth: their ratio, as each attends
to itself alone. Tables are in seconds, each with what it may be off (below, above).
"""

from __future__ import annotations

import copy
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from kernelcast.forecast.conditions import DEFAULT, Conditions
from kernelcast.forecast.predict_table import Times
from kernelcast.hardware import Gpu
from kernelcast.inference.batch import Batch, BatchColumns
from kernelcast.inference.disaggregated import kv_send, port_bytes, send_time, transfer_fabric
from kernelcast.inference.forward import Deployment, forward
from kernelcast.inference.pass_times import HOST_RANGE, PassKernels, kernel_tables, pass_deviation
from kernelcast.inference.workload import Speculation
from kernelcast.models.layers import SelfAttention
from kernelcast.ops.flash import ragged_wait_s
from kernelcast.ops.kernel_selection import kernel_choice
from kernelcast.ops.work import Array
from kernelcast.schedule import EvidenceSummary, KernelTime
from kernelcast.serving.load import Load
from kernelcast.serving.service import EnginePool, Service, without_overheads

_STEPS = ((512, 8), (4096, 32), (8192, 64))  # tokens between predicted passes, up to so many
_SEQUENCES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
_CONTEXTS = tuple(round(64 * 2 ** (i / 2)) for i in range(29))  # 64 to a million tokens
_PROMPTS = (1, 16, 32, 64, 96, 128, 192, 256, *(round(256 * 2 ** (i / 4)) for i in range(1, 25)),
            *(round(16384 * 2 ** (i / 2)) for i in range(1, 13)))  # fmt: skip
_PASTS = (0, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 1048576)
_LEAST_S = 1e-12  # of attention: a model may have none
_MIXED = ((1, 4, 16, 64, 128, 256, 512), (128, 512, 2048, 8192, 32768, 131072), (32, 128, 512, 2048, 8192),
          (0, 1024, 8192))  # fmt: skip
# Prompts of one step: tokens of all, how many prompts, the past of each
_TOGETHER = ((256, 1024, 2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16, 32, 64, 128), (0, 1024, 8192))

# Of other machines over the stack's own, the host's time for the launches of a step that replays no graph: one machine
# took 0.5 to 1.1 times as long from one minute to the next, single steps up to 1.5 times (validation/vllm_h200).
LAUNCHING = {"low": 0.7, "likely": 1.0, "high": 1.4}


@dataclass(frozen=True)
class StepLimits:
    """The largest step that tables must cover."""

    tokens: int
    sequences: int
    context: int
    cached: int  # tokens that fit in the cache


class StepTimes:
    """Steps of one deployment: ``decode`` and ``mixed`` in seconds, at one end of the interval or between."""

    def __init__(self, deployment: Deployment, limits: StepLimits, conditions: Conditions = DEFAULT,
                 times: Times | None = None, drafted: int = 0, draft: StepTimes | None = None) -> None:  # fmt: skip
        """``drafted``: draft tokens that a decode step verifies; ``draft``: steps of the draft model, one a draft token
        and one over every prompt."""
        self.drafted, self.draft = drafted, draft
        self._times = times or Times(deployment.gpu, conditions)
        self.limits = limits
        self.deployment = self._on_host(deployment)
        verified = 1 + drafted
        self._sequences = _up_to(_SEQUENCES, limits.sequences)
        self._contexts = _up_to(_CONTEXTS, limits.context)
        self._prompts = _up_to(_PROMPTS, limits.tokens)
        self._pasts = _up_to(_PASTS, limits.context)
        self._token_counts = _token_counts(deployment.stack.graph_sizes, max(limits.tokens, verified))
        joint = deployment.stack.joint_attention and any(
            isinstance(run.layer.attention, SelfAttention) for run in deployment.model.distinct_layers
        )
        self._mixed_grid = tuple(
            _up_to(grid, most) for grid, most in zip(
                _MIXED, (limits.sequences, limits.context, limits.tokens, limits.context), strict=True)
        ) if joint and deployment.stack.mixed_steps else None  # fmt: skip
        self._together_grid = tuple(
            _up_to(grid, min(most, grid[-1])) for grid, most in zip(
                _TOGETHER, (limits.tokens, limits.sequences, limits.context), strict=True)
        )  # fmt: skip
        self._unsplit = unsplit_layers(deployment)
        self._build(verified)

    def ragged_s(self, sequences: int, context_sum: float, longest: float, *, mixed: bool = False) -> float:
        """What a step that decodes sequences of unequal contexts takes beyond one of as many equal ones."""
        if not sequences or longest * sequences <= context_sum:
            return 0.0
        return sum(
            count * ragged_wait_s(self.deployment.gpu, sequences, context_sum / sequences, longest,
                                  q_heads if mixed else kv_heads, head_dim, packed=not mixed)
            for count, q_heads, kv_heads, head_dim in self._unsplit
        )  # fmt: skip

    def _build(self, verified: int) -> None:
        """Predict all tables at once; ``verified``: tokens of a sequence in a decode step."""
        contexts = {n: self._fitting_contexts(n, self._contexts) for n in self._sequences}
        tokens, sequences = np.array(self._token_counts), np.array(self._sequences)
        decodes = np.array([(n, past) for n in self._sequences for past in contexts[n]]).T
        prompts = np.array([(n, past) for n in self._prompts for past in self._pasts]).T
        passes = [
            ("tokens", BatchColumns.uniform(1, tokens, 0)),
            ("sequences", BatchColumns.uniform(sequences, verified, 64, verified)),
            ("lengths", BatchColumns.uniform(decodes[0], verified, decodes[1])),
            ("lengths", BatchColumns.uniform(1, *prompts)),
            ("lengths", BatchColumns.uniform(*self._prompts_together())),
        ]
        if self._mixed_grid:
            passes.append(("lengths", BatchColumns.of(self._mixed_batches(self._mixed_grid, verified))))
        if self._decodes_apart():
            passes.append(("tokens", BatchColumns.uniform(tokens, 1, 64)))
        tables = kernel_tables(self.deployment, passes, self._times)
        stack = self.deployment.stack
        # Kernels of a step, and the host's seconds to launch them
        self.launched: list[float] = np.sum([table.launched(stack)[:, 0] for table in tables[:3]], axis=0).tolist()
        self._fill([_seconds(table) for table in tables], contexts)

    def _fill(self, tables: list[Array], contexts: dict[int, tuple[int, ...]]) -> None:
        tokens, rows, decode, prompt, together, *others = tables
        self._tokens = self._decoded = _filled(self._token_counts, tokens)
        if len(others) > (1 if self._mixed_grid else 0):
            self._decoded = _filled(self._token_counts, others[-1])
        sizes = self.deployment.stack.graph_sizes
        self._padded = [padded(sizes, n) for n in range(min(self.deployment.stack.graph_tokens, len(self._tokens)) + 1)]
        self._rows = rows
        each = np.split(decode, np.cumsum([len(known) for known in contexts.values()])[:-1])
        rows_of = zip(contexts.values(), each, strict=True)
        self._decode = np.stack([_continued(known, part, self._contexts) for known, part in rows_of])
        self._prompt = prompt.reshape(len(self._prompts), len(self._pasts), 3)
        self._lines: dict[tuple[int, str], tuple[list[float], list[float]]] = {}
        self._together = self._together_ratio(together)
        self._ratio = self._joint_ratio(others[0]) if self._mixed_grid else None

    def _prompts_together(self) -> Array:
        """(3, passes): how many prompts, tokens and past of each, as much as the cache has."""
        return np.array([(n, max(1, tokens // n), min(past, self.limits.cached // n))
                         for tokens, n, past in itertools.product(*self._together_grid)]).T  # fmt: skip

    def _together_ratio(self, together: Array) -> Array:
        """The time of several prompts over that of one of as many tokens."""
        count, tokens, past = self._prompts_together()
        one = [self._prefill_attention(*each)[0] for each in zip(count * tokens, past, strict=True)]
        ratio = together[:, 0] / np.maximum(one, _LEAST_S)
        return np.where(count > 1, ratio, 1.0).reshape([len(axis) for axis in self._together_grid])

    def _mixed_batches(self, grid: Sequence[Sequence[int]], verified: int) -> list[Batch]:
        """One prompt beside sequences that decode."""
        return [
            Batch((*(n * (verified,)), tokens), (*(n * (context,)), past))
            for n in grid[0] for context in self._fitting_contexts(n, grid[1], whole=True)
            for tokens in grid[2] for past in grid[3]
        ]  # fmt: skip

    def _decodes_apart(self) -> bool:
        """Whether kernels that scale with tokens alone differ in a step that only decodes."""
        prefill, decode = (
            [launch for launch in forward(self.deployment, batch) if launch.scales_with == "tokens"]
            for batch in (Batch((64,), (0,)), Batch(64 * (1,), 64 * (64,)))
        )
        return prefill != decode

    def with_overheads(self, deployment: Deployment) -> StepTimes:
        """The same passes where server overheads differ: nothing is predicted again."""
        copied = copy.copy(self)
        copied.deployment = self._on_host(deployment)
        if deployment.stack.spread != self.deployment.stack.spread:
            copied._lines = {}
        return copied

    def with_host(self, deployment: Deployment, launching: float) -> StepTimes:
        """The same passes with the overheads and host times of ``deployment``, whose launches take the host
        ``launching`` times as long as here."""
        copied = self.with_overheads(deployment)
        copied.launched = [self.launched[0], *(launching * seconds for seconds in self.launched[1:])]
        copied._lines = {}
        return copied

    def _on_host(self, deployment: Deployment) -> Deployment:
        """The deployment with the host's scale from measured runs."""
        factor = self._times.conditions.host_scale(deployment.stack.id).factor
        return deployment if factor == 1.0 else replace(deployment, stack=deployment.stack.with_host(factor))

    def _fitting_contexts(self, sequences: int, contexts: Sequence[int], *, whole: bool = False) -> tuple[int, ...]:
        """The contexts that so many sequences can have at once; ``whole``: all contexts, clipped to that."""
        most = max(self.limits.cached // sequences, 2)
        if whole:
            return tuple(min(context, most) for context in contexts)
        fits = tuple(context for context in contexts if context <= most)
        return fits if len(fits) > 1 else (most // 2, most)

    def _joint_ratio(self, joint: Array) -> Array:
        """The time of a joint launch over that of its two parts: no shorter than the longer of them, and no longer than
        one after the other, unless decodes are split when they are alone (FlashAttention 2)."""
        most = np.inf if self._unsplit else 1.0
        grid = self._mixed_grid
        assert grid is not None
        ratio = joint[:, 0].reshape([len(axis) for axis in grid])
        for i, n in enumerate(grid[0]):
            for j, context in enumerate(self._fitting_contexts(n, grid[1], whole=True)):
                alone = self._decode_attention(n, context)[0]
                for k, q in enumerate(grid[2]):
                    for m, past in enumerate(grid[3]):
                        prompt = self._prefill_attention(q, past)[0]
                        apart = max(alone + prompt, _LEAST_S)
                        ratio[i, j, k, m] = np.clip(ratio[i, j, k, m] / apart, max(alone, prompt) / apart, most)
        return ratio

    def _decode_attention(self, sequences: float, context: float) -> list[float]:
        """Time, below, above; with less context than the least no less time."""
        at = sequences, max(context, self._contexts[0])
        return list(_interpolate((self._sequences, self._contexts), self._decode, at).tolist())

    def _prefill_attention(self, tokens: float, past: float, prompts: float = 1.0) -> list[float]:
        """``tokens``: of all ``prompts``."""
        at = tokens, max(past, self._pasts[0])
        one = _interpolate((self._prompts, self._pasts), self._prompt, at)
        if prompts > 1:
            one = one * _log_interpolate(self._together_grid, self._together, (tokens, prompts, past))
        return list(one.tolist())

    def _head(self, rows: int) -> list[float]:
        return list(_interpolate((self._sequences,), self._rows, (rows,)).tolist())

    def _tokens_of(self, tokens: int, *, graph: bool, decoded: bool = False) -> Sequence[float]:
        """The time that scales with the tokens of a step; a graph runs as many tokens as it was captured with."""
        table = self._decoded if decoded else self._tokens
        return table[self._padded[tokens] if graph and tokens < len(self._padded) else tokens]

    def _line(self, sequences: int, variant: str) -> tuple[list[float], list[float]]:
        """Mean contexts, and the step that decodes so many sequences of each, before the server's factor, for
        linear interpolation."""
        key = sequences, variant
        if key not in self._lines:
            verified = sequences * (1 + self.drafted)
            graph = bool(self.deployment.stack.replays(verified, sequences, decodes=True))
            tokens = self._tokens_of(verified, graph=graph, decoded=True)
            rows = self._head(sequences)
            steps = []
            for context in self._contexts:
                parts = (tokens, rows, self._decode_attention(sequences, context))
                step = self._summed(parts, variant, sequences, graph, decodes=True)
                draft_s = self.draft.decode(sequences, sequences * context, variant) if self.draft else 0.0
                steps.append(step + self.drafted * draft_s)
            self._lines[key] = [float(c) for c in self._contexts], steps
        return self._lines[key]

    def decode(self, sequences: int, context_sum: float, variant: str = "likely") -> float:
        """A step that decodes ``sequences`` with ``context_sum`` tokens in the cache together."""
        contexts, steps = self._line(sequences, variant)
        step_s: float = _interpolate((contexts,), steps, (max(context_sum / sequences, contexts[0]),))
        return step_s * self.deployment.stack.decode_factor

    def decodes(self, sequences: int, context_sum: float, gained: float, count: int, variant: str = "likely") -> Array:
        """``count`` such steps, each with ``gained`` tokens a sequence more in the cache than the one before."""
        contexts, steps = self._line(sequences, variant)
        seconds = np.interp(context_sum / sequences + gained * np.arange(count), contexts, steps)
        return seconds * self.deployment.stack.decode_factor

    def mixed(self, sequences: int, context_sum: float, prompt_tokens: int, past: float, rows: int,
              variant: str = "likely", prompts: float = 1.0, ahead_s: float = 0.0) -> float:  # fmt: skip
        """A step that prefills ``prompt_tokens`` after ``past`` ones (their weighted mean) beside ``sequences``
        that decode; ``rows`` are sampled. ``prompts``: so many equal ones attend to as many tokens. ``ahead_s``: of
        the time that the host needs to launch it, before it begins."""
        tokens = prompt_tokens + sequences * (1 + self.drafted)
        attention = self._prefill_attention(prompt_tokens, past, prompts)
        if sequences:
            context = context_sum / sequences
            ratio = 1.0
            if self._mixed_grid:
                at = (sequences, context, prompt_tokens, past)
                ratio = _log_interpolate(self._mixed_grid, self._ratio, at)
            decode = self._decode_attention(sequences, context)
            attention = [(a + b) * ratio for a, b in zip(attention, decode, strict=True)]
        head = self._head(rows) if rows else (0.0, 0.0, 0.0)
        graph = bool(self.deployment.stack.replays(tokens, sequences, decodes=False))
        parts = (self._tokens_of(tokens, graph=graph), head, attention)
        together = self._summed(parts, variant, sequences + prompts, graph, decodes=False, ahead_s=ahead_s)
        if self.draft:
            together += self.draft.mixed(0, 0.0, prompt_tokens, past, 0, variant, prompts)
            together += self.drafted * self.draft.decode(sequences, context_sum, variant) if sequences else 0.0
        stack = self.deployment.stack
        if stack.prompt_factor == stack.decode_factor == 1.0:
            return together
        alone = self.decode(sequences, context_sum, variant) if sequences else 0.0  # its factor is in it
        return alone + stack.prompt_factor * max(0.0, together - alone / stack.decode_factor)

    def _summed(
        self, parts: Iterable[Sequence[float]], variant: str, sequences: float, graph: bool, *, decodes: bool,
        ahead_s: float = 0.0,
    ) -> float:  # fmt: skip
        """Errors of different networks are independent; whole passes err a little more (``pass_deviation``)."""
        time = below = above = 0.0
        for part in parts:
            time, below, above = time + part[0], below + part[1] ** 2, above + part[2] ** 2
        stack = self.deployment.stack
        spread = stack.spread
        if spread:  # its steps were measured
            time *= {"low": 1 - spread, "likely": 1.0, "high": 1 + spread}[variant]
        elif variant == "low":
            time = max(0.0, time - pass_deviation(time, math.sqrt(below), 0))
        elif variant == "high":
            time += pass_deviation(time, math.sqrt(above), 1)
        launched = self._launched(variant)
        return time + float(stack.waits_s(time + ahead_s, launched, sequences, graph=graph, decodes=decodes))

    def launch_s(self, decodes: int, prompt_tokens: int, prompts: float, variant: str = "likely") -> float:
        """What the host does to launch a step, beside the GPU."""
        tokens, alone = prompt_tokens + decodes * (1 + self.drafted), not prompt_tokens
        stack = self.deployment.stack
        graph = bool(stack.replays(tokens, decodes, decodes=alone))
        return float(stack.busy_s(self._launched(variant), decodes + prompts, graph=graph, decodes=alone))

    def host_s(self, sequences: float, *, graph: bool, decodes: bool) -> float:
        """What the host does in a step: beside the GPU, and before it."""
        stack = self.deployment.stack
        before_s = (stack.step_s if decodes else stack.prefill_s) + stack.sequence_s * sequences
        return before_s + float(stack.busy_s(self._launched(), sequences, graph=graph, decodes=decodes))

    def _launched(self, variant: str = "likely") -> tuple[float, ...]:
        """Kernels, and the host's seconds to launch them."""
        stack = self.deployment.stack
        ends = {"low": 1 - stack.spread, "likely": 1.0, "high": 1 + stack.spread} if stack.spread else LAUNCHING
        factor = stack.launch_factor * ends[variant]
        return self.launched[0], *(factor * seconds for seconds in self.launched[1:])

    @property
    def predictor(self) -> str:
        return self._times.predictor

    @property
    def measured(self) -> bool:
        """Whether this server was measured, by a replay or by a calibration with runs."""
        return bool(self.deployment.stack.spread) or self._times.conditions.runs_measured

    @cached_property
    def rests_on(self) -> EvidenceSummary:
        """The evidence behind a typical decode step."""
        return decode_evidence(self.deployment, self._times, self.limits.context)


def unsplit_layers(deployment: Deployment) -> list[tuple[int, int, int, int]]:
    """Layers whose decode is FlashAttention 2's, which does not split long contexts of large batches: how many, query
    and KV heads of a GPU, head dimension."""
    gpu, formats, tp = deployment.gpu, deployment.precision, deployment.layout.tp
    choice = kernel_choice(
        deployment.stack.kernels, gpu, "attention", formats.between, formats.cache, exact_stack=True, phase="decode"
    )
    if choice is None or choice.backend != "fa2":
        return []
    return [
        (run.count, max(1, mixer.q_heads // tp), max(1, mixer.kv_heads // tp), mixer.head_dim)
        for run in deployment.model.distinct_layers
        if isinstance(mixer := run.layer.attention, SelfAttention) and not mixer.window
    ]


def decode_evidence(deployment: Deployment, times: Times, context: int) -> EvidenceSummary:
    """The evidence behind a decode step of 8 sequences."""
    launches = forward(deployment, Batch(8 * (1,), 8 * (min(1024, context),)))
    times.predict(launch.call for launch in launches)
    return EvidenceSummary.of(KernelTime.of("decode", launch, times) for launch in launches)


def host_time(variant: str, time_s: float, spread: float = 0.0) -> float:
    """Host time at one end of its interval, or between; ``spread``: of a measured server."""
    low, high = (1 - spread, 1 + spread) if spread else HOST_RANGE
    return time_s * {"low": low, "likely": 1.0, "high": high}[variant]


def _seconds(table: PassKernels) -> Array:
    """(passes, 3): seconds at the power limit, and how far below and above they may be."""
    time, low, high = table.kernels_s
    return np.stack([time + table.throttled_s, time - low, high - time], axis=1)


def _up_to(grid: Sequence[int], most: int) -> tuple[int, ...]:
    """The part of the grid that covers ``most``."""
    below = [x for x in grid if x < most]
    return (*below, next((x for x in grid if x >= most), max(most, 1)))


def padded(sizes: Sequence[Sequence[int]], tokens: int) -> int:
    """The graph that a step of so many tokens replays: sizes (first, last, step); itself where it is too large."""
    for first, last, step in sizes:
        if tokens <= last:
            return max(first, first + -(-(tokens - first) // step) * step)
    return tokens


def _token_counts(sizes: Sequence[Sequence[int]], most: int) -> list[int]:
    """Every graph; and between them 8 tokens, then 32, then 64, then a 32nd, which keeps lines within a percent."""
    counts = {1, 2, 4, *(n for first, last, step in sizes for n in range(first, last + 1, step) if n <= most)}
    at = 0
    while at < most:
        at += next((step for end, step in _STEPS if at < end), at // 32)
        counts.add(at)
    return sorted(counts)


def _filled(counts: Sequence[int], table: Array) -> list[tuple[float, float, float]]:
    """The time of any number of tokens, linear between the nearest."""
    every = np.arange(counts[-1] + 1)
    columns = [np.interp(every, counts, table[:, i]).tolist() for i in range(3)]
    return list(zip(*columns, strict=True))


def _continued(known: Sequence[int], table: Array, every: Sequence[int]) -> Array:
    """A table extended to longer contexts, linearly from the last two."""
    slope = (table[-1] - table[-2]) / (known[-1] - known[-2])
    beyond = [table[-1] + np.maximum(slope, 0.0) * (x - known[-1]) for x in every if x > known[-1]]
    within = [[np.interp(x, known, table[:, i]) for i in range(3)] for x in every if x <= known[-1]]
    return np.array([*within, *beyond])


def _interpolate(axes: Sequence[Sequence[float]], table: Any, at: Sequence[float]) -> Any:
    """Multilinear in the first axes of a table; beyond their ends on the line of the last cell."""
    for axis, value in zip(axes, at, strict=True):
        if len(axis) == 1:
            table = table[0]
            continue
        cell = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
        along = (value - axis[cell]) / (axis[cell + 1] - axis[cell])
        table = table[cell] * (1 - along) + table[cell + 1] * along
    return table


def _log_interpolate(grid: Sequence[Sequence[float]], table: Any, at: Sequence[float]) -> float:
    """Multilinear in the logarithms of the axes, constant beyond their ends."""
    axes = [[math.log1p(x) for x in axis] for axis in grid]
    values = [min(max(math.log1p(value), axis[0]), axis[-1]) for axis, value in zip(axes, at, strict=True)]
    return float(_interpolate(axes, table, values))


_SENT_TOKENS = (1, 64, 512, 4096, 32768, 262144)  # tokens of a KV transfer that are predicted; linear between them


class StepTimeTables:
    """Step times by deployment, and times of KV transfers, each predicted once."""

    def __init__(self, times: Callable[[Deployment], Times]) -> None:
        self._times = times
        self._known: list[tuple[Deployment, StepLimits, StepTimes]] = []
        self._transfers: list[tuple[Service, tuple[list[int], list[float]]]] = []

    def of(self, pool: EnginePool, load: Load, speculation: Speculation | None = None) -> StepTimes:
        context = int((load.inputs + load.outputs).max())
        settings, drafted = pool.settings, speculation.draft_tokens if speculation else 0
        sequences = min(settings.max_num_seqs, settings.kv_tokens)
        limits = StepLimits(settings.max_num_batched_tokens, sequences, context, max(settings.kv_tokens, context))
        draft = self._steps(speculation.draft, limits) if speculation and speculation.draft else None
        deployment = pool.deployment
        captured = deployment.stack.captured(settings.max_num_seqs * (1 + drafted))
        if captured is not deployment.stack:
            deployment = replace(deployment, stack=captured)
        return self._steps(deployment, limits, drafted, draft)

    def _steps(
        self, deployment: Deployment, limits: StepLimits, drafted: int = 0, draft: StepTimes | None = None
    ) -> StepTimes:
        for known, known_limits, steps in self._known:
            if steps.drafted == drafted and steps.draft is draft and _within(limits, known_limits):
                if known is deployment:
                    return steps
                if _alike(known, deployment):
                    return steps.with_overheads(deployment)
        steps = StepTimes(deployment, limits, times=self._times(deployment), drafted=drafted, draft=draft)
        self._known.append((deployment, limits, steps))
        return steps

    def transfer_s(self, service: Service, tokens: int) -> float:
        """Seconds to transfer the cache of so many tokens; every GPU sends its shard."""
        known = next((send_time for kept, send_time in self._transfers if kept is service), None)
        if known is None:
            known = self._predicted(service)
            self._transfers.append((service, known))
        return float(np.interp(tokens, *known))

    def _predicted(self, service: Service) -> tuple[list[int], list[float]]:
        """Tokens, and the seconds that the busiest GPU needs to transfer its shard of their cache."""
        assert service.prefill is not None
        deployment, most = service.prefill.deployment, service.prefill.settings.kv_tokens
        fabric = transfer_fabric(deployment, service.transfer)
        tokens = [*(n for n in _SENT_TOKENS if n < most), most]
        sends = [kv_send(port_bytes(deployment, service.pool.deployment, n), fabric) for n in tokens]
        times = self._times(deployment)
        times.predict(launch.call for launch in sends)
        return tokens, [send_time(launch, times).value for launch in sends]


def _alike(first: Deployment, other: Deployment) -> bool:
    """Whether two deployments are equal except for measured server overheads."""
    same = all(getattr(first, name) is getattr(other, name) for name in ("model", "gpu", "precision", "layout"))
    alike = all(getattr(first, name) == getattr(other, name) for name in ("skew", "routing", "redundant", "overlap"))
    return same and alike and without_overheads(first.stack) == without_overheads(other.stack)


def _within(limits: StepLimits, known: StepLimits) -> bool:
    return (limits.tokens <= known.tokens and limits.sequences <= known.sequences and limits.context <= known.context
            and limits.cached <= known.cached)  # fmt: skip


def step_time_tables(conditions: Conditions = DEFAULT) -> StepTimeTables:
    """Step times under these conditions, to share among simulations."""
    known: list[tuple[Gpu, Times]] = []  # a GPU is no key of a dictionary

    def times(deployment: Deployment) -> Times:
        times_ = next((times for gpu, times in known if gpu is deployment.gpu or gpu == deployment.gpu), None)
        if times_ is None:
            times_ = Times(deployment.gpu, conditions)
            known.append((deployment.gpu, times_))
        return times_

    return StepTimeTables(times)
