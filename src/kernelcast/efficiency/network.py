"""A small network in NumPy: measured ratios and a few words in, correction of the generic time out.

Inputs are the numeric features, clipped to the range seen in fitting and standardised, and one-hot words (op, dtype,
stack, backend, GPU). A word that was not in the data, or not given, is all zeros: the network was fitted with words
left out at random, so that it knows what to say then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
# Rows are multiplied eight at a time, always: a product's rounding depends on the shape that BLAS is given, and a call
# must not change with the table it stands in. It is no slower: small products need no threads.
BLOCK_ROWS = 8
_RANGES = ("low", "high", "mean", "scale")


def read_tensors(path: Path) -> tuple[dict[str, Floats], dict[str, Any]]:
    """Of a safetensors file: every tensor in single precision, and the JSON beside them."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        tensors = {name: file.get_tensor(name).astype(np.float32) for name in file.keys()}  # noqa: SIM118
        return tensors, {name: json.loads(text) for name, text in file.metadata().items()}


def in_blocks(rows: Floats) -> Floats:
    """(blocks, BLOCK_ROWS, width), the last one filled up with zeros."""
    count, width = rows.shape
    blocks = np.zeros((-(-count // BLOCK_ROWS), BLOCK_ROWS, width), dtype=np.float32)
    blocks.reshape(-1, width)[:count] = rows
    return blocks


@dataclass(frozen=True)
class Encoder:
    """How a row becomes the network's input."""

    names: tuple[str, ...]
    low: Floats
    high: Floats
    mean: Floats
    scale: Floats
    vocabulary: Mapping[str, tuple[str, ...]]

    @classmethod
    def read(cls, tensors: Mapping[str, Floats], about: Mapping[str, Any], prefix: str = "") -> Self:
        """From its ``tensors`` and what a file tells beside them."""
        vocabulary = {name: tuple(words) for name, words in about["vocabulary"].items()}
        ranges = {name: tensors[prefix + name] for name in _RANGES}
        return cls(names=tuple(about["names"]), vocabulary=vocabulary, **ranges)

    def tensors(self, prefix: str = "") -> dict[str, Floats]:
        return {prefix + name: getattr(self, name) for name in _RANGES}

    @property
    def width(self) -> int:
        return len(self.names) + sum(len(words) for words in self.vocabulary.values())

    def numbers(self, values: Floats) -> Floats:
        """Clipped and standardised."""
        inverse = (1 / self.scale).astype(np.float32)
        return ((np.clip(values, self.low, self.high) - self.mean) * inverse).astype(np.float32, copy=False)

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

    @classmethod
    def read(cls, tensors: Mapping[str, Floats], weight: str, bias: str) -> Self:
        """From tensors whose names begin with ``weight`` and ``bias``, numbered."""
        depth = range(sum(name.startswith(weight) for name in tensors))
        return cls(*(tuple(tensors[f"{name}{at}"] for at in depth) for name in (weight, bias)))

    def tensors(self, weight: str, bias: str) -> dict[str, Floats]:
        named = {f"{weight}{at}": array for at, array in enumerate(self.weights)}
        return named | {f"{bias}{at}": array for at, array in enumerate(self.biases)}

    def __call__(self, numbers: Floats, positions: Sequence[int]) -> Floats:
        """Outputs of rows that share their words; a one-hot input is just a row of the first weights."""
        rows, width = numbers.shape
        first = self.biases[0] + self.weights[0][list(positions)].sum(axis=0)
        hidden = in_blocks(numbers) @ self.weights[0][:width] + first
        for weight, bias in zip(self.weights[1:], self.biases[1:], strict=True):
            np.maximum(hidden, 0, out=hidden)
            hidden = hidden @ weight + bias
        return hidden.reshape(-1, hidden.shape[2])[:rows]
