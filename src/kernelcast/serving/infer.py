"""One static batch from prompt to last token: prefill, then decode steps until every request has its output.

Decode steps differ only in how much attention reads, which grows evenly: a few steps are predicted and the rest lie on
lines between them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from kernelcast.errors import KernelcastError
from kernelcast.networks.forward import Batch, Call, Deployment, forward, matrix_flops
from kernelcast.networks.kernel_times import KernelTimes
from kernelcast.predict import DEFAULT, Conditions
from kernelcast.serving.memory import Memory, cache_bytes, check_fits, memory, read_weight_bytes
from kernelcast.serving.result import NOTHING, Inference, Share, Span
from kernelcast.serving.workload import Workload

_POWER_WINDOW_S = 0.25  # shorter passes end before a GPU lowers its clock
_CHUNK = 8192  # tokens of a prefill step, where a context is to be as long as it can


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


@dataclass(frozen=True)
class _Run:
    """One pass as one GPU runs it: ``parts`` micro-batches, each with these calls."""

    calls: list[Call]
    parts: int


class _Plan:
    """The passes of one case, before their times are known."""

    def __init__(self, deployment: Deployment, workload: Workload) -> None:
        self.deployment, self.workload = deployment, workload
        self.memory = _memory(deployment, workload)
        if deployment.model.kind == "encoder" and max(workload.outputs) > 1:
            raise KernelcastError(f"{deployment.model.name} is an encoder: it writes no tokens; give --output-len 1")
        written = 0 if deployment.model.kind == "encoder" else 1
        longest = max(n + written * m for n, m in zip(workload.inputs, workload.outputs, strict=True))
        if longest > deployment.model.max_context:
            raise KernelcastError(
                f"a request of {longest:,} tokens exceeds the context of {deployment.model.name}, "
                f"{deployment.model.max_context:,}"
            )
        self.prefills = [self._split(deployment, batch) for batch in workload.prefills()]
        self.decodes = [(step, self._split(deployment, batch)) for step, batch in workload.decodes()]

    @staticmethod
    def _split(deployment: Deployment, batch: Batch) -> _Run:
        """What one GPU runs: the heaviest micro-batch of the heaviest rank, sequences dealt out in turn."""
        layout = deployment.layout
        parts = min(layout.micro_batches, math.ceil(batch.sequences / layout.dp))
        order = sorted(range(batch.sequences), key=lambda i: -(batch.new[i] + batch.past[i]))
        rows = sorted(order[:: layout.dp * parts])
        mine = replace(batch, new=tuple(batch.new[i] for i in rows), past=tuple(batch.past[i] for i in rows))
        return _Run(forward(deployment, mine), parts)

    @cached_property
    def drafts(self) -> tuple[list[_Run], _Run | None]:
        """Of the draft model: its prefill, and one pass in the middle of the decode."""
        speculation = self.workload.speculation
        if speculation is None or speculation.draft is None or not self.decodes:
            return [], None
        middle = self.workload.decodes()[len(self.decodes) // 2][1]
        one = Batch(len(middle.new) * (1,), middle.past)
        draft = speculation.draft
        return [self._split(draft, batch) for batch in self.workload.prefills()], self._split(draft, one)

    @property
    def calls(self) -> Iterable[Call]:
        prefills, one = self.drafts
        for run in (*self.prefills, *(run for _, run in self.decodes), *prefills, *([one] if one else [])):
            yield from run.calls

    def result(self, times: KernelTimes) -> Inference:
        totals: dict[tuple[str, str], _Sum] = {}
        prefill = sum((self._pass("prefill", run, 1.0, times, totals) for run in self.prefills), NOTHING)
        decode = sum((self._pass("decode", run, weight, times, totals) for weight, run in self._weighted()), NOTHING)
        steps = max((step for step, _ in self.decodes), default=0)
        first, one = self.drafts
        for run in first:
            prefill += self._pass("prefill", run, 1.0, times, totals, label="draft model")
        if one and self.workload.speculation:
            drafted = steps * self.workload.speculation.draft_tokens
            decode += self._pass("decode", one, drafted, times, totals, label="draft model")
        shares = tuple(
            Share(phase, part, found.time_s, found.kernels, found.bound_by, found.support)
            for (phase, part), found in totals.items()
        )
        return Inference(
            self.deployment, self.workload, prefill, decode, steps, self.memory, shares, times.predictor,
            flops=self._flops(), decode_bytes=self._decode_bytes(steps),
        )  # fmt: skip

    def _weighted(self) -> list[tuple[float, _Run]]:
        """How many steps each predicted step stands for: the trapezoid rule, exact where time grows evenly."""
        steps = [step for step, _ in self.decodes]
        if not steps:
            return []
        every = np.arange(1, steps[-1] + 1)
        weights = [float(np.interp(every, steps, row).sum()) for row in np.eye(len(steps))]
        return list(zip(weights, (run for _, run in self.decodes), strict=True))

    def _pass(
        self,
        phase: str,
        run: _Run,
        times_run: float,
        times: KernelTimes,
        totals: dict[tuple[str, str], _Sum],
        label: str | None = None,
    ) -> Span:
        """One pass: its kernels, and what the host adds; entered into ``totals``."""
        stack, stages, calls = self.deployment.stack, self.deployment.layout.pp, run.calls
        # A stage does 1 / pp of the layers; micro-batches follow one another, and the first fills the pipeline.
        rounds = (run.parts + stages - 1) / stages
        if phase == "decode":
            rounds = max(run.parts, stages) / stages  # stages never drain between steps
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
        products = [call for call in calls if call.op in ("gemm", "moe") and _sixteen_bits(call)]
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


def _sixteen_bits(call: Call) -> bool:
    """Multiplied in 16 bits, of which the power limit is known; narrower formats need less, nobody here measured how
    much."""
    return dict(call.parameters).get("dtype") in ("bf16", "fp16", "int4")


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
    found = _held(deployment, contexts, new, workload.chunk)
    draft = workload.speculation and workload.speculation.draft
    if not draft:
        return found
    beside = _held(draft, contexts, new, workload.chunk)
    return replace(
        found,
        weights_bytes=found.weights_bytes + beside.weights_bytes,
        cache_bytes=found.cache_bytes + beside.cache_bytes,
    )


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
