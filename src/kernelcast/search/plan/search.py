"""The search: bounds discard what cannot meet the goals or be cheaper, short runs what does not, whole runs decide.

Engines are looked at in the order of the least that they could cost. Of each, the fewest replicas that meet the goals
are found by halving; once an answer is known, one run with as many replicas as it could have and not be dearer tells
whether an engine can beat it at all.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kernelcast.errors import KernelcastError
from kernelcast.models.architecture import Architecture
from kernelcast.search.goals import Goal
from kernelcast.search.plan.bounds import READ, WROTE, CoarseSteps, Demand, Floor, alone, carried, engines_for, physical
from kernelcast.search.plan.grid import Fallen, Grid, Place, Setting, places
from kernelcast.search.plan.trial import MARGIN, Trial, Trials
from kernelcast.serving.service import EngineSettings

ALONE = "one request alone breaks a goal"
TOO_SLOW = "cannot carry the load"
TOO_MANY = "needs more GPUs than allowed"
DEARER = "cannot be cheaper than the choice"
MISSED = "simulated, and misses a goal"
MET = "meets the goals, but is no cheaper than the choice"
REFUSED = "the engine refuses the requests, or has no kernels for it"
SAME = "a limit that is never reached"
_EPS = 1e-9
OnProgress = Callable[[int, int, str], None]


@dataclass(eq=False)
class Known:
    """What is known of an engine so far."""

    place: Place
    floor: Floor
    cost: float  # at least, of a service of it that carries the load
    steps: CoarseSteps | None = None
    rates: dict[int, float] = field(default_factory=dict)  # requests/s that one carries at most, by limit

    @property
    def built(self) -> bool:
        return self.steps is not None

    def best_rate(self) -> float:
        return max(self.rates.values(), default=self.floor.rate)


@dataclass(eq=False)
class Search:
    """State of a search; ``best`` is the answer so far."""

    model: Architecture
    grid: Grid
    trials: Trials
    goals: tuple[Goal, ...]
    demand: Demand
    fallen: Fallen = field(default_factory=Fallen)
    best: Trial | None = None
    known: list[Known] = field(default_factory=list)
    settings: int = 0

    def run(self, on_progress: OnProgress | None = None) -> None:
        """Until nothing is left that could be cheaper."""
        context = int(self.demand.context_mean)
        for place in places(self.model, self.grid, context, self.fallen):
            floor = physical(place, self.demand)
            self.known.append(Known(place, floor, self._cost(place, floor.rate)))
        self.settings = sum(self.fallen.counts.values()) + sum(self._count(known.place) for known in self.known)
        if self.grid.disaggregated != "only":
            self._pools(on_progress)
        if self.grid.disaggregated != "no" and self.demand.output_mean > 1:
            self._pairs(on_progress)

    def _count(self, place: Place) -> int:
        return len(place.limits) * (self.grid.max_gpus // place.gpus)

    def _cost(self, place: Place, rate: float) -> float:
        """At least, of engines like this that carry the load."""
        return engines_for(self.demand.rate, rate) * place.usd_per_hour

    @property
    def budget(self) -> float:
        return self.best.usd_per_hour if self.best else math.inf

    # ---- engines that do all ----
    def _pools(self, on_progress: OnProgress | None) -> None:
        order = itertools.count()
        heap = [(known.cost, next(order), known) for known in self.known]
        heapq.heapify(heap)
        done, total = 0, len(heap)
        while heap:
            cost, _, known = heapq.heappop(heap)
            if on_progress:
                on_progress(done, total, f"best {self.best.usd_per_hour:.2f} USD/h" if self.best else "")
            done += 1
            why = self._discarded(known, cost)
            if why:
                self.fallen.add(why, self._count(known.place))
                continue
            if not known.built:
                if self.build(known):
                    heapq.heappush(heap, (known.cost, next(order), known))
                    done -= 1
                continue
            for limits in known.place.limits:
                self._replicas(known, limits)

    def _discarded(self, known: Known, cost: float) -> str:
        if self.alone(known.floor):
            return ALONE
        if cost > self.budget + _EPS:
            return DEARER
        if cost > self.grid.max_gpus * known.place.price.usd_per_hour + _EPS:
            return TOO_SLOW if known.built else TOO_MANY
        return ""

    def alone(self, floor: Floor, metrics: Sequence[str] = ("ttft", "tpot", "e2el")) -> bool:
        return any(floor.share(goal, self.demand) > 1 for goal in self.goals if goal.metric in metrics)

    def build(self, known: Known) -> bool:
        """Step times, and the bounds that they give; whether it has kernels at all."""
        place = known.place
        variant, demand = self.trials.variant, self.demand
        try:
            steps = CoarseSteps(place.deployment, self.trials.calls(place.deployment), int(demand.context_mean),
                                int(demand.input_mean / 2), variant)  # fmt: skip
        except KernelcastError:
            self.fallen.add(REFUSED, self._count(place))
            return False
        known.floor, known.steps = alone(steps, place, demand, variant), steps
        for at, limits in enumerate(place.limits):
            known.rates[at] = carried(steps, place, limits, demand, self.goals)
        known.cost = self._cost(place, known.best_rate())
        return True

    def _replicas(self, known: Known, limits: EngineSettings) -> None:
        """The fewest replicas that meet the goals, if they cost less than the best so far."""
        place, at = known.place, known.place.limits.index(limits)
        allowed = self.grid.max_gpus // place.gpus
        least = engines_for(self.demand.rate, known.rates[at])
        most = int(min(allowed, (self.budget + _EPS) / place.usd_per_hour))
        self.fallen.add(TOO_SLOW, min(least - 1, allowed))
        if least > allowed:
            return
        self.fallen.add(DEARER, allowed - max(most, least - 1))
        if most < least:
            return
        try:
            found = self._fewest(place, limits, least, most)
        except KernelcastError:
            self.fallen.add(REFUSED, most - least + 1)
            return
        if found is None:
            self.fallen.add(MISSED, most - least + 1)
            return
        self.fallen.add(MISSED, found.setting.replicas - least)
        self.fallen.add(MET, most - found.setting.replicas + 1)
        self._offer(found)

    def _fewest(self, place: Place, limits: EngineSettings, least: int, most: int) -> Trial | None:
        """By doubling and halving with short runs; whole runs decide, one more replica at a time."""
        low, high = least - 1, least
        if self.best:
            high = most  # one run tells whether it can win at all
        while not self._may(place, limits, high):
            if high >= most:
                return None
            low, high = high, min(most, max(high + 1, 2 * high))
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._may(place, limits, middle) else (middle, high)
        for replicas in range(high, most + 1):
            found = self._try(Setting(place, limits, replicas), whole=True)
            if found.meets:
                return found
            if not found.held and replicas > high + 2:
                break
        return None

    def _may(self, place: Place, limits: EngineSettings, replicas: int) -> bool:
        return self._try(Setting(place, limits, replicas)).share <= MARGIN

    def _try(self, setting: Setting, *, whole: bool = False) -> Trial:
        return self.trials.full(setting, early=True) if whole else self.trials.quick(setting)

    def _offer(self, found: Trial) -> None:
        """The cheapest; of those that cost the same, the one farthest from breaking a goal."""
        if self.best is None or (found.usd_per_hour, found.share) < (self.best.usd_per_hour - _EPS, math.inf) or (
            abs(found.usd_per_hour - self.best.usd_per_hour) <= _EPS and found.share < self.best.share
        ):  # fmt: skip
            self.best = found

    # ---- engines that read prompts beside those that decode ----
    def _pairs(self, on_progress: OnProgress | None) -> None:
        """Pairs of engines of one GPU, stack and format, the least that they could cost first."""
        found = [(self._pair_cost(*pair), at, pair) for at, pair in enumerate(self.alike())]
        found.sort(key=lambda one: one[:2])
        self.settings += len(found)
        for at, (cost, _, (reader, writer)) in enumerate(found):
            if on_progress:
                on_progress(at, len(found), "prompts apart")
            if cost > self.budget - _EPS or math.isinf(cost):
                self.fallen.add(DEARER if self.best else TOO_SLOW, len(found) - at)
                break
            self._pair(reader, writer)

    def alike(self) -> list[tuple[Known, Known]]:
        groups: dict[tuple[int, str, str], list[Known]] = {}
        for known in self.known:
            place = known.place.deployment
            groups.setdefault((id(place.gpu), place.stack.id, place.precision.label), []).append(known)
        return [(reader, writer) for group in groups.values() for reader, writer in itertools.product(group, group)
                if reader.place.gpus + writer.place.gpus <= self.grid.max_gpus
                and not self.alone(reader.floor, ("ttft",)) and not self.alone(writer.floor, ("tpot",))]  # fmt: skip

    def _pair_cost(self, reader: Known, writer: Known) -> float:
        """At least: by step times where they are known, else by the peaks of the chip."""
        demand = self.demand
        engines = []
        for known, tokens in ((reader, demand.input_mean), (writer, demand.output_mean)):
            if known.built:
                rate = self.part_rate(known, READ if known is reader else WROTE)
            else:  # its part of the arithmetic alone
                rate = known.floor.rate * (demand.input_mean + demand.output_mean) / tokens
            engines.append(engines_for(demand.rate, rate))
        gpus = engines[0] * reader.place.gpus + engines[1] * writer.place.gpus
        return gpus * reader.place.price.usd_per_hour if gpus <= self.grid.max_gpus else math.inf

    def part_rate(self, known: Known, part: str) -> float:
        assert known.steps is not None
        return carried(known.steps, known.place, known.place.limits[0], self.demand, self.goals, part)

    def _pair(self, reader: Known, writer: Known) -> None:
        """From the fewest of both: one more of whichever breaks its goal, while that is cheaper than the best."""
        if any(not known.built and not self.build(known) for known in (reader, writer)):
            return
        if self.alone(reader.floor, ("ttft",)) or self.alone(writer.floor, ("tpot",)):
            self.fallen.add(ALONE, 1)
            return
        one = engines_for(self.demand.rate, self.part_rate(reader, READ))
        other = engines_for(self.demand.rate, self.part_rate(writer, WROTE))
        first = pair_of(reader, writer, one, other)
        if self._beyond(first):
            self.fallen.add(self._beyond(first), 1)
            return
        try:
            most = self._most_of(first)
            if most is not first and self._try(most).share > MARGIN:  # all that may be spent is not enough
                self.fallen.add(MISSED, 1)
                return
            self._walk(first, reader, writer)
        except KernelcastError:
            self.fallen.add(REFUSED, 1)

    def _beyond(self, setting: Setting) -> str:
        if setting.gpus > self.grid.max_gpus:
            return TOO_MANY
        return DEARER if setting.usd_per_hour > self.budget - _EPS else ""

    def _most_of(self, first: Setting) -> Setting:
        """As many of both, in about the same parts, as may be."""
        found = first
        for times in range(2, self.grid.max_gpus + 1):
            more = replace(first, replicas=times * first.replicas, readers=times * first.readers)
            if self._beyond(more):
                break
            found = more
        for name in ("replicas", "readers"):
            more = replace(found, **{name: getattr(found, name) + getattr(first, name)})
            found = found if self._beyond(more) else more
        return found

    def _walk(self, setting: Setting, reader: Known, writer: Known) -> None:
        """One more, or an eighth more, of those that are short, until the goals are met or it is too dear."""
        while not (why := self._beyond(setting)):
            found = self._try(setting)
            if found.share <= MARGIN:
                found = self._try(setting, whole=True)
            if found.meets:
                self.fallen.add(MET, 1)
                self._offer(found)
                return
            self.settings += 1
            self.fallen.add(MISSED, 1)
            readers, writers = _short_of(found)
            setting = pair_of(reader, writer, setting.readers + readers * max(1, setting.readers // 8),
                               setting.replicas + writers * max(1, setting.replicas // 8))  # fmt: skip
        self.fallen.add(why, 1)


def pair_of(reader: Known, writer: Known, readers: int, writers: int) -> Setting:
    return Setting(writer.place, writer.place.limits[0], writers, reader.place, reader.place.limits[0], readers)


def _short_of(found: Trial) -> tuple[int, int]:
    """Engines that a pair lacks: of those that read, and of those that decode."""
    broken = {goal.metric for goal in found.goals if goal.share(found.found.metrics) > 1}
    if not found.held or "e2el" in broken or not broken:
        waits = found.found.metrics.get("mean_ttft_ms", 0.0)
        wrote = found.found.metrics.get("mean_tpot_ms", 0.0) * found.found.served.outputs.mean()
        return (1, 0) if waits > wrote else (0, 1) if found.held else (1, 1)
    return int("ttft" in broken), int("tpot" in broken)
