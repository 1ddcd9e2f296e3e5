"""Element-wise ops as a table of costs; gated activations; and pointwise, any such kernel by what it moves and
computes.

PyTorch runs a chain of such ops one by one; a compiler fuses them (pointwise). Tensors of different memory order, or
with broadcasting, take a kernel that computes the offset of each element. Costs follow the CUDA math library in fp32: a
division or square root is one special function and a few FMAs, tanh is exp and a reciprocal, erf a polynomial and an
exp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, ConfigurationColumns, Examples, choice, real, size
from kernelcast.ops.dtypes import find_dtype
from kernelcast.ops.vector import VECTOR_BYTES, VECTOR_DTYPES, MemoryKernel, row_threads, vector_kernel
from kernelcast.ops.work import Array, Work, Works, ceil_div

_THREADS = 128.0  # PyTorch's kernels: 4 warps, a 16-byte vector a thread where they are vectorised (thread_constants.h)
# Instructions of a thread per element, where every offset is computed: a division by multiplying for each axis of
# each tensor (OffsetCalculator), and loads and stores of single elements. An H200 runs 33.5e12 instructions/s;
# products of two tensors make 0.40e12 elements/s over two axes, 0.33e12 over three, 0.25e12 over four: 84, 100 and 130.
_OFFSET_INSTRUCTIONS = 42.0
_AXIS_INSTRUCTIONS = 6.5  # of a tensor
_OFFSET_ELEMENTS = 4.0  # a thread
# A cast of contiguous tensors (unrolled_elementwise_kernel) checks the dtype of every element: 0.34e12 elements/s.
_CAST_INSTRUCTIONS = 98.0
ACCESS = ("vector", "strided", "cast")


@dataclass(frozen=True)
class Cost:
    """Cost of one output element, beside writing it."""

    reads: float = 1.0  # tensors read
    flops: float = 0.0
    xu_ops: float = 0.0
    mask_bytes: float = 0.0  # of a boolean tensor, read or written
    instructions: float = 0.0  # of a thread, beside loads, stores, FLOPs and special functions


def elementwise_work(calls: Calls, gpu: Gpu, cost: Cost, *, row_ctas: bool = False) -> Work:
    """The tensors as one long vector, split over CTAs of 128 threads; ``row_ctas``: one CTA per row."""
    rows, cols = calls["rows"], calls["cols"]
    source, out = calls.dtype, find_dtype(calls.choice("to") or calls.choice("dtype"))
    elements = rows * cols
    wide = max(source.act_bytes, out.act_bytes)  # the wider tensor sets the elements per thread
    tasks = rows if row_ctas else ceil_div(elements, _THREADS * VECTOR_BYTES / wide)
    threads = row_threads(gpu, cols) if row_ctas else np.full_like(tasks, _THREADS)
    # A copy moves bits; anything that computes, or changes format, converts 16-bit numbers to fp32 and back.
    computes = cost.flops > 0 or cost.xu_ops > 0 or source is not out
    conversions = cost.reads * (source.act_bytes < 4) + (out.act_bytes < 4) if computes else 0.0
    return vector_kernel(
        gpu,
        tasks=tasks,
        threads=threads,
        moved_bytes=elements * (cost.reads * source.act_bytes + out.act_bytes + cost.mask_bytes),
        flops=cost.flops * elements,
        xu_ops=cost.xu_ops * elements,
        converted=conversions * elements,
        warp_instructions=cost.instructions * elements / gpu.warp_threads,
        steps=ceil_div(elements / tasks * source.act_bytes, threads * VECTOR_BYTES),
    )


class Elementwise(MemoryKernel):
    """PyTorch's vectorised element-wise kernel."""

    examples: ClassVar[Examples] = ({"rows": 4096, "cols": 4096},)
    cost: ClassVar[Cost]
    row_ctas: ClassVar[bool] = False

    rows: int = size("rows of the output")
    cols: int = size("columns of the output")

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        return (elementwise_work(calls, gpu, cls.cost, row_ctas=cls.row_ctas),)


