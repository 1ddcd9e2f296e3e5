"""Joules: what calls draw, by the work of each pipeline; and what a power limit costs in time."""

from kernelcast.energy.activity import Activity, activity
from kernelcast.energy.model import OperatingPoint, PowerModel, held_longer, power_model, run_operating_point, settled

__all__ = [
    "Activity",
    "OperatingPoint",
    "PowerModel",
    "activity",
    "held_longer",
    "power_model",
    "run_operating_point",
    "settled",
]
