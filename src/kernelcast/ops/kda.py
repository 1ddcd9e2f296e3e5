"""kda: Kimi delta attention, the linear attention of Kimi Linear and Kimi K3.

Kimi Linear (arXiv 2510.26692) is the gated delta rule with a decay per channel of a key instead of per head: S <-
Diag(decay) S, then as gated_delta. Gates are as wide as keys, and are read wherever keys are.

Prefill backends: ``triton`` is flash-linear-attention's chain (fla/ops/kda; SGLang, and vLLM before Hopper);
``flashkda`` is Moonshot's CUTLASS kernels (github MoonshotAI/FlashKDA; vLLM from Hopper on). Names in brackets are the
libraries' files.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, ConfigurationColumns, choice, flag, labels, size
from kernelcast.ops.dtypes import matmul_pipe
from kernelcast.ops.gated_delta import chunk_walk, inverse, matrix_kernel
from kernelcast.ops.linear_attention import LinearKernel, StateSizes, recurrent_kernel
from kernelcast.ops.vector import ACCUMULATOR_BYTES, VECTOR_DTYPES, vector_kernel
from kernelcast.ops.work import Array, Work, Works, ceil_div

KDA_BACKENDS = ("triton", "flashkda")
_CHUNK = 64.0  # tokens of Triton's


class Kda(LinearKernel):
    """Kimi delta attention over a batch: chunked prefill, recurrent decode; norms of queries and keys included.

    A sequence of one token is a decode. ``fused``: it includes the convolution and the gated norm (vLLM's
    fused_kda_decode, SGLang's kda_fused_decode); else neither is included, as in prefill.
    """

    op = "kda"
    dtypes = ("fp16", "bf16")
    examples = (
        {"batch": 4, "q_len": 2048, "heads": 32, "key_dim": 128},
        {"batch": 64, "q_len": 1, "heads": 32, "key_dim": 128, "fused": True},
    )
    feature_sizes = ("heads", "key_dim")

    heads: int = size("heads, each with a state", high=65536)
    key_dim: int = size("key head dimension", high=1024)
    value_dim: int | None = size("value head dimension, default: key_dim", default=None, high=1024)
    width: int = size("filter width of the convolution in a fused decode", default=4, high=256)
    fused: bool = flag("decode fuses the convolution and the gated norm", default=False)
    state_dtype: str = choice("dtype of the state in memory", VECTOR_DTYPES, default="fp32")
    backend: str | None = choice("prefill backend, default: the stack's", KDA_BACKENDS, default=None)

    @classmethod
    def configuration(cls, calls: Calls) -> ConfigurationColumns:
        configuration = super().configuration(calls)
        inside = (calls["fused"] > 0) & (configuration["kernel"] == "recurrent")
        return {**configuration, "fused": labels(inside)}

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        matmul_pipe(gpu, calls.choice("dtype"))  # refuses what the GPU cannot multiply
        flash = cls.backend_of(calls, gpu) == "flashkda"
        heads, k = calls["heads"], calls["key_dim"]
        chunk = np.full(calls.count, FLASH_CHUNK if flash else _CHUNK)
        sizes = StateSizes(calls, heads, heads, k, calls.given("value_dim", k), chunk)
        around = calls["fused"] * _around_bytes(sizes, calls["width"])
        elements = sizes.steps * heads * (2 * k + sizes.v)
        decode = recurrent_kernel(gpu, sizes, k, around, calls["fused"] * 2 * calls["width"] * elements)
        if not sizes.tokens.any():
            return (decode,)
        if flash:
            return decode, _flash_prepare(gpu, sizes), _flash_recurrence(gpu, sizes)
        return decode, *triton_chain(gpu, sizes)


def _around_bytes(sizes: StateSizes, width: Array) -> Array:
    """A decode's convolution, in place: its state in and out, and its weights in fp32."""
    channels = sizes.values * (2 * sizes.k + sizes.v)
    weights = np.where(sizes.recurrent > 0, channels * width * 4.0, 0.0)
    return 2 * sizes.recurrent * channels * (width - 1) * sizes.element_bytes + weights


FLASH_CHUNK = 16.0  # tokens (fwd_launch.cu)
# Cycles are round numbers read off AIConfigurator's linear_attention rows (H200, B200), for all GPUs alike.
_FLASH_CYCLES = 2000.0  # a chunk of the recurrence: four products that wait for each other
_FLASH_SET_UP_CYCLES = 16000.0  # of its CTA: the state in and out, from fp32 and back, through shared memory
_FLASH_REGISTERS = 255.0  # per thread: times of many heads suggest one CTA per SM
_FLASH_STAGES = 3.0  # of inputs in shared memory
_SUB_BLOCK = 16.0  # tokens whose decays are taken relative to their first (chunk_intra.py)


def _decay_bytes(sizes: StateSizes) -> Array:
    """Summed decays of all channels, in fp32."""
    return sizes.tokens * sizes.values * sizes.k * ACCUMULATOR_BYTES


def triton_chain(gpu: Gpu, sizes: StateSizes) -> Works:
    """Norms and gates, scores, inverse, WY form, state update, outputs: one kernel after another."""
    walk = chunk_walk(gpu, sizes)  # its keys come decayed, as wide as w
    walk = replace(walk, activation_bytes=walk.activation_bytes + sizes.wide_bytes - sizes.qk_bytes)
    return (
        _prepare(gpu, sizes),
        _scores(gpu, sizes),
        inverse(gpu, sizes),
        _wy_form(gpu, sizes),
        walk,
        _outputs(gpu, sizes),
    )


def _prepare(gpu: Gpu, sizes: StateSizes) -> Work:
    """Norms of queries and keys, and the decays of every channel summed along each chunk: one kernel each (l2norm.py,
    gate.py)."""
    rows = sizes.tokens * sizes.values
    elements = rows * sizes.k
    return vector_kernel(
        gpu,
        tasks=np.maximum(1.0, ceil_div(3 * rows, 16.0)),
        threads=128.0,
        moved_bytes=5 * sizes.wide_bytes + _decay_bytes(sizes),  # q, k in and out; gates in; sums out
        flops=(2 * 4 + 4) * elements,
        xu_ops=2 * rows + 2 * elements,  # a root a row; a softplus or sigmoid, and an exponential a gate
        converted=5 * elements,
        launches=3.0,
        runs=sizes.chunks > 0,
    )


def _scores(gpu: Gpu, sizes: StateSizes) -> Work:
    """k k^T and q k^T with decays applied to both factors block by block (chunk_intra.py)."""
    square, row = sizes.chunk**2, sizes.chunk * sizes.k
    blocks = sizes.chunk / _SUB_BLOCK
    decayed = row * (blocks + 1) / 2 * 2  # q and k for each block of keys at or before theirs
    return matrix_kernel(
        gpu,
        sizes,
        flops=2 * 2 * square * sizes.k,
        vector_flops=3 * decayed + 3 * square,
        exponentials=decayed,
        moved_bytes=2 * sizes.wide_bytes + _decay_bytes(sizes) + sizes.gate_bytes + 1.5 * sizes.square_bytes,
        task_bytes=row * (2 * sizes.element_bytes + ACCUMULATOR_BYTES) + 1.5 * square * ACCUMULATOR_BYTES,
        smem_per_cta=row * (2 * sizes.element_bytes + ACCUMULATOR_BYTES),
    )


def _wy_form(gpu: Gpu, sizes: StateSizes) -> Work:
    """w and u: the inverse times decayed keys and times values; and keys as the state update reads them (wy_fast)."""
    square, width = sizes.chunk**2, sizes.k + sizes.v
    row = sizes.chunk * sizes.element_bytes
    inverse_bytes = sizes.square_bytes * sizes.element_bytes / ACCUMULATOR_BYTES
    return matrix_kernel(
        gpu,
        sizes,
        flops=2 * square * width,
        vector_flops=sizes.chunk * (4 * sizes.k + sizes.v),
        exponentials=2 * sizes.chunk * sizes.k,
        moved_bytes=3 * sizes.wide_bytes + 2 * sizes.value_bytes + _decay_bytes(sizes) + inverse_bytes
        + sizes.gate_bytes,
        task_bytes=row * (3 * sizes.k + 2 * sizes.v) + sizes.chunk * sizes.k * ACCUMULATOR_BYTES + square * 2,
        smem_per_cta=row * width + square * sizes.element_bytes,
    )  # fmt: skip


def _outputs(gpu: Gpu, sizes: StateSizes) -> Work:
    """q S and (q k^T) v of each chunk and head; q k^T was saved (chunk_gla_fwd_o_gk)."""
    square, row = sizes.chunk**2, sizes.chunk * sizes.element_bytes
    scores_bytes = sizes.square_bytes * sizes.element_bytes / ACCUMULATOR_BYTES
    return matrix_kernel(
        gpu,
        sizes,
        flops=2 * (sizes.chunk * sizes.state + square * sizes.v),
        vector_flops=2 * sizes.chunk * sizes.k,
        exponentials=sizes.chunk * sizes.k,
        moved_bytes=sizes.wide_bytes + _decay_bytes(sizes) + 2 * sizes.value_bytes + sizes.chunk_state_bytes
        + scores_bytes,
        task_bytes=row * (sizes.k + 2 * sizes.v) + sizes.chunk * sizes.k * ACCUMULATOR_BYTES
        + (sizes.state + square) * sizes.element_bytes,
        smem_per_cta=row * sizes.k + sizes.state * sizes.element_bytes,
    )  # fmt: skip


def _flash_prepare(gpu: Gpu, sizes: StateSizes) -> Work:
    """All that needs no state, one CTA per chunk and head: norms, decays, scores, the inverse (fwd_kernel1.cuh).

    Two launches before it convert lengths to int64 and transpose beta.
    """
    square, row = sizes.chunk**2, sizes.chunk * sizes.k
    squares = 2 * sizes.chunks * sizes.values * square * sizes.element_bytes  # the inverse, and q k^T
    totals = sizes.chunks * sizes.values * sizes.k * ACCUMULATOR_BYTES  # the decay of the whole chunk
    work = matrix_kernel(
        gpu,
        sizes,
        flops=2 * 2 * square * sizes.k,
        vector_flops=16 * row + sizes.chunk**3,
        exponentials=4 * row,
        moved_bytes=6 * sizes.wide_bytes + squares + totals,  # q, k and gates in; q and k decayed, k restored out
        task_bytes=6 * row * sizes.element_bytes + 2 * square * sizes.element_bytes,
        smem_per_cta=8 * row * sizes.element_bytes,
        warps=8.0,
    )
    return replace(work, registers_per_thread=64.0, launches=3 * work.launches)


def _flash_recurrence(gpu: Gpu, sizes: StateSizes) -> Work:
    """The state from chunk to chunk in shared memory, one CTA per sequence and head (fwd_kernel2.cuh).

    Both products with the state read it, and its update reads and writes it.
    """
    square, steps = sizes.chunk**2, sizes.chunks / np.maximum(sizes.sequences, 1.0)
    inputs = sizes.chunk * (3 * sizes.k + 2 * sizes.v) * sizes.element_bytes + 2 * square * sizes.element_bytes
    state_bytes = sizes.state * sizes.element_bytes
    moved = (
        3 * sizes.wide_bytes + 2 * sizes.value_bytes + 2 * sizes.chunks * sizes.values * square * sizes.element_bytes
    )
    work = matrix_kernel(
        gpu,
        sizes,
        tasks=sizes.sequences * sizes.values,
        flops=steps * 2 * (3 * sizes.chunk * sizes.state + 2 * square * sizes.v),
        vector_flops=steps * (2 * sizes.state + 3 * sizes.chunk * sizes.v),
        moved_bytes=moved,
        task_bytes=steps * inputs,
        streamed_bytes=sizes.kept_state_bytes,
        smem_per_cta=state_bytes + _FLASH_STAGES * inputs,
        warps=6.0,
        serial_steps=np.maximum(1.0, sizes.longest),
        mean_steps=np.maximum(1.0, steps),
        step_cycles=_FLASH_CYCLES,
        task_cycles=_FLASH_SET_UP_CYCLES,
        longest=np.maximum(1.0, sizes.longest / np.maximum(steps, 1.0)),
    )
    kept = work.smem_bytes + steps * 4 * state_bytes
    return replace(work, smem_bytes=kept, registers_per_thread=_FLASH_REGISTERS)
