"""mamba2: the state-space layers of Nemotron-H, Falcon-H1, Granite 4 and Bamba.

Mamba-2's SSD (arXiv 2405.21060) keeps a head_dim x state matrix per head: S <- decay S + dt x B^T, y = S C + D x, with
B and C shared by the heads of a group. Decode does just that and streams the state (selective_state_update). Prefill is
chunked linear attention with C, B and x for queries, keys and values: five Triton kernels of state-spaces/mamba
(ssd_combined.py), of which vLLM, SGLang and TensorRT-LLM carry copies. No table has these kernels, so forecasts rest on
physics.
"""

from __future__ import annotations

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, Conflicts, choice, not_multiple, size
from kernelcast.ops.dtypes import matmul_pipe
from kernelcast.ops.gated_delta import matrix_kernel
from kernelcast.ops.linear_attention import LinearKernel, StateSizes, recurrent_kernel
from kernelcast.ops.vector import ACCUMULATOR_BYTES, VECTOR_DTYPES, vector_kernel
from kernelcast.ops.work import Number, Work, Works, ceil_div

_STATE_FLOPS = 5.0  # an element of the state and token: decay; add dt x B; times C
_BLOCK_M, _BLOCK_N = 128.0, 64.0  # of the products (their autotuner's usual choice)


class Mamba2(LinearKernel):
    """Mamba-2's scan over a batch: chunked prefill, recurrent decode.

    A sequence of one token is a decode. Projections, convolution and the gated norm are not included.
    """

    op = "mamba2"
    family = "mamba2"  # nothing of it was measured: what was learned of delta rules is no evidence
    dtypes = ("fp16", "bf16")
    examples = (
        {"batch": 4, "q_len": 2048, "heads": 128, "head_dim": 64, "state": 128, "groups": 8},
        {"batch": 64, "q_len": 1, "heads": 128, "head_dim": 64, "state": 128, "groups": 8},
    )
    feature_sizes = ("heads", "head_dim", "state", "groups")

    heads: int = size("heads, each with a state", high=65536)
    head_dim: int = size("elements of a head", high=1024)
    state: int = size("state dimension (d_state)", high=1024)
    groups: int = size("groups of heads that share B and C", default=1, high=65536)
    chunk: int = size("tokens per chunk of the prefill", default=256, low=16, high=1024)
    state_dtype: str = choice("dtype of the state in memory", VECTOR_DTYPES, default="fp32")

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        return not_multiple(calls.numbers, "heads", "groups") or super().conflicts(calls)

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        matmul_pipe(gpu, calls.choice("dtype"))  # refuses what the GPU cannot multiply
        names = ("groups", "heads", "state", "head_dim", "chunk")
        sizes = StateSizes(calls, *(calls[name] for name in names))
        decode = recurrent_kernel(gpu, sizes, state_flops=_STATE_FLOPS)
        if not sizes.tokens.any():
            return (decode,)
        parts = (_decays, _chunk_states, _state_passing, _scores, _scan)
        return decode, *(part(gpu, sizes) for part in parts)


def _decays(gpu: Gpu, sizes: StateSizes) -> Work:
    """dt, softplus, and the decays summed along each chunk (_chunk_cumsum_fwd)."""
    gates = sizes.tokens * sizes.values
    return vector_kernel(
        gpu,
        tasks=np.maximum(1.0, sizes.chunks * ceil_div(sizes.values, 16.0)),
        threads=128.0,
        moved_bytes=gates * sizes.element_bytes + 2 * sizes.gate_bytes,
        flops=4 * gates,
        xu_ops=2 * gates,
        runs=sizes.chunks > 0,
    )


def _chunk_states(gpu: Gpu, sizes: StateSizes) -> Work:
    """What each chunk adds to the state, x^T B with decays, in fp32 (_chunk_state_fwd)."""
    rows = sizes.chunk * (sizes.k + sizes.v) * sizes.element_bytes
    states = sizes.chunks * sizes.values * sizes.state * ACCUMULATOR_BYTES
    return matrix_kernel(
        gpu,
        sizes,
        flops=2 * sizes.chunk * sizes.state,
        vector_flops=2 * sizes.chunk * sizes.k,
        exponentials=sizes.chunk,
        moved_bytes=sizes.value_bytes + sizes.qk_bytes + 2 * sizes.gate_bytes + states,
        key_reads=1.0,
        task_bytes=rows + sizes.state * ACCUMULATOR_BYTES,
        smem_per_cta=3 * (rows / sizes.chunk) * 32.0,  # three stages of 32 tokens
    )


def _state_passing(gpu: Gpu, sizes: StateSizes) -> Work:
    """The state from chunk to chunk, element by element (_state_passing_fwd)."""
    elements = sizes.chunks * sizes.values * sizes.state
    return vector_kernel(
        gpu,
        tasks=np.maximum(1.0, sizes.sequences * sizes.values * ceil_div(sizes.state, 2048.0)),
        threads=256.0,
        moved_bytes=elements * ACCUMULATOR_BYTES + sizes.chunk_state_bytes,
        streamed_bytes=sizes.kept_state_bytes,
        flops=2 * elements,
        steps=np.maximum(1.0, sizes.longest),
        runs=sizes.chunks > 0,
    )


def _scores(gpu: Gpu, sizes: StateSizes) -> Work:
    """C B^T of each chunk and group, in fp32 (_bmm_chunk_fwd)."""
    tiles = ceil_div(sizes.chunk, _BLOCK_M) * ceil_div(sizes.chunk, _BLOCK_N)
    tile_bytes = (_BLOCK_M + _BLOCK_N) * sizes.k * sizes.element_bytes
    written = sizes.chunks * sizes.keys * sizes.chunk**2 * ACCUMULATOR_BYTES
    return matrix_kernel(
        gpu,
        sizes,
        tasks=sizes.chunks * sizes.keys * tiles,
        flops=2 * sizes.chunk**2 * sizes.k / tiles,
        moved_bytes=2 * sizes.qk_bytes + written,
        task_bytes=tile_bytes + sizes.chunk**2 * ACCUMULATOR_BYTES / tiles,
        smem_per_cta=tile_bytes,
    )


def _scan(gpu: Gpu, sizes: StateSizes) -> Work:
    """C S, and (C B^T) x with decays, causal (_chunk_scan_fwd)."""
    tiles = ceil_div(sizes.chunk, _BLOCK_M)
    seen = (sizes.chunk + np.minimum(_BLOCK_M, sizes.chunk)) / 2  # tokens of the chunk that a mean block walks
    block = sizes.chunk / tiles
    scores = sizes.chunks * sizes.keys * sizes.chunk * seen * ACCUMULATOR_BYTES
    again: Number = block * seen * ACCUMULATOR_BYTES  # each head of a group reads the scores
    return matrix_kernel(
        gpu,
        sizes,
        tasks=sizes.chunks * sizes.values * tiles,
        flops=2 * block * (sizes.state + seen * sizes.v),
        vector_flops=4 * block * seen + 2 * block * sizes.v,
        exponentials=block * seen,
        moved_bytes=sizes.qk_bytes + 2 * sizes.value_bytes + 2 * sizes.gate_bytes + sizes.chunk_state_bytes + scores,
        key_reads=1.0,
        task_bytes=again + (block * (sizes.k + sizes.v) + seen * sizes.v + sizes.state) * sizes.element_bytes,
        smem_per_cta=2 * (_BLOCK_M + _BLOCK_N) * _BLOCK_N * sizes.element_bytes,
    )
