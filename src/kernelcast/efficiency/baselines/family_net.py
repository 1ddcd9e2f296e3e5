"""What the learned baselines share: one small network a family, in memory and as plain arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kernelcast.efficiency.network import Encoder, Floats, Layers
from kernelcast.efficiency.predictor import Question
from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu
from kernelcast.kernels.work import Array
from kernelcast.machine.analyse import Score, by_pipelines

Arrays = dict[str, NDArray[Any]]
_RANGES = ("low", "high", "mean", "scale")


@dataclass(frozen=True)
class FamilyNet:
    """Encoder and layers of one family; it is told the op and the dtype, but no stack and no GPU by name."""

    encoder: Encoder
    layers: Layers

    def __call__(self, values: Floats, words: Mapping[str, str]) -> Array:
        """(rows, outputs) of rows that share their words."""
        return self.layers(self.encoder.numbers(values), self.encoder.positions(words)).astype(np.float64)

    def to_arrays(self, prefix: str) -> tuple[Arrays, dict[str, Any]]:
        arrays: Arrays = {f"{prefix}.{name}": getattr(self.encoder, name) for name in _RANGES}
        for at, (weight, bias) in enumerate(zip(self.layers.weights, self.layers.biases, strict=True)):
            arrays |= {f"{prefix}.weight{at}": weight, f"{prefix}.bias{at}": bias}
        vocabulary = {name: list(words) for name, words in self.encoder.vocabulary.items()}
        about = {"names": list(self.encoder.names), "vocabulary": vocabulary, "layers": len(self.layers.weights)}
        return arrays, about

    @classmethod
    def from_arrays(cls, prefix: str, arrays: Mapping[str, NDArray[Any]], about: Mapping[str, Any]) -> FamilyNet:
        def floats(name: str) -> Floats:
            return np.asarray(arrays[f"{prefix}.{name}"], dtype=np.float32)

        ranges = {name: floats(name) for name in _RANGES}
        vocabulary = {name: tuple(words) for name, words in about["vocabulary"].items()}
        depth = range(int(about["layers"]))
        return cls(
            Encoder(names=tuple(about["names"]), vocabulary=vocabulary, **ranges),
            Layers(tuple(floats(f"weight{at}") for at in depth), tuple(floats(f"bias{at}") for at in depth)),
        )


@dataclass(frozen=True)
class NetBaseline:
    """A baseline with a network for each family that it was fitted on."""

    nets: Mapping[str, FamilyNet] = field(default_factory=dict)
    name: str = ""
    keep: int = 1

    def score(self, target: Gpu) -> Score:
        return by_pipelines

    @classmethod
    def merged(cls, models: Iterable[Self]) -> Self:
        """One model of all families; a later one replaces an earlier one's family."""
        return cls({family: net for model in models for family, net in model.nets.items()})

    def to_arrays(self) -> tuple[Arrays, dict[str, Any]]:
        """All weights by name, and what JSON can hold beside them."""
        arrays: Arrays = {}
        about: dict[str, Any] = {"name": self.name, "families": {}}
        for family, net in self.nets.items():
            own, about["families"][family] = net.to_arrays(family)
            arrays |= own
        return arrays, about

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], about: Mapping[str, Any]) -> Self:
        """What ``to_arrays`` gave."""
        if about["name"] != cls().name:
            raise KernelcastError(f"these are weights of {about['name']}, not of {cls().name}")
        families = about["families"].items()
        return cls({family: FamilyNet.from_arrays(family, arrays, own) for family, own in families})


def words_of(question: Question) -> dict[str, str]:
    """What a network may know by name: the originals have one model a kernel, so library and stack are words too."""
    named = {name: question.calls.choice(name) for name in ("dtype", "backend", "stack")}
    return {"op": question.kernel.op, **{name: str(word) for name, word in named.items() if word is not None}}


def sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * x))
