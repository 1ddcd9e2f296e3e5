"""Loads: when requests are sent, how long prompts and outputs are, and which prefixes they share.

Intervals are drawn as `vllm bench serve` draws them: gamma with shape ``burstiness`` (1: Poisson), stretched so that
the last request is sent at count / rate. With ``vllm_draws(seed)`` they come from the same random numbers too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kernelcast._moved import moved_names
from kernelcast.errors import KernelcastError, unknown

Pieces = tuple[tuple[int, int], ...]


if not TYPE_CHECKING:  # names of 0.2
    __getattr__ = moved_names(
        __name__,
        {"read_bench": "kernelcast.serving.bench.read_bench", "read_trace": "kernelcast.serving.traces.read_trace"},
    )


@dataclass(frozen=True, eq=False)
class Load:
    """Requests over time, one entry each, by arrival.

    ``shared`` has, of each request, the pieces that its prompt begins with and that other prompts may begin with too,
    as (stream, tokens): the first ``tokens`` tokens of the token stream ``stream``; the rest of the prompt is not
    shared. A system prompt of 100 tokens is ((3, 100),). A turn of a chat is one piece over the whole prompt:
    where pieces cover the prompt, the answer goes on in the last stream, so that the next turn finds it cached.
    """

    arrivals_s: NDArray[np.float64]  # not decreasing; the earliest moment that each is sent
    inputs: NDArray[np.int64]  # tokens of the prompt
    outputs: NDArray[np.int64]  # tokens of the output
    shared: tuple[Pieces, ...] = ()  # empty: nothing is shared
    max_concurrency: int = 0  # 0: open loop; else a request is sent only when fewer are running
    ids: tuple[str, ...] = ()  # request ids of a file; empty: 0, 1, 2, ..
    stages: NDArray[np.int64] | None = None  # which stage (0, 1, ..) each belongs to
    follows: NDArray[np.int64] | None = None  # the request whose output each waits for, by index; -1: none

    def __post_init__(self) -> None:
        object.__setattr__(self, "arrivals_s", _array(self.arrivals_s, np.float64))
        for name in ("inputs", "outputs"):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        if self.stages is not None:
            object.__setattr__(self, "stages", _whole("stages", self.stages))
        self._check_lengths()
        _check_times(self.arrivals_s)
        for name in ("inputs", "outputs"):
            tokens = getattr(self, name)
            if tokens.min() < 1:
                row = int(np.argmax(tokens < 1))
                raise KernelcastError(f"request {row}: {name} must be at least 1 token, not {tokens[row]}")
        if self.follows is not None:
            object.__setattr__(self, "follows", _whole("follows", self.follows))
            if (self.follows >= np.arange(len(self))).any() or self.follows.min() < -1:
                raise KernelcastError("a request follows one before it (by index), or none (-1)")
        if self.max_concurrency < 0:
            raise KernelcastError(f"max_concurrency is 0 (no limit) or more, not {self.max_concurrency}")
        if self.stages is not None and self.stages.min() < 0:
            raise KernelcastError(f"stages are counted from 0, not {self.stages.min()}")
        self._check_shared()

    def _check_lengths(self) -> None:
        if not len(self.arrivals_s):
            raise KernelcastError("a load needs at least one request")
        lists = {"inputs": self.inputs, "outputs": self.outputs}
        lists |= {name: getattr(self, name) for name in ("shared", "ids") if getattr(self, name)}
        lists |= {name: getattr(self, name) for name in ("stages", "follows") if getattr(self, name) is not None}
        for name, values in lists.items():
            if len(values) != len(self.arrivals_s):
                raise KernelcastError(f"{name} has {len(values)} entries for {len(self.arrivals_s)} arrivals")

    def _check_shared(self) -> None:
        for row, pieces in enumerate(self.shared):
            if not pieces:
                continue
            if any(stream < 0 or tokens < 1 for stream, tokens in pieces):
                raise KernelcastError(f"request {row}: shared pieces are (stream from 0, tokens from 1), not {pieces}")
            covered = sum(tokens for _, tokens in pieces)
            if covered > self.inputs[row]:
                raise KernelcastError(f"request {row}: {covered} tokens are shared of a prompt of {self.inputs[row]}")

    def __len__(self) -> int:
        return len(self.arrivals_s)

    @property
    def duration_s(self) -> float:
        """Seconds until the last request is sent, at the earliest."""
        return float(self.arrivals_s[-1])

    @property
    def request_rate(self) -> float:
        """Requests per second between the first and the last; infinite where all come at once."""
        between_s = float(self.arrivals_s[-1] - self.arrivals_s[0])
        return (len(self) - 1) / between_s if between_s else float("inf")

    @property
    def input_tokens(self) -> int:
        return int(self.inputs.sum())

    @property
    def output_tokens(self) -> int:
        return int(self.outputs.sum())

    @property
    def form(self) -> str:
        """How requests arrive: all at once, so many in flight (a closed loop), or by themselves (an open loop)."""
        if self.max_concurrency and self.max_concurrency < len(self):
            return "closed loop"
        return "burst" if len(self) > 1 and not np.any(self.arrivals_s > self.arrivals_s[0]) else "open loop"

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its output: the context that a server must allow."""
        return int((self.inputs + self.outputs).max())

    def take(self, rows: slice | Sequence[int] | NDArray[Any]) -> Load:
        """Some of the requests, by index or mask, in the order of their arrival."""
        kept = np.arange(len(self))[rows]
        return replace(
            self,
            arrivals_s=self.arrivals_s[kept],
            inputs=self.inputs[kept],
            outputs=self.outputs[kept],
            shared=tuple(self.shared[row] for row in kept) if self.shared else (),
            ids=tuple(self.ids[row] for row in kept) if self.ids else (),
            stages=None if self.stages is None else self.stages[kept],
            follows=None if self.follows is None else _renumbered(self.follows, kept),
        )

    def faster(self, scale: float) -> Load:
        """The same requests at ``scale`` times the rate."""
        if not 0 < scale < np.inf:
            raise KernelcastError(f"a rate is scaled by a number above 0, not {scale:g}")
        return replace(self, arrivals_s=self.arrivals_s / scale)

    def from_first(self) -> Load:
        """The same requests with the clock started at the first of them."""
        return replace(self, arrivals_s=self.arrivals_s - self.arrivals_s[0])


