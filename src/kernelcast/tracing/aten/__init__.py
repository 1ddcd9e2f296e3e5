"""ATen ops -> kernel calls: the table of what PyTorch launches for each op. One file a kind of op; no torch needed."""

from kernelcast.tracing.aten import (  # noqa: F401  each fills the table
    attention,
    convolution,
    elementwise,
    indexing,
    matrix,
    movement,
    optimizer,
    recurrent,
    rows,
    spatial,
    transforms,
)
from kernelcast.tracing.aten.table import Costed, Settings, cost, known_ops

__all__ = ["Costed", "Settings", "cost", "known_ops"]
