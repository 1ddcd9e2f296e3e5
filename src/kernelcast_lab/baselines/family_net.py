"""What the learned baselines share: one small network a family, in memory and as plain arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from kernelcast.errors import KernelcastError
from kernelcast.forecast.evidence import EvidenceMatch, without_evidence
from kernelcast.forecast.network import Encoder, Floats, Layers
from kernelcast.forecast.predictor import PredictorInput
from kernelcast.hardware import Gpu
from kernelcast.machine.analyse import Score, by_pipelines
from kernelcast.ops.base import Configuration, Kernel
from kernelcast.ops.work import Array

Arrays = dict[str, Floats]


@dataclass(frozen=True)
class FamilyNet:
    """Encoder and layers of one family; its inputs include op, dtype, library and stack, but not the GPU's name."""

    encoder: Encoder
    layers: Layers

    def __call__(self, values: Floats, choices: Mapping[str, str]) -> Array:
        """(rows, outputs) of rows that share their choices."""
        return self.layers(self.encoder.numbers(values), self.encoder.positions(choices)).astype(np.float64)

    def to_arrays(self, family: str) -> tuple[Arrays, dict[str, Any]]:
        arrays = self.encoder.tensors(f"{family}.") | self.layers.tensors(f"{family}.weight", f"{family}.bias")
        return arrays, {"names": self.encoder.names, "vocabulary": self.encoder.vocabulary}

    @classmethod
    def from_arrays(cls, family: str, arrays: Arrays, about: Mapping[str, Any]) -> FamilyNet:
        layers = Layers.read(arrays, f"{family}.weight", f"{family}.bias")
        return cls(Encoder.read(arrays, about, f"{family}."), layers)


@dataclass(frozen=True)
class NetBaseline:
    """A baseline with a network for each family that it was fitted on."""

    nets: Mapping[str, FamilyNet] = field(default_factory=dict)
    name: str = ""
    keep: int = 1

    def score(self, target: Gpu) -> Score:
        return by_pipelines

    def what_if_spread(self, family: str) -> None:
        return None

    def matches(self, kernel: type[Kernel], choices: Configuration, target: Gpu) -> tuple[EvidenceMatch, ...]:
        return (without_evidence(kernel, choices, target),)

    @classmethod
    def merged(cls, models: Iterable[Self]) -> Self:
        """One model of all families; a later one replaces an earlier one's family."""
        return cls({family: net for model in models for family, net in model.nets.items()})

    def to_arrays(self) -> tuple[Arrays, dict[str, Any]]:
        """All weights by name, and what JSON can hold beside them."""
        arrays: Arrays = {}
        about: dict[str, Any] = {"name": self.name, "families": {}}
        for family, net in self.nets.items():
            family_arrays, about["families"][family] = net.to_arrays(family)
            arrays |= family_arrays
        return arrays, about

    @classmethod
    def from_arrays(cls, arrays: Arrays, about: Mapping[str, Any]) -> Self:
        """What ``to_arrays`` gave."""
        if about["name"] != cls().name:
            raise KernelcastError(f"these are weights of {about['name']}, not of {cls().name}")
        families = about["families"].items()
        return cls({family: FamilyNet.from_arrays(family, arrays, members) for family, members in families})


def categorical_inputs(question: PredictorInput) -> dict[str, str]:
    """Op, dtype, library and stack: the originals have one model a kernel."""
    named = {name: question.calls.choice(name) for name in ("dtype", "backend", "stack")}
    return {"op": question.kernel.op, **{name: str(choice) for name, choice in named.items() if choice is not None}}


def sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * x))
