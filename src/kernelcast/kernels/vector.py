"""A vector kernel from the totals that it moves and computes, for ops of several kernels in turn."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.kernels.norm import side_instructions
from kernelcast.kernels.work import Array, Number, Work

SECTOR_BYTES = 32.0  # what one scattered access moves between L2 and an SM (CUDA C++ programming guide, 5.3.2)
INDEX_BYTES = 8.0  # int64
ACCUMULATOR_BYTES = 4.0  # vector kernels sum in fp32


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
    runs: NDArray[np.bool_] | bool = True,
) -> Work:
    """One kernel that shares its work evenly among ``tasks`` CTAs; every demand is that of the whole kernel.

    ``moved_bytes``: activations read and written once. ``streamed_bytes``: weights, which come from DRAM.
    ``again_bytes``: what an SM gets from L2 beyond that, because it reads twice or in part. ``converted``: elements
    that change between 16 bits and fp32. ``warp_instructions``: beside those that bytes and FLOPs imply. ``runs``: the
    calls that launch this kernel at all.
    """
    on = np.asarray(runs, dtype=np.float64)
    tasks = tasks * on
    share = on / np.maximum(tasks, 1.0)  # of the whole, one task's
    l2_bytes = (np.asarray(moved_bytes) + again_bytes + streamed_bytes) * share
    return Work(
        tasks=tasks,
        longest_count=tasks,
        fma_flops=flops * share,
        xu_ops=xu_ops * share,
        smem_bytes=smem_bytes * share,
        l2_bytes=l2_bytes,
        other_warp_instructions=side_instructions(gpu, l2_bytes, converted * share) + warp_instructions * share,
        streamed_bytes=streamed_bytes * on,
        activation_bytes=moved_bytes * on,
        threads=threads,
        registers_per_thread=registers,
        smem_bytes_per_cta=smem_bytes_per_cta,
        serial_steps=steps,
        launches=launches * on,
        useful_flops=flops * on,
    )
