"""Predictors by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

from kernelcast.efficiency.baselines import Neusight, Pipeweave, Roofline
from kernelcast.efficiency.generic import Generic
from kernelcast.efficiency.learned import WEIGHTS, Learned
from kernelcast.efficiency.network import read_tensors
from kernelcast.efficiency.predictor import Predictor
from kernelcast.errors import KernelcastError, unknown


def _baseline(kind: type[Pipeweave] | type[Neusight], name: str, folder: Path = WEIGHTS / "baselines") -> Predictor:
    """A baseline with the weights that ship."""
    path = folder / f"{name}.safetensors"
    if not path.exists():
        raise KernelcastError(f"no weights for the baseline {name} in {folder}")
    tensors, told = read_tensors(path)
    return kind.from_arrays(tensors, told["about"])


PREDICTORS: Mapping[str, Callable[[], Predictor]] = {
    "learned": Learned,
    "generic": Generic,
    "roofline": Roofline,
    "pipeweave": functools.partial(_baseline, Pipeweave, "pipeweave"),
    "neusight": functools.partial(_baseline, Neusight, "neusight"),
}


@functools.cache
def predictor(name: str) -> Predictor:
    """The predictor called ``name``: learned (the default), generic, or a baseline."""
    if name not in PREDICTORS:
        raise unknown("predictor", name, PREDICTORS)
    return PREDICTORS[name]()
