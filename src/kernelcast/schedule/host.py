"""What the host costs an eager run: it launches kernels one by one, and the GPU waits where it is too slow."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kernelcast.errors import KernelcastError
from kernelcast.forecast.run_scales import UNSCALED, Scale
from kernelcast.toml_folder import ids_in, read_from

_FOLDER = Path(__file__).parents[1] / "stacks" / "hosts"


@dataclass(frozen=True)
class Host:
    """One file of ``hosts/``, or of `kernelcast collect --host`: seconds of one thread of Python and PyTorch."""

    id: str
    name: str
    step_s: float  # a step, whatever it does
    launch_s: float  # a kernel, with its share of the op that launches it
    view_s: float  # an op of the forward pass that launches none
    python_s: float  # a call of a Python function of the program, beside its ops
    recorded_s: float  # what autograd adds to an op of the forward pass
    backward_s: float  # an op of the backward pass, beside its kernels
    backward_view_s: float
    parameter_s: float  # a tensor of parameters in a training step: its gradient kept, its update listed
    gap_s: float  # between two kernels of a stream, both launched in time
    graph_gap_s: float  # between two kernels of a CUDA graph
    graph_s: float  # to launch a graph
    faster: float  # share of its time that it may need less, eight times of ten
    slower: float  # and more
    sources: tuple[tuple[str, str], ...]

    def scaled(self, scale: Scale) -> Host:
        """As measured runs found it: its launches so many times as long, and how sure that is."""
        if scale == UNSCALED:
            return self
        costs: dict[str, Any] = {name: getattr(self, name) * scale.factor for name in COSTS}
        faster, slower = 1 - (1 - self.faster) ** scale.reach, (1 + self.slower) ** scale.reach - 1
        return replace(self, **costs, faster=faster, slower=slower)


COSTS = ("step_s", "launch_s", "view_s", "python_s", "recorded_s", "backward_s", "backward_view_s", "parameter_s")


def host_ids() -> list[str]:
    return ids_in(_FOLDER)


@functools.cache
def host(name: str) -> Host:
    """The host called ``name``, or that of a file NAME.toml."""
    if not name.endswith(".toml"):
        return read_from(_FOLDER, Host, name)
    path = Path(name)
    if not path.is_file():
        raise KernelcastError(f"no file {name}; kernelcast collect --host -o {name} measures one")
    try:
        return read_from(path.parent, Host, path.stem)
    except tomllib.TOMLDecodeError as error:
        raise KernelcastError(f"{name}: {error}") from None
