"""A service under a load: the likely run and both ends of its interval, and what they come to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.forecast.predict import DEFAULT, Conditions
from kernelcast.forecast.times import Times
from kernelcast.hardware import Gpu
from kernelcast.inference.forward import Deployment
from kernelcast.ops.work import Array
from kernelcast.schedule import EvidenceSummary
from kernelcast.serving.fleet import Fleet, Notes, Pool, Service, Tables
from kernelcast.serving.load import Load
from kernelcast.serving.load.bench_results import PERCENTILES, latencies_ms, throughput
from kernelcast.serving.scheduler import Request
from kernelcast.shown import Shown


@dataclass(frozen=True, eq=False)
class Goals:
    """Latencies that a request must keep to count as good, in seconds; None: any."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None

    @property
    def given(self) -> bool:
        return any(goal is not None for goal in (self.ttft_s, self.tpot_s, self.e2el_s))


@dataclass(frozen=True, eq=False)
class Served:
    """One entry a request, in the load's order; NaN where an interrupt came first. Times count from the load's start;
    ``arrival_s`` is when a request was sent, which a closed loop decides."""

    arrival_s: Array
    scheduled_s: Array
    first_token_s: Array
    last_token_s: Array
    inputs: NDArray[np.int64]
    outputs: NDArray[np.int64]
    cached: NDArray[np.int64]
    preempted: NDArray[np.int64]
    replica: NDArray[np.int64]

    @classmethod
    def of(cls, requests: list[Request], load: Load) -> Served:
        def seconds(name: str) -> Array:
            return np.array([getattr(request, name) for request in requests], dtype=np.float64)

        def counts(name: str) -> NDArray[np.int64]:
            return np.array([getattr(request, name) for request in requests], dtype=np.int64)

        return cls(
            seconds("arrival_s"), seconds("scheduled_s"), seconds("first_s"), seconds("last_s"), load.inputs,
            load.outputs, counts("cached"), counts("preempted"), counts("replica"),
        )  # fmt: skip

    @property
    def done(self) -> NDArray[np.bool_]:
        return np.isfinite(self.last_token_s)

    @property
    def ttft_s(self) -> Array:
        return self.first_token_s - self.arrival_s

    @property
    def e2el_s(self) -> Array:
        return self.last_token_s - self.arrival_s

    @property
    def tpot_s(self) -> Array:
        """NaN of a request with one token."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return (self.last_token_s - self.first_token_s) / np.where(self.outputs > 1, self.outputs - 1, np.nan)

    def good(self, goals: Goals) -> NDArray[np.bool_]:
        """Which requests keep every goal; a request of one token keeps any time per token."""
        kept = self.done.copy()
        for goal, value in ((goals.ttft_s, self.ttft_s), (goals.tpot_s, self.tpot_s), (goals.e2el_s, self.e2el_s)):
            if goal is not None:
                kept &= ~(value > goal)
        return kept


def metrics(served: Served, notes: Notes, rows: NDArray[np.bool_] | None = None,
            goals: Goals | None = None) -> dict[str, float]:  # fmt: skip
    """By vLLM's names: throughput, and mean, median and percentiles of latencies; of some ``rows``, or all."""
    chosen = served.done if rows is None else served.done & rows
    if not chosen.any():
        return {"completed": 0.0}
    outputs = served.outputs[chosen]
    duration_s = float(served.last_token_s[chosen].max() - served.arrival_s[chosen].min())
    found = throughput(served.inputs[chosen], outputs, max(duration_s, 1e-9))
    if goals and goals.given:
        found["request_goodput"] = float((served.good(goals) & chosen).sum()) / max(duration_s, 1e-9)
    found |= latencies_ms(outputs, served.ttft_s[chosen], served.e2el_s[chosen])
    return found | _gaps_ms(served, notes, chosen, whole=rows is None)


def _gaps_ms(served: Served, notes: Notes, chosen: NDArray[np.bool_], *, whole: bool) -> dict[str, float]:
    """Gaps between tokens: their mean is that of the requests; percentiles are those of the steps, each counted once
    for every sequence that it decoded. Of a part of the load the steps while it ran stand for its own."""
    tokens = served.outputs[chosen] - 1
    if not tokens.sum():
        return {}
    mean_ms = float((served.last_token_s - served.first_token_s)[chosen].sum() / tokens.sum()) * 1e3
    lasted, weight = notes.gaps()
    if not whole:
        starts = np.array(notes.start_s)
        first, last = served.arrival_s[chosen].min(), served.last_token_s[chosen].max()
        weight = weight * ((starts >= first) & (starts <= last))
    if not weight.sum():
        return {"mean_itl_ms": mean_ms}
    order = np.argsort(lasted)
    share = np.cumsum(weight[order]) / weight.sum()
    at = [float(lasted[order][np.searchsorted(share, p / 100)]) * 1e3 for p in PERCENTILES]
    named = {f"p{p}_itl_ms": value for p, value in zip(PERCENTILES, at, strict=True)}
    spread = float(np.sqrt(np.average((lasted * 1e3 - mean_ms) ** 2, weights=weight)))
    return {"mean_itl_ms": mean_ms, "median_itl_ms": at[0], "std_itl_ms": spread, **named}


