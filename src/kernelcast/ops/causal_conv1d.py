"""causal_conv1d: the short convolution before linear attention and state-space layers.

Prefill backends: ``triton`` gives a CTA a block of channels and eight tokens (vLLM and SGLang); ``cuda`` gives it a
channel of a sequence, 1,024 tokens at a time (Dao-AILab/causal-conv1d, in TensorRT-LLM).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, choice, size
from kernelcast.ops.linear_attention import LinearKernel, recurrent_mask
from kernelcast.ops.requests import RequestBatch
from kernelcast.ops.vector import ACCUMULATOR_BYTES, VECTOR_BYTES, VECTOR_DTYPES, vector_kernel
from kernelcast.ops.work import Array, Number, Work, Works, ceil_div

CONV_BACKENDS = ("triton", "cuda")
_THREADS = 128.0  # of a CTA
# Instructions an element beside multiplications, and cycles: round numbers read off AIConfigurator's rows.
# Triton loops over tokens: its loads are two bytes wide, with masks and addresses for each.
_TRITON_TOKENS, _TRITON_CHANNELS = 8.0, 256.0  # of a CTA (vLLM and SGLang, causal_conv1d)
_TRITON_INSTRUCTIONS = 30.0
# CUDA's threads load 16 bytes each and pass the last on, then load the next 1,024 tokens (causal_conv1d_fwd.cu).
# Lengths that are no multiple of a vector are loaded element by element.
_CUDA_INSTRUCTIONS = 4.0
_CUDA_TASK_CYCLES, _LOOSE_TASK_CYCLES, _CUDA_ROUND_CYCLES = 3000.0, 4000.0, 5000.0


class CausalConv1d(LinearKernel):
    """Short depthwise convolution along the sequence, with SiLU: each token sees itself and ``width`` - 1 before it.

    A sequence of one token (decode) reads earlier tokens from a state and shifts it (causal_conv1d_update).
    """

    op = "causal_conv1d"
    dtypes = VECTOR_DTYPES
    examples = (
        {"batch": 4, "q_len": 2048, "channels": 8192, "width": 4},
        {"batch": 64, "q_len": 1, "channels": 8192, "width": 4},
    )
    feature_sizes = ("channels", "width", "parts")
    decodes_by = None

    channels: int = size("channels (depthwise)")
    width: int = size("filter width in tokens", default=4, high=256)
    parts: int = size("kernels that the channels are split over, in turn (Kimi's prefill: 3)", default=1, high=64)
    backend: str | None = choice("backend, default: the stack's", CONV_BACKENDS, default=None)

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        sizes = _Sizes(calls)
        return (_by_row(gpu, sizes) if cls.backend_of(calls, gpu) == "cuda" else _by_token(gpu, sizes),)


class _Sizes:
    """The sequences of each call; arrays (calls,) but for those of ``requests``."""

    def __init__(self, calls: Calls) -> None:
        self.requests = RequestBatch.of(calls)
        self.stepped = recurrent_mask(calls, self.requests)  # 1 for each sequence that updates a state
        self.channels, self.width, self.parts = calls["channels"], calls["width"], calls["parts"]
        self.element_bytes = calls.dtype.act_bytes


def _by_token(gpu: Gpu, sizes: _Sizes) -> Work:
    queries = sizes.requests.queries
    pieces = np.where(sizes.stepped > 0, 1.0, ceil_div(queries, _TRITON_TOKENS))
    all_pieces = sizes.requests.total(pieces)
    # a piece reads the width - 1 tokens before it again, the first piece from the state, which a decode shifts too
    halo_bytes = (all_pieces - sizes.requests.count) * sizes.channels * (sizes.width - 1) * sizes.element_bytes
    weights = (all_pieces - 1) * sizes.channels * sizes.width * sizes.element_bytes
    handled = sizes.requests.total(queries) + sizes.requests.total(sizes.stepped) * (sizes.width - 1)
    return _kernel(
        gpu,
        sizes,
        tasks=all_pieces * ceil_div(sizes.channels, _TRITON_CHANNELS),
        again_bytes=halo_bytes + weights,
        instructions=_TRITON_INSTRUCTIONS * handled * sizes.channels,
        steps=sizes.requests.most(np.where(sizes.stepped > 0, queries, np.minimum(queries, _TRITON_TOKENS))),
    )


def _by_row(gpu: Gpu, sizes: _Sizes) -> Work:
    """Decode has one channel per thread."""
    requests, vector = sizes.requests, VECTOR_BYTES / sizes.element_bytes
    rows = np.where(sizes.stepped > 0, requests.each(ceil_div(sizes.channels, _THREADS)), requests.each(sizes.channels))
    rounds = (1 - sizes.stepped) * np.floor(requests.queries / (_THREADS * vector))
    loose = np.where(np.mod(requests.queries, vector) > 0, _LOOSE_TASK_CYCLES, _CUDA_TASK_CYCLES)
    work = _kernel(
        gpu,
        sizes,
        tasks=requests.total(rows),
        again_bytes=0.0,
        instructions=_CUDA_INSTRUCTIONS * requests.total(requests.queries) * sizes.channels,
        steps=np.maximum(1.0, requests.most(np.maximum(rounds, sizes.stepped * requests.queries))),
    )
    return replace(
        work,
        mean_steps=np.maximum(requests.total(rounds) / requests.count, 1e-3),
        step_cycles=np.where(requests.most(rounds) > 0, _CUDA_ROUND_CYCLES, 0.0),
        task_cycles=requests.most(np.where(sizes.stepped > 0, _CUDA_TASK_CYCLES, loose)),
    )


def _kernel(gpu: Gpu, sizes: _Sizes, *, tasks: Array, again_bytes: Number, instructions: Array, steps: Array) -> Work:
    elements = sizes.requests.total(sizes.requests.queries) * sizes.channels
    state_bytes = sizes.requests.count * sizes.channels * (sizes.width - 1) * sizes.element_bytes
    return vector_kernel(
        gpu,
        tasks=tasks,
        threads=_THREADS,
        moved_bytes=2 * elements * sizes.element_bytes,
        again_bytes=again_bytes,
        streamed_bytes=2 * state_bytes + sizes.channels * sizes.width * sizes.element_bytes,
        flops=(2 * sizes.width + 2) * elements,
        xu_ops=2 * elements,  # exponential and reciprocal of SiLU
        converted=2 * elements if sizes.element_bytes < ACCUMULATOR_BYTES else 0.0,
        warp_instructions=instructions / gpu.warp_threads,
        steps=steps,
        launches=sizes.parts,
    )
