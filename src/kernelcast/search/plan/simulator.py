"""Candidates simulated: a short run of one part of a service, or the whole load on all of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.end_to_end import end_to_end
from kernelcast.forecast.predict_table import Times
from kernelcast.inference.forward import Deployment
from kernelcast.results import EXTRAPOLATED, LEVELS
from kernelcast.search.plan.space import EngineOption, ServiceCandidate
from kernelcast.serving.goals import PERCENT, Goal, worst
from kernelcast.serving.load import Load
from kernelcast.serving.metrics import LatencyGoals as NoGoals
from kernelcast.serving.metrics import RequestTimes, metrics
from kernelcast.serving.scheduler import Request
from kernelcast.serving.service import EnginePool, whole_support
from kernelcast.serving.simulate import Cluster, Simulation, check, simulate
from kernelcast.serving.step_times import StepTimeTables, decode_evidence

QUICK = 320  # requests of a short run, of each engine that it has
_ENGINES = 4  # of a short run, that its requests are counted by
MARGIN = 1.15  # a short run that breaks a goal by more counts as a miss
_CHECK_EVERY = 16  # requests that end between two checks whether a run is hopeless
_EVEN = 1.2  # times the mean rate that the first requests may arrive at, to represent all
_KEEPS_UP = 0.9  # of the throughput, that a run with slow steps has at least where its queue does not grow
_BUSY = 0.95  # of the time, from which a front end holds requests up
_WAITED = 0.01  # of a run, from which a limit counts as what requests waited for


@dataclass(frozen=True, eq=False)
class SimulatedService:
    """A candidate and its simulation. ``share``: of the goal that is nearest to breaking, at most 1 where all are met;
    infinity where the queue grows."""

    candidate: ServiceCandidate
    simulation: Simulation
    goals: tuple[Goal, ...]
    stopped: bool = False  # early, when more requests were late than a goal allows

    @property
    def keeps_up(self) -> bool:
        """Whether the queue does not grow; of a load that comes all at once, whether it ends."""
        finite = math.isfinite(self.simulation.load.request_rate)
        return self.stopped or not finite or not self.simulation.saturated

    @property
    def share(self) -> float:
        missed = self.stopped or not self.keeps_up
        return math.inf if missed else worst(self.goals, self.simulation.metrics)[1]

    @property
    def nearest(self) -> Goal:
        return worst(self.goals, self.simulation.metrics)[0]

    @property
    def meets(self) -> bool:
        return self.share <= 1.0

    @property
    def slow_share(self) -> float:
        """``share`` at the slow end of the forecast; infinity where the queue grows, NaN where that was not run."""
        likely, slow = self.simulation.metrics, self.simulation.high
        if not slow:
            return math.nan
        behind = self.simulation.low["request_throughput"] < _KEEPS_UP * likely["request_throughput"]
        longer = slow["mean_ttft_ms"] > 2 * likely["mean_ttft_ms"]
        grows = behind and longer and not self.simulation.load.max_concurrency
        return math.inf if grows else worst(self.goals, slow)[1]

    @property
    def sure(self) -> bool | None:
        """Whether it meets the goals at the slow end too; None where that was not run."""
        return None if math.isnan(self.slow_share) else self.meets and self.slow_share <= 1.0

    @property
    def support(self) -> str | None:
        """Level of the whole answer; None where no kernel was forecast."""
        return self.simulation.supports.level if self.simulation.supports else None

    @property
    def usd_per_hour(self) -> float:
        return self.candidate.usd_per_hour

    @property
    def usd_per_million(self) -> float:
        """USD per million output tokens, at this load."""
        return self.usd_per_hour / 3.6e3 / self.simulation.metrics["output_throughput"] * 1e6

    @property
    def binds(self) -> str:
        """The limit that requests wait for: KV cache, max_num_seqs; front end, where that is busy; or compute, where
        nothing else keeps them out."""
        run = self.simulation
        first = run.service.prefill or run.service.pool
        stack = first.deployment.stack
        front_s = stack.front_s + stack.token_s * float(run.load.inputs.mean())
        if not run.load.max_concurrency and run.load.request_rate * front_s > _BUSY * first.replicas:
            return "front end"
        waited = {name: seconds for name, seconds in run.step_log.blocked_s.items() if name != "max_num_batched_tokens"}
        name = max(waited, key=lambda name: waited[name], default="")
        engines = max(run.step_log.engine, default=0) + 1
        long = waited.get(name, 0.0) > _WAITED * run.metrics.get("duration", 0.0) * engines
        return name if long else "compute"


@dataclass(frozen=True, eq=False)
class CostPoint:
    """A point of the Pareto front: its cost, its latencies, and the share of the goal nearest to breaking."""

    candidate: ServiceCandidate
    metrics: Mapping[str, float]
    share: float

    @property
    def usd_per_hour(self) -> float:
        return self.candidate.usd_per_hour


class _HopelessError(Exception):
    """No request that is still to come can keep the goal."""


def _early_stop(cluster: Cluster, goals: Sequence[Goal], within: float) -> Callable[[int], None]:
    """Ends a run when more requests are late, by ``within`` times the limit, than a goal's percentile allows."""
    count = len(cluster.requests)
    limits = [
        (goal.metric, goal.limit_ms / 1e3 * within, count - math.floor((count - 1) * PERCENT[goal.statistic] / 100))
        for goal in goals
        if goal.statistic in PERCENT
    ]

    def check_goals(done: int) -> None:
        if done % _CHECK_EVERY:
            return
        ended = [request for request in cluster.requests if request.last_s == request.last_s]
        for metric, limit_s, late in limits:
            if len(ended) >= late and sum(_latency_s(request, metric) > limit_s for request in ended) >= late:
                raise _HopelessError

    return check_goals


