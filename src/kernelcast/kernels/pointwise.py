"""pointwise: any element-wise kernel, by what it reads, writes and computes; also one that a compiler has fused.

PyTorch runs a chain of such ops one by one (elementwise.py has them by name). Tensors that do not lie in memory in the
same order, or of which one is broadcast, take another kernel, whose threads compute where each element lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, Kernel, choice, real, size
from kernelcast.kernels.dtypes import dtype
from kernelcast.kernels.norm import VECTOR_BYTES, VECTOR_DTYPES
from kernelcast.kernels.vector import vector_kernel
from kernelcast.kernels.work import Array, Phases, ceil_div

_THREADS = 128.0  # vectorized_elementwise_kernel and elementwise_kernel<128, ...>
# Instructions of a thread for an element, where every place is computed: a division by multiplying for each axis of
# each tensor (OffsetCalculator), and loads and stores of single elements. Our H200 runs 33.5e12 instructions/s;
# products of two tensors make 0.40e12 elements/s over two axes, 0.33e12 over three, 0.25e12 over four: 84, 100 and 130.
_OFFSET_INSTRUCTIONS = 42.0
_AXIS_INSTRUCTIONS = 6.5  # of a tensor
_OFFSET_ELEMENTS = 4.0  # a thread
# A cast of contiguous tensors (unrolled_elementwise_kernel) asks for the format of every element: 0.34e12 elements/s.
_CAST_INSTRUCTIONS = 98.0
ACCESS = ("vector", "strided", "cast")


@dataclass(frozen=True, kw_only=True)
class Pointwise(Kernel):
    """An element-wise kernel with ``rows`` x ``cols`` outputs that reads ``reads`` numbers for each of them."""

    family: ClassVar[str] = "memory"
    op: ClassVar[str] = "pointwise"
    dtypes: ClassVar[tuple[str, ...]] = VECTOR_DTYPES
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"rows": 4096, "cols": 4096, "reads": 2, "access": "strided"},
        {"rows": 4096, "cols": 4096, "reads": 3, "writes": 1, "flops": 12, "xu_ops": 2},
    )

    rows: int = size("rows of the output")
    cols: int = size("columns of the output")
    reads: float = real("numbers read for an element, in the width of dtype; a broadcast one counts little", default=1)
    writes: float = real("numbers written for an element", default=1)
    tensors: float = real("tensors read, broadcast ones too; 0: as many as reads", default=0)
    access: str | None = choice(
        "strided: tensors in different orders, or broadcast; cast: of different formats; default: vector",
        ACCESS,
        default=None,
    )
    axes: int | None = size(
        "axes that a strided kernel walks, neighbours in memory as one; default 2", default=None, high=16
    )
    flops: float = real("of an element", default=1)
    xu_ops: float = real("special functions of an element", default=0)

    @classmethod
    def hints(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        access = calls.choice("access") or "vector"
        ways = {f"access_{name}": np.full(calls.count, float(name == access)) for name in ACCESS[1:]}
        return {**super().hints(calls, gpu), **ways, "axes": calls.given("axes", 2.0) * ways["access_strided"]}

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Phases:
        elements, element_bytes = calls["rows"] * calls["cols"], dtype(calls.choice("dtype")).act_bytes
        access = calls.choice("access") or "vector"
        tensors = np.where(calls["tensors"] > 0, calls["tensors"], calls["reads"]) + np.maximum(calls["writes"], 0)
        offsets = _OFFSET_INSTRUCTIONS + _AXIS_INSTRUCTIONS * tensors * calls.given("axes", 2.0)
        instructions = offsets if access == "strided" else np.full(calls.count, _CAST_INSTRUCTIONS * (access == "cast"))
        a_thread = VECTOR_BYTES / element_bytes if access == "vector" else _OFFSET_ELEMENTS
        moved = (calls["reads"] + calls["writes"]) * element_bytes
        work = vector_kernel(
            gpu,
            tasks=ceil_div(elements, _THREADS * a_thread),
            threads=_THREADS,
            moved_bytes=moved * elements,
            flops=calls["flops"] * elements,
            xu_ops=calls["xu_ops"] * elements,
            converted=(calls["reads"] + calls["writes"]) * elements
            if element_bytes < 4 and access == "vector"
            else 0.0,
            warp_instructions=instructions * elements / gpu.warp_threads,
        )
        return (work,)
