"""gated_delta: the linear attention of Qwen3-Next.

Gated DeltaNet (arXiv 2412.06464) keeps a key_dim x value_dim state S a value head, and for each token
S <- decay S + beta k (v - decay S^T k)^T, o = S^T q. Decode does just that, and streams the state. Prefill cuts the
sequence into chunks of 64 tokens (flash-linear-attention): products within a chunk, a triangular inverse (the WY
form), and a state that passes from chunk to chunk, one after another.

Backends of prefill: ``triton`` is flash-linear-attention's chain of six kernels, of which only the state's walks the
chunks in turn (SGLang, TensorRT-LLM and vLLM carry copies: fla/ops/gated_delta_rule). ``flashinfer`` does all in
one kernel, one CTA a sequence and value head (vLLM on Hopper and data-centre Blackwell, vllm pull 32846 and 40717).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, Kernel, choice, flag, lengths, size
from kernelcast.kernels.dtypes import dtype, matmul_pipe
from kernelcast.kernels.gemm import TASK_CYCLES
from kernelcast.kernels.norm import VECTOR_DTYPES, side_instructions
from kernelcast.kernels.requests import sequence_conflicts, sequence_hints, sequences_of
from kernelcast.kernels.vector import ACCUMULATOR_BYTES, vector_kernel
from kernelcast.kernels.work import Array, Number, Phases, Work, axis, ceil_div

GATED_DELTA_BACKENDS = ("triton", "flashinfer")
_STATE_FLOPS = 7.0  # an element of the state and token: decay; k^T S; add k v^T; q^T S
_STATE_BLOCKS = (32.0, 64.0)  # columns of the state that a CTA of the chunk walk keeps (autotuned in chunk_delta_h.py)
_DECODE_BLOCK = 32.0  # columns of the state that one warp keeps in decode (fused_recurrent.py)
# Cycles below are round numbers read off AIConfigurator's linear_attention rows (H200, B200, L40S), for all GPUs alike.
# The inverse solves 16x16 blocks row by row, each row a load and a sum that wait for the row before (solve_tril.py).
_SOLVED_ROWS = 14.0 / 16.0  # of a chunk's rows, that wait
_ROW_CYCLES = 400.0
# Load w, multiply with the state, subtract, load k, multiply, add: two products that wait for each other.
_CHUNK_CYCLES = 2500.0
# FlashInfer's kernel does a chunk's every product in turn, the inverse among them. Its set-up loads and lays out the
# state. Two kernels, two generations: CUTLASS for Hopper, CuTe DSL for Blackwell (flashinfer pull 3001).
_FUSED_CYCLES = {"9": (6000.0, 12000.0), "10": (5000.0, 28000.0)}  # a chunk, a task
_FUSED_THREADS = 512.0


@dataclass(frozen=True, kw_only=True)
class GatedDelta(Kernel):
    """Gated delta rule (Gated DeltaNet, Qwen3-Next) over a batch: chunked prefill, recurrent decode.

    A sequence of one token is a decode. Projections, convolution and the gated norm after it are not inside.
    """

    op: ClassVar[str] = "gated_delta"
    dtypes: ClassVar[tuple[str, ...]] = ("fp16", "bf16")
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"batch": 4, "q_len": 2048, "key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128},
        {"batch": 64, "q_len": 1, "key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128},
    )

    batch: int | None = size("sequences", default=None)
    q_len: int | None = size("new tokens a sequence", default=None)
    q_lens: tuple[int, ...] | None = lengths("new tokens of each sequence (ragged batch)")
    key_heads: int = size("heads of queries and keys", high=65536)
    value_heads: int = size("heads of values, each with a state", high=65536)
    key_dim: int = size("elements of a key head", high=1024)
    value_dim: int = size("elements of a value head", high=1024)
    chunk: int = size("tokens a chunk of the prefill", default=64, low=16, high=256)
    qk_norm: bool = flag("prefill normalises queries and keys too; decode always does", default=False)
    state_dtype: str = choice("format of the state in memory", VECTOR_DTYPES, default="fp32")
    kernel: str = choice("auto: recurrent where q_len is 1", ("auto", "chunked", "recurrent"), default="auto")
    backend: str | None = choice("prefill's, default: the stack's on this GPU", GATED_DELTA_BACKENDS, default=None)

    @classmethod
    def conflicts(cls, calls: Calls) -> list[tuple[NDArray[np.bool_], str]]:
        uneven = np.mod(calls["value_heads"], calls["key_heads"]) != 0
        if uneven.any():
            pair = calls["value_heads"][uneven][0], calls["key_heads"][uneven][0]
            return [(uneven, f"value_heads {pair[0]:g} is no multiple of key_heads {pair[1]:g}")]
        return sequence_conflicts(calls)

    @classmethod
    def hints(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        sizes = ("key_heads", "value_heads", "key_dim", "value_dim")
        return sequence_hints(calls) | {f"log_{name}": np.log2(calls[name]) for name in sizes}

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Phases:
        matmul_pipe(gpu, calls.choice("dtype"))  # refuses what the GPU cannot multiply
        sizes = _Sizes.of(calls)
        decode = _recurrent(gpu, sizes)
        if not sizes.tokens.any():
            return (decode,)
        backend = calls.choice("backend") or default_backend(gpu, calls.choice("stack"))
        if backend == "flashinfer":
            return decode, _prepare(gpu, sizes, 1 + calls["qk_norm"]), _fused(gpu, sizes)
        prepare = _prepare(gpu, sizes, 1 + 2 * calls["qk_norm"])  # queries and keys by a kernel each
        chain = (_scores, _inverse, _wy_form, _chunk_walk, _outputs)
        return decode, prepare, *(kernel(gpu, sizes) for kernel in chain)


def default_backend(gpu: Gpu, stack: str | None = None) -> str:
    """vLLM takes FlashInfer's kernel where there is one for the GPU; SGLang, TensorRT-LLM and PyTorch Triton's."""
    own = stack in (None, "vllm", "flashinfer") and gpu.compute_capability.split(".")[0] in _FUSED_CYCLES
    return "flashinfer" if own else "triton"


@dataclass(frozen=True)
class _Sizes:
    """The chunked and the recurrent sequences of each call; all arrays (calls,)."""

    tokens: Array  # of chunked sequences
    chunks: Array  # of all of them
    longest: Array  # chunks of the longest sequence
    sequences: Array  # chunked
    steps: Array  # recurrent: tokens of all sequences
    longest_steps: Array
    recurrent: Array  # sequences
    keys: Array  # heads
    values: Array
    k: Array  # elements of a head
    v: Array
    chunk: Array
    element_bytes: float
    state_bytes: float  # of one element
    math: str

    @classmethod
    def of(cls, calls: Calls) -> _Sizes:
        requests, how = sequences_of(calls), calls.choice("kernel")
        queries, chunk = requests.queries, calls["chunk"]
        alone = queries == 1 if how == "auto" else np.full(queries.shape, how == "recurrent")
        chunks = np.where(alone, 0.0, ceil_div(queries, requests.each(chunk)))
        steps = np.where(alone, queries, 0.0)
        kind = dtype(calls.choice("dtype"))
        return cls(
            tokens=requests.total(queries - steps),
            chunks=requests.total(chunks),
            longest=requests.most(chunks),
            sequences=requests.total(1.0 - alone),
            steps=requests.total(steps),
            longest_steps=requests.most(steps),
            recurrent=requests.total(1.0 * alone),
            keys=calls["key_heads"],
            values=calls["value_heads"],
            k=calls["key_dim"],
            v=calls["value_dim"],
            chunk=chunk,
            element_bytes=kind.act_bytes,
            state_bytes=dtype(calls.choice("state_dtype")).act_bytes,
            math=kind.math,
        )

    @property
    def runs(self) -> Array:
        """1 where any sequence is chunked."""
        return np.where(self.chunks > 0, 1.0, 0.0)

    @property
    def state(self) -> Array:
        """Elements of one head's state."""
        return self.k * self.v

    @property
    def qk_bytes(self) -> Array:
        """Queries, or keys, of all chunked tokens."""
        return self.tokens * self.keys * self.k * self.element_bytes

    @property
    def wide_bytes(self) -> Array:
        """Numbers of key_dim a value head and token, as w is."""
        return self.tokens * self.values * self.k * self.element_bytes

    @property
    def value_bytes(self) -> Array:
        return self.tokens * self.values * self.v * self.element_bytes

    @property
    def gate_bytes(self) -> Array:
        """One of beta, or the decay's sum, in fp32."""
        return self.tokens * self.values * ACCUMULATOR_BYTES

    @property
    def square_bytes(self) -> Array:
        """chunk x chunk numbers for each chunk and value head, in fp32."""
        return self.tokens * self.values * self.chunk * ACCUMULATOR_BYTES

    @property
    def kept_state_bytes(self) -> Array:
        """States of the chunked sequences, read at the start and written at the end."""
        return 2 * self.sequences * self.values * self.state * self.state_bytes


