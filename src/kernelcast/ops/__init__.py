"""Kernel families. Every file in this folder is imported, and registers the ops it defines."""

from __future__ import annotations

import importlib
import pkgutil

from kernelcast.ops.base import REGISTRY, Calls, Kernel, kernel, kernel_class, parameters_of
from kernelcast.ops.work import Work

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["REGISTRY", "Calls", "Kernel", "Work", "kernel", "kernel_class", "parameters_of"]
