"""sort along rows (within a CTA up to 4,096 elements, by cub's radix sort beyond), searchsorted and histogram, as
PyTorch runs them."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, choice, size
from kernelcast.ops.scatter import IndexedKernel, radix_sort
from kernelcast.ops.vector import INDEX_BYTES, Mask, fill_kernel, paced, vector_kernel
from kernelcast.ops.work import Array, Work, Works, ceil_div

_KEYS = ("int64", "int32")
_KEY_BYTES = {"int64": 8.0, "int32": 4.0}
_SMALL = 4096.0  # longest row that a CTA sorts (should_use_small_sort)
_NETWORK = 32.0  # longest row that half a warp sorts, by a bitonic network
_TILES = (128.0, 1024.0, 2048.0, 4096.0)  # elements that a CTA's sort is made for
_SERIAL = 1e6  # rows as long as this are sorted serially
_FEW_ROWS = 128.0  # fewer long rows are sorted together by value, then by row
_COPY_BYTES_THREADS = 128.0
# A CTA's sort takes 4 bits in a pass: ranks by digit, exchange. An H200 takes 16 us for 8 passes over 1,024 elements,
# 26 for 16, and 116 us for 4,096 rows of as many.
_CTA_BITS = 4.0
_PASS_INSTRUCTIONS = 78.0  # of a thread for an element
_PASS_CYCLES, _TILE_CYCLES = 1000.0, 3.0  # and for each element of the tile up to 1,024
_NETWORK_INSTRUCTIONS, _NETWORK_CYCLES = 790.0, 400.0  # of an element, all levels; of a level
_SEGMENT_BITS, _SEGMENT_THREADS = 7.0, 384.0
_SEGMENT_CYCLES = 5.3  # per element and pass of a row in one CTA: 345 us for 128,256


class Sort(IndexedKernel):
    """Each row sorted, with int64 indices (``sort``, ``argsort``)."""

    op = "sort"
    examples = ({"rows": 64, "cols": 1000}, {"rows": 1, "cols": 1000000, "keys": "int64"})

    rows: int = size("rows")
    cols: int = size("columns, sorted")
    keys: str | None = choice("dtype of integer keys, default: dtype", _KEYS, default=None)

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        cols = calls["cols"]
        return {
            **super().shape_features(calls, gpu),
            "log_elements": np.log2(calls["rows"] * cols),
            "padded": np.log2(np.exp2(np.ceil(np.log2(cols))) / cols),
            "in_a_cta": (cols <= _SMALL).astype(np.float64),
            "together": ((cols > _SMALL) & (calls["rows"] > 1) & (calls["rows"] < _FEW_ROWS)).astype(np.float64),
        }

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        rows, cols = calls["rows"], calls["cols"]
        keys = calls.choice("keys")
        key_bytes = _KEY_BYTES[keys] if keys else calls.dtype.act_bytes
        elements, bits = rows * cols, 8 * key_bytes
        small = cols <= _SMALL
        alone = ~small & ((rows == 1) | (cols >= _SERIAL))
        together = ~small & ~alone & (rows < _FEW_ROWS)
        segmented = ~small & ~alone & ~together
        copies = _copies(gpu, elements, key_bytes, np.where(rows > 1, 3.0, 2.0))
        whole = radix_sort(gpu, np.where(alone, cols, elements), key_bytes, INDEX_BYTES, bits, alone | together)
        by_row = radix_sort(gpu, elements, 8.0, key_bytes + INDEX_BYTES, np.log2(np.maximum(rows, 2.0)), together)
        return (
            copies,
            _network(gpu, rows, key_bytes, cols <= _NETWORK),
            _in_cta(gpu, rows, cols, key_bytes, small & (cols > _NETWORK)),
            *whole,
            *by_row,
            _segments(gpu, rows, cols, key_bytes, segmented),
        )


def _copies(gpu: Gpu, elements: Array, key_bytes: float, launches: Array) -> Work:
    """The row copied to the sort's buffer, with its indices."""
    return vector_kernel(
        gpu,
        tasks=3 * ceil_div(elements, 512.0),
        threads=_COPY_BYTES_THREADS,
        moved_bytes=elements * (2 * key_bytes + INDEX_BYTES),
        launches=launches,
    )


