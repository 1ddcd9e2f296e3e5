"""softmax and log_softmax over rows, as PyTorch runs them: short rows by a warp, long rows by a whole CTA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, Kernel, size
from kernelcast.kernels.dtypes import dtype
from kernelcast.kernels.norm import (
    MAX_THREADS,
    VECTOR_BYTES,
    VECTOR_DTYPES,
    block_reduction,
    row_threads,
    side_instructions,
)
from kernelcast.kernels.work import Array, Phases, Work, ceil_div

# PyTorch 2.11, kernels seen on an H200 (validation/kernelcast): softmax_warp_forward takes rows of up to 2,048 columns,
# softmax_warp_backward of up to 1,024; cunn_SoftMaxForwardReg rows of up to 9 x 1,024.
FORWARD_WARP_COLS, BACKWARD_WARP_COLS = 2048.0, 1024.0
_REGISTER_COLS = 9216.0
_WARP_CTA_THREADS = 128.0
_TWO_ROWS_COLS = 128.0  # a warp takes two rows at once up to this
_ROW_SMEM_BYTES = 49152.0 - 128.0  # a row that fits beside the reduction is read once (cunn_SoftMaxForwardSmem)


@dataclass(frozen=True)
class RowPlan:
    """How rows fall onto CTAs, forward and backward alike; all arrays (calls,)."""

    by_warp: NDArray[np.bool_]  # a warp keeps a row in registers
    in_smem: NDArray[np.bool_]  # a CTA keeps it in shared memory
    padded: Array  # columns: the warp kernel exists for powers of two
    lanes: Array  # threads of a warp that share a row
    tasks: Array
    threads: Array

    @classmethod
    def of(cls, gpu: Gpu, rows: Array, cols: Array, element_bytes: float, warp_cols: float) -> RowPlan:
        by_warp = cols <= warp_cols
        padded = 2 ** np.ceil(np.log2(cols))
        lanes = np.minimum(gpu.warp_threads, padded)
        warp_rows = _WARP_CTA_THREADS / lanes * np.where(padded <= _TWO_ROWS_COLS, 2, 1)
        return cls(
            by_warp=by_warp,
            in_smem=~by_warp & (cols * element_bytes <= _ROW_SMEM_BYTES),
            padded=padded,
            lanes=lanes,
            tasks=np.where(by_warp, ceil_div(rows, warp_rows), rows),
            threads=np.where(by_warp, _WARP_CTA_THREADS, row_threads(gpu, cols, VECTOR_BYTES / element_bytes)),
        )


def row_hints(gpu: Gpu, cols: Array, element_bytes: float, warp_cols: float) -> dict[str, Array]:
    """Which of PyTorch's kernels takes rows this long, and how many elements a lane of it works off in turn."""
    plan = RowPlan.of(gpu, np.ones(1), cols, element_bytes, warp_cols)
    vectors = np.mod(cols * element_bytes, VECTOR_BYTES) == 0
    each = np.where(plan.by_warp, plan.padded / plan.lanes, cols / MAX_THREADS)
    return {
        "by_warp": plan.by_warp.astype(np.float64),
        "in_registers": np.asarray(~plan.by_warp & (cols <= _REGISTER_COLS), dtype=np.float64),
        "in_smem": np.asarray(plan.in_smem & vectors, dtype=np.float64),
        "log_each": np.log2(each),
    }


@dataclass(frozen=True, kw_only=True)
class Softmax(Kernel):
    """Softmax over each row: exp(x − max) / sum(exp(x − max)).

    Up to 2,048 columns a warp keeps a row (two of at most 128) in registers. Beyond, a CTA keeps the row in
    shared memory; where it does not fit, the CTA reads it three times: for maximum, sum and result.
    """

    family: ClassVar[str] = "memory"
    op: ClassVar[str] = "softmax"
    dtypes: ClassVar[tuple[str, ...]] = VECTOR_DTYPES
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"rows": 32768, "cols": 1024},
        {"rows": 4096, "cols": 32768},
    )
    cta_exps: ClassVar[int] = 2  # a CTA computes exp for the sum and for the result; a warp still has the first one

    rows: int = size("rows")
    cols: int = size("columns, normalised over")

    @classmethod
    def hints(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        cols, element_bytes = calls["cols"], dtype(calls.choice("dtype")).act_bytes
        return super().hints(calls, gpu) | row_hints(gpu, cols, element_bytes, FORWARD_WARP_COLS)

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Phases:
        rows, cols = calls["rows"], calls["cols"]
        element_bytes = dtype(calls.choice("dtype")).act_bytes
        plan = RowPlan.of(gpu, rows, cols, element_bytes, FORWARD_WARP_COLS)
        by_warp, in_smem, lanes, tasks, threads = plan.by_warp, plan.in_smem, plan.lanes, plan.tasks, plan.threads
        rows_per_task = rows / tasks

        elements = rows_per_task * cols
        exps = np.where(by_warp, 1, cls.cta_exps)
        flops = elements * (4 + 3 * exps)  # maximum, sum, quotient 2; scale, subtract, correct for each exp
        l2_bytes = elements * element_bytes * np.where(by_warp | in_smem, 2, 4)
        smem_bytes, reduce_instructions = block_reduction(gpu, threads, 2.0)
        shuffles = rows_per_task * 2 * 2 * np.log2(lanes) * lanes / gpu.warp_threads
        # The warp kernel loads and stores single elements: one instruction each, not one for 16 bytes.
        single = 2 * elements / gpu.warp_threads
        converted = 2 * elements if element_bytes < 4 else 0.0
        work = Work(
            tasks=tasks,
            longest_count=tasks,
            fma_flops=flops,
            xu_ops=elements * exps + rows_per_task,  # and one reciprocal (or logarithm) a row
            smem_bytes=np.where(by_warp, 0, smem_bytes + in_smem * 3 * elements * element_bytes),
            l2_bytes=l2_bytes,
            other_warp_instructions=side_instructions(gpu, l2_bytes, converted)
            + np.where(by_warp, single + shuffles, reduce_instructions),
            activation_bytes=2 * rows * cols * element_bytes,
            threads=threads,
            registers_per_thread=np.where(by_warp, 24 + 2 * ceil_div(plan.padded, gpu.warp_threads), 40.0),
            smem_bytes_per_cta=np.where(by_warp, 0, 128 + in_smem * cols * element_bytes),
            serial_steps=np.where(by_warp, 1, 3 * ceil_div(cols * element_bytes, threads * VECTOR_BYTES)),
            useful_flops=tasks * flops,
        )
        return (work,)


@dataclass(frozen=True, kw_only=True)
class LogSoftmax(Softmax):
    """Logarithm of the softmax over each row, which cross-entropy needs: x − max − log(sum(exp(x − max)))."""

    op: ClassVar[str] = "log_softmax"
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"rows": 4096, "cols": 128256},)
    cta_exps: ClassVar[int] = 1  # the result needs none
