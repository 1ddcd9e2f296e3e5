"""Parallel layouts of a model within so many GPUs: what plan, compare and sweep choose from."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kernelcast.inference.deployment import Layout
from kernelcast.models.architecture import Architecture
from kernelcast.models.layers import Experts

POWERS = (1, 2, 4, 8)


def has_experts(model: Architecture) -> bool:
    return any(isinstance(run.layer.mlp, Experts) for run in model.layers)


def layouts(
    model: Architecture, max_gpus: int, tp: Sequence[int] = POWERS, pp: Sequence[int] = (1, 2),
    dp: Sequence[int] | None = None, ep: Sequence[int] | None = None,
) -> list[Layout]:  # fmt: skip
    """Layouts of at most ``max_gpus`` GPUs. Attention DP is for models with experts, which are sharded as the layers
    are (ep 1), or distributed over all GPUs."""
    experts = has_experts(model)
    allowed = []
    for tensor, stages, data in itertools.product(tp, pp, dp or (POWERS if experts else (1,))):
        if tensor * data > 8 * max(1, max(tp) // 8) and dp is None:  # ranks share a node unless given
            continue
        for parts in dict.fromkeys(ep or ((1, tensor * data) if experts else (1,))):
            if tensor * stages * data <= max_gpus and not (tensor * data) % parts:
                allowed.append(Layout(tensor, stages, data, parts))
    return allowed
