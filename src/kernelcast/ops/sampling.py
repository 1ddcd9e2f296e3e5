"""top_k_top_p_sampling: one token a row, drawn from the likeliest of a row of probabilities, without sorting it."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, choice, size
from kernelcast.ops.vector import MAX_THREADS, VECTOR_BYTES, MemoryKernel, block_reduction, vector_kernel
from kernelcast.ops.work import Works, ceil_div

# FlashInfer's sampling.cuh (0.5.3), TopKTopPSamplingFromProbKernel: a CTA of 1,024 threads takes a row. A round walks
# it up to the token that it draws, half of it on average, and walks it all again to count and add up what is likelier
# than two pivots; rounds go on until the token drawn is among those kept. Each halves what is left, as in a binary
# search: three on average (https://flashinfer.ai/2025/03/10/sampling.html).
_ROUNDS = 3.0
_WALKS = 1.5  # of the row, a round
_STEP_CYCLES = 1000.0  # a vector a thread, then a sum over the CTA with two barriers, which the next step waits for
_SUMS = 2.0  # a step: mass and count
_FLOPS = 4.0  # an element and walk: compare with two pivots, add, count
_TOKEN_BYTES = 4.0  # int32


class TopKTopPSampling(MemoryKernel):
    """One token a row, from probabilities, among the k likeliest, the likeliest of mass p, or both (FlashInfer).

    Rejection sampling: how many rounds a row takes depends on its probabilities. Those measured are the softmax of
    normal numbers of spread 6, of which a few tokens have most of the mass, as language models have them.
    """

    op = "top_k_top_p_sampling"
    dtypes: ClassVar[tuple[str, ...]] = ("fp32",)
    examples = ({"rows": 64, "cols": 128256}, {"rows": 256, "cols": 151936, "keep": "top_p"})

    rows: int = size("rows (requests)")
    cols: int = size("columns (tokens of the vocabulary)")
    keep: str = choice("what is kept of a row", ("both", "top_k", "top_p"), default="both")
    dtype: str = choice("number format of the probabilities", ("fp32",), default="fp32")

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        rows, cols, element_bytes = calls["rows"], calls["cols"], calls.dtype.act_bytes
        walks = _ROUNDS * _WALKS
        steps = walks * ceil_div(cols * element_bytes, MAX_THREADS * VECTOR_BYTES)
        smem_bytes, instructions = block_reduction(gpu, MAX_THREADS + 0 * rows, _SUMS)
        work = vector_kernel(
            gpu,
            tasks=rows,
            threads=MAX_THREADS,
            moved_bytes=rows * (cols * element_bytes + _TOKEN_BYTES),
            again_bytes=(walks - 1) * rows * cols * element_bytes,
            flops=_FLOPS * walks * rows * cols,
            smem_bytes=rows * steps * smem_bytes,
            warp_instructions=rows * steps * instructions,
            steps=steps,
        )
        return (replace(work, step_cycles=_STEP_CYCLES),)
