"""kv_write: new keys and values into the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, Kernel, choice, size
from kernelcast.kernels.dtypes import dtype
from kernelcast.kernels.norm import VECTOR_DTYPES, VECTOR_ELEMENTS, row_threads, side_instructions
from kernelcast.kernels.work import Array, Phases, Work, ceil_div

KV_DTYPES = (*VECTOR_DTYPES, "fp8", "int8", "nvfp4")
_SLOT_BYTES = 8.0  # int64 slot of the token in the cache
_MAX_THREADS = 512.0


@dataclass(frozen=True, kw_only=True)
class KvWrite(Kernel):
    """Writes the keys and values of new tokens to their slots of the paged KV cache (reshape_and_cache).

    One CTA a token (vLLM's reshape_and_cache_flash). A cache in another number format costs a scale and a
    clamp for each element.
    """

    family: ClassVar[str] = "memory"
    op: ClassVar[str] = "kv_write"
    dtypes: ClassVar[tuple[str, ...]] = VECTOR_DTYPES
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"tokens": 4096, "kv_heads": 8, "head_dim": 128},
        {"tokens": 64, "kv_heads": 8, "head_dim": 128, "kv_dtype": "fp8"},
    )

    tokens: int = size("new tokens")
    kv_heads: int = size("key and value heads")
    head_dim: int = size("elements of a head")
    kv_dtype: str | None = choice("number format of the cache; not given: dtype", KV_DTYPES, default=None)

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Phases:
        name, tokens = calls.choice("dtype"), calls["tokens"]
        kv_name = calls.choice("kv_dtype") or name
        elements = 2 * calls["kv_heads"] * calls["head_dim"]  # of a token: key and value
        return (token_move(gpu, tokens, elements, dtype(name).act_bytes, dtype(kv_name).act_bytes),)


def token_move(gpu: Gpu, tokens: Array, elements: Array, in_bytes: float, out_bytes: float) -> Work:
    """``elements`` of each token to its slot, perhaps in another format: one CTA a token."""
    read_bytes = elements * in_bytes + _SLOT_BYTES
    written_bytes = elements * out_bytes
    converts = in_bytes != out_bytes
    threads = row_threads(gpu, elements / 2, VECTOR_ELEMENTS, _MAX_THREADS)
    l2_bytes = read_bytes + written_bytes
    flops = 3 * elements if converts else 0 * elements  # scale, and clamp from both sides
    return Work(
        tasks=tokens,
        longest_count=tokens,
        fma_flops=flops,
        l2_bytes=l2_bytes,
        other_warp_instructions=side_instructions(gpu, l2_bytes, elements if converts else 0.0),
        streamed_bytes=tokens * written_bytes,
        activation_bytes=tokens * read_bytes,
        threads=threads,
        registers_per_thread=32.0,
        serial_steps=1 + ceil_div(elements / 2, threads * VECTOR_ELEMENTS),  # the slot, then the rows
        useful_flops=tokens * flops,
    )
