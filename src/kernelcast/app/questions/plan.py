"""The cheapest GPUs that keep latency goals under a load: the goals, and the search space."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeVar

from kernelcast.app.questions import shared
from kernelcast.app.questions.load import LoadParameters, build_load
from kernelcast.app.questions.parameters import Question, option
from kernelcast.errors import KernelcastError, unknown

if TYPE_CHECKING:
    from kernelcast.hardware import Gpu
    from kernelcast.hardware.prices import Price as GpuPrice
    from kernelcast.search.plan.plan import Plan
    from kernelcast.search.plan.search import OnProgress
    from kernelcast.search.plan.space import SearchSpace
    from kernelcast.serving.goals import Goal

_LASTS_S, _FEWEST, _LARGEST = 60, 1000, 8000  # of the load, where nobody says how many requests it has
_DISAGGREGATED = ("also", "only", "no")
_NUMBERS = ("tp", "pp", "dp", "ep", "max_num_seqs", "max_num_batched_tokens")

Time = str | None
AnyLoad = TypeVar("AnyLoad", bound=LoadParameters)
_goal = partial(option, metavar="TIME")


@dataclass(frozen=True)
class GoalParameters(Question):
    """Each is named metric_statistic."""

    panel: ClassVar[str | None] = "Goals (as 500ms, 0.5s, or a number of ms)"

    ttft_p99: Annotated[Time, _goal(help="99th percentile of the time to first token")] = None
    ttft_p95: Annotated[Time, _goal(help="95th percentile")] = None
    ttft_p90: Annotated[Time, _goal(help="90th percentile")] = None
    ttft_p50: Annotated[Time, _goal(help="median")] = None
    ttft_mean: Annotated[Time, _goal(help="mean")] = None
    tpot_p99: Annotated[Time, _goal(help="99th percentile of the time per output token")] = None
    tpot_p95: Annotated[Time, _goal(help="95th percentile")] = None
    tpot_p90: Annotated[Time, _goal(help="90th percentile")] = None
    tpot_p50: Annotated[Time, _goal(help="median")] = None
    tpot_mean: Annotated[Time, _goal(help="mean")] = None
    e2el_p99: Annotated[Time, _goal("", "--e2e-p99", help="99th percentile of the end-to-end latency")] = None
    e2el_p95: Annotated[Time, _goal("", "--e2e-p95", help="95th percentile")] = None
    e2el_p90: Annotated[Time, _goal("", "--e2e-p90", help="90th percentile")] = None
    e2el_p50: Annotated[Time, _goal("", "--e2e-p50", help="median")] = None
    e2el_mean: Annotated[Time, _goal("", "--e2e-mean", help="mean")] = None

    @property
    def targets(self) -> tuple[Goal, ...]:
        """The goals that are given."""
        from kernelcast.serving.goals import Goal

        given = {field.name: getattr(self, field.name) for field in fields(GoalParameters)}
        return tuple(Goal.named(name, text) for name, text in given.items() if text is not None)


@dataclass(frozen=True)
class SearchParameters(shared.PredictorParameters):
    """The search space; lists are written with commas."""

    panel: ClassVar[str | None] = "Search"

    gpus: Annotated[
        str | None,
        option(metavar="ID,..", help="GPUs to choose from; default: all with a price", values=shared.gpu_names),
    ] = None
    max_gpus: Annotated[int, option(help="GPUs at most, of one model")] = 64
    budget: Annotated[float | None, option(metavar="USD/H", help="USD per hour at most, of all GPUs")] = None
    stack: Annotated[
        str,
        option(metavar="NAME,..", help="vllm, sglang, trtllm", values=shared.stack_names, reads=shared.engine_name),
    ] = "vllm"
    dtype: Annotated[
        str | None,
        option(metavar="FORMAT,..", help="formats of weights; default: the checkpoint's, and fp8",
               values=shared.weight_formats, reads=shared.number_format),
    ] = None  # fmt: skip
    kv_dtype: shared.KvFormat = None
    tp: Annotated[str, option(metavar="N,..", help="tensor parallel sizes")] = "1,2,4,8"
    pp: Annotated[str, option(metavar="N,..", help="pipeline parallel sizes")] = "1,2"
    dp: Annotated[str | None, option(metavar="N,..", help="attention data parallel sizes (models with experts)")] = None
    ep: Annotated[str | None, option(metavar="N,..", help="expert parallel sizes")] = None
    max_num_seqs: Annotated[str | None, option(metavar="N,..", help="values of max_num_seqs")] = None
    max_num_batched_tokens: Annotated[str | None, option(metavar="N,..", help="values of max_num_batched_tokens")] = (
        None
    )
    disaggregated: Annotated[
        str,
        option(metavar="|".join(_DISAGGREGATED), help="disaggregated prefill and decode, beside aggregated",
               values=partial(tuple, _DISAGGREGATED)),
    ] = "also"  # fmt: skip
    sure: Annotated[bool, option(help="meet the goals at the slow end of the forecast interval too")] = False
    prices: shared.PricesFile = None
    price: shared.Price = None
    price_kind: shared.PriceKind = "on_demand"
    server: shared.ServerFile = None

    def grid(self) -> SearchSpace:
        """The search space."""
        from kernelcast.models.precision import CACHE, WEIGHTS
        from kernelcast.search.plan.space import SearchSpace
        from kernelcast.serving.service import read_overheads
        from kernelcast.stacks import stack

        if self.disaggregated not in _DISAGGREGATED:
            raise unknown("`disaggregated`", self.disaggregated, _DISAGGREGATED)
        gpus, unpriced, prices = self.priced_gpus()
        stacks = tuple(stack(name) for name in _split(self.stack))
        for engine in stacks:
            if not engine.scheduler:
                raise KernelcastError(f"{engine.name} has no scheduler: requests are served by vllm, sglang, trtllm")
        if self.server is not None:
            stacks = tuple(read_overheads(self.server, engine, {gpu.label for gpu in gpus}) for engine in stacks)
        formats = tuple(_split(self.dtype)) if self.dtype else None
        for name in formats or ():
            if name not in WEIGHTS:
                raise unknown("number format of weights", name, WEIGHTS)
        if self.kv_dtype is not None and self.kv_dtype not in CACHE:
            raise unknown("number format of the KV cache", self.kv_dtype, CACHE)
        if self.gpus and len(unpriced) == len(gpus):
            raise KernelcastError(f"no price of {', '.join(unpriced)}: give `price` {unpriced[0]}=USD per GPU-hour")
        numbers = {name: self._numbers(name) for name in _NUMBERS}
        return SearchSpace(
            tuple((gpu, prices[gpu.known_as]) for gpu in gpus if gpu.known_as in prices),
            stacks, self.max_gpus, formats, self.kv_dtype, numbers["tp"], numbers["pp"], numbers["dp"] or None,
            numbers["ep"] or None, numbers["max_num_seqs"] or None, numbers["max_num_batched_tokens"] or None,
            self.disaggregated, budget=math.inf if self.budget is None else self.budget,
        )  # fmt: skip

    def priced_gpus(self) -> tuple[list[Gpu], list[str], dict[str, GpuPrice]]:
        """The GPUs to choose from, those of them (or of the catalogue) without a price, and the prices."""
        from kernelcast.hardware import gpu, gpu_ids
        from kernelcast.hardware.prices import read_prices

        prices = read_prices(self.prices, self.price or (), self.price_kind)
        gpus = [gpu(name) for name in (_split(self.gpus) if self.gpus else prices)]
        if self.gpus:
            return gpus, [gpu.id for gpu in gpus if gpu.known_as not in prices], prices
        return gpus, sorted({*gpu_ids()} - {*prices}), prices

    def _numbers(self, name: str) -> tuple[int, ...]:
        text = getattr(self, name)
        if text is None:
            return ()
        try:
            numbers = tuple(dict.fromkeys(int(item) for item in text.split(",")))
        except ValueError:
            numbers = (0,)
        if min(numbers) < 1:
            raise KernelcastError(f"`{name}` takes whole numbers from 1 with commas, not {text!r}")
        return numbers


@dataclass(frozen=True, kw_only=True)
class PlanQuestion(LoadParameters, SearchParameters, GoalParameters):
    """Goals, a load, and what to search in."""

    command: ClassVar[str] = "plan"

    model: shared.ModelName

    def answer(self, report: OnProgress | None = None) -> Plan:
        """The plan. ``report`` gets how many engines are forecast, of how many."""
        from kernelcast.search.plan.plan import plan

        model, goals = shared.resolve_model(self.model), self.targets
        if not goals:
            raise KernelcastError("which goal? give a latency to keep, as in `ttft_p99` 500ms, `tpot_p99` 30ms")
        load = build_load(long_enough(self), model.max_context)
        return plan(
            model, load, goals, self.grid(), self.conditions, seed=self.seed, sure=self.sure, on_progress=report
        )

    @property
    def unpriced(self) -> list[str]:
        """GPUs that are left out because they have no price."""
        return self.priced_gpus()[1]


def _split(text: str) -> list[str]:
    names = list(dict.fromkeys(item.strip() for item in text.split(",") if item.strip()))
    if not names:
        raise KernelcastError(f"a list with commas has at least one name, not {text!r}")
    return names


def long_enough(load: AnyLoad) -> AnyLoad:
    """A minute of load, where nobody says how many requests it has: a shorter one ends before queues can grow."""
    rate = load.request_rate
    if load.num_prompts is not None or load.trace or load.stages or rate is None or not 0 < rate < math.inf:
        return load
    return replace(load, num_prompts=max(_FEWEST, min(_LARGEST, math.ceil(_LASTS_S * rate))))
