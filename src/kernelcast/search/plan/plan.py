"""A plan: the cheapest service that keeps its goals under a load, and what is around it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kernelcast.errors import KernelcastError
from kernelcast.forecast.conditions import DEFAULT, Conditions
from kernelcast.models.architecture import Architecture
from kernelcast.results import HtmlRepr
from kernelcast.search.goals import Goal
from kernelcast.search.plan.bounds import READ, WROTE, Demand, carried
from kernelcast.search.plan.grid import Grid, Setting
from kernelcast.search.plan.search import Known, OnProgress, Search, pair_of
from kernelcast.search.plan.trial import Point, Trial, Trials
from kernelcast.serving.load import Load

_GROWS = 1.25  # a step of the load
_MOST = 100.0  # times the load: beyond that nothing is said
_HALVINGS = 5
_BUDGETS = (0.4, 0.6, 0.8, 1.0, 1.25, 1.6, 2.0, 3.0, 4.0)  # of the choice's cost, that the front is looked for at
_OF_EACH = 3  # engines that are run for a budget
_SHOWN = 9  # points of a front
_LOOKED_AT = 4  # engines that are run to find the most that holds


@dataclass(frozen=True)
class Growth:
    """Where a service breaks: the last load that held and the first that did not, and why."""

    holds: float  # requests/s, or requests under way of a closed loop
    breaks: float
    goal: Goal | None  # None: the queue grows
    binds: str
    closed: bool  # whether the load is counted by requests under way


@dataclass(frozen=True, eq=False)
class Most:
    """Where no setting meets the goals: the one that comes nearest. ``rate``: requests/s that it holds within them;
    0 where even one request alone breaks a goal."""

    trial: Trial | None  # None: the model fits nowhere
    rate: float
    binds: str


def scaled(load: Load, factor: float) -> Load:
    """So many times the load: faster, or with more under way."""
    if load.max_concurrency:
        return replace(load, max_concurrency=max(1, round(load.max_concurrency * factor)))
    return load.faster(factor)


def growth(trials: Trials, setting: Setting) -> Growth | None:
    """Raise the load until a goal breaks; None of a load that comes all at once, or that nothing breaks."""
    load = trials.load
    if not load.max_concurrency and not math.isfinite(load.request_rate):
        return None
    low, high = 1.0, _GROWS
    broken = trials.full(setting, scaled(load, high))
    while broken.meets:
        low, high = high, high * _GROWS
        if high > _MOST:
            return None
        broken = trials.full(setting, scaled(load, high))
    for _ in range(_HALVINGS - 1):
        middle = math.sqrt(low * high)
        found = trials.full(setting, scaled(load, middle))
        if found.meets:
            low = middle
        else:
            high, broken = middle, found
    each = float(load.max_concurrency) or load.request_rate
    return Growth(low * each, high * each, broken.nearest if broken.held else None, broken.binds,
                  closed=bool(load.max_concurrency))  # fmt: skip


def most_held(search: Search) -> Most:
    """The highest rate that some setting within the GPUs allowed holds."""
    grid, demand = search.grid, search.demand
    able = [known for known in search.known if known.built or search.build(known)]
    if not able:
        return Most(None, 0.0, "memory")
    if not demand.rate:
        return _nearest(search, able)
    best: Most | None = None
    settings = _widest(search, able) if grid.disaggregated != "only" else []
    settings += _widest_pairs(search) if grid.disaggregated != "no" else []
    for setting in settings:
        found = _holds(search.trials, setting, best.rate if best else 0.0)
        if found and (best is None or found.rate > best.rate):
            best = found
    return best if best and best.rate else _nearest(search, able)


def _widest(search: Search, able: Iterable[Known]) -> list[Setting]:
    """Pools of all GPUs allowed that promise most requests a second."""
    most = search.grid.max_gpus
    fit = [known for known in able if not search.alone(known.floor)]
    fit.sort(key=lambda known: -known.best_rate() * (most // known.place.gpus))
    found = []
    for known in fit[:_LOOKED_AT]:
        best = max(known.rates.values())
        at = next(at for at, rate in known.rates.items() if rate == best)
        found.append(Setting(known.place, known.place.limits[at], most // known.place.gpus))
    return found


def _widest_pairs(search: Search) -> list[Setting]:
    """Pairs of pools that promise most, the GPUs shared out between them."""
    most, promised = search.grid.max_gpus, []
    for reader, writer in search.alike():
        if not (reader.built and writer.built):
            continue
        reads, writes = search.part_rate(reader, READ), search.part_rate(writer, WROTE)
        shares = [(readers, (most - readers * reader.place.gpus) // writer.place.gpus)
                  for readers in range(1, most // reader.place.gpus + 1)]  # fmt: skip
        rate, readers, writers = max((min(one * reads, other * writes), one, other) for one, other in shares)
        if rate:
            promised.append((rate, pair_of(reader, writer, readers, writers)))
    promised.sort(key=lambda one: -one[0])
    return [setting for _, setting in promised[:_LOOKED_AT]]


def _holds(trials: Trials, setting: Setting, least: float) -> Most | None:
    """The rate at which a setting still meets the goals, if it is above ``least``: found with one engine's share of the
    load, and told by all of it."""
    load, rate = trials.load, trials.load.request_rate
    low, high = 0.0, 1.0
    try:
        broken = trials.share(setting, load)
    except KernelcastError:
        return None
    for _ in range(2 * _HALVINGS):
        middle = math.sqrt(low * high) if low else max(high / 2, least / rate * 1.001)
        if middle >= high or middle < 1e-3:
            break
        found = trials.share(setting, scaled(load, middle))
        if found.meets:
            low = middle
        elif middle * rate <= least * 1.01:
            return None
        else:
            high, broken = middle, found
    for factor in (low, 0.97 * low, 0.94 * low, 0.9 * low) if low else ():
        whole = trials.full(setting, scaled(load, factor), early=True)
        if whole.meets:
            return Most(whole, factor * rate, broken.binds)
    return None


def _nearest(search: Search, able: Iterable[Known]) -> Most:
    """What comes nearest to the goals with hardly any load."""

    def share(known: Known) -> float:
        return max(known.floor.share(goal, search.demand) for goal in search.goals)

    few = search.trials.load.take(slice(0, 20))
    if not few.max_concurrency and math.isfinite(few.request_rate):
        few = few.faster(min(1.0, 0.05 / few.request_rate))
    else:
        few = replace(few, max_concurrency=1)
    found = []
    for known in sorted(able, key=share)[:_LOOKED_AT]:
        try:
            found.append(search.trials.full(Setting(known.place, known.place.limits[0], 1), few))
        except KernelcastError:
            continue
    best = min(found, key=lambda trial: trial.share, default=None)
    return Most(best, 0.0, "latency")


def front(search: Search, choice: Trial) -> list[Trial]:
    """The settings that no other beats in both cost and latency (the share of the goal nearest to breaking), run whole
    at both ends of the forecast; the cheapest first, the choice among them."""
    for budget in _BUDGETS:
        for setting in _worth(search, choice, budget * choice.usd_per_hour):
            try:
                search.trials.quick(setting, early=False)
            except KernelcastError:
                continue
    shown = _thinned(_undominated(search.trials.points), choice)
    runs = [choice, *(search.trials.certain(point.setting) for point in shown if point.setting is not choice.setting)]
    found, least = [], math.inf
    for trial in sorted(runs, key=lambda trial: (trial.usd_per_hour, trial.share)):
        if trial is choice or (trial.share < least and abs(trial.usd_per_hour - choice.usd_per_hour) > 1e-9):
            least = min(least, trial.share)
            found.append(trial)
    return found


def _worth(search: Search, choice: Trial, budget: float) -> list[Setting]:
    """For so much money: the engines that promise most, by how far from full they would be."""
    promised = []
    for known in search.known:
        place = known.place
        replicas = min(int((budget + 1e-9) / place.usd_per_hour), search.grid.max_gpus // place.gpus)
        if replicas < 1 or not (known.built or search.build(known)):
            continue
        assert known.steps is not None
        rate = carried(known.steps, place, place.limits[0], search.demand, ())
        full = search.demand.rate / (rate * replicas) if rate else math.inf
        alone = max(known.floor.share(goal, search.demand) for goal in search.goals)
        if full < 1 and (budget <= choice.usd_per_hour or alone < choice.share):
            promised.append((alone / (1 - full), replicas, known))
    promised.sort(key=lambda one: one[0])
    return [Setting(known.place, known.place.limits[0], replicas) for _, replicas, known in promised[:_OF_EACH]]


def _undominated(points: Iterable[Point]) -> list[Point]:
    found: list[Point] = []
    for point in sorted(points, key=lambda point: (round(point.usd_per_hour, 6), point.share)):
        if math.isfinite(point.share) and (not found or point.share < found[-1].share * 0.98):
            found.append(point)
    return found


def _thinned(points: list[Point], choice: Trial) -> list[Point]:
    """Not too far from the goals, and not too many."""
    near = [point for point in points if point.share < 4 or point.usd_per_hour >= choice.usd_per_hour]
    if len(near) <= _SHOWN:
        return near
    step = (len(near) - 1) / (_SHOWN - 1)
    return [near[round(i * step)] for i in range(_SHOWN)]


@dataclass(eq=False)
class Plan(HtmlRepr):
    """``choice`` None: nothing meets the goals, and ``most`` tells what comes nearest. Not ``complete``: it was
    interrupted, and the choice is the best so far."""

    model: Architecture
    load: Load
    goals: tuple[Goal, ...]
    grid: Grid
    sure: bool  # the slow end of the forecast must meet the goals
    choice: Trial | None = None
    front: list[Trial] = field(default_factory=list)
    growth: Growth | None = None
    most: Most | None = None
    fallen: dict[str, int] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    settings: int = 0
    runs: int = 0
    seconds: float = 0.0
    complete: bool = True


def plan(model: Architecture, load: Load, goals: Sequence[Goal], grid: Grid, conditions: Conditions = DEFAULT, *,
         seed: int = 0, sure: bool = False, on_progress: OnProgress | None = None) -> Plan:  # fmt: skip
    """The cheapest setting of the grid that meets the goals under the load. An interrupt keeps the best so far."""
    if not goals:
        raise KernelcastError("which goal? give a latency to keep, as in --ttft-p99 500ms --tpot-p99 30ms")
    if model.kind == "encoder":
        raise KernelcastError(f"{model.name} is an encoder: it writes no tokens and is served without a queue of them")
    begun = time.monotonic()
    trials = Trials(load, goals, conditions, seed, "high" if sure else "likely")
    search = Search(model, grid, trials, tuple(goals), Demand.of(load))
    found = Plan(model, load, tuple(goals), grid, sure)
    try:
        search.run(on_progress)
        _around(found, search, on_progress)
    except KeyboardInterrupt:
        found.complete = False
    if found.choice is None:
        found.choice = search.best
    found.fallen, found.points, found.settings = search.fallen.counts, trials.points, search.settings
    found.runs, found.seconds = trials.runs, time.monotonic() - begun
    return found


def _around(found: Plan, search: Search, on_progress: OnProgress | None) -> None:
    """Once the search is over: the choice at both ends of the forecast, where it breaks, and the front."""
    if search.best is None:
        found.most = most_held(search)
        return
    if on_progress:
        on_progress(0, 1, "what is around it")
    found.choice = search.trials.certain(search.best.setting)
    found.growth = growth(search.trials, search.best.setting)
    found.front = front(search, found.choice)
