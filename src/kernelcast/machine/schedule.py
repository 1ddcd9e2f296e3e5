"""How tasks fall onto SMs: how many CTAs share one, and the busiest SM's share, in units of the mean task.

Closed forms, so that a million calls take one pass; their test replays the heap.
"""

from __future__ import annotations

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.ops.work import Array, Number, Work

REGISTER_GRAIN = 256.0  # registers are handed to a warp in blocks of 256 (CUDA occupancy calculator)
SMEM_RESERVED_BYTES = 1024.0  # the driver keeps 1 KiB a CTA from compute capability 8.0 on


def ctas_per_sm(work: Work, gpu: Gpu) -> Array:
    """Resident CTAs of this kernel on one SM, by registers, shared memory and threads (CUDA occupancy rules).

    At least 1, also where a guessed footprint would not fit.
    """
    warps = np.ceil(np.asarray(work.threads) / gpu.warp_threads)
    per_warp = np.ceil(np.asarray(work.registers_per_thread) * gpu.warp_threads / REGISTER_GRAIN) * REGISTER_GRAIN
    by_registers = np.floor(gpu.registers_per_sm / (per_warp * warps))
    by_threads = np.floor(gpu.max_threads_per_sm / (warps * gpu.warp_threads))
    by_smem = np.floor(gpu.smem_bytes_per_sm / (np.asarray(work.smem_bytes_per_cta) + SMEM_RESERVED_BYTES))
    fit = np.minimum(np.minimum(by_registers, by_threads), np.minimum(by_smem, gpu.max_ctas_per_sm))
    return np.maximum(1.0, fit)


def busiest_share(work: Work, sms: int) -> Array:
    """Mean tasks' worth of work on the busiest of ``sms`` SMs: the least that its schedule can reach."""
    if work.schedule == "longest_first":
        return longest_first(work.tasks, work.longest, work.shortest, work.longest_count, sms)
    tasks = np.asarray(work.tasks)  # an SM that frees up takes the next
    waves: Array = np.ceil(tasks / sms)
    if not isinstance(work.longest, np.ndarray) and work.longest == 1:  # all are alike
        return waves
    return np.maximum(waves, np.where(tasks > 0, work.longest, 0.0))


def longest_first(tasks: Number, longest: Number, shortest: Number, longest_count: Number, sms: int) -> Array:
    """Unequal tasks, longest first, each to the least loaded SM.

    Three lower limits, of which the largest is close to what the heap reaches: the longest task alone; the
    longest tasks shared out; all work shared out, rounded up to the shortest task (the last to be placed).
    For equal tasks this is ceil(tasks / sms).
    """
    grain = np.maximum(shortest, 1e-9)
    shared = grain * np.ceil(np.asarray(tasks, dtype=np.float64) / (sms * grain) - 1e-9)
    shared = np.where(np.asarray(tasks) > sms, shared, 0.0)  # else no SM has two
    long = longest * np.ceil(np.asarray(longest_count, dtype=np.float64) / sms)
    return np.where(np.asarray(tasks) > 0, np.maximum(shared, np.maximum(long, longest)), 0.0)
