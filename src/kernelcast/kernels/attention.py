"""attention: scaled dot-product attention, prefill and decode, over a paged or plain KV cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, Kernel, choice, flag, lengths, size
from kernelcast.kernels.dtypes import dtype
from kernelcast.kernels.flash import BACKENDS, default_backend, flash_phases
from kernelcast.kernels.kv_write import token_move
from kernelcast.kernels.requests import Heads, Requests, equal_heads, head_conflicts, length_conflicts, length_hints
from kernelcast.kernels.work import Array, Phases

_XQA_GROUP = 32.0  # the widest that TensorRT-LLM's own decode kernel shares KV among; above, its older one does not
# The attention layer of a serving engine also writes new keys and values to the cache; TensorRT-LLM's rotates Q and K
# in the same pass.
_MOVED_BY_ENGINE = {"vllm": "kv", "sglang": "kv", "trtllm": "q+kv"}


@dataclass(frozen=True, kw_only=True)
class Attention(Kernel):
    """Softmax(Q Kᵀ) V for a batch of requests. Prefill, decode (q_len 1) and chunked prefill (q_len < kv_len).

    With a serving engine as its stack (vllm, sglang, trtllm) it is the engine's attention layer, as that is measured:
    new keys and values are written to the cache too, and TensorRT-LLM rotates Q and K.
    """

    op: ClassVar[str] = "attention"
    dtypes: ClassVar[tuple[str, ...]] = ("fp32", "fp16", "bf16", "fp8")
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"batch": 4, "q_len": 2048, "kv_len": 2048, "q_heads": 32, "kv_heads": 8, "head_dim": 128},
        {
            "batch": 64,
            "q_len": 1,
            "kv_len": 4096,
            "q_heads": 32,
            "kv_heads": 8,
            "head_dim": 128,
            "page_size": 16,
        },
        {"q_lens": [512, 1, 1], "kv_lens": [512, 900, 7000], "q_heads": 32, "kv_heads": 8, "head_dim": 128},
    )

    batch: int | None = size("requests", default=None)
    q_len: int | None = size("new tokens a request", default=None)
    kv_len: int | None = size("tokens attended to a request, the new ones included", default=None)
    q_lens: tuple[int, ...] | None = lengths("new tokens of each request (ragged batch)")
    kv_lens: tuple[int, ...] | None = lengths("tokens attended to by each request (ragged batch)")
    q_heads: int = size("query heads", high=65536)
    kv_heads: int | None = size("KV heads; fewer than q_heads is GQA, default: as many", default=None, high=65536)
    head_dim: int = size("size of a head", high=4096)
    causal: bool = flag("each token sees itself and what is before it", default=True)
    window: int | None = size("sliding window in tokens, 0: none", default=None, low=0)
    page_size: int | None = size("tokens a page of the KV cache, 0: not paged", default=None, low=0, high=1 << 20)
    kv_dtype: str | None = choice("format of the KV cache, default: dtype", ("fp16", "bf16", "fp8"), default=None)
    backend: str | None = choice("library, default: the usual one on the GPU", tuple(BACKENDS), default=None)

    @classmethod
    def conflicts(cls, calls: Calls) -> list[tuple[NDArray[np.bool_], str]]:
        uneven = head_conflicts(calls)
        if uneven:
            return uneven
        loose = (calls.given("window", 0) > 0) & (calls["causal"] == 0)
        if loose.any():
            return [(loose, "a sliding window needs causal attention")]
        return length_conflicts(calls, cls.op)

    @classmethod
    def hints(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        window = calls.given("window", 0.0)
        found = length_hints(calls, _heads(calls))
        paged = (calls.given("page_size", 0.0) > 0) * 1.0
        return found | {"window": np.where(window > 0, np.log2(window + 1), 0.0), "paged": paged}

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Phases:
        kind = dtype(calls.choice("dtype"))
        kv_bytes = dtype(calls.choice("kv_dtype") or kind.name).act_bytes
        requests, heads = Requests.of(calls), _heads(calls)
        phases = flash_phases(
            gpu,
            requests,
            heads,
            kind,
            kv_bytes,
            calls.choice("backend") or default_backend(gpu),
            calls["causal"],
            calls.given("window", 0.0),
            calls.given("page_size", 0.0) > 0,
        )
        moved = _MOVED_BY_ENGINE.get(calls.choice("stack") or "")
        if moved is None:
            return phases
        tokens = requests.total(requests.queries)
        elements = (2 * heads.kv + (heads.queries if moved == "q+kv" else 0.0)) * heads.qk_dim
        move = token_move(gpu, tokens, elements, kind.act_bytes, kv_bytes)
        kernels = 2.0 + (kind.act_bytes != kv_bytes) + (kind.act_bytes < 2)
        return (*phases, replace(move, launches=kernels))


def _heads(calls: Calls) -> Heads:
    return equal_heads(calls, _XQA_GROUP if calls.choice("stack") == "trtllm" else np.inf)
