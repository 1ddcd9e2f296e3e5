"""gated_delta: the linear attention of Qwen3-Next.

Gated DeltaNet (arXiv 2412.06464) keeps a key_dim x value_dim state S a value head, and for each token
S <- decay S + beta k (v - decay S^T k)^T, o = S^T q. Decode does just that, and streams the state. Prefill cuts the
sequence into chunks of 64 tokens (flash-linear-attention): products within a chunk, a triangular inverse (the WY
form), and a state that passes from chunk to chunk, one after another.

Backends of prefill (gated_delta_chunked.py): ``triton`` is flash-linear-attention's chain of six kernels, of which only
the state's walks the chunks in turn (SGLang, TensorRT-LLM and vLLM carry copies: fla/ops/gated_delta_rule).
``flashinfer`` does all in one kernel, one CTA a sequence and value head (vLLM on Hopper and data-centre Blackwell, vllm
pull 32846 and 40717).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, Conflicts, choice, conflict, flag, size
from kernelcast.kernels.dtypes import matmul_pipe
from kernelcast.kernels.gated_delta_chunked import DeltaSizes, flashinfer_kernel, triton_chain
from kernelcast.kernels.gemm import TASK_CYCLES
from kernelcast.kernels.requests import SequenceKernel
from kernelcast.kernels.vector import ACCUMULATOR_BYTES, VECTOR_DTYPES, vector_kernel
from kernelcast.kernels.which import default_backend
from kernelcast.kernels.work import Work, Works, ceil_div

GATED_DELTA_BACKENDS = ("triton", "flashinfer")
_STATE_FLOPS = 7.0  # an element of the state and token: decay; k^T S; add k v^T; q^T S
_DECODE_BLOCK = 32.0  # columns of the state that one warp keeps in decode (fused_recurrent.py)


class GatedDelta(SequenceKernel):
    """Gated delta rule (Gated DeltaNet, Qwen3-Next) over a batch: chunked prefill, recurrent decode.

    A sequence of one token is a decode. Projections, convolution and the gated norm after it are not inside.
    """

    op = "gated_delta"
    dtypes = ("fp16", "bf16")
    examples = (
        {"batch": 4, "q_len": 2048, "key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128},
        {"batch": 64, "q_len": 1, "key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128},
    )
    hinted = ("key_heads", "value_heads", "key_dim", "value_dim")

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
    def conflicts(cls, calls: Calls) -> Conflicts:
        uneven = np.mod(calls["value_heads"], calls["key_heads"]) != 0
        text = "value_heads {value_heads:g} is no multiple of key_heads {key_heads:g}"
        return conflict(uneven, text, calls.numbers) or super().conflicts(calls)

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        matmul_pipe(gpu, calls.choice("dtype"))  # refuses what the GPU cannot multiply
        sizes = DeltaSizes.of(calls)
        decode = _recurrent(gpu, sizes)
        if not sizes.tokens.any():
            return (decode,)
        asked = cls.op, gpu, calls.choice("dtype"), calls.choice("stack")
        backend = calls.choice("backend") or default_backend(*asked)
        prefill = flashinfer_kernel if backend == "flashinfer" else triton_chain
        return decode, *prefill(gpu, sizes, calls["qk_norm"])


def _recurrent(gpu: Gpu, sizes: DeltaSizes) -> Work:
    """Token by token with the state in registers (fused_recurrent.py): decode, and the check of drafted tokens.

    The state is read once and written after every token, for the check may end at any of them.
    """
    block = np.minimum(_DECODE_BLOCK, sizes.v)
    blocks = ceil_div(sizes.v, block)
    states = (sizes.recurrent + sizes.steps) * sizes.values * sizes.state
    work = vector_kernel(
        gpu,
        tasks=sizes.recurrent * sizes.values * blocks,
        threads=float(gpu.warp_threads),
        moved_bytes=sizes.steps * (2 * sizes.keys * sizes.k + 2 * sizes.values * sizes.v) * sizes.element_bytes,
        again_bytes=sizes.steps * sizes.values * blocks * 2 * sizes.k * sizes.element_bytes,  # q, k for each block
        streamed_bytes=states * sizes.state_bytes,
        flops=_STATE_FLOPS * sizes.steps * sizes.values * sizes.state,
        xu_ops=5 * sizes.steps * sizes.values,  # two norms, the decay, the two gates
        converted=states if sizes.state_bytes < ACCUMULATOR_BYTES else 0.0,
        registers=np.minimum(255.0, 64.0 + sizes.k * block / gpu.warp_threads),
        steps=np.maximum(1.0, sizes.longest_steps),
        runs=sizes.recurrent > 0,
    )
    longest = np.maximum(1.0, sizes.longest_steps * sizes.recurrent / np.maximum(sizes.steps, 1.0))
    return replace(work, longest=longest, task_cycles=TASK_CYCLES)
