"""Loads that are generated: when requests are sent, how long prompts and outputs are, and which prefixes they share.

Intervals are drawn as `vllm bench serve` draws them: gamma with shape ``burstiness`` (1: Poisson), stretched so that
the last request is sent at count / rate. With ``vllm_draws(seed)`` they come from the same random numbers too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kernelcast.errors import KernelcastError, unknown
from kernelcast.serving.load.load import Pieces

Draws = np.random.Generator | np.random.RandomState
Seconds = NDArray[np.float64]

PROCESSES = ("poisson", "gamma", "constant", "bursty")
RAMPS = ("linear", "exponential")


def vllm_draws(seed: int) -> np.random.RandomState:
    """NumPy's global random numbers after np.random.seed(seed), which vLLM draws intervals from."""
    if not 0 <= seed < 2**32:
        raise KernelcastError(f"a seed is a whole number from 0 to {2**32 - 1}, not {seed}")
    return np.random.RandomState(seed)


def arrivals(
    count: int,
    rate: float,
    draws: Draws,
    kind: str = "poisson",
    *,
    burstiness: float = 1.0,
    on_s: float = 10.0,
    off_s: float = 10.0,
) -> Seconds:
    """``count`` requests at ``rate`` per second; at an infinite rate all come at once.

    bursty: Poisson for ``on_s`` seconds, nothing for ``off_s``, again and again; ``rate`` is the mean of both.
    """
    _check(count, rate, burstiness)
    if kind not in PROCESSES:
        raise unknown("kind of arrivals", kind, PROCESSES)
    if kind == "poisson" and burstiness != 1:
        raise KernelcastError(f"poisson arrivals have burstiness 1, not {burstiness:g}; take gamma")
    if np.isinf(rate):
        return np.zeros(count)
    if kind == "constant" or np.isinf(burstiness):
        return np.arange(count) / rate
    if kind == "bursty":
        return _bursty(count, rate, draws, on_s, off_s)
    return _spread(count, count / rate, burstiness, draws)


def ramp(
    count: int, start: float, end: float, draws: Draws, strategy: str = "linear", burstiness: float = 1.0
) -> Seconds:
    """The rate goes from ``start`` to ``end`` requests per second over the ``count`` requests, as in vLLM:
    by the number of a request, not by time."""
    if strategy not in RAMPS:
        raise unknown("ramp-up strategy", strategy, RAMPS)
    for rate in (start, end):
        _check(count, rate, burstiness)
        if np.isinf(rate):
            raise KernelcastError("a ramp goes between two rates in requests per second, neither of them inf")
    progress = np.arange(count) / max(count - 1, 1)
    rates = start + (end - start) * progress if strategy == "linear" else start * (end / start) ** progress
    if np.isinf(burstiness):
        return np.cumsum(1 / rates)
    return np.cumsum(draws.gamma(burstiness, 1 / (rates * burstiness)))


def staged(
    stages: Sequence[tuple[float, float]], draws: Draws, kind: str = "poisson", burstiness: float = 1.0
) -> tuple[Seconds, NDArray[np.int64]]:
    """Stages of (requests per second, seconds), one after another: arrivals, and the stage of each.

    A stage has rate x seconds requests, as in inference-perf; each begins when the one before it is over.
    """
    if not stages:
        raise KernelcastError("a load in stages needs at least one, as (requests per second, seconds)")
    if kind == "bursty":
        raise KernelcastError("stages are poisson, gamma or constant; bursts would cross their ends")
    times, numbers, start_s = [], [], 0.0
    for number, (rate, seconds) in enumerate(stages):
        if not (0 < rate < np.inf and 0 < seconds < np.inf):
            raise KernelcastError(f"stage {number}: a rate and seconds above 0, not {rate:g} for {seconds:g} s")
        count = round(rate * seconds)
        if count < 1:
            raise KernelcastError(f"stage {number}: {rate:g} requests/s for {seconds:g} s are not one request")
        times.append(start_s + arrivals(count, count / seconds, draws, kind, burstiness=burstiness))
        numbers.append(np.full(count, number, dtype=np.int64))
        start_s += seconds
    return np.concatenate(times), np.concatenate(numbers)


