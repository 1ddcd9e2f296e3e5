"""embedding: rows of a table, gathered by token id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, Kernel, size
from kernelcast.kernels.dtypes import dtype
from kernelcast.kernels.norm import VECTOR_BYTES, VECTOR_DTYPES, row_threads, side_instructions
from kernelcast.kernels.work import Phases, Work, ceil_div

_ID_BYTES = 8.0  # int64
_MAX_THREADS = 256.0  # PyTorch's vectorised gather: at most 256 threads of 16 bytes, so 4 KiB of a row a CTA


@dataclass(frozen=True, kw_only=True)
class Embedding(Kernel):
    """Embedding lookup: copies the table row of each token.

    Repeated tokens find their row in L2, so at most min(tokens, vocab) rows are streamed.
    """

    family: ClassVar[str] = "memory"
    op: ClassVar[str] = "embedding"
    dtypes: ClassVar[tuple[str, ...]] = VECTOR_DTYPES
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"tokens": 4096, "hidden": 4096, "vocab": 128256},)

    tokens: int = size("tokens to look up")
    hidden: int = size("elements of a table row")
    vocab: int = size("rows of the table")

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Phases:
        tokens, hidden = calls["tokens"], calls["hidden"]
        element_bytes = dtype(calls.choice("dtype")).weight_bytes
        row_bytes = hidden * element_bytes
        tasks_per_row = ceil_div(row_bytes, _MAX_THREADS * VECTOR_BYTES)
        l2_bytes = 2 * row_bytes / tasks_per_row + _ID_BYTES
        work = Work(
            tasks=tokens * tasks_per_row,
            longest_count=tokens * tasks_per_row,
            l2_bytes=l2_bytes,
            other_warp_instructions=side_instructions(gpu, l2_bytes),
            streamed_bytes=np.minimum(tokens, calls["vocab"]) * row_bytes,
            activation_bytes=tokens * (row_bytes + _ID_BYTES),
            threads=row_threads(gpu, hidden, VECTOR_BYTES / element_bytes, _MAX_THREADS),
            registers_per_thread=24.0,
            serial_steps=2.0,  # the id, then the row
        )
        return (work,)
