"""``kernelcast.compare`` and ``kernelcast.compare_training``: the commands' questions, from Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kernelcast import models
from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu
from kernelcast.hardware.prices import read_prices
from kernelcast.inference.forward import Deployment
from kernelcast.inference.infer import Inference, infer_many, learn_activities
from kernelcast.inference.memory import memory
from kernelcast.inference.workload import Workload
from kernelcast.models.architecture import Architecture
from kernelcast.results import NOTHING, HtmlRepr, Interval, support_of
from kernelcast.schedule import Memory, Share
from kernelcast.search.compare.candidates import ALL, Asked, Candidate, Unfit, between, candidates, chosen_gpus, listed
from kernelcast.search.goals import Goal, parse_ms
from kernelcast.stacks import stack as named_stack


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


_REFINED = 2  # layouts of a GPU whose batches are looked at more finely


@dataclass(frozen=True, eq=False)
class Row:
    """A GPU: its best way, or why there is none."""

    gpu: Gpu
    best: Served | None
    unfit: Unfit | None = None
    refused: bool = False  # it fits, but cannot be forecast

    @property
    def meets(self) -> bool:
        """Whether it does all that is asked."""
        return self.best is not None and self.best.late is None and self.best.carries


@dataclass(frozen=True, eq=False)
class Comparison(HtmlRepr):
    """Rows in order: those that do what is asked, those that do not, those that do not fit."""

    asked: Asked
    rows: tuple[Row, ...]
    forecasts: int  # candidates that were looked at

    @property
    def fitting(self) -> list[Served]:
        return [row.best for row in self.rows if row.best is not None]


def compare_asked(asked: Asked, *, thorough: bool = False) -> Comparison:
    """Every GPU at its best; refuses a model that fits on none. ``thorough``: forecast every layout that fits."""
    ways = [candidates(asked, chip, thorough=thorough) for chip in asked.gpus]
    flat = [way for found in ways if not isinstance(found, Unfit) for way in found]
    if not flat:
        unfit = [(chip, way) for chip, way in zip(asked.gpus, ways, strict=True) if isinstance(way, Unfit)]
        raise KernelcastError(_nowhere(asked, unfit))
    served = iter(forecast(asked, flat))
    found = [[] if isinstance(own, Unfit) else [next(served) for _ in own] for own in ways]
    finer = [_finer(asked, own) for own in found]
    served = iter(forecast(asked, [way for own in finer for way in own]))
    for own, more in zip(found, finer, strict=True):
        own += [next(served) for _ in more]
    rows = [
        Row(chip, None, own) if isinstance(own, Unfit) else _best(chip, members)
        for chip, own, members in zip(asked.gpus, ways, found, strict=True)
    ]
    if not any(row.best for row in rows):
        raise KernelcastError(next(row.unfit.why for row in rows if row.unfit and row.refused))
    return Comparison(asked, tuple(sorted(rows, key=_place)), len(flat) + sum(map(len, finer)))


def _finer(asked: Asked, found: Sequence[Served | KernelcastError]) -> list[Candidate]:
    """Where a limit or a rate decides on the batch: sizes between those that were looked at, of the best layouts."""
    if not asked.steady or (asked.rate is None and not asked.goals):
        return []
    best: dict[int, Served] = {}
    for one in sorted((one for one in found if isinstance(one, Served)), key=order):
        best.setdefault(id(one.way.deployment), one)
    return [way for one in list(best.values())[:_REFINED] for way in between(one.way)]


def _best(chip: Gpu, found: Sequence[Served | KernelcastError]) -> Row:
    able = [one for one in found if isinstance(one, Served)]
    if able:
        return Row(chip, min(able, key=order))
    return Row(chip, None, Unfit(str(found[0])), refused=True)


def order(found: Served) -> tuple[float, ...]:
    """What makes one way better than another, less is better: keeping the goals and carrying the rate, then what is
    asked for, then latency."""
    asked, broken = found.asked, found.late
    missed = 0.0 if broken is None else found.share(broken)
    over = 0.0 if found.carries else found.gpus / asked.max_gpus
    return (max(missed, over), *_value(found), found.e2el.value)


def _value(found: Served) -> tuple[float, ...]:
    """What the order is by, less is better; where nobody knows it, after all others, throughput a GPU."""
    each = -found.tokens_per_s / found.gpus
    match found.asked.by or "dollars":
        case "latency":
            return 0.0, found.e2el.value, each
        case "throughput":
            return 0.0, -found.requests_per_s, each
        case "joules":
            spent = found.joules_per_million
            known = None if spent is None else spent.value
        case _:
            known = found.usd_per_million
    return (0.0, known, each) if known is not None else (1.0, each, each)


def _place(row: Row) -> tuple[float, ...]:
    return (math.inf,) if row.best is None else order(row.best)


def _nowhere(asked: Asked, unfit: Sequence[tuple[Gpu, Unfit]]) -> str:
    """One line: the GPU that comes nearest, and what would help."""
    lacking = [one for one in unfit if one[1].memory is not None]
    chip, nearest = min(
        lacking or unfit, key=lambda one: one[1].memory.missing_bytes if one[1].memory is not None else math.inf
    )
    which = "the nearest" if len(unfit) > 1 else "the only one asked for"
    return (
        f"{asked.model.name} fits on no GPU of {len(unfit)} within --max-gpus {asked.max_gpus}: {chip.id}, {which}, "
        f"{nearest.why}; more GPUs, a smaller format (--formats fp8) or a smaller batch may fit"
    )


Names = str | Sequence[str]
Time = str | float | None


def compare(
    model: str | Path | Architecture,
    gpus: Names = "all",
    *,
    what_if: Sequence[str] = (),
    stack: str = "vllm",
    formats: Names | None = None,
    ttft: Time = None,
    tpot: Time = None,
    e2el: Time = None,
    prices: Path | None = None,
    price: Sequence[str] = (),
    price_kind: str = "on_demand",
    thorough: bool = False,
    **asked: Any,
) -> Comparison:
    """Every GPU at its best way to run ``model``, in order.

    ``gpus``: names, or ``all``; ``what_if``: each adds a variant of every GPU (``dram_bytes_per_s*1.5``). ``ttft``,
    ``tpot``, ``e2el``: latency limits ("500ms", or milliseconds). ``formats``: of weights, or ``all``; None: as the
    checkpoint is. ``asked``: ``batch`` or ``rate``, ``input_len``, ``output_len``, ``max_gpus``, ``by``, ``kv_dtype``,
    ``skew``, ``conditions``, as in ``Asked``.
    """
    times = {"ttft": ttft, "tpot": tpot, "e2el": e2el}
    goals = [Goal(name, "mean", parse_ms(str(text), f"--{name}")) for name, text in times.items() if text is not None]
    found = model if isinstance(model, Architecture) else models.model(model)
    if found.kind == "encoder":
        asked.setdefault("output_len", 1)  # it writes none: one pass
    words = None if formats is None else tuple(listed(formats))
    if words is not None and "all" in words:
        words = ALL
    return compare_asked(
        Asked(
            found, chosen_gpus(gpus, what_if), named_stack(stack), goals=tuple(goals), formats=words,
            prices=read_prices(prices, price, price_kind), **asked,
        ),
        thorough=thorough,
    )  # fmt: skip
