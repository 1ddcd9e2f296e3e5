"""Random sizes of calls to measure: those of real models (shapes.toml), and others that fill the space between."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True)
class Dims:
    """Sizes of a decoder layer."""

    hidden: int
    inter: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


@dataclass(frozen=True)
class Experts:
    """A mixture-of-experts layer."""

    hidden: int
    inter: int
    experts: int
    topk: int


SHAPES: Mapping[str, Any] = tomllib.loads((Path(__file__).parent / "shapes.toml").read_text(encoding="utf-8"))
DECODERS = tuple(Dims(*sizes) for sizes in SHAPES["decoders"].values())
MOE_LAYERS = tuple(Experts(*sizes) for sizes in SHAPES["experts"].values())
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
        share = self._rng.random()
        return self.size(low, high, 128 if share < 0.45 else 64 if share < 0.7 else 8 if share < 0.92 else 1)

    def model(self) -> Dims:
        return self.pick(DECODERS)

    def experts(self) -> Experts:
        return self.pick(MOE_LAYERS)


Drawn = dict[str, Any]  # parameters of a call, op first
Table = Mapping[str, tuple[Callable[[Draw], Drawn], float]]  # family: (how a call is drawn, its share of all calls)
