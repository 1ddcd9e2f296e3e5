"""rope: rotary position embedding of queries and keys, in place."""

from __future__ import annotations

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, Conflicts, conflict, size
from kernelcast.ops.vector import INDEX_BYTES, MemoryKernel, row_threads, vector_kernel
from kernelcast.ops.work import Works, ceil_div

_MAX_THREADS = 512.0
# Of a thread for each pair, beside the vector loads that the bytes imply: the pair, its cosine and its sine
# come one element at a time, and the head and the place in it are a division (vLLM pos_encoding_kernels.cu).
_INSTRUCTIONS_PER_PAIR = 12.0


class Rope(MemoryKernel):
    """Rotary position embedding: turns pairs of each query and key head by an angle of the position.

    One CTA a token. Reads and writes the first ``rotary_dim`` of each head; reads a row of a cos/sin table.
    """

    op = "rope"
    examples = (
        {"tokens": 4096, "q_heads": 32, "kv_heads": 8, "head_dim": 128},
        {"tokens": 64, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "rotary_dim": 64},
    )

    tokens: int = size("tokens")
    q_heads: int = size("query heads")
    kv_heads: int = size("key heads")
    head_dim: int = size("elements of a head")
    rotary_dim: int | None = size("elements of a head that are turned; not given: all", default=None, low=2)

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        head_dim = calls["head_dim"]
        rotary_dim = calls.given("rotary_dim", head_dim)
        return conflict(
            (rotary_dim > head_dim) | (rotary_dim % 2 != 0),
            "rotary_dim {rotary_dim:.0f} must be even and at most head_dim {head_dim:.0f}",
            {"rotary_dim": rotary_dim, "head_dim": head_dim},
        )

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        tokens, q_heads, element_bytes = calls["tokens"], calls["q_heads"], calls.dtype.act_bytes
        rotary_dim = calls.given("rotary_dim", calls["head_dim"])
        elements = (q_heads + calls["kv_heads"]) * rotary_dim  # of a token
        threads = row_threads(gpu, q_heads * rotary_dim, 2, _MAX_THREADS)
        work = vector_kernel(
            gpu,
            tasks=tokens,
            threads=threads,
            moved_bytes=tokens * (2 * elements * element_bytes + INDEX_BYTES),
            streamed_bytes=tokens * rotary_dim * element_bytes,  # rotary_dim/2 cosines and as many sines
            flops=tokens * 3 * elements,  # a pair: four products, two sums
            warp_instructions=tokens * _INSTRUCTIONS_PER_PAIR * elements / 2 / gpu.warp_threads,
            steps=1 + ceil_div(elements / 2, threads),  # first the position: it names the table row
        )
        return (work,)
