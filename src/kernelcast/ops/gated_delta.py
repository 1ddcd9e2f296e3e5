"""gated_delta: the linear attention of Qwen3-Next.

Gated DeltaNet (arXiv 2412.06464) keeps a key_dim x value_dim state S per value head; for each token S <- decay S + beta
k (v - decay S^T k)^T, o = S^T q. Decode does just that and streams the state. Prefill splits the sequence into chunks
of 64 tokens (flash-linear-attention): products within a chunk, a triangular inverse (the WY form), and a state that
passes from chunk to chunk.

Prefill backends: ``triton`` is flash-linear-attention's chain of six kernels, of which only the state update is serial
(SGLang, TensorRT-LLM and vLLM carry copies: fla/ops/gated_delta_rule). ``flashinfer`` is one kernel, one CTA per
sequence and value head (vLLM on Hopper and data-centre Blackwell, vllm pull 32846 and 40717). Names in brackets are the
libraries' files.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.hardware.gpu import TCGEN05, WGMMA
from kernelcast.ops.base import Calls, Conflicts, choice, flag, not_multiple, size
from kernelcast.ops.dtypes import matmul_pipe
from kernelcast.ops.gemm import TASK_CYCLES
from kernelcast.ops.linear_attention import LinearKernel, StateSizes, recurrent_kernel
from kernelcast.ops.vector import ACCUMULATOR_BYTES, VECTOR_DTYPES, side_instructions, vector_kernel
from kernelcast.ops.work import Array, Number, Work, Works, axis, ceil_div

GATED_DELTA_BACKENDS = ("triton", "flashinfer")


class GatedDelta(LinearKernel):
    """Gated delta rule (Gated DeltaNet, Qwen3-Next) over a batch: chunked prefill, recurrent decode.

    A sequence of one token is a decode. Projections, convolution and the gated norm are not included.
    """

    op = "gated_delta"
    dtypes = ("fp16", "bf16")
    examples = (
        {"batch": 4, "q_len": 2048, "key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128},
        {"batch": 64, "q_len": 1, "key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128},
    )
    feature_sizes = ("key_heads", "value_heads", "key_dim", "value_dim")

    key_heads: int = size("query and key heads", high=65536)
    value_heads: int = size("value heads, each with a state", high=65536)
    key_dim: int = size("key head dimension", high=1024)
    value_dim: int = size("value head dimension", high=1024)
    chunk: int = size("tokens per chunk of the prefill", default=64, low=16, high=256)
    qk_norm: bool = flag("prefill normalises queries and keys too, as decode always does", default=False)
    stateless: bool = flag("prefill starts from no state and keeps none, as in training", default=False)
    state_dtype: str = choice("dtype of the state in memory", VECTOR_DTYPES, default="fp32")
    backend: str | None = choice("prefill backend, default: the stack's", GATED_DELTA_BACKENDS, default=None)

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        return not_multiple(calls.numbers, "value_heads", "key_heads") or super().conflicts(calls)

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        matmul_pipe(gpu, calls.choice("dtype"))  # refuses what the GPU cannot multiply
        names = ("key_heads", "value_heads", "key_dim", "value_dim", "chunk", "stateless")
        sizes = StateSizes(calls, *(calls[name] for name in names))
        decode = recurrent_kernel(gpu, sizes)
        if not sizes.tokens.any():
            return (decode,)
        if cls.backend_of(calls, gpu) == "flashinfer":
            return decode, _prepare(gpu, sizes, 1 + calls["qk_norm"]), _fused(gpu, sizes)
        return decode, *triton_chain(gpu, sizes, calls["qk_norm"])


_STATE_BLOCKS = (32.0, 64.0)  # columns of the state that a CTA of the chunk walk keeps (autotuned in chunk_delta_h.py)
# Cycles below are round numbers read off AIConfigurator's linear_attention rows (H200, B200, L40S), for all GPUs alike.
# The inverse solves 16x16 blocks row by row, each row a load and a sum that wait for the row before (solve_tril.py).
_SOLVED_ROWS = 14.0 / 16.0  # of a chunk's rows, that wait
_ROW_CYCLES = 400.0
# Load w, multiply with the state, subtract, load k, multiply, add: two products that wait for each other.
_CHUNK_CYCLES = 2500.0
# FlashInfer's kernel does all products of a chunk serially, the inverse included. Its set-up loads and arranges the
# state. Two kernels, two generations: CUTLASS for Hopper, CuTe DSL for Blackwell (flashinfer pull 3001).
_FUSED_CYCLES = {WGMMA: (6000.0, 12000.0), TCGEN05: (5000.0, 28000.0)}  # a chunk, a task
_FUSED_THREADS = 512.0


def triton_chain(gpu: Gpu, sizes: StateSizes, qk_norm: Array) -> Works:
    """One kernel after another, each over all chunks except the serial state update."""
    prepare = _prepare(gpu, sizes, 1 + 2 * qk_norm)  # queries and keys by a kernel each
    return prepare, *(kernel(gpu, sizes) for kernel in (_scores, inverse, _wy_form, chunk_walk, _outputs))


def _prepare(gpu: Gpu, sizes: StateSizes, launches: Array) -> Work:
    """Decays (summed in Triton, exponentials in FlashInfer), and norms of queries and keys where asked for."""
    heads = np.where(launches > 1, 2 * sizes.tokens * sizes.keys, 0.0)
    gates, elements = sizes.tokens * sizes.values, heads * sizes.k
    return vector_kernel(
        gpu,
        tasks=np.maximum(1.0, ceil_div(heads + gates / 16, 16.0)),  # rows of a CTA (l2norm.py)
        threads=128.0,
        moved_bytes=2 * elements * sizes.element_bytes + 2 * sizes.gate_bytes,
        flops=4 * elements + gates,
        xu_ops=heads + gates,
        converted=2 * elements,
        launches=launches,
        runs=sizes.chunks > 0,
    )


def matrix_kernel(
    gpu: Gpu,
    sizes: StateSizes,
    *,
    flops: Number,
    moved_bytes: Array,
    task_bytes: Number,
    smem_per_cta: Number,
    tasks: Number | None = None,
    warps: float = 4.0,
    vector_flops: Number = 0.0,
    exponentials: Number = 0.0,
    streamed_bytes: Number = 0.0,
    key_reads: float = 0.0,
    **more: Any,
) -> Work:
    """One kernel; a task is a chunk and value head unless given. Bytes moved and streamed are the whole kernel's, all
    other demand is per task.

    ``key_reads``: how often it reads queries or keys. The grid runs all chunks of one value head before the next, so
    that each value head of a key head reads them again, from DRAM where they exceed L2.
    """
    tasks = sizes.chunks * sizes.values if tasks is None else np.asarray(tasks)
    again = key_reads * sizes.qk_bytes * (sizes.values / sizes.keys - 1)
    lost = np.clip(1 - gpu.l2_bytes / np.maximum(moved_bytes, 1.0), 0.0, 1.0)
    useful = sizes.tokens / np.maximum(sizes.chunks * sizes.chunk, 1.0)  # the rest pads the last chunk
    on_tensor = matmul_pipe(gpu, sizes.math) == "tensor"
    return Work(
        tasks=tasks,
        tensor_flops=flops if on_tensor else 0.0,
        tensor_dtype=sizes.math,
        fma_flops=vector_flops + (0.0 if on_tensor else flops),
        xu_ops=exponentials,
        smem_bytes=2 * np.asarray(task_bytes),  # in, and out to the matrix unit
        l2_bytes=task_bytes,
        other_warp_instructions=side_instructions(gpu, task_bytes),
        streamed_bytes=streamed_bytes,
        activation_bytes=moved_bytes,
        refetched_bytes=again * lost,
        threads=warps * gpu.warp_threads,
        registers_per_thread=168.0,
        smem_bytes_per_cta=np.minimum(smem_per_cta, gpu.smem_bytes_per_cta),
        launches=np.where(sizes.chunks > 0, 1.0, 0.0),
        useful_flops=tasks * flops * useful,
        **{"task_cycles": TASK_CYCLES, **more},
    )


def _scores(gpu: Gpu, sizes: StateSizes) -> Work:
    """beta k k^T with decays, one CTA per chunk and value head (chunk_scaled_dot_kkt.py)."""
    square, row = sizes.chunk**2, sizes.chunk * sizes.k * sizes.element_bytes
    return matrix_kernel(
        gpu,
        sizes,
        flops=2 * square * sizes.k,
        vector_flops=4 * square,  # a difference of decays, its exponential, beta, the mask
        exponentials=square,
        moved_bytes=sizes.qk_bytes + 2 * sizes.gate_bytes + sizes.square_bytes,
        key_reads=1.0,
        task_bytes=row + square * ACCUMULATOR_BYTES,
        smem_per_cta=2 * row,
    )


def inverse(gpu: Gpu, sizes: StateSizes) -> Work:
    """Inverse of a unit lower triangle per chunk and value head, in fp32 on the vector units (solve_tril.py)."""
    square = sizes.chunk**2
    rows = np.minimum(sizes.chunk, sizes.tokens / np.maximum(sizes.sequences, 1.0))
    return matrix_kernel(
        gpu,
        sizes,
        flops=0.0,
        vector_flops=sizes.chunk**3 / 2,  # C^3 / 3 by substitution, half as much again by blocks of 16
        moved_bytes=sizes.square_bytes * (1 + sizes.element_bytes / ACCUMULATOR_BYTES),
        task_bytes=square * (ACCUMULATOR_BYTES + sizes.element_bytes),
        smem_per_cta=square * ACCUMULATOR_BYTES / 2,
        serial_steps=np.maximum(1.0, rows * _SOLVED_ROWS),
        step_cycles=_ROW_CYCLES,
    )


def _wy_form(gpu: Gpu, sizes: StateSizes) -> Work:
    """w and u: the inverse times keys and times values (wy_fast.py)."""
    square, width = sizes.chunk**2, sizes.k + sizes.v
    row = sizes.chunk * width * sizes.element_bytes
    inverse_bytes = sizes.square_bytes * sizes.element_bytes / ACCUMULATOR_BYTES
    moved = sizes.qk_bytes + sizes.wide_bytes + 2 * sizes.value_bytes + inverse_bytes + 2 * sizes.gate_bytes
    return matrix_kernel(
        gpu,
        sizes,
        flops=2 * square * width,
        vector_flops=2 * sizes.chunk * width,
        exponentials=sizes.chunk,
        moved_bytes=moved,
        key_reads=1.0,
        task_bytes=2 * row + square * sizes.element_bytes,
        smem_per_cta=row + square * sizes.element_bytes,
    )


def chunk_walk(gpu: Gpu, sizes: StateSizes) -> Work:
    """The state from chunk to chunk, serial along the sequence, one CTA per block of its columns (chunk_delta_h.py).

    It writes the state before each chunk, and the values that the chunk adds to it.
    """
    block = np.minimum(axis(_STATE_BLOCKS), sizes.v)
    tasks = sizes.sequences * sizes.values * ceil_div(sizes.v, block)
    steps = sizes.chunks / np.maximum(sizes.sequences, 1.0)  # of the mean task
    keys, columns = sizes.chunk * sizes.k * sizes.element_bytes, sizes.chunk * block * sizes.element_bytes
    return matrix_kernel(
        gpu,
        sizes,
        tasks=tasks,
        flops=steps * 4 * sizes.chunk * sizes.k * block,
        vector_flops=steps * block * (3 * sizes.chunk + 2 * sizes.k),  # subtract, decay; decay and round the state
        exponentials=steps * sizes.chunk,
        moved_bytes=sizes.qk_bytes + sizes.wide_bytes + 2 * sizes.value_bytes + sizes.chunk_state_bytes,
        task_bytes=steps * (2 * keys + 2 * columns + sizes.k * block * sizes.element_bytes),
        streamed_bytes=sizes.kept_state_bytes,
        smem_per_cta=2 * (2 * keys + columns),  # two stages
        serial_steps=np.maximum(1.0, sizes.longest),
        step_cycles=_CHUNK_CYCLES,
        longest=np.maximum(1.0, sizes.longest / np.maximum(steps, 1.0)),
        tile={"block_v": block},
    )


def _outputs(gpu: Gpu, sizes: StateSizes) -> Work:
    """q S and (q k^T) v of each chunk and value head (chunk_o.py)."""
    square, row = sizes.chunk**2, sizes.chunk * sizes.element_bytes
    return matrix_kernel(
        gpu,
        sizes,
        flops=2 * (sizes.chunk * sizes.state + square * (sizes.k + sizes.v)),
        vector_flops=3 * square + 2 * sizes.chunk * sizes.v,
        exponentials=square + sizes.chunk,
        moved_bytes=2 * sizes.qk_bytes + 2 * sizes.value_bytes + sizes.chunk_state_bytes + sizes.gate_bytes,
        key_reads=2.0,
        task_bytes=row * (2 * sizes.k + 2 * sizes.v) + sizes.state * sizes.element_bytes,
        smem_per_cta=row * 2 * sizes.k + sizes.state * sizes.element_bytes,
    )


def _fused(gpu: Gpu, sizes: StateSizes) -> Work:
    """All in one kernel, one CTA per sequence and value head that fills an SM (flashinfer gdn_prefill)."""
    chunk_cycles, set_up_cycles = _FUSED_CYCLES.get(gpu.instruction_path, _FUSED_CYCLES[WGMMA])
    tasks, square = sizes.sequences * sizes.values, sizes.chunk**2
    steps = sizes.chunks / np.maximum(sizes.sequences, 1.0)
    row = sizes.chunk * sizes.element_bytes
    products = 2 * (3 * sizes.chunk * sizes.state + square * (3 * sizes.k + 2 * sizes.v))  # those of the chain above
    state_bytes = 2 * sizes.state * sizes.state_bytes
    return matrix_kernel(
        gpu,
        sizes,
        tasks=tasks,
        flops=steps * products,
        vector_flops=steps * (7 * square + sizes.chunk**3 / 2 + 2 * sizes.state),
        exponentials=steps * 2 * square,
        moved_bytes=2 * sizes.qk_bytes + 2 * sizes.value_bytes + 2 * sizes.gate_bytes,
        task_bytes=steps * row * (2 * sizes.k + 2 * sizes.v) + state_bytes,
        streamed_bytes=sizes.kept_state_bytes,
        warps=_FUSED_THREADS / gpu.warp_threads,
        smem_per_cta=gpu.smem_bytes_per_cta,
        serial_steps=np.maximum(1.0, sizes.longest),
        step_cycles=chunk_cycles,
        task_cycles=set_up_cycles,
        longest=np.maximum(1.0, sizes.longest / np.maximum(steps, 1.0)),
    )