def _network(gpu: Gpu, rows: Array, key_bytes: float, runs: Mask) -> Work:
    """Half a warp per row of up to 32, in 15 levels."""
    elements = rows * _NETWORK
    work = vector_kernel(
        gpu,
        tasks=ceil_div(rows, 16.0),
        threads=256.0,
        moved_bytes=2 * elements * (key_bytes + INDEX_BYTES),
        warp_instructions=_NETWORK_INSTRUCTIONS * elements / gpu.warp_threads,
        steps=15.0,
        runs=runs,
    )
    return paced(work, gpu, _NETWORK_CYCLES)


def _in_cta(gpu: Gpu, rows: Array, cols: Array, key_bytes: float, runs: Mask) -> Work:
    """One CTA per row, of a warp up to 1,024 elements; shorter rows are padded to the tile."""
    tile = np.select([cols <= most for most in _TILES], list(_TILES), _SMALL)
    passes = 8 * key_bytes / _CTA_BITS
    pair = key_bytes + INDEX_BYTES
    work = vector_kernel(
        gpu,
        tasks=rows,
        threads=np.maximum(32.0, tile / 32),
        moved_bytes=2 * rows * cols * pair,
        smem_bytes=rows * tile * passes * 2 * pair,
        warp_instructions=rows * tile * passes * _PASS_INSTRUCTIONS / gpu.warp_threads,
        smem_bytes_per_cta=tile * pair,
        registers=128.0,
        steps=passes,
        runs=runs,
    )
    return paced(work, gpu, _PASS_CYCLES + _TILE_CYCLES * np.minimum(tile, 1024.0))


def _segments(gpu: Gpu, rows: Array, cols: Array, key_bytes: float, runs: Mask) -> Work:
    """cub's segmented sort: one kernel per pass, one CTA per row."""
    passes = np.ceil(8 * key_bytes / _SEGMENT_BITS)
    pair = key_bytes + INDEX_BYTES
    work = vector_kernel(
        gpu,
        tasks=rows,
        threads=_SEGMENT_THREADS,
        moved_bytes=2 * rows * cols * pair * passes,
        warp_instructions=80 * passes * rows * cols / gpu.warp_threads,
        registers=64.0,
        steps=passes * cols,
        launches=passes,
        runs=runs,
    )
    return paced(work, gpu, _SEGMENT_CYCLES)


class Searchsorted(IndexedKernel):
    """Index of each element among sorted boundaries (``searchsorted``, ``bucketize``): a binary search per thread."""

    op = "searchsorted"
    examples = ({"elements": 1000000, "boundaries": 100, "dtype": "fp32"},)

    elements: int = size("elements to look up")
    boundaries: int = size("sorted boundaries")

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        steps = np.ceil(np.log2(calls["boundaries"] + 1))
        elements = calls["elements"]
        work = vector_kernel(
            gpu,
            tasks=ceil_div(elements, 1024.0),
            threads=1024.0,
            moved_bytes=elements * (calls.dtype.act_bytes + INDEX_BYTES) + calls["boundaries"] * calls.dtype.act_bytes,
            warp_instructions=(60 + 20 * steps) * elements / gpu.warp_threads,
            steps=steps,
        )
        return (work,)


class Histogram(IndexedKernel):
    """Counts of elements in each of ``bins`` (``histc``, ``bincount``)."""

    op = "histogram"
    examples = ({"elements": 1000000, "bins": 128, "dtype": "fp32"},)
    dtypes: ClassVar[tuple[str, ...]] = ("fp32",)

    elements: int = size("elements to count")
    bins: int = size("bins")

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        elements, bins = calls["elements"], calls["bins"]
        count = vector_kernel(
            gpu,
            tasks=np.minimum(ceil_div(elements, 512.0), gpu.sm_count * 4.0),
            threads=512.0,
            moved_bytes=elements * 4.0 + bins * 4.0,
            smem_bytes=elements * 4.0,
            warp_instructions=120 * elements / gpu.warp_threads,
            smem_bytes_per_cta=np.minimum(bins * 4.0, 49152.0),
            steps=ceil_div(elements, 512.0 * gpu.sm_count * 4.0),
        )
        return (fill_kernel(gpu, bins * 4.0), count)
