"""softmax_backward and log_softmax_backward, on the same warps and CTAs as the forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, Kernel, size
from kernelcast.kernels.dtypes import dtype
from kernelcast.kernels.elementwise import Mul
from kernelcast.kernels.norm import VECTOR_BYTES, VECTOR_DTYPES, block_reduction
from kernelcast.kernels.softmax import BACKWARD_WARP_COLS, RowPlan, row_hints
from kernelcast.kernels.vector import vector_kernel
from kernelcast.kernels.work import Array, Phases, Work, ceil_div


@dataclass(frozen=True, kw_only=True)
class LogSoftmaxBackward(Kernel):
    """Gradient of log_softmax: dx = dy − exp(y) · sum(dy), over each row.

    Reads y and dy, writes dx. A CTA keeps dy in shared memory between the sum and the result; where it does not fit, it
    reads dy twice (cunn_SoftMaxBackward).
    """

    family: ClassVar[str] = "memory"
    op: ClassVar[str] = "log_softmax_backward"
    dtypes: ClassVar[tuple[str, ...]] = VECTOR_DTYPES
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"rows": 4096, "cols": 128256},
        {"rows": 32768, "cols": 1024},
    )
    exps: ClassVar[float] = 1.0  # of an element
    flops: ClassVar[float] = 6.0  # the sum; scale, subtract, correct for the exp; an FMA

    rows: int = size("rows")
    cols: int = size("columns, normalised over")

    @classmethod
    def hints(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        cols, element_bytes = calls["cols"], dtype(calls.choice("dtype")).act_bytes
        return super().hints(calls, gpu) | row_hints(gpu, cols, element_bytes, BACKWARD_WARP_COLS)

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Phases:
        return (cls._rows(gpu, calls["rows"], calls["cols"], dtype(calls.choice("dtype")).act_bytes),)

    @classmethod
    def _rows(cls, gpu: Gpu, rows: Array, cols: Array, element_bytes: float) -> Work:
        plan = RowPlan.of(gpu, rows, cols, element_bytes, BACKWARD_WARP_COLS)
        elements = rows * cols
        smem_bytes, reduce_instructions = block_reduction(gpu, plan.threads)
        # The warp kernel loads and stores single elements, and sums by shuffles.
        by_warp = 3 * elements / gpu.warp_threads + rows * 2 * np.log2(plan.lanes) * plan.lanes / gpu.warp_threads
        return vector_kernel(
            gpu,
            tasks=plan.tasks,
            threads=plan.threads,
            moved_bytes=3 * elements * element_bytes,
            again_bytes=np.where(plan.by_warp | plan.in_smem, 0.0, elements * element_bytes),
            flops=cls.flops * elements,
            xu_ops=cls.exps * elements,
            converted=3 * elements if element_bytes < 4 else 0.0,
            smem_bytes=np.where(plan.by_warp, 0.0, rows * smem_bytes + plan.in_smem * 2 * elements * element_bytes),
            warp_instructions=np.where(plan.by_warp, by_warp, rows * reduce_instructions),
            registers=np.where(plan.by_warp, 24 + 2 * 2 * ceil_div(plan.padded, gpu.warp_threads), 40.0),
            smem_bytes_per_cta=np.where(plan.by_warp, 0.0, 128 + plan.in_smem * cols * element_bytes),
            steps=np.where(plan.by_warp, 1, 2 * ceil_div(cols * element_bytes, plan.threads * VECTOR_BYTES)),
        )


@dataclass(frozen=True, kw_only=True)
class SoftmaxBackward(LogSoftmaxBackward):
    """Gradient of softmax: dx = y · dy − y · sum(y · dy), over each row.

    PyTorch first multiplies y by dy in a kernel of its own (softmax_backward_cuda_out), then reads that product and y:
    twice the bytes that y, dy and dx need.
    """

    op: ClassVar[str] = "softmax_backward"
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"rows": 32768, "cols": 1024}, {"rows": 4096, "cols": 32768})
    exps: ClassVar[float] = 0.0
    flops: ClassVar[float] = 3.0  # the sum; an FMA

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Phases:
        return (*Mul.work(calls, gpu), *super().work(calls, gpu))