def _renumbered(follows: NDArray[np.int64], kept: NDArray[np.int64]) -> NDArray[np.int64]:
    """``follows`` of the kept requests, by their new indices; -1 where the request they followed is dropped."""
    index = np.full(len(follows) + 1, -1)
    index[kept] = np.arange(len(kept))
    return index[follows[kept]]


def _array(values: ArrayLike, dtype: type[np.generic]) -> NDArray[Any]:
    """A read-only copy: a load is immutable."""
    array = np.array(values, dtype=dtype)
    array.setflags(write=False)
    return array


def _whole(name: str, values: ArrayLike) -> NDArray[np.int64]:
    array = np.asarray(values)
    floats = array.dtype.kind == "f" and np.all(np.isfinite(array)) and np.all(array == np.floor(array))
    if len(array) and array.dtype.kind not in "iu" and not floats:
        raise KernelcastError(f"{name} must be whole numbers")
    return _array(array, np.int64)


def _check_times(arrivals_s: NDArray[np.float64]) -> None:
    wrong = ~((arrivals_s >= 0) & (arrivals_s < np.inf))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise KernelcastError(f"request {row}: an arrival is a number of seconds from 0 on, not {arrivals_s[row]:g}")
    back = np.diff(arrivals_s) < 0
    if back.any():
        row = int(np.argmax(back)) + 1
        raise KernelcastError(
            f"request {row} arrives at {arrivals_s[row]:g} s, before the one in front of it at"
            f" {arrivals_s[row - 1]:g} s: sort requests by arrival"
        )


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
    process: str = "poisson",
    *,
    burstiness: float = 1.0,
    on_s: float = 10.0,
    off_s: float = 10.0,
) -> Seconds:
    """``count`` requests at ``rate`` per second; at an infinite rate all come at once.

    bursty: Poisson for ``on_s`` seconds, nothing for ``off_s``, again and again; ``rate`` is the mean of both.
    """
    _check(count, rate, burstiness)
    if process not in PROCESSES:
        raise unknown("arrival process", process, PROCESSES)
    if process == "poisson" and burstiness != 1:
        raise KernelcastError(f"poisson arrivals have burstiness 1, not {burstiness:g}; take gamma")
    if np.isinf(rate):
        return np.zeros(count)
    if process == "constant" or np.isinf(burstiness):
        return np.arange(count) / rate
    if process == "bursty":
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
    stages: Sequence[tuple[float, float]], draws: Draws, process: str = "poisson", burstiness: float = 1.0
) -> tuple[Seconds, NDArray[np.int64]]:
    """Stages of (requests per second, seconds), one after another: arrivals, and the stage of each.

    A stage has rate x seconds requests, as in inference-perf; each begins when the one before it is over.
    """
    if not stages:
        raise KernelcastError("a load in stages needs at least one, as (requests per second, seconds)")
    if process == "bursty":
        raise KernelcastError("stages are poisson, gamma or constant; bursts would cross their ends")
    times, numbers, start_s = [], [], 0.0
    for number, (rate, seconds) in enumerate(stages):
        if not (0 < rate < np.inf and 0 < seconds < np.inf):
            raise KernelcastError(f"stage {number}: a rate and seconds above 0, not {rate:g} for {seconds:g} s")
        count = round(rate * seconds)
        if count < 1:
            raise KernelcastError(f"stage {number}: {rate:g} requests/s for {seconds:g} s are not one request")
        times.append(start_s + arrivals(count, count / seconds, draws, process, burstiness=burstiness))
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

