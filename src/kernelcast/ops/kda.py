"""kda: Kimi delta attention, the linear attention of Kimi Linear and Kimi K3.

Kimi Linear (arXiv 2510.26692) is the gated delta rule with a decay for each channel of a key instead of one for each
head: S <- Diag(decay) S, then as gated_delta. Gates are as wide as keys, and are read wherever keys are.

Backends of prefill (kda_chunked.py): ``triton`` is flash-linear-attention's chain (fla/ops/kda; SGLang, and vLLM before
Hopper); ``flashkda`` is Moonshot's CUTLASS kernels (github MoonshotAI/FlashKDA; vLLM from Hopper on).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, choice, flag, size
from kernelcast.ops.dtypes import matmul_pipe
from kernelcast.ops.kda_chunked import FLASH_CHUNK, flash_kernels, triton_chain
from kernelcast.ops.linear_attention import LinearKernel, StateSizes, recurrent_kernel
from kernelcast.ops.vector import VECTOR_DTYPES
from kernelcast.ops.work import Array, Works

KDA_BACKENDS = ("triton", "flashkda")
_CHUNK = 64.0  # tokens of Triton's


class Kda(LinearKernel):
    """Kimi delta attention over a batch: chunked prefill, recurrent decode; norms of queries and keys are inside.

    A sequence of one token is a decode. ``fused``: its convolution and the gated norm after it are inside too (vLLM's
    fused_kda_decode, SGLang's kda_fused_decode); else neither is, as in prefill.
    """

    op = "kda"
    dtypes = ("fp16", "bf16")
    examples = (
        {"batch": 4, "q_len": 2048, "heads": 32, "key_dim": 128},
        {"batch": 64, "q_len": 1, "heads": 32, "key_dim": 128, "fused": True},
    )
    feature_sizes = ("heads", "key_dim")

    heads: int = size("heads, each with a state", high=65536)
    key_dim: int = size("elements of a key head", high=1024)
    value_dim: int | None = size("elements of a value head, default: as of a key's", default=None, high=1024)
    width: int = size("tokens of the filter of a fused decode's convolution", default=4, high=256)
    fused: bool = flag("decode does the convolution and the gated norm in the same kernel", default=False)
    state_dtype: str = choice("format of the state in memory", VECTOR_DTYPES, default="fp32")
    backend: str | None = choice("prefill's, default: the stack's on this GPU", KDA_BACKENDS, default=None)

    @classmethod
    def configuration(cls, calls: Calls) -> Mapping[str, str | NDArray[Any] | None]:
        words = super().configuration(calls)
        inside = (calls["fused"] > 0) & (words["kernel"] == "recurrent")
        return {**words, "fused": np.where(inside, "yes", "no").astype(object)}

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        matmul_pipe(gpu, calls.choice("dtype"))  # refuses what the GPU cannot multiply
        flash = cls.backend_of(calls, gpu) == "flashkda"
        heads, k = calls["heads"], calls["key_dim"]
        chunk = np.full(calls.count, FLASH_CHUNK if flash else _CHUNK)
        sizes = StateSizes.of(calls, heads, heads, k, calls.given("value_dim", k), chunk)
        around = calls["fused"] * _around_bytes(sizes, calls["width"])
        elements = sizes.steps * heads * (2 * k + sizes.v)
        decode = recurrent_kernel(gpu, sizes, k, around, calls["fused"] * 2 * calls["width"] * elements)
        if not sizes.tokens.any():
            return (decode,)
        return decode, *(flash_kernels if flash else triton_chain)(gpu, sizes)


def _around_bytes(sizes: StateSizes, width: Array) -> Array:
    """Of a decode's convolution, in place: its state in and out, and its weights in fp32."""
    channels = sizes.values * (2 * sizes.k + sizes.v)
    weights = np.where(sizes.recurrent > 0, channels * width * 4.0, 0.0)
    return 2 * sizes.recurrent * channels * (width - 1) * sizes.element_bytes + weights
