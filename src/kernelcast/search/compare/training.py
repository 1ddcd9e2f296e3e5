"""A training step on many GPUs: of a transformer at its fastest layout, of any model as it was traced once; and what a
whole training run costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from kernelcast.errors import DoesNotFit, KernelcastError
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict_table import Times
from kernelcast.hardware import Gpu
from kernelcast.hardware.prices import read_prices
from kernelcast.models.architecture import Architecture
from kernelcast.results import HtmlRepr, Interval
from kernelcast.schedule import Memory
from kernelcast.search.compare.candidates import ComparisonRow, Scenario, chosen_gpus
from kernelcast.search.compare.compare import Renamed, bound_shares, energy_of_run, rank_key
from kernelcast.search.training import SearchSpace, search_layouts
from kernelcast.tracing.traced import Trace
from kernelcast.training.job import TrainingJob
from kernelcast.training.job_memory import check_fits
from kernelcast.training.layout import TrainingLayout
from kernelcast.training.memory import step_memory
from kernelcast.training.run import TrainingRun
from kernelcast.training.scale import ScaledStep, scale
from kernelcast.training.step import LAUNCH_BOUND, STEP, Step, run_step
from kernelcast.training.training_forecast import TrainingForecast as JobForecast
from kernelcast.training.transformer_step import forecast

TOKENS, SAMPLES = 1e12, 1e6  # of a training run, by default
SINGLE_GPU = TrainingLayout()
TrainingRow = ComparisonRow["TrainingForecast"]


@dataclass(frozen=True, kw_only=True)
class WholeTraining(Scenario):
    """``tokens`` or ``samples``: of the whole training run. ``layout`` None: the best is found."""

    layout: TrainingLayout | None = None
    tokens: float | None = None
    samples: float | None = None
    conditions: Conditions = STEP

    name: ClassVar[str]
    pass_tokens: ClassVar[int]  # of one rank's pass
    pass_samples: ClassVar[int]
    parameters: ClassVar[int]
    built: ClassVar[Mapping[str, Any]] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens is not None and self.samples is not None:
            raise KernelcastError("give `tokens` or `samples` of the training, not both")
        for name in ("tokens", "samples"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise KernelcastError(f"`{name}` is a number above 0, not {value:g}")

    @property
    def unit(self) -> str:
        return "samples" if self.samples is not None or not self.pass_tokens else "tokens"

    @property
    def whole(self) -> float:
        """Tokens or samples of the training run."""
        return self.samples or self.tokens or (TOKENS if self.unit == "tokens" else SAMPLES)

    def forecasts(self, gpu: Gpu) -> tuple[list[TrainingForecast], tuple[float, int]]:
        """Of each number of GPUs the best that fits; and the bytes and GPUs of what comes nearest."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TransformerScenario(WholeTraining):
    """A transformer whose layers are known: the fastest layout of one GPU and of ``max_gpus``. ``batch``: sequences
    of a GPU in a step. ``settings``: other fields of a ``TrainingJob``."""

    model: Architecture
    batch: int
    seq: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.model.name

    @property
    def pass_tokens(self) -> int:  # type: ignore[override]
        return self.batch * self.seq

    @property
    def pass_samples(self) -> int:  # type: ignore[override]
        return self.batch

    @property
    def parameters(self) -> int:  # type: ignore[override]
        return self.model.parameters.total

    def forecasts(self, gpu: Gpu) -> tuple[list[TrainingForecast], tuple[float, int]]:
        found: list[TrainingForecast] = []
        least = (math.inf, 1)
        for count in dict.fromkeys((1, self.max_gpus) if self.layout is None else (self.layout.gpus,)):
            try:
                step = self._best(gpu, count)
            except DoesNotFit as error:
                least = min(least, (error.memory.peak_bytes, count)) if error.memory else least
                continue
            found.append(TrainingForecast(self, gpu, step.job.layout, step))
        return found, least

    def _best(self, gpu: Gpu, count: int) -> JobForecast:
        if self.layout is None:
            settings = dict(self.settings)
            again = settings.pop("recompute", None)
            space = SearchSpace(recompute=(again,) if again else ())
            return search_layouts(self.model, gpu, count, global_batch=self.batch * count, seq=self.seq, space=space,
                                  conditions=self.conditions, **settings).best  # fmt: skip
        job = TrainingJob(model=self.model, gpu=gpu, layout=self.layout, seq=self.seq, micro_batch=self.batch,
                          **self.settings)  # fmt: skip
        check_fits(job)
        return forecast(job, self.conditions)


