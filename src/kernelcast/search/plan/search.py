"""The search: bounds discard candidates that cannot meet the goals or be cheaper, then short runs; whole runs decide.

Engines are tried in the order of the least that they could cost. Of each, the fewest replicas that meet the goals are
found by bisection; once there is an answer, one run with as many replicas as cost no more shows whether an engine can
beat it at all.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kernelcast.errors import KernelcastError
from kernelcast.models.architecture import Architecture
from kernelcast.search.plan.bounds import EngineBounds, EnginePair, LoadSummary
from kernelcast.search.plan.simulator import MARGIN, ServiceSimulator, SimulatedService
from kernelcast.search.plan.space import EngineOption, SearchSpace, ServiceCandidate
from kernelcast.serving.goals import Goal
from kernelcast.serving.service import EngineSettings

ALONE = "one request alone breaks a goal"
TOO_SLOW = "cannot carry the load"
TOO_MANY = "needs more GPUs than allowed"
DEARER = "cannot be cheaper than the choice"
BEYOND = "dearer than the budget"
MISSED = "simulated, and misses a goal"
MET = "meets the goals, but is no cheaper than the choice"
REFUSED = "the engine refuses the requests, or has no kernels for it"
_EPS = 1e-9
OnProgress = Callable[[int, int, str], None]  # how many engines were tried, of how many, and a note


@dataclass(eq=False)
class Search:
    """State of a search; ``best`` is the answer so far, ``discarded`` counts candidates by why they were."""

    model: Architecture
    space: SearchSpace
    simulator: ServiceSimulator
    goals: tuple[Goal, ...]
    load: LoadSummary
    discarded: Counter[str] = field(default_factory=Counter)
    best: SimulatedService | None = None
    engines: list[EngineBounds] = field(default_factory=list)
    settings: int = 0

    def run(self, on_progress: OnProgress | None = None) -> None:
        """Search until no remaining candidate could be cheaper."""
        if not self.engines:
            options = self.space.engines(self.model, int(self.load.context_mean), self.discarded)
            self.engines = [EngineBounds(engine, self.load, self.goals) for engine in options]
        self.settings = self.discarded.total() + sum(self._count(bounds.engine) for bounds in self.engines)
        if self.space.disaggregated != "only":
            self._aggregated(on_progress)
        if self.space.disaggregated != "no" and self.load.output_mean > 1:
            self._disaggregated(on_progress)

    def _count(self, engine: EngineOption) -> int:
        return len(engine.limits) * (self.space.max_gpus // engine.gpus)

    def _discard(self, why: str, count: int) -> None:
        self.discarded[why] += max(0, count)

    def among(self, engines: list[EngineBounds]) -> Search:
        """A search of its own among some of the engines."""
        return Search(self.model, self.space, self.simulator, self.goals, self.load, engines=engines)

    @property
    def budget(self) -> float:
        """What a candidate may cost at most."""
        return self.best.usd_per_hour if self.best else self.space.budget

    @property
    def too_dear(self) -> str:
        """Why a candidate beyond that is discarded."""
        return DEARER if self.best else BEYOND

    def built(self, bounds: EngineBounds) -> bool:
        """Bounds by step times; whether the engine has kernels at all."""
        if bounds.steps is None:
            try:
                bounds.build(self.simulator.times(bounds.engine.deployment), self.simulator.variant)
            except KernelcastError:
                self._discard(REFUSED, self._count(bounds.engine))
        return bounds.steps is not None

    # ---- aggregated ----
    def _aggregated(self, on_progress: OnProgress | None) -> None:
        order = itertools.count()
        heap = [(bounds.cost, next(order), bounds) for bounds in self.engines]
        heapq.heapify(heap)
        done, total = 0, len(heap)
        while heap:
            cost, _, bounds = heapq.heappop(heap)
            if on_progress:
                on_progress(done, total, f"best {self.best.usd_per_hour:.2f} USD/h" if self.best else "")
            done += 1
            why = self._hopeless(bounds, cost)
            if why:
                self._discard(why, self._count(bounds.engine))
            elif bounds.steps is None:
                if self.built(bounds):
                    heapq.heappush(heap, (bounds.cost, next(order), bounds))
                    done -= 1
            else:
                for limits, rate in zip(bounds.engine.limits, bounds.rates, strict=True):
                    self._replicas(bounds.engine, limits, self.load.engines(rate))

    def _hopeless(self, bounds: EngineBounds, cost: float) -> str:
        if bounds.misses():
            return ALONE
        if cost > self.budget + _EPS:
            return self.too_dear
        if cost > self.space.max_gpus * bounds.engine.price.usd_per_hour + _EPS:
            return TOO_SLOW if bounds.steps else TOO_MANY
        return ""

    def _replicas(self, engine: EngineOption, limits: EngineSettings, least: int) -> None:
        """The fewest replicas that meet the goals, if they cost less than the best so far."""
        allowed = self.space.max_gpus // engine.gpus
        most = int(min(allowed, (self.budget + _EPS) / engine.usd_per_hour))
        self._discard(TOO_SLOW, min(least - 1, allowed))
        if least > allowed:
            return
        self._discard(self.too_dear, allowed - max(most, least - 1))
        if most < least:
            return
        try:
            fewest = self._fewest(engine, limits, least, most)
        except KernelcastError:
            self._discard(REFUSED, most - least + 1)
            return
        if fewest is None:
            self._discard(MISSED, most - least + 1)
            return
        self._discard(MISSED, fewest.candidate.replicas - least)
        self._discard(MET, most - fewest.candidate.replicas + 1)
        self._offer(fewest)

    def _fewest(self, engine: EngineOption, limits: EngineSettings, least: int, most: int) -> SimulatedService | None:
        """The fewest replicas, by doubling and halving with short runs; whole runs decide, one more replica at a
        time."""

        def may(replicas: int) -> bool:
            return self._may(ServiceCandidate(engine, limits, replicas))

        low, high = least - 1, least
        if self.best:
            high = most  # one run shows whether it can win at all
        while not may(high):
            if high >= most:
                return None
            low, high = high, min(most, max(high + 1, 2 * high))
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if may(middle) else (middle, high)
        for replicas in range(high, most + 1):
            run = self.simulator.full(ServiceCandidate(engine, limits, replicas), early=True)
            if run.meets:
                return run
            if not run.keeps_up and replicas > high + 2:
                break
        return None

    def _may(self, candidate: ServiceCandidate) -> bool:
        return self.simulator.quick(candidate).share <= MARGIN

    def _offer(self, run: SimulatedService) -> None:
        """The cheapest; of those that cost the same, the one farthest from breaking a goal."""
        if self.best is None or run.usd_per_hour < self.best.usd_per_hour - _EPS or (
            abs(run.usd_per_hour - self.best.usd_per_hour) <= _EPS and run.share < self.best.share
        ):  # fmt: skip
            self.best = run

    # ---- disaggregated ----
    def pairs(self) -> list[EnginePair]:
        """Prefill and decode engines of one GPU, stack and format that may meet the goals."""
        groups: dict[tuple[int, str, str], list[EngineBounds]] = {}
        for bounds in self.engines:
            deployment = bounds.engine.deployment
            key = id(deployment.gpu), deployment.stack.id, deployment.precision.label
            groups.setdefault(key, []).append(bounds)
        pairs = [EnginePair(*two) for group in groups.values() for two in itertools.product(group, group)]
        most = self.space.max_gpus
        return [
            pair for pair in pairs if pair.prefill.engine.gpus + pair.decode.engine.gpus <= most and not pair.misses
        ]

    def _disaggregated(self, on_progress: OnProgress | None) -> None:
        """The least that pairs could cost first."""
        costs = [(self._least_cost(pair), pair) for pair in self.pairs()]
        costs.sort(key=lambda cost: cost[0])
        self.settings += len(costs)
        for at, (cost, pair) in enumerate(costs):
            if on_progress:
                on_progress(at, len(costs), "disaggregated")
            if self._costs_too_much(cost) or math.isinf(cost):
                self._discard(TOO_SLOW if math.isinf(cost) and not self.best else self.too_dear, len(costs) - at)
                break
            why = self._pair(pair)
            if why:
                self._discard(why, 1)

    def _least_cost(self, pair: EnginePair) -> float:
        least = pair.least()
        return least.usd_per_hour if least.gpus <= self.space.max_gpus else math.inf

    def _pair(self, pair: EnginePair) -> str:
        """Start from the fewest of both and add to the pool that breaks its goal, while cheaper than the best. Returns
        why the pair is discarded before that; nothing where it was tried or refused."""
        if any(not self.built(bounds) for bounds in (pair.prefill, pair.decode)):
            return ""
        if pair.misses:
            return ALONE
        first = pair.least()
        if self._beyond(first):
            return self._beyond(first)
        try:
            most = self._most_of(first)
            if most is not first and not self._may(most):  # all that may be spent is not enough
                return MISSED
            return self._walk(first, pair)
        except KernelcastError:
            return REFUSED

    def _beyond(self, candidate: ServiceCandidate) -> str:
        if candidate.gpus > self.space.max_gpus:
            return TOO_MANY
        return self.too_dear if self._costs_too_much(candidate.usd_per_hour) else ""

    def _costs_too_much(self, cost: float) -> bool:
        """A pair must be cheaper than the best, which is simpler to run; without one the budget may be spent whole."""
        return cost > self.budget - _EPS if self.best else cost > self.budget + _EPS

    def _most_of(self, first: ServiceCandidate) -> ServiceCandidate:
        """The largest allowed service with about the same proportion of both."""
        most = first
        for times in range(2, self.space.max_gpus + 1):
            more = replace(first, replicas=times * first.replicas, prefill_replicas=times * first.prefill_replicas)
            if self._beyond(more):
                break
            most = more
        for name in ("replicas", "prefill_replicas"):
            more = replace(most, **{name: getattr(most, name) + getattr(first, name)})
            most = most if self._beyond(more) else more
        return most

    def _walk(self, candidate: ServiceCandidate, pair: EnginePair) -> str:
        """One more, or an eighth more, of those that are short, until the goals are met or it costs too much."""
        while not (why := self._beyond(candidate)):
            run = self.simulator.quick(candidate)
            if run.share <= MARGIN:
                run = self.simulator.full(candidate, early=True)
            if run.meets:
                self._offer(run)
                return MET
            self.settings += 1
            self._discard(MISSED, 1)
            prefills, decodes = candidate.prefill_replicas, candidate.replicas
            more_prefills, more_decodes = _short_of(run)
            candidate = pair.candidate(prefills + more_prefills * max(1, prefills // 8),
                                       decodes + more_decodes * max(1, decodes // 8))  # fmt: skip
        return why


def _short_of(run: SimulatedService) -> tuple[int, int]:
    """Engines that a disaggregated service lacks: prefill, decode."""
    metrics = run.simulation.metrics
    broken = {goal.metric for goal in run.goals if goal.share(metrics) > 1}
    if not run.keeps_up or "e2el" in broken or not broken:
        decode_ms = metrics.get("mean_tpot_ms", 0.0) * run.simulation.request_times.outputs.mean()
        if metrics.get("mean_ttft_ms", 0.0) > decode_ms:
            return 1, 0
        return (0, 1) if run.keeps_up else (1, 1)
    return int("ttft" in broken), int("tpot" in broken)
