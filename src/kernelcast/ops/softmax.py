"""softmax, log_softmax and their gradients, as PyTorch runs them: short rows by a warp, long rows by a CTA."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, Examples, size
from kernelcast.ops.elementwise import Cost, elementwise_work
from kernelcast.ops.vector import (
    MAX_THREADS,
    VECTOR_BYTES,
    MemoryKernel,
    block_reduction,
    row_threads,
    vector_kernel,
)
from kernelcast.ops.work import Array, Works, ceil_div

# PyTorch 2.11, kernels seen on an H200 (validation/kernelcast): softmax_warp_forward takes rows of up to 2,048 columns,
# softmax_warp_backward of up to 1,024; cunn_SoftMaxForwardReg rows of up to 9 x 1,024.
_FORWARD_WARP_COLS, _BACKWARD_WARP_COLS, _REGISTER_COLS = 2048.0, 1024.0, 9216.0
_WARP_CTA_THREADS = 128.0
_TWO_ROWS_COLS = 128.0  # a warp takes two rows at once up to this
_ROW_SMEM_BYTES = 49152.0 - 128.0  # a row that fits beside the reduction is read once (cunn_SoftMaxForwardSmem)


class _RowPlan:
    """How rows map to CTAs, forward and backward alike; all arrays (calls,)."""

    def __init__(self, gpu: Gpu, rows: Array, cols: Array, element_bytes: float, warp_cols: float) -> None:
        self.by_warp = cols <= warp_cols  # a warp keeps a row in registers
        self.in_smem = ~self.by_warp & (cols * element_bytes <= _ROW_SMEM_BYTES)  # a CTA keeps it in shared memory
        self.padded = 2 ** np.ceil(np.log2(cols))  # columns: the warp kernel exists for powers of two
        self.lanes = np.minimum(gpu.warp_threads, self.padded)  # threads of a warp that share a row
        warp_rows = _WARP_CTA_THREADS / self.lanes * np.where(self.padded <= _TWO_ROWS_COLS, 2, 1)
        self.tasks = np.where(self.by_warp, ceil_div(rows, warp_rows), rows)
        cta_threads = row_threads(gpu, cols, VECTOR_BYTES / element_bytes)
        self.threads = np.where(self.by_warp, _WARP_CTA_THREADS, cta_threads)


class _RowSoftmax(MemoryKernel):
    """softmax and its gradient: a warp keeps a row in registers, or a CTA in shared memory; a CTA whose row does not
    fit reads it again."""

    warp_cols: ClassVar[float]  # of the widest row that a warp takes
    inputs: ClassVar[int]  # tensors read; one is written
    sums: ClassVar[int]  # numbers that a row is reduced to
    reads_again: ClassVar[int]  # of a row that a CTA cannot keep
    warp_exps: ClassVar[int]  # exponentials of an element
    cta_exps: ClassVar[int]
    flops: ClassVar[int]  # of an element, beside 3 an exponential: scale, subtract, correct
    row_functions: ClassVar[int]  # special functions of a row

    rows: int = size("rows")
    cols: int = size("columns, normalised over")

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        """Which of PyTorch's kernels takes rows of this length, and elements per lane."""
        cols, element_bytes = calls["cols"], calls.dtype.act_bytes
        plan = _RowPlan(gpu, np.ones(1), cols, element_bytes, cls.warp_cols)
        vectors = np.mod(cols * element_bytes, VECTOR_BYTES) == 0
        each = np.where(plan.by_warp, plan.padded / plan.lanes, cols / MAX_THREADS)
        return super().shape_features(calls, gpu) | {
            "by_warp": plan.by_warp.astype(np.float64),
            "in_registers": np.asarray(~plan.by_warp & (cols <= _REGISTER_COLS), dtype=np.float64),
            "in_smem": np.asarray(plan.in_smem & vectors, dtype=np.float64),
            "log_each": np.log2(each),
        }

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        rows, cols, element_bytes = calls["rows"], calls["cols"], calls.dtype.act_bytes
        plan = _RowPlan(gpu, rows, cols, element_bytes, cls.warp_cols)
        by_warp, elements, tensors = plan.by_warp, rows * cols, cls.inputs + 1
        exps = np.where(by_warp, cls.warp_exps, cls.cta_exps)
        smem_bytes, reduce_instructions = block_reduction(gpu, plan.threads, cls.sums)
        # The warp kernel loads and stores single elements, one instruction each, and sums by shuffles.
        shuffles = rows * cls.sums * 2 * np.log2(plan.lanes) * plan.lanes / gpu.warp_threads
        passes = cls.sums + 1  # over the row: for each sum, and for the result
        work = vector_kernel(
            gpu,
            tasks=plan.tasks,
            threads=plan.threads,
            moved_bytes=tensors * elements * element_bytes,
            again_bytes=np.where(by_warp | plan.in_smem, 0, cls.reads_again * elements * element_bytes),
            flops=elements * (cls.flops + 3 * exps),
            xu_ops=elements * exps + rows * cls.row_functions,
            converted=tensors * elements if element_bytes < 4 else 0.0,
            smem_bytes=np.where(by_warp, 0, rows * smem_bytes + plan.in_smem * passes * elements * element_bytes),
            warp_instructions=np.where(
                by_warp, tensors * elements / gpu.warp_threads + shuffles, rows * reduce_instructions
            ),
            registers=np.where(by_warp, 24 + 2 * cls.inputs * ceil_div(plan.padded, gpu.warp_threads), 40.0),
            smem_bytes_per_cta=np.where(by_warp, 0, 128 + plan.in_smem * cols * element_bytes),
            steps=np.where(by_warp, 1, passes * ceil_div(cols * element_bytes, plan.threads * VECTOR_BYTES)),
        )
        return (work,)


