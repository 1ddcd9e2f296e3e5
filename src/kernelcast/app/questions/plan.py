"""The cheapest GPUs that keep latency goals under a load: the goals, and what to search in."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeVar

from kernelcast.app.questions.load import LoadChoice, chosen_load
from kernelcast.app.questions.shared import (
    CalibrationFile,
    ModelName,
    PredictorName,
    WeightsFolder,
    chosen_conditions,
    chosen_model,
)
from kernelcast.app.questions.words import flag_of, flags_under
from kernelcast.errors import KernelcastError, unknown

if TYPE_CHECKING:
    from kernelcast.forecast.conditions import Conditions
    from kernelcast.hardware import Gpu
    from kernelcast.hardware.prices import Price
    from kernelcast.search.goals import Goal
    from kernelcast.search.plan.grid import Grid
    from kernelcast.search.plan.plan import Plan
    from kernelcast.search.plan.search import OnProgress

_goal = flags_under("Goals (as 500ms, 0.5s, or a number of ms)")
_search = flags_under("Search")
_LASTS_S, _FEWEST, _LARGEST = 60, 1000, 8000  # of the load, where nobody says how many requests it has

_NUMBERS = ("tp", "pp", "dp", "ep", "max_num_seqs", "max_num_batched_tokens")

Time = str | None
AnyLoad = TypeVar("AnyLoad", bound=LoadChoice)


@dataclass(frozen=True)
class GoalChoice:
    """Each is named metric_statistic."""

    ttft_p99: Annotated[Time, _goal("--ttft-p99", metavar="TIME", help="time to first token, of 99 in 100")] = None
    ttft_p90: Annotated[Time, _goal("--ttft-p90", metavar="TIME", help="of 90 in 100")] = None
    ttft_p50: Annotated[Time, _goal("--ttft-p50", metavar="TIME", help="median")] = None
    ttft_mean: Annotated[Time, _goal("--ttft-mean", metavar="TIME", help="mean")] = None
    tpot_p99: Annotated[Time, _goal("--tpot-p99", metavar="TIME", help="time per output token, of 99 in 100")] = None
    tpot_p90: Annotated[Time, _goal("--tpot-p90", metavar="TIME", help="of 90 in 100")] = None
    tpot_p50: Annotated[Time, _goal("--tpot-p50", metavar="TIME", help="median")] = None
    tpot_mean: Annotated[Time, _goal("--tpot-mean", metavar="TIME", help="mean")] = None
    e2el_p99: Annotated[Time, _goal("--e2el-p99", metavar="TIME", help="end to end, of 99 in 100")] = None
    e2el_p90: Annotated[Time, _goal("--e2el-p90", metavar="TIME", help="of 90 in 100")] = None
    e2el_p50: Annotated[Time, _goal("--e2el-p50", metavar="TIME", help="median")] = None
    e2el_mean: Annotated[Time, _goal("--e2el-mean", metavar="TIME", help="mean")] = None

    @property
    def goals(self) -> list[Goal]:
        from kernelcast.search.goals import Goal, parse_ms

        found = []
        for one in fields(GoalChoice):
            text = getattr(self, one.name)
            if text is not None:
                metric, _, statistic = one.name.partition("_")
                found.append(Goal(metric, statistic, parse_ms(text, flag_of(GoalChoice, one.name))))
        return found


@dataclass(frozen=True)
class SearchChoice:
    """What to search in; lists are written with commas."""

    gpus: Annotated[
        str | None, _search("--gpus", "--gpu", metavar="ID,..", help="GPUs to choose from; default: all with a price")
    ] = None
    max_gpus: Annotated[int, _search("--max-gpus", help="GPUs at most, of one kind")] = 64
    stack: Annotated[str, _search("--stack", metavar="NAME,..", help="vllm, sglang, trtllm")] = "vllm"
    dtype: Annotated[
        str | None, _search("--dtype", metavar="FORMAT,..", help="of weights; default: the checkpoint's, and fp8")
    ] = None
    kv_dtype: Annotated[str | None, _search("--kv-dtype", "--kv-cache-dtype", metavar="FORMAT", help="of caches")] = (
        None
    )
    tp: Annotated[str, _search("--tp", metavar="N,..", help="GPUs that cut every layer")] = "1,2,4,8"
    pp: Annotated[str, _search("--pp", metavar="N,..", help="pipeline stages")] = "1,2"
    dp: Annotated[str | None, _search("--dp", metavar="N,..", help="attention-DP ranks (models with experts)")] = None
    ep: Annotated[str | None, _search("--ep", metavar="N,..", help="parts that experts are dealt out to")] = None
    max_num_seqs: Annotated[
        str | None, _search("--max-num-seqs", metavar="N,..", help="requests that run at a time, to try")
    ] = None
    max_num_batched_tokens: Annotated[
        str | None, _search("--max-num-batched-tokens", metavar="N,..", help="tokens of a step, to try")
    ] = None
    disaggregated: Annotated[
        str, _search("--disaggregated", metavar="also|only|no", help="engines that read prompts, others that decode")
    ] = "also"
    sure: Annotated[bool, _search("--sure", help="meet the goals at the slow end of the forecast too")] = False
    prices: Annotated[
        Path | None, _search("--prices", metavar="FILE", help="TOML with usd_per_hour, date and source of each GPU")
    ] = None
    price: Annotated[
        list[str] | None, _search("--price", metavar="GPU=USD", help="one price per GPU-hour; may be repeated")
    ] = None
    price_kind: Annotated[
        str, _search("--price-kind", metavar="on_demand|reserved", help="which price of a file that has both")
    ] = "on_demand"
    server: Annotated[
        Path | None, _search("--server", metavar="FILE", help="what `kernelcast replay --calibrate` learnt of a server")
    ] = None
    predictor: PredictorName = "learned"
    calibration: CalibrationFile = None
    weights: WeightsFolder = None

    @property
    def conditions(self) -> Conditions:
        return chosen_conditions(None, "model", self.predictor, self.calibration, self.weights)


@dataclass(frozen=True, kw_only=True)
class PlanQuestion(LoadChoice, SearchChoice, GoalChoice):
    """Goals, a load, and what to search in."""

    command: ClassVar[str] = "plan"

    model: ModelName

    def answer(self, told: OnProgress | None = None) -> Plan:
        """The plan. ``told`` hears how many engines are looked at, of how many."""
        from kernelcast.search.plan.plan import plan

        model, goals = chosen_model(self.model), self.goals
        if not goals:
            raise KernelcastError("which goal? give a latency to keep, as in --ttft-p99 500ms --tpot-p99 30ms")
        load = chosen_load(long_enough(self), model.max_context)
        return plan(
            model, load, goals, chosen_grid(self), self.conditions, seed=self.seed, sure=self.sure, on_progress=told
        )

    @property
    def unpriced(self) -> list[str]:
        """GPUs that are left out because nobody gave a price."""
        return prices_of(self)[1]


def chosen_grid(choice: SearchChoice) -> Grid:
    """What to search in."""
    from kernelcast.models.precision import CACHE, WEIGHTS
    from kernelcast.search.plan.grid import Grid
    from kernelcast.serving.service import read_overheads
    from kernelcast.stacks import stack

    if choice.disaggregated not in ("also", "only", "no"):
        raise unknown("--disaggregated", choice.disaggregated, ("also", "only", "no"))
    asked, unpriced, prices = prices_of(choice)
    stacks = tuple(stack(name) for name in _words(choice.stack))
    for one in stacks:
        if not one.scheduler:
            raise KernelcastError(f"{one.name} has no scheduler: requests are served by vllm, sglang, trtllm")
    if choice.server is not None:
        stacks = tuple(read_overheads(choice.server, one, {chip.label for chip in asked}) for one in stacks)
    formats = tuple(_words(choice.dtype)) if choice.dtype else None
    for name in formats or ():
        if name not in WEIGHTS:
            raise unknown("number format of weights", name, WEIGHTS)
    if choice.kv_dtype is not None and choice.kv_dtype not in CACHE:
        raise unknown("number format of the KV cache", choice.kv_dtype, CACHE)
    if choice.gpus and len(unpriced) == len(asked):
        raise KernelcastError(f"no price of {', '.join(unpriced)}: give --price {unpriced[0]}=USD per GPU-hour")
    numbers = {name: _numbers(choice, name) for name in _NUMBERS}
    return Grid(
        tuple((chip, prices[chip.known_as]) for chip in asked if chip.known_as in prices),
        stacks, choice.max_gpus, formats, choice.kv_dtype, numbers["tp"], numbers["pp"], numbers["dp"] or None,
        numbers["ep"] or None, numbers["max_num_seqs"] or None, numbers["max_num_batched_tokens"] or None,
        choice.disaggregated,
    )  # fmt: skip


def prices_of(choice: SearchChoice) -> tuple[list[Gpu], list[str], dict[str, Price]]:
    """The GPUs to choose from, those of them (or of the catalogue) that nobody gave a price of, and the prices."""
    from kernelcast.hardware import gpu, gpu_ids
    from kernelcast.hardware.prices import read_prices

    prices = read_prices(choice.prices, choice.price or (), choice.price_kind)
    asked = [gpu(name) for name in (_words(choice.gpus) if choice.gpus else prices)]
    if choice.gpus:
        return asked, [chip.id for chip in asked if chip.known_as not in prices], prices
    return asked, sorted({*gpu_ids()} - {*prices}), prices


def _words(text: str) -> list[str]:
    found = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not found:
        raise KernelcastError(f"a list with commas has at least one name, not {text!r}")
    return found


def _numbers(choice: SearchChoice, name: str) -> tuple[int, ...]:
    text = getattr(choice, name)
    if text is None:
        return ()
    try:
        found = tuple(dict.fromkeys(int(word) for word in text.split(",")))
    except ValueError:
        found = (0,)
    if min(found) < 1:
        raise KernelcastError(f"{flag_of(SearchChoice, name)} takes whole numbers from 1 with commas, not {text!r}")
    return found


def long_enough(load: AnyLoad) -> AnyLoad:
    """A minute of load, where nobody says how many requests it has: a shorter one ends before queues can grow."""
    rate = load.request_rate
    if load.num_prompts is not None or load.trace or load.stages or rate is None or not 0 < rate < math.inf:
        return load
    return replace(load, num_prompts=max(_FEWEST, min(_LARGEST, math.ceil(_LASTS_S * rate))))
