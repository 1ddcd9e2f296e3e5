"""mhc_pre and mhc_post: DeepSeek-V4's manifold-constrained hyper-connections around attention and feed-forward blocks.

A token has ``mult`` residual streams. Before a block all streams are projected to mult input weights, mult output
weights and mult x mult mixing weights, the last made doubly stochastic by Sinkhorn's iterations; the weighted sum of
the streams is the block's input. After it the result is added to the mixed streams.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, Kernel, size
from kernelcast.ops.gemm import matmul_work
from kernelcast.ops.vector import ACCUMULATOR_BYTES, row_threads, vector_kernel
from kernelcast.ops.work import Array, Works

_ITERATIONS = 20.0  # of Sinkhorn, rows and columns in turn (DeepSeek-V4's configuration)


class _HyperConnection(Kernel):
    """Parameters of both ops."""

    family = "mhc"
    dtypes = ("bf16", "fp16")
    batch_parameter = "tokens"
    model_sizes = ("hidden", "mult")
    examples = ({"tokens": 1024, "hidden": 7168},)

    tokens: int = size("tokens")
    hidden: int = size("hidden size of one stream")
    mult: int = size("residual streams", default=4, high=64)

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        rows = calls["tokens"] / gpu.sm_count
        left = np.ceil(rows) / rows  # rounds of SMs that are not full
        sizes = {f"log_{name}": np.log2(calls[name]) for name in ("tokens", "hidden", "mult")}
        return sizes | {"log_left": np.log2(left)}


def _numbers(mult: Array) -> Array:
    """Weights that the projection makes per token: input, output and mixing."""
    return mult * (mult + 2)


class HyperConnectionPre(_HyperConnection):
    """Residual streams to a block's input: projection, Sinkhorn, weighted sum. The streams are read twice."""

    op = "mhc_pre"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        tokens, hidden, mult = calls["tokens"], calls["hidden"], calls["mult"]
        dtype, weights, width = calls.dtype, _numbers(mult), mult * hidden
        # The row's norm is a factor behind the product, and comes out of the same pass.
        projection = matmul_work(gpu, dtype, tokens, weights, width)
        mixing = mult * mult
        mix = vector_kernel(
            gpu,
            tasks=tokens,
            threads=row_threads(gpu, hidden),
            moved_bytes=tokens * ((mult + 1) * hidden * dtype.act_bytes + 2 * weights * ACCUMULATOR_BYTES),
            flops=tokens * (2 * width + 4 * _ITERATIONS * mixing),
            xu_ops=tokens * (weights + 2 * _ITERATIONS * mult),  # sigmoids and exponentials, then reciprocals of sums
            converted=tokens * (width + hidden),
            steps=2 * _ITERATIONS,  # a row's sum waits for the columns', and so on
        )
        return projection, replace(mix, tile={"rows": tokens})


class HyperConnectionPost(_HyperConnection):
    """A block's result to the residual streams: each is mixed from all and gets its share of the result."""

    op = "mhc_post"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        tokens, hidden, mult = calls["tokens"], calls["hidden"], calls["mult"]
        elements = tokens * hidden
        work = vector_kernel(
            gpu,
            tasks=tokens,
            threads=row_threads(gpu, hidden),
            # the result and the streams in, the streams out, and the token's numbers
            moved_bytes=elements * (1 + 2 * mult) * calls.dtype.act_bytes
            + tokens * mult * (mult + 1) * ACCUMULATOR_BYTES,
            flops=elements * 2 * mult * (mult + 1),
            converted=elements * (1 + 2 * mult),
        )
        return (replace(work, tile={"rows": tokens}),)
