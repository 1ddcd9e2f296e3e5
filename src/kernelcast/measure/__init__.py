"""Measure kernels on a CUDA GPU: a plan of calls, runners that launch them, timing, and a table of what was seen."""
