"""Element-wise ops, a table of costs; and the gated activations silu_mul, gelu_mul, gelu_tanh_mul.

Costs follow the CUDA math library in fp32: a division or square root is one special function and a few FMAs
of refinement, tanh is exp and a reciprocal, erf a polynomial and an exp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, Kernel, choice, size
from kernelcast.kernels.dtypes import dtype
from kernelcast.kernels.norm import VECTOR_BYTES, VECTOR_DTYPES, row_threads, side_instructions
from kernelcast.kernels.work import Array, Phases, Work, ceil_div

_CTA_THREADS = 128.0  # PyTorch's vectorised kernel: 4 warps, a 16-byte vector a thread (thread_constants.h)


@dataclass(frozen=True)
class Cost:
    """What one element of the output takes."""

    reads: float = 1.0  # tensors read
    writes: float = 1.0
    flops: float = 0.0
    xu_ops: float = 0.0
    mask_bytes: float = 0.0  # of a boolean tensor, read or written
    instructions: float = 0.0  # of a thread, beside loads, stores, FLOPs and special functions


@dataclass(frozen=True, kw_only=True)
class Elementwise(Kernel):
    """PyTorch's vectorised element-wise kernel: the tensors as one long vector, cut over CTAs."""

    family: ClassVar[str] = "memory"
    dtypes: ClassVar[tuple[str, ...]] = VECTOR_DTYPES
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"rows": 4096, "cols": 4096},)
    cost: ClassVar[Cost]

    rows: int = size("rows of the output")
    cols: int = size("columns of the output")

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Phases:
        name = calls.choice("dtype")
        out_name = calls.choice("to") or name
        wide = max(dtype(name).act_bytes, dtype(out_name).act_bytes)  # the wider tensor sets the elements a thread
        elements = calls["rows"] * calls["cols"]
        tasks = ceil_div(elements, _CTA_THREADS * VECTOR_BYTES / wide)
        threads = np.full_like(tasks, _CTA_THREADS)
        return (_vector_work(gpu, cls.cost, elements, tasks, threads, name, out_name),)


class _Gated(Elementwise):
    """vLLM's act_and_mul_kernel: one CTA a row; the input is 2·cols wide, a gate and a value side by side."""

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"rows": 4096, "cols": 14336},
        {"rows": 1, "cols": 14336},
    )

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Phases:
        rows, cols, name = calls["rows"], calls["cols"], calls.choice("dtype")
        threads = row_threads(gpu, cols)
        return (_vector_work(gpu, cls.cost, rows * cols, rows, threads, name, name),)


def _vector_work(gpu: Gpu, cost: Cost, elements: Array, tasks: Array, threads: Array, name: str, out_name: str) -> Work:
    """``elements`` outputs shared evenly by ``tasks`` CTAs."""
    in_bytes, out_bytes = dtype(name).act_bytes, dtype(out_name).act_bytes
    mean = elements / tasks
    element_bytes = cost.reads * in_bytes + cost.writes * out_bytes + cost.mask_bytes
    # A copy moves bits; anything that computes, or changes format, converts 16-bit numbers to fp32 and back.
    computes = cost.flops > 0 or cost.xu_ops > 0 or name != out_name
    conversions = cost.reads * (in_bytes < 4) + cost.writes * (out_bytes < 4) if computes else 0.0
    return Work(
        tasks=tasks,
        longest_count=tasks,
        fma_flops=cost.flops * mean,
        xu_ops=cost.xu_ops * mean,
        l2_bytes=element_bytes * mean,
        other_warp_instructions=side_instructions(gpu, element_bytes * mean, (conversions + cost.instructions) * mean),
        activation_bytes=element_bytes * elements,
        threads=threads,
        registers_per_thread=32.0,
        serial_steps=ceil_div(mean * in_bytes, threads * VECTOR_BYTES),
        useful_flops=cost.flops * elements,
    )


class SiluMul(_Gated):
    """Gated activation of Llama-like MLPs: silu(gate) · value."""

    op = "silu_mul"
    cost = Cost(reads=2, flops=5, xu_ops=2)


class GeluMul(_Gated):
    """Gated activation with the exact GELU: gelu(gate) · value."""

    op = "gelu_mul"
    cost = Cost(reads=2, flops=31, xu_ops=1)


