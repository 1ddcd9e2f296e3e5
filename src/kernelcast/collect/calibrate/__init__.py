"""Measurements of one GPU -> a calibration. NumPy only, no PyTorch."""

from kernelcast.collect.calibrate.fit import LEAST_ROWS, calibrate
from kernelcast.collect.calibrate.residuals import read_measured
from kernelcast.collect.calibrate.selection import Selection, next_calls

__all__ = ["LEAST_ROWS", "Selection", "calibrate", "next_calls", "read_measured"]
