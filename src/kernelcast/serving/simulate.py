"""A service under a load: engines behind a router, the expected run and both ends of its interval."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import DoesNotFit, KernelcastError
from kernelcast.forecast.conditions import DEFAULT, Conditions
from kernelcast.forecast.end_to_end import WholeSupport
from kernelcast.inference.workload import Speculation
from kernelcast.results import HtmlRepr, Renamed
from kernelcast.schedule import EvidenceSummary
from kernelcast.serving.capacity import saturating
from kernelcast.serving.engine import Engine
from kernelcast.serving.goals import Goal, worst
from kernelcast.serving.load import Load
from kernelcast.serving.metrics import LatencyGoals, RequestTimes, StepLog, follows_steps, metrics
from kernelcast.serving.scheduler import Request, Scheduler
from kernelcast.serving.service import EnginePool, Service
from kernelcast.serving.step_times import StepTimeTables, host_time, step_time_tables

_MATCH, _APART = (
    0.5,
    32,
)  # cache-aware: the share of a prompt that must be cached, and requests that replicas may differ


class Cluster:
    """One run of a service under a load. ``tables``: step times of each pool's deployment, shared by several runs."""

    def __init__(
        self, service: Service, load: Load, tables: StepTimeTables, variant: str = "likely", seed: int = 0
    ) -> None:
        self.service, self.load, self.variant = service, load, variant
        self.step_log = StepLog()
        self._tables = tables
        speculation = service.speculation
        self._gained = speculation.tokens_per_step if speculation else 1.0
        self.decode_engines = self._engines(service.pool, speculation, self._gained)
        self.prefill_engines = self._engines(service.prefill, None, 1.0) if service.prefill else self.decode_engines
        self._every = self.decode_engines if service.prefill is None else [*self.prefill_engines, *self.decode_engines]
        self._number = {id(engine): at for at, engine in enumerate(self._every)}
        self._next_replica = 0
        self._arriving: list[tuple[float, int, Request, bool]] = []  # when, order, request, and whether it is prefilled
        self.requests = _requests(load, speculation, seed)
        stack = (service.prefill or service.pool).deployment.stack
        self._front_s = [host_time(variant, x, stack.spread) for x in (stack.request_s, stack.front_s, stack.token_s)]
        # when the front end of each server is free
        self._front_free_s = [0.0] * (service.prefill or service.pool).replicas
        self._in_rounds = stack.front_rounds
        self._queued: list[list[Request]] = [[] for _ in self._front_free_s]  # for the next round of each front end
        self._rounds: list[tuple[float, int]] = []  # when the next round of a front end begins
        self._limit = load.max_concurrency or len(load)
        self._sent = self.done = self._in_flight = 0
        self._order = 0  # of events at the same moment
        self._freed_s = 0.0  # when the last request finished: a waiting client sends then
        self._held: dict[int, list[int]] = {}  # requests that follow another, by that one
        self._answered = bytearray(len(load))
        self._to_decode: dict[int, tuple[int, int]] = {}  # tokens and steps of requests in prefill engines

    def _engines(self, pool: EnginePool, speculation: Speculation | None, tokens_per_step: float) -> list[Engine]:
        """A pipeline runs as many batches as it has stages, each with its part of the cache."""
        layout, settings = pool.deployment.layout, pool.settings
        stages = layout.pp
        per_stage = replace(settings, kv_blocks=max(1, settings.kv_blocks // stages),
                      max_num_seqs=max(1, settings.max_num_seqs // stages))  # fmt: skip
        times, drafted = self._tables.of(pool, self.load, speculation), speculation.draft_tokens if speculation else 0
        mixed_steps = pool.deployment.stack.mixed_steps

        def scheduler() -> Scheduler:
            return Scheduler(per_stage, mixed_steps, bool(self.load.shared), drafted, tokens_per_step)

        return [
            Engine([scheduler() for _ in range(layout.dp)], times, self.variant, self._log_steps, self.step_log.hold)
            for _ in range(pool.replicas * stages)
        ]

    def _log_steps(self, start_s: float, end_s: float, steps: int, decoding: int, prompts: int, engine: Engine) -> None:
        log, ranks = self.step_log, engine.ranks
        log.start_s.append(start_s)
        log.end_s.append(end_s)
        log.steps.append(steps)
        log.decoding.append(decoding)
        log.prompt_tokens.append(prompts)
        waiting = sum(len(rank.waiting) for rank in ranks)
        log.waiting.append(waiting)
        log.kv_use.append(sum(rank.blocks.used / rank.blocks.count for rank in ranks) / len(ranks))
        log.engine.append(self._number[id(engine)])
        if waiting:
            for rank in ranks:
                if rank.blocked:
                    log.blocked_s[rank.blocked] = log.blocked_s.get(rank.blocked, 0.0) + end_s - start_s

    def run(self, progress: Callable[[int], None] | None = None) -> None:
        """Run until every request has finished. An interrupt keeps finished requests."""
        arrivals, count = self.load.arrivals_s.tolist(), len(self.load)
        while self.done < count:
            engine = min(self._every, key=_next)
            ready_s = self._arriving[0][0] if self._arriving else math.inf
            round_s = self._rounds[0][0] if self._rounds else math.inf
            if self._sent < count and self._in_flight < self._limit:
                sent_s = max(arrivals[self._sent], self._freed_s)
                if sent_s <= min(ready_s, round_s, engine.next_s):
                    self._due(self._sent, sent_s)
                    self._sent += 1
                    continue
            if round_s <= min(ready_s, engine.next_s):
                self._round(*heapq.heappop(self._rounds))
            elif ready_s <= engine.next_s:
                now_s, _, request, read = heapq.heappop(self._arriving)
                self._route(request, now_s, read)
            else:
                self._step(engine, progress)

    def _due(self, at: int, now_s: float) -> None:
        """A request is due; one that follows another waits for it to finish."""
        before = int(self.load.follows[at]) if self.load.follows is not None else -1
        if before >= 0 and not self._answered[before]:
            self._held.setdefault(before, []).append(at)
        else:
            self._send(at, now_s)
        self._in_flight += 1

    def _send(self, at: int, now_s: float) -> None:
        """The client sends it; it reaches the router once the front end has tokenized it."""
        request = self.requests[at]
        request.arrival_s = now_s
        passing_s, each_s, token_s = self._front_s
        at = self._front_free_s.index(min(self._front_free_s))
        begins_s = max(now_s, self._front_free_s[at])
        if self._in_rounds:
            if not self._queued[at]:
                heapq.heappush(self._rounds, (begins_s, at))
            self._queued[at].append(request)
            return
        self._front_free_s[at] = begins_s + each_s + token_s * request.inputs
        self._push(self._front_free_s[at] + passing_s, request, read=False)

    def _round(self, now_s: float, at: int) -> None:
        """The front end takes turns among the requests that wait for it: none goes on before all are read. A thread of
        its own tokenises their prompts, one after another."""
        passing_s, each_s, token_s = self._front_s
        members, self._queued[at] = self._queued[at], []
        ends_s = now_s + each_s * len(members)
        for request in members:
            ends_s += token_s * request.inputs
            self._push(ends_s + passing_s, request, read=False)
        self._front_free_s[at] = ends_s

    def _push(self, when_s: float, request: Request, *, read: bool) -> None:
        self._order += 1
        heapq.heappush(self._arriving, (when_s, self._order, request, read))

    def _ended(self, request: Request, now_s: float) -> None:
        self.done += 1
        self._in_flight -= 1
        self._freed_s = now_s
        self._answered[request.at] = 1
        for at in self._held.pop(request.at, ()):
            self._send(at, now_s)

    def _route(self, request: Request, now_s: float, read: bool) -> None:
        engines = self.decode_engines if read else self.prefill_engines
        chosen = engines[0]
        if len(engines) > 1:
            chosen = self._chosen(engines, request)
        if self.service.prefill and not read:  # prefill gives its first token, a decode engine the others
            self._to_decode[request.at] = request.outputs, request.steps
            request.outputs, request.steps = 1, 0
        request.replica = self._number[id(chosen)]
        chosen.submit(request, now_s)

    def _chosen(self, engines: Sequence[Engine], request: Request) -> Engine:
        if self.service.router == "round_robin":
            self._next_replica += 1
            return engines[self._next_replica % len(engines)]
        least = min(engines, key=lambda engine: engine.load)
        if self.service.router == "least_loaded" or not request.pieces:
            return least
        best = max(engines, key=lambda engine: (_cached(engine, request), -engine.load))
        near = best.load - least.load <= _APART
        return best if near and _cached(best, request) >= _MATCH * request.inputs else least

    def _step(self, engine: Engine, progress: Callable[[int], None] | None) -> None:
        ended = engine.run()
        if self.service.prefill and engine in self.prefill_engines:
            for request in ended:
                self._transfer(request, request.last_s)
            return
        for request in ended:
            self._ended(request, request.last_s)
        if progress and ended:
            progress(self.done)

    def _transfer(self, request: Request, now_s: float) -> None:
        """Send its cache to a decode engine; a request of one token is finished."""
        request.outputs, request.steps = self._to_decode.pop(request.at)
        if request.outputs == 1:
            self._ended(request, now_s)
            return
        request.context, request.remaining, request.pieces = request.inputs, 0, ()
        sent_s = self._tables.transfer_s(self.service, request.inputs)
        self._push(now_s + sent_s, request, read=True)


def _next(engine: Engine) -> float:
    return engine.next_s


def _cached(engine: Engine, request: Request) -> int:
    return max(rank.blocks.cached_prefix(request.pieces, request.inputs)[0] for rank in engine.ranks)


def _requests(load: Load, speculation: Speculation | None, seed: int) -> list[Request]:
    pieces = load.shared or len(load) * ((),)
    outputs = load.outputs
    steps = _steps(load.outputs, speculation, seed) if speculation else np.zeros(len(load), dtype=np.int64)
    given = zip(load.arrivals_s.tolist(), load.inputs.tolist(), outputs.tolist(), pieces, steps.tolist(), strict=True)
    return [Request(at, *values) for at, values in enumerate(given)]


def _steps(outputs: NDArray[np.int64], speculation: Speculation, seed: int) -> NDArray[np.int64]:
    """Decode steps of each request where a step gives 1 to k + 1 tokens: a renewal process, whose count after n tokens
    is nearly normal with mean n / m and variance n v / m^3 (m, v: mean and variance of a step's tokens)."""
    k, a = speculation.draft_tokens, speculation.acceptance
    given = np.arange(1, k + 2)
    chance = np.where(given <= k, a ** (given - 1) * (1 - a), a**k)
    mean = float((given * chance).sum())
    spread = float((given**2 * chance).sum()) - mean**2
    tokens = outputs - 1
    drawn = np.random.default_rng(seed).standard_normal(len(outputs))
    steps = np.round(tokens / mean + drawn * np.sqrt(tokens * spread / mean**3))
    return np.clip(steps, np.ceil(tokens / (k + 1)), tokens).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Simulation(Renamed, HtmlRepr):
    """A service under a load. ``low`` and ``high`` are the metrics where every step is as fast (slow) as its forecast
    allows: the interval that 80% of such services should lie in."""

    service: Service
    load: Load
    request_times: RequestTimes
    step_log: StepLog
    goals: LatencyGoals
    metrics: Mapping[str, float]
    low: Mapping[str, float] = field(default_factory=dict)
    high: Mapping[str, float] = field(default_factory=dict)
    follows: float = 1.0  # of a step's error, the share that shows in the throughput
    rests_on: EvidenceSummary | None = None
    predictor: str = "learned"
    complete: bool = True
    capacity: float | None = None  # requests per second at most; None: not run
    targets: tuple[Goal, ...] = ()
    _renamed = {"served": "request_times", "notes": "step_log"}

    def stage(self, number: int) -> dict[str, float]:
        """Metrics of one stage of the load."""
        assert self.load.stages is not None
        return metrics(self.request_times, self.step_log, self.load.stages == number, self.goals)

    @cached_property
    def busy(self) -> float:
        """Share of the time that an engine runs steps."""
        if not self.step_log.end_s:
            return 0.0
        engines = max(self.step_log.engine) + 1
        lasted = max(self.step_log.end_s) - min(self.step_log.start_s)
        return float(np.sum(np.array(self.step_log.end_s) - np.array(self.step_log.start_s)) / (engines * lasted))

    @cached_property
    def capacity_share(self) -> float | None:
        """The load over the capacity: with continuous batching an engine runs steps all the time, and is far below its
        capacity while they are small."""
        if not self.capacity or not self.complete:
            return None
        offered, limited = self.load.request_rate, self.load.max_concurrency
        if math.isfinite(offered) and not limited:
            return float(offered / self.capacity)
        return float(min(1.0, self.metrics["request_throughput"] / self.capacity))

    @cached_property
    def attained(self) -> float | None:
        """Share of the requests that keep every limit of goodput; None without such limits."""
        return float(self.request_times.good(self.goals).mean()) if self.goals.given else None

    @property
    def meets(self) -> bool:
        """Whether it holds the load, every goal is met, and limits of goodput are kept by enough of the requests."""
        missed = bool(self.targets) and worst(self.targets, self.metrics)[1] > 1
        return not self.saturated and not missed and (self.attained is None or self.attained >= ATTAINMENT)

    @cached_property
    def binding(self) -> str:
        """The limit that requests waited for longest: KV cache, max_num_seqs, max_num_batched_tokens; "" where none
        waited."""
        return max(self.step_log.blocked_s, key=lambda name: self.step_log.blocked_s[name], default="")

    @cached_property
    def supports(self) -> WholeSupport | None:
        """Of the kernels of a decode step, and of the run as a whole; None where no kernel was forecast."""
        return None if self.rests_on is None else self.service.supports(self.load, self.rests_on)

    @property
    def saturated(self) -> bool:
        """Whether requests arrived faster than they can be served, in an open loop: beyond the capacity, or the queue
        grew until the end."""
        served = self.request_times
        closed = self.load.max_concurrency or self.service.offline
        if closed or len(self.load) < _FEW or not self.complete:
            return False
        if self.load.follows is None and (self.capacity_share or 0.0) > 1:  # turns of a chat wait for each other
            return True
        waits = served.scheduled_s - served.arrival_s
        fifth = len(waits) // 5
        early, late = float(np.mean(waits[:fifth])), float(np.mean(waits[-fifth:]))
        return late > _SLOWED * early and late > float(np.median(served.e2el_s - waits)) * _OF_SERVICE

    @property
    def single_burst(self) -> bool:
        """Whether all requests were there before one was done, so that nothing is known of a rate that lasts."""
        closed = self.load.max_concurrency or self.service.offline
        served = self.request_times
        if closed or len(self.load) < 2 or not self.complete:
            return False
        return float(served.arrival_s.max()) < float(served.last_token_s.min())


ATTAINMENT = 0.9  # of the requests, that keep limits of goodput where they count as met (DistServe's SLO attainment)
_FEW = 50  # requests from which a trend can be progress
_SLOWED = 3.0  # times that the last fifth waits longer than the first
_OF_SERVICE = 0.25  # share of the time that a request takes once it is scheduled


_NONE = LatencyGoals()
Progress = Callable[[str, int], None]  # which run, and how many requests of it are done


def simulate(service: Service, load: Load, conditions: Conditions = DEFAULT, *, goals: LatencyGoals = _NONE,
             targets: Sequence[Goal] = (), seed: int = 0, intervals: bool = True, capacity: bool = False,
             tables: StepTimeTables | None = None, progress: Progress | None = None) -> Simulation:  # fmt: skip
    """Simulate ``load`` on ``service``. ``goals``: limits of a request, for goodput; ``targets``: of the whole load.
    ``intervals``: two more runs, at both ends of the interval of every step; ``capacity``: one more, with all at once.
    An interrupt ends the current run; finished requests are kept, and the result is marked as incomplete."""
    check(service, load)
    tables = tables or step_time_tables(conditions)
    cluster = Cluster(service, load, tables, "likely", seed)
    complete = _run(cluster, "likely", progress)
    served = RequestTimes.of(cluster.requests, load)
    ends = {}
    for variant in ("low", "high") if intervals and complete else ():
        other = Cluster(service, load, tables, variant, seed)
        complete = complete and _run(other, variant, progress)
        if not complete:
            break
        ends[variant] = metrics(RequestTimes.of(other.requests, load), other.step_log, None, goals)
    likely = metrics(served, cluster.step_log, None, goals)
    steps = cluster.decode_engines[0].times
    follows = follows_steps(load, ends["low"], ends["high"]) if len(ends) == 2 else 1.0
    low, high = _intervals(service, load, likely, ends, steps.measured, follows) if len(ends) == 2 else ({}, {})
    most = None
    if capacity and complete and not service.offline:
        part, requests, parts = saturating(service, load)
        full = Cluster(part, requests, tables, "likely", seed)
        complete = _run(full, "likely", None)
        done_s = max(request.last_s for request in full.requests)
        most = parts * len(requests) / done_s if complete else None
    return Simulation(service, load, served, cluster.step_log, goals, likely, low, high, follows, steps.rests_on,
                      steps.predictor, complete, most, tuple(targets))  # fmt: skip


def _run(cluster: Cluster, variant: str, progress: Progress | None) -> bool:
    try:
        cluster.run((lambda done: progress(variant, done)) if progress else None)
    except KeyboardInterrupt:
        return False
    return True


def _intervals(
    service: Service,
    load: Load,
    likely: dict[str, float],
    ends: dict[str, dict[str, float]],
    measured: bool,
    follows: float,
) -> tuple[dict[str, float], dict[str, float]]:
    """Both ends of each metric: faster steps mean shorter latencies and more throughput."""
    intervals = {
        key: service.interval(load, key, (value, ends["low"][key], ends["high"][key]), measured, follows)
        for key, value in likely.items()
        if key in ends["low"] and key in ends["high"]
    }
    return {key: low for key, (low, _) in intervals.items()}, {key: high for key, (_, high) in intervals.items()}


def check(service: Service, load: Load) -> None:
    """Refuse requests that no engine of the service can take, and name the limit."""
    for pool in filter(None, (service.pool, service.prefill)):
        _check_pool(pool, load)


def _check_pool(pool: EnginePool, load: Load) -> None:
    model, settings = pool.deployment.model, pool.settings
    if not model.generates:
        raise KernelcastError(f"{model.name} is an encoder: it generates no tokens, and serving it is not simulated")
    if load.longest > model.max_context:
        raise KernelcastError(
            f"a request of {load.longest:,} tokens exceeds the context of {model.name}, {model.max_context:,}"
        )
    held = settings.kv_tokens // pool.deployment.layout.pp
    if load.longest > held:
        raise DoesNotFit(
            f"a request of {load.longest:,} tokens exceeds the KV cache of {held:,} tokens that "
            f"{pool.deployment.layout.gpus} x {pool.deployment.gpu.id} leave to {model.name}; take more GPUs (`tp`), a "
            f"smaller format, or an fp8 KV cache (`kv_dtype` fp8)"
        )
    longest = int(load.inputs.max())
    if not settings.chunked_prefill and longest > settings.max_num_batched_tokens:
        raise KernelcastError(
            f"a prompt of {longest:,} tokens exceeds the {settings.max_num_batched_tokens:,} of a step, and "
            f"{pool.deployment.stack.name} does not chunk prefill by default: raise `max_num_batched_tokens`, or give "
            f"`enable_chunked_prefill`"
        )
