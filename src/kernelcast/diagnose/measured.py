"""What was measured: kernels as a profiler saw them, how they were launched, and the calls that launched them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from kernelcast.diagnose.kernel_names import KernelName, parse_kernel_name
from kernelcast.forecast.calls import Launch
from kernelcast.hardware import Gpu
from kernelcast.machine.limits import ctas_per_sm
from kernelcast.ops.work import Work

Source = Literal["torch.profiler", "Nsight Compute", "table"]
NOTHING: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class MeasuredKernel:
    """One kernel, copy or memset: the mean of equal launches. Empty and 0 where the file does not say."""

    name: str
    time_us: float
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    registers: int = 0
    smem_bytes: int = 0
    counters: Mapping[str, float] = field(default_factory=lambda: NOTHING)  # dram_bytes, l2_hit_share, occupancy

    @property
    def ctas(self) -> int:
        return math.prod(self.grid) if self.grid else 0

    @property
    def threads(self) -> int:
        return math.prod(self.block) if self.block else 0


def parse_sizes(text: str) -> tuple[int, ...]:
    """A grid or block as a file has it: '2x66x1', '(2, 66, 1)'."""
    return tuple(map(int, re.findall(r"\d+", text)))


@dataclass(frozen=True)
class MeasuredCall:
    """An op with all the kernels that it launched (a kernel alone, where no op is known), ``count`` times.

    Times are means of one call. ``calls`` are the kernel calls of the op; where there are none, ``unmatched`` says why.
    """

    name: str  # aten::mm, or the kernel's
    shapes: str
    kernels: tuple[MeasuredKernel, ...]
    calls: tuple[Launch, ...] = ()
    unmatched: str = ""
    count: int = 1
    idle_us: float = 0.0  # the GPU idled before it
    chain: float = 0.0  # length of the sequence of fusible kernels that it is in; 0: it is in none
    chain_saved_us: float = 0.0  # its part of what one kernel for the whole sequence would save
    marks: tuple[str, ...] = ()  # annotations of the program around it

    @property
    def time_us(self) -> float:
        return sum(kernel.time_us for kernel in self.kernels)

    @property
    def total_us(self) -> float:
        return self.time_us * self.count

    @property
    def main(self) -> MeasuredKernel:
        """The kernel that takes most of the time."""
        return max(self.kernels, key=lambda kernel: kernel.time_us)


@dataclass(frozen=True)
class Profile:
    """All that a file has. ``duration_us``: from the first kernel's start to the last kernel's end, where the file
    has a clock."""

    source: Source
    calls: tuple[MeasuredCall, ...]
    launches: int
    duration_us: float | None = None
    gpu_name: str = ""  # as the profiler prints it

    @property
    def gpu_time_us(self) -> float:
        return sum(call.total_us for call in self.calls)

    @property
    def idle_us(self) -> float:
        return sum(call.idle_us * call.count for call in self.calls)


@dataclass(frozen=True)
class LaunchGrid:
    """How a kernel was launched: tiles, CTAs, waves, tail and padding; 0 and None where name and grid do not say."""

    ctas: int = 0
    tasks: int = 0  # tiles, or CTAs where each does one piece of work
    slots: int = 0  # tasks that the GPU works on side by side: SMs x resident CTAs
    ctas_per_sm: int = 0
    occupancy: float = 0.0  # resident warps of an SM, of those that it could hold
    tile_m: int | None = None
    tile_n: int | None = None
    split_k: int = 1  # parts that the inner axis is split into; 2 where the name says split, but not how often
    padding: float | None = None  # share of the tiles' area that is outside of the result
    dtype: str | None = None
    align_elements: int | None = None

    @property
    def waves(self) -> float:
        return self.tasks / self.slots if self.slots else 0.0

    @property
    def tail(self) -> float:
        """Share of the SMs' time that idles because the last wave is not full."""
        return 1 - self.waves / math.ceil(self.waves) if self.waves > 0 else 0.0

    @property
    def last_wave(self) -> float:
        """How full the last wave is."""
        part = self.waves - math.floor(self.waves)
        return part if part > 0 else 1.0


def launch_grid(kernel: MeasuredKernel, parameters: Mapping[str, Any], gpu: Gpu) -> LaunchGrid:
    """``parameters``: of the kernel call, {} where it is not known."""
    name = parse_kernel_name(kernel.name)
    grid = LaunchGrid(tile_m=name.tile_m, tile_n=name.tile_n, dtype=name.dtype, align_elements=name.align_elements)
    if not kernel.grid:
        return grid
    work = Work(
        tasks=np.ones(1),
        threads=float(max(1, kernel.threads)),
        registers_per_thread=float(kernel.registers or 32),
        smem_bytes_per_cta=float(kernel.smem_bytes),
    )
    resident = int(np.max(ctas_per_sm(work, gpu)))
    warps = math.ceil(kernel.threads / gpu.warp_threads)
    split = _split_k(name, kernel, parameters)
    tasks, slots = kernel.ctas, gpu.sm_count * resident
    m, n = (int(parameters.get(size) or 0) for size in ("m", "n"))
    padding = None
    if name.tile_m and name.tile_n and m and n:
        rows, columns = math.ceil(m / name.tile_m), math.ceil(n / name.tile_n)
        padding = 1 - m * n / (rows * name.tile_m * columns * name.tile_n)
        if not (name.persistent and name.split_k):  # then the grid alone says how the tiles are split
            tasks = int(parameters.get("batch", 1)) * rows * columns * split
    return replace(
        grid,
        ctas=kernel.ctas,
        tasks=tasks,
        slots=min(kernel.ctas, slots) if name.persistent else slots,
        ctas_per_sm=resident,
        occupancy=min(1.0, resident * warps * gpu.warp_threads / gpu.max_threads_per_sm),
        split_k=split,
        padding=padding,
    )


def _split_k(name: KernelName, kernel: MeasuredKernel, parameters: Mapping[str, Any]) -> int:
    """The third axis of a product's grid counts parts of k, or matrices of a batch."""
    depth = kernel.grid[2] if len(kernel.grid) > 2 else 1
    if name.category == "matmul" and not name.persistent and depth > 1 and parameters.get("op") == "gemm":
        return depth
    return 2 if name.split_k else 1
