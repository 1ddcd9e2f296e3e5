"""Words that say what is asked of a server, named as in `vllm bench serve`, and the load that they make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from kernelcast.app.questions.words import flag_of, flags_under
from kernelcast.errors import KernelcastError, warn

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kernelcast.serving.load import Lengths, Load, Prompts

_option = flags_under("Load")


@dataclass(frozen=True)
class LoadChoice:
    """The words as they were given; None: not given."""

    request_rate: Annotated[
        float | None, _option("--request-rate", help="requests per second; inf, as in vLLM: all at once")
    ] = None
    num_prompts: Annotated[int | None, _option("--num-prompts", help="requests (1000)")] = None
    input_len: Annotated[int | None, _option("--input-len", "--random-input-len", help="of a prompt (1024)")] = None
    output_len: Annotated[int | None, _option("--output-len", "--random-output-len", help="of an answer (128)")] = None
    max_concurrency: Annotated[
        int | None, _option("--max-concurrency", help="requests under way at a time; more wait at the client")
    ] = None
    seed: Annotated[int, _option("--seed", help="of all that is random")] = 0
    arrivals: Annotated[
        str | None, _option("--arrivals", metavar="KIND", help="poisson, gamma, constant, bursty (on and off)")
    ] = None
    burstiness: Annotated[
        float | None, _option("--burstiness", help="shape of gamma arrivals: 1 Poisson, less in bursts, more even")
    ] = None
    burst_s: Annotated[float | None, _option("--burst-s", help="seconds that a burst lasts (10)")] = None
    pause_s: Annotated[float | None, _option("--pause-s", help="seconds between bursts (10)")] = None
    ramp_up_strategy: Annotated[
        str | None, _option("--ramp-up-strategy", metavar="KIND", help="linear, exponential: from one rate to another")
    ] = None
    ramp_up_start_rps: Annotated[float | None, _option("--ramp-up-start-rps", help="rate at the start")] = None
    ramp_up_end_rps: Annotated[float | None, _option("--ramp-up-end-rps", help="rate at the end")] = None
    stages: Annotated[
        str | None, _option("--stages", metavar="RATExSECONDS,..", help="rates one after another, as in 5x600,10x600")
    ] = None
    random_range_ratio: Annotated[
        float | None, _option("--random-range-ratio", help="lengths even within 1 -/+ this of the mean")
    ] = None
    lengths: Annotated[
        str | None, _option("--lengths", metavar="KIND", help="fixed, uniform, normal, lognormal around the mean")
    ] = None
    input_len_std: Annotated[float | None, _option("--input-len-std", help="of normal, lognormal prompts")] = None
    output_len_std: Annotated[float | None, _option("--output-len-std", help="of normal, lognormal answers")] = None
    random_prefix_len: Annotated[
        int | None, _option("--random-prefix-len", help="tokens that all prompts begin with, on top of their length")
    ] = None
    num_prefixes: Annotated[
        int | None,
        _option("--prefix-repetition-num-prefixes", "--num-prefixes", help="prefixes that prompts take turns with"),
    ] = None
    prefix_len: Annotated[
        int | None, _option("--prefix-repetition-prefix-len", "--prefix-len", help="tokens of each of them (256)")
    ] = None
    suffix_len: Annotated[
        int | None, _option("--prefix-repetition-suffix-len", "--suffix-len", help="tokens behind them (256)")
    ] = None
    num_groups: Annotated[
        int | None, _option("--num-groups", "--gsp-num-groups", help="system prompts, each of a group of users")
    ] = None
    prompts_per_group: Annotated[
        int | None, _option("--prompts-per-group", "--gsp-prompts-per-group", help="users of a group (16)")
    ] = None
    system_prompt_len: Annotated[
        int | None, _option("--system-prompt-len", "--gsp-system-prompt-len", help="tokens of it (2048)")
    ] = None
    question_len: Annotated[
        int | None, _option("--question-len", "--gsp-question-len", help="tokens that a user asks (128)")
    ] = None
    multi_turn: Annotated[bool, _option("--multi-turn", help="users of groups go on with their conversations")] = False
    trace: Annotated[
        Path | None,
        _option("--trace", metavar="FILE", help="CSV, JSONL, Parquet: arrival_s, input_tokens, output_tokens"),
    ] = None
    trace_format: Annotated[
        str | None,
        _option(
            "--trace-format", metavar="NAME", help="kernelcast, azure, mooncake, burstgpt, vidur; else by its columns"
        ),
    ] = None
    skip_bad: Annotated[bool, _option("--skip-bad", help="leave bad rows of the trace out, and sort it")] = False
    rate_scale: Annotated[float | None, _option("--rate-scale", help="send the trace so many times as fast")] = None
    limit: Annotated[int | None, _option("--limit", help="only the first so many requests of the trace")] = None

    def given(self, *names: str) -> list[str]:
        """Which of these options were given, by their flags."""
        return [
            flag_of(LoadChoice, name)
            for name in names
            if getattr(self, name) is not None and getattr(self, name) is not False
        ]


_TIMES = (
    "request_rate", "arrivals", "burstiness", "burst_s", "pause_s", "ramp_up_strategy", "ramp_up_start_rps",
    "ramp_up_end_rps", "stages",
)  # fmt: skip
_RAMP = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
_REPEATED = ("num_prefixes", "prefix_len", "suffix_len")
_GROUPS = ("num_groups", "prompts_per_group", "system_prompt_len", "question_len", "multi_turn")
_SPREAD = ("random_range_ratio", "lengths", "input_len_std", "output_len_std")
_SIZES = ("input_len", "output_len", "random_prefix_len", *_SPREAD, *_REPEATED, *_GROUPS)
_OF_TRACE = ("trace_format", "skip_bad", "rate_scale", "limit")


def chosen_load(choice: LoadChoice, max_context: int = 0) -> Load:
    """The load that the options ask for; ``max_context``: tokens that a prompt and its answer may have (0: any)."""
    for name in ("num_prompts", "max_concurrency", "limit"):
        value = getattr(choice, name)
        if value is not None and value < 1:
            raise KernelcastError(f"{flag_of(LoadChoice, name)} is 1 or more, not {value}")
    if not 0 <= choice.seed < 2**32:
        raise KernelcastError(f"--seed is a whole number from 0 to {2**32 - 1}, not {choice.seed}")
    load = _generated(choice) if choice.trace is None else _of_trace(choice, choice.trace, max_context)
    if max_context and load.longest > max_context:
        raise KernelcastError(
            f"a prompt and its answer have {load.longest} tokens together, and the model takes {max_context}"
        )
    return load


def _of_trace(choice: LoadChoice, path: Path, max_context: int) -> Load:
    from kernelcast.serving.traces import read_trace

    _refuse(choice.given(*_SIZES), "--trace lists every request with its sizes")
    trace = read_trace(path, choice.trace_format or "", skip_bad=choice.skip_bad, max_context=max_context)
    if told := trace.told():
        warn(f"{path}: {told}")
    concurrency = choice.max_concurrency or 0
    if trace.arrivals_s is None and choice.given(*_TIMES):
        _refuse(choice.given("rate_scale"), f"{path} has no times to scale")
        times, _ = _times(choice, choice.num_prompts or choice.limit or len(trace.inputs))
        return trace.load_at(times, concurrency)
    _refuse(choice.given("num_prompts", *_TIMES), "--trace says when requests come (--rate-scale, --limit change it)")
    load = trace.load(concurrency)
    return load.take(slice(choice.limit)).faster(1.0 if choice.rate_scale is None else choice.rate_scale)


def _generated(choice: LoadChoice) -> Load:
    from kernelcast.serving.load import Load

    _refuse(choice.given(*_OF_TRACE), "there is no --trace that they are of")
    if not choice.given("num_prompts", "max_concurrency", *_TIMES):
        raise KernelcastError(
            "which load? give --trace FILE, or --request-rate, as in --request-rate 4 --num-prompts 200"
        )
    count = 1000 if choice.num_prompts is None else choice.num_prompts
    if choice.stages is None:
        prompts = _prompts(choice, count)
        times, stages = _times(choice, len(prompts.inputs))
    else:
        _refuse(choice.given("num_prompts"), "--stages say how many requests there are")
        times, stages = _times(choice, 0)
        prompts = _prompts(choice, len(times))
        times, stages = times[: len(prompts.inputs)], None if stages is None else stages[: len(prompts.inputs)]
    return Load(times, prompts.inputs, prompts.outputs, prompts.shared, choice.max_concurrency or 0, stages=stages)


def _times(choice: LoadChoice, count: int) -> tuple[NDArray[np.float64], NDArray[np.int64] | None]:
    """When requests come, and of which stage each is."""
    from kernelcast.serving.load import arrivals, ramp, staged, vllm_draws

    draws = vllm_draws(choice.seed)
    shape = 1.0 if choice.burstiness is None else choice.burstiness
    kind = choice.arrivals or ("poisson" if shape == 1 else "gamma")
    if choice.burstiness is not None and kind not in ("gamma", "poisson"):
        raise KernelcastError(f"--burstiness is of gamma arrivals, not of {kind}")
    if kind != "bursty":
        _refuse(choice.given("burst_s", "pause_s"), "they are of --arrivals bursty")
    if choice.stages is not None:
        _refuse(choice.given("request_rate", *_RAMP), "--stages say the rates")
        return staged(parse_stages(choice.stages), draws, kind, shape)
    if choice.given(*_RAMP):
        _refuse(choice.given("request_rate"), "--ramp-up-start-rps and --ramp-up-end-rps say the rates")
        if len(choice.given(*_RAMP)) < len(_RAMP) or kind not in ("poisson", "gamma"):
            raise KernelcastError(
                "a ramp needs --ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps, and no other --arrivals"
            )
        start, end = choice.ramp_up_start_rps or 0.0, choice.ramp_up_end_rps or 0.0
        return ramp(count, start, end, draws, choice.ramp_up_strategy or "", shape), None
    rate = float("inf") if choice.request_rate is None else choice.request_rate
    on_s, off_s = (10.0 if value is None else value for value in (choice.burst_s, choice.pause_s))
    return arrivals(count, rate, draws, kind, burstiness=shape, on_s=on_s, off_s=off_s), None


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
            raise KernelcastError(f"--stages are RATExSECONDS, as in 5x600,10x600, not {part.strip()!r}")
    return stages


def _prompts(choice: LoadChoice, count: int) -> Prompts:
    """How long prompts and answers are, and what prompts share."""
    import numpy as np

    from kernelcast.serving.load import random_prompts, repeated_prefixes, shared_prefix

    draws = np.random.default_rng(choice.seed)
    outputs = _lengths(choice, 128 if choice.output_len is None else choice.output_len, choice.output_len_std)
    if repeated := choice.given(*_REPEATED):
        _refuse(choice.given("input_len", "random_prefix_len", "input_len_std", *_GROUPS), f"{repeated[0]} says them")
        prefixes, prefix, suffix = _or(choice, num_prefixes=10, prefix_len=256, suffix_len=256)
        return repeated_prefixes(count, prefix, suffix, prefixes, outputs, draws)
    if choice.given(*_GROUPS):
        _refuse(choice.given("input_len", "random_prefix_len"), "--question-len and --system-prompt-len say them")
        words = {"num_groups": 64, "prompts_per_group": 16, "system_prompt_len": 2048, "question_len": 128}
        groups, users, system, question = _or(choice, **words)
        asked = _lengths(choice, question, choice.input_len_std)
        return shared_prefix(count, groups, users, system, asked, outputs, draws, multi_turn=choice.multi_turn)
    inputs: Lengths = _lengths(choice, 1024 if choice.input_len is None else choice.input_len, choice.input_len_std)
    return random_prompts(count, inputs, outputs, draws, choice.random_prefix_len or 0)


def _lengths(choice: LoadChoice, mean: int, std: float | None) -> Lengths:
    from kernelcast.serving.load import Lengths

    stds = choice.given("input_len_std", "output_len_std")
    kind = choice.lengths or ("uniform" if choice.random_range_ratio else "lognormal" if stds else "fixed")
    if kind != "uniform":
        _refuse(choice.given("random_range_ratio"), "it is of uniform lengths")
    if kind not in ("normal", "lognormal"):
        _refuse(stds, "they are of --lengths normal or lognormal")
    return Lengths(mean, kind, ratio=choice.random_range_ratio or 0.0, std=std or 0.0)


def _or(choice: LoadChoice, **usual: int) -> Iterable[int]:
    """Options, or what is usual."""
    return [value if (given := getattr(choice, name)) is None else given for name, value in usual.items()]


def _refuse(given: list[str], because: str) -> None:
    if given:
        raise KernelcastError(f"{because}: leave out {', '.join(given)}")
