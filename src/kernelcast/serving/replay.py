"""Measured and simulated metrics of a load, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kernelcast._moved import moved_names
from kernelcast.forecast.end_to_end import WholeSupport
from kernelcast.schedule import EvidenceSummary
from kernelcast.serving.load import Load
from kernelcast.serving.metrics import (
    BenchResult,
    RequestTimes,
    StepLog,
    follows_steps,
    latencies_ms,
    metrics,
    throughput,
)
from kernelcast.serving.service import Service
from kernelcast.serving.simulate import Cluster, check
from kernelcast.serving.step_times import StepTimeTables

Rows = NDArray[np.bool_]
LATENCIES, ENDINGS = ("ttft", "tpot", "itl", "e2el"), ("mean", "p50", "p90", "p99")
RATES = ("request_throughput", "output_throughput", "total_token_throughput")
KEYS = (*(f"{ending}_{name}_ms" for name in LATENCIES for ending in ENDINGS), *RATES)
VARIANTS = ("likely", "low", "high")
if not TYPE_CHECKING:  # names of 0.2
    _HOME = "kernelcast.serving.calibrate"
    __getattr__ = moved_names(__name__, {"calibrate": f"{_HOME}.calibrate", "part_of": f"{_HOME}.calibration_requests"})


@dataclass(frozen=True)
class MetricComparison:
    """One metric, by vLLM's name: what was measured and what is predicted, with its 80% interval where it has one."""

    name: str
    measured: float
    predicted: float
    low: float | None = None
    high: float | None = None

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1

    @property
    def inside(self) -> bool | None:
        if self.low is None or self.high is None:
            return None
        return self.low <= self.measured <= self.high


@dataclass(frozen=True)
class ReplayPart:
    """Figures of some of the requests."""

    name: str
    requests: int
    figures: tuple[MetricComparison, ...]

    def __getitem__(self, name: str) -> MetricComparison:
        return next(figure for figure in self.figures if figure.name == name)


@dataclass(frozen=True, eq=False)
class SimulatedRuns:
    """One simulated load: the forecast and, where requested, the runs at both ends of the interval of every step."""

    load: Load
    served: Mapping[str, RequestTimes]
    notes: Mapping[str, StepLog]
    rests_on: EvidenceSummary
    service: Service
    server_measured: bool

    @classmethod
    def of(
        cls, service: Service, load: Load, tables: StepTimeTables, *, seed: int = 0, intervals: bool = True
    ) -> SimulatedRuns:
        check(service, load)
        served, notes = {}, {}
        for variant in VARIANTS if intervals else VARIANTS[:1]:
            cluster = Cluster(service, load, tables, variant, seed)
            cluster.run()
            served[variant], notes[variant] = RequestTimes.of(cluster.requests, load), cluster.step_log
        steps = cluster.decode_engines[0].times
        return cls(load, served, notes, steps.rests_on, service, steps.measured)

    @property
    def supports(self) -> WholeSupport:
        """Of the kernels of a decode step, and of the run as a whole."""
        return self.service.supports(self.load, self.rests_on)

    def figures(self, measured: Mapping[str, float], rows: Rows | None = None) -> tuple[MetricComparison, ...]:
        """The measured metrics that are predicted too."""
        simulated = {variant: metrics(self.served[variant], self.notes[variant], rows) for variant in self.served}
        figures = []
        for key in KEYS:
            actual, values = named(measured, key), [named(simulated[variant], key) for variant in simulated]
            if not actual or None in values or not actual > 0:
                continue
            ends = [value for value in values if value is not None]
            whole = len(ends) == len(VARIANTS)
            low = high = None
            if whole:
                follows = follows_steps(self.load, simulated["low"], simulated["high"])
                low, high = self.service.interval(self.load, key, ends, self.server_measured, follows)
            figures.append(MetricComparison(key, actual, ends[0], low, high))
        return tuple(figures)


def named(metrics: Mapping[str, float], key: str) -> float | None:
    """Some call the 50th percentile the median."""
    return metrics.get(key, metrics.get(key.replace("p50", "median")))


@dataclass(frozen=True, eq=False)
class Replay:
    """A benchmark and its simulation. ``parts``: the stages of the load, or other parts of it."""

    bench: BenchResult
    service: Service
    runs: SimulatedRuns
    whole: ReplayPart
    parts: tuple[ReplayPart, ...] = ()
    assumed: tuple[str, ...] = ()
    stages: bool = False  # whether the parts are the load's own stages


def replay(bench: BenchResult, service: Service, tables: StepTimeTables, *, seed: int = 0, intervals: bool = True,
           parts: Sequence[tuple[str, Rows]] = ()) -> Replay:  # fmt: skip
    """The benchmark's load on ``service``; ``parts``: names and requests, in place of the stages of the load."""
    runs = SimulatedRuns.of(service, bench.load, tables, seed=seed, intervals=intervals)
    measured_parts = [(name, rows, measured(bench, rows)) for name, rows in parts] or _stages(bench)
    compared = tuple(
        ReplayPart(name, int(rows.sum()), runs.figures(values, rows)) for name, rows, values in measured_parts
    )
    whole = ReplayPart("all requests", len(bench.load), runs.figures(bench.metrics))
    return Replay(bench, service, runs, whole, compared, assumed(bench, service), stages=not parts)


def _stages(bench: BenchResult) -> list[tuple[str, Rows, Mapping[str, float]]]:
    """Stages of a load that has them: metrics as in the file, or computed from its requests."""
    if bench.load.stages is None or bench.load.stages.max() == 0:
        return []
    stages = []
    for at, number in enumerate(np.unique(bench.load.stages).tolist()):
        rows = bench.load.stages == number
        stages.append((f"stage {number}", rows, stage_metrics(bench, at, rows)))
    return stages


def stage_metrics(bench: BenchResult, at: int, rows: Rows) -> Mapping[str, float]:
    return {**measured(bench, rows), **(bench.stages[at] if at < len(bench.stages) else {})}


def measured(bench: BenchResult, rows: Rows) -> dict[str, float]:
    """Metrics of some requests, where the file lists requests."""
    load = bench.load.take(rows)
    ttft, e2el = (None if times is None else times[rows] for times in (bench.ttft_s, bench.e2el_s))
    itls = [gaps for gaps, chosen in zip(bench.itls, rows, strict=True) if chosen] if bench.itls else []
    values = latencies_ms(load.outputs, ttft, e2el, itls)
    if e2el is not None and not load.max_concurrency:  # of a closed loop it is not known when each was sent
        lasted = float(np.nanmax(load.arrivals_s + e2el) - load.arrivals_s[0])
        values |= throughput(load.inputs, load.outputs, max(lasted, 1e-9))
    return values


def assumed(bench: BenchResult, service: Service) -> tuple[str, ...]:
    """Notes on what the file does not give."""
    notes = list(bench.notes)
    if not bench.exact:
        notes.append("requests are not those that were sent: whole distributions are compared, not request by request")
    if not bench.load.shared and service.pool.settings.prefix_caching:
        notes.append("the file does not say what prompts share: nothing, it is assumed")
    return tuple(notes)
