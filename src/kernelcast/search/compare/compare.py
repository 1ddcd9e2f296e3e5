"""A model on many GPUs: every GPU at its best deployment, in order (``kernelcast.compare``)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelcast import models
from kernelcast.errors import DoesNotFit, KernelcastError
from kernelcast.forecast.end_to_end import worse
from kernelcast.hardware import Gpu
from kernelcast.hardware.prices import read_prices
from kernelcast.inference.forward import Deployment
from kernelcast.inference.infer import Inference, infer_many, learn_activities
from kernelcast.inference.memory import memory
from kernelcast.inference.workload import Workload
from kernelcast.models.architecture import Architecture
from kernelcast.results import NOTHING, HtmlRepr, Interval, support_of
from kernelcast.schedule import Memory, Share
from kernelcast.search.compare.candidates import (
    ALL_FORMATS,
    Candidate,
    ComparisonRow,
    ServingScenario,
    candidates,
    chosen_gpus,
    split_names,
)
from kernelcast.serving.goals import Goal, parse_ms
from kernelcast.stacks import stack as named_stack

Row = ComparisonRow["ServingForecast"]
_REFINED = 2  # deployments of a GPU whose batch sizes are searched more closely
_BEFORE = {"asked": "scenario", "way": "candidate", "span": "interval"}  # names of 0.x, for one more release


class Renamed:
    """Attributes of results by their names of 0.x."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            now = _BEFORE.get(name)
            if now is None:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            warnings.warn(f"{name} is now {now}", DeprecationWarning, stacklevel=2)
            return getattr(self, now)


def rank_key(
    by: str | None, latency_s: float, throughput: float, per_gpu: float, usd: float | None,
    joules: Callable[[], Interval | None],
) -> tuple[float, ...]:  # fmt: skip
    """Sort key, less is better. Where the metric is unknown: after all others, by throughput per GPU."""
    if by == "latency":
        return 0.0, latency_s, -per_gpu
    if by == "throughput":
        return 0.0, -throughput, -per_gpu
    energy = joules() if by == "joules" else None
    value = usd if by != "joules" else energy.value if energy else None
    return (0.0, value, -per_gpu) if value is not None else (1.0, -per_gpu, -per_gpu)