def _latency_s(request: Request, metric: str) -> float:
    if metric == "tpot":
        return (request.last_s - request.first_s) / (request.outputs - 1) if request.outputs > 1 else 0.0
    return (request.first_s if metric == "ttft" else request.last_s) - request.arrival_s


class ServiceSimulator:
    """One load, its goals, and step times that all candidates share. ``variant``: which end of the forecast must meet
    the goals."""

    def __init__(self, load: Load, goals: Sequence[Goal], conditions: Conditions, seed: int, variant: str) -> None:
        self.load, self.goals, self.seed, self.variant = load, tuple(goals), seed, variant
        self.conditions = conditions
        self._times: dict[int, Times] = {}  # by id of the GPU: it is no key of a dictionary
        self._tables = StepTimeTables(self.times)
        self._prepared: set[int] = set()
        self._supports: dict[int, str] = {}  # by id of the engine
        self.runs = 0
        self.points: list[CostPoint] = []
        first = load.take(slice(0, QUICK))
        even = load.stages is None and load.follows is None
        finite = math.isfinite(load.request_rate)
        self._shortens = even and (first.request_rate <= _EVEN * load.request_rate or not finite)

    def times(self, deployment: Deployment) -> Times:
        """Kernel calls of its GPU that were predicted so far."""
        key = id(deployment.gpu)
        if key not in self._times:
            self._times[key] = Times(deployment.gpu, self.conditions)
        return self._times[key]

    def support(self, engine: EngineOption) -> str:
        """Level of a service of such engines, without a run."""
        if id(engine) not in self._supports:
            deployment = engine.deployment
            setting = deployment.setting(self.load.form)
            level = end_to_end().level(setting)
            if level != LEVELS[EXTRAPOLATED]:  # else its kernels do not matter
                context = int((self.load.inputs + self.load.outputs).max())
                level = whole_support(setting, decode_evidence(deployment, self.times(deployment), context)).level
            self._supports[id(engine)] = level
        return self._supports[id(engine)]

    def quick(self, candidate: ServiceCandidate, *, early: bool = True) -> SimulatedService:
        """A short run of one engine with its share of the load. ``early``: end it once it is clear that a goal breaks
        by more than the margin."""
        parts = _parts(candidate)
        engines = (candidate.replicas + candidate.prefill_replicas) // parts
        mine, enough = share_of(self.load, parts), QUICK * min(engines, _ENGINES)
        if self._shortens and len(mine) > enough:
            mine = mine.take(slice(0, enough))
        return self._run(candidate, mine, parts, MARGIN if early else math.inf)

    def full(self, candidate: ServiceCandidate, load: Load | None = None, *, early: bool = False) -> SimulatedService:
        """All of the load, or of another, on all engines. ``early``: end it once it is clear that a goal breaks."""
        within = 1.0 if early else math.inf
        return self._run(candidate, self.load if load is None else load, 1, within, keep=load is None)

    def share(self, candidate: ServiceCandidate, load: Load) -> SimulatedService:
        """One engine (or the least part of a pair) with all of its share of another load; ends once it is clear that a
        goal breaks."""
        parts = _parts(candidate)
        return self._run(candidate, share_of(load, parts), parts, 1.0, keep=False)

    def _run(
        self, candidate: ServiceCandidate, load: Load, parts: int, within: float, *, keep: bool = True
    ) -> SimulatedService:
        service = candidate.service(parts)
        check(service, load)
        self.runs += 1
        for engine in filter(None, (candidate.engine, candidate.prefill)):
            if id(engine) not in self._prepared:  # step times for all of its limits at once
                self._tables.of(EnginePool(engine.deployment, engine.widest), self.load)
                self._prepared.add(id(engine))
        cluster = Cluster(service, load, self._tables, self.variant, self.seed)
        stopped = False
        try:
            cluster.run(_early_stop(cluster, self.goals, within) if math.isfinite(within) else None)
        except _HopelessError:
            stopped = True
        served = RequestTimes.of(cluster.requests, load)
        values = metrics(served, cluster.step_log)
        if self.variant == "high" and not stopped:
            values |= self._slow_ends(cluster, values)
        simulation = Simulation(service, load, served, cluster.step_log, NoGoals(), values)
        run = SimulatedService(candidate, simulation, self.goals, stopped)
        if keep and not stopped:
            kept = {goal.key: simulation.metrics.get(goal.key, 0.0) for goal in self.goals}
            self.points.append(CostPoint(candidate, kept, run.share))
        return run

    def _slow_ends(self, slow: Cluster, values: Mapping[str, float]) -> dict[str, float]:
        """The slow ends that `kernelcast simulate` prints of the goals' metrics: those of slow steps, widened by what
        whole services are off. Without the widening a choice that counts as sure would break its goal as printed."""
        service, load = slow.service, slow.load
        likely = Cluster(service, load, self._tables, "likely", self.seed)
        likely.run()
        self.runs += 1
        middle = metrics(RequestTimes.of(likely.requests, load), likely.step_log)
        measured = likely.decode_engines[0].times.measured
        keys = [goal.key for goal in self.goals if goal.key in middle and goal.key in values]
        return {key: service.interval(load, key, (middle[key], middle[key], values[key]), measured)[1] for key in keys}

    def both_ends(self, candidate: ServiceCandidate) -> SimulatedService:
        """All of the load, at both ends of the forecast, as `kernelcast simulate` answers."""
        self.runs += 3
        simulation = simulate(candidate.service(), self.load, self.conditions, seed=self.seed)
        if not simulation.complete:
            raise KeyboardInterrupt
        return SimulatedService(candidate, simulation, self.goals)


def _parts(candidate: ServiceCandidate) -> int:
    """Equal parts that a service falls into."""
    return math.gcd(candidate.replicas, candidate.prefill_replicas) if candidate.prefill else candidate.replicas


def share_of(load: Load, parts: int) -> Load:
    """The load of one of so many engines behind a round-robin router."""
    if parts == 1:
        return load
    mine = load.take(np.arange(0, len(load), parts))
    return replace(mine, max_concurrency=math.ceil(load.max_concurrency / parts)) if load.max_concurrency else mine