def _matrix_kernel(
    gpu: Gpu,
    sizes: _Sizes,
    *,
    tasks: Number,
    flops: Number,
    moved_bytes: Array,
    task_bytes: Number,
    warps: float,
    smem_per_cta: Number,
    vector_flops: Number = 0.0,
    exponentials: Number = 0.0,
    streamed_bytes: Number = 0.0,
    key_reads: float = 0.0,
    **more: Any,
) -> Work:
    """One kernel over chunks. Bytes moved and streamed are the whole kernel's, all other demand is a task's.

    ``key_reads``: how often it reads queries or keys. The grid has all chunks of one value head before the next, so
    that each value head of a key head reads them again, from DRAM where they outgrow L2.
    """
    again = key_reads * sizes.qk_bytes * (sizes.values / sizes.keys - 1)
    lost = np.clip(1 - gpu.l2_bytes / np.maximum(moved_bytes, 1.0), 0.0, 1.0)
    useful = sizes.tokens / np.maximum(sizes.chunks * sizes.chunk, 1.0)  # the rest pads the last chunk
    on_tensor = matmul_pipe(gpu, sizes.math) == "tensor"
    return Work(
        tasks=tasks,
        longest_count=tasks,
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
        launches=sizes.runs,
        useful_flops=np.asarray(tasks) * flops * useful,
        **{"task_cycles": TASK_CYCLES, **more},
    )


