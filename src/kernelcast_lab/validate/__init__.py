"""Replay what the project measured itself: kernels, and whole models."""

from kernelcast_lab.validate.kernels import Line, overall, repeated, tables, validate

__all__ = ["Line", "overall", "repeated", "tables", "validate"]
