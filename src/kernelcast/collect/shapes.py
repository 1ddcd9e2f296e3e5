"""Sizes that calls are drawn from: those of real language models, and random ones that fill the space between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True)
class Dims:
    """What a decoder layer is made of."""

    hidden: int
    inter: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


# From the models' published configurations.
MODELS = {
    "llama-2-7b": Dims(4096, 11008, 32, 32, 128, 32000),
    "llama-2-13b": Dims(5120, 13824, 40, 40, 128, 32000),
    "llama-3.1-8b": Dims(4096, 14336, 32, 8, 128, 128256),
    "llama-3.1-70b": Dims(8192, 28672, 64, 8, 128, 128256),
    "llama-3.1-405b": Dims(16384, 53248, 128, 8, 128, 128256),
    "llama-3.2-1b": Dims(2048, 8192, 32, 8, 64, 128256),
    "llama-3.2-3b": Dims(3072, 8192, 24, 8, 128, 128256),
    "qwen2.5-0.5b": Dims(896, 4864, 14, 2, 64, 151936),
    "qwen2.5-7b": Dims(3584, 18944, 28, 4, 128, 152064),
    "qwen2.5-14b": Dims(5120, 13824, 40, 8, 128, 152064),
    "qwen2.5-32b": Dims(5120, 27648, 40, 8, 128, 152064),
    "qwen2.5-72b": Dims(8192, 29568, 64, 8, 128, 152064),
    "qwen3-4b": Dims(2560, 9728, 32, 8, 128, 151936),
    "qwen3-8b": Dims(4096, 12288, 32, 8, 128, 151936),
    "qwen3-32b": Dims(5120, 25600, 64, 8, 128, 151936),
    "mistral-7b": Dims(4096, 14336, 32, 8, 128, 32768),
    "mistral-large": Dims(12288, 28672, 96, 8, 128, 32768),
    "gemma-2-9b": Dims(3584, 14336, 16, 8, 256, 256000),
    "gemma-2-27b": Dims(4608, 36864, 32, 16, 128, 256000),
    "phi-3-mini": Dims(3072, 8192, 32, 32, 96, 32064),
    "phi-4": Dims(5120, 17920, 40, 10, 128, 100352),
    "gpt2-xl": Dims(1600, 6400, 25, 25, 64, 50257),
    "opt-1.3b": Dims(2048, 8192, 32, 32, 64, 50272),
    "opt-6.7b": Dims(4096, 16384, 32, 32, 128, 50272),
    "bert-large": Dims(1024, 4096, 16, 16, 64, 30522),
}


@dataclass(frozen=True)
class Experts:
    """A mixture-of-experts layer."""

    hidden: int
    inter: int
    experts: int
    topk: int


MOE_MODELS = {
    "mixtral-8x7b": Experts(4096, 14336, 8, 2),
    "mixtral-8x22b": Experts(6144, 16384, 8, 2),
    "qwen3-30b-a3b": Experts(2048, 768, 128, 8),
    "qwen3-235b-a22b": Experts(4096, 1536, 128, 8),
    "qwen2-57b-a14b": Experts(3584, 2560, 64, 8),
    "deepseek-v3": Experts(7168, 2048, 256, 8),
    "deepseek-v2-lite": Experts(2048, 1408, 64, 6),
    "gpt-oss-120b": Experts(2880, 2880, 128, 4),
    "olmoe-1b-7b": Experts(2048, 1024, 64, 8),
}
TP = (1, 2, 4, 8)


class Draw:
    """Random sizes from one seed."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self._rng.integers(len(options)))]

    def chance(self, share: float) -> bool:
        return bool(self._rng.random() < share)

    def order(self, count: int) -> list[int]:
        """The numbers below ``count``, in random order."""
        return [int(at) for at in self._rng.permutation(count)]

    def size(self, low: int, high: int, grain: int = 1) -> int:
        """Log-uniform, a multiple of ``grain``."""
        value = float(np.exp(self._rng.uniform(np.log(low), np.log(high))))
        return int(max(grain, round(value / grain) * grain))

    def tokens(self, high: int = 16384) -> int:
        """Tokens of a step: half round numbers as batches have, half anything."""
        if self.chance(0.5):
            return min(high, 2 ** int(self._rng.integers(0, int(np.log2(high)) + 1)))
        return self.size(1, high)

    def width(self, low: int, high: int) -> int:
        """A feature size: mostly a multiple of 64 or 128, sometimes of 8, seldom odd."""
        kind = self._rng.random()
        return self.size(low, high, 128 if kind < 0.45 else 64 if kind < 0.7 else 8 if kind < 0.92 else 1)

    def model(self) -> Dims:
        return MODELS[self.pick(list(MODELS))]

    def experts(self) -> Experts:
        return MOE_MODELS[self.pick(list(MOE_MODELS))]
