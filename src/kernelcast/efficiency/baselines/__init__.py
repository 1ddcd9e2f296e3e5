"""Published methods, implemented afresh, to compare with: the roofline, PipeWeave and NeuSight.

None of them is raised to the machine's bound, and none says anything about intervals or ceilings.
"""

from kernelcast.efficiency.baselines.neusight import Neusight
from kernelcast.efficiency.baselines.pipeweave import Pipeweave
from kernelcast.efficiency.baselines.roofline import Roofline

__all__ = ["Neusight", "Pipeweave", "Roofline"]
