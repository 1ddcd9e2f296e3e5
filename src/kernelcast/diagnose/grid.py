"""How a kernel was really launched: tiles from its name and grid, CTAs an SM, waves, tail and padding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kernelcast.diagnose.kernel_names import KernelName, read_name
from kernelcast.diagnose.measured import MeasuredKernel
from kernelcast.hardware import Gpu
from kernelcast.machine.limits import ctas_per_sm
from kernelcast.ops.work import Work


@dataclass(frozen=True)
class Grid:
    """What the measured side says of the main kernel of a call; 0 and None where it says nothing."""

    ctas: int = 0
    tasks: int = 0  # tiles, or CTAs where each does one piece of work
    slots: int = 0  # tasks that the GPU works on side by side: SMs x CTAs that one holds
    ctas_per_sm: int = 0
    occupancy: float = 0.0  # warps that an SM holds, of those that it could
    tile_m: int | None = None
    tile_n: int | None = None
    split_k: int = 1  # parts that the inner axis is cut into; 2 where the name says some, but not how many
    padding: float | None = None  # share of the tiles' area that is outside of the result
    dtype: str | None = None
    align_elements: int | None = None

    @property
    def waves(self) -> float:
        return self.tasks / self.slots if self.slots else 0.0

    @property
    def tail(self) -> float:
        """Share of the SMs' time that idles because the last round is not full."""
        return 1 - self.waves / math.ceil(self.waves) if self.waves > 0 else 0.0

    @property
    def last_round(self) -> float:
        """How full the last round is."""
        part = self.waves - math.floor(self.waves)
        return part if part > 0 else 1.0


def grid_of(kernel: MeasuredKernel, parameters: Mapping[str, Any], chip: Gpu) -> Grid:
    """``parameters``: of the kernel call, {} where it is not known."""
    said = read_name(kernel.name)
    named = Grid(tile_m=said.tile_m, tile_n=said.tile_n, dtype=said.dtype, align_elements=said.align_elements)
    if not kernel.grid:
        return named
    work = Work(
        tasks=np.ones(1),
        threads=float(max(1, kernel.threads)),
        registers_per_thread=float(kernel.registers or 32),
        smem_bytes_per_cta=float(kernel.smem_bytes),
    )
    resident = int(np.max(ctas_per_sm(work, chip)))
    warps = math.ceil(kernel.threads / chip.warp_threads)
    split = _split(said, kernel, parameters)
    tasks, slots = kernel.ctas, chip.sm_count * resident
    m, n = (int(parameters.get(name) or 0) for name in ("m", "n"))
    padding = None
    if said.tile_m and said.tile_n and m and n:
        rows, columns = math.ceil(m / said.tile_m), math.ceil(n / said.tile_n)
        padding = 1 - m * n / (rows * said.tile_m * columns * said.tile_n)
        if not (said.persistent and said.split_k):  # then the grid alone tells how the tiles are cut
            tasks = int(parameters.get("batch", 1)) * rows * columns * split
    return replace(
        named,
        ctas=kernel.ctas,
        tasks=tasks,
        slots=min(kernel.ctas, slots) if said.persistent else slots,
        ctas_per_sm=resident,
        occupancy=min(1.0, resident * warps * chip.warp_threads / chip.max_threads_per_sm),
        split_k=split,
        padding=padding,
    )


def _split(said: KernelName, kernel: MeasuredKernel, parameters: Mapping[str, Any]) -> int:
    """The third axis of a product's grid counts parts of k, or matrices of a batch."""
    depth = kernel.grid[2] if len(kernel.grid) > 2 else 1
    if said.kind == "matmul" and not said.persistent and depth > 1 and parameters.get("op") == "gemm":
        return depth
    return 2 if said.split_k else 1
