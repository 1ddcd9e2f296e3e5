"""Trace any PyTorch model into ``tracing.traced.Trace``: needs torch, but no GPU. Only this package imports it; what
reads traces (``traced``, ``aten``, ``fusion``) does not."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernelcast.tracing.run import MODES, OPTIMIZERS, trace

__all__ = ["MODES", "OPTIMIZERS", "trace"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'kernelcast.tracing' has no attribute {name!r}")
    import_module("kernelcast.tracing.hub")  # lets torchvision be imported
    return getattr(import_module("kernelcast.tracing.run"), name)
