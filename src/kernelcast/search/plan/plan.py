"""A plan: the cheapest service that meets its goals under a load; the goal that breaks first when the load grows, the
Pareto front of cost and latency, and the best effort if nothing meets the goals."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kernelcast.errors import KernelcastError
from kernelcast.forecast.conditions import DEFAULT, Conditions
from kernelcast.models.architecture import Architecture
from kernelcast.results import EXTRAPOLATED, LEVELS, SEEN, HtmlRepr, Renamed
from kernelcast.search.plan.bounds import DECODE, PREFILL, EngineBounds, LoadSummary
from kernelcast.search.plan.search import OnProgress, Search
from kernelcast.search.plan.simulator import CostPoint, ServiceSimulator, SimulatedService
from kernelcast.search.plan.space import SearchSpace, ServiceCandidate
from kernelcast.serving.goals import Goal
from kernelcast.serving.load import Load

_GROWS = 1.25  # a step of the load
_MOST = 100.0  # times the load: not searched beyond
_HALVINGS = 5
_BUDGETS = (0.4, 0.6, 0.8, 1.0, 1.25, 1.6, 2.0, 3.0, 4.0)  # of the choice's cost, that the front is searched at
_PER_BUDGET = 3  # engines that are run for a budget
_SHOWN = 9  # points of a front
_TRIED = 4  # engines that are run for the best effort


@dataclass(frozen=True)
class Headroom:
    """Where a service breaks: the last load that held and the first that did not, and why."""

    holds: float  # requests/s, or concurrent requests of a closed loop
    breaks: float
    goal: Goal | None  # None: the queue grows
    binds: str
    closed: bool  # whether the load is counted by concurrent requests


@dataclass(frozen=True, eq=False)
class BestEffort:
    """Where no candidate meets the goals: the nearest. ``rate``: requests/s that it holds within them; 0 where even one
    request alone breaks a goal."""

    nearest: SimulatedService | None  # None: the model fits nowhere
    rate: float
    binds: str


def surer_of(choice: SimulatedService, others: Iterable[SimulatedService]) -> SimulatedService | None:
    """The cheapest that meets the goals at the slow end of the forecast where ``choice`` does not: on better evidence,
    or on evidence of the same level and with an interval that is no wider."""
    if choice.sure is not False:
        return None

    def doubt(run: SimulatedService) -> tuple[int, float]:
        return _level(run), run.slow_share / run.share

    able = [each for each in others if each.sure and doubt(each) <= doubt(choice)]
    return min(able, key=lambda each: (each.usd_per_hour, each.slow_share), default=None)


def _level(run: SimulatedService) -> int:
    return LEVELS.index(run.support or LEVELS[EXTRAPOLATED])


@dataclass(eq=False)
class Plan(HtmlRepr, Renamed):
    """``choice`` None: nothing meets the goals, and ``best_effort`` comes nearest. ``better_known``: the cheapest on
    better evidence than the choice, the best evidence first. Not ``complete``: interrupted, and the choice is the best
    so far."""

    _renamed = {"growth": "headroom", "most": "best_effort", "fallen": "discarded", "grid": "space"}

    model: Architecture
    load: Load
    goals: tuple[Goal, ...]
    space: SearchSpace
    sure: bool  # the slow end of the forecast must meet the goals
    choice: SimulatedService | None = None
    better_known: list[SimulatedService] = field(default_factory=list)
    front: list[SimulatedService] = field(default_factory=list)
    headroom: Headroom | None = None
    best_effort: BestEffort | None = None
    discarded: dict[str, int] = field(default_factory=dict)
    points: list[CostPoint] = field(default_factory=list)
    settings: int = 0
    runs: int = 0
    seconds: float = 0.0
    complete: bool = True

    @property
    def measured(self) -> SimulatedService | None:
        """The cheapest on measured ground ("seen"): the choice itself, or one beside it; None: nothing there meets the
        goals."""
        runs = [self.choice, *self.better_known] if self.choice else []
        return next((run for run in runs if run and run.support == LEVELS[SEEN]), None)

    @property
    def surer(self) -> SimulatedService | None:
        """The cheapest known that meets the goals more surely than the choice; None where that is sure, or none is."""
        return surer_of(self.choice, [*self.better_known, *self.front]) if self.choice else None


def plan(
    model: Architecture, load: Load, goals: Sequence[Goal], space: SearchSpace, conditions: Conditions = DEFAULT, *,
    seed: int = 0, sure: bool = False, on_progress: OnProgress | None = None,
) -> Plan:  # fmt: skip
    """The cheapest candidate of the space that meets the goals under the load. An interrupt keeps the best so far."""
    if not goals:
        raise KernelcastError("which goal? give a latency to keep, as in `ttft_p99` 500ms `tpot_p99` 30ms")
    if not model.generates:
        raise KernelcastError(f"{model.name} is an encoder: it generates no tokens and needs no queue of them")
    begun = time.monotonic()
    simulator = ServiceSimulator(load, goals, conditions, seed, "high" if sure else "likely")
    search = Search(model, space, simulator, tuple(goals), LoadSummary.of(load))
    result = Plan(model, load, tuple(goals), space, sure)
    try:
        search.run(on_progress)
        if search.best is None:
            result.best_effort = best_effort(search)
        else:
            if on_progress:
                on_progress(0, 1, "headroom and front")
            result.choice = simulator.both_ends(search.best.candidate)
            result.better_known = better_known(search, result.choice, on_progress)
            _prefer_evidence(result, result.choice)
            result.headroom = headroom(simulator, result.choice.candidate)
            result.front = front(search, result.choice)
    except KeyboardInterrupt:
        result.complete = False
    result.choice = result.choice or search.best
    result.discarded, result.points, result.settings = dict(+search.discarded), simulator.points, search.settings
    result.runs, result.seconds = simulator.runs, time.monotonic() - begun
    return result


def _prefer_evidence(result: Plan, choice: SimulatedService) -> None:
    """Of settings that cost the same, the one on the best evidence is the choice."""
    for at, run in enumerate(result.better_known):
        if run.usd_per_hour <= choice.usd_per_hour + 1e-9:
            result.choice, result.better_known = run, result.better_known[:at]
            return


def better_known(
    search: Search, choice: SimulatedService, on_progress: OnProgress | None = None
) -> list[SimulatedService]:
    """The cheapest on each better level of evidence than the choice's, the best level first; one that costs no less
    than one on better evidence is left out."""
    found: list[SimulatedService] = []
    for at in range(_level(choice)):
        engines = [
            bounds
            for bounds in search.engines
            if search.space.most(bounds.engine) and LEVELS.index(search.simulator.support(bounds.engine)) <= at
        ]
        if not engines:
            continue
        among = search.among(engines)
        among.run(on_progress)
        if among.best and all(among.best.usd_per_hour < each.usd_per_hour - 1e-9 for each in found):
            found.append(search.simulator.both_ends(among.best.candidate))
    return found


def scaled(load: Load, factor: float) -> Load:
    """So many times the load: faster, or with more concurrent requests."""
    if load.max_concurrency:
        return replace(load, max_concurrency=max(1, round(load.max_concurrency * factor)))
    return load.faster(factor)


def headroom(simulator: ServiceSimulator, candidate: ServiceCandidate) -> Headroom | None:
    """Raise the load until a goal breaks; None of a load that comes all at once, or that nothing breaks."""
    load = simulator.load
    if not load.max_concurrency and not math.isfinite(load.request_rate):
        return None
    low, high = 1.0, _GROWS
    broken = simulator.full(candidate, scaled(load, high))
    while broken.meets:
        low, high = high, high * _GROWS
        if high > _MOST:
            return None
        broken = simulator.full(candidate, scaled(load, high))
    for _ in range(_HALVINGS - 1):
        middle = math.sqrt(low * high)
        run = simulator.full(candidate, scaled(load, middle))
        if run.meets:
            low = middle
        else:
            high, broken = middle, run
    each = float(load.max_concurrency) or load.request_rate
    return Headroom(low * each, high * each, broken.nearest if broken.keeps_up else None, broken.binds,
                    closed=bool(load.max_concurrency))  # fmt: skip


# ---- nothing meets the goals ----
def best_effort(search: Search) -> BestEffort:
    """The highest rate that some candidate within the GPUs allowed holds."""
    paid = [bounds for bounds in search.engines if search.space.most(bounds.engine)]
    able = [bounds for bounds in paid if search.built(bounds)]
    if not able:
        return BestEffort(None, 0.0, "budget" if search.engines and not paid else "memory")
    best: BestEffort | None = None
    candidates: list[ServiceCandidate] = []
    if search.load.rate and search.space.disaggregated != "only":
        candidates += _widest(search, able)
    if search.load.rate and search.space.disaggregated != "no":
        candidates += _widest_pairs(search)
    for candidate in candidates:
        held = _holds(search.simulator, candidate, best.rate if best else 0.0)
        if held and (best is None or held.rate > best.rate):
            best = held
    return best if best and best.rate else _nearest(search, able)


def _widest(search: Search, able: Iterable[EngineBounds]) -> list[ServiceCandidate]:
    """Aggregated services of all GPUs allowed that promise most requests a second."""
    most = search.space.most
    fit = [bounds for bounds in able if not bounds.misses()]
    fit.sort(key=lambda bounds: -bounds.best_rate * most(bounds.engine))
    return [
        ServiceCandidate(bounds.engine, bounds.engine.limits[bounds.rates.index(bounds.best_rate)], most(bounds.engine))
        for bounds in fit[:_TRIED]
    ]


def _widest_pairs(search: Search) -> list[ServiceCandidate]:
    """Disaggregated services that promise most, the GPUs shared out between prefill and decode."""
    promised = []
    for pair in search.pairs():
        if pair.prefill.steps is None or pair.decode.steps is None:
            continue
        prefill_rate, decode_rate = pair.prefill.phase_rate(PREFILL), pair.decode.phase_rate(DECODE)
        most, gpus = search.space.gpus_within(pair.prefill.engine.price), pair.prefill.engine.gpus
        if most < gpus + pair.decode.engine.gpus:
            continue
        splits = [(n, (most - n * gpus) // pair.decode.engine.gpus) for n in range(1, most // gpus + 1)]
        rate, prefills, decodes = max((min(n * prefill_rate, m * decode_rate), n, m) for n, m in splits)
        if rate:
            promised.append((rate, pair.candidate(prefills, decodes)))
    promised.sort(key=lambda promise: -promise[0])
    return [candidate for _, candidate in promised[:_TRIED]]


def _holds(simulator: ServiceSimulator, candidate: ServiceCandidate, least: float) -> BestEffort | None:
    """The rate at which a candidate still meets the goals, if it is above ``least``: searched with one engine's share
    of the load, and decided by all of it."""
    load, rate = simulator.load, simulator.load.request_rate
    low, high = 0.0, 1.0
    try:
        broken = simulator.share(candidate, load)
    except KernelcastError:
        return None
    for _ in range(2 * _HALVINGS):
        middle = math.sqrt(low * high) if low else max(high / 2, least / rate * 1.001)
        if middle >= high or middle < 1e-3:
            break
        run = simulator.share(candidate, scaled(load, middle))
        if run.meets:
            low = middle
        elif middle * rate <= least * 1.01:
            return None
        else:
            high, broken = middle, run
    for factor in (low, 0.97 * low, 0.94 * low, 0.9 * low) if low else ():
        whole = simulator.full(candidate, scaled(load, factor), early=True)
        if whole.meets:
            return BestEffort(whole, factor * rate, broken.binds)
    return None


def _nearest(search: Search, able: Iterable[EngineBounds]) -> BestEffort:
    """The candidate nearest to the goals with hardly any load."""
    few = search.simulator.load.take(slice(0, 20))
    if not few.max_concurrency and math.isfinite(few.request_rate):
        few = few.faster(min(1.0, 0.05 / few.request_rate))
    else:
        few = replace(few, max_concurrency=1)
    runs = []
    for bounds in sorted(able, key=lambda bounds: max(map(bounds.share, search.goals)))[:_TRIED]:
        try:
            runs.append(search.simulator.full(ServiceCandidate(bounds.engine, bounds.engine.limits[0], 1), few))
        except KernelcastError:
            continue
    return BestEffort(min(runs, key=lambda run: run.share, default=None), 0.0, "latency")


# ---- cost against latency ----
def front(search: Search, choice: SimulatedService) -> list[SimulatedService]:
    """The Pareto front of cost and latency (the share of the goal nearest to breaking), run whole at both ends of the
    forecast; the cheapest first, the choice among them."""
    for budget in _BUDGETS:
        for candidate in _promising(search, choice, min(search.space.budget, budget * choice.usd_per_hour)):
            try:
                search.simulator.quick(candidate, early=False)
            except KernelcastError:
                continue
    points = [point.candidate for point in _thinned(_undominated(search.simulator.points), choice)]
    runs = [choice, *(search.simulator.both_ends(each) for each in points if each is not choice.candidate)]
    shown, least = [], math.inf
    for run in sorted(runs, key=lambda run: (run.usd_per_hour, run.share)):
        if run is choice or (run.share < least and abs(run.usd_per_hour - choice.usd_per_hour) > 1e-9):
            least = min(least, run.share)
            shown.append(run)
    return shown


def _promising(search: Search, choice: SimulatedService, budget: float) -> list[ServiceCandidate]:
    """For a budget: the engines that promise most, by how far from full they would be."""
    promised = []
    for bounds in search.engines:
        engine = bounds.engine
        replicas = min(int((budget + 1e-9) / engine.usd_per_hour), search.space.max_gpus // engine.gpus)
        if replicas < 1 or not search.built(bounds):
            continue
        rate = bounds.rate(engine.limits[0], ())
        full = search.load.rate / (rate * replicas) if rate else math.inf
        alone = max(map(bounds.share, search.goals))
        if full < 1 and (budget <= choice.usd_per_hour or alone < choice.share):
            promised.append((alone / (1 - full), ServiceCandidate(engine, engine.limits[0], replicas)))
    promised.sort(key=lambda promise: promise[0])
    return [candidate for _, candidate in promised[:_PER_BUDGET]]


def _undominated(points: Iterable[CostPoint]) -> list[CostPoint]:
    kept: list[CostPoint] = []
    for point in sorted(points, key=lambda point: (round(point.usd_per_hour, 6), point.share)):
        if math.isfinite(point.share) and (not kept or point.share < kept[-1].share * 0.98):
            kept.append(point)
    return kept


def _thinned(points: list[CostPoint], choice: SimulatedService) -> list[CostPoint]:
    """Not too far from the goals, and not too many."""
    near = [point for point in points if point.share < 4 or point.usd_per_hour >= choice.usd_per_hour]
    if len(near) <= _SHOWN:
        return near
    step = (len(near) - 1) / (_SHOWN - 1)
    return [near[round(i * step)] for i in range(_SHOWN)]
