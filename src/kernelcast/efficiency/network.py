"""A small network in NumPy: measured ratios and a few words in, correction of the generic time out.

Inputs are the numeric features, clipped to the range seen in fitting and standardised, and one-hot words (op, dtype,
stack, backend, GPU). A word that was not in the data, or not given, is all zeros: the network was fitted with words
left out at random, so that it knows what to say then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
# Rows are multiplied eight at a time, always: a product's rounding depends on the shape that BLAS is given, and a call
# must not change with the table it stands in. It is no slower: small products need no threads.
BLOCK_ROWS = 8


@dataclass(frozen=True)
class Encoder:
    """How a row becomes the network's input."""

    names: tuple[str, ...]
    low: Floats
    high: Floats
    mean: Floats
    scale: Floats
    vocabulary: Mapping[str, tuple[str, ...]]

    @property
    def width(self) -> int:
        return len(self.names) + sum(len(words) for words in self.vocabulary.values())

    def numbers(self, values: Floats) -> Floats:
        """Clipped and standardised."""
        inverse = (1 / self.scale).astype(np.float32)
        return ((np.clip(values, self.low, self.high) - self.mean) * inverse).astype(np.float32, copy=False)

    def outside(self, values: Floats) -> NDArray[np.bool_]:
        """Rows with a feature beyond the range seen by more than a tenth of it."""
        margin = 0.1 * (self.high - self.low) + 1e-6
        return np.any((values < self.low - margin) | (values > self.high + margin), axis=1)

    def word_columns(self) -> dict[str, tuple[int, ...]]:
        """Input columns of each word name's one-hot code."""
        columns: dict[str, tuple[int, ...]] = {}
        start = len(self.names)
        for name, words in self.vocabulary.items():
            columns[name] = tuple(range(start, start + len(words)))
            start += len(words)
        return columns

    def positions(self, words: Mapping[str, str | None]) -> list[int]:
        """Input columns that are 1 for these words."""
        found = []
        for name, columns in self.word_columns().items():
            word = words.get(name)
            if word is not None and word in self.vocabulary[name]:
                found.append(columns[self.vocabulary[name].index(word)])
        return found


@dataclass(frozen=True)
class Layers:
    """Linear layers with ReLU between; weights are (inputs, outputs)."""

    weights: tuple[Floats, ...]
    biases: tuple[Floats, ...]

    def __call__(self, numbers: Floats, positions: Sequence[int]) -> Floats:
        """Outputs of rows that share their words; a one-hot input is just a row of the first weights."""
        rows, width = numbers.shape
        blocks = np.zeros((-(-rows // BLOCK_ROWS), BLOCK_ROWS, width), dtype=np.float32)
        blocks.reshape(-1, width)[:rows] = numbers
        first = self.biases[0] + self.weights[0][list(positions)].sum(axis=0)
        hidden = blocks @ self.weights[0][:width] + first
        for weight, bias in zip(self.weights[1:], self.biases[1:], strict=True):
            np.maximum(hidden, 0, out=hidden)
            hidden = hidden @ weight + bias
        return hidden.reshape(-1, hidden.shape[2])[:rows]
