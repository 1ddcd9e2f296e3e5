"""What whole attention layers share: their parameters, and the kernels before, around and after attention itself.

Engines measure and run such a layer as one: projections, norms, rotations, writes to the cache, attention. Its kernels
are what the single ops are made of (``matmul_work``, ``flash_works``), in turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.hardware.paths import TCGEN05
from kernelcast.ops.attention import OverCache
from kernelcast.ops.base import Calls, choice, flag, size
from kernelcast.ops.dtypes import dtype, runs
from kernelcast.ops.flash import visible_pairs
from kernelcast.ops.flash_backends import BACKENDS
from kernelcast.ops.gemm import QUANTISING_KERNELS, matmul_work
from kernelcast.ops.kernel_selection import default_backend
from kernelcast.ops.quantize import quantised_rows
from kernelcast.ops.requests import Requests
from kernelcast.ops.vector import vector_kernel
from kernelcast.ops.work import Array, Number, Work, Works

FLASHMLA = "flashmla"
MSA = "msa"  # MiniMax's kernels for blocks of keys, of CUTLASS, on Blackwell
LAYER_BACKENDS = (*BACKENDS, FLASHMLA, MSA)
# Bytes of a number that a norm or a rotation takes: read and written once; or by PyTorch's own kernels, one a step, in
# fp32 (square, mean, root, products with sine and cosine, halves put together). vLLM's layer on B200 with and without
# fusing tells: 54 us of small kernels, and of 32,768 tokens 21 ns a token for norms of 2,048 numbers and 0.85 ns a head
# for a rotation of 64, at DRAM's 7.2 TB/s.
_FUSED_BYTES, _CHAIN_NORM_BYTES, _CHAIN_ROPE_BYTES = 4.0, 75.0, 95.0
_CHAIN_KERNELS = 24.0  # beyond the fused ones
_STEP_BYTES = 8.0  # of a number in fp32, read and written
_ROW_THREADS = 256.0


class AttentionLayer(OverCache):
    """What the layers have in common; sizes are those of one rank."""

    dtypes = ("fp16", "bf16", "fp8", "fp8_block", "nvfp4", "int8", "int8_wo", "int4")
    trailing_parameters: ClassVar[tuple[str, ...]] = ("causal", "page_size", "kv_dtype", "backend", "fused")
    batch_parameter = "batch"

    kv_dtype: str = choice("format of the KV cache", ("fp16", "bf16", "fp8"), default="bf16")
    backend: str | None = choice(
        "library of the attention, default: the usual one on the GPU", LAYER_BACKENDS, default=None
    )
    hidden: int = size("size of the model (hidden_size)", default=7168, high=1 << 20)
    fused: bool = flag("norms and rotations are a kernel each; false: PyTorch's own, a kernel a step", default=True)

    @classmethod
    def projected_flops(cls, calls: Calls) -> Array:
        """Of a token, in all matrix products but attention."""
        raise TypeError(f"{cls.__name__} defines no projections")

    @classmethod
    def attended_flops(cls, calls: Calls) -> Array:
        """Of the call, in attention and in what chooses its keys."""
        raise TypeError(f"{cls.__name__} defines no attention")

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        requests = Requests.of(calls)
        tokens, keys = (requests.total(x) for x in (requests.queries, requests.keys))
        return {
            "log_tokens": np.log2(tokens),
            "log_requests": np.log2(requests.count),
            "log_keys": np.log2(keys / requests.count),
            "longest_keys": np.log2(requests.most(requests.keys) * requests.count / keys),
            "cached": 1 - tokens / keys,
            "log_q_heads": np.log2(calls["q_heads"]),
            "log_hidden": np.log2(calls["hidden"]),
            "fused": calls["fused"],
            "attended": np.log2(cls.attended_flops(calls) / (tokens * cls.projected_flops(calls)) + 1e-3),
        }


def told(words: Mapping[str, str | NDArray[Any] | None], **by_call: NDArray[np.bool_]) -> dict[str, Any]:
    """A configuration, and what numbers say by call: yes or no."""
    return {**words, **{name: np.where(where, "yes", "no").astype(object) for name, where in by_call.items()}}


def sixteen_bits(gpu: Gpu, calls: Calls | None = None) -> str:
    """The wide format beside narrow ones: fp16 where the calls say so, or where a GPU lacks bf16."""
    asked = calls is not None and calls.choice("dtype") == "fp16"
    return "fp16" if asked or not runs(gpu, "bf16") else "bf16"


def tiling_backend(calls: Calls, gpu: Gpu) -> str:
    """Whose tiles the attention kernel has. FlashMLA's are 64 rows of all heads, its splits by load, as FlashAttention
    3's; on Blackwell it, and FlashInfer for latents, run as TensorRT-LLM's kernels do."""
    name: str = calls.choice("backend") or default_backend(
        "attention", gpu, sixteen_bits(gpu, calls), calls.choice("stack")
    )
    if gpu.instruction_path == TCGEN05:
        return "trtllm" if name in (FLASHMLA, MSA, "flashinfer") else name
    return "fa3" if name in (FLASHMLA, MSA) else name


def attention_view(calls: Calls, gpu: Gpu, *, narrow: bool = True) -> Calls:
    """The calls as the attention kernel sees them: not in the format of the projections, and without a window, which
    is among the keys that it is given.

    ``narrow``: kernels of TensorRT-LLM and FlashMLA multiply in the cache's 8 bits; the others widen what they read.
    """
    tiles = tiling_backend(calls, gpu)
    eight = calls.choice("kv_dtype") == "fp8" and runs(gpu, "fp8")
    multiplies = eight and narrow and (tiles == "trtllm" or calls.choice("backend") == FLASHMLA)
    words = {"dtype": "fp8" if multiplies else sixteen_bits(gpu, calls), "backend": tiles}
    numbers = {name: column for name, column in calls.numbers.items() if name != "window"}
    return replace(calls, numbers=numbers, choices={**calls.choices, **words})


def projection(gpu: Gpu, calls: Calls, tokens: Array, n: Array, k: Array) -> Works:
    """A linear layer of the engine, quantisation of its input where the format is narrow."""
    kind = calls.dtype
    product = untold(matmul_work(gpu, kind, tokens, n, k))
    if kind.act_bytes >= 2:
        return (product,)
    kernels = QUANTISING_KERNELS.get(calls.choice("stack") or "", 1.0)
    return replace(quantised_rows(gpu, kind, tokens, k), launches=kernels), product


def by_head(gpu: Gpu, calls: Calls, tokens: Array, heads: Array, n: Array, k: Array) -> Work:
    """A product of each head (or group) with weights of its own, which engines keep in 16 bits."""
    return untold(matmul_work(gpu, dtype(sixteen_bits(gpu, calls)), tokens, n, k, batch=heads))


def untold(work: Work) -> Work:
    """Its tile is no feature: a layer has too many products to tell of each."""
    return replace(work, tile={})


def only(works: Works, on: NDArray[np.bool_]) -> Works:
    """Where these kernels run; nothing at all if nowhere."""
    if on.all():
        return works
    run = on.astype(np.float64)
    masked = ("tasks", "streamed_bytes", "activation_bytes", "refetched_bytes", "launches", "useful_flops")
    return tuple(replace(work, **{name: getattr(work, name) * run for name in masked}) for work in works if on.any())


def around(
    gpu: Gpu,
    calls: Calls,
    tokens: Array,
    *,
    normed: Number,
    rotated: Number,
    kept: Number,
    kernels: Number,
    moved_bytes: Number = 0.0,
) -> Work:
    """Norms, rotations and writes to the cache, as one work of several launches; numbers are those of a token.
    ``moved_bytes``: what other small kernels read and write."""
    chain = calls["fused"] == 0
    numbers = tokens * (normed + rotated)
    again = (
        chain * tokens * (normed * (_CHAIN_NORM_BYTES - _FUSED_BYTES) + rotated * (_CHAIN_ROPE_BYTES - _FUSED_BYTES))
    )
    work = vector_kernel(
        gpu,
        tasks=tokens,
        threads=_ROW_THREADS,
        moved_bytes=tokens * ((normed + rotated) * _FUSED_BYTES + kept * 2.0 + moved_bytes),
        again_bytes=again,
        streamed_bytes=tokens * kept * dtype(calls.choice("kv_dtype")).act_bytes,
        flops=4 * (numbers + tokens * kept),
        converted=2 * (numbers + tokens * kept),
        steps=2.0,
        launches=kernels + np.where(chain, _CHAIN_KERNELS, 0.0),
    )
    missing = np.clip(numbers * _STEP_BYTES / gpu.l2_bytes - 1, 0.0, 1.0)  # of what a step leaves to the next in L2
    return replace(work, refetched_bytes=again * missing)


def seen_pairs(requests: Requests, most: Array | float = 0.0, causal: Array | None = None) -> Array:
    """Keys that each request's queries see, ``most`` each (0: all), one entry a request; under the causal mask, or
    where ``causal`` is 0 as many as its last one."""
    queries, keys = requests.queries, requests.keys
    limit = np.broadcast_to(most, queries.shape)
    seen = visible_pairs(queries, keys, np.ones_like(queries), limit)
    if causal is None or causal.all():
        return seen
    whole = queries * np.minimum(keys, np.where(limit > 0, limit, np.inf))
    return np.where(requests.each(causal) > 0, seen, whole)
