"""Forecast how long GPU work takes, which pipeline of the chip binds, and how far that is from the best."""

from __future__ import annotations

from kernelcast import _start  # noqa: F401  first of all: Ctrl-C is quiet while the rest is imported

# isort: split
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from kernelcast._version import __version__ as __version__
from kernelcast.efficiency import Calibration, load_calibration
from kernelcast.errors import KernelcastError
from kernelcast.hardware import Fabric, Gpu, changed, fabric, fabrics, gpu, gpu_ids
from kernelcast.kernels import REGISTRY, Kernel, kernel
from kernelcast.predict import Conditions, Prediction, predict, predict_many
from kernelcast.tables import predict_table

if TYPE_CHECKING:
    from kernelcast.advise.compare.api import compare_training as compare_training
    from kernelcast.api import compare as compare
    from kernelcast.api import evidence as evidence
    from kernelcast.api import infer as infer
    from kernelcast.api import infer_pools as infer_pools
    from kernelcast.api import plan as plan
    from kernelcast.api import simulate as simulate
    from kernelcast.kernels.gemm import Bmm as Bmm
    from kernelcast.kernels.gemm import Gemm as Gemm
    from kernelcast.timeline.power import with_cap as with_cap
    from kernelcast.tracing import trace as trace
    from kernelcast.training import run_step as run_step


# What takes a while to import is imported when it is asked for
_LATER = {
    "compare": "kernelcast.api", "compare_training": "kernelcast.advise.compare.api", "evidence": "kernelcast.api",
    "infer": "kernelcast.api", "infer_pools": "kernelcast.api", "plan": "kernelcast.api",
    "run_step": "kernelcast.training", "simulate": "kernelcast.api", "with_cap": "kernelcast.timeline.power",
}  # fmt: skip

__all__ = [
    "Calibration", "Conditions", "Fabric", "Gpu", "Kernel", "KernelcastError", "Prediction", "changed", "compare",
    "compare_training", "evidence", "fabric", "fabrics", "gpu", "gpu_ids", "infer", "infer_pools", "kernel",
    "load_calibration", "plan", "predict", "predict_many", "predict_table", "run_step", "simulate", "trace", "with_cap",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Kernel classes by name (``kernelcast.Gemm``), also those of files added later; ``trace``, which needs PyTorch;
    what is asked of whole models."""
    if name == "trace":
        return _tracer()
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    for found in REGISTRY.values():
        if found.__name__ == name:
            return found
    raise AttributeError(f"module 'kernelcast' has no attribute {name!r}")


def _tracer() -> Any:
    if importlib.util.find_spec("torch") is None:
        raise KernelcastError("tracing needs PyTorch (no GPU): pip install 'kernelcast[torch]'")
    from kernelcast.tracing import trace

    return trace
