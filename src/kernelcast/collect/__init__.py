"""Measure kernels on a CUDA GPU: which calls, runners that launch them, timing, a table of the results."""
