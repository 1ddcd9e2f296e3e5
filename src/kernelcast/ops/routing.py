"""Tokens per expert on the busiest rank: balanced, random, or a power law.

Every rank of an expert-parallel layer waits for the busiest. With ``balanced`` routing all ranks have the same rows.
With ``random`` routing an expert's rows are binomial, and the busiest of 8 ranks has 1.4 standard deviations more than
the mean. With a power law (``skew``) rows of an expert have the density x^-skew between 1 and 0.8 tokens, as in
AIConfigurator's benchmark (collector/helper.py: it measures the busiest rank); with fewer tokens than experts, between
0.01 and 2. A load balancer (EPLB) gives the hottest experts redundant slots and places slots to balance the ranks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from kernelcast.ops.grouped import active_experts, random_blocks
from kernelcast.ops.work import Array, Number, axis

ROUTINGS = ("balanced", "random")
_QUANTILES = 32  # experts of a skewed layer are stood for by this many load levels
_LARGEST_SHARE = 0.8  # of the tokens, that one expert can draw
_LIMITS = 2.0 ** np.arange(0.0, 6.5, 0.5)  # of the mean rows of an expert, that a slot may get
_FEW = (0.01, 2.0)  # range of the draw where there are no more pairs than experts


@dataclass(frozen=True)
class ExpertRouting:
    """Tokens of all ranks routed to ``topk`` of the experts, ``experts`` of them on each of ``ep`` ranks."""

    tokens: Array
    topk: Array
    experts: Array  # of one rank
    ep: Array
    skew: Array
    random: bool  # without skew: random instead of balanced routing
    spare: Number = 0.0  # redundant slots of all ranks; ``experts`` counts slots
    placed: Number = 0.0  # 1 where slots are placed by load

    @property
    def mean_pairs(self) -> Array:
        """(token, expert) pairs of a rank, on average."""
        return self.tokens * self.topk / self.ep

    @functools.cached_property
    def pairs(self) -> Array:
        """(token, expert) pairs of the busiest rank."""
        mean = self.mean_pairs
        spread = np.zeros_like(mean)  # standard deviation of a rank's pairs over their mean, squared
        if self.random:
            spread = (1 - 1 / self.ep) / np.maximum(mean, 1e-9)
        if np.any(self.skew > 0):
            spread = np.where(self.skew > 0, self._spread() * (1 - 1 / self.ep) / self.experts, spread)
        pairs = mean * busiest(spread, self.ep)
        if np.any((self.skew > 0) & (np.asarray(self.placed) > 0)):
            pairs = np.where((self.skew > 0) & (np.asarray(self.placed) > 0), np.maximum(mean, self._largest), pairs)
        return np.minimum(pairs, np.minimum(mean * self.ep, self.tokens * np.minimum(self.experts, self.topk)))

    @property
    def received(self) -> Array:
        """Tokens with any expert on the busiest rank."""
        ranks = groups_reached(self.ep, self.topk, self.experts * self.ep, None if self.random else "balanced")
        return np.minimum(self.tokens * ranks / self.ep * self.pairs / self.mean_pairs, self.tokens)

    def blocks(self, block_m: Array) -> Array:
        """Row blocks of the busiest rank, each expert's rows padded to ``block_m``."""
        if self.random:
            share = self.pairs / self.mean_pairs / self.ep
            even = random_blocks(self.tokens, self.experts * self.ep, self.topk, block_m) * share
        else:
            even = balanced_blocks(self.mean_pairs, self.experts, block_m)
        if not np.any(self.skew > 0):
            return even
        load, share = self._skewed()
        skewed = np.zeros_like(even)
        for level in load:
            skewed = skewed + share * np.where(level >= 1, np.ceil(level / block_m), level)
        return np.where(self.skew > 0, np.maximum(skewed, 1.0), even)

    def active(self) -> Array:
        """Active experts of the busiest rank."""
        if self.random:
            even = active_experts(self.tokens, self.experts * self.ep, self.topk) / self.ep
        else:
            even = np.minimum(self.experts, np.ceil(self.mean_pairs))
        if not np.any(self.skew > 0):
            return even
        load, share = self._skewed()
        return np.where(self.skew > 0, np.maximum(1.0, np.sum(np.minimum(load, 1.0), axis=0) * share), even)

    def _skewed(self) -> tuple[Array, Array]:
        """(levels, calls) rows of an expert at each level, and how many experts a level represents."""
        draw = self._draws
        if np.any(np.asarray(self.placed) > 0):
            mean = np.mean(draw, axis=0)
            largest = self._largest / (self.tokens * self.topk) * (self.experts * self.ep) * mean
            draw = np.where(np.asarray(self.placed) > 0, np.minimum(draw, largest), draw)
        share = self.experts / _QUANTILES
        load = np.minimum(draw * (self.pairs / (np.sum(draw, axis=0) * share)), self.tokens)
        room = self.tokens - load  # an expert gets a token once: what is over goes to the others
        over = np.maximum(self.pairs - np.sum(load, axis=0) * share, 0.0)
        return load + room * (over / np.maximum(np.sum(room, axis=0) * share, 1e-9)), share

    @functools.cached_property
    def _draws(self) -> Array:
        """(levels, calls) of the power law."""
        u = (axis(list(range(_QUANTILES))) + 0.5) / _QUANTILES
        low, high, bend = self._power_law()
        draws: Array = (low**bend + u * (high**bend - low**bend)) ** (1 / bend)
        return draws

    @functools.cached_property
    def _largest(self) -> Array:
        """Rows of the fullest slot, when the hottest experts have the redundant ones."""
        experts = self.experts * self.ep - self.spare
        mean = self.tokens * self.topk / experts
        load = self._draws / np.mean(self._draws, axis=0) * mean
        largest = np.minimum(mean * busiest(self._spread() * (1 - 1 / experts), experts), self.tokens)
        for limit in _LIMITS:  # the smallest limit that the redundant slots allow
            slots = np.sum(np.maximum(np.ceil(load / (limit * mean)) - 1, 0.0), axis=0) * experts / _QUANTILES
            largest = np.where(slots <= self.spare, np.minimum(largest, limit * mean), largest)
        return largest

    def _power_law(self) -> tuple[Array, Array, Array]:
        """Both ends of the draw, and 1 - skew (at 1 the limit is low (high / low)^u)."""
        few = self.tokens * self.topk <= self.experts * self.ep - self.spare
        low = np.where(few, _FEW[0], 1.0)
        high = np.where(few, _FEW[1], np.maximum(_LARGEST_SHARE * self.tokens, 2.0))
        bend = 1 - np.where(self.skew > 0, self.skew, 1.0)
        return low, high, np.where(np.abs(bend) < 1e-6, 1e-6, bend)

    def _spread(self) -> Array:
        """Variance of one draw over its mean squared: moments of x^-skew between both ends."""
        low, high, bend = self._power_law()

        def moment(power: float) -> Array:
            exponent = bend + power
            exponent = np.where(np.abs(exponent) < 1e-6, 1e-6, exponent)
            return (high**exponent - low**exponent) / exponent

        return moment(2.0) * moment(0.0) / moment(1.0) ** 2 - 1


