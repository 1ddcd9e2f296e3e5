"""How attention libraries tile: rows of a task, which heads share one, and when the keys of a request are split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

MIN_CHUNK_TOKENS = 256.0  # shorter splits cost more in merging than they win
# fill: split while SMs are left over. load: split a request that is longer than an SM's share. rounded: the same, in
# chunks of whole sizes. never: one task walks all keys of its queries, however many they are.
Splitting = Literal["fill", "load", "rounded", "never"]


@dataclass(frozen=True)
class Backend:
    """How one attention library tiles. Query tiles ascend; a call takes the smallest that holds its rows."""

    query_tiles: tuple[int, ...]
    packs_up_to: float  # queries per request up to which heads of one group share a tile
    split_ctas_per_sm: float  # CTAs per SM that splitting the keys aims at
    splitting: Splitting
    threads: int
    rows_per_read: float  # query rows that share one read of K and V from shared memory
    stages: int
    step_cycles: float  # load, multiply, softmax, multiply, as far as the next step's does not hide it
    least_chunk: float = MIN_CHUNK_TOKENS
    registers: float = 168.0  # a thread
    packs_mixed: bool = False  # heads share a tile in all requests where one has few queries, else only where all have


# FlashInfer: scheduler.cuh picks 16, 64 or 128 packed rows and splits for two CTAs an SM. FlashAttention 2:
# flash_fwd_launch_template.h; num_splits_heuristic fills the SMs once. FlashAttention 3: tile_size.h, and the dynamic
# splits of flash_prepare_scheduler.cu; heuristics.h, should_pack_gqa: requests of unequal lengths are packed, whatever
# they are. cuDNN, TensorRT-LLM and FA4 on Blackwell: two tiles of 128 rows in flight. Triton: the serving engines' own
# kernels.
BACKENDS = {
    "fa2": Backend((64, 128), 1, 1, "fill", 128, 32, 1, 1500),
    "fa3": Backend((64, 128), 64, 1, "load", 384, 64, 2, 600, packs_mixed=True),
    "fa4": Backend((128, 256), 128, 1, "load", 384, 128, 2, 300, packs_mixed=True),
    "flashinfer": Backend((16, 64, 128), np.inf, 2, "fill", 128, 32, 1, 1500, least_chunk=128.0, registers=255),
    "cudnn": Backend((64, 128), 1, 1, "fill", 384, 64, 2, 600),
    "trtllm": Backend((16, 64, 128), np.inf, 1, "load", 384, 64, 2, 300),
    "triton": Backend((16, 64, 128), np.inf, 1, "fill", 128, 32, 2, 1500),
}

# PyTorch's memory-efficient kernel (xFormers' kernel_forward.h, CUTLASS): 64 queries of a head, keys never split, no
# copies ahead of the products.
EFFICIENT = Backend((64,), 0, 1, "never", 128, 32, 1, 5500)  # 32 queries where heads are wider than 128

# FlashAttention 2 with dropout (flash_fwd_launch_template.h): other tiles, and keys are never split.
FA2_DROPOUT = Backend((128,), 0, 1, "never", 128, 32, 1, 1500, registers=255)

# FlashInfer's own kernels that go by the name of a library (0.5.3, attention/scheduler.cuh). PrefillSM90Plan: tiles of
# 128 queries of one head (192 of small ones), no keys shared by a group and none split, the longest first to the least
# loaded of one CTA an SM: chunks and decodes of a batch are one schedule. MLAPlan: 64 rows of all heads a CTA, two CTAs
# side by side where a request has more, in chunks of an SM's share rounded up to 256 tokens.
FLASHINFER_FA3 = Backend((128,), 0, 1, "never", 384, 64, 2, 600)
FLASHINFER_MLA = {
    "flashinfer": Backend((64,), np.inf, 1, "rounded", 256, 64, 2, 1500),
    "fa3": Backend((64,), np.inf, 1, "rounded", 384, 64, 2, 600),
}


PYTORCH = {"efficient": EFFICIENT, "fa2_dropout": FA2_DROPOUT}


def tiling(name: str, stack: str | None, latent: bool) -> Backend:
    """How ``name`` tiles in this stack; ``latent``: all heads share one key (MLA, weights absorbed)."""
    if name in PYTORCH:
        return PYTORCH[name]
    if stack == "flashinfer" and latent and name in FLASHINFER_MLA:
        return FLASHINFER_MLA[name]
    return FLASHINFER_FA3 if stack == "flashinfer" and name == "fa3" else BACKENDS[name]
