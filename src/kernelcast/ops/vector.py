"""Vector kernels: threads per row, reductions, and a kernel from the totals that it moves and computes."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Kernel
from kernelcast.ops.work import Array, Number, Work, ceil_div

VECTOR_DTYPES = ("fp32", "fp16", "bf16")  # what vector kernels load; all of them compute in fp32
VECTOR_BYTES = 16.0  # the widest load or store of a thread
VECTOR_ELEMENTS = 8.0  # elements a thread takes at once: 16 bytes of bf16 (vLLM's vectorised norms)
MAX_THREADS = 1024.0
WAVEFRONT_BYTES = 128.0  # an access to shared memory takes a cycle of all 32 banks, however few it uses
SECTOR_BYTES = 32.0  # what one scattered access moves between L2 and an SM (CUDA C++ programming guide, 5.3.2)
INDEX_BYTES = 8.0  # int64
Mask = NDArray[np.bool_] | bool  # which calls
ACCUMULATOR_BYTES = 4.0  # vector kernels sum in fp32


class MemoryKernel(Kernel):
    """A family of mostly memory-bound vector kernels, learned together."""

    family = "memory"
    dtypes: ClassVar[tuple[str, ...]] = VECTOR_DTYPES


def row_threads(gpu: Gpu, cols: Array, elements: float = VECTOR_ELEMENTS, most: float = MAX_THREADS) -> Array:
    """Threads of a CTA that takes one row: ``elements`` each, whole warps, at most ``most``."""
    return np.minimum(most, ceil_div(ceil_div(cols, elements), gpu.warp_threads) * gpu.warp_threads)


def side_instructions(gpu: Gpu, vector_bytes: Number, converted: Number = 0.0) -> Array:
    """Warp instructions beside loads, stores and math: two of index arithmetic per 16-byte vector, and one per element
    that is converted between 16 bits and fp32."""
    return (2 * np.asarray(vector_bytes) / VECTOR_BYTES + converted) / gpu.warp_threads


def block_reduction(gpu: Gpu, threads: Array, values: float = 1.0) -> tuple[Array, Array]:
    """(shared-memory bytes, warp instructions) to reduce ``values`` numbers per thread over one CTA (cub::BlockReduce).

    Five shuffle-and-combine pairs inside each warp, as many in the warp that joins them; each warp writes its partial
    result and reads the total, the joining warp reads all.
    """
    warps = threads / gpu.warp_threads
    levels = np.log2(gpu.warp_threads)
    return values * (2 * warps + 1) * WAVEFRONT_BYTES, values * (warps + 1) * 2 * levels


def vector_kernel(
    gpu: Gpu,
    *,
    tasks: Array,
    threads: Number,
    moved_bytes: Number,
    again_bytes: Number = 0.0,
    streamed_bytes: Number = 0.0,
    flops: Number = 0.0,
    xu_ops: Number = 0.0,
    converted: Number = 0.0,
    smem_bytes: Number = 0.0,
    warp_instructions: Number = 0.0,
    registers: Number = 32.0,
    smem_bytes_per_cta: Number = 0.0,
    steps: Number = 1.0,
    launches: Number = 1.0,
    runs: Mask = True,
) -> Work:
    """One kernel that splits its work evenly over ``tasks`` CTAs; every demand is the whole kernel's.

    ``moved_bytes``: activations read and written once. ``streamed_bytes``: weights, from DRAM. ``again_bytes``: further
    L2 traffic, from reading twice or in part. ``converted``: elements converted between 16 bits and fp32.
    ``warp_instructions``: beside those that bytes and FLOPs imply. ``runs``: the calls that launch this kernel.
    """
    on = np.asarray(runs, dtype=np.float64)
    tasks = tasks * on

    def each(total: Number) -> Array:
        """One task's share."""
        return total * on / np.maximum(tasks, 1.0)

    l2_bytes = each(np.asarray(moved_bytes) + again_bytes + streamed_bytes)
    return Work(
        tasks=tasks,
        fma_flops=each(flops),
        xu_ops=each(xu_ops),
        smem_bytes=each(smem_bytes),
        l2_bytes=l2_bytes,
        other_warp_instructions=side_instructions(gpu, l2_bytes, each(converted)) + each(warp_instructions),
        streamed_bytes=streamed_bytes * on,
        activation_bytes=moved_bytes * on,
        threads=threads,
        registers_per_thread=registers,
        smem_bytes_per_cta=smem_bytes_per_cta,
        serial_steps=steps,
        launches=launches * on,
        useful_flops=flops * on,
    )


def fill_kernel(gpu: Gpu, filled_bytes: Array, runs: Mask = True) -> Work:
    """A tensor filled with zeros: CTAs of 128 threads, 16 bytes each."""
    tasks = ceil_div(filled_bytes, 128.0 * VECTOR_BYTES)
    return vector_kernel(gpu, tasks=tasks, threads=128.0, moved_bytes=filled_bytes, runs=runs)


def power_below(count: Number) -> Array:
    """The largest power of two that is at most ``count``."""
    return 2 ** np.floor(np.log2(np.maximum(count, 1.0)))


# CTAs that the whole GPU starts in a cycle. On an H200 a million CTAs of a warp take 602 us (rows gathered by
# vectors), 65,536 of two warps 41 us (batch norm of 7 x 7 maps): 1.6e9 a second.
_CTAS_PER_CYCLE = 0.84


def paced(work: Work, gpu: Gpu, cycles: Number = 0.0) -> Work:
    """The work, no faster than its serial steps (``cycles`` each) and the start of its CTAs allow."""
    resident = np.clip(np.floor(gpu.max_threads_per_sm / np.asarray(work.threads)), 1.0, gpu.max_ctas_per_sm)
    started = np.minimum(gpu.sm_count * resident, np.maximum(work.tasks, 1.0)) / _CTAS_PER_CYCLE  # cycles of a round
    steps = np.maximum(work.serial_steps, 1.0)
    return replace(work, serial_steps=steps, step_cycles=np.maximum(cycles, started / steps))
