"""cumsum: running sums along each row (PyTorch's ScanUtils.cuh)."""

from __future__ import annotations

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, size
from kernelcast.kernels.vector import MemoryKernel, vector_kernel
from kernelcast.kernels.work import Works, ceil_div

_THREADS = 512.0  # of a CTA, shared by rows when they are short
_FEWEST, _MOST = 16.0, 512.0  # threads of a row
_WAVEFRONT_BYTES = 128.0  # a warp's access to shared memory
# One row alone goes to cub::DeviceScan: 128 threads of about 15 elements, one pass with look-back.
_ONE_ROW_THREADS, _ONE_ROW_ELEMENTS = 128.0, 1920.0


class Cumsum(MemoryKernel):
    """Cumulative sum along each row.

    A row's threads take two elements each, add them up in shared memory level by level (Sklansky's scan), and go on to
    the next piece of the row with its total.
    """

    op = "cumsum"
    examples = (
        {"rows": 4096, "cols": 4096},
        {"rows": 1, "cols": 1048576},
    )

    rows: int = size("rows")
    cols: int = size("columns, added up")

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        rows, cols = calls["rows"], calls["cols"]
        element_bytes = calls.dtype.act_bytes
        alone = rows == 1
        row_threads = np.clip(2 ** np.ceil(np.log2(np.maximum(cols / 2, 1.0))), _FEWEST, _MOST)
        pieces = ceil_div(cols, 2 * row_threads)
        levels = np.log2(row_threads) + 1
        tasks = np.where(alone, ceil_div(cols, _ONE_ROW_ELEMENTS), ceil_div(rows, _THREADS / row_threads))
        threads = np.where(alone, _ONE_ROW_THREADS, _THREADS)
        warp_steps = tasks * pieces * _THREADS / gpu.warp_threads  # warps, each for each piece
        # Two elements in and two out; at each level two reads and a write.
        smem_bytes = np.where(alone, 4 * rows * cols * 4, warp_steps * (4 + 3 * levels) * _WAVEFRONT_BYTES)
        work = vector_kernel(
            gpu,
            tasks=tasks,
            threads=threads,
            moved_bytes=2 * rows * cols * element_bytes,
            flops=np.where(alone, 2 * cols, rows * cols * levels / 2),  # half of the elements get a sum at each level
            converted=2 * rows * cols if element_bytes < 4 else 0.0,
            smem_bytes=smem_bytes,
            # single elements, in and out; addresses of a level
            warp_instructions=2 * rows * cols / gpu.warp_threads + np.where(alone, 0.0, 4 * warp_steps * levels),
            smem_bytes_per_cta=np.where(alone, 4 * _ONE_ROW_ELEMENTS, 2 * _THREADS * element_bytes),
            steps=np.where(alone, 3.0, pieces * levels),
        )
        return (work,)
