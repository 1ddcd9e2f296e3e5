"""How long prompts and answers are, and what prompts begin with together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kernelcast.errors import KernelcastError, unknown
from kernelcast.serving.load.load import Pieces

Tokens = NDArray[np.int64]

KINDS = ("fixed", "uniform", "normal", "lognormal")


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
        if self.kind not in KINDS:
            raise unknown("distribution of lengths", self.kind, KINDS)
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
