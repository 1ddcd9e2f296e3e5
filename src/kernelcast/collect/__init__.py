"""Measure kernels on a CUDA GPU: calls that are chosen, runners that launch them, timing, a table of what was seen."""
