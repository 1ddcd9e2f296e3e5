"""foreach: one op over lists of tensors, as optimizers that are not fused launch it (ForeachFunctors.cuh).

One launch takes a chunk of 65,536 elements of one tensor for each CTA, and as many tensors as its arguments hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, Configuration, choice
from kernelcast.ops.dtypes import dtype
from kernelcast.ops.optimizer import (
    CHUNK,
    LAUNCH_TENSORS,
    STEP_CYCLES,
    THREADS,
    VECTOR,
    MultiTensorKernel,
    again_bytes,
    chunks_of,
    launches_of,
    walked,
)
from kernelcast.ops.vector import ACCUMULATOR_BYTES, VECTOR_DTYPES, vector_kernel
from kernelcast.ops.work import Array, Work, Works, ceil_div


@dataclass(frozen=True)
class Function:
    """What an element costs: numbers read and written, FLOPs and special functions in fp32."""

    reads: float
    writes: float
    flops: float = 1.0
    xu_ops: float = 0.0
    makes: bool = False  # writes to new tensors
    step_cycles: float = STEP_CYCLES  # of 2,048 elements


FUNCTIONS: Mapping[str, Function] = {
    "zero": Function(0, 1, 0, step_cycles=300),  # no load to wait for
    "copy": Function(1, 1, 0),  # to other tensors that are there
    "scale": Function(1, 1),  # and a sum with a scalar, a quotient by one for each tensor
    "sqrt": Function(1, 1, 6, 1, makes=True, step_cycles=1600),
    "add": Function(2, 1, 2),
    "mul": Function(2, 1),
    "div": Function(2, 1, 8, 1),
    "lerp": Function(2, 1, 3),
    "addcmul": Function(3, 1, 3),
    "addcdiv": Function(3, 1, 10, 1),
    "norm": Function(1, 0, 2),  # of each tensor: sums of its chunks, and those of the sums
}


class Foreach(MultiTensorKernel):
    """A function of lists of tensors, element by element (torch._foreach_add_, …), or the norm of each tensor."""

    op = "foreach"
    examples = (
        {"elements": 124439808, "tensors": 148, "function": "lerp", "dtype": "fp32"},
        {"elements": 16777216, "tensors": 4, "function": "norm"},
    )

    function: str = choice("what is computed", tuple(FUNCTIONS), default="scale")
    to: str | None = choice("number format of a copy; not given: dtype", VECTOR_DTYPES, default=None)

    @classmethod
    def with_defaults(cls, words: Configuration, gpu: Gpu) -> dict[str, str | None]:
        return {**words, "to": words["to"] or words["dtype"]}

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        cost = FUNCTIONS[calls.choice("function")]
        wide, out = calls.dtype.act_bytes, dtype(calls.choice("to") or calls.choice("dtype")).act_bytes
        elements, tensors, chunks = calls["elements"], calls["tensors"], chunks_of(calls)
        lists = max(1, int(cost.reads) + cost.makes + (cost is FUNCTIONS["copy"]))
        computes = cost.flops > 0 or wide != out
        work = vector_kernel(
            gpu,
            tasks=chunks,
            threads=THREADS,
            moved_bytes=elements * (cost.reads * wide + cost.writes * out),
            flops=cost.flops * elements,
            xu_ops=cost.xu_ops * elements,
            converted=elements * (cost.reads * (wide < 4) + cost.writes * (out < 4)) if computes else 0.0,
            warp_instructions=(cost.reads + cost.writes) * elements / VECTOR / gpu.warp_threads,
            again_bytes=again_bytes(calls, elements * cost.reads * wide, wide)
            + again_bytes(calls, elements * cost.writes * out, out),
            steps=ceil_div(np.minimum(elements / tensors, CHUNK), THREADS * VECTOR),
            launches=launches_of(tensors, chunks, LAUNCH_TENSORS[lists - 1]),
        )
        work = walked(gpu, work, cost.step_cycles)
        return (work,) if calls.choice("function") != "norm" else (work, _joined(gpu, tensors, chunks))


def _joined(gpu: Gpu, tensors: Array, chunks: Array) -> Work:
    """The norms of the tensors' chunks to one of each tensor: a CTA a tensor (lpnorm_cleanup)."""
    return vector_kernel(
        gpu,
        tasks=tensors,
        threads=THREADS,
        moved_bytes=(chunks + tensors) * ACCUMULATOR_BYTES,
        flops=chunks,
    )
