"""One static batch from prompt to last token: prefill, then decode steps until every request has its output.

Decode steps differ only in how much attention reads, which grows evenly: a few steps are predicted and the rest lie on
lines between them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kernelcast.errors import KernelcastError
from kernelcast.networks.forward import Batch, Call, Deployment, forward, matrix_flops
from kernelcast.predict import DEFAULT, Conditions
from kernelcast.serving.kernel_times import KernelTimes
from kernelcast.serving.memory import Memory, cache_bytes, check_fits, memory, read_weight_bytes

_POWER_WINDOW_S = 0.25  # shorter passes end before a GPU lowers its clock
_CHUNK = 8192  # tokens of a prefill step, where a context is to be as long as it can
_SAMPLED_STEPS = 9  # decode steps that are predicted, of each stretch with the same requests


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding: ``draft_tokens`` guesses a step, each right with probability ``acceptance`` if those before
    it were (Leviathan et al., arXiv 2211.17192). ``draft``: the model that guesses, on the same GPUs; None: free."""

    draft_tokens: int
    acceptance: float
    draft: Deployment | None = None

    def __post_init__(self) -> None:
        if self.draft_tokens < 1:
            raise KernelcastError(f"draft tokens must be 1 or more, not {self.draft_tokens}")
        if not 0 <= self.acceptance <= 1:
            raise KernelcastError(f"an acceptance rate lies between 0 and 1, not at {self.acceptance}")

    @property
    def tokens_per_step(self) -> float:
        """Expected: the accepted guesses and one token of the model's own, (1 - a^(k+1)) / (1 - a)."""
        a, k = self.acceptance, self.draft_tokens
        return k + 1.0 if a == 1 else (1 - a ** (k + 1)) / (1 - a)


@dataclass(frozen=True)
class Workload:
    """Requests that start together: prompt, output and (of the prompt) tokens that are in the cache already."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cached: tuple[int, ...] = ()
    chunk: int = 0  # tokens of a prefill step, 0: all at once
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        if not self.inputs or len(self.inputs) != len(self.outputs):
            raise KernelcastError(f"{len(self.inputs)} prompts and {len(self.outputs)} outputs: give one of each")
        if self.cached and len(self.cached) != len(self.inputs):
            raise KernelcastError(f"{len(self.cached)} cached prefixes for {len(self.inputs)} prompts")
        if min(self.inputs) < 1 or min(self.outputs) < 1:
            raise KernelcastError("every request needs at least one input token and one output token")
        if any(not 0 <= c < n for c, n in zip(self.cached, self.inputs, strict=False)):
            raise KernelcastError("cached tokens must be fewer than a request's input tokens")
        if self.chunk < 0:
            raise KernelcastError(f"a prefill chunk must be 0 or more tokens, not {self.chunk}")

    @classmethod
    def equal(cls, batch: int, input_tokens: int, output_tokens: int, cached: int = 0, chunk: int = 0,
              speculation: Speculation | None = None) -> Workload:  # fmt: skip
        if batch < 1:
            raise KernelcastError(f"batch must be 1 or more, not {batch}")
        return cls(batch * (input_tokens,), batch * (output_tokens,), batch * (cached,), chunk, speculation)

    @property
    def past(self) -> tuple[int, ...]:
        return self.cached or len(self.inputs) * (0,)

    def prefills(self) -> list[Batch]:
        """The prefill's passes: one, or chunks that take the prompts in turn."""
        new = [n - c for n, c in zip(self.inputs, self.past, strict=True)]
        if not self.chunk or sum(new) <= self.chunk:
            return [Batch(tuple(new), self.past)]
        found: list[Batch] = []
        taken: list[tuple[int, int]] = []
        room = self.chunk
        for tokens, past in zip(new, self.past, strict=True):
            while tokens:
                part = min(tokens, room)
                taken.append((part, past))
                tokens, past, room = tokens - part, past + part, room - part
                if not room:
                    found.append(Batch(*zip(*taken, strict=True)))
                    taken, room = [], self.chunk
        return [*found, Batch(*zip(*taken, strict=True))] if taken else found

    def decodes(self) -> list[tuple[int, Batch]]:
        """(step, pass) of decode steps to predict: the ends of every stretch with the same requests, some between."""
        gained = self.speculation.tokens_per_step if self.speculation else 1.0
        checked = 1 + (self.speculation.draft_tokens if self.speculation else 0)
        ends = [math.ceil((n - 1) / gained) for n in self.outputs]  # steps that each request takes part in
        found, start = [], 1
        for end in sorted({e for e in ends if e}):
            alive = [i for i, e in enumerate(ends) if e >= end]
            for step in sorted(set(np.linspace(start, end, min(_SAMPLED_STEPS, end - start + 1)).round().astype(int))):
                past = tuple(self.inputs[i] + int((step - 1) * gained) for i in alive)
                found.append((int(step), Batch(len(alive) * (checked,), past)))
            start = end + 1
        return found


