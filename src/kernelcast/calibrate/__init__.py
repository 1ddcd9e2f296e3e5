"""Measurements of one GPU -> a calibration. NumPy only: whoever measures need not have PyTorch."""

from kernelcast.calibrate.make import LEAST_ROWS, calibrate
from kernelcast.calibrate.measured import read_measured
from kernelcast.calibrate.telling import Telling, next_calls

__all__ = ["LEAST_ROWS", "Telling", "calibrate", "next_calls", "read_measured"]
