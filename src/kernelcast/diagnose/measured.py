"""What was measured: kernels as a profiler saw them, joined to the calls that launched them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from kernelcast.forecast.calls import Launch

Source = Literal["torch.profiler", "Nsight Compute", "table"]
NOTHING: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class MeasuredKernel:
    """One kernel, copy or memset: the mean of ``count`` alike launches. Empty and 0 where it is not told."""

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


def sizes_in(text: str) -> tuple[int, ...]:
    """A grid or block as a file has it: '2x66x1', '(2, 66, 1)'."""
    return tuple(map(int, re.findall(r"\d+", text)))


@dataclass(frozen=True)
class MeasuredCall:
    """An op with all the kernels that it launched (a kernel alone, where no op is known), ``count`` times alike.

    Times are means of one call. ``calls`` are the kernel calls that it stands for; where there are none, ``unmatched``
    says why.
    """

    name: str  # aten::mm, or the kernel's
    shapes: str
    kernels: tuple[MeasuredKernel, ...]
    calls: tuple[Launch, ...] = ()
    unmatched: str = ""
    count: int = 1
    idle_us: float = 0.0  # the GPU had nothing to do before it
    chain: float = 0.0  # kernels of the row of fusible kernels that this is a part of; 0: it is in none
    chain_saved_us: float = 0.0  # its part of what one kernel for the whole row would save
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
    """All that a file has. ``span_us``: from the first kernel's start to the last one's end, where there is a clock."""

    source: Source
    calls: tuple[MeasuredCall, ...]
    launches: int
    span_us: float | None = None
    gpu_name: str = ""  # as the profiler prints it

    @property
    def gpu_time_us(self) -> float:
        return sum(call.total_us for call in self.calls)

    @property
    def idle_us(self) -> float:
        return sum(call.idle_us * call.count for call in self.calls)