DISTRIBUTIONS = ("fixed", "uniform", "normal", "lognormal", "exponential")


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts around a mean.

    uniform: from floor(mean x (1 - ratio)) to ceil(mean x (1 + ratio)), as vLLM's --random-range-ratio. normal and
    lognormal: ``mean`` and ``std`` are those of the lengths themselves, before they are clipped to ``low`` and ``high``
    (0: none). exponential: many short ones and a long tail, as conversations have (ShareGPT), stretched to this mean.
    """

    mean: float
    distribution: str = "fixed"
    ratio: float = 0.0
    std: float = 0.0
    low: int = 1
    high: int = 0

    def __post_init__(self) -> None:
        if self.distribution not in DISTRIBUTIONS:
            raise unknown("distribution of lengths", self.distribution, DISTRIBUTIONS)
        if not 1 <= self.mean < math.inf or (self.distribution in ("fixed", "uniform") and self.mean != int(self.mean)):
            raise KernelcastError(f"a length is a whole number of tokens from 1 on, not {self.mean:g}")
        if not 0 <= self.ratio < 1:
            raise KernelcastError(f"a range ratio is from 0 to below 1, not {self.ratio:g}")
        if not 0 <= self.std < math.inf:
            raise KernelcastError(f"a standard deviation of lengths is 0 or more, not {self.std:g}")
        if self.low < 1 or (self.high and self.high < self.low):
            raise KernelcastError(f"lengths need 1 <= low <= high, not {self.low} and {self.high}")

    def draw(self, count: int, draws: np.random.Generator) -> Tokens:
        if self.distribution == "fixed":
            return np.full(count, int(self.mean), dtype=np.int64)
        if self.distribution == "uniform":
            low = max(math.floor(self.mean * (1 - self.ratio)), 1)
            return draws.integers(low, math.ceil(self.mean * (1 + self.ratio)) + 1, size=count)
        if self.distribution == "normal":
            lengths = draws.normal(self.mean, self.std, count)
        elif self.distribution == "exponential":
            lengths = draws.exponential(self.mean, count)
            lengths *= self.mean / lengths.mean()
        else:
            variance = math.log1p((self.std / self.mean) ** 2)
            lengths = draws.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), count)
        return np.clip(np.rint(lengths), self.low, self.high or None).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Prompts:
    """Lengths of requests, and what they share: as ``Load`` has them, without times."""

    inputs: Tokens
    outputs: Tokens
    shared: tuple[Pieces, ...] = ()


def random_prompts(
    count: int, inputs: Lengths, outputs: Lengths, draws: np.random.Generator, prefix_len: int = 0
) -> Prompts:
    """Prompts of vLLM's random dataset: all begin with the same ``prefix_len`` tokens, which come on top of the
    length."""
    if prefix_len < 0:
        raise KernelcastError(f"a prefix has 0 tokens or more, not {prefix_len}")
    lengths = inputs.draw(count, draws)
    answers = outputs.draw(count, draws)
    return Prompts(lengths + prefix_len, answers, (((0, prefix_len),),) * count if prefix_len else ())


def repeated_prefixes(
    count: int, prefix_len: int, suffix_len: int, prefixes: int, outputs: Lengths, draws: np.random.Generator
) -> Prompts:
    """vLLM's prefix_repetition dataset: each of several prefixes begins the same number of prompts, in random
    order. Where the prefixes do not divide the count, there are fewer prompts than requested, as in vLLM."""
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
    """inference-perf's shared-prefix data: ``groups`` system prompts, each before the questions of as many users;
    requests go round the users in one random order. Every request of a user has the same question: the same prompt,
    or with ``multi_turn`` the conversation so far followed by the question."""
    if min(groups, prompts_per_group) < 1 or system_prompt_len < 0:
        raise KernelcastError("groups and prompts per group are 1 or more, a system prompt has 0 tokens or more")
    users = groups * prompts_per_group
    group = draws.permutation(np.repeat(np.arange(groups), prompts_per_group))
    question_lens, output_lens = questions.draw(users, draws), outputs.draw(users, draws)
    user = np.arange(count) % users
    before = (
        np.arange(count) // users * (question_lens + output_lens)[user]
        if multi_turn
        else np.zeros(count, dtype=np.int64)
    )
    lengths = before + question_lens[user]
    system = [((g, system_prompt_len),) if system_prompt_len else () for g in range(groups)]
    shared = tuple(
        (*system[group[who]], (groups + who, tokens))
        for who, tokens in zip(user.tolist(), lengths.tolist(), strict=True)
    )
    return Prompts(system_prompt_len + lengths, output_lens[user], shared)


def spread_total(total: int, count: int) -> Tokens:
    """``total`` tokens over ``count`` requests as evenly as whole numbers allow, each at least one."""
    least = max(total, count)
    return np.diff(np.arange(count + 1, dtype=np.int64) * least // count)


def scaled_to(lengths: Sequence[int] | Tokens, total: int) -> Tokens:
    """Lengths in the same proportions that add up to ``total``, each at least one."""
    parts = np.asarray(lengths, dtype=np.float64)
    ends = np.rint(np.cumsum(parts) * (max(total, len(parts)) / parts.sum()))
    return np.maximum(np.diff(ends, prepend=0.0), 1).astype(np.int64)
