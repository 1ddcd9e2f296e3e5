"""causal_conv1d: the short convolution before linear attention and state-space layers."""

from __future__ import annotations

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, size
from kernelcast.kernels.requests import Requests, SequenceKernel
from kernelcast.kernels.vector import ACCUMULATOR_BYTES, VECTOR_DTYPES, vector_kernel
from kernelcast.kernels.work import Works, ceil_div

# The convolution walks tokens one by one: its loads are two bytes wide, with masks and addresses for each.
_CONV_TOKENS, _CONV_CHANNELS, _CONV_THREADS = 8.0, 256.0, 128.0  # of a CTA (vLLM and SGLang, causal_conv1d)
_CONV_INSTRUCTIONS = 30.0  # an element, beside multiplications; a round number read off AIConfigurator's rows


class CausalConv1d(SequenceKernel):
    """Short depthwise convolution along the sequence, with SiLU: each token sees itself and ``width`` - 1 before it.

    A sequence of one token takes those before it from a state, and shifts that (Dao-AILab/causal-conv1d's update).
    """

    op = "causal_conv1d"
    dtypes = VECTOR_DTYPES
    examples = (
        {"batch": 4, "q_len": 2048, "channels": 8192, "width": 4},
        {"batch": 64, "q_len": 1, "channels": 8192, "width": 4},
    )
    hinted = ("channels", "width")

    channels: int = size("channels, each convolved alone")
    width: int = size("tokens of the filter", default=4, high=256)

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        requests, channels, width = Requests.of(calls), calls["channels"], calls["width"]
        element_bytes = calls.dtype.act_bytes
        tokens, count = requests.total(requests.queries), requests.count
        pieces = requests.total(ceil_div(requests.queries, _CONV_TOKENS))
        elements = tokens * channels
        state_bytes = count * channels * (width - 1) * element_bytes
        # a piece reads the width - 1 tokens before it again, the first one from the state
        halo_bytes = (pieces - count) * channels * (width - 1) * element_bytes
        weight_bytes = channels * width * element_bytes
        work = vector_kernel(
            gpu,
            tasks=pieces * ceil_div(channels, _CONV_CHANNELS),
            threads=_CONV_THREADS,
            moved_bytes=2 * elements * element_bytes,
            again_bytes=halo_bytes + (pieces - 1) * weight_bytes,
            streamed_bytes=2 * state_bytes + weight_bytes,
            flops=(2 * width + 2) * elements,
            xu_ops=2 * elements,  # exponential and reciprocal of SiLU
            converted=2 * elements if element_bytes < ACCUMULATOR_BYTES else 0.0,
            warp_instructions=_CONV_INSTRUCTIONS * elements / gpu.warp_threads,
            steps=np.minimum(requests.most(requests.queries), _CONV_TOKENS),
        )
        return (work,)
