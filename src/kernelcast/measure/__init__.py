"""Measure kernels on a CUDA GPU: calls that are chosen, runners that launch them, timing, and a table of what was seen."""