def _spread(count: int, seconds: float, burstiness: float, draws: Draws) -> Seconds:
    """Gamma intervals that fill ``seconds``."""
    times = np.cumsum(draws.gamma(burstiness, 1.0, count))
    if times[-1] == 0:  # a tiny shape draws nothing but zeros
        return np.full(count, seconds)
    return np.asarray(times * (seconds / times[-1]))


def _bursty(count: int, rate: float, draws: Draws, on_s: float, off_s: float) -> Seconds:
    """Poisson on a clock that runs only in the bursts."""
    if not (0 < on_s < np.inf and 0 <= off_s < np.inf):
        raise KernelcastError(f"a burst lasts more than 0 s and a pause 0 s or more, not {on_s:g} and {off_s:g}")
    share = on_s / (on_s + off_s)
    running = _spread(count, count / rate * share, 1.0, draws)
    return np.asarray(running + np.floor(running / on_s) * off_s)


def _check(count: int, rate: float, burstiness: float) -> None:
    if count < 1:
        raise KernelcastError(f"a load needs at least one request, not {count}")
    if not rate > 0:
        raise KernelcastError(f"a request rate is above 0 requests/s (inf: all at once), not {rate:g}")
    if not burstiness > 0:
        raise KernelcastError(f"burstiness is above 0 (1: Poisson, less: in bursts, more: even), not {burstiness:g}")


Tokens = NDArray[np.int64]

DISTRIBUTIONS = ("fixed", "uniform", "normal", "lognormal")


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts around a mean.

    uniform: from floor(mean x (1 - ratio)) to ceil(mean x (1 + ratio)), as vLLM's --random-range-ratio. normal and
    lognormal: ``mean`` and ``std`` are those of the lengths themselves, before ``low`` and ``high`` (0: none) cut them.
    """

    mean: float
    kind: str = "fixed"
    ratio: float = 0.0
    std: float = 0.0
    low: int = 1
    high: int = 0

    def __post_init__(self) -> None:
        if self.kind not in DISTRIBUTIONS:
            raise unknown("distribution of lengths", self.kind, DISTRIBUTIONS)
        if not 1 <= self.mean < math.inf or (self.kind in ("fixed", "uniform") and self.mean != int(self.mean)):
            raise KernelcastError(f"a length is a whole number of tokens from 1 on, not {self.mean:g}")
        if not 0 <= self.ratio < 1:
            raise KernelcastError(f"a range ratio is from 0 to below 1, not {self.ratio:g}")
        if not 0 <= self.std < math.inf:
            raise KernelcastError(f"a standard deviation of lengths is 0 or more, not {self.std:g}")
        if self.low < 1 or (self.high and self.high < self.low):
            raise KernelcastError(
                f"lengths lie between 1 or more and no less than that, not {self.low} and {self.high}"
            )

    def draw(self, count: int, draws: np.random.Generator) -> Tokens:
        if self.kind == "fixed":
            return np.full(count, int(self.mean), dtype=np.int64)
        if self.kind == "uniform":
            low = max(math.floor(self.mean * (1 - self.ratio)), 1)
            return draws.integers(low, math.ceil(self.mean * (1 + self.ratio)) + 1, size=count)
        if self.kind == "normal":
            found = draws.normal(self.mean, self.std, count)
        else:
            variance = math.log1p((self.std / self.mean) ** 2)
            found = draws.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), count)
        return np.clip(np.rint(found), self.low, self.high or None).astype(np.int64)


def empirical(count: int, inputs: ArrayLike, outputs: ArrayLike, draws: np.random.Generator) -> tuple[Tokens, Tokens]:
    """Prompts and answers of requests that were seen, drawn with replacement; a prompt keeps its answer."""
    seen, answers = np.asarray(inputs, dtype=np.int64), np.asarray(outputs, dtype=np.int64)
    if not len(seen) or len(seen) != len(answers):
        raise KernelcastError(f"lengths are drawn from as many prompts as answers, not {len(seen)} and {len(answers)}")
    rows = draws.integers(0, len(seen), size=count)
    return seen[rows], answers[rows]


@dataclass(frozen=True, eq=False)
class Prompts:
    """Lengths of requests, and what they share: as ``Load`` has them, without times."""

    inputs: Tokens
    outputs: Tokens
    shared: tuple[Pieces, ...] = ()


def random_prompts(
    count: int, inputs: Lengths, outputs: Lengths, draws: np.random.Generator, prefix_len: int = 0
) -> Prompts:
    """As vLLM's random dataset: all begin with the same ``prefix_len`` tokens, which come on top of the length."""
    if prefix_len < 0:
        raise KernelcastError(f"a prefix has 0 tokens or more, not {prefix_len}")
    own = inputs.draw(count, draws)
    answers = outputs.draw(count, draws)
    return Prompts(own + prefix_len, answers, (((0, prefix_len),),) * count if prefix_len else ())


