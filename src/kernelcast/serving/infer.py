"""One static batch from prompt to last token: prefill, then decode steps until every request has its output.

Decode steps differ only in how much attention reads, which grows evenly: a few steps are predicted and the rest lie on
lines between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.calls import Call
from kernelcast.errors import KernelcastError
from kernelcast.networks.forward import Batch, Deployment
from kernelcast.predict import DEFAULT, Conditions
from kernelcast.serving.memory import cache_bytes, checked_memory, read_weight_bytes
from kernelcast.serving.passes import Run, laid
from kernelcast.serving.result import Inference
from kernelcast.serving.workload import Workload
from kernelcast.times import Times


_NUMBERS = (
    "tokens_per_s",
    "steps",
    "output_tokens",
    "flops",
    "mfu",
    "bandwidth_use",
    "memory_bytes",
    "available_bytes",
)


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

    def refused(at: int, error: KernelcastError) -> None:
        if skip is None:
            raise error
        skip(at, error)

    groups: list[tuple[Times, dict[int, Case]]] = []  # by GPU, which is no key of a dictionary
    for at, (deployment, workload) in enumerate(cases):
        try:
            case = Case(deployment, workload)
        except KernelcastError as error:
            refused(at, error)
            continue
        gpu = deployment.gpu
        same = next((members for known, members in groups if known.gpu is gpu or known.gpu == gpu), None)
        if same is None:
            groups.append((Times(gpu, conditions), {at: case}))
        else:
            same[at] = case
    found: dict[int, Inference] = {}
    for known, members in groups:
        try:
            known.learn(call for case in members.values() for call in case.calls)
        except KernelcastError:  # of one case at least, which is told below
            if skip is None:
                raise
        for at, case in members.items():
            try:
                known.learn(case.calls)
            except KernelcastError as error:  # a format that this GPU lacks, say
                refused(at, error)
            else:
                found[at] = case.result(known)
    return [found[at] for at in sorted(found)]


def infer_columns(
    cases: Sequence[tuple[Deployment, Workload]], conditions: Conditions = DEFAULT
) -> dict[str, NDArray[Any]]:
    """Predict many batches, columns out: one entry a case, in order; ``Inference`` says what each column means.

    Times: ttft_s, prefill_s, decode_s, total_s, tpot_s, step_s, each also as *_low and *_high. Numbers: tokens_per_s,
    steps, output_tokens, flops, mfu, bandwidth_use, memory_bytes, available_bytes. Words: bound_by (what binds most of
    the time), support, and refused: None, or why there is no answer. Of a case that is refused times are NaN, words None;
    memory_bytes and fits are told of every case.
    """
    why: dict[int, str] = {}
    found = infer_many(cases, conditions, skip=lambda at, error: why.update({at: str(error)}))
    answered = np.array([at not in why for at in range(len(cases))], dtype=bool)
    columns: dict[str, NDArray[Any]] = {name: np.full(len(cases), np.nan) for name in _NUMBERS}
    columns |= {name: np.full(len(cases), None, dtype=object) for name in ("bound_by", "support", "refused")}
    spans = {
        "ttft": "prefill",
        "prefill": "prefill",
        "decode": "decode",
        "total": "total",
        "tpot": "tpot",
        "step": "step",
    }
    for name, of in spans.items():
        for ending, end in (("s", "time_s"), ("s_low", "low_s"), ("s_high", "high_s")):
            columns[f"{name}_{ending}"] = np.full(len(cases), np.nan)
            columns[f"{name}_{ending}"][answered] = [getattr(getattr(one, of), end) for one in found]
    for name in _NUMBERS:
        of = {"memory_bytes": "memory.used_bytes", "available_bytes": "memory.available_bytes"}.get(name, name)
        columns[name][answered] = [attrgetter(of)(one) for one in found]
    for at, reason in why.items():
        columns["refused"][at] = reason
    return columns


class Case:
    """The passes of one question, before their times are known."""

    def __init__(self, deployment: Deployment, workload: Workload) -> None:
        self.deployment, self.workload = deployment, workload.on(deployment)
        workload = self.workload
        self.memory = checked_memory(deployment, workload)
        if deployment.model.kind == "encoder" and max(workload.outputs) > 1:
            raise KernelcastError(f"{deployment.model.name} is an encoder: it writes no tokens; give --output-len 1")
        written = 0 if deployment.model.kind == "encoder" else 1
        longest = max(n + written * m for n, m in zip(workload.inputs, workload.outputs, strict=True))
        if longest > deployment.model.max_context:
            raise KernelcastError(
                f"a request of {longest:,} tokens exceeds the context of {deployment.model.name}, "
                f"{deployment.model.max_context:,}"
            )
        self.prefills = [Run.of(deployment, batch) for batch in workload.prefills()]
        self.decodes = [(step, Run.of(deployment, batch)) for step, batch in workload.decodes()]

    @cached_property
    def drafts(self) -> tuple[list[Run], Run | None]:
        """Of the draft model: its prefill, and one pass in the middle of the decode."""
        speculation = self.workload.speculation
        if speculation is None or speculation.draft is None or not self.decodes:
            return [], None
        middle = self.workload.decodes()[len(self.decodes) // 2][1]
        one = Batch(len(middle.new) * (1,), middle.past)
        draft = speculation.draft
        return [Run.of(draft, batch) for batch in self.workload.prefills()], Run.of(draft, one)

    @property
    def calls(self) -> Iterable[Call]:
        prefills, one = self.drafts
        for run in (*self.prefills, *(run for _, run in self.decodes), *prefills, *([one] if one else [])):
            yield from (launch.call for launch in run.launches)

    def result(self, times: Times) -> Inference:
        steps = max((step for step, _ in self.decodes), default=0)
        first, one = self.drafts
        drafted = steps * self.workload.speculation.draft_tokens if self.workload.speculation else 0
        passes = (
            *laid("prefill", [(1.0, run) for run in self.prefills], times),
            *laid("decode", self._weighted(), times),
            *laid("prefill", [(1.0, run) for run in first], times, draft=True),
            *laid("decode", [(drafted, one)] if one else [], times, draft=True),
        )
        return Inference(
            self.deployment, self.workload, passes, steps, self.memory, times, self._flops(), self._decode_bytes(steps)
        )

    def _weighted(self) -> list[tuple[float, Run]]:
        """How many steps each predicted step stands for: the trapezoid rule, exact where time grows evenly."""
        steps = [step for step, _ in self.decodes]
        if not steps:
            return []
        every = np.arange(1, steps[-1] + 1)
        weights = [float(np.interp(every, steps, row).sum()) for row in np.eye(len(steps))]
        return list(zip(weights, (run for _, run in self.decodes), strict=True))

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
