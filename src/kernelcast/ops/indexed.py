"""What ops that go by an index share: distinct places, and the sort of an index before rows are added up."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, Kernel
from kernelcast.ops.vector import INDEX_BYTES, VECTOR_DTYPES, Mask, paced, vector_kernel
from kernelcast.ops.work import Array, Number, Work, Works, ceil_div

_RADIX_BITS = 8.0  # of one pass of cub's radix sort
_SORT_THREADS, _SORT_ITEMS = 384.0, 12.0  # of a CTA, and of a thread of it, in a pass (onesweep)
# A pass over 1e7 floats with their places takes 105 us on our H200, over 1e6 17 us, over 65,536 ids 6 us: a warp finds
# equal digits by eight ballots, and a CTA waits for the counts of those before it.
_RANK_INSTRUCTIONS, _RANK_CYCLES = 225.0, 20000.0
_COUNT_INSTRUCTIONS = 20.0  # an element and digit
_ONE_CTA_BYTES = 38912.0  # of keys and values (SingleTile: 256 threads of 152 bytes)
_ALONE_CYCLES = 4000.0  # 16 us for 8 passes over 2,048 ids


class IndexedKernel(Kernel):
    """An op whose places in memory an index tells; what is learned of one serves the others."""

    family = "indexed"
    dtypes: ClassVar[tuple[str, ...]] = VECTOR_DTYPES

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        """Sizes, and how often a place is named."""
        found = super().shape_features(calls, gpu)
        if {"rows", "size"} <= calls.numbers.keys():
            found["log_repeats"] = np.log2(calls["rows"] / calls["size"])
        return found


def distinct(draws: Array, places: Array) -> Array:
    """Different ones among ``draws`` random places: places · (1 − (1 − 1/places)^draws)."""
    return -places * np.expm1(draws * np.log1p(-1 / np.maximum(places, 1.0 + 1e-9)))


def missed(gpu: Gpu, named_bytes: Array, held_bytes: Array) -> Array:
    """Of what is named at random among so many bytes, what L2 does not hold."""
    return named_bytes * np.clip(1 - gpu.l2_bytes / np.maximum(held_bytes, 1.0), 0.0, 1.0)


def radix_sort(gpu: Gpu, items: Array, key_bytes: float, value_bytes: float, bits: Number, runs: Mask) -> Works:
    """cub's onesweep of keys with values: a histogram of all digits, its scan, then a pass for each 8 bits; few of them
    are sorted by one CTA."""
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
    found = [paced(alone, gpu, _ALONE_CYCLES), counted]
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
        found.append(paced(work, gpu, _RANK_CYCLES))
    return tuple(found)


def zeros(gpu: Gpu, filled_bytes: Array) -> Work:
    """A tensor filled with zeros."""
    return vector_kernel(gpu, tasks=ceil_div(filled_bytes, 128.0 * 16.0), threads=128.0, moved_bytes=filled_bytes)


def place_bits(places: Array) -> Array:
    """Of the largest of so many places."""
    return np.maximum(1.0, np.ceil(np.log2(np.maximum(places, 2.0))))


INDEX_PAIR_BYTES = 2 * INDEX_BYTES  # an index and where it stood