def repeated_prefixes(
    count: int, prefix_len: int, suffix_len: int, prefixes: int, outputs: Lengths, draws: np.random.Generator
) -> Prompts:
    """As vLLM's prefix_repetition dataset: each of several prefixes begins the same number of prompts, in random
    order. Where the prefixes do not divide the count, there are fewer prompts than asked for, as there."""
    if min(prefix_len, suffix_len, prefixes) < 1:
        raise KernelcastError("prefixes, their tokens and the tokens after them are 1 or more each")
    if count < prefixes:
        raise KernelcastError(f"{prefixes} prefixes need as many requests or more, not {count}")
    order = draws.permutation(np.repeat(np.arange(prefixes), count // prefixes))
    inputs = np.full(len(order), prefix_len + suffix_len, dtype=np.int64)
    return Prompts(inputs, outputs.draw(len(order), draws), tuple(((int(p), prefix_len),) for p in order))


def shared_prefix(
    count: int,
    groups: int,
    prompts_per_group: int,
    system_prompt_len: int,
    questions: Lengths,
    outputs: Lengths,
    draws: np.random.Generator,
    *,
    multi_turn: bool = False,
) -> Prompts:
    """As inference-perf's shared-prefix data: ``groups`` system prompts, each before the questions of as many users;
    requests go round the users in one random order. A user who comes again asks the same question: the same prompt,
    or with ``multi_turn`` the conversation so far and the question behind it."""
    if min(groups, prompts_per_group) < 1 or system_prompt_len < 0:
        raise KernelcastError("groups and prompts per group are 1 or more, a system prompt has 0 tokens or more")
    users = groups * prompts_per_group
    group = draws.permutation(np.repeat(np.arange(groups), prompts_per_group))
    asked, answered = questions.draw(users, draws), outputs.draw(users, draws)
    user = np.arange(count) % users
    before = np.arange(count) // users * (asked + answered)[user] if multi_turn else np.zeros(count, dtype=np.int64)
    own = before + asked[user]
    system = [((g, system_prompt_len),) if system_prompt_len else () for g in range(groups)]
    shared = tuple(
        (*system[group[who]], (groups + who, tokens)) for who, tokens in zip(user.tolist(), own.tolist(), strict=True)
    )
    return Prompts(system_prompt_len + own, answered[user], shared)


def spread_total(total: int, count: int) -> Tokens:
    """``total`` tokens over ``count`` requests as evenly as whole numbers allow, each at least one."""
    least = max(total, count)
    return np.diff(np.arange(count + 1, dtype=np.int64) * least // count)


def scaled_to(lengths: Sequence[int] | Tokens, total: int) -> Tokens:
    """Lengths in the same proportions that add up to ``total``, each at least one."""
    parts = np.asarray(lengths, dtype=np.float64)
    ends = np.rint(np.cumsum(parts) * (max(total, len(parts)) / parts.sum()))
    return np.maximum(np.diff(ends, prepend=0.0), 1).astype(np.int64)
