"""mla: DeepSeek's multi-head latent attention.

Decode works on the latent itself: all heads share one key of kv_rank + rope_dim numbers a token, and the values
are the first kv_rank of them (weights absorbed into Q and O). Prefill expands K and V per head, as MHA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, Kernel, choice, flag, lengths, size
from kernelcast.kernels.dtypes import dtype
from kernelcast.kernels.flash import BACKENDS, default_backend, flash_phases
from kernelcast.kernels.requests import Heads, Requests, length_conflicts, length_hints
from kernelcast.kernels.work import Array, Phases


@dataclass(frozen=True, kw_only=True)
class Mla(Kernel):
    """Multi-head latent attention (DeepSeek V2/V3): ``absorbed`` attends to the latent, else to expanded heads."""

    op: ClassVar[str] = "mla"
    dtypes: ClassVar[tuple[str, ...]] = ("fp16", "bf16", "fp8")
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"batch": 64, "q_len": 1, "kv_len": 4096, "q_heads": 128},
        {"batch": 1, "q_len": 4096, "kv_len": 4096, "q_heads": 128, "absorbed": "no"},
    )

    batch: int | None = size("requests", default=None)
    q_len: int | None = size("new tokens a request", default=None)
    kv_len: int | None = size("tokens attended to a request, the new ones included", default=None)
    q_lens: tuple[int, ...] | None = lengths("new tokens of each request (ragged batch)")
    kv_lens: tuple[int, ...] | None = lengths("tokens attended to by each request (ragged batch)")
    q_heads: int = size("query heads", high=65536)
    kv_rank: int = size("size of the latent (kv_lora_rank)", default=512, high=65536)
    rope_dim: int = size("rotary part of a key (qk_rope_head_dim)", default=64, high=4096)
    nope_dim: int = size("plain part of an expanded key (qk_nope_head_dim)", default=128, high=4096)
    v_dim: int = size("size of an expanded value (v_head_dim)", default=128, high=4096)
    causal: bool = flag("each token sees itself and what is before it", default=True)
    page_size: int | None = size("tokens a page of the KV cache, 0: not paged", default=None, low=0, high=1 << 20)
    kv_dtype: str | None = choice("format of the KV cache, default: dtype", ("fp16", "bf16", "fp8"), default=None)
    absorbed: str = choice("auto: absorbed when q_len is 1 or 2 (decode)", ("auto", "yes", "no"), default="auto")
    backend: str | None = choice("library, default: the usual one on the GPU", tuple(BACKENDS), default=None)

    @classmethod
    def conflicts(cls, calls: Calls) -> list[tuple[NDArray[np.bool_], str]]:
        return length_conflicts(calls, cls.op)

    @classmethod
    def hints(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        return length_hints(calls, _heads(calls))

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Phases:
        kind = dtype(calls.choice("dtype"))
        return flash_phases(
            gpu,
            Requests.of(calls),
            _heads(calls),
            kind,
            dtype(calls.choice("kv_dtype") or kind.name).act_bytes,
            calls.choice("backend") or default_backend(gpu),
            calls["causal"],
            np.zeros(calls.count),
            calls.given("page_size", 0.0) > 0,
        )


def _heads(calls: Calls) -> Heads:
    """Heads of the latent where weights are absorbed, expanded ones elsewhere."""
    requests = Requests.of(calls)
    how = calls.choice("absorbed")
    short = requests.most(requests.queries) <= 2
    latent = short if how == "auto" else np.full(calls.count, how == "yes")
    return Heads(
        queries=calls["q_heads"],
        kv=np.where(latent, 1.0, calls["q_heads"]),
        qk_dim=np.where(latent, calls["kv_rank"], calls["nope_dim"]) + calls["rope_dim"],
        v_dim=np.where(latent, calls["kv_rank"], calls["v_dim"]),
        shared_where=latent,
    )
