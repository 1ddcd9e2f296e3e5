"""What Triton lets one choose for a grouped GEMM, as parameters of the families that take it."""

from __future__ import annotations

from kernelcast.kernels.base import Kernel, size

TRITON_CONFIG = ("block_m", "block_n", "block_k", "group_m", "warps", "stages")


class TritonConfigured(Kernel):
    """A family whose config may be given; where it is not, the family chooses."""

    listed_last = TRITON_CONFIG

    block_m: int | None = size("Triton BLOCK_SIZE_M, default: chosen", default=None, low=8, high=1024)
    block_n: int | None = size("Triton BLOCK_SIZE_N, default: chosen", default=None, low=8, high=1024)
    block_k: int | None = size("Triton BLOCK_SIZE_K, default: chosen", default=None, low=8, high=1024)
    group_m: int | None = size("Triton GROUP_SIZE_M, default: chosen", default=None, high=1024)
    warps: int | None = size("Triton num_warps, default: chosen", default=None, high=32)
    stages: int | None = size("Triton num_stages, default: chosen", default=None, high=16)
