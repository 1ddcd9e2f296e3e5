"""Modules and names that were documented in 0.2 and have moved: they work for one more release, with a warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

MODULES = {
    "kernelcast.kernels": "kernelcast.ops",
    "kernelcast.kernels.base": "kernelcast.ops.base",
    "kernelcast.kernels.work": "kernelcast.ops.work",
    "kernelcast.networks": "kernelcast.models",
    "kernelcast.networks.deployment": "kernelcast.inference.deployment",
    "kernelcast.parallel": "kernelcast.inference.deployment",
    "kernelcast.parallel.training": "kernelcast.training.layout",
    "kernelcast.serving.engine.fleet": "kernelcast.serving.service",
    "kernelcast.serving.engine.settings": "kernelcast.serving.service",
    "kernelcast.serving.engine.simulate": "kernelcast.serving.step_times",
    "kernelcast.serving.infer": "kernelcast.inference.infer",
    "kernelcast.serving.workload": "kernelcast.inference.workload",
}
NAMES = {"Pool": "EnginePool", "settings_of": "engine_settings", "tables_for": "step_time_tables"}


def moved_names(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """``__getattr__`` of a module whose names are elsewhere now: the old name -> "module.name"."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, now = homes[name].rpartition(".")
        warnings.warn(f"{module}.{name} is now {home}.{now}", DeprecationWarning, stacklevel=2)
        return getattr(import_module(home), now)

    return find


class _MovedModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        home, now = MODULES[self.__name__], NAMES.get(name, name)
        return moved_names(self.__name__, {name: f"{home}.{now}"})(name)


def register() -> None:
    """Old modules are known by name, so that importing them finds these."""
    for name in MODULES:
        sys.modules.setdefault(name, _MovedModule(name))