def busiest(spread: Array, ranks: Array) -> Array:
    """The largest of ``ranks`` loads over their mean; ``spread``: their variance over the mean squared.

    Loads are taken as gamma-distributed, with quantiles by Wilson and Hilferty's cube (1931), the largest of n by
    Blom's (n - 0.375) / (n + 0.25).
    """
    counts, inverse = np.unique(ranks, return_inverse=True)
    normal = NormalDist()
    z = np.array([normal.inv_cdf((n - 0.375) / (n + 0.25)) if n > 1 else 0.0 for n in counts])[inverse]
    cube = 1 - spread / 9 + z * np.sqrt(spread) / 3
    return np.maximum(1.0, np.where(ranks > 1, np.maximum(cube, 0.0) ** 3, 1.0))


def groups_reached(groups: Array, topk: Array, experts: Array, routing: str | None) -> Array:
    """How many groups of ``experts / groups`` experts contain any of a token's ``topk`` experts, on average."""
    if routing == "balanced":
        return np.minimum(topk, groups)
    others = experts - experts / groups
    missed = functools.reduce(
        np.multiply,
        (np.where(i < topk, np.clip((others - i) / np.maximum(experts - i, 1.0), 0.0, 1.0), 1.0)
         for i in range(int(np.max(topk)))),
    )  # fmt: skip
    return groups * (1 - missed)


def balanced_blocks(pairs: Array, experts: Array, block_m: Array) -> Array:
    """Row blocks of balanced routing: some experts get floor(pairs / experts) rows, the rest one more."""
    few = np.floor(pairs / experts)
    more = np.ceil(pairs - few * experts)
    return more * np.ceil((few + 1) / block_m) + (experts - more) * np.ceil(few / block_m)
