"""What a rank of a scaled step holds: its memory by stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kernelcast.training.depth import Depth
from kernelcast.training.memory import Lives, Memory, gradients_alive


def memory_of(scaling: Any, mine: Sequence[int] | None, flight: Sequence[int]) -> tuple[Memory, int]:
    """The memory of a stage that has the parts ``mine`` (None: all) and holds ``flight`` micro-batches at once."""
    plan, cut, depth, before = scaling.plan, scaling.cut, scaling.depth, scaling.trace.footprint
    weights = scaling.weights
    held = flight[0]
    chosen = [mine is None or scaling.part_of[w.unit] in mine for w in weights]
    ranks = [plan.dp if w.group == "dp" else plan.dp // plan.ep for w in weights]
    sizes = [float(w.gradient.bytes) for w in weights]
    own = sum(size for size, take in zip(sizes, chosen, strict=True) if take)
    sharded = sum(size / rank for size, take, rank in zip(sizes, chosen, ranks, strict=True) if take)
    whole = sum(float(g.bytes) for g in scaling.trace.gradients)
    tied = depth.tied_bytes() if mine is not None and plan.pp - 1 in [p % plan.pp for p in mine] else 0.0
    fixed = before.parameters - whole  # frozen parameters and buffers, on every rank
    share = (sharded if plan.zero >= 1 else own + tied) / whole if whole else 0.0
    gradient_sizes = [size / rank if plan.zero >= 2 else size for size, rank in zip(sizes, ranks, strict=True)]
    activations, gradients = _peak(scaling, mine, held, gradient_sizes, chosen)
    by_unit: dict[int, float] = {}
    for w, take in zip(weights, chosen, strict=True):
        if take:
            by_unit[w.unit] = by_unit.get(w.unit, 0.0) + w.gradient.bytes
    gathered = sum(sorted(by_unit.values())[-2:]) if plan.zero == 3 and plan.dp > 1 else 0.0
    memory = Memory(
        parameter_bytes=max(0.0, fixed) + (sharded if plan.zero == 3 else own + tied),
        gradient_bytes=gradients + (tied if plan.zero < 2 else 0.0),
        optimizer_bytes=before.optimizer * share,
        activation_bytes=activations,
        gathered_bytes=gathered,
        input_bytes=float(before.inputs) * held,
        gpu_bytes=scaling.gpu.dram_bytes,
    )  # fmt: skip
    del cut
    return memory, held


def _peak(
    scaling: Any, mine: Sequence[int] | None, held: int, sizes: Sequence[float], chosen: Sequence[bool]
) -> tuple[float, float]:  # fmt: skip
    """Activations and gradients when both together are most."""
    lives = Lives.of(scaling.cut, scaling.depth.unit)
    part_of = np.array(scaling.part_of)
    alive = lives.alive(None if mine is None else lambda units: np.isin(part_of[units], list(mine)))
    saved = float(alive[lives.forward_end]) if len(alive) else 0.0
    alive = (alive + (held - 1) * saved) * _factor(scaling)
    gradients = gradients_alive(scaling.cut, sizes, chosen)
    if scaling.plan.micro_batches > 1:  # they stay from the first micro-batch on
        gradients = np.full_like(gradients, gradients[-1])
    at = int(np.argmax(alive + gradients))
    return float(alive[at]), float(gradients[at])


def _factor(scaling: Any) -> float:
    """What the traced run held over what its ops tell: some tensors live on in Python until a function returns."""
    trace = scaling.trace
    lives = Lives.of(trace, Depth(trace).unit)
    alive, gradients = lives.alive(), gradients_alive(trace, [g.bytes for g in trace.gradients], [True] * len(trace.gradients))
    at = int(np.argmax(alive + gradients))
    before = trace.footprint
    if alive[at] < 0.5 * gradients[at] or not before.activations:
        return 1.0
    held = before.activations + before.gradients - gradients[at]
    return float(np.clip(held / alive[at], 0.8, 1.5))