class GatedActivation(Elementwise):
    """vLLM's act_and_mul_kernel: one CTA per row; the input is 2·cols wide, gate and value side by side."""

    examples = ({"rows": 4096, "cols": 14336}, {"rows": 1, "cols": 14336})
    row_ctas = True


class Copy(Elementwise):
    """Copy of a contiguous tensor, or its cast to another dtype."""

    op = "copy"
    examples = ({"rows": 4096, "cols": 4096}, {"rows": 4096, "cols": 4096, "dtype": "fp32", "to": "bf16"})
    cost = Cost()

    to: str | None = choice("dtype of the copy, default: dtype", VECTOR_DTYPES, default=None, unset="dtype")

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        casts = calls.choice("to") not in (None, calls.choice("dtype"))
        return {**super().shape_features(calls, gpu), "access_cast": np.full(calls.count, float(casts))}


# op: what an element costs, and what the op is
_VECTORISED = {
    "add": (Cost(reads=2, flops=1), "Sum of two tensors."),
    "sub": (Cost(reads=2, flops=1), "Difference of two tensors."),
    "mul": (Cost(reads=2, flops=1), "Product of two tensors, element by element."),
    "div": (Cost(reads=2, flops=8, xu_ops=1), "Quotient of two tensors."),
    "neg": (Cost(flops=1), "Negation."),
    "scale": (Cost(flops=1), "Product (or sum) of a tensor and a scalar."),
    "clamp": (Cost(flops=2), "Limit to a range of two scalars."),
    "relu": (Cost(flops=1), "max(x, 0)."),
    "gelu": (Cost(flops=30, xu_ops=1), "Exact GELU, with erf."),
    "gelu_tanh": (Cost(flops=16, xu_ops=2), "GELU in tanh's approximation."),
    "silu": (Cost(flops=4, xu_ops=2), "x · sigmoid(x)."),
    "sigmoid": (Cost(flops=3, xu_ops=2), "1 / (1 + exp(−x))."),
    "tanh": (Cost(flops=8, xu_ops=2), "Hyperbolic tangent."),
    "exp": (Cost(flops=4, xu_ops=1), "Exponential."),
    "log": (Cost(flops=2, xu_ops=1), "Natural logarithm."),
    "sin": (Cost(flops=16), "Sine (the cosine costs the same)."),
    "sqrt": (Cost(flops=6, xu_ops=1), "Square root."),
    "rsqrt": (Cost(xu_ops=1), "Reciprocal square root."),
    "pow": (
        Cost(flops=20, xu_ops=2),
        "Power of a tensor to a scalar that is no small whole number: exp2(y · log2(x)).",
    ),
    "dropout": (
        Cost(flops=2 + 10 * 2 * 2 / 4, mask_bytes=1, instructions=10 * 4 / 4),
        """Dropout in training: scales what it keeps, and writes a boolean mask for the backward pass.

        Philox 4x32-10 makes four random numbers from ten rounds of two wide products and four XORs.
        """,
    ),
    "where": (Cost(reads=2, mask_bytes=1, instructions=1), "One of two tensors, as a boolean tensor says."),
    "masked_fill": (Cost(mask_bytes=1, instructions=1), "A scalar where a boolean tensor is true, else the tensor."),
    "fill": (Cost(reads=0), "Write a scalar to every element."),
    "cat": (Cost(), "Tensors joined into one of rows x cols: every byte read once and written once."),
    # Gradients. FLOPs of silu: a sigmoid, and five; of gelu: erf as in gelu, an exp, and four; of gelu_tanh: gelu_tanh,
    # and the derivatives of tanh and its argument. Dropout's mask becomes a number.
    "silu_backward": (Cost(reads=2, flops=8, xu_ops=2), "dy · σ(x) · (1 + x · (1 − σ(x))): reads dy and x."),
    "gelu_backward": (
        Cost(reads=2, flops=38, xu_ops=2),
        "Gradient of the exact GELU, dy · (Φ(x) + x · φ(x)): reads dy and x.",
    ),
    "gelu_tanh_backward": (
        Cost(reads=2, flops=28, xu_ops=2),
        "Gradient of GELU in tanh's approximation: reads dy and x.",
    ),
    "relu_backward": (
        Cost(reads=2, flops=1),
        "dy where the output is positive, else 0 (threshold_backward): reads dy and y.",
    ),
    "tanh_backward": (Cost(reads=2, flops=3), "dy · (1 − y²): reads dy and y."),
    "sigmoid_backward": (Cost(reads=2, flops=3), "dy · y · (1 − y): reads dy and y."),
    "dropout_backward": (
        Cost(flops=2, mask_bytes=1, instructions=1),
        "dy · mask · scale: reads dy and the boolean mask that the forward pass wrote.",
    ),
}
_GATED = {
    "silu_mul": (Cost(reads=2, flops=5, xu_ops=2), "Gated activation of Llama-like MLPs: silu(gate) · value."),
    "gelu_mul": (Cost(reads=2, flops=31, xu_ops=1), "Gated activation with the exact GELU: gelu(gate) · value."),
    "gelu_tanh_mul": (
        Cost(reads=2, flops=17, xu_ops=2),
        "Gated activation with tanh's approximation of GELU (Gemma): gelu_tanh(gate) · value.",
    ),
}
for _base, _ops in ((Elementwise, _VECTORISED), (GatedActivation, _GATED)):
    for _op, (_cost, _help) in _ops.items():
        _name = _op.title().replace("_", "")
        globals()[_name] = type(_name, (_base,), {"__doc__": _help, "__module__": __name__, "op": _op, "cost": _cost})


