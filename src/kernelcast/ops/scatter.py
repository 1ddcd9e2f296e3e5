"""Indexing ops: gather_elements, scatter, scatter_add, index_add, index (advanced), index_put; PyTorch's kernels.

Indices are taken to be uniformly random over ``size``, and are read from DRAM.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, Kernel, choice, flag, size
from kernelcast.ops.vector import INDEX_BYTES, SECTOR_BYTES, VECTOR_BYTES, VECTOR_DTYPES, Mask, paced, vector_kernel
from kernelcast.ops.work import Array, Number, Work, Works, ceil_div

_RADIX_BITS = 8.0  # of one pass of cub's radix sort
_SORT_THREADS, _SORT_ITEMS = 384.0, 12.0  # of a CTA, and of a thread of it, in a pass (onesweep)
# A pass over 1e7 floats with their indices takes 105 us on an H200, over 1e6 17 us, over 65,536 ids 6 us: a warp finds
# equal digits by eight ballots, and a CTA waits for the counts of those before it.
_RANK_INSTRUCTIONS, _RANK_CYCLES = 225.0, 20000.0
_COUNT_INSTRUCTIONS = 20.0  # an element and digit
_ONE_CTA_BYTES = 38912.0  # of keys and values (SingleTile: 256 threads of 152 bytes)
_ALONE_CYCLES = 4000.0  # 16 us for 8 passes over 2,048 ids


class IndexedKernel(Kernel):
    """An op that accesses memory by an index; all are learned together."""

    family = "indexed"
    dtypes: ClassVar[tuple[str, ...]] = VECTOR_DTYPES

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        """Sizes, and how often an index repeats."""
        features = super().shape_features(calls, gpu)
        if {"rows", "size"} <= calls.numbers.keys():
            features["log_repeats"] = np.log2(calls["rows"] / calls["size"])
        return features


def distinct(draws: Array, size: Array) -> Array:
    """Distinct values among ``draws`` random indices: size · (1 − (1 − 1/size)^draws)."""
    return -size * np.expm1(draws * np.log1p(-1 / np.maximum(size, 1.0 + 1e-9)))


def missed(gpu: Gpu, named_bytes: Array, held_bytes: Array) -> Array:
    """Bytes of random accesses that miss L2."""
    return named_bytes * np.clip(1 - gpu.l2_bytes / np.maximum(held_bytes, 1.0), 0.0, 1.0)


def radix_sort(gpu: Gpu, items: Array, key_bytes: float, value_bytes: float, bits: Number, runs: Mask) -> Works:
    """cub's onesweep of keys with values: a histogram of all digits, its scan, then a pass per 8 bits; one CTA sorts
    few items."""
    passes = np.broadcast_to(ceil_div(bits, _RADIX_BITS), items.shape)
    pair = key_bytes + value_bytes
    few = items * pair <= _ONE_CTA_BYTES
    alone = vector_kernel(
        gpu,
        tasks=np.ones_like(items),
        threads=256.0,
        moved_bytes=2 * items * pair,
        steps=passes,
        runs=np.asarray(runs, dtype=bool) & few,
    )
    runs = np.asarray(runs, dtype=bool) & ~few
    counted = vector_kernel(
        gpu,
        tasks=ceil_div(items, _SORT_THREADS * _SORT_ITEMS),
        threads=_SORT_THREADS,
        moved_bytes=items * key_bytes,
        warp_instructions=items * _COUNT_INSTRUCTIONS * passes / gpu.warp_threads,
        launches=3.0,  # two are cleared before, each half a launch; the scan after
        runs=runs,
    )
    works = [paced(alone, gpu, _ALONE_CYCLES), counted]
    for number in range(int(np.max(passes))):
        work = vector_kernel(
            gpu,
            tasks=ceil_div(items, _SORT_THREADS * _SORT_ITEMS),
            threads=_SORT_THREADS,
            moved_bytes=2 * items * pair,
            smem_bytes=items * 4 * pair,
            warp_instructions=items * _RANK_INSTRUCTIONS / gpu.warp_threads,
            registers=64.0,
            smem_bytes_per_cta=_SORT_THREADS * _SORT_ITEMS * pair,
            launches=1.5,  # one is cleared before
            runs=runs & (number < passes),
        )
        works.append(paced(work, gpu, _RANK_CYCLES))
    return tuple(works)


def index_bits(size: Array) -> Array:
    """Bits of the largest index."""
    return np.maximum(1.0, np.ceil(np.log2(np.maximum(size, 2.0))))


INDEX_PAIR_BYTES = 2 * INDEX_BYTES  # an index and where it stood


_THREADS = 128.0
_BURST_BYTES = 64.0  # the smallest transfer of DRAM
# Elements of a thread, serially, each its index and then its value: cycles of both. An H200 takes 9 us for
# one CTA and 196 us for the 30 rounds of 64e6 elements scattered, 207 for as many of index_put.
_SCATTER_ELEMENTS, _SCATTER_CYCLES = 8.0, 1500.0  # _scatter_gather_elementwise_kernel<128, 8>
_INDEX_ELEMENTS, _INDEX_CYCLES = 4.0, 2200.0  # index_elementwise_kernel<128, 4>
_MORE_CYCLES = 1300.0  # for each index more
_OFFSET_INSTRUCTIONS = 45.0  # of a thread per element: its offset in each tensor, the index checked and applied
_ADD_INSTRUCTIONS = 200.0  # of index_add, with 64-bit divisions: 483 us for 64e6 elements
_CHECKS = 11.0  # kernels that find the least and the largest index, check them, and enumerate positions
_MEAN_STEPS = 4.0  # waits of a warp, for rows of the same index
_REPEAT_CYCLES = 800.0  # of a row that is added to the one before
_GATHER_THREADS = 256.0  # vectorized_gather_kernel: 16 bytes per thread, a CTA per piece of a row
_ADD_THREADS, _ADD_CTAS_PER_SM = 128.0, 8.0  # indexFuncLargeIndex
AXES = ("rows", "cols")


class _ByElement(IndexedKernel):
    """Parameters of gather and scatter: one index per element, or one per row."""

    examples = (
        {"rows": 100000, "cols": 64, "size": 10000, "expanded": True},
        {"rows": 4096, "cols": 8, "size": 128, "axis": "cols"},
    )

    rows: int = size("rows of the index")
    cols: int = size("columns of the index")
    size: int = size("length of the indexed axis of the other tensor")
    axis: str = choice("axis that is indexed", AXES, default="rows")
    expanded: bool = flag("one index per row, expanded by a view", default=False)

    @classmethod
    def _bytes(cls, calls: Calls) -> tuple[Array, Array, Array]:
        """(bytes of the elements and their indices, of the distinct sectors accessed, and of L2 traffic beyond these)

        With one index per element each access takes a whole sector.
        """
        elements, element_bytes = calls["rows"] * calls["cols"], calls.dtype.act_bytes
        whole = calls["expanded"] > 0
        index = np.where(whole, calls["rows"], elements) * INDEX_BYTES
        if calls.choice("axis") == "cols":
            held = calls["rows"] * calls["size"] * element_bytes
            spread = np.minimum(SECTOR_BYTES, calls["size"] * element_bytes)
            touched = np.minimum(held, elements * SECTOR_BYTES)
        else:
            held = calls["cols"] * calls["size"] * element_bytes
            spread = np.where(whole, element_bytes, np.minimum(SECTOR_BYTES, calls["size"] * element_bytes))
            named = distinct(calls["rows"], calls["size"])
            touched = np.minimum(held, named * calls["cols"] * spread)
        return index + elements * element_bytes, touched, np.maximum(0.0, elements * spread - touched)

    @classmethod
    def _refetched(cls, calls: Calls, gpu: Gpu, touched: Array) -> Array:
        """Bytes read from DRAM again because L2 could not hold them: a burst per element, or the row."""
        elements, element_bytes = calls["rows"] * calls["cols"], calls.dtype.act_bytes
        if calls.choice("axis") == "cols":  # rows are gone through in order
            return np.zeros_like(elements)
        each = np.where(calls["expanded"] > 0, element_bytes, np.minimum(_BURST_BYTES, calls["size"] * element_bytes))
        lost = missed(gpu, elements * each, calls["size"] * calls["cols"] * element_bytes)
        return np.maximum(0.0, lost - touched)


class GatherElements(_ByElement):
    """Elements selected by one index each (``torch.gather``). With one index per row, rows are copied by vectors."""

    op = "gather_elements"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        given, touched, again = cls._bytes(calls)
        whole = (calls["expanded"] > 0) & (np.mod(calls["cols"] * calls.dtype.act_bytes, VECTOR_BYTES) == 0)
        whole &= calls.choice("axis") == "rows"
        elements = calls["rows"] * calls["cols"]
        lost = cls._refetched(calls, gpu, touched)
        one_by_one = _element_kernel(gpu, elements, given + touched, again, ~whole)
        by_row = _row_copies(gpu, calls, given + touched, whole)
        return (replace(one_by_one, refetched_bytes=lost * ~whole), replace(by_row, refetched_bytes=lost * whole))


class Scatter(_ByElement):
    """Elements written to the positions of an index (``scatter_`` of a tensor)."""

    op = "scatter"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        given, touched, again = cls._bytes(calls)
        work = _element_kernel(gpu, calls["rows"] * calls["cols"], given + touched, again, True)
        return (replace(work, refetched_bytes=2 * cls._refetched(calls, gpu, touched)),)  # in, and out again


class ScatterAdd(_ByElement):
    """Elements added at the positions of an index, by atomics in L2 (``scatter_add_``)."""

    op = "scatter_add"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        given, touched, again = cls._bytes(calls)
        work = _element_kernel(gpu, calls["rows"] * calls["cols"], given + 2 * touched, again, True)
        return (replace(work, refetched_bytes=2 * cls._refetched(calls, gpu, touched)),)


def _element_kernel(
    gpu: Gpu,
    elements: Array,
    moved: Array,
    again: Number,
    runs: Mask,
    a_thread: float = _SCATTER_ELEMENTS,
    cycles: Number = _SCATTER_CYCLES,
) -> Work:
    """A thread processes its elements one after another, each with its index."""
    work = vector_kernel(
        gpu,
        tasks=ceil_div(elements, _THREADS * a_thread),
        threads=_THREADS,
        moved_bytes=moved,
        again_bytes=again,
        warp_instructions=_OFFSET_INSTRUCTIONS * elements / gpu.warp_threads,
        steps=np.minimum(a_thread, ceil_div(elements, _THREADS)),
        runs=runs,
    )
    return paced(work, gpu, cycles)


def _row_copies(gpu: Gpu, calls: Calls, moved: Array, runs: Mask) -> Work:
    """One CTA per 4 KiB of a row, 16 bytes per thread."""
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
    """Parameters of ops whose index selects whole rows."""

    examples = ({"rows": 100000, "cols": 64, "size": 10000}, {"rows": 4096, "cols": 1024, "size": 50000})

    rows: int = size("rows that the index selects")
    cols: int = size("columns")
    size: int = size("rows of the other tensor")

    @classmethod
    def _bytes(cls, calls: Calls) -> tuple[Array, Array, Array]:
        """(bytes of the rows, of the distinct rows, of the index)"""
        row_bytes = calls["cols"] * calls.dtype.act_bytes
        sectors = np.where(row_bytes < SECTOR_BYTES, SECTOR_BYTES, row_bytes)
        named = distinct(calls["rows"], calls["size"]) * sectors
        touched = np.minimum(named, calls["size"] * row_bytes)
        return calls["rows"] * row_bytes, touched, calls["rows"] * INDEX_BYTES


class Index(_ByRow):
    """Rows selected by one index tensor or several (``x[i]``, ``x[i, j]``)."""

    op = "index"

    indices: int = size("index tensors, one per axis", default=1, high=8)

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        whole, touched, index_bytes = cls._bytes(calls)
        moved = whole + touched + index_bytes * calls["indices"]
        vectors = (calls["indices"] == 1) & (np.mod(calls["cols"] * calls.dtype.act_bytes, VECTOR_BYTES) == 0)
        elements = calls["rows"] * calls["cols"]
        cycles = _INDEX_CYCLES + _MORE_CYCLES * (calls["indices"] - 1)
        lost = np.maximum(0.0, missed(gpu, whole, calls["size"] * calls["cols"] * calls.dtype.act_bytes) - touched)
        one_by_one = _element_kernel(gpu, elements, moved, 0.0, ~vectors, _INDEX_ELEMENTS, cycles)
        by_row = _row_copies(gpu, calls, moved, vectors)
        return (replace(one_by_one, refetched_bytes=lost * ~vectors), replace(by_row, refetched_bytes=lost * vectors))


class IndexAdd(_ByRow):
    """Rows added to those of an index, by atomics (``index_add_``; message passing of graph networks)."""

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
        lost = np.maximum(0.0, missed(gpu, whole, calls["size"] * calls["cols"] * calls.dtype.act_bytes) - touched)
        return (replace(paced(work, gpu, 100.0), refetched_bytes=2 * lost),)


class IndexPut(_ByRow):
    """Rows written to those of an index (``x[i] = y``), or added there after a sort (the gradient of x[i])."""

    op = "index_put"

    accumulate: bool = flag("rows with the same index are added up, in order", default=False)

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        whole, touched, index_bytes = cls._bytes(calls)
        elements, adds = calls["rows"] * calls["cols"], calls["accumulate"] > 0
        put = _element_kernel(gpu, elements, whole + touched + index_bytes, 0.0, ~adds, _INDEX_ELEMENTS, _INDEX_CYCLES)
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
            steps=3.0 + np.maximum(1.0, calls["rows"] / calls["size"]),  # rows with the same index are serial
            runs=adds,
        )
        added = replace(paced(added, gpu, _REPEAT_CYCLES), mean_steps=_MEAN_STEPS)  # others find that they are repeats
        sort = radix_sort(gpu, calls["rows"], INDEX_BYTES, INDEX_BYTES, index_bits(calls["size"]), adds)
        return (put, small, *sort, added)
