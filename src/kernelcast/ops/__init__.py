"""Kernel families. A file in this folder registers the ops it defines; it is imported when one of them is used."""

from __future__ import annotations

from kernelcast.ops.base import REGISTRY, Calls, Kernel, kernel, kernel_class, parameters_of
from kernelcast.ops.work import Work

__all__ = ["REGISTRY", "Calls", "Kernel", "Work", "kernel", "kernel_class", "parameters_of"]
