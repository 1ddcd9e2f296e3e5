"""nll_loss: the mean of one element of each row, negated; cross-entropy is log_softmax and this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, Kernel, size
from kernelcast.kernels.dtypes import dtype
from kernelcast.kernels.norm import MAX_THREADS, VECTOR_DTYPES, block_reduction
from kernelcast.kernels.vector import INDEX_BYTES, SECTOR_BYTES, vector_kernel
from kernelcast.kernels.work import Phases, ceil_div

_ROWS_PER_THREAD = 16.0  # nll_loss_threads: the power of two nearest to rows / 16, from 32 to 1024


@dataclass(frozen=True, kw_only=True)
class NllLoss(Kernel):
    """Negative log-likelihood: gathers the element of each row's class and averages.

    PyTorch runs one CTA, whatever the number of rows (nll_loss_forward_reduce_cuda_kernel_2d).
    """

    family: ClassVar[str] = "memory"
    op: ClassVar[str] = "nll_loss"
    dtypes: ClassVar[tuple[str, ...]] = VECTOR_DTYPES
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"rows": 4096, "cols": 128256},)

    rows: int = size("rows (tokens)")
    cols: int = size("columns (classes)")

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Phases:
        rows = calls["rows"]
        element_bytes = dtype(calls.choice("dtype")).act_bytes
        each = np.maximum(np.floor(rows / _ROWS_PER_THREAD), 1.0)
        threads = np.clip(2 ** np.floor(np.log2(each) + 0.5), gpu.warp_threads, MAX_THREADS)
        sector_bytes = np.minimum(SECTOR_BYTES, calls["cols"] * element_bytes)
        smem_bytes, instructions = block_reduction(gpu, threads, 2.0)  # the loss and the weight
        work = vector_kernel(
            gpu,
            tasks=np.ones_like(rows),
            threads=threads,
            moved_bytes=rows * (sector_bytes + INDEX_BYTES) + 2 * element_bytes,
            flops=2 * rows,
            converted=rows if element_bytes < 4 else 0.0,
            smem_bytes=smem_bytes,
            warp_instructions=instructions + 2 * rows / gpu.warp_threads,
            smem_bytes_per_cta=2 * 4 * threads,
            steps=2 * ceil_div(rows, threads) + 1,  # the class names the element
        )
        return (work,)
