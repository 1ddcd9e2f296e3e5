"""Settings put to the test: a short run of one part of a service, or the whole load on all of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict_table import Times
from kernelcast.hardware import Gpu
from kernelcast.inference.forward import Deployment
from kernelcast.search.goals import PERCENT, Goal, worst
from kernelcast.search.plan.grid import Place, Setting
from kernelcast.serving.load import Load
from kernelcast.serving.metrics import LatencyGoals as NoGoals
from kernelcast.serving.metrics import RequestTimes, metrics
from kernelcast.serving.scheduler import Request
from kernelcast.serving.service import EnginePool
from kernelcast.serving.simulate import Cluster, Simulation, check, simulate
from kernelcast.serving.step_times import StepTimeTables

QUICK = 320  # requests of a short run, of each engine that it has
_ENGINES = 4  # of a short run, that its requests are counted by
MARGIN = 1.15  # a short run that breaks a goal by more is taken at its word
_LOOKS = 16  # requests that end between two looks at whether a run is hopeless
_EVEN = 1.2  # times the mean rate that the first requests may come at, to stand for all
_KEEPS_UP = 0.9  # of the throughput, that a run with slow steps has at least where its queue does not grow
_BUSY = 0.95  # of the time, from which a host that reads requests holds them up
_WAITED = 0.01  # of a run, from which a limit counts as what requests waited for


@dataclass(frozen=True, eq=False)
class Trial:
    """A setting and how it fared. ``share``: of the goal that is nearest to breaking, at most 1 where all are met;
    infinity where the load is not held."""

    setting: Setting
    found: Simulation
    goals: tuple[Goal, ...]
    cut: bool = False  # ended early, when so many requests were late that no more could mend it

    @property
    def held(self) -> bool:
        """Whether the queue does not grow; of a load that comes all at once, whether it ends."""
        return self.cut or not math.isfinite(self.found.load.request_rate) or not self.found.saturated

    @property
    def share(self) -> float:
        return worst(self.goals, self.found.metrics)[1] if self.held and not self.cut else math.inf

    @property
    def nearest(self) -> Goal:
        return worst(self.goals, self.found.metrics)[0]

    @property
    def meets(self) -> bool:
        return self.share <= 1.0

    @property
    def sure(self) -> bool | None:
        """Whether it meets the goals at the slow end too; None where that was not run."""
        if not self.found.high:
            return None
        return self.meets and not self._slow_end_grows and worst(self.goals, self.found.high)[1] <= 1.0

    @property
    def _slow_end_grows(self) -> bool:
        """Whether slow steps do not keep up with the load: less is answered a second, and it waits far longer."""
        likely, slow = self.found.metrics, self.found.high
        behind = self.found.low["request_throughput"] < _KEEPS_UP * likely["request_throughput"]
        longer = slow["mean_ttft_ms"] > 2 * likely["mean_ttft_ms"]
        return behind and longer and not self.found.load.max_concurrency

    @property
    def usd_per_hour(self) -> float:
        return self.setting.usd_per_hour

    @property
    def usd_per_million(self) -> float:
        """Of output tokens, at this load."""
        return self.usd_per_hour / 3.6e3 / self.found.metrics["output_throughput"] * 1e6

    @property
    def binds(self) -> str:
        """What requests wait for: KV cache, max_num_seqs; front end, where hosts are busy reading; or compute, where
        nothing else keeps them out."""
        found = self.found
        first = found.service.prefill or found.service.pool
        stack = first.deployment.stack
        reads_s = stack.front_s + stack.token_s * float(found.load.inputs.mean())
        if not found.load.max_concurrency and found.load.request_rate * reads_s > _BUSY * first.replicas:
            return "front end"
        waited = {name: seconds for name, seconds in found.notes.blocked_s.items() if name != "max_num_batched_tokens"}
        name = max(waited, key=lambda name: waited[name], default="")
        engines = max(found.notes.engine, default=0) + 1
        long = waited.get(name, 0.0) > _WAITED * found.metrics.get("duration", 0.0) * engines
        return name if long else "compute"


@dataclass(frozen=True, eq=False)
class Point:
    """What is kept of a trial: its cost, its latencies, and the share of the goal nearest to breaking."""

    setting: Setting
    metrics: Mapping[str, float]
    share: float

    @property
    def usd_per_hour(self) -> float:
        return self.setting.usd_per_hour


class _HopelessError(Exception):
    """No request that is still to come can mend it."""


class _Watch:
    """Ends a run when more requests are late, by ``within`` times the limit, than a goal's percentile allows."""

    def __init__(self, cluster: Cluster, goals: Sequence[Goal], within: float) -> None:
        self.cluster, self.cut, count = cluster, False, len(cluster.requests)
        self._goals = []
        for goal in goals:
            limit_s = goal.limit_ms / 1e3 * within
            late = count - math.floor((count - 1) * PERCENT.get(goal.statistic, 100) / 100)  # that make it break
            self._goals.append((goal.metric, limit_s, late if goal.statistic in PERCENT else math.inf))

    def told(self, done: int) -> None:
        if done % _LOOKS:
            return
        ended = [request for request in self.cluster.requests if request.last_s == request.last_s]
        for metric, limit_s, late in self._goals:
            if len(ended) >= late and sum(_took_s(request, metric) > limit_s for request in ended) >= late:
                raise _HopelessError


