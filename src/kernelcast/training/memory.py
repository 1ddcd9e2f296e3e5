"""Memory of one rank of a training job: what each stage holds, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu
from kernelcast.kernels.work import Array
from kernelcast.networks.traced import Trace
from kernelcast.timeline import Memory

Places = NDArray[np.int64]


# Context, cuBLAS and cuDNN workspaces of one process; what the caching allocator cannot use adds a twentieth.
FRAMEWORK_BYTES = 1.2e9
FRAGMENTED = 0.05


def held(parts: Mapping[str, float], gpu: Gpu) -> Memory:
    """What a model holds, and beside it context and workspaces, and what the allocator cannot use."""
    overhead = FRAMEWORK_BYTES + FRAGMENTED * sum(parts.values())
    return Memory({**parts, "overhead": overhead}, gpu.dram_bytes, gpu.dram_bytes)


def step_memory(trace: Trace, gpu: Gpu) -> Memory:
    """Of one GPU that runs a whole traced step."""
    names = ("parameters", "gradients", "optimizer", "inputs", "activations")
    return held({name: float(getattr(trace.footprint, name)) for name in names}, gpu)


def check_fits(trace: Trace, gpu: Gpu) -> None:
    """Refuse a step that does not fit, and say by how much and what needs less."""
    found = step_memory(trace, gpu)
    if found.fits:
        return
    named = ("parameters", "gradients", "optimizer", "activations")
    told = ", ".join(f"{name} {found[name] / 1e9:,.1f}" for name in named if found[name])
    raise KernelcastError(
        f"{trace.name} needs {found.used_bytes / 1e9:,.1f} GB at its peak ({told}), "
        f"{found.missing_bytes / 1e9:,.1f} GB more than {gpu.id} has; "
        "a smaller batch, checkpointing, or several GPUs (dp with zero, tp, pp) need less of each"
    )


@dataclass(frozen=True)
class Lives:
    """Activations by what uses them last: they live from the op that makes them to that one."""

    made: Places  # of the op that makes each
    last: Places
    bytes: Array
    unit: Places
    ops: int
    forward_end: int

    @classmethod
    def of(cls, trace: Trace, units: Sequence[int]) -> Lives:
        kept = {
            out.storage for g in trace.gradients for out in trace.ops[g.ready].outputs if out.elements == g.elements
        }
        made: dict[int, int] = {}
        last: dict[int, int] = {}
        sizes: dict[int, int] = {}
        for at, op in enumerate(trace.ops):
            if op.phase == "optimizer":
                break
            given = {x.storage for x in op.inputs}
            for x in op.outputs:
                if x.storage not in made and x.storage not in given and x.storage not in kept:
                    made[x.storage], sizes[x.storage] = at, x.bytes
            for x in (*op.inputs, *op.outputs):
                if x.storage in made:
                    last[x.storage] = at
        keys = list(made)
        forward = max((at for at, op in enumerate(trace.ops) if op.phase == "forward"), default=-1)
        return cls(
            np.array([made[k] for k in keys], dtype=np.int64), np.array([last[k] for k in keys], dtype=np.int64),
            np.array([float(sizes[k]) for k in keys]), np.array([units[made[k]] for k in keys], dtype=np.int64),
            len(trace.ops), forward,
        )  # fmt: skip

    def alive(self, mine: Callable[[Places], NDArray[np.bool_]] | None = None) -> Array:
        """Bytes alive during each op, of the units that ``mine`` takes."""
        chosen = np.ones(len(self.made), dtype=bool) if mine is None else mine(self.unit)
        change = np.zeros(self.ops + 1)
        np.add.at(change, self.made[chosen], self.bytes[chosen])
        np.add.at(change, self.last[chosen] + 1, -self.bytes[chosen])
        return np.cumsum(change)[:-1]


def gradients_alive(trace: Trace, sizes: Sequence[float], wanted: Sequence[bool]) -> Array:
    """Bytes of gradients there are during each op of a first micro-batch."""
    change = np.zeros(len(trace.ops))
    for g, size, mine in zip(trace.gradients, sizes, wanted, strict=True):
        change[g.ready] += size if mine else 0.0
    return np.cumsum(change)
