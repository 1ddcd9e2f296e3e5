"""How many CTAs share an SM, from registers, shared memory and threads (CUDA occupancy rules)."""

from __future__ import annotations

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.kernels.work import Array, Work

REGISTER_GRAIN = 256.0  # registers are handed to a warp in blocks of 256 (CUDA occupancy calculator)
SMEM_RESERVED_BYTES = 1024.0  # the driver keeps 1 KiB a CTA from compute capability 8.0 on


def ctas_per_sm(work: Work, gpu: Gpu) -> Array:
    """Resident CTAs of this kernel on one SM; at least 1, also where a guessed footprint would not fit."""
    warps = np.ceil(np.asarray(work.threads) / gpu.warp_threads)
    per_warp = np.ceil(np.asarray(work.registers_per_thread) * gpu.warp_threads / REGISTER_GRAIN) * REGISTER_GRAIN
    by_registers = np.floor(gpu.registers_per_sm / (per_warp * warps))
    by_threads = np.floor(gpu.max_threads_per_sm / (warps * gpu.warp_threads))
    by_smem = np.floor(gpu.smem_bytes_per_sm / (np.asarray(work.smem_bytes_per_cta) + SMEM_RESERVED_BYTES))
    fit = np.minimum(np.minimum(by_registers, by_threads), np.minimum(by_smem, gpu.max_ctas_per_sm))
    return np.maximum(1.0, fit)
