"""The pipeline machine: tasks on a GPU -> occupancy, schedule, busiest SM, and the limit of each pipeline."""

from kernelcast.machine.analyse import Analysis, analyse
from kernelcast.machine.limits import LIMITS

__all__ = ["LIMITS", "Analysis", "analyse"]
