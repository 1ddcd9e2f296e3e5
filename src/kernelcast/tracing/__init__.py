"""Trace any PyTorch model into ``tracing.traced.Trace``: needs torch, but no GPU. Only this package imports it."""

from kernelcast.tracing.hub import make_torchvision_importable
from kernelcast.tracing.run import MODES, OPTIMIZERS, trace

make_torchvision_importable()

__all__ = ["MODES", "OPTIMIZERS", "trace"]
