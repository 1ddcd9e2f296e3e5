"""What ops that go by an index share: distinct places, and the sort of an index before rows are added up."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, Kernel
from kernelcast.kernels.vector import INDEX_BYTES, VECTOR_DTYPES, Mask, vector_kernel
from kernelcast.kernels.work import Array, Number, Work, ceil_div

_RADIX_BITS = 8.0  # of one pass of cub's radix sort
_SORT_THREADS, _SORT_ITEMS = 384.0, 12.0  # of a CTA, and of a thread of it, in a pass (onesweep)


class IndexedKernel(Kernel):
    """An op whose places in memory an index tells; what is learned of one serves the others."""

    family = "indexed"
    dtypes: ClassVar[tuple[str, ...]] = VECTOR_DTYPES

    @classmethod
    def hints(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        """Sizes, and how often a place is named."""
        found = super().hints(calls, gpu)
        if {"rows", "size"} <= calls.numbers.keys():
            found["log_repeats"] = np.log2(calls["rows"] / calls["size"])
        return found


def distinct(draws: Array, places: Array) -> Array:
    """Different ones among ``draws`` random places: places · (1 − (1 − 1/places)^draws)."""
    return -places * np.expm1(draws * np.log1p(-1 / np.maximum(places, 1.0 + 1e-9)))


def radix_sort(gpu: Gpu, items: Array, key_bytes: float, value_bytes: float, bits: Number, runs: Mask) -> Work:
    """cub's onesweep of keys with values: a histogram of all digits, its scan, then a pass for each 8 bits."""
    passes = ceil_div(bits, _RADIX_BITS)
    pair = key_bytes + value_bytes
    return vector_kernel(
        gpu,
        tasks=ceil_div(items, _SORT_THREADS * _SORT_ITEMS) * (passes + 1) + 1,
        threads=_SORT_THREADS,
        moved_bytes=items * (key_bytes + 2 * pair * passes),
        smem_bytes=items * passes * 4 * pair,
        warp_instructions=items * (passes * 30 + 10) / gpu.warp_threads,  # a warp finds equal digits by 8 ballots
        registers=64.0,
        smem_bytes_per_cta=_SORT_THREADS * _SORT_ITEMS * pair,
        launches=passes + 2,
        runs=runs,
    )


def zeros(gpu: Gpu, filled_bytes: Array) -> Work:
    """A tensor filled with zeros."""
    return vector_kernel(gpu, tasks=ceil_div(filled_bytes, 128.0 * 16.0), threads=128.0, moved_bytes=filled_bytes)


def place_bits(places: Array) -> Array:
    """Of the largest of so many places."""
    return np.maximum(1.0, np.ceil(np.log2(np.maximum(places, 2.0))))


INDEX_PAIR_BYTES = 2 * INDEX_BYTES  # an index and where it stood
