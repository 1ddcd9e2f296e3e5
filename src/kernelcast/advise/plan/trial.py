"""Settings put to the test: a short run of one part of a service, or the whole load on all of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kernelcast.advise.plan.goals import Goal, worst
from kernelcast.advise.plan.grid import Place, Setting
from kernelcast.hardware import Gpu
from kernelcast.networks.forward import Deployment
from kernelcast.predict import Conditions
from kernelcast.serving.engine.fleet import Fleet, Pool, Tables
from kernelcast.serving.engine.result import Served, Simulation, metrics
from kernelcast.serving.engine.result import Goals as NoGoals
from kernelcast.serving.engine.simulate import check, simulate
from kernelcast.serving.load import Load
from kernelcast.times import Times

QUICK = 320  # requests of a short run, of each engine that it has
MARGIN = 1.15  # a short run that breaks a goal by more is taken at its word
_EVEN = 1.2  # times the mean rate that the first requests may come at, to stand for all
_WAITED = 0.01  # of a run, from which a limit counts as what requests waited for


@dataclass(frozen=True, eq=False)
class Trial:
    """A setting and how it fared. ``share``: of the goal that is nearest to breaking, at most 1 where all are met;
    infinity where the load is not held."""

    setting: Setting
    found: Simulation
    goals: tuple[Goal, ...]

    @property
    def held(self) -> bool:
        """Whether the queue does not grow; of a load that comes all at once, whether it ends."""
        return not math.isfinite(self.found.load.request_rate) or not self.found.saturated

    @property
    def share(self) -> float:
        return worst(self.goals, self.found.metrics)[1] if self.held else math.inf

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
        return self.meets and worst(self.goals, self.found.high)[1] <= 1.0

    @property
    def usd_per_hour(self) -> float:
        return self.setting.usd_per_hour

    @property
    def usd_per_million(self) -> float:
        """Of output tokens, at this load."""
        return self.usd_per_hour / 3.6e3 / self.found.metrics["output_throughput"] * 1e6

    @property
    def binds(self) -> str:
        """What requests wait for: KV cache, max_num_seqs; or compute, where no limit keeps them out."""
        found = self.found
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


class Trials:
    """One load, its goals, and step times that all settings share. ``variant``: which end of the forecast must do."""

    def __init__(self, load: Load, goals: Sequence[Goal], conditions: Conditions, seed: int, variant: str) -> None:
        self.load, self.goals, self.seed, self.variant = load, tuple(goals), seed, variant
        self.conditions = conditions
        self._times: list[tuple[Gpu, Times]] = []  # a GPU is no key of a dictionary
        self.tables = Tables(self.calls)
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
            self.tables.of(Pool(place.deployment, place.widest), self.load)
            self._seeded.add(id(place))

    def quick(self, setting: Setting) -> Trial:
        """A short run of one engine with its share of the load: what a router that takes turns sends it."""
        parts = math.gcd(setting.replicas, setting.readers) if setting.reader else setting.replicas
        engines = (setting.replicas + setting.readers) // parts
        mine = share_of(self.load, parts)
        if self._cut and len(mine) > QUICK * engines:
            mine = mine.take(slice(0, QUICK * engines))
        return self._run(setting, mine, parts)

    def full(self, setting: Setting, load: Load | None = None) -> Trial:
        """All of the load on all engines."""
        return self._run(setting, self.load if load is None else load, 1, keep=load is None)

    def _run(self, setting: Setting, load: Load, parts: int, *, keep: bool = True) -> Trial:
        service = setting.service(parts)
        check(service, load)
        self.runs += 1
        for place in filter(None, (setting.place, setting.reader)):
            self._seed(place)
        fleet = Fleet(service, load, self.tables, self.variant, self.seed)
        fleet.run()
        served = Served.of(fleet.requests, load)
        found = Simulation(service, load, served, fleet.notes, NoGoals(), metrics(served, fleet.notes))
        trial = Trial(setting, found, self.goals)
        if keep:
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


def share_of(load: Load, parts: int) -> Load:
    """What one of so many engines gets from a router that takes turns."""
    if parts == 1:
        return load
    mine = load.take(np.arange(0, len(load), parts))
    return replace(mine, max_concurrency=math.ceil(load.max_concurrency / parts)) if load.max_concurrency else mine
