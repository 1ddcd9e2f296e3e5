"""Measurements of one GPU -> a calibration. NumPy only: whoever measures need not have PyTorch."""

from kernelcast.calibrate.make import LEAST_ROWS, calibrate
from kernelcast.calibrate.measured import read_measured

__all__ = ["LEAST_ROWS", "calibrate", "read_measured"]
