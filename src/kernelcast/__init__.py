"""Forecast how long GPU work takes, which pipeline is the bottleneck, and how far a kernel is from its best."""

from __future__ import annotations

from kernelcast import _start  # noqa: F401  first of all: Ctrl-C is quiet while the rest is imported

# isort: split
import importlib
from typing import TYPE_CHECKING, Any

from kernelcast import _moved
from kernelcast._version import __version__ as __version__
from kernelcast.errors import KernelcastError
from kernelcast.forecast import Calibration, load_calibration
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict import Prediction, predict, predict_many
from kernelcast.forecast.predict_table import predict_table
from kernelcast.hardware import Fabric, Gpu, changed, fabric, fabrics, gpu, gpu_ids
from kernelcast.ops import REGISTRY, Kernel, kernel

_moved.register()

if TYPE_CHECKING:
    from kernelcast.app.api import compare as compare
    from kernelcast.app.api import evidence as evidence
    from kernelcast.app.api import infer as infer
    from kernelcast.app.api import infer_pools as infer_pools
    from kernelcast.app.api import plan as plan
    from kernelcast.app.api import simulate as simulate
    from kernelcast.app.api import trace as trace
    from kernelcast.app.api import train as train
    from kernelcast.energy.power import with_cap as with_cap
    from kernelcast.models import model_ids as model_ids
    from kernelcast.ops.gemm import Bmm as Bmm
    from kernelcast.ops.gemm import Gemm as Gemm
    from kernelcast.search.compare.training import compare_training as compare_training
    from kernelcast.training import run_step as run_step


# What takes a while to import is imported on first use
_LATER = {
    **dict.fromkeys(("compare", "evidence", "infer", "infer_pools", "plan", "simulate", "trace", "train"),
                    "kernelcast.app.api"),
    "compare_training": "kernelcast.search.compare.training", "run_step": "kernelcast.training",
    "model_ids": "kernelcast.models", "with_cap": "kernelcast.energy.power",
}  # fmt: skip

__all__ = [
    "Calibration", "Conditions", "Fabric", "Gpu", "Kernel", "KernelcastError", "Prediction", "changed", "compare",
    "compare_training", "evidence", "fabric", "fabrics", "gpu", "gpu_ids", "infer", "infer_pools", "kernel",
    "load_calibration", "model_ids", "plan", "predict", "predict_many", "predict_table", "run_step", "simulate",
    "trace", "train", "with_cap",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Kernel classes by name (``kernelcast.Gemm``), also those of files added later; the functions for whole models."""
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    if not name.startswith("_") and (kernel_type := REGISTRY.class_named(name)):
        globals()[name] = kernel_type  # found once
        return kernel_type
    raise AttributeError(f"module 'kernelcast' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, and the kernel classes."""
    return sorted({*__all__, *(kernel_type.__name__ for kernel_type in REGISTRY.values()), "__version__"})
