"""A traced step on many kinds of GPU: traced once, forecast on each, and what a whole training costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelcast.errors import KernelcastError, unknown
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict_table import Times
from kernelcast.hardware import Gpu
from kernelcast.hardware.prices import Price, read_prices
from kernelcast.results import HtmlRepr, Interval
from kernelcast.search.compare.candidates import BY, chosen_gpus
from kernelcast.search.compare.compare import joules
from kernelcast.tracing.traced import Trace
from kernelcast.training.layout import TrainingLayout
from kernelcast.training.memory import step_memory
from kernelcast.training.scale import ScaledStep, scale
from kernelcast.training.step import STEP, Step, run_step

TOKENS = 1e12  # of a training, where nobody says how many
ONE = TrainingLayout()


@dataclass(frozen=True)
class AskedTraining:
    """``layout`` None: the better of one GPU and ``max_gpus`` data-parallel ones at the least ZeRO that fits (from 1:
    a share of the optimizer each); ``max_gpus`` that cut every layer where that does not fit, or by latency. ``tokens``
    or ``samples``: of the whole training. ``how``: of a step (tf32, graph, the host)."""

    trace: Trace
    gpus: tuple[Gpu, ...]
    layout: TrainingLayout | None = None
    tokens: float | None = None
    samples: float | None = None
    max_gpus: int = 8
    by: str | None = None
    prices: Mapping[str, Price] = field(default_factory=dict)
    conditions: Conditions = STEP
    how: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.gpus:
            raise KernelcastError("no GPU to compare: give --gpus h100_sxm,h200_sxm or --gpus all")
        if self.trace.mode != "training":
            raise KernelcastError(f"{self.trace.name} is no trace of a training step; trace it with mode='training'")
        if self.max_gpus < 1:
            raise KernelcastError(f"--max-gpus is 1 or more, not {self.max_gpus}")
        if self.by is not None and self.by not in BY:
            raise unknown("--by", self.by, BY)
        if self.tokens is not None and self.samples is not None:
            raise KernelcastError("give --tokens or --samples of the training, not both")
        for name in ("tokens", "samples"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise KernelcastError(f"--{name} is a number above 0, not {value:g}")
        if self.tokens is not None and not self.trace.tokens:
            raise KernelcastError(f"{self.trace.name} reads no tokens: give --samples")

    @property
    def unit(self) -> str:
        return "samples" if self.samples is not None or not self.trace.tokens else "tokens"

    @property
    def whole(self) -> float:
        """Tokens or samples of the training; an epoch is as many samples as a set has."""
        return self.samples or self.tokens or (TOKENS if self.unit == "tokens" else 1e6)


@dataclass(frozen=True, eq=False)
class Trained:
    """A step on one kind of GPU, and what the training takes of it."""

    asked: AskedTraining
    gpu: Gpu
    layout: TrainingLayout
    step: Step | ScaledStep

    @property
    def gpus(self) -> int:
        return self.layout.gpus

    @property
    def span(self) -> Interval:
        return Interval(self.step.time_s, float(self.step.low_s), float(self.step.high_s))

    @property
    def per_step(self) -> int:
        """Tokens or samples of a step."""
        trace = self.step.trace
        return (trace.samples if self.asked.unit == "samples" else trace.tokens) * self.step.passes

    @property
    def units_per_s(self) -> float:
        return self.per_step / self.step.time_s

    @property
    def hours(self) -> float:
        return self.asked.whole / self.units_per_s / 3600

    @property
    def usd(self) -> float | None:
        price = self.asked.prices.get(self.gpu.known_as)
        return None if price is None else price.usd_per_hour * self.gpus * self.hours

    @property
    def joules(self) -> Interval | None:
        spent = joules(self.step)
        return None if spent is None else spent * (self.asked.whole / self.per_step)

    @property
    def bound_by(self) -> dict[str, float]:
        """Pipelines by the share of kernel time that they bind; host, links and bubbles by that of the step."""
        sums: dict[str, float] = {}
        for share in self.step.shares:
            sums[share.bound_by] = sums.get(share.bound_by, 0.0) + share.time_s
        whole = sum(sums.values()) or 1.0
        found = {name: value / whole for name, value in sums.items()}
        if self.step.launch_bound:
            found["host"] = self.step.idle_s / self.step.time_s
        return dict(sorted(found.items(), key=lambda item: -item[1]))


@dataclass(frozen=True, eq=False)
class TrainingRow:
    """A GPU: its best way, or why the step does not fit."""

    gpu: Gpu
    best: Trained | None
    why: str = ""


@dataclass(frozen=True, eq=False)
class TrainingComparison(HtmlRepr):
    """Rows in order, those that do not fit last."""

    asked: AskedTraining
    rows: tuple[TrainingRow, ...]

    @property
    def fitting(self) -> list[Trained]:
        return [row.best for row in self.rows if row.best is not None]


def compare_training(
    trace: Trace,
    gpus: str | Sequence[str] = "all",
    *,
    what_if: Sequence[str] = (),
    prices: Path | None = None,
    price: Sequence[str] = (),
    price_kind: str = "on_demand",
    **asked: Any,
) -> TrainingComparison:
    """Every GPU at its best way to train with ``trace`` (of ``kernelcast.trace``, mode="training"), in order.

    ``asked``: ``layout``, ``tokens`` or ``samples`` of the whole training, ``max_gpus``, ``by``, ``conditions``,
    ``how``, as in ``AskedTraining``.
    """
    known = read_prices(prices, price, price_kind)
    return compare_steps(AskedTraining(trace, chosen_gpus(gpus, what_if), prices=known, **asked))


def compare_steps(asked: AskedTraining) -> TrainingComparison:
    """Every GPU at its best; refuses a step that fits on none."""
    rows = [_row(asked, chip) for chip in asked.gpus]
    if not any(row.best for row in rows):
        roomy = max(rows, key=lambda row: row.gpu.dram_bytes)
        raise KernelcastError(
            f"a step of {asked.trace.name} fits on no GPU of {len(rows)}: {roomy.gpu.id} {roomy.why}; a smaller "
            f"--batch, --checkpointing or more GPUs (--max-gpus; or --dp with --zero 3, --tp, --pp) need less of each"
        )
    return TrainingComparison(asked, tuple(sorted(rows, key=_place)))


def _row(asked: AskedTraining, chip: Gpu) -> TrainingRow:
    times = Times(chip, asked.conditions)
    found: list[Trained] = []
    least: tuple[float, int] = (math.inf, 1)  # bytes of the way that comes nearest, and its GPUs
    refused = ""
    for several in [[asked.layout]] if asked.layout else _layouts(asked):
        for layout in several:
            try:
                trained, used = _stepped(asked, chip, layout, times)
            except KernelcastError as error:  # it cannot be cut so, or the GPU lacks the format
                refused = refused or str(error)
                continue
            if trained is not None:
                found.append(trained)
                break
            least = min(least, (used, layout.gpus))
    if found:
        return TrainingRow(chip, min(found, key=_order))
    if refused:
        return TrainingRow(chip, None, f"cannot run it: {refused}")
    need, has = least[0] / 2**30, chip.dram_bytes / 2**30
    return TrainingRow(chip, None, f"needs {need:.1f} GiB a GPU on {least[1]} of them, has {has:.1f}")


def _layouts(asked: AskedTraining) -> list[list[TrainingLayout]]:
    """Ways to try; of each list the first that fits."""
    most = asked.max_gpus
    if most == 1:
        return [[ONE]]
    shared, cut = [TrainingLayout(dp=most, zero=zero) for zero in (1, 2, 3)], TrainingLayout(tp=most)
    return [[ONE], shared, [cut]] if asked.by == "latency" else [[ONE], [*shared, cut]]


def _stepped(asked: AskedTraining, chip: Gpu, layout: TrainingLayout, times: Times) -> tuple[Trained | None, float]:
    """A step, None where it does not fit; and the bytes that a GPU needs."""
    if layout == ONE:
        held = step_memory(asked.trace, chip)
        if not held.fits:
            return None, held.used_bytes
        return Trained(asked, chip, layout, run_step(asked.trace, chip, times=times, **asked.how)), held.used_bytes
    step = scale(asked.trace, chip, layout, times=times, **asked.how)
    return Trained(asked, chip, layout, step) if step.fits else None, step.memory.used_bytes


def _order(found: Trained) -> tuple[float, ...]:
    """Less is better; where nobody knows what the order is by, after all others, throughput a GPU."""
    each = -found.units_per_s / found.gpus
    match found.asked.by or "dollars":
        case "latency":
            return 0.0, found.step.time_s, each
        case "throughput":
            return 0.0, -found.units_per_s, each
        case "joules":
            known = found.joules.value if found.joules else None
        case _:
            known = found.usd
    return (0.0, known, each) if known is not None else (1.0, each, each)


def _place(row: TrainingRow) -> tuple[float, ...]:
    return (math.inf,) if row.best is None else _order(row.best)