class Softmax(_RowSoftmax):
    """Softmax over each row: exp(x − max) / sum(exp(x − max)).

    Up to 2,048 columns a warp keeps a row (two of at most 128) in registers. Beyond, a CTA keeps the row in
    shared memory; where it does not fit, the CTA reads it three times: for maximum, sum and result.
    """

    op = "softmax"
    examples: ClassVar[Examples] = ({"rows": 32768, "cols": 1024}, {"rows": 4096, "cols": 32768})
    warp_cols = _FORWARD_WARP_COLS
    inputs, sums, reads_again = 1, 2, 2
    warp_exps, cta_exps = 1, 2  # a CTA computes exp for the sum and for the result; a warp still has the first one
    flops = 4  # maximum, sum, quotient 2
    row_functions = 1  # a reciprocal (or logarithm)


class LogSoftmax(Softmax):
    """Logarithm of the softmax over each row, which cross-entropy needs: x − max − log(sum(exp(x − max)))."""

    op = "log_softmax"
    examples = ({"rows": 4096, "cols": 128256},)
    cta_exps = 1  # the result needs none


class LogSoftmaxBackward(_RowSoftmax):
    """Gradient of log_softmax: dx = dy − exp(y) · sum(dy), over each row.

    Reads y and dy, writes dx. A CTA keeps dy in shared memory between the sum and the result; where it does not fit, it
    reads dy twice (cunn_SoftMaxBackward).
    """

    op = "log_softmax_backward"
    examples = ({"rows": 4096, "cols": 128256}, {"rows": 32768, "cols": 1024})
    warp_cols = _BACKWARD_WARP_COLS
    inputs, sums, reads_again = 2, 1, 1
    warp_exps, cta_exps = 1, 1
    flops = 3  # the sum; an FMA
    row_functions = 0


class SoftmaxBackward(LogSoftmaxBackward):
    """Gradient of softmax: dx = y · dy − y · sum(y · dy), over each row.

    PyTorch first multiplies y by dy in a separate kernel (softmax_backward_cuda_out), then reads that product and y:
    twice the bytes that y, dy and dx need.
    """

    op = "softmax_backward"
    examples = ({"rows": 32768, "cols": 1024}, {"rows": 4096, "cols": 32768})
    warp_exps, cta_exps = 0, 0

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        return (elementwise_work(calls, gpu, Cost(reads=2, flops=1)), *super().work(calls, gpu))