def bound_shares(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Bounds by their share of the time, the largest first."""
    sums: dict[str, float] = {}
    for name, time_s in times:
        sums[name] = sums.get(name, 0.0) + time_s
    whole = sum(sums.values()) or 1.0
    return {name: value / whole for name, value in sorted(sums.items(), key=lambda item: -item[1])}


def energy_of_run(forecast: Any) -> Interval | None:
    """Joules of a whole run on all its GPUs; None without a power model."""
    energy = getattr(forecast, "energy", None)
    return energy if isinstance(energy, Interval) else None


@dataclass(frozen=True, eq=False)
class ServingForecast(Renamed):
    """Latencies of one request among ``batch`` on each engine. ``requests_per_s``: that all engines can carry."""

    scenario: ServingScenario
    candidate: Candidate
    replicas: int
    ttft: Interval
    tpot: Interval
    e2el: Interval
    requests_per_s: float
    parts: tuple[tuple[Inference, float], ...]  # forecasts behind it, and the share of each that a request has

    @property
    def deployment(self) -> Deployment:
        return self.candidate.deployment

    @property
    def batch(self) -> int:
        return self.candidate.batch

    @property
    def gpus(self) -> int:
        return self.replicas * self.deployment.layout.gpus

    @property
    def tokens_per_s(self) -> float:
        """At the given rate, or as many as can be."""
        rate = self.scenario.rate
        requests_per_s = self.requests_per_s if rate is None else min(rate, self.requests_per_s)
        return requests_per_s * self.scenario.counted_tokens

    @property
    def usd_per_hour(self) -> float | None:
        price = self.scenario.price(self.deployment.gpu)
        return None if price is None else price.usd_per_hour * self.gpus

    @property
    def usd_per_million(self) -> float | None:
        """Tokens out (in, of an encoder)."""
        cost = self.usd_per_hour
        return None if cost is None else cost / 3600 / self.tokens_per_s * 1e6

    @cached_property
    def joules_per_million(self) -> Interval | None:
        """Computed on demand: power looks at every kernel."""
        learn_activities([forecast for forecast, _ in self.parts])
        known = [(energy_of_run(forecast), share) for forecast, share in self.parts]
        if not all(energy for energy, _ in known):
            return None
        return sum((energy * share for energy, share in known if energy), NOTHING) * (
            1e6 / self.scenario.counted_tokens
        )

    def share(self, goal: Goal) -> float:
        """The latency over its goal: at most 1 where it is met."""
        return {"ttft": self.ttft, "tpot": self.tpot, "e2el": self.e2el}[goal.metric].value * 1e3 / goal.limit_ms

    @property
    def late(self) -> Goal | None:
        """The goal that is missed most; None: all are met."""
        worst = max(self.scenario.goals, key=self.share, default=None)
        return worst if worst is not None and self.share(worst) > 1 else None

    @property
    def carries(self) -> bool:
        """Whether the GPUs allowed are enough for the rate."""
        return self.gpus <= self.scenario.max_gpus

    @cached_property
    def memory(self) -> Memory:
        deployment, scenario = self.deployment, self.scenario
        shards = deployment.layout.dp * deployment.layout.micro_batches
        tokens = min(scenario.request.on(deployment).chunk or math.inf, scenario.input_len * self.batch)
        contexts = {scenario.input_len + scenario.output_len: self.batch}
        return memory(deployment, contexts, math.ceil(tokens / shards), math.ceil(self.batch / shards))

    @cached_property
    def shares(self) -> list[tuple[Share, float]]:
        """Where the time of a request goes: seconds of each part of each phase."""
        return [(share, share.time_s * times) for forecast, times in self.parts for share in forecast.shares]

    @property
    def support(self) -> str:
        kernels = support_of((time_s, share.support) for share, time_s in self.shares)
        return worse(kernels, *(forecast.supports.run for forecast, _ in self.parts))

    @property
    def bound_by(self) -> dict[str, float]:
        """Pipelines (host, power) by the share of the time that they bind, the largest first."""
        return bound_shares((share.bound_by, time_s) for share, time_s in self.shares)

    @property
    def order(self) -> tuple[float, ...]:
        """Sort key, less is better: meeting the goals and the rate, then the metric of the order, then latency."""
        missed = self.share(self.late) if self.late else 0.0
        over = 0.0 if self.carries else self.gpus / self.scenario.max_gpus
        key = rank_key(self.scenario.by, self.e2el.value, self.requests_per_s, self.tokens_per_s / self.gpus,
                       self.usd_per_million, lambda: self.joules_per_million)  # fmt: skip
        return max(missed, over), *key, self.e2el.value


@dataclass(frozen=True, eq=False)
class Comparison(HtmlRepr, Renamed):
    """Rows in order: those that meet the goals, those that do not, those where nothing fits."""

    scenario: ServingScenario
    rows: tuple[Row, ...]
    forecasts: int  # candidates that were forecast

    @property
    def fitting(self) -> list[ServingForecast]:
        return [row.best for row in self.rows if row.best is not None]


def forecast(scenario: ServingScenario, ways: Sequence[Candidate]) -> list[ServingForecast | KernelcastError]:
    """Every candidate, in one call of ``infer_many``; the error of those that are refused."""
    cases: list[tuple[Deployment, Workload]] = []
    cases_of: list[tuple[int, ...]] = []  # of each candidate, indices of its forecasts
    prefills: dict[
        tuple[int, int], tuple[int, ...]
    ] = {}  # of a deployment: one prompt alone, and as many as a step has
    for candidate in ways:
        deployment, batch = candidate.deployment, candidate.batch
        if not scenario.steady:
            cases_of.append((len(cases),))
            cases.append((deployment, Workload.equal(batch, scenario.input_len, scenario.output_len)))
            continue
        together = min(_prompts_per_step(scenario, deployment), batch)
        if (id(deployment), together) not in prefills:
            counts = dict.fromkeys((1, together))
            prefills[id(deployment), together] = (len(cases), len(cases) + len(counts) - 1)
            cases += [(deployment, Workload.equal(count, scenario.input_len, 1)) for count in counts]
        cases_of.append(prefills[id(deployment), together])
        if scenario.output_len > 1 and scenario.model.generates:
            cases_of[-1] += (len(cases),)
            cached = scenario.input_len - 1  # all but a token of each prompt
            cases.append((deployment, Workload.equal(batch, scenario.input_len, scenario.output_len, cached)))
    refused: dict[int, KernelcastError] = {}
    answers = iter(infer_many(cases, scenario.conditions, skip=refused.__setitem__))
    forecasts = {at: next(answers) for at in range(len(cases)) if at not in refused}
    make = _steady if scenario.steady else _static
    return [
        next((refused[at] for at in indices if at in refused), None)
        or make(scenario, candidate, *(forecasts[at] for at in indices))
        for candidate, indices in zip(ways, cases_of, strict=True)
    ]


def _prompts_per_step(scenario: ServingScenario, deployment: Deployment) -> int:
    """Prompts that a full step of the engine prefills together."""
    chunk = Workload.equal(1, scenario.input_len, 1).on(deployment).chunk
    return max(1, (chunk or scenario.input_len) // scenario.input_len)


def _static(scenario: ServingScenario, candidate: Candidate, run: Inference) -> ServingForecast:
    """One batch that starts together, as `kernelcast infer` forecasts it."""
    requests_per_s = (scenario.batch or 1) / run.total.value
    return ServingForecast(scenario, candidate, candidate.replicas, run.prefill, run.tpot, run.total, requests_per_s,
                           ((run, 1 / candidate.batch),))  # fmt: skip


def _steady(
    scenario: ServingScenario, candidate: Candidate, alone: Inference, prompts: Inference,
    decodes: Inference | None = None,
) -> ServingForecast:  # fmt: skip
    """``batch`` requests running at all times: when a request finishes another starts, and its prefill runs between two
    decode steps of the others. While a request is served, all prompts are prefilled once."""
    batch, steps = candidate.batch, scenario.output_len - 1
    others = (batch - 1) / batch
    count = len(prompts.workload.inputs)
    prefill = prompts.prefill * (1 / count)  # of a prompt, among others
    decode, wait, tpot = NOTHING, NOTHING, NOTHING
    parts = [(prompts, 1 / count)]
    if decodes is not None:
        decode, wait = decodes.decode, decodes.step * others  # an arrival waits for the step that runs
        tpot = (decode + prefill * (batch * others)) * (1 / steps)
        parts.append((decodes, decode.value / decodes.total.value / batch))  # less the last token of its prompts
    rate = batch / (prefill * batch + decode).value
    replicas = candidate.replicas if scenario.rate is None else max(1, math.ceil(scenario.rate / rate - 1e-9))
    ttft = alone.prefill + wait
    e2el = ttft + tpot * steps
    return ServingForecast(scenario, candidate, replicas, ttft, tpot, e2el, rate * replicas, tuple(parts))


def compare_gpus(scenario: ServingScenario, *, thorough: bool = False) -> Comparison:
    """Every GPU at its best, in each format that was asked for; refuses a model that fits on none. ``thorough``:
    forecast every layout that fits."""
    cases = [(gpu, each) for gpu in scenario.gpus for each in scenario.by_format()]
    tried = [candidates(each, gpu, thorough=thorough) for gpu, each in cases]
    unfit = [each for each in tried if isinstance(each, ComparisonRow)]
    if len(unfit) == len(tried):
        error = KernelcastError if all(row.refused for row in unfit) else DoesNotFit
        raise error(_nowhere(scenario, unfit))
    groups = [[] if isinstance(each, ComparisonRow) else each for each in tried]
    forecasts = _forecast_groups(scenario, groups)
    closer = [_closer(scenario, group) for group in forecasts]
    for group, more in zip(forecasts, _forecast_groups(scenario, closer), strict=True):
        group += more
    best = [
        each if isinstance(each, ComparisonRow) else _best_row(gpu, group)
        for (gpu, _), each, group in zip(cases, tried, forecasts, strict=True)
    ]
    rows = [replace(row, format=each.formats[0] if each.formats else None)
            for row, (_, each) in zip(best, cases, strict=True)]  # fmt: skip
    if not any(row.best for row in rows):  # some fit, but cannot be forecast
        raise KernelcastError(next(row.why for row in best if row not in unfit))
    rows.sort(key=lambda row: row.best.order if row.best else (math.inf,))
    return Comparison(scenario, tuple(rows), sum(map(len, groups)) + sum(map(len, closer)))


Forecasts = list[ServingForecast | KernelcastError]


def _forecast_groups(scenario: ServingScenario, groups: Sequence[Sequence[Candidate]]) -> list[Forecasts]:
    forecasts = iter(forecast(scenario, [candidate for group in groups for candidate in group]))
    return [[next(forecasts) for _ in group] for group in groups]


def _closer(scenario: ServingScenario, forecasts: Forecasts) -> list[Candidate]:
    """Where a goal or a rate decides on the batch: sizes between those that were tried, of the best deployments."""
    if not scenario.steady or (scenario.rate is None and not scenario.goals):
        return []
    best: dict[int, ServingForecast] = {}
    for each in sorted((each for each in forecasts if isinstance(each, ServingForecast)), key=lambda each: each.order):
        best.setdefault(id(each.deployment), each)
    return [more for each in list(best.values())[:_REFINED] for more in each.candidate.larger_batches()]


def _best_row(gpu: Gpu, forecasts: Forecasts) -> Row:
    able = [each for each in forecasts if isinstance(each, ServingForecast)]
    if not able:
        return ComparisonRow(gpu, None, str(forecasts[0]))
    best = min(able, key=lambda each: each.order)
    return ComparisonRow(gpu, best, meets=best.late is None and best.carries)


def _nowhere(scenario: ServingScenario, rows: Sequence[Row]) -> str:
    """One line: the GPU that comes nearest, and what would help."""
    nearest = min(rows, key=lambda row: row.memory.missing_bytes if row.memory is not None else math.inf)
    count = len({row.gpu.label for row in rows})
    which = "the nearest" if count > 1 else "the only candidate"
    return (
        f"{scenario.model.name} fits on no GPU of {count} within `max_gpus` {scenario.max_gpus}: {nearest.gpu.id}, "
        f"{which}, {nearest.why}; more GPUs, a smaller format (`formats` fp8) or a smaller batch may fit"
    )


def compare(
    model: str | Path | Architecture,
    gpus: str | Sequence[str] = "all",
    *,
    what_if: Sequence[str] = (),
    stack: str = "vllm",
    formats: str | Sequence[str] | None = None,
    ttft: str | float | None = None,
    tpot: str | float | None = None,
    e2el: str | float | None = None,
    prices: Path | None = None,
    price: Sequence[str] = (),
    price_kind: str = "on_demand",
    thorough: bool = False,
    **parameters: Any,
) -> Comparison:
    """Every GPU at its best deployment of ``model``, in order.

    ``gpus``: names, or ``all``; ``what_if``: each adds a variant of every GPU (``dram_bytes_per_s*1.5``). ``ttft``,
    ``tpot``, ``e2el``: latency goals ("500ms", or milliseconds). ``formats``: of weights, or ``all``; None: as the
    checkpoint is. ``parameters``: other fields of ``ServingScenario``.
    """
    times = {"ttft": ttft, "tpot": tpot, "e2el": e2el}
    goals = [Goal(name, "mean", parse_ms(str(text), f"`{name}`")) for name, text in times.items() if text is not None]
    architecture = model if isinstance(model, Architecture) else models.model(model)
    if not architecture.generates:
        parameters.setdefault("output_len", 1)  # one pass
    names = None if formats is None else tuple(split_names(formats))
    scenario = ServingScenario(
        model=architecture, gpus=chosen_gpus(gpus, what_if), stack=named_stack(stack), goals=tuple(goals),
        formats=ALL_FORMATS if names is not None and "all" in names else names,
        prices=read_prices(prices, price, price_kind), **parameters,
    )  # fmt: skip
    return compare_gpus(scenario, thorough=thorough)