def _took_s(request: Request, metric: str) -> float:
    if metric == "tpot":
        return (request.last_s - request.first_s) / (request.outputs - 1) if request.outputs > 1 else 0.0
    return (request.first_s if metric == "ttft" else request.last_s) - request.arrival_s


class Trials:
    """One load, its goals, and step times that all settings share. ``variant``: which end of the forecast must do."""

    def __init__(self, load: Load, goals: Sequence[Goal], conditions: Conditions, seed: int, variant: str) -> None:
        self.load, self.goals, self.seed, self.variant = load, tuple(goals), seed, variant
        self.conditions = conditions
        self._times: list[tuple[Gpu, Times]] = []  # a GPU is no key of a dictionary
        self.tables = StepTimeTables(self.calls)
        self._seeded: set[int] = set()
        self.runs = 0
        self.points: list[Point] = []
        first = load.take(slice(0, QUICK))
        even = load.stages is None and load.follows is None
        self._cut = even and (first.request_rate <= _EVEN * load.request_rate or not math.isfinite(load.request_rate))

    def calls(self, place: Deployment) -> Times:
        """Kernel calls of its GPU that were predicted so far."""
        found = next((times for chip, times in self._times if chip is place.gpu), None)
        if found is None:
            found = Times(place.gpu, self.conditions)
            self._times.append((place.gpu, found))
        return found

    def _seed(self, place: Place) -> None:
        """Step times for all limits of a place at once, before the first run with some of them."""
        if id(place) not in self._seeded:
            self.tables.of(EnginePool(place.deployment, place.widest), self.load)
            self._seeded.add(id(place))

    def quick(self, setting: Setting, *, early: bool = True) -> Trial:
        """A short run of one engine with its share of the load: what a router that takes turns sends it. ``early``: end
        it once it is clear that a goal breaks by more than the margin."""
        parts = _parts(setting)
        engines = (setting.replicas + setting.readers) // parts
        mine, enough = share_of(self.load, parts), QUICK * min(engines, _ENGINES)
        if self._cut and len(mine) > enough:
            mine = mine.take(slice(0, enough))
        return self._run(setting, mine, parts, MARGIN if early else math.inf)

    def full(self, setting: Setting, load: Load | None = None, *, early: bool = False) -> Trial:
        """All of the load, or of another, on all engines. ``early``: end it once it is clear that a goal breaks."""
        return self._run(setting, self.load if load is None else load, 1, 1.0 if early else math.inf, keep=load is None)

    def share(self, setting: Setting, load: Load) -> Trial:
        """One engine (or the least part of a pair) with all of its share of another load; ends once it is clear that a
        goal breaks."""
        parts = _parts(setting)
        return self._run(setting, share_of(load, parts), parts, 1.0, keep=False)

    def _run(self, setting: Setting, load: Load, parts: int, within: float, *, keep: bool = True) -> Trial:
        service = setting.service(parts)
        check(service, load)
        self.runs += 1
        for place in filter(None, (setting.place, setting.reader)):
            self._seed(place)
        cluster = Cluster(service, load, self.tables, self.variant, self.seed)
        watch = _Watch(cluster, self.goals, within)
        try:
            cluster.run(watch.told if math.isfinite(within) else None)
        except _HopelessError:
            watch.cut = True
        served = RequestTimes.of(cluster.requests, load)
        found = Simulation(service, load, served, cluster.notes, NoGoals(), metrics(served, cluster.notes))
        trial = Trial(setting, found, self.goals, watch.cut)
        if keep and not watch.cut:
            kept = {goal.key: found.metrics.get(goal.key, 0.0) for goal in self.goals}
            self.points.append(Point(setting, kept, trial.share))
        return trial

    def certain(self, setting: Setting) -> Trial:
        """All of it, at both ends of the forecast, as `kernelcast simulate` answers."""
        self.runs += 3
        found = simulate(setting.service(), self.load, self.conditions, seed=self.seed)
        if not found.complete:
            raise KeyboardInterrupt
        return Trial(setting, found, self.goals)


def _parts(setting: Setting) -> int:
    """Equal parts that a service falls into."""
    return math.gcd(setting.replicas, setting.readers) if setting.reader else setting.replicas


def share_of(load: Load, parts: int) -> Load:
    """What one of so many engines gets from a router that takes turns."""
    if parts == 1:
        return load
    mine = load.take(np.arange(0, len(load), parts))
    return replace(mine, max_concurrency=math.ceil(load.max_concurrency / parts)) if load.max_concurrency else mine
