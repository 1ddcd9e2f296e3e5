"""Published methods, implemented afresh, to compare with: the roofline, PipeWeave and NeuSight.

None of them is raised to the machine's bound, and none says anything about intervals or ceilings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kernelcast.errors import KernelcastError
from kernelcast.forecast.network import read_tensors
from kernelcast_lab.baselines.neusight import Neusight
from kernelcast_lab.baselines.pipeweave import Pipeweave
from kernelcast_lab.baselines.roofline import Roofline

WEIGHTS = Path(__file__).parent / "weights"

__all__ = ["Neusight", "Pipeweave", "Roofline"]


def shipped_pipeweave(folder: Path = WEIGHTS) -> Pipeweave:
    """PipeWeave's method with the weights that ship."""
    return Pipeweave.from_arrays(*_weights("pipeweave", folder))


def shipped_neusight(folder: Path = WEIGHTS) -> Neusight:
    """NeuSight's method with the weights that ship."""
    return Neusight.from_arrays(*_weights("neusight", folder))


def _weights(name: str, folder: Path) -> tuple[Any, Any]:
    path = folder / f"{name}.safetensors"
    if not path.exists():
        raise KernelcastError(f"no weights for the baseline {name} in {folder}")
    tensors, metadata = read_tensors(path)
    return tensors, metadata["about"]
