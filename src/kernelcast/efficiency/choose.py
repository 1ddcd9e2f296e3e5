"""Predictors by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

from kernelcast.efficiency.baselines import Neusight, Pipeweave, Roofline
from kernelcast.efficiency.generic import Generic
from kernelcast.efficiency.learned import WEIGHTS, Learned, load
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


def learned_from(folder: Path) -> Learned:
    """The learned efficiency with the weights of a folder, as `kernelcast fit` writes them; others are refused."""
    from safetensors import SafetensorError

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise KernelcastError(f"no weights in {folder}: no FAMILY.safetensors, as `kernelcast fit -o DIR` writes")
    for path in files:
        try:
            load(folder, path.stem)
        except (SafetensorError, KeyError, TypeError) as error:
            raise KernelcastError(f"{path} holds no weights of kernelcast fit ({error})") from None
    return Learned(folder)
