"""Small kernels that keep one part of a GPU busy and nothing else: reads, exponentials, FMAs, shared memory."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # elements that a program of ``read`` takes at once
_WIDTH = 1024  # elements of a program of arithmetic: eight chains a thread, so that none waits for itself
_UNROLL: tl.constexpr = tl.constexpr(16)


@triton.jit
def _read(x, out, chunks, length, rounds, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for turn in range(rounds):
        # another chunk each turn, read past L1: what comes is L2's or DRAM's
        chunk = (program + turn * 7) % chunks
        start = x + chunk.to(tl.int64) * length
        for step in range(0, length, BLOCK):
            total += tl.load(start + step + at, cache_modifier=".cg")
    tl.store(out + program, tl.sum(total, axis=0))


def read(x: Tensor, out: Tensor, rounds: int = 1, block: int = BLOCK) -> Any:
    """Every program sums a chunk of x (float32) each round; ``out`` has one entry a program."""
    chunks = out.numel()
    return _read[(chunks,)](x, out, chunks, x.numel() // chunks, rounds, BLOCK=block, num_warps=8)


@triton.jit
def _exponentials(x, out, rounds, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(x + at)
    for turn in range(rounds):  # noqa: B007  (Triton wants names of their own)
        for step in tl.static_range(_UNROLL):  # noqa: B007
            value = tl.exp2(-value)
    tl.store(out + at, value)


@triton.jit
def _multiply_adds(x, out, rounds, factor, term, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(x + at)
    for turn in range(rounds):  # noqa: B007  (Triton wants names of their own)
        for step in tl.static_range(_UNROLL):  # noqa: B007
            value = value * factor + term
    tl.store(out + at, value)


def exponentials(x: Tensor, out: Tensor, rounds: int) -> int:
    """2^-x of each element of x, repeatedly (it tends to 0.6412); returns the number of operations."""
    _exponentials[(x.numel() // _WIDTH,)](x, out, rounds, WIDTH=_WIDTH, num_warps=4)
    return x.numel() * rounds * _UNROLL.value


def multiply_adds(x: Tensor, out: Tensor, rounds: int) -> int:
    """x/2 + 1/4 of each element of x, repeatedly (it tends to 0.5); returns the number of operations."""
    _multiply_adds[(x.numel() // _WIDTH,)](x, out, rounds, 0.5, 0.25, WIDTH=_WIDTH, num_warps=4)
    return x.numel() * rounds * _UNROLL.value


@triton.jit
def _touch(out):  # type: ignore[no-untyped-def]
    tl.store(out, 1.0)


def touch(out: Tensor) -> None:
    """One program that stores one number: as little as a kernel can do."""
    _touch[(1,)](out, num_warps=1)


_SHARED_THREADS, _SHARED_LOADS = 512, 16
# Triton has no shared memory to address: CUDA C, through PyTorch's NVRTC. Neighbours read neighbouring 16 bytes, which
# no two banks contend for; the place moves each round, so that no load can be kept.
_SHARED = f"""
extern "C" __global__ void read_shared(float* out, int rounds) {{
    __shared__ float4 held[1024];
    for (int i = threadIdx.x; i < 1024; i += blockDim.x) held[i] = make_float4(1.f, 1.f, 1.f, 1.f);
    __syncthreads();
    float a = 0.f, b = 0.f, c = 0.f, d = 0.f;
    int at = threadIdx.x;
    for (int turn = 0; turn < rounds; turn++) {{
        #pragma unroll
        for (int j = 0; j < {_SHARED_LOADS}; j++) {{
            float4 v = held[(at + 32 * j) & 1023];
            a += v.x; b += v.y; c += v.z; d += v.w;
        }}
        at = (at + 1) & 1023;
    }}
    out[blockIdx.x * blockDim.x + threadIdx.x] = a + b + c + d;
}}
"""


class ReadShared:
    """Programs of 512 threads that read shared memory."""

    def __init__(self, programs: int) -> None:
        self._kernel: Any = torch.cuda._compile_kernel(_SHARED, "read_shared")
        self.out = torch.empty(programs * _SHARED_THREADS, device="cuda")
        self._grid = (programs, 1, 1)

    def __call__(self, rounds: int) -> int:
        """Returns the bytes that were read; each thread's sum is 4 per load."""
        self._kernel(grid=self._grid, block=(_SHARED_THREADS, 1, 1), args=[self.out, rounds])
        return self.out.numel() * rounds * _SHARED_LOADS * 16

    @staticmethod
    def expected(rounds: int) -> float:
        return 4.0 * _SHARED_LOADS * rounds
