"""A whole training run of a step's forecast: days, dollars and joules of a token budget, checkpoints and failures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kernelcast.energy.power import energy_of
from kernelcast.errors import KernelcastError
from kernelcast.forecast.calls import Call
from kernelcast.results import HtmlRepr, Interval

if TYPE_CHECKING:
    from kernelcast.hardware.prices import Price
    from kernelcast.training.training_forecast import TrainingForecast


@dataclass(frozen=True)
class Failures:
    """What a run loses beside its steps: checkpoints that it waits for, and failures of GPUs.

    ``every``: steps between checkpoints; 0: none. ``mtbf_hours``: of one GPU with its share of the node; 0: no
    failures. Llama 3 405B had 419 unexpected interruptions of 16,384 GPUs in 54 days (arXiv 2407.21783, table 5):
    one in 50,700 GPU-hours."""

    every: int = 0
    checkpoint_s: float = 0.0
    mtbf_hours: float = 0.0
    restart_s: float = 600.0
    jitter: float = 0.0  # standard deviation of a GPU's time for a step, over its mean

    def __post_init__(self) -> None:
        for name in ("every", "checkpoint_s", "mtbf_hours", "restart_s", "jitter"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise KernelcastError(f"{name} must be 0 or more, not {getattr(self, name):g}")
        if self.mtbf_hours and not self.every:
            raise KernelcastError("`mtbf` needs `checkpoint_every`: without a checkpoint a failure loses the whole run")

    def goodput(self, step_s: float, gpus: int) -> float:
        """The share of the time that goes into steps which are kept: each failure loses a restart and half an interval
        between checkpoints (Young 1974, Daly 2006: to first order). A step waits for the slowest of its GPUs, which is
        sqrt(2 ln n) standard deviations above the mean of n."""
        even = 1 / (1 + self.jitter * math.sqrt(2 * math.log(gpus)))
        if not self.every:
            return even
        useful_s = self.every * step_s / even
        written = even * useful_s / (useful_s + self.checkpoint_s)
        if not self.mtbf_hours:
            return written
        between_s = self.mtbf_hours * 3600 / gpus
        lost_s = self.restart_s + (useful_s + self.checkpoint_s) / 2
        return written * between_s / (between_s + lost_s)


@dataclass(frozen=True, eq=False)
class TrainingRun(HtmlRepr):
    """A step, and the run of ``tokens`` that it is of (None: a step alone). ``price``: None where nobody knows it."""

    step: TrainingForecast
    tokens: float | None = None
    price: Price | None = None
    failures: Failures = Failures()
    answered_as: Mapping[str, Any] = field(default_factory=dict)  # parameters that were filled in
    unread: tuple[str, ...] = ()  # settings of a config file that no rule knows
    search: Any = None  # LayoutSearch: the layouts that the step's is the fastest of

    @property
    def goodput(self) -> float:
        return self.failures.goodput(self.step.time_s, self.step.job.gpus)

    @property
    def hours(self) -> Interval | None:
        if self.tokens is None:
            return None
        steps, time = self.tokens / self.step.job.tokens, self.step.interval
        return Interval(time.value, time.low, time.high) * (steps / self.goodput / 3600)

    @property
    def usd(self) -> Interval | None:
        hours = self.hours
        return hours * (self.price.usd_per_hour * self.step.job.gpus) if hours and self.price else None

    @cached_property
    def step_energy(self) -> Interval | None:
        """Joules of a step on all GPUs, each taken as one of the slowest stage; None without a power model."""
        step = self.step
        launched = {call: (count, step.times[call].interval.value) for call, count in launches(step).items()}
        waits_s = max(0.0, step.time_s - sum(count * each_s for count, each_s in launched.values()))
        drawn = energy_of(launched, step.times, waits_s, step.interval)
        return drawn.joules * step.job.gpus if drawn else None

    @property
    def energy(self) -> Interval | None:
        """Joules of the run: of its steps, those that are lost too."""
        each = self.step_energy
        return each * (self.tokens / self.step.job.tokens / self.goodput) if self.tokens and each else None


def launches(step: TrainingForecast) -> dict[Call, float]:
    """Calls of the slowest stage in a step, with how often each is launched."""
    found: dict[Call, float] = {}
    for _, one, times in step.plan.passes(step.slowest):
        launched = [(kernel.call, kernel.count) for kernel in one.kernels]
        launched += [(launch.call, launch.count) for exchange in one.exchanges for launch in exchange.launches]
        for call, count in launched:
            found[call] = found.get(call, 0.0) + count * times
    return found