@dataclass(frozen=True, kw_only=True)
class TrainingScenario(WholeTraining):
    """A traced step. ``layout`` None: the better of one GPU and ``max_gpus`` data-parallel ones at the lowest ZeRO
    stage that fits (from 1); tensor parallel where none fits, or by latency. ``how``: of a step (tf32, graph, the
    host)."""

    trace: Trace
    how: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trace.mode != "training":
            raise KernelcastError(f"{self.trace.name} is no trace of a training step; trace it with mode='training'")
        if self.tokens is not None and not self.trace.tokens:
            raise KernelcastError(f"{self.trace.name} reads no tokens: give `samples`")

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.trace.name

    @property
    def pass_tokens(self) -> int:  # type: ignore[override]
        return self.trace.tokens

    @property
    def pass_samples(self) -> int:  # type: ignore[override]
        return self.trace.samples

    @property
    def parameters(self) -> int:  # type: ignore[override]
        return self.trace.parameters

    @property
    def built(self) -> Mapping[str, Any]:  # type: ignore[override]
        return self.trace.built

    def forecasts(self, gpu: Gpu) -> tuple[list[TrainingForecast], tuple[float, int]]:
        times = Times(gpu, self.conditions)
        fitting: list[TrainingForecast] = []
        least: tuple[float, int] = (math.inf, 1)
        refused: KernelcastError | None = None
        for alternatives in self.layouts():
            for layout in alternatives:
                try:
                    found, used_bytes = _forecast(self, gpu, layout, times)
                except KernelcastError as error:  # it cannot be sharded so, or the GPU lacks the format
                    refused = refused or error
                    continue
                if found is not None:
                    fitting.append(found)
                    break
                least = min(least, (used_bytes, layout.gpus))
        if refused and not fitting:
            raise refused
        return fitting, least

    def layouts(self) -> list[list[TrainingLayout]]:
        """Layouts to try; of each list the first that fits."""
        if self.layout is not None:
            return [[self.layout]]
        if self.max_gpus == 1:
            return [[SINGLE_GPU]]
        sharded = [TrainingLayout(dp=self.max_gpus, zero=zero) for zero in (1, 2, 3)]
        tensor_parallel = TrainingLayout(tp=self.max_gpus)
        if self.by == "latency":
            return [[SINGLE_GPU], sharded, [tensor_parallel]]
        return [[SINGLE_GPU], [*sharded, tensor_parallel]]


@dataclass(frozen=True, eq=False)
class TrainingForecast(Renamed):
    """A step on a GPU type, and what the training run takes of it."""

    scenario: WholeTraining
    gpu: Gpu
    layout: TrainingLayout
    step: Step | ScaledStep | JobForecast

    @property
    def gpus(self) -> int:
        return self.layout.gpus

    @property
    def interval(self) -> Interval:
        return Interval(self.step.time_s, float(self.step.low_s), float(self.step.high_s))

    @property
    def per_step(self) -> int:
        """Tokens or samples of a step."""
        if isinstance(self.step, JobForecast):
            return self.step.job.global_batch if self.scenario.unit == "samples" else self.step.job.tokens
        trace = self.step.trace
        return (trace.samples if self.scenario.unit == "samples" else trace.tokens) * self.step.passes

    @property
    def units_per_s(self) -> float:
        return self.per_step / self.step.time_s

    @property
    def hours(self) -> float:
        return self.scenario.whole / self.units_per_s / 3600

    @property
    def usd(self) -> float | None:
        price = self.scenario.price(self.gpu)
        return None if price is None else price.usd_per_hour * self.gpus * self.hours

    @property
    def joules(self) -> Interval | None:
        energy = TrainingRun(self.step).step_energy if isinstance(self.step, JobForecast) else energy_of_run(self.step)
        return None if energy is None else energy * (self.scenario.whole / self.per_step)

    @property
    def bound_by(self) -> dict[str, float]:
        """Pipelines by the share of kernel time that they bind; the host by its share of the step."""
        shares = bound_shares((share.bound_by, share.time_s) for share in self.step.shares)
        if self.launch_bound:
            step = self.step
            idle_s = step.parts_s["host"] if isinstance(step, JobForecast) else step.idle_s
            shares["host"] = idle_s / step.time_s
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    @property
    def launch_bound(self) -> bool:
        step = self.step
        return step.parts_s["host"] > LAUNCH_BOUND * step.time_s if isinstance(step, JobForecast) else step.launch_bound

    @property
    def memory(self) -> Memory:
        """Of the fullest GPU."""
        return self.step.memory.fullest if isinstance(self.step, JobForecast) else self.step.memory

    @property
    def order(self) -> tuple[float, ...]:
        return rank_key(self.scenario.by, self.step.time_s, self.units_per_s, self.units_per_s / self.gpus, self.usd,
                        lambda: self.joules)  # fmt: skip


