"""Work put on a GPU, before a candidate is chosen: every number is made when it is asked for, and once.

Numbers keep the shape that they have by themselves, which broadcasts to (candidates, calls): what no candidate changes
is computed once a call, and a pipeline without demand costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.machine.lazy import lazy
from kernelcast.machine.limits import (
    LIMITS,
    NOTHING,
    Rotation,
    dram_bytes,
    extra_dram_bytes,
    kept_share,
    resident_share,
)
from kernelcast.machine.schedule import busiest_share, ctas_per_sm
from kernelcast.ops.work import Array, Number, Work


@dataclass(frozen=True, eq=False)
class Placed:
    """One kernel of many calls with all its candidates; ``without``: limits left out."""

    work: Work
    gpu: Gpu
    rotations: Rotation
    without: Collection[str] = ()

    def __getitem__(self, name: str) -> Number:
        """A number by its name, as scores ask for it."""
        found: Number = getattr(self, name)
        return found

    @property
    def tasks(self) -> Number:
        return self.work.tasks

    @property
    def serial_steps(self) -> Number:
        return self.work.serial_steps

    @property
    def launches(self) -> Number:
        return self.work.launches

    @property
    def useful_flops(self) -> Number:
        return self.work.useful_flops

    @lazy
    def tile_logs(self) -> dict[str, Number]:
        """log2 of the numbers that name a candidate, once for all that are chosen."""
        return {name: np.log2(np.maximum(value, 1e-9)) for name, value in self.work.tile.items()}

    @lazy
    def limits(self) -> list[Array]:
        """Seconds of each pipeline, work spread evenly."""
        share = np.asarray(self.work.tasks) / self.gpu.sm_count
        return [self._limit(name, share) for name in LIMITS]

    @lazy
    def busiest_limits(self) -> list[Array]:
        """The same for the busiest SM, as its schedule loads it."""
        return [self._limit(name, self.busiest) for name in LIMITS]

    def _limit(self, name: str, share: Array) -> Array:
        if name in self.without:
            return NOTHING
        return LIMITS[name](self.work, self.gpu, share, self.rotations)

    @lazy
    def busiest(self) -> Array:
        """Mean tasks on the busiest SM."""
        return busiest_share(self.work, self.gpu.sm_count)

    @lazy
    def ctas_per_sm(self) -> Array:
        return ctas_per_sm(self.work, self.gpu)

    @lazy
    def rounds(self) -> Array:
        """Of CTAs, one after another, on an SM."""
        rounds: Array = np.ceil(np.asarray(self.work.tasks) / (self.gpu.sm_count * self.ctas_per_sm))
        return rounds

    @lazy
    def step_s(self) -> Array:
        """Dependent steps of all rounds of CTAs, one after another: as many mean tasks as there are rounds, or the
        longest alone."""
        work, rounds = self.work, self.rounds
        walked = rounds * (work.serial_steps if work.mean_steps is None else work.mean_steps)
        if work.mean_steps is not None:
            walked = np.maximum(walked, np.where(rounds > 0, work.serial_steps, 0.0))
        return walked * work.step_cycles / self.gpu.clock_boost_hz

    @lazy
    def setup_s(self) -> Array:
        """Set-up and write-back of all rounds."""
        return self.rounds / self.gpu.clock_boost_hz * self.work.task_cycles

    @lazy
    def flops(self) -> Array:
        """Done, padding included."""
        return np.asarray(self.work.tasks) * (np.asarray(self.work.tensor_flops) + self.work.fma_flops)

    @lazy
    def dram_bytes(self) -> Array:
        """The least."""
        return dram_bytes(self.work, self.gpu, self.rotations)

    @lazy
    def refetched_bytes(self) -> Array:
        """Expected on top."""
        return extra_dram_bytes(self.work, self.gpu, self.rotations)

    @lazy
    def footprint_bytes(self) -> Array:
        return np.asarray(self.work.streamed_bytes) + self.work.activation_bytes

    @lazy
    def resident_share(self) -> Array:
        return resident_share(self.work, self.gpu, self.rotations, self.rotations.weights)

    @lazy
    def kept_share(self) -> Array:
        """What is expected of it."""
        return kept_share(self.work, self.gpu, self.rotations, self.rotations.weights)