@dataclass(frozen=True, eq=False)
class Simulation(Shown):
    """A service under a load. ``low`` and ``high`` are the metrics where every step is as fast (slow) as its forecast
    allows: the interval that 80% of such services should lie in."""

    service: Service
    load: Load
    served: Served
    notes: Notes
    goals: Goals
    metrics: Mapping[str, float]
    low: Mapping[str, float] = field(default_factory=dict)
    high: Mapping[str, float] = field(default_factory=dict)
    rests_on: EvidenceSummary | None = None
    predictor: str = "learned"
    complete: bool = True

    def stage(self, number: int) -> dict[str, float]:
        """Metrics of one stage of the load."""
        assert self.load.stages is not None
        return metrics(self.served, self.notes, self.load.stages == number, self.goals)

    @cached_property
    def busy(self) -> float:
        """Share of the time that an engine runs steps."""
        if not self.notes.end_s:
            return 0.0
        engines = max(self.notes.engine) + 1
        lasted = max(self.notes.end_s) - min(self.notes.start_s)
        return float(np.sum(np.array(self.notes.end_s) - np.array(self.notes.start_s)) / (engines * lasted))

    @cached_property
    def binding(self) -> str:
        """What requests waited for longest: KV cache, max_num_seqs, max_num_batched_tokens; "" where none waited."""
        return max(self.notes.blocked_s, key=lambda name: self.notes.blocked_s[name], default="")

    @property
    def saturated(self) -> bool:
        """Whether the queue grew to the end: of an open loop, requests came faster than they were answered."""
        served = self.served
        if self.load.max_concurrency or len(self.load) < _FEW or not self.complete:
            return False
        waits = served.scheduled_s - served.arrival_s
        fifth = len(waits) // 5
        early, late = float(np.mean(waits[:fifth])), float(np.mean(waits[-fifth:]))
        return late > _SLOWED * early and late > float(np.median(served.e2el_s - waits)) * _OF_SERVICE


_FEW = 50  # requests from which a trend can be told
_SLOWED = 3.0  # times that the last fifth waits longer than the first
_OF_SERVICE = 0.25  # of the time that a request takes once it is scheduled


_NONE = Goals()
Told = Callable[[str, int], None]  # which run, and how many requests of it are done


def tables_for(conditions: Conditions = DEFAULT) -> Tables:
    """Step times under these conditions, to share among simulations."""
    known: list[tuple[Gpu, Times]] = []  # a GPU is no key of a dictionary

    def times(place: Deployment) -> Times:
        found = next((times for gpu, times in known if gpu is place.gpu or gpu == place.gpu), None)
        if found is None:
            found = Times(place.gpu, conditions)
            known.append((place.gpu, found))
        return found

    return Tables(times)


def simulate(service: Service, load: Load, conditions: Conditions = DEFAULT, *, goals: Goals = _NONE, seed: int = 0,
             intervals: bool = True, tables: Tables | None = None, told: Told | None = None) -> Simulation:  # fmt: skip
    """How ``service`` answers ``load``. ``intervals``: run it twice more, at both ends of what every step may take.
    An interrupt ends the run under way; what is done is kept, and the result says that it is not complete."""
    check(service, load)
    tables = tables or tables_for(conditions)
    fleet = Fleet(service, load, tables, "likely", seed)
    complete = _run(fleet, "likely", told)
    served = Served.of(fleet.requests, load)
    ends = {}
    for variant in ("low", "high") if intervals and complete else ():
        other = Fleet(service, load, tables, variant, seed)
        complete = complete and _run(other, variant, told)
        if not complete:
            break
        ends[variant] = metrics(Served.of(other.requests, load), other.notes, None, goals)
    found = metrics(served, fleet.notes, None, goals)
    low, high = _ordered(found, ends) if len(ends) == 2 else ({}, {})
    return Simulation(service, load, served, fleet.notes, goals, found, low, high,
                      fleet.deciding[0].times.rests_on, fleet.deciding[0].times.predictor, complete)  # fmt: skip


def _run(fleet: Fleet, variant: str, told: Told | None) -> bool:
    try:
        fleet.run((lambda done: told(variant, done)) if told else None)
    except KeyboardInterrupt:
        return False
    return True


def _ordered(likely: dict[str, float], ends: dict[str, dict[str, float]]) -> tuple[dict[str, float], dict[str, float]]:
    """The smaller and the larger of each metric: faster steps mean shorter latencies and more throughput."""
    keys = [key for key in likely if key in ends["low"] and key in ends["high"]]
    values = {key: (likely[key], ends["low"][key], ends["high"][key]) for key in keys}
    return {key: min(found) for key, found in values.items()}, {key: max(found) for key, found in values.items()}


def check(service: Service, load: Load) -> None:
    """Refuse what no engine of the service would take, and say which limit it breaks."""
    for pool in filter(None, (service.pool, service.prefill)):
        _check_pool(pool, load)


def _check_pool(pool: Pool, load: Load) -> None:
    model, settings = pool.deployment.model, pool.settings
    if model.kind == "encoder":
        raise KernelcastError(f"{model.name} is an encoder: it writes no tokens and is served without a queue of them")
    if load.longest > model.max_context:
        raise KernelcastError(
            f"a request of {load.longest:,} tokens exceeds the context of {model.name}, {model.max_context:,}"
        )
    held = settings.kv_tokens // pool.deployment.layout.pp
    if load.longest > held:
        raise KernelcastError(
            f"a request of {load.longest:,} tokens exceeds the KV cache of {held:,} tokens that "
            f"{pool.deployment.layout.gpus} x {pool.deployment.gpu.id} leave to {model.name}; take more GPUs (--tp), a "
            f"smaller format, or an fp8 KV cache (--kv-dtype fp8)"
        )
    longest = int(load.inputs.max())
    if not settings.chunked_prefill and longest > settings.max_num_batched_tokens:
        raise KernelcastError(
            f"a prompt of {longest:,} tokens exceeds the {settings.max_num_batched_tokens:,} of a step, and "
            f"{pool.deployment.stack.name} does not cut prompts by default: raise --max-num-batched-tokens, or give "
            f"--enable-chunked-prefill"
        )