@dataclass(frozen=True, eq=False)
class TrainingComparison(HtmlRepr, Renamed):
    """Rows in order, those that do not fit last."""

    scenario: WholeTraining
    rows: tuple[TrainingRow, ...]

    @property
    def fitting(self) -> list[TrainingForecast]:
        return [row.best for row in self.rows if row.best is not None]


def compare_training(
    trace: Trace | None = None,
    gpus: str | Sequence[str] = "all",
    *,
    what_if: Sequence[str] = (),
    prices: Path | None = None,
    price: Sequence[str] = (),
    price_kind: str = "on_demand",
    **parameters: Any,
) -> TrainingComparison:
    """Every GPU at its best layout to train with ``trace`` (a training step), or without one a transformer (``model``,
    ``batch``, ``seq``), in order; refuses a step that fits on none. ``parameters``: other fields of the scenario."""
    among = {"gpus": chosen_gpus(gpus, what_if), "prices": read_prices(prices, price, price_kind), **parameters}
    scenario = TransformerScenario(**among) if trace is None else TrainingScenario(trace=trace, **among)
    rows = [_row(scenario, gpu) for gpu in scenario.gpus]
    if not any(row.best for row in rows):
        roomy = max(rows, key=lambda row: row.gpu.dram_bytes)
        error = KernelcastError if all(row.refused for row in rows) else DoesNotFit
        raise error(
            f"a step of {scenario.name} fits on no GPU of {len(rows)}: {roomy.gpu.id} {roomy.why}; a smaller "
            f"`batch`, `checkpointing` or more GPUs (`max_gpus`; or `dp` with `zero` 3, `tp`, `pp`) need less of each"
        )
    rows.sort(key=lambda row: row.best.order if row.best else (math.inf,))
    return TrainingComparison(scenario, tuple(rows))


def _row(scenario: WholeTraining, gpu: Gpu) -> TrainingRow:
    try:
        fitting, least = scenario.forecasts(gpu)
    except KernelcastError as error:
        return ComparisonRow(gpu, None, f"cannot run it: {error}", refused=True)
    if fitting:
        return ComparisonRow(gpu, min(fitting, key=lambda forecast: forecast.order), meets=True)
    need, has = least[0] / 2**30, gpu.dram_bytes / 2**30
    return ComparisonRow(gpu, None, f"needs {need:.1f} GiB a GPU on {least[1]} of them, has {has:.1f}")


def _forecast(
    scenario: TrainingScenario, gpu: Gpu, layout: TrainingLayout, times: Times
) -> tuple[TrainingForecast | None, float]:
    """None where it does not fit; and the bytes that a GPU needs."""
    step: Step | ScaledStep
    if layout == SINGLE_GPU:
        memory = step_memory(scenario.trace, gpu)
        if not memory.fits:
            return None, memory.used_bytes
        step = run_step(scenario.trace, gpu, times=times, **scenario.how)
    else:
        step = scale(scenario.trace, gpu, layout, times=times, **scenario.how)
        memory = step.memory
    fits = not isinstance(step, ScaledStep) or step.fits
    return TrainingForecast(scenario, gpu, layout, step) if fits else None, memory.used_bytes
