"""A candidate with its forecast: latency, throughput, and what a million tokens cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kernelcast.errors import KernelcastError
from kernelcast.inference.forward import Deployment
from kernelcast.inference.infer import Inference, infer_many, learn_activities
from kernelcast.inference.memory import memory
from kernelcast.inference.workload import Workload
from kernelcast.results import NOTHING, Interval, support_of
from kernelcast.schedule import Memory, Share
from kernelcast.search.compare.asked import Asked
from kernelcast.search.compare.candidates import Candidate
from kernelcast.search.plan.goals import Goal


@dataclass(frozen=True, eq=False)
class Served:
    """Times are of one request of ``way.batch``, on each engine. ``requests_per_s``: that all engines can carry."""

    asked: Asked
    way: Candidate
    replicas: int
    ttft: Interval
    tpot: Interval
    e2el: Interval
    requests_per_s: float
    parts: tuple[tuple[Inference, float], ...]  # forecasts behind it, and how much of each a request has

    @property
    def gpus(self) -> int:
        return self.replicas * self.way.deployment.layout.gpus

    @property
    def served_per_s(self) -> float:
        """Requests: what is asked for, or all that can be."""
        return self.requests_per_s if self.asked.rate is None else min(self.asked.rate, self.requests_per_s)

    @property
    def tokens_per_s(self) -> float:
        return self.served_per_s * self.asked.output_tokens

    @property
    def usd_per_hour(self) -> float | None:
        price = self.asked.price(self.way.deployment.gpu)
        return None if price is None else price.usd_per_hour * self.gpus

    @property
    def usd_per_million(self) -> float | None:
        """Tokens out (in, of an encoder)."""
        cost = self.usd_per_hour
        return None if cost is None else cost / 3600 / self.tokens_per_s * 1e6

    @cached_property
    def joules_per_request(self) -> Interval | None:
        """Only when it is asked for: power takes a look at every kernel."""
        learn_activities([found for found, _ in self.parts])
        known = [(joules(found), times) for found, times in self.parts]
        return sum((span * times for span, times in known if span), NOTHING) if all(span for span, _ in known) else None

    @property
    def joules_per_million(self) -> Interval | None:
        return None if self.joules_per_request is None else self.joules_per_request * (1e6 / self.asked.output_tokens)

    def share(self, goal: Goal) -> float:
        """Of a goal, that the likely time takes: at most 1 where it is met."""
        return {"ttft": self.ttft, "tpot": self.tpot, "e2el": self.e2el}[goal.metric].value * 1e3 / goal.limit_ms

    @property
    def late(self) -> Goal | None:
        """The goal that is broken most; None: all are met."""
        worst = max(self.asked.goals, key=self.share, default=None)
        return worst if worst is not None and self.share(worst) > 1 else None

    @property
    def carries(self) -> bool:
        """Whether GPUs enough are allowed for the rate."""
        return self.gpus <= self.asked.max_gpus

    @cached_property
    def memory(self) -> Memory:
        place, asked = self.way.deployment, self.asked
        workload = Workload.equal(1, asked.input_len, asked.output_len).on(place)
        cut = place.layout.dp * place.layout.micro_batches
        tokens = min(workload.chunk or math.inf, asked.input_len * self.way.batch)
        contexts = {asked.input_len + asked.output_len: self.way.batch}
        return memory(place, contexts, math.ceil(tokens / cut), math.ceil(self.way.batch / cut))

    @cached_property
    def shares(self) -> list[tuple[Share, float]]:
        """Where the time of a request goes: seconds of each part of each phase."""
        return [(share, share.time_s * times) for found, times in self.parts for share in found.shares]

    @property
    def support(self) -> str:
        return support_of((time_s, share.support) for share, time_s in self.shares)

    @property
    def bound_by(self) -> dict[str, float]:
        """Pipelines (host, power) by the share of the time that they bind, the largest first."""
        sums: dict[str, float] = {}
        for share, time_s in self.shares:
            sums[share.bound_by] = sums.get(share.bound_by, 0.0) + time_s
        whole = sum(sums.values()) or 1.0
        return {name: value / whole for name, value in sorted(sums.items(), key=lambda item: -item[1])}


def joules(found: Any) -> Interval | None:
    """Of a whole run on all its GPUs; None where nobody knows."""
    energy = getattr(found, "energy", None)
    return energy if isinstance(energy, Interval) else None


def forecast(asked: Asked, ways: Sequence[Candidate]) -> list[Served | KernelcastError]:
    """Every candidate, in one call of ``infer_many``; the error of those that are refused."""
    cases: list[tuple[Deployment, Workload]] = []
    places: list[tuple[int, ...]] = []  # of each candidate, where its forecasts are among the cases
    prompts: dict[tuple[int, int], tuple[int, ...]] = {}  # of a deployment: one prompt alone, and so many in a step
    for way in ways:
        place = way.deployment
        if not asked.steady:
            places.append((len(cases),))
            cases.append((place, Workload.equal(way.batch, asked.input_len, asked.output_len)))
            continue
        together = min(_prompts(asked, place), way.batch)
        if (id(place), together) not in prompts:
            counts = dict.fromkeys((1, together))
            prompts[id(place), together] = (len(cases), len(cases) + len(counts) - 1)
            cases += [(place, Workload.equal(count, asked.input_len, 1)) for count in counts]
        places.append(prompts[id(place), together])
        if asked.output_len > 1 and asked.model.kind != "encoder":
            places[-1] += (len(cases),)
            cases.append((place, _under_way(asked, way.batch)))
    refused: dict[int, KernelcastError] = {}
    answers = iter(infer_many(cases, asked.conditions, skip=refused.__setitem__))
    found = {at: next(answers) for at in range(len(cases)) if at not in refused}
    make = _steady if asked.steady else _static
    return [
        next((refused[at] for at in own if at in refused), None) or make(asked, way, *(found[at] for at in own))
        for way, own in zip(ways, places, strict=True)
    ]


def _prompts(asked: Asked, place: Deployment) -> int:
    """Prompts that a full step of the engine reads together."""
    chunk = Workload.equal(1, asked.input_len, 1).on(place).chunk
    return max(1, (chunk or asked.input_len) // asked.input_len)


def _under_way(asked: Asked, batch: int) -> Workload:
    """Requests that decode: all but a token of each prompt is in the cache."""
    inputs, outputs = batch * (asked.input_len,), batch * (asked.output_len,)
    cached = batch * (asked.input_len - 1,)
    return Workload(inputs, outputs, cached)


def _static(asked: Asked, way: Candidate, found: Inference) -> Served:
    """One batch that starts together, as `kernelcast infer` tells it."""
    return Served(
        asked, way, way.replicas, found.prefill, found.tpot, found.total, (asked.batch or 1) / found.total.value,
        ((found, 1 / way.batch),),
    )  # fmt: skip


def _steady(
    asked: Asked, way: Candidate, alone: Inference, prompts: Inference, steps: Inference | None = None
) -> Served:
    """``way.batch`` requests under way at all times: whenever one ends another comes, whose prompt is read between two
    steps of the others. In the time that each takes, all prompts are read once: prompts + decode."""
    others = (way.batch - 1) / way.batch
    count = len(prompts.workload.inputs)
    read = prompts.prefill * (1 / count)  # of a prompt, among others
    decode, wait, tpot = NOTHING, NOTHING, NOTHING
    parts = [(prompts, 1 / count)]
    if steps is not None:
        decode, wait = steps.decode, steps.step * others  # an arrival waits for the step that is under way
        tpot = (decode + read * (way.batch * others)) * (1 / (asked.output_len - 1))
        parts.append((steps, decode.value / steps.total.value / way.batch))  # less the last token of its prompts
    rate = way.batch / (read * way.batch + decode).value
    replicas = way.replicas if asked.rate is None else max(1, math.ceil(asked.rate / rate - 1e-9))
    ttft = alone.prefill + wait
    e2el = ttft + tpot * (asked.output_len - 1)
    return Served(asked, way, replicas, ttft, tpot, e2el, rate * replicas, tuple(parts))
