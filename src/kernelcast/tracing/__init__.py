"""Trace any PyTorch model into ``networks.traced.Trace``: needs torch, but no GPU. Only this package imports it."""

from kernelcast.tracing.run import MODES, OPTIMIZERS, trace

__all__ = ["MODES", "OPTIMIZERS", "trace"]
