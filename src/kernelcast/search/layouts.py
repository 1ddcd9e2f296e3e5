"""Layouts that a model may be cut by, within so many GPUs: what plan and compare choose from."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kernelcast.inference.deployment import Layout
from kernelcast.models.architecture import Architecture
from kernelcast.models.layers import Experts

POWERS = (1, 2, 4, 8)


def cuts(
    model: Architecture, most: int, tp: Sequence[int] = POWERS, pp: Sequence[int] = (1, 2),
    dp: Sequence[int] | None = None, ep: Sequence[int] | None = None,
) -> list[Layout]:  # fmt: skip
    """Cuts of at most ``most`` GPUs. Attention DP is of models with experts; experts are cut as the layers are (ep 1),
    or dealt out to all GPUs."""
    experts = any(isinstance(run.layer.mlp, Experts) for run in model.layers)
    ranks = dp or (POWERS if experts else (1,))
    found = []
    for n, stages, m in itertools.product(tp, pp, ranks):
        if n * m > 8 * max(1, max(tp) // 8) and dp is None:  # ranks share a node unless asked
            continue
        parts = ep or ((1, n * m) if experts else (1,))
        for k in dict.fromkeys(parts):
            if n * stages * m <= most and not (n * m) % k:
                found.append(Layout(n, stages, m, k))
    return found
