"""Steps of traced models: on one GPU (step.py), and on many (scale.py)."""

from kernelcast.schedule.timeline import Host, host, host_ids
from kernelcast.training.step import Step, run_step

__all__ = ["Host", "Step", "host", "host_ids", "run_step"]