class Pointwise(MemoryKernel):
    """An element-wise kernel with ``rows`` x ``cols`` outputs that reads ``reads`` values for each."""

    op = "pointwise"
    examples = (
        {"rows": 4096, "cols": 4096, "reads": 2, "access": "strided"},
        {"rows": 4096, "cols": 4096, "reads": 3, "writes": 1, "flops": 12, "xu_ops": 2},
    )

    rows: int = size("rows of the output")
    cols: int = size("columns of the output")
    reads: float = real("values read per output element, in dtype; a broadcast tensor counts little", default=1)
    writes: float = real("values written per output element", default=1)
    tensors: float = real("tensors read, broadcast ones included; 0: as many as reads", default=0)
    access: str | None = choice(
        "strided: tensors of different memory order, or broadcast; cast: of different dtypes; default: vector",
        ACCESS,
        default=None,
        unset="vector",
    )
    axes: int | None = size("axes of a strided kernel after merging contiguous ones, default: 2", default=None, high=16)
    flops: float = real("FLOPs per element", default=1)
    xu_ops: float = real("special functions per element", default=0)

    @classmethod
    def configuration(cls, calls: Calls) -> ConfigurationColumns:
        """Vectorised where nothing else is said: what was measured of strided kernels is not of these."""
        return {**super().configuration(calls), "access": calls.choice("access") or "vector"}

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        access = calls.choice("access") or "vector"
        ways = {f"access_{name}": np.full(calls.count, float(name == access)) for name in ACCESS[1:]}
        return {**super().shape_features(calls, gpu), **ways, "axes": calls.given("axes", 2.0) * ways["access_strided"]}

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        elements, element_bytes = calls["rows"] * calls["cols"], calls.dtype.act_bytes
        access = calls.choice("access") or "vector"
        tensors = np.where(calls["tensors"] > 0, calls["tensors"], calls["reads"]) + np.maximum(calls["writes"], 0)
        offsets = _OFFSET_INSTRUCTIONS + _AXIS_INSTRUCTIONS * tensors * calls.given("axes", 2.0)
        instructions = offsets if access == "strided" else np.full(calls.count, _CAST_INSTRUCTIONS * (access == "cast"))
        a_thread = VECTOR_BYTES / element_bytes if access == "vector" else _OFFSET_ELEMENTS
        numbers = calls["reads"] + calls["writes"]
        work = vector_kernel(
            gpu,
            tasks=ceil_div(elements, _THREADS * a_thread),
            threads=_THREADS,
            moved_bytes=numbers * element_bytes * elements,
            flops=calls["flops"] * elements,
            xu_ops=calls["xu_ops"] * elements,
            converted=numbers * elements if element_bytes < 4 and access == "vector" else 0.0,
            warp_instructions=instructions * elements / gpu.warp_threads,
        )
        return (work,)
