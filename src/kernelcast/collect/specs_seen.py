"""What a GPU says of itself, and what microbenchmarks saw of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kernelcast.collect.nvml import Board


@dataclass(frozen=True)
class Properties:
    """What CUDA and the driver say of the GPU."""

    name: str
    capability: str
    sm_count: int
    l2_bytes: int
    smem_bytes_per_sm: int
    smem_bytes_per_cta: int
    registers_per_sm: int
    max_threads_per_sm: int
    dram_bytes: int
    board: Board
    software: str  # of driver and libraries


@dataclass(frozen=True)
class Long:
    """A product that was repeated for seconds."""

    flops_per_s: float
    power_w: float
    sm_mhz: float | None
    by_power: bool  # the driver held the clock down for it


@dataclass
class Measured:
    """What was seen; None or absent: it was not, and ``skipped`` says why."""

    bursts: dict[str, float] = field(default_factory=dict)  # FLOP/s of the best shape, by format
    shapes: dict[str, str] = field(default_factory=dict)
    longs: dict[str, Long] = field(default_factory=dict)
    dram_read: float | None = None  # bytes/s
    dram_copy: float | None = None
    dram_decode: float | None = None  # by products with few rows, best shape
    l2_read: dict[float, float] = field(default_factory=dict)  # by share of L2 that is read again and again
    smem: float | None = None
    exponentials: float | None = None  # a second
    fma: float | None = None  # FLOP/s
    launch_floor_s: float | None = None
    gap_s: float | None = None
    smallest_gemm_s: float | None = None
    skipped: dict[str, str] = field(default_factory=dict)
