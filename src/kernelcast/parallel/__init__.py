"""How a model is cut over GPUs, and what they send one another."""

from kernelcast.parallel.layout import Layout

__all__ = ["Layout"]
