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

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, Conflicts, choice, conflict, flag, size
from kernelcast.ops.dtypes import matmul_pipe
from kernelcast.ops.gated_delta_chunked import flashinfer_kernel, triton_chain
from kernelcast.ops.linear_attention import LinearKernel, StateSizes, recurrent_kernel
from kernelcast.ops.vector import VECTOR_DTYPES
from kernelcast.ops.work import Works

GATED_DELTA_BACKENDS = ("triton", "flashinfer")


class GatedDelta(LinearKernel):
    """Gated delta rule (Gated DeltaNet, Qwen3-Next) over a batch: chunked prefill, recurrent decode.

    A sequence of one token is a decode. Projections, convolution and the gated norm after it are not inside.
    """

    op = "gated_delta"
    dtypes = ("fp16", "bf16")
    examples = (
        {"batch": 4, "q_len": 2048, "key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128},
        {"batch": 64, "q_len": 1, "key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128},
    )
    feature_sizes = ("key_heads", "value_heads", "key_dim", "value_dim")

    key_heads: int = size("heads of queries and keys", high=65536)
    value_heads: int = size("heads of values, each with a state", high=65536)
    key_dim: int = size("elements of a key head", high=1024)
    value_dim: int = size("elements of a value head", high=1024)
    chunk: int = size("tokens a chunk of the prefill", default=64, low=16, high=256)
    qk_norm: bool = flag("prefill normalises queries and keys too; decode always does", default=False)
    stateless: bool = flag("prefill starts from no state and keeps none, as in training", default=False)
    state_dtype: str = choice("format of the state in memory", VECTOR_DTYPES, default="fp32")
    backend: str | None = choice("prefill's, default: the stack's on this GPU", GATED_DELTA_BACKENDS, default=None)

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        uneven = np.mod(calls["value_heads"], calls["key_heads"]) != 0
        text = "value_heads {value_heads:g} is no multiple of key_heads {key_heads:g}"
        return conflict(uneven, text, calls.numbers) or super().conflicts(calls)

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        matmul_pipe(gpu, calls.choice("dtype"))  # refuses what the GPU cannot multiply
        names = ("key_heads", "value_heads", "key_dim", "value_dim", "chunk", "stateless")
        sizes = StateSizes.of(calls, *(calls[name] for name in names))
        decode = recurrent_kernel(gpu, sizes)
        if not sizes.tokens.any():
            return (decode,)
        prefill = flashinfer_kernel if cls.backend_of(calls, gpu) == "flashinfer" else triton_chain
        return decode, *prefill(gpu, sizes, calls["qk_norm"])
