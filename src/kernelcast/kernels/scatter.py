"""Ops by an index: gather_elements, scatter, scatter_add, index_add, index (advanced), index_put; PyTorch's kernels.

Indices are taken to be random: they name ``size`` places evenly, and come from DRAM like all else.
"""

from __future__ import annotations

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, choice, flag, size
from kernelcast.kernels.indexed import IndexedKernel, distinct, place_bits, radix_sort
from kernelcast.kernels.vector import INDEX_BYTES, SECTOR_BYTES, VECTOR_BYTES, Mask, paced, vector_kernel
from kernelcast.kernels.work import Array, Number, Work, Works, ceil_div

_THREADS, _ELEMENTS = 128.0, 4.0  # of a CTA, and of a thread of it: index_elementwise_kernel<128, 4>
# Of a thread for an element: its place in each tensor, the index checked and applied. Our H200 takes 196 us to scatter
# 64e6 elements, 198 to add them (244 in 16 bits), 312 to put them by an index, 483 by index_add, with 64-bit divisions.
_OFFSET_INSTRUCTIONS = 80.0
_ROW_OFFSET_INSTRUCTIONS = 125.0
_ADD_INSTRUCTIONS = 200.0
_ATOMIC_INSTRUCTIONS = 6.0
_CHECKS = 11.0  # kernels that find the least and the largest index, check them, and count places up
_REPEAT_CYCLES = 800.0  # of a row that is added to the one before
_GATHER_THREADS = 256.0  # vectorized_gather_kernel: 16 bytes a thread, a CTA for a piece of a row
_ADD_THREADS, _ADD_CTAS_PER_SM = 128.0, 8.0  # indexFuncLargeIndex
AXES = ("rows", "cols")


class _ByElement(IndexedKernel):
    """Parameters of gather and scatter, which have an index for each element (or repeat one along the row)."""

    examples = (
        {"rows": 100000, "cols": 64, "size": 10000, "expanded": True},
        {"rows": 4096, "cols": 8, "size": 128, "axis": "cols"},
    )

    rows: int = size("rows of the index")
    cols: int = size("columns of the index")
    size: int = size("places along the axis of the other tensor")
    axis: str = choice("the axis that the index is of", AXES, default="rows")
    expanded: bool = flag("one index for a whole row, repeated by a view", default=False)

    @classmethod
    def _places(cls, calls: Calls) -> tuple[Array, Array, Array]:
        """(elements, bytes of their indices, bytes of the different sectors that they name)"""
        elements, element_bytes = calls["rows"] * calls["cols"], calls.dtype.act_bytes
        index = np.where(calls["expanded"] > 0, calls["rows"], elements) * INDEX_BYTES
        if calls.choice("axis") == "cols":
            held = calls["rows"] * calls["size"] * element_bytes
            touched = np.minimum(held, elements * SECTOR_BYTES)
        else:  # rows by row: whole rows are named, or sectors of them
            held = calls["cols"] * calls["size"] * element_bytes
            named = distinct(calls["rows"], calls["size"])
            touched = np.minimum(held, named * calls["cols"] * element_bytes)
        return elements, index, touched


class GatherElements(_ByElement):
    """Elements picked by an index each (``torch.gather``). One index for a whole row: rows are copied by vectors."""

    op = "gather_elements"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        elements, index_bytes, touched = cls._places(calls)
        element_bytes = calls.dtype.act_bytes
        whole = (calls["expanded"] > 0) & (np.mod(calls["cols"] * element_bytes, VECTOR_BYTES) == 0)
        whole &= calls.choice("axis") == "rows"
        one_by_one = _elementwise(gpu, elements, index_bytes + touched + elements * element_bytes, 0.0, ~whole)
        return (one_by_one, _row_copies(gpu, calls, index_bytes + touched + elements * element_bytes, whole))


class Scatter(_ByElement):
    """Elements put to where an index says (``scatter_`` of a tensor)."""

    op = "scatter"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        elements, index_bytes, touched = cls._places(calls)
        moved = index_bytes + touched + elements * calls.dtype.act_bytes
        return (_elementwise(gpu, elements, moved, 0.0, True),)


class ScatterAdd(_ByElement):
    """Elements added to where an index says, by atomics in L2 (``scatter_add_``)."""

    op = "scatter_add"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        elements, index_bytes, touched = cls._places(calls)
        element_bytes = calls.dtype.act_bytes
        moved = index_bytes + 2 * touched + elements * element_bytes
        return (
            _elementwise(
                gpu, elements, moved, elements * element_bytes, True, _OFFSET_INSTRUCTIONS + _ATOMIC_INSTRUCTIONS
            ),
        )


def _elementwise(
    gpu: Gpu, elements: Array, moved: Array, again: Number, runs: Mask, instructions: float = _OFFSET_INSTRUCTIONS
) -> Work:
    work = vector_kernel(
        gpu,
        tasks=ceil_div(elements, _THREADS * _ELEMENTS),
        threads=_THREADS,
        moved_bytes=moved,
        again_bytes=again,
        warp_instructions=instructions * elements / gpu.warp_threads,
        steps=2.0,  # the index, then the element
        runs=runs,
    )
    return paced(work, gpu)


