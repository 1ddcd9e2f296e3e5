"""Who works chunks off: this process, several on this machine, or a Ray cluster. The rows are the same."""

from kernelcast.search.sweep.engines.base import ENGINES, Lost, engine
from kernelcast.search.sweep.engines.processes import Processes

__all__ = ["ENGINES", "Lost", "Processes", "engine"]
