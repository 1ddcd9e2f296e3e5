"""How a router spreads tokens over experts when it picks each token's experts at random.

Every token goes to ``topk`` different experts, so an expert's rows are binomial: tokens draws of chance topk / experts.
With few tokens many experts get none (16 tokens, 8 of 128 experts: 82 are used, not 128), which sets how many weights
are read; with many, uneven loads add about half a block of padding an expert.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from kernelcast.kernels.work import Array

ROUTINGS = ("balanced", "random")
_LEVELS = 24  # experts are stood for by this many load levels: medians of equal slices of the normal distribution
_NORMAL_LEVELS = [NormalDist().inv_cdf((at + 0.5) / _LEVELS) for at in range(_LEVELS)]


def active_experts(tokens: Array, experts: Array, topk: Array) -> Array:
    """Experts that get any token, on average: experts x (1 - (1 - topk / experts)^tokens)."""
    return experts * -np.expm1(tokens * np.log1p(-np.minimum(topk / experts, 1 - 1e-12)))


def random_blocks(tokens: Array, experts: Array, topk: Array, block_m: Array) -> Array:
    """Row blocks over all experts on average, each expert's rows padded to ``block_m``."""
    chance = topk / experts
    mean, sigma = tokens * chance, np.sqrt(tokens * chance * (1 - chance))
    active = active_experts(tokens, experts, topk)
    total = np.zeros(1)
    for level in _NORMAL_LEVELS:
        load = np.clip(np.rint(mean + sigma * level), 0, tokens)
        # a load of one block or less is a block where there is any row at all
        total = total + np.where(load > block_m, np.ceil(load / block_m), active / experts)
    return np.maximum(active, experts * total / _LEVELS)
