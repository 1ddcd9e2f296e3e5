"""Measure kernels on a CUDA GPU: calls chosen, runners that launch them, timing, and a table of what was seen."""
