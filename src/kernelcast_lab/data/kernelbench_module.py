"""A PyTorch module of the steps that ``kernelbench.toml`` gives. This file imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional


class _Branches(nn.Module):
    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)


class Sum(_Branches):
    """Two branches of the same input, added."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.branches[0](x) + self.branches[1](x)


class Cat(_Branches):
    """Branches of the same input, their channels behind one another."""

    def forward(self, x: torch.Tensor) -> Any:
        return torch.cat([branch(x) for branch in self.branches], 1)


_NAMES = {"torch": torch, "nn": nn, "F": functional, "Sum": Sum, "Cat": Cat}


def empty(text: str, sizes: Mapping[str, Any]) -> torch.Tensor:
    """A tensor on the meta device of the shape 'b, n' or 'int64: b'; '' has no dimension."""
    dtype, _, shape = text.rpartition(":")
    dims = eval(f"({shape},)" if shape.strip() else "()", dict(sizes))
    return torch.empty(dims, dtype=getattr(torch, dtype or "float32"), device="meta")


class Steps(nn.Module):
    """Modules and expressions, one after another; a model that was built and never put in evaluation mode."""

    def __init__(self, problem: Mapping[str, Any], version: str) -> None:
        super().__init__()
        sizes = problem[version]
        self.names: dict[str, Any] = {**_NAMES, **sizes}
        for name, text in problem["define"].items():
            self.names[name] = eval(text, self.names)
        self.steps = [self._step(text) for text in problem.get(f"{version}_run", problem["run"])]
        self.parts = nn.ModuleList(step for _, step in self.steps if isinstance(step, nn.Module))
        weights = problem.get("weights", {})
        self.weights = nn.ParameterDict({name: nn.Parameter(empty(shape, sizes)) for name, shape in weights.items()})

    def _step(self, text: str) -> tuple[str, Any]:
        """The name that a step sets, and the module or the code whose value that is."""
        if text.startswith("nn."):
            with torch.device("meta"):
                return "x", eval(text, self.names)
        name, _, value = text.rpartition(" = ")
        return name or "x", compile(value, text, "eval")

    def forward(self, *inputs: Any) -> Any:
        names = {**self.names, **dict(self.weights.items()), **dict(zip("xyz", inputs, strict=False))}
        for name, step in self.steps:
            if isinstance(step, nn.Module):
                names[name] = step(*names["x"]) if isinstance(names["x"], tuple) else step(names["x"])
            else:
                names[name] = eval(step, names)
        return names["x"]

    def train(self, mode: bool = True) -> Self:
        """The benchmark times modules as they were built: batch norm of batch statistics, dropout on."""
        return super().train(True)
