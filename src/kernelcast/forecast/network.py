"""A small network in NumPy: measured ratios and a few choices in, correction of the generic time out.

Inputs are the numeric features, clipped to the range seen in fitting and standardised, and one-hot choices (op,
dtype, stack, backend, GPU). A choice that was not in the data, or not given, is all zeros: the network was fitted with
choices left out at random.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kernelcast.machine.analyse import lazy

Floats = NDArray[np.float32]
# Products are always of eight rows by 64 columns: a product's rounding depends on the shape that BLAS is given, and a
# call must not change with the table it stands in. So small, they need no packing and no threads, and a panel of the
# weights stays in the first cache while all rows pass: 114 GFLOP/s on a core, where eight rows by 256 columns do 100
# and 256 rows by 256 columns 85 (docs/speed.md).
BLOCK_ROWS = 8
PANEL_COLUMNS = 64
STRIDE_ROWS = 256  # go through all layers before the next ones: what lies between two layers stays in the cache
_ZEROS = np.zeros(4096, dtype=np.float32)  # a row of them: NumPy compares with an array in half the time of a number
_RANGES = ("low", "high", "mean", "scale")


def read_tensors(path: Path) -> tuple[dict[str, Floats], dict[str, Any]]:
    """Of a safetensors file: every tensor in single precision, and the JSON beside them."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        tensors = {name: file.get_tensor(name).astype(np.float32) for name in file.keys()}  # noqa: SIM118
        return tensors, {name: json.loads(text) for name, text in file.metadata().items()}


def in_blocks(rows: Floats) -> Floats:
    """(blocks, BLOCK_ROWS, width), the last one filled up with zeros; always in one order in memory, which rounding
    depends on too."""
    count, width = rows.shape
    if count % BLOCK_ROWS == 0:
        return np.ascontiguousarray(rows).reshape(-1, BLOCK_ROWS, width)
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
        """From its ``tensors`` and the metadata beside them."""
        vocabulary = {name: tuple(options) for name, options in about["vocabulary"].items()}
        ranges = {name: tensors[prefix + name] for name in _RANGES}
        return cls(names=tuple(about["names"]), vocabulary=vocabulary, **ranges)

    def tensors(self, prefix: str = "") -> dict[str, Floats]:
        return {prefix + name: getattr(self, name) for name in _RANGES}

    @property
    def width(self) -> int:
        return len(self.names) + sum(len(options) for options in self.vocabulary.values())

    def numbers(self, values: Floats) -> Floats:
        """Clipped and standardised."""
        numbers = np.maximum(values, self.low)
        np.minimum(numbers, self.high, out=numbers)
        numbers -= self.mean
        numbers *= self._inverse
        return numbers

    @lazy
    def _inverse(self) -> Floats:
        return (1 / self.scale).astype(np.float32)

    def category_columns(self) -> dict[str, tuple[int, ...]]:
        """Input columns of each choice's one-hot code."""
        columns: dict[str, tuple[int, ...]] = {}
        start = len(self.names)
        for name, options in self.vocabulary.items():
            columns[name] = tuple(range(start, start + len(options)))
            start += len(options)
        return columns

    def positions(self, choices: Mapping[str, str | None]) -> list[int]:
        """Input columns that are 1 for these choices."""
        positions = []
        for name, columns in self._columns.items():
            value = choices.get(name)
            if value in columns:
                positions.append(columns[value])
        return positions

    @lazy
    def _columns(self) -> dict[str, dict[str | None, int]]:
        """The input column of each option, by the choice's name."""
        return {name: dict(zip(self.vocabulary[name], at, strict=True)) for name, at in self.category_columns().items()}


def in_panels(weight: Floats) -> Floats:
    """(panels, 1, inputs, PANEL_COLUMNS): a layer's columns some at a time, all at once where they do not divide."""
    inputs, outputs = weight.shape
    columns = outputs if outputs % PANEL_COLUMNS else PANEL_COLUMNS
    return np.ascontiguousarray(weight.reshape(inputs, -1, columns).transpose(1, 0, 2)[:, None])


def product(blocks: Floats, panels: Floats) -> Floats:
    """(blocks, BLOCK_ROWS, outputs), panel after panel."""
    count, _, _, columns = panels.shape
    outputs = np.empty((*blocks.shape[:2], count, columns), dtype=np.float32)
    np.matmul(blocks, panels, out=outputs.transpose(2, 0, 1, 3))
    return outputs.reshape(*blocks.shape[:2], count * columns)


@dataclass(frozen=True)
class Layers:
    """Linear layers with ReLU between; weights are (inputs, outputs)."""

    weights: tuple[Floats, ...]
    biases: tuple[Floats, ...]
    _known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)  # made before

    @classmethod
    def read(cls, tensors: Mapping[str, Floats], weight: str, bias: str) -> Self:
        """From tensors whose names begin with ``weight`` and ``bias``, numbered."""
        depth = range(sum(name.startswith(weight) for name in tensors))
        weights, biases = (tuple(tensors[f"{name}{at}"] for at in depth) for name in (weight, bias))
        return cls(weights, biases)

    def tensors(self, weight: str, bias: str) -> dict[str, Floats]:
        named = {f"{weight}{at}": array for at, array in enumerate(self.weights)}
        return named | {f"{bias}{at}": array for at, array in enumerate(self.biases)}

    def without_inputs(self, columns: Sequence[int]) -> Self:
        """The same network with these inputs at 0, whatever they are."""
        first = self.weights[0].copy()
        first[list(columns)] = 0.0
        return type(self)((first, *self.weights[1:]), self.biases)

    def hidden(self, numbers: Floats, positions: Sequence[int]) -> Floats:
        """(rows, units): the last hidden layer."""
        return np.maximum(self._below(numbers, positions), 0)

    @lazy
    def _below(self) -> Layers:
        """The network without its last layer."""
        return Layers(self.weights[:-1], self.biases[:-1])

    def __call__(self, numbers: Floats, positions: Sequence[int]) -> Floats:
        """Outputs of rows that share their choices; a one-hot input is just a row of the first weights."""
        first, *others = self._layers(numbers.shape[1], tuple(positions))
        outputs = np.empty((len(numbers), self.biases[-1].size), dtype=np.float32)
        for start in range(0, len(numbers), STRIDE_ROWS):
            rows = numbers[start : start + STRIDE_ROWS]
            panels, bias = first
            hidden = product(in_blocks(rows), panels)
            hidden += bias
            for panels, bias in others:
                np.maximum(hidden, _ZEROS[: hidden.shape[2]], out=hidden)
                hidden = product(hidden, panels)
                hidden += bias
            outputs[start : start + STRIDE_ROWS] = hidden.reshape(-1, outputs.shape[1])[: len(rows)]
        return outputs

    def _layers(self, width: int, positions: tuple[int, ...]) -> list[tuple[Floats, Floats]]:
        """Panels and bias of each layer, the choices in the first bias."""
        if (width, positions) not in self._known:
            weights = (self.weights[0][:width], *self.weights[1:])
            if width not in self._known:
                self._known[width] = [in_panels(weight) for weight in weights]
            first = self.biases[0] + self.weights[0][list(positions)].sum(axis=0)
            self._known[width, positions] = list(zip(self._known[width], (first, *self.biases[1:]), strict=True))
        layers: list[tuple[Floats, Floats]] = self._known[width, positions]
        return layers