class GeluTanhMul(_Gated):
    """Gated activation with tanh's approximation of GELU (Gemma): gelu_tanh(gate) · value."""

    op = "gelu_tanh_mul"
    cost = Cost(reads=2, flops=17, xu_ops=2)


class Add(Elementwise):
    """Sum of two tensors."""

    op = "add"
    cost = Cost(reads=2, flops=1)


class Sub(Elementwise):
    """Difference of two tensors."""

    op = "sub"
    cost = Cost(reads=2, flops=1)


class Mul(Elementwise):
    """Product of two tensors, element by element."""

    op = "mul"
    cost = Cost(reads=2, flops=1)


class Div(Elementwise):
    """Quotient of two tensors."""

    op = "div"
    cost = Cost(reads=2, flops=8, xu_ops=1)


class Neg(Elementwise):
    """Negation."""

    op = "neg"
    cost = Cost(flops=1)


class Scale(Elementwise):
    """Product (or sum) of a tensor and a scalar."""

    op = "scale"
    cost = Cost(flops=1)


class Clamp(Elementwise):
    """Limit to a range of two scalars."""

    op = "clamp"
    cost = Cost(flops=2)


class Relu(Elementwise):
    """max(x, 0)."""

    op = "relu"
    cost = Cost(flops=1)


class Gelu(Elementwise):
    """Exact GELU, with erf."""

    op = "gelu"
    cost = Cost(flops=30, xu_ops=1)


class GeluTanh(Elementwise):
    """GELU in tanh's approximation."""

    op = "gelu_tanh"
    cost = Cost(flops=16, xu_ops=2)


class Silu(Elementwise):
    """x · sigmoid(x)."""

    op = "silu"
    cost = Cost(flops=4, xu_ops=2)


class Sigmoid(Elementwise):
    """1 / (1 + exp(−x))."""

    op = "sigmoid"
    cost = Cost(flops=3, xu_ops=2)


class Tanh(Elementwise):
    """Hyperbolic tangent."""

    op = "tanh"
    cost = Cost(flops=8, xu_ops=2)


class Exp(Elementwise):
    """Exponential."""

    op = "exp"
    cost = Cost(flops=4, xu_ops=1)


class Log(Elementwise):
    """Natural logarithm."""

    op = "log"
    cost = Cost(flops=2, xu_ops=1)


class Sin(Elementwise):
    """Sine (the cosine costs the same)."""

    op = "sin"
    cost = Cost(flops=16)


class Sqrt(Elementwise):
    """Square root."""

    op = "sqrt"
    cost = Cost(flops=6, xu_ops=1)


class Rsqrt(Elementwise):
    """Reciprocal square root."""

    op = "rsqrt"
    cost = Cost(xu_ops=1)


class Pow(Elementwise):
    """Power of a tensor to a scalar that is no small whole number: exp2(y · log2(x))."""

    op = "pow"
    cost = Cost(flops=20, xu_ops=2)


class Dropout(Elementwise):
    """Dropout in training: scales what it keeps, and writes a boolean mask for the backward pass.

    Philox 4x32-10 makes four random numbers from ten rounds of two wide products and four XORs.
    """

    op = "dropout"
    cost = Cost(flops=2 + 10 * 2 * 2 / 4, mask_bytes=1, instructions=10 * 4 / 4)


class Where(Elementwise):
    """One of two tensors, as a boolean tensor says."""

    op = "where"
    cost = Cost(reads=2, mask_bytes=1, instructions=1)


class MaskedFill(Elementwise):
    """A scalar where a boolean tensor is true, else the tensor."""

    op = "masked_fill"
    cost = Cost(mask_bytes=1, instructions=1)


class Fill(Elementwise):
    """Write a scalar to every element."""

    op = "fill"
    cost = Cost(reads=0)


@dataclass(frozen=True, kw_only=True)
class Copy(Elementwise):
    """Copy of a contiguous tensor, or its cast to another number format."""

    op: ClassVar[str] = "copy"
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"rows": 4096, "cols": 4096},
        {"rows": 4096, "cols": 4096, "dtype": "fp32", "to": "bf16"},
    )
    cost: ClassVar[Cost] = Cost()

    @classmethod
    def hints(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        casts = calls.choice("to") not in (None, calls.choice("dtype"))
        return {**super().hints(calls, gpu), "access_cast": np.full(calls.count, float(casts))}

    to: str | None = choice("number format of the copy; not given: that of the source", VECTOR_DTYPES, default=None)
