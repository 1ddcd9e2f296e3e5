"""Limits -> efficiency: how close to its bound a kernel runs, with an interval and a ceiling."""

from kernelcast.efficiency.generic import Estimate, estimate

__all__ = ["Estimate", "estimate"]
