"""foreach: one op over lists of tensors, as optimizers that are not fused launch it (ForeachFunctors.cuh).

One launch takes a chunk of 65,536 elements of one tensor for each CTA, and as many tensors as its arguments hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, Conflicts, Words, choice, conflict, size
from kernelcast.kernels.dtypes import dtype
from kernelcast.kernels.optimizer import CHUNK, LAUNCH_CHUNKS, LAUNCH_TENSORS, THREADS, VECTOR
from kernelcast.kernels.vector import ACCUMULATOR_BYTES, VECTOR_DTYPES, MemoryKernel, vector_kernel
from kernelcast.kernels.work import Array, Work, Works, ceil_div


@dataclass(frozen=True)
class Function:
    """What an element costs: numbers read and written, FLOPs and special functions in fp32."""

    reads: float
    writes: float
    flops: float = 1.0
    xu_ops: float = 0.0
    makes: bool = False  # writes to new tensors


FUNCTIONS: Mapping[str, Function] = {
    "zero": Function(0, 1, 0),
    "copy": Function(1, 1, 0),  # to other tensors that are there
    "scale": Function(1, 1),  # and a sum with a scalar, a quotient by one for each tensor
    "sqrt": Function(1, 1, 6, 1, makes=True),
    "add": Function(2, 1, 2),
    "mul": Function(2, 1),
    "div": Function(2, 1, 8, 1),
    "lerp": Function(2, 1, 3),
    "addcmul": Function(3, 1, 3),
    "addcdiv": Function(3, 1, 10, 1),
    "norm": Function(1, 0, 2),  # of each tensor: sums of its chunks, and those of the sums
}


class Foreach(MemoryKernel):
    """A function of lists of tensors, element by element (torch._foreach_add_, …), or the norm of each tensor."""

    op = "foreach"
    family = "multi_tensor"
    examples = (
        {"elements": 124439808, "tensors": 148, "function": "lerp", "dtype": "fp32"},
        {"elements": 16777216, "tensors": 4, "function": "norm"},
    )

    function: str = choice("what is computed", tuple(FUNCTIONS), default="scale")
    elements: int = size("of all tensors of one list", high=1 << 42)
    tensors: int = size("tensors of a list", default=1)
    chunks: int | None = size("pieces of 65,536 elements or less; default: of equal tensors", default=None)
    to: str | None = choice("number format of a copy; not given: dtype", VECTOR_DTYPES, default=None)

    @classmethod
    def usual(cls, words: Words, gpu: Gpu) -> dict[str, str | None]:
        return {**words, "to": words["to"] or words["dtype"]}

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        text = "{elements:g} elements cannot be in {tensors:g} tensors"
        return conflict(calls["tensors"] > calls["elements"], text, calls.numbers)

    @classmethod
    def hints(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        each = calls["elements"] / calls["tensors"]
        return {
            "log_elements": np.log2(calls["elements"]),
            "log_tensors": np.log2(calls["tensors"]),
            "log_each": np.log2(each),
            "last_chunk": np.log2(calls["elements"] / (_chunks(calls) * CHUNK)),
        }

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        cost = FUNCTIONS[calls.choice("function")]
        wide, out = calls.dtype.act_bytes, dtype(calls.choice("to") or calls.choice("dtype")).act_bytes
        elements, tensors, chunks = calls["elements"], calls["tensors"], _chunks(calls)
        lists = int(min(cost.reads + cost.makes, len(LAUNCH_TENSORS))) or 1
        computes = cost.flops > 0 or wide != out
        moved = elements * (cost.reads * wide + cost.writes * out)
        work = vector_kernel(
            gpu,
            tasks=chunks,
            threads=THREADS,
            moved_bytes=moved,
            flops=cost.flops * elements,
            xu_ops=cost.xu_ops * elements,
            converted=elements * (cost.reads * (wide < 4) + cost.writes * (out < 4)) if computes else 0.0,
            warp_instructions=(cost.reads + cost.writes) * elements / VECTOR / gpu.warp_threads,
            registers=32.0,
            steps=ceil_div(np.minimum(elements / tensors, CHUNK), THREADS * VECTOR),
            launches=np.maximum(ceil_div(tensors, LAUNCH_TENSORS[lists - 1]), ceil_div(chunks, LAUNCH_CHUNKS)),
        )
        return (work,) if calls.choice("function") != "norm" else (work, _joined(gpu, tensors, chunks))


def _chunks(calls: Calls) -> Array:
    return calls.given("chunks", calls["tensors"] * ceil_div(calls["elements"], calls["tensors"] * CHUNK))


def _joined(gpu: Gpu, tensors: Array, chunks: Array) -> Work:
    """The norms of the tensors' chunks to one of each tensor: a CTA a tensor (lpnorm_cleanup)."""
    return vector_kernel(
        gpu,
        tasks=tensors,
        threads=THREADS,
        moved_bytes=(chunks + tensors) * ACCUMULATOR_BYTES,
        flops=chunks,
    )