def _row_copies(gpu: Gpu, calls: Calls, moved: Array, runs: Mask) -> Work:
    """A CTA for each 4 KiB of a row, 16 bytes a thread."""
    row_bytes = calls["cols"] * calls.dtype.act_bytes
    pieces = ceil_div(row_bytes, _GATHER_THREADS * VECTOR_BYTES)
    threads = np.minimum(ceil_div(row_bytes, VECTOR_BYTES * gpu.warp_threads) * gpu.warp_threads, _GATHER_THREADS)
    work = vector_kernel(
        gpu,
        tasks=calls["rows"] * pieces,
        threads=threads,
        moved_bytes=moved,
        again_bytes=calls["rows"] * (pieces - 1) * INDEX_BYTES,
        registers=24.0,
        steps=2.0,
        runs=runs,
    )
    return paced(work, gpu)


class _ByRow(IndexedKernel):
    """Parameters of ops whose index names whole rows."""

    examples = ({"rows": 100000, "cols": 64, "size": 10000}, {"rows": 4096, "cols": 1024, "size": 50000})

    rows: int = size("rows named by the index")
    cols: int = size("columns")
    size: int = size("rows of the other tensor")

    @classmethod
    def _bytes(cls, calls: Calls) -> tuple[Array, Array, Array]:
        """(of the rows, of the different rows that they name, of the index)"""
        row_bytes = calls["cols"] * calls.dtype.act_bytes
        sectors = np.where(row_bytes < SECTOR_BYTES, SECTOR_BYTES, row_bytes)
        named = distinct(calls["rows"], calls["size"]) * sectors
        touched = np.minimum(named, calls["size"] * row_bytes)
        return calls["rows"] * row_bytes, touched, calls["rows"] * INDEX_BYTES


class Index(_ByRow):
    """Rows picked by one index or several (``x[i]``, ``x[i, j]``)."""

    op = "index"

    indices: int = size("index tensors, one an axis", default=1, high=8)

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        whole, touched, index_bytes = cls._bytes(calls)
        moved = whole + touched + index_bytes * calls["indices"]
        vectors = (calls["indices"] == 1) & (np.mod(calls["cols"] * calls.dtype.act_bytes, VECTOR_BYTES) == 0)
        elements = calls["rows"] * calls["cols"]
        return (
            _elementwise(gpu, elements, moved, 0.0, ~vectors, _ROW_OFFSET_INSTRUCTIONS),
            _row_copies(gpu, calls, moved, vectors),
        )


class IndexAdd(_ByRow):
    """Rows added to those that an index names, by atomics (``index_add_``; message passing of graph networks)."""

    op = "index_add"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        whole, touched, index_bytes = cls._bytes(calls)
        elements = calls["rows"] * calls["cols"]
        ctas = np.minimum(ceil_div(elements, _ADD_THREADS), gpu.sm_count * _ADD_CTAS_PER_SM)
        work = vector_kernel(
            gpu,
            tasks=ctas,
            threads=_ADD_THREADS,
            moved_bytes=whole + 2 * touched + index_bytes,
            again_bytes=whole,
            flops=elements,
            warp_instructions=_ADD_INSTRUCTIONS * elements / gpu.warp_threads,
            steps=ceil_div(elements, ctas * _ADD_THREADS),
        )
        return (paced(work, gpu, 100.0),)


class IndexPut(_ByRow):
    """Rows put to where an index says (``x[i] = y``), or added there after a sort (the gradient of x[i])."""

    op = "index_put"

    accumulate: bool = flag("rows of equal places are added up, in order", default=False)

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        whole, touched, index_bytes = cls._bytes(calls)
        elements, adds = calls["rows"] * calls["cols"], calls["accumulate"] > 0
        put = _elementwise(gpu, elements, whole + touched + index_bytes, 0.0, ~adds, _ROW_OFFSET_INSTRUCTIONS)
        small = vector_kernel(
            gpu,
            tasks=_CHECKS * ceil_div(calls["rows"], 512.0),
            threads=128.0,
            moved_bytes=_CHECKS * index_bytes,
            launches=_CHECKS,
            runs=adds,
        )
        warps = calls["rows"] * ceil_div(calls["cols"], 4.0 * gpu.warp_threads)
        added = vector_kernel(
            gpu,
            tasks=ceil_div(warps, 4.0),
            threads=128.0,
            moved_bytes=whole + 2 * touched + 2 * index_bytes,
            flops=elements,
            warp_instructions=20 * warps + 8 * elements / gpu.warp_threads,
            steps=3.0 + np.maximum(1.0, calls["rows"] / calls["size"]),  # rows of one place follow each other
            runs=adds,
        )
        bits = place_bits(calls["size"] * calls["cols"])
        sort = radix_sort(gpu, calls["rows"], INDEX_BYTES, INDEX_BYTES, bits, adds)
        return (put, small, *sort, paced(added, gpu, _REPEAT_CYCLES))
