"""Memory of one rank of a training job: what each stage holds, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernelcast.kernels.work import Array
from kernelcast.networks.traced import Trace
from kernelcast.training.step import FRAGMENTED, FRAMEWORK_BYTES

Places = NDArray[np.int64]


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU at the peak of the step. Parts add up to ``used_bytes``."""

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: float  # of all micro-batches in flight
    gathered_bytes: float  # parameters that ZeRO 3 has whole for a moment
    input_bytes: float
    gpu_bytes: float

    @property
    def model_bytes(self) -> float:
        return (
            self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes
            + self.gathered_bytes + self.input_bytes
        )  # fmt: skip

    @property
    def overhead_bytes(self) -> float:
        """Context and workspaces, and what the allocator cannot use."""
        return FRAMEWORK_BYTES + FRAGMENTED * self.model_bytes

    @property
    def used_bytes(self) -> float:
        return self.model_bytes + self.overhead_bytes

    @property
    def fits(self) -> bool:
        return self.used_bytes <= self.gpu_bytes

    @property
    def missing_bytes(self) -> float:
        return max(0.0, self.used_bytes - self.gpu_bytes)


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
