"""Joules: the power model of a GPU, what calls and runs draw, and what a power limit costs in time."""

from kernelcast.energy.model import Activity, OperatingPoint, PowerModel, power_model, run_operating_point, sustained
from kernelcast.energy.power import activity

__all__ = ["Activity", "OperatingPoint", "PowerModel", "activity", "power_model", "run_operating_point", "sustained"]
