"""A plan: the cheapest service that keeps its goals under a load, and what is around it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kernelcast.errors import KernelcastError
from kernelcast.forecast.conditions import DEFAULT, Conditions
from kernelcast.models.architecture import Architecture
from kernelcast.results import Shown
from kernelcast.search.plan.beyond import Growth, Most, front, growth, most_held
from kernelcast.search.plan.bounds import Demand
from kernelcast.search.plan.goals import Goal
from kernelcast.search.plan.grid import Grid
from kernelcast.search.plan.search import Search
from kernelcast.search.plan.trial import Point, Trial, Trials
from kernelcast.serving.load import Load

Told = Callable[[int, int, str], None]  # how many engines are looked at, of how many, and a few words


@dataclass(eq=False)
class Plan(Shown):
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
         seed: int = 0, sure: bool = False, told: Told | None = None) -> Plan:  # fmt: skip
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
        search.run(told)
        _around(found, search, told)
    except KeyboardInterrupt:
        found.complete = False
    if found.choice is None:
        found.choice = search.best
    found.fallen, found.points, found.settings = search.fallen.counts, trials.points, search.settings
    found.runs, found.seconds = trials.runs, time.monotonic() - begun
    return found


def _around(found: Plan, search: Search, told: Told | None) -> None:
    """Once the search is over: the choice at both ends of the forecast, where it breaks, and the front."""
    if search.best is None:
        found.most = most_held(search)
        return
    if told:
        told(0, 1, "what is around it")
    found.choice = search.trials.certain(search.best.setting)
    found.growth = growth(search.trials, search.best.setting)
    found.front = front(search, found.choice)
