"""Device memory that calls take their tensors from: filled once with random numbers, handed out as views.

What a call reads keeps its random numbers: how long exp or a division takes, and at which clock a matrix product runs,
depends on them. What a call writes lies elsewhere.

A call gets several sets of tensors, one after another in the pool, so that by the time a set comes round again the
L2 has seen more than twice its size (cold), or one set (warm). Allocating and filling for each call would cost more
than timing it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernelcast.errors import KernelcastError

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}
_ALIGN = 256  # bytes
_TIMES_L2 = 2.5  # what a cold rotation passes before a set comes again
MOST_SETS = 256


class TooLargeError(KernelcastError):
    """The call's tensors do not fit the pool."""


Use = Literal["read", "written", "changed"]  # changed: read and written over


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a call needs."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    use: Use = "read"

    @property
    def bytes(self) -> int:
        return math.ceil(math.prod(self.shape) * self.dtype.itemsize / _ALIGN) * _ALIGN


class TensorPool:
    """Random numbers of each format, ``bytes`` of each, created on first use."""

    def __init__(self, bytes: int, l2_bytes: int, seed: int = 0, device: str = "cuda") -> None:
        self._bytes = bytes
        self._l2_bytes = l2_bytes
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)
        self._data: dict[torch.dtype, Tensor] = {}
        self._scratch: dict[torch.dtype, Tensor] = {}
        self.warm = False

    def sets(self, *specs: TensorSpec) -> list[tuple[Tensor, ...]]:
        """Sets of tensors of these shapes that do not overlap."""
        footprint = sum(spec.bytes for spec in specs)
        wanted = 1 if self.warm else min(MOST_SETS, max(2, math.ceil(_TIMES_L2 * self._l2_bytes / footprint)))
        formats = dict.fromkeys(spec.dtype for spec in specs)
        needed = {dtype: sum(s.bytes for s in specs if s.dtype == dtype) for dtype in formats}
        count = min(wanted, *(self._bytes // need for need in needed.values()))
        if count < 1:
            raise TooLargeError(
                f"a call of {footprint / 2**30:.1f} GiB does not fit the pool of {self._bytes / 2**30:.1f}"
            )
        offset = dict.fromkeys(formats, 0)
        sets = []
        for _ in range(count):
            members = []
            for spec in specs:
                start = offset[spec.dtype] // spec.dtype.itemsize
                members.append(self._view(spec, slice(start, start + math.prod(spec.shape))))
                offset[spec.dtype] += spec.bytes
            sets.append(tuple(members))
        return sets

    def _view(self, spec: TensorSpec, where: slice) -> Tensor:
        """The memory at ``place``: random numbers, or the same offset of the memory for results."""
        dtype = spec.dtype
        if dtype not in self._data:
            self._data[dtype] = self._random(dtype)
            self._scratch[dtype] = torch.zeros_like(self._data[dtype])
        if spec.use == "read":
            return self._data[dtype][where].view(spec.shape)
        if spec.use == "changed":
            self._scratch[dtype][where] = self._data[dtype][where]
        return self._scratch[dtype][where].view(spec.shape)

    def _random(self, dtype: torch.dtype) -> Tensor:
        count = self._bytes // dtype.itemsize
        data = torch.empty(count, dtype=dtype, device=self._device)
        step = 2**26
        for start in range(0, count, step):
            stop = min(count, start + step)
            data[start:stop] = torch.randn(stop - start, device=self._device, generator=self._generator).to(dtype)
        return data


def specs(dtype: str, *shapes: Sequence[int], use: Use = "read") -> tuple[TensorSpec, ...]:
    """Tensors of one format."""
    return tuple(TensorSpec(tuple(int(n) for n in shape), DTYPES[dtype], use) for shape in shapes)
