"""Predictors by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

from kernelcast import plugins
from kernelcast.errors import KernelcastError, unknown
from kernelcast.forecast.generic import Generic
from kernelcast.forecast.learned import Learned, load
from kernelcast.forecast.predictor import Predictor

BASELINES = ("roofline", "pipeweave", "neusight")  # kernelcast-lab has them


def _baseline(name: str) -> Predictor:
    made: Predictor = plugins.plugin(plugins.PREDICTORS, name)()
    return made


PREDICTORS: Mapping[str, Callable[[], Predictor]] = {
    "learned": Learned,
    "generic": Generic,
    **{name: functools.partial(_baseline, name) for name in BASELINES},
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
