"""transpose, cat and gather: bytes that move and nothing that computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, Kernel, size
from kernelcast.kernels.dtypes import dtype
from kernelcast.kernels.elementwise import Cost, Elementwise
from kernelcast.kernels.norm import VECTOR_BYTES, VECTOR_DTYPES, row_threads
from kernelcast.kernels.vector import INDEX_BYTES, SECTOR_BYTES, vector_kernel
from kernelcast.kernels.work import Array, Phases, ceil_div

_COPY_THREADS, _COPY_ELEMENTS = 128.0, 4.0  # PyTorch's copy of a strided tensor: elementwise_kernel<128, 4>
_OFFSET_INSTRUCTIONS = 12.0  # of a thread for an element: a division by multiplying for each dimension (IntDivider)
_GATHER_THREADS = 256.0  # PyTorch's vectorised gather, as in embedding


@dataclass(frozen=True, kw_only=True)
class Transpose(Kernel):
    """Copy of a matrix with its rows and columns exchanged (``x.mT.contiguous()``), for each of ``batch``.

    PyTorch writes neighbours and reads down a column, so that each element costs an SM a whole sector; DRAM sees every
    byte once. Where the innermost axis stays (a permutation of heads), it is a plain ``copy``.
    """

    family: ClassVar[str] = "memory"
    op: ClassVar[str] = "transpose"
    dtypes: ClassVar[tuple[str, ...]] = VECTOR_DTYPES
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"rows": 4096, "cols": 4096},
        {"batch": 32, "rows": 512, "cols": 64},
    )

    batch: int = size("matrices", default=1)
    rows: int = size("rows of the source")
    cols: int = size("columns of the source")

    @classmethod
    def hints(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        return {"log_rows": np.log2(calls["batch"] * calls["rows"] + 1), "log_cols": np.log2(calls["cols"] + 1)}

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Phases:
        elements = calls["batch"] * calls["rows"] * calls["cols"]
        element_bytes = dtype(calls.choice("dtype")).act_bytes
        sector_bytes = np.minimum(SECTOR_BYTES, calls["cols"] * element_bytes)  # a vector is no matrix: it stays whole
        work = vector_kernel(
            gpu,
            tasks=ceil_div(elements, _COPY_THREADS * _COPY_ELEMENTS),
            threads=_COPY_THREADS,
            moved_bytes=2 * elements * element_bytes,
            again_bytes=elements * (sector_bytes - element_bytes),
            warp_instructions=(2 + _OFFSET_INSTRUCTIONS) * elements / gpu.warp_threads,
            steps=1.0,
        )
        return (work,)


class Cat(Elementwise):
    """Tensors joined into one of rows x cols: every byte read once and written once."""

    op = "cat"
    cost = Cost()


@dataclass(frozen=True, kw_only=True)
class Gather(Kernel):
    """Rows picked by an int64 index (``index_select``), ``rows`` of them: each is read and written."""

    family: ClassVar[str] = "memory"
    op: ClassVar[str] = "gather"
    dtypes: ClassVar[tuple[str, ...]] = VECTOR_DTYPES
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"rows": 8192, "cols": 4096},)

    rows: int = size("rows picked")
    cols: int = size("columns")

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Phases:
        rows, cols = calls["rows"], calls["cols"]
        element_bytes = dtype(calls.choice("dtype")).act_bytes
        pieces = ceil_div(cols * element_bytes, _GATHER_THREADS * VECTOR_BYTES)
        work = vector_kernel(
            gpu,
            tasks=rows * pieces,
            threads=row_threads(gpu, cols, VECTOR_BYTES / element_bytes, _GATHER_THREADS),
            moved_bytes=rows * (2 * cols * element_bytes + INDEX_BYTES),
            again_bytes=rows * (pieces - 1) * INDEX_BYTES,
            registers=24.0,
            steps=2.0,  # the index, then the row
        )
        return (work,)
