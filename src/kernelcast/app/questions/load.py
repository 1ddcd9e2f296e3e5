"""The load of a server, with the parameters of `vllm bench serve`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from kernelcast.app.questions.parameters import Question, option
from kernelcast.app.questions.shared import LONGEST, MOST_REQUESTS, InputLen, OutputLen, Seed, names_of
from kernelcast.errors import KernelcastError, warn

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kernelcast.serving.load import Lengths, Load, Prompts

Integer = int | None
Real = float | None
Text = str | None


@dataclass(frozen=True)
class LoadParameters(Question):
    """Requests and when they arrive; None: not given."""

    panel: ClassVar[str | None] = "Load"

    request_rate: Annotated[Real, option(help="requests per second; inf, as in vLLM: all at once")] = None
    dataset_name: Annotated[
        Text,
        option(metavar="NAME", help="as the benchmarks call it: random, prefix_repetition, generated-shared-prefix",
               values=partial(names_of, "app.questions.load", "DATASETS")),
    ] = None  # fmt: skip
    num_prompts: Annotated[Integer, option(help="number of requests", unless_given=1000, maximum=MOST_REQUESTS)] = None
    input_len: InputLen = None
    output_len: OutputLen = None
    max_concurrency: Annotated[Integer, option(help="concurrent requests at most; others wait at the client")] = None
    seed: Seed = 0
    arrivals: Annotated[
        Text,
        option(metavar="PROCESS", help="poisson, gamma, constant, bursty (on and off)",
               values=partial(names_of, "serving.load", "PROCESSES")),
    ] = None  # fmt: skip
    burstiness: Annotated[Real, option(help="shape of gamma arrivals: 1 Poisson, below in bursts, above more even")] = (
        None
    )
    burst_s: Annotated[Real, option(help="seconds of a burst", unless_given=10.0)] = None
    pause_s: Annotated[Real, option(help="seconds between bursts", unless_given=10.0)] = None
    ramp_up_strategy: Annotated[
        Text,
        option(metavar="NAME", help="linear, exponential: from one rate to another",
               values=partial(names_of, "serving.load", "RAMPS")),
    ] = None  # fmt: skip
    ramp_up_start_rps: Annotated[Real, option(help="rate at the start")] = None
    ramp_up_end_rps: Annotated[Real, option(help="rate at the end")] = None
    stages: Annotated[Text, option(metavar="RATExSECONDS,..", help="successive rates, as in 5x600,10x600")] = None
    random_range_ratio: Annotated[Real, option(help="lengths uniform within 1 -/+ this of the mean")] = None
    lengths: Annotated[
        Text,
        option(metavar="DISTRIBUTION", help="fixed, uniform, normal, lognormal, exponential around the mean",
               values=partial(names_of, "serving.load", "DISTRIBUTIONS")),
    ] = None  # fmt: skip
    input_len_std: Annotated[Real, option(help="standard deviation of normal, lognormal prompt lengths")] = None
    output_len_std: Annotated[Real, option(help="standard deviation of normal, lognormal output lengths")] = None
    random_prefix_len: Annotated[
        Integer, option(help="prefix tokens that all prompts share, beyond --input-len", maximum=LONGEST)
    ] = None
    num_prefixes: Annotated[
        Integer, option(help="prefixes that prompts share", unless_given=10, maximum=MOST_REQUESTS)
    ] = None
    prefix_len: Annotated[Integer, option(help="tokens of such a prefix", unless_given=256, maximum=LONGEST)] = None
    suffix_len: Annotated[Integer, option(help="tokens after the prefix", unless_given=256, maximum=LONGEST)] = None
    num_groups: Annotated[
        Integer, option(help="system prompts, one a group of users", unless_given=64, maximum=MOST_REQUESTS)
    ] = None
    prompts_per_group: Annotated[Integer, option(help="users of a group", unless_given=16, maximum=MOST_REQUESTS)] = (
        None
    )
    system_prompt_len: Annotated[
        Integer, option(help="tokens of a system prompt", unless_given=2048, maximum=LONGEST)
    ] = None
    question_len: Annotated[Integer, option(help="tokens of a user's question", unless_given=128, maximum=LONGEST)] = (
        None
    )
    multi_turn: Annotated[bool, option(help="users of groups continue their conversations")] = False
    trace: Annotated[
        Path | None, option(metavar="FILE", help="CSV, JSONL, Parquet: arrival_s, input_tokens, output_tokens")
    ] = None
    trace_format: Annotated[
        Text, option(metavar="NAME", help="kernelcast, azure, mooncake, burstgpt, vidur; default: by its columns")
    ] = None
    skip_bad: Annotated[bool, option(help="leave bad rows of the trace out, and sort it")] = False
    rate_scale: Annotated[Real, option(help="multiply the trace's request rate by this")] = None
    limit: Annotated[Integer, option(help="only the first so many requests of the trace")] = None


_TIMES = (
    "request_rate", "arrivals", "burstiness", "burst_s", "pause_s", "ramp_up_strategy", "ramp_up_start_rps",
    "ramp_up_end_rps", "stages",
)  # fmt: skip
_RAMP = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
_REPEATED = ("num_prefixes", "prefix_len", "suffix_len")
_GROUPS = ("num_groups", "prompts_per_group", "system_prompt_len", "question_len", "multi_turn")
_SPREAD = ("random_range_ratio", "lengths", "input_len_std", "output_len_std")
_SIZES = ("dataset_name", "input_len", "output_len", "random_prefix_len", *_SPREAD, *_REPEATED, *_GROUPS)
_OF_TRACE = ("trace_format", "skip_bad", "rate_scale", "limit")
# of `vllm bench serve` and SGLang's bench_serving, by the parameters that they have; others are files of prompts
DATASETS = {
    **dict.fromkeys(("random", "random-ids"), (*_REPEATED, *_GROUPS)),
    "prefix_repetition": ("input_len", "random_prefix_len", *_GROUPS),
    "generated-shared-prefix": ("input_len", "random_prefix_len", *_REPEATED),
}  # fmt: skip


def build_load(parameters: LoadParameters, max_context: int = 0, *, at_once: bool = False) -> Load:
    """The load of the parameters; ``max_context``: tokens of a prompt and its output at most (0: any). ``at_once``: no
    request waits for a moment to arrive."""
    for name in ("num_prompts", "max_concurrency", "limit"):
        value = getattr(parameters, name)
        if value is not None and value < 1:
            raise KernelcastError(f"`{name}` must be 1 or more, not {value}")
    _check_dataset(parameters)
    if not 0 <= parameters.seed < 2**32:
        raise KernelcastError(f"`seed` must be a whole number from 0 to {2**32 - 1}, not {parameters.seed}")
    if at_once:
        parameters.refuse((*_TIMES, "rate_scale", "multi_turn"), "`offline` has all requests at once")
    path = parameters.trace
    load = _generated(parameters, at_once) if path is None else _of_trace(parameters, path, max_context, at_once)
    if max_context and load.longest > max_context:
        by = "`max_model_len` is" if getattr(parameters, "max_model_len", None) == max_context else "the model takes"
        raise KernelcastError(f"a prompt and its output have {load.longest} tokens together, and {by} {max_context}")
    return load


def _check_dataset(parameters: LoadParameters) -> None:
    name = parameters.dataset_name
    if name is None:
        return
    if name not in DATASETS:
        raise KernelcastError(
            f"`dataset_name` {name!r} is of prompts that are not here: give their lengths with `trace`, or one of "
            f"{', '.join(DATASETS)}"
        )
    parameters.refuse(DATASETS[name], f"`dataset_name` {name} does not take them")


def _of_trace(parameters: LoadParameters, path: Path, max_context: int, at_once: bool) -> Load:
    import numpy as np

    from kernelcast.serving.traces import read_trace

    parameters.refuse(_SIZES, "`trace` lists every request with its sizes")
    trace = read_trace(path, parameters.trace_format or "", skip_bad=parameters.skip_bad, max_context=max_context)
    if problems := trace.problems():
        warn(f"{path}: {problems}")
    concurrency = parameters.max_concurrency or 0
    if at_once:
        count = parameters.num_prompts or parameters.limit or len(trace.inputs)
        return trace.load_at(np.zeros(count), concurrency)
    if trace.arrivals_s is None and parameters.given(*_TIMES):
        parameters.refuse(("rate_scale",), f"{path} has no times to scale")
        times, _ = _times(parameters, parameters.num_prompts or parameters.limit or len(trace.inputs))
        return trace.load_at(times, concurrency)
    parameters.refuse(("num_prompts", *_TIMES), "`trace` says when requests arrive (`rate_scale`, `limit` change it)")
    load = trace.load(concurrency)
    return load.take(slice(parameters.limit)).faster(1.0 if parameters.rate_scale is None else parameters.rate_scale)


def _generated(parameters: LoadParameters, at_once: bool) -> Load:
    from kernelcast.serving.load import Load

    parameters.refuse(_OF_TRACE, "there is no `trace`")
    if not at_once and not parameters.given("num_prompts", "max_concurrency", *_TIMES):
        raise KernelcastError("which load? give `trace`, or `request_rate` and `num_prompts`, such as 4 and 200")
    if parameters.stages is None:
        prompts = _prompts(parameters, parameters.value("num_prompts"))
        times, stages = _times(parameters, len(prompts.inputs))
    else:
        parameters.refuse(("num_prompts",), "`stages` gives the number of requests")
        times, stages = _times(parameters, 0)
        prompts = _prompts(parameters, len(times))
        times, stages = times[: len(prompts.inputs)], None if stages is None else stages[: len(prompts.inputs)]
    return Load(times, prompts.inputs, prompts.outputs, prompts.shared, parameters.max_concurrency or 0, stages=stages)


def _times(parameters: LoadParameters, count: int) -> tuple[NDArray[np.float64], NDArray[np.int64] | None]:
    """When requests arrive, and of which stage each is."""
    from kernelcast.serving.load import arrivals, ramp, staged, vllm_draws

    draws = vllm_draws(parameters.seed)
    shape = 1.0 if parameters.burstiness is None else parameters.burstiness
    process = parameters.arrivals or ("poisson" if shape == 1 else "gamma")
    if parameters.burstiness is not None and process not in ("gamma", "poisson"):
        raise KernelcastError(f"`burstiness` is of gamma arrivals, not of {process}")
    if process != "bursty":
        parameters.refuse(("burst_s", "pause_s"), "only `arrivals` bursty takes them")
    if parameters.stages is not None:
        parameters.refuse(("request_rate", *_RAMP), "`stages` gives the rates")
        return staged(parse_stages(parameters.stages), draws, process, shape)
    if ramp_up := parameters.given(*_RAMP):
        parameters.refuse(("request_rate",), "`ramp_up_start_rps` and `ramp_up_end_rps` give the rates")
        if len(ramp_up) < len(_RAMP) or process not in ("poisson", "gamma"):
            raise KernelcastError(
                "a ramp needs `ramp_up_strategy`, `ramp_up_start_rps` and `ramp_up_end_rps`, and no other `arrivals`"
            )
        start, end = parameters.ramp_up_start_rps or 0.0, parameters.ramp_up_end_rps or 0.0
        return ramp(count, start, end, draws, parameters.ramp_up_strategy or "", shape), None
    rate = float("inf") if parameters.request_rate is None else parameters.request_rate
    on_s, off_s = parameters.value("burst_s"), parameters.value("pause_s")
    return arrivals(count, rate, draws, process, burstiness=shape, on_s=on_s, off_s=off_s), None


def parse_stages(text: str) -> list[tuple[float, float]]:
    """'5x600,10x600' as rates and seconds."""
    stages = []
    for part in text.split(","):
        rate, cross, seconds = part.lower().partition("x")
        try:
            stages.append((float(rate), float(seconds)))
        except ValueError:
            cross = ""
        if not cross:
            raise KernelcastError(f"`stages` are RATExSECONDS, as in 5x600,10x600, not {part.strip()!r}")
    return stages


def _prompts(parameters: LoadParameters, count: int) -> Prompts:
    """The lengths of prompts and outputs, and the prefixes that prompts share."""
    import numpy as np

    from kernelcast.serving.load import random_prompts, repeated_prefixes, shared_prefix

    draws = np.random.default_rng(parameters.seed)
    outputs = _lengths(parameters, parameters.value("output_len"), parameters.output_len_std)
    repeated = parameters.given(*_REPEATED)
    if repeated or parameters.dataset_name == "prefix_repetition":
        parameters.refuse(
            ("input_len", "random_prefix_len", "input_len_std", *_GROUPS),
            f"{(repeated or ['`dataset_name`'])[0]} gives the lengths",
        )
        prefixes, prefix, suffix = map(parameters.value, _REPEATED)
        return repeated_prefixes(count, prefix, suffix, prefixes, outputs, draws)
    if parameters.given(*_GROUPS) or parameters.dataset_name == "generated-shared-prefix":
        parameters.refuse(("input_len", "random_prefix_len"), "`question_len` and `system_prompt_len` give the lengths")
        groups, users, system, question = map(parameters.value, _GROUPS[:4])
        questions = _lengths(parameters, question, parameters.input_len_std)
        return shared_prefix(count, groups, users, system, questions, outputs, draws, multi_turn=parameters.multi_turn)
    inputs = _lengths(parameters, parameters.value("input_len"), parameters.input_len_std)
    return random_prompts(count, inputs, outputs, draws, parameters.random_prefix_len or 0)


def _lengths(parameters: LoadParameters, mean: int, std: float | None) -> Lengths:
    from kernelcast.serving.load import Lengths

    stds = parameters.given("input_len_std", "output_len_std")
    default = "uniform" if parameters.random_range_ratio else "lognormal" if stds else "fixed"
    distribution = parameters.lengths or default
    if distribution != "uniform":
        parameters.refuse(("random_range_ratio",), "only uniform `lengths` take it")
    if distribution not in ("normal", "lognormal"):
        parameters.refuse(("input_len_std", "output_len_std"), "only `lengths` normal or lognormal take them")
    return Lengths(mean, distribution, ratio=parameters.random_range_ratio or 0.0, std=std or 0.0)
