"""What runs on a stream of its own beside other kernels of a pass: what these do not hide counts.

Shared experts run beside the routed ones where a step is small enough to leave room: engines do so in small steps alone
(vLLM up to 256 tokens: VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD; SGLang and TensorRT-LLM in graphs of decode). Routed
experts then keep DRAM busy, and what runs beside them is hidden up to their length, but for the bytes that it reads of
its own; in larger steps both want the same units. With two-batch overlap exchanges of one half of a batch run beside
all that the other half does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kernelcast.calls import Launch

MOST_TOKENS = 256
SORTS = ("experts", "all")  # beside what


def hides(launch: Launch, sort: str) -> bool:
    """Whether what runs beside this sort may run beside it."""
    return not launch.beside and (sort == "all" or launch.op == "moe")


def visible(sort: str, hiding_s: Any, beside_s: Any, dram_s: Any, tokens: Any) -> Any:
    """The share of what runs beside that is not hidden, where it keeps DRAM busy for ``dram_s``; columns: a column."""
    took_s = np.maximum(beside_s, 1e-12)
    left = np.maximum(0.0, 1.0 - hiding_s / took_s)
    if sort == "all":  # a link's
        return left
    return np.where(np.asarray(tokens) <= MOST_TOKENS, np.clip(dram_s / took_s, left, 1.0), 1.0)


def shares(launches: Sequence[Launch], times: Sequence[tuple[float, float]], tokens: int) -> list[float]:
    """Of each launch of a pass, given what one takes and keeps DRAM busy: the share of its time that counts."""
    took = [(launch, launch.count * each_s) for launch, (each_s, _) in zip(launches, times, strict=True)]
    busy = [(launch, launch.count * dram_s) for launch, (_, dram_s) in zip(launches, times, strict=True)]
    left = {"": 1.0}
    for sort in SORTS:
        hiding = sum(time_s for launch, time_s in took if hides(launch, sort))
        beside = sum(time_s for launch, time_s in took if launch.beside == sort)
        dram = sum(dram_s for launch, dram_s in busy if launch.beside == sort)
        left[sort] = float(visible(sort, hiding, beside, dram, tokens))
    return [left[launch.beside] for launch in launches]
