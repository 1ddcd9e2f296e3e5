"""rope: rotary position embedding of queries and keys, in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, Kernel, size
from kernelcast.kernels.dtypes import dtype
from kernelcast.kernels.norm import VECTOR_DTYPES, row_threads, side_instructions
from kernelcast.kernels.work import Phases, Work, ceil_div

_POSITION_BYTES = 8.0  # int64
_MAX_THREADS = 512.0
# Of a thread for each pair, beside the vector loads that the bytes imply: the pair, its cosine and its sine
# come one element at a time, and the head and the place in it are a division (vLLM pos_encoding_kernels.cu).
_INSTRUCTIONS_PER_PAIR = 12.0


@dataclass(frozen=True, kw_only=True)
class Rope(Kernel):
    """Rotary position embedding: turns pairs of each query and key head by an angle of the position.

    One CTA a token. Reads and writes the first ``rotary_dim`` of each head; reads a row of a cos/sin table.
    """

    family: ClassVar[str] = "memory"
    op: ClassVar[str] = "rope"
    dtypes: ClassVar[tuple[str, ...]] = VECTOR_DTYPES
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"tokens": 4096, "q_heads": 32, "kv_heads": 8, "head_dim": 128},
        {"tokens": 64, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "rotary_dim": 64},
    )

    tokens: int = size("tokens")
    q_heads: int = size("query heads")
    kv_heads: int = size("key heads")
    head_dim: int = size("elements of a head")
    rotary_dim: int | None = size("elements of a head that are turned; not given: all", default=None, low=2)

    @classmethod
    def conflicts(cls, calls: Calls) -> list[tuple[NDArray[np.bool_], str]]:
        head_dim = calls["head_dim"]
        rotary_dim = calls.given("rotary_dim", head_dim)
        broken = (rotary_dim > head_dim) | (rotary_dim % 2 != 0)
        if not broken.any():
            return []
        i = int(np.argmax(broken))
        message = f"rotary_dim {rotary_dim[i]:.0f} must be even and at most head_dim {head_dim[i]:.0f}"
        return [(broken, message)]

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Phases:
        tokens, q_heads = calls["tokens"], calls["q_heads"]
        rotary_dim = calls.given("rotary_dim", calls["head_dim"])
        element_bytes = dtype(calls.choice("dtype")).act_bytes
        elements = (q_heads + calls["kv_heads"]) * rotary_dim  # of a token
        table_bytes = rotary_dim * element_bytes  # rotary_dim/2 cosines and as many sines
        head_bytes = 2 * elements * element_bytes
        l2_bytes = head_bytes + table_bytes + _POSITION_BYTES
        threads = row_threads(gpu, q_heads * rotary_dim, 2, _MAX_THREADS)
        flops = 3 * elements  # a pair: four products, two sums
        work = Work(
            tasks=tokens,
            longest_count=tokens,
            fma_flops=flops,
            l2_bytes=l2_bytes,
            other_warp_instructions=side_instructions(gpu, l2_bytes, _INSTRUCTIONS_PER_PAIR * elements / 2),
            streamed_bytes=tokens * table_bytes,
            activation_bytes=tokens * (head_bytes + _POSITION_BYTES),
            threads=threads,
            registers_per_thread=32.0,
            serial_steps=1 + ceil_div(elements / 2, threads),  # first the position: it names the table row
            useful_flops=tokens * flops,
        )
        return (work,)