@dataclass(frozen=True)
class Span:
    """Seconds, with the interval that 80% of cases should lie in."""

    time_s: float
    low_s: float
    high_s: float

    def __add__(self, other: Span) -> Span:
        """One after another, as wrong together."""
        return Span(self.time_s + other.time_s, self.low_s + other.low_s, self.high_s + other.high_s)

    def __mul__(self, times: float) -> Span:
        return Span(self.time_s * times, self.low_s * times, self.high_s * times)


NOTHING = Span(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Share:
    """A part of the model in one phase: its seconds, its kernels, and what binds most of its time."""

    phase: str  # prefill or decode
    part: str
    time_s: float
    kernels: float  # launched
    bound_by: str
    support: str


@dataclass(frozen=True)
class Inference:
    """How a batch runs. Every second of ``total`` is in one of ``shares``."""

    deployment: Deployment
    workload: Workload
    prefill: Span
    decode: Span
    steps: int  # of decode
    memory: Memory
    shares: tuple[Share, ...]
    predictor: str
    flops: float = field(repr=False, default=0.0)  # of matrix products, all GPUs together
    decode_bytes: float = field(repr=False, default=0.0)  # weights and cache that one GPU reads in all decode steps

    @property
    def total(self) -> Span:
        return self.prefill + self.decode

    @property
    def ttft_s(self) -> float:
        return self.prefill.time_s

    @property
    def step(self) -> Span:
        """The mean decode step; with speculation a step may give several tokens."""
        return self.decode * (1 / self.steps) if self.steps else NOTHING

    @property
    def tpot(self) -> Span:
        """Mean time of an output token after the first."""
        tokens = max(self.workload.outputs) - 1
        return self.decode * (1 / tokens) if tokens else NOTHING

    @property
    def output_tokens(self) -> int:
        return sum(self.workload.outputs)

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.total.time_s

    @property
    def mfu(self) -> float:
        """Of the peak of all GPUs, the share that the model's matrix products use over the whole time."""
        layout, gpu = self.deployment.layout, self.deployment.gpu
        # fp16 where there is no bf16 (V100, T4), fp32 where there are no tensor cores
        peak = gpu.tensor_flops_per_s("bf16") or gpu.tensor_flops_per_s("fp16") or gpu.fma_flops_per_s("fp32")
        return self.flops / (self.total.time_s * layout.gpus * peak)

    @property
    def bandwidth_use(self) -> float:
        """Of DRAM's peak, the share that weights and cache use in the decode steps."""
        if not self.decode.time_s:
            return 0.0
        return self.decode_bytes / self.decode.time_s / self.deployment.gpu.dram_bytes_per_s


def infer(deployment: Deployment, workload: Workload, conditions: Conditions = DEFAULT) -> Inference:
    """Predict one batch."""
    return infer_many([(deployment, workload)], conditions)[0]


def infer_many(
    cases: Sequence[tuple[Deployment, Workload]],
    conditions: Conditions = DEFAULT,
    *,
    skip: Callable[[int, KernelcastError], None] | None = None,
) -> list[Inference]:
    """Predict many batches; a kernel call that several share is computed once. ``skip`` is told of each case that is
    refused (it does not fit, say); without it the first refusal ends all."""
    plans: list[_Plan] = []
    places: dict[int, int] = {}
    for at, (deployment, workload) in enumerate(cases):
        try:
            plans.append(_Plan(deployment, workload))
            places[id(plans[-1])] = at
        except KernelcastError as error:
            if skip is None:
                raise
            skip(at, error)
    groups: list[tuple[KernelTimes, list[_Plan]]] = []  # by GPU, which is no key of a dictionary
    for plan in plans:
        gpu = plan.deployment.gpu
        same = next((members for known, members in groups if known.gpu is gpu or known.gpu == gpu), None)
        if same is None:
            groups.append((KernelTimes(gpu, conditions), [plan]))
        else:
            same.append(plan)
    found: dict[int, Inference] = {}
    for known, members in groups:
        try:
            known.learn(call for plan in members for call in plan.calls)
        except KernelcastError:  # of one case at least: a format that this GPU lacks, say
            if skip is None:
                raise
        for plan in members:
            try:
                known.learn(plan.calls)
            except KernelcastError as error:
                if skip is None:
                    raise
                skip(places[id(plan)], error)
            else:
                found[id(plan)] = plan.result(known)
    return [found[id(plan)] for plan in plans if id(plan) in found]


class _Plan:
    """The passes of one case, before their times are known."""

    def __init__(self, deployment: Deployment, workload: Workload) -> None:
        self.deployment, self.workload = deployment, workload
        self.memory = _memory(deployment, workload)
        layout = deployment.layout
        if deployment.model.kind == "encoder" and max(workload.outputs) > 1:
            raise KernelcastError(f"{deployment.model.name} is an encoder: it writes no tokens; give --output-len 1")
        written = 0 if deployment.model.kind == "encoder" else 1
        longest = max(n + written * m for n, m in zip(workload.inputs, workload.outputs, strict=True))
        if longest > deployment.model.max_context:
            raise KernelcastError(
                f"a request of {longest:,} tokens exceeds the context of {deployment.model.name}, "
                f"{deployment.model.max_context:,}"
            )
        cut = layout.micro_batches * layout.dp
        self.prefills = [self._split(batch, cut) for batch in workload.prefills()]
        self.decodes = [(step, self._split(batch, cut)) for step, batch in workload.decodes()]

    def _split(self, batch: Batch, cut: int) -> list[Call]:
        """The calls of one GPU: those of one micro-batch of one attention-DP rank."""
        count = max(1, math.ceil(batch.sequences / cut)) if cut > 1 else batch.sequences
        # the largest part stands for all: sequences dealt out in turn
        picked = range(0, batch.sequences, max(1, batch.sequences // count)) if cut > 1 else range(batch.sequences)
        rows = list(picked)[:count]
        return forward(self.deployment, Batch(tuple(batch.new[i] for i in rows), tuple(batch.past[i] for i in rows)))

    @cached_property
    def drafts(self) -> list[Call]:
        """One pass of the draft model in the middle of the decode."""
        speculation = self.workload.speculation
        if speculation is None or speculation.draft is None or not self.decodes:
            return []
        middle = self.workload.decodes()[len(self.decodes) // 2][1]
        return forward(speculation.draft, Batch(len(middle.new) * (1,), middle.past))

    @property
    def calls(self) -> Iterable[Call]:
        for calls in (*self.prefills, *(calls for _, calls in self.decodes), self.drafts):
            yield from calls

    def result(self, times: KernelTimes) -> Inference:
        totals: dict[tuple[str, str], _Sum] = {}
        prefill = sum((self._pass("prefill", calls, 1.0, times, totals) for calls in self.prefills), NOTHING)
        decode = sum(
            (self._pass("decode", calls, weight, times, totals) for weight, calls in self._weighted()), NOTHING
        )
        steps = max((step for step, _ in self.decodes), default=0)
        if self.drafts and self.workload.speculation:
            drafted = steps * self.workload.speculation.draft_tokens
            decode += self._pass("decode", self.drafts, drafted, times, totals, label="draft model")
        shares = tuple(
            Share(phase, part, found.time_s, found.kernels, found.bound_by, found.support)
            for (phase, part), found in totals.items()
        )
        return Inference(
            self.deployment, self.workload, prefill, decode, steps, self.memory, shares, times.predictor,
            flops=self._flops(), decode_bytes=self._decode_bytes(steps),
        )  # fmt: skip

    def _weighted(self) -> list[tuple[float, list[Call]]]:
        """How many steps each predicted step stands for: the trapezoid rule, exact where time grows evenly."""
        steps = [step for step, _ in self.decodes]
        if not steps:
            return []
        every = np.arange(1, steps[-1] + 1)
        weights = [float(np.interp(every, steps, row).sum()) for row in np.eye(len(steps))]
        return list(zip(weights, (calls for _, calls in self.decodes), strict=True))

    def _pass(
        self,
        phase: str,
        calls: Sequence[Call],
        times_run: float,
        times: KernelTimes,
        totals: dict[tuple[str, str], _Sum],
        label: str | None = None,
    ) -> Span:
        """One pass: its kernels, and what the host adds; entered into ``totals``."""
        stack, layout = self.deployment.stack, self.deployment.layout
        # A stage does 1 / pp of the layers; micro-batches follow one another, and the first fills the pipeline.
        rounds = (layout.micro_batches + layout.pp - 1) / layout.pp
        if phase == "decode":
            rounds = max(layout.micro_batches, layout.pp) / layout.pp  # stages never drain between steps
        parts: dict[str, Span] = {}
        for call in calls:
            found = times[call]
            span = Span(found.time_s, found.low_s, found.high_s) * (call.count * rounds)
            parts[call.part] = parts.get(call.part, NOTHING) + span
            entry = totals.setdefault((phase, label or call.part), _Sum())
            entry.add(span.time_s * times_run, call.count * rounds * times_run, found.bound_by, found.support)
        whole = _joined(parts.values())
        throttled = self._throttled_s(calls, times, whole.time_s)
        if throttled:
            totals.setdefault((phase, "power limit"), _Sum()).add(throttled * times_run, 0.0, "power", "near")
            whole += Span(throttled, throttled, throttled)
        launched = sum(call.count for call in calls)
        graph = stack.graphs and phase == "decode"
        waits = max(0.0, launched * stack.launch_s - whole.time_s) if not graph else launched * stack.gap_s
        host = waits + (0.0 if label else stack.step_s if phase == "decode" else stack.prefill_s)
        if host:
            totals.setdefault((phase, "host"), _Sum()).add(host * times_run, 0.0, "host", "seen")
        return (whole + Span(host, host, host)) * times_run

    def _throttled_s(self, calls: Sequence[Call], times: KernelTimes, pass_s: float) -> float:
        """What a pass takes longer because its matrix products, one after another, exceed the GPU's power."""
        gpu = self.deployment.gpu
        if not gpu.tensor_flops_per_j or pass_s < _POWER_WINDOW_S:
            return 0.0
        products = [call for call in calls if call.op in ("gemm", "moe")]
        needed = sum(call.count * matrix_flops(call) for call in products) / (gpu.tensor_flops_per_j * gpu.power_w)
        return max(0.0, needed - sum(call.count * times[call].time_s for call in products))

    def _flops(self) -> float:
        """2 for each weight that a token passes; attention's products left out, as MFU is mostly told."""
        active = self.deployment.model.active_parameters
        per_token = 2.0 * (active.attention + active.mlp + active.experts)
        head = 2.0 * self.deployment.model.hidden * self.deployment.model.vocab
        tokens = sum(self.workload.inputs) - sum(self.workload.past) + sum(n - 1 for n in self.workload.outputs)
        return per_token * tokens + head * sum(self.workload.outputs)

    def _decode_bytes(self, steps: int) -> float:
        """Every step reads the weights that its tokens use; a request's cache is read while it decodes."""
        if not steps:
            return 0.0
        asked = zip(self.workload.inputs, self.workload.outputs, strict=True)
        per_token = steps / (max(self.workload.outputs) - 1)
        cache = sum((m - 1) * per_token * cache_bytes(self.deployment, n + m // 2) for n, m in asked)
        tokens = sum((m - 1) * per_token for m in self.workload.outputs) / steps  # in a mean step
        checked = 1 + (self.workload.speculation.draft_tokens if self.workload.speculation else 0)
        return steps * read_weight_bytes(self.deployment, tokens * checked) + cache


@dataclass
class _Sum:
    """Seconds and kernels of a part, by what bound them."""

    time_s: float = 0.0
    kernels: float = 0.0
    bound: dict[str, float] = field(default_factory=dict)
    level: dict[str, float] = field(default_factory=dict)

    def add(self, time_s: float, kernels: float, bound_by: str, support: str) -> None:
        self.time_s += time_s
        self.kernels += kernels
        self.bound[bound_by] = self.bound.get(bound_by, 0.0) + time_s
        self.level[support] = self.level.get(support, 0.0) + time_s

    @property
    def bound_by(self) -> str:
        return max(self.bound, key=lambda name: self.bound[name])

    @property
    def support(self) -> str:
        return max(self.level, key=lambda name: self.level[name])


def _joined(parts: Iterable[Span]) -> Span:
    """Parts of a pass: the same kernel is wrong the same way in every layer, different ones are wrong on their own."""
    spans = list(parts)
    time = sum(span.time_s for span in spans)
    low = math.sqrt(sum((span.time_s - span.low_s) ** 2 for span in spans))
    high = math.sqrt(sum((span.high_s - span.time_s) ** 2 for span in spans))
    return Span(time, time - low, time + high)


def _memory(deployment: Deployment, workload: Workload) -> Memory:
    found = _needed(deployment, workload)
    if found.free_bytes < 0:
        check_fits(deployment, found, largest_batch(deployment, workload))
    return found


def _needed(deployment: Deployment, workload: Workload) -> Memory:
    contexts = Counter(n + m for n, m in zip(workload.inputs, workload.outputs, strict=True))
    new = sum(workload.inputs) - sum(workload.past)
    return _held(deployment, contexts, new, workload.chunk)


def _held(deployment: Deployment, contexts: Mapping[int, int], new_tokens: int, chunk: int) -> Memory:
    cut = deployment.layout.dp * deployment.layout.micro_batches
    tokens = min(new_tokens, chunk) if chunk else new_tokens
    return memory(deployment, contexts, math.ceil(tokens / cut), math.ceil(sum(contexts.values()) / cut))


def largest_batch(deployment: Deployment, workload: Workload) -> int:
    """How many requests like the mean of these fit."""
    inputs, outputs = (math.ceil(sum(x) / len(x)) for x in (workload.inputs, workload.outputs))
    new = inputs - sum(workload.past) // len(workload.past)

    def fits(batch: int) -> bool:
        return _held(deployment, {inputs + outputs: batch}, batch * new, workload.chunk).free_bytes >= 0

    return _largest(fits)


def largest_context(deployment: Deployment, batch: int) -> int:
    """The longest requests, all alike, that fit in a batch of this size."""
    most = deployment.model.max_context
    return min(most, _largest(lambda n: _held(deployment, {n + 1: batch}, batch * n, _CHUNK).free_bytes >= 0))


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, by doubling and halving; 0 when none does."""
    if not fits(1):
        return 0
    high = 1
    while fits(2 * high) and high < 1 << 40:
        high *= 2
    low = high
    high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
