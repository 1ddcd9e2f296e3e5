"""What a rank of a scaled step holds: its memory by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.networks.traced import Trace
from kernelcast.parallel.training import TrainingLayout
from kernelcast.timeline import Memory
from kernelcast.training.depth import Depth
from kernelcast.training.memory import Lives, gradients_alive
from kernelcast.training.memory import held as held_memory
from kernelcast.training.sharding import Weight


@dataclass(frozen=True)
class Rank:
    """One rank's share of a model. ``trace`` is the whole, ``depth`` the rank's own ops by unit."""

    trace: Trace
    depth: Depth
    layout: TrainingLayout
    gpu: Gpu
    weights: tuple[Weight, ...]
    part_of: tuple[int, ...]  # the part of each unit

    def has(self, mine: Sequence[int] | None, unit: int) -> bool:
        return mine is None or self.part_of[unit] in mine

    def ranks(self, weight: Weight) -> int:
        """How many ranks have the same parameter, among whom ZeRO deals it out."""
        return self.layout.dp if weight.group == "dp" else self.layout.dp // self.layout.ep

    @cached_property
    def lives(self) -> Lives:
        return Lives.of(self.depth.trace, self.depth.unit)

    @cached_property
    def factor(self) -> float:
        """What the traced run held over what its ops tell: some tensors live on in Python until a function returns."""
        before = self.trace.footprint
        alive = Lives.of(self.trace, [0] * len(self.trace.ops)).alive()
        sizes = [float(g.bytes) for g in self.trace.gradients]
        gradients = gradients_alive(self.trace, sizes, [True] * len(sizes))
        at = int(np.argmax(alive + gradients))
        if alive[at] < 0.5 * gradients[at] or not before.activations:
            return 1.0
        held = before.activations + before.gradients - gradients[at]
        return float(np.clip(held / alive[at], 0.8, 1.5))


def memory_of(rank: Rank, mine: Sequence[int] | None, held: int) -> Memory:
    """The memory of a stage that has the parts ``mine`` (None: all) and holds ``held`` micro-batches at once."""
    layout, before = rank.layout, rank.trace.footprint
    own = [w for w in rank.weights if rank.has(mine, w.unit)]
    whole = float(sum(w.gradient.bytes for w in own))
    sharded = sum(w.gradient.bytes / rank.ranks(w) for w in own)
    every = float(sum(g.bytes for g in rank.trace.gradients))
    last = mine is not None and any(part % layout.pp == layout.pp - 1 for part in mine)
    tied = rank.depth.tied_bytes() if last else 0.0
    by_unit: dict[int, float] = {}
    for w in own:
        by_unit[w.unit] = by_unit.get(w.unit, 0.0) + w.gradient.bytes
    activations, gradients = _peak(rank, mine, held)
    parts = {
        # frozen parameters and buffers are on every rank
        "parameter": max(0.0, before.parameters - every) + (sharded if layout.zero == 3 else whole + tied),
        "gradient": gradients + (tied if layout.zero < 2 else 0.0),
        "optimizer": before.optimizer * (sharded if layout.zero else whole + tied) / every,
        "activation": activations,  # of all micro-batches in flight
        # parameters that ZeRO 3 has whole for a moment: of the unit that runs and the one that is fetched ahead
        "gathered": sum(sorted(by_unit.values())[-2:]) if layout.zero == 3 and layout.dp > 1 else 0.0,
        "input": float(before.inputs) * held,
    }
    return held_memory(parts, rank.gpu)


def _peak(rank: Rank, mine: Sequence[int] | None, held: int) -> tuple[float, float]:
    """Activations and gradients when both together are most."""
    part_of = np.array(rank.part_of)
    alive = rank.lives.alive(None if mine is None else lambda units: np.isin(part_of[units], list(mine)))
    saved = float(alive[rank.lives.forward_end])
    alive = (alive + (held - 1) * saved) * rank.factor
    sizes = [w.gradient.bytes / (rank.ranks(w) if rank.layout.zero >= 2 else 1) for w in rank.weights]
    gradients = gradients_alive(rank.depth.trace, sizes, [rank.has(mine, w.unit) for w in rank.weights])
    if rank.layout.micro_batches > 1:  # they stay from the first micro-batch on
        gradients = np.full_like(gradients, gradients[-1])
    at = int(np.argmax(alive + gradients))
    return float(alive[at]), float(gradients[at])