def _scores(gpu: Gpu, sizes: _Sizes) -> Work:
    """beta k k^T with its decays, a chunk and value head a CTA (chunk_scaled_dot_kkt.py)."""
    square, row = sizes.chunk**2, sizes.chunk * sizes.k * sizes.element_bytes
    return _matrix_kernel(
        gpu,
        sizes,
        tasks=sizes.chunks * sizes.values,
        flops=2 * square * sizes.k,
        vector_flops=4 * square,  # a difference of decays, its exponential, beta, the mask
        exponentials=square,
        moved_bytes=sizes.qk_bytes + 2 * sizes.gate_bytes + sizes.square_bytes,
        key_reads=1.0,
        task_bytes=row + square * ACCUMULATOR_BYTES,
        warps=4.0,
        smem_per_cta=2 * row,
    )


def _inverse(gpu: Gpu, sizes: _Sizes) -> Work:
    """The inverse of a unit lower triangle a chunk and value head, in fp32 on the vector units (solve_tril.py)."""
    square = sizes.chunk**2
    rows = np.minimum(sizes.chunk, sizes.tokens / np.maximum(sizes.sequences, 1.0))
    task_bytes = square * (ACCUMULATOR_BYTES + sizes.element_bytes)
    return _matrix_kernel(
        gpu,
        sizes,
        tasks=sizes.chunks * sizes.values,
        flops=0.0,
        vector_flops=sizes.chunk**3 / 2,  # C^3 / 3 by substitution, half as much again by blocks of 16
        moved_bytes=sizes.square_bytes * (1 + sizes.element_bytes / ACCUMULATOR_BYTES),
        task_bytes=task_bytes,
        warps=4.0,
        smem_per_cta=square * ACCUMULATOR_BYTES / 2,
        serial_steps=np.maximum(1.0, rows * _SOLVED_ROWS),
        step_cycles=_ROW_CYCLES,
    )


def _wy_form(gpu: Gpu, sizes: _Sizes) -> Work:
    """w and u: the inverse times keys and times values (wy_fast.py)."""
    square, width = sizes.chunk**2, sizes.k + sizes.v
    row = sizes.chunk * width * sizes.element_bytes
    inverse_bytes = sizes.square_bytes * sizes.element_bytes / ACCUMULATOR_BYTES
    moved = sizes.qk_bytes + sizes.wide_bytes + 2 * sizes.value_bytes + inverse_bytes + 2 * sizes.gate_bytes
    return _matrix_kernel(
        gpu,
        sizes,
        tasks=sizes.chunks * sizes.values,
        flops=2 * square * width,
        vector_flops=2 * sizes.chunk * width,
        exponentials=sizes.chunk,
        moved_bytes=moved,
        key_reads=1.0,
        task_bytes=2 * row + square * sizes.element_bytes,
        warps=4.0,
        smem_per_cta=row + square * sizes.element_bytes,
    )


def _chunk_walk(gpu: Gpu, sizes: _Sizes) -> Work:
    """The state from chunk to chunk, a block of its columns a CTA: serial along the sequence (chunk_delta_h.py).

    It writes the state before each chunk, and the values that the chunk adds to it.
    """
    block = np.minimum(axis(_STATE_BLOCKS), sizes.v)
    tasks = sizes.sequences * sizes.values * ceil_div(sizes.v, block)
    steps = sizes.chunks / np.maximum(sizes.sequences, 1.0)  # of the mean task
    keys, columns = sizes.chunk * sizes.k * sizes.element_bytes, sizes.chunk * block * sizes.element_bytes
    states = sizes.chunks * sizes.values * sizes.state * sizes.element_bytes
    return _matrix_kernel(
        gpu,
        sizes,
        tasks=tasks,
        flops=steps * 4 * sizes.chunk * sizes.k * block,
        vector_flops=steps * block * (3 * sizes.chunk + 2 * sizes.k),  # subtract, decay; decay and round the state
        exponentials=steps * sizes.chunk,
        moved_bytes=sizes.qk_bytes + sizes.wide_bytes + 2 * sizes.value_bytes + states,
        task_bytes=steps * (2 * keys + 2 * columns + sizes.k * block * sizes.element_bytes),
        streamed_bytes=sizes.kept_state_bytes,
        warps=4.0,
        smem_per_cta=2 * (2 * keys + columns),  # two stages
        serial_steps=np.maximum(1.0, sizes.longest),
        step_cycles=_CHUNK_CYCLES,
        longest=np.maximum(1.0, sizes.longest / np.maximum(steps, 1.0)),
        tile={"block_v": block},
    )


