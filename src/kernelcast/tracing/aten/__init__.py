"""ATen ops -> kernel calls: the table of what PyTorch launches for each op. No torch needed."""

from kernelcast.tracing.aten import (  # noqa: F401  each fills the table
    attention,
    elementwise,
    indexing,
    optimizer,
    products,
    recurrent,
    rows,
    spatial,
)
from kernelcast.tracing.aten.table import OpLaunches, OpSettings, known_ops, op_launches

__all__ = ["OpLaunches", "OpSettings", "known_ops", "op_launches"]
