"""Joules: what calls draw, by the work of each pipeline; and what a power limit costs in time."""

from kernelcast.energy.activity import Activity, activity
from kernelcast.energy.model import PowerModel, power_model
from kernelcast.energy.settled import Settled, held_longer, settled, settled_run

__all__ = ["Activity", "PowerModel", "Settled", "activity", "held_longer", "power_model", "settled", "settled_run"]
