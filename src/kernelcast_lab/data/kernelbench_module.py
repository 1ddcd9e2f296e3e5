"""A PyTorch module of the steps that ``kernelbench.toml`` gives. This file imports torch."""

from __future__ import annotations

import weakref
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
    """Modules and expressions, one after another; a model that was built and never put in evaluation mode.

    ``forward`` is compiled into one function, so that the host makes the Python calls of the benchmark's own modules: a
    loop over the steps would add to the time of an op that takes a few microseconds.
    """

    def __init__(self, problem: Mapping[str, Any], version: str) -> None:
        super().__init__()
        sizes = problem[version]
        names: dict[str, Any] = {**_NAMES, **sizes}
        for name, text in problem["define"].items():
            names[name] = eval(text, names)
        lines = ["def forward(x, y=None, z=None):"]
        for name, shape in problem.get("weights", {}).items():
            setattr(self, name, nn.Parameter(empty(shape, sizes)))
            lines.append(f"{name} = self.{name}")
        for at, text in enumerate(problem.get(f"{version}_run", problem["run"])):
            if text.startswith("nn."):
                with torch.device("meta"):
                    setattr(self, f"part{at}", eval(text, names))
                lines.append(f"x = self.part{at}(*x) if isinstance(x, tuple) else self.part{at}(x)")
            else:
                name, _, value = text.rpartition(" = ")
                lines.append(f"{name or 'x'} = {value}")
        names["self"] = weakref.proxy(self)
        exec("\n    ".join([*lines, "return x"]), names)
        self.forward = names["forward"]

    def train(self, mode: bool = True) -> Self:
        """The benchmark times modules as they were built: batch norm of batch statistics, dropout on."""
        return super().train(True)
