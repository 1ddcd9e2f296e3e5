"""Forecast how long GPU work takes, which pipeline of the chip binds, and how far that is from the best."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from kernelcast._version import __version__ as __version__
from kernelcast.efficiency import Calibration, load_calibration
from kernelcast.errors import KernelcastError
from kernelcast.hardware import Fabric, Gpu, fabric, fabrics, gpu, gpu_ids
from kernelcast.kernels import REGISTRY, Kernel, kernel
from kernelcast.predict import Conditions, Prediction, predict, predict_many
from kernelcast.tables import predict_table

if TYPE_CHECKING:
    from kernelcast.advise.compare.api import compare as compare
    from kernelcast.advise.compare.api import compare_training as compare_training
    from kernelcast.kernels.gemm import Bmm as Bmm
    from kernelcast.kernels.gemm import Gemm as Gemm
    from kernelcast.tracing import trace as trace
    from kernelcast.training import run_step as run_step


__all__ = [
    "Calibration", "Conditions", "Fabric", "Gpu", "Kernel", "KernelcastError", "Prediction", "fabric", "fabrics", "gpu",
    "gpu_ids", "kernel", "load_calibration", "predict", "predict_many", "predict_table",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Kernel classes by name (``kernelcast.Gemm``), also those of files added later; ``trace``, which needs PyTorch,
    ``run_step``, ``compare`` and ``compare_training``."""
    if name == "trace":
        return _tracer()
    if name == "run_step":
        from kernelcast.training import run_step

        return run_step
    if name in ("compare", "compare_training"):
        from kernelcast.advise.compare import api

        return getattr(api, name)
    for found in REGISTRY.values():
        if found.__name__ == name:
            return found
    raise AttributeError(f"module 'kernelcast' has no attribute {name!r}")


def _tracer() -> Any:
    if importlib.util.find_spec("torch") is None:
        raise KernelcastError("tracing needs PyTorch (no GPU): pip install 'kernelcast[torch]'")
    from kernelcast.tracing import trace

    return trace