def _outputs(gpu: Gpu, sizes: _Sizes) -> Work:
    """q S and (q k^T) v of each chunk and value head (chunk_o.py)."""
    square = sizes.chunk**2
    row = sizes.chunk * sizes.element_bytes
    states = sizes.chunks * sizes.values * sizes.state * sizes.element_bytes
    return _matrix_kernel(
        gpu,
        sizes,
        tasks=sizes.chunks * sizes.values,
        flops=2 * (sizes.chunk * sizes.state + square * (sizes.k + sizes.v)),
        vector_flops=3 * square + 2 * sizes.chunk * sizes.v,
        exponentials=square + sizes.chunk,
        moved_bytes=2 * sizes.qk_bytes + 2 * sizes.value_bytes + states + sizes.gate_bytes,
        key_reads=2.0,
        task_bytes=row * (2 * sizes.k + 2 * sizes.v) + sizes.state * sizes.element_bytes,
        warps=4.0,
        smem_per_cta=row * 2 * sizes.k + sizes.state * sizes.element_bytes,
    )


def _fused(gpu: Gpu, sizes: _Sizes) -> Work:
    """All of it in one kernel, a sequence and value head a CTA that fills an SM (flashinfer gdn_prefill)."""
    chunk_cycles, set_up_cycles = _FUSED_CYCLES.get(gpu.compute_capability.split(".")[0], _FUSED_CYCLES["9"])
    tasks, square = sizes.sequences * sizes.values, sizes.chunk**2
    steps = sizes.chunks / np.maximum(sizes.sequences, 1.0)
    row = sizes.chunk * sizes.element_bytes
    products = 2 * (3 * sizes.chunk * sizes.state + square * (3 * sizes.k + 2 * sizes.v))  # those of the chain above
    state_bytes = 2 * sizes.state * sizes.state_bytes
    return _matrix_kernel(
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


def _prepare(gpu: Gpu, sizes: _Sizes, launches: Array) -> Work:
    """What the decays need (their sum in Triton, their exponential in FlashInfer), and the norms where asked for."""
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


def _recurrent(gpu: Gpu, sizes: _Sizes) -> Work:
    """Token by token with the state in registers (fused_recurrent.py): decode, and the check of drafted tokens.

    The state is read once and written after every token, for the check may end at any of them.
    """
    block = np.minimum(_DECODE_BLOCK, sizes.v)
    tasks = sizes.recurrent * sizes.values * ceil_div(sizes.v, block)
    share = 1 / np.maximum(tasks, 1.0)
    states = (sizes.recurrent + sizes.steps) * sizes.values * sizes.state * sizes.state_bytes
    vectors = sizes.steps * (2 * sizes.keys * sizes.k + 2 * sizes.values * sizes.v) * sizes.element_bytes
    per_block = sizes.steps * sizes.values * ceil_div(sizes.v, block) * 2 * sizes.k * sizes.element_bytes  # q, k again
    flops = _STATE_FLOPS * sizes.steps * sizes.values * sizes.state
    l2_bytes = (states + vectors + per_block) * share
    converted = (states / sizes.state_bytes if sizes.state_bytes < ACCUMULATOR_BYTES else 0.0) * share
    on = np.where(sizes.recurrent > 0, 1.0, 0.0)
    return Work(
        tasks=tasks,
        longest_count=tasks,
        longest=np.maximum(1.0, sizes.longest_steps * sizes.recurrent / np.maximum(sizes.steps, 1.0)),
        fma_flops=flops * share,
        xu_ops=5 * sizes.steps * sizes.values * share,  # two norms, the decay, the two gates
        l2_bytes=l2_bytes,
        other_warp_instructions=side_instructions(gpu, l2_bytes, converted),
        streamed_bytes=states,
        activation_bytes=vectors,
        threads=float(gpu.warp_threads),
        registers_per_thread=np.minimum(255.0, 64.0 + sizes.k * block / gpu.warp_threads),
        serial_steps=np.maximum(1.0, sizes.longest_steps),
        task_cycles=TASK_CYCLES,
        launches=on,
        useful_flops=flops,
    )
