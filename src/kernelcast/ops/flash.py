"""Tiled attention with an online softmax, for attention and mla, and how each library tiles.

A task is one tile of query rows of one head against its keys and values, in steps of ``tile_kv`` tokens, or a chunk of
them when the keys are split to fill the GPU (split-KV). Query heads that share a KV head may be packed into one tile
(FlashInfer always; FlashAttention for short queries).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.hardware.gpu import TCGEN05
from kernelcast.ops.base import Calls
from kernelcast.ops.dtypes import DType, find_dtype, matmul_pipe
from kernelcast.ops.kernel_selection import default_backend
from kernelcast.ops.requests import Heads, RequestBatch
from kernelcast.ops.work import Array, Work, Works, ceil_div

MIN_CHUNK_TOKENS = 256.0  # shorter splits cost more in merging than they win
# fill: split while SMs are left over. load: split a request that is longer than an SM's share. rounded: the same, in
# chunks of whole sizes. never: one task loops over all keys of its queries.
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
    packs_mixed: bool = False  # heads share a tile if any request has few queries, else only if all have


# FlashInfer: scheduler.cuh picks 16, 64 or 128 packed rows and splits for two CTAs per SM. FlashAttention 2:
# flash_fwd_launch_template.h; num_splits_heuristic fills the SMs once. FlashAttention 3: tile_size.h, and the dynamic
# splits of flash_prepare_scheduler.cu; heuristics.h, should_pack_gqa: requests of unequal lengths are packed, whatever
# they are. cuDNN, TensorRT-LLM and FA4 on Blackwell: two tiles of 128 rows in flight. Triton: the serving engines'
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

# FlashInfer's kernels under the name of another library (0.5.3, attention/scheduler.cuh). PrefillSM90Plan: tiles of
# 128 queries of one head (192 of small heads), no packed groups and no split keys, the longest first to the least
# loaded of one CTA per SM: prefill and decode of a batch are one schedule. MLAPlan: 64 rows of all heads, two CTAs
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


SOFTMAX_FLOPS = 8.0  # per score: scale, running max, subtract, sum, rescale, convert (FlashAttention-2, alg. 1)
LOAD_MARGIN = 1.1  # FlashAttention-3 splits a request that has more than 1.1 times an SM's mean share
# Page table, queries, first keys, write-back: about five trips to DRAM and back, which nothing hides.
TASK_CYCLES = 4000.0
# FlashInfer's fast_dequant_f8f16x4: four numbers of an 8-bit cache become 16 bits in ten instructions (a permutation, a
# shift, masks, two products), in every warp that multiplies by them.
CONVERT_INSTRUCTIONS = 2.5
OFFSET_BYTES = 4.0  # int32: offset of a token in its block
# num_splits_heuristic (csrc/flash_attn/flash_api.cpp): keys of a decode are not split where its tasks are four fifths
# of two for every SM. One that runs alone takes so long for 128 keys of 128 numbers: 6500 cycles in L2, as decodes by
# vLLM in public AIConfigurator campaigns on L40S and RTX PRO 6000 (https://github.com/ai-dynamo/aiconfigurator), and
# two trips to DRAM of some 500 more.
_UNSPLIT_TASKS_PER_SM = 1.6
_TILE_KEYS, _TILE_CYCLES = 128.0, 7500.0
_MLA_CHUNKS = ((8.0, 32.0), (16.0, 64.0), (32.0, 128.0), (64.0, 192.0))  # shares up to which a chunk is so long
_MLA_GRAIN = 256.0  # tokens, of longer chunks


def floor_sum(count: Array, divisor: Array, step: Array, start: Array) -> Array:
    """Sum of floor((start + step i) / divisor) for i = 0 … count-1, by Euclid's algorithm. Exact below 2**53 for whole
    numbers, start and step not negative."""
    count, divisor, step, start = (
        np.array(x, dtype=np.float64) for x in np.broadcast_arrays(count, divisor, step, start)
    )
    total = np.zeros_like(count)
    count = np.maximum(count, 0)
    while True:
        total += count * (count - 1) / 2 * np.floor(step / divisor) + count * np.floor(start / divisor)
        step, start = np.mod(step, divisor), np.mod(start, divisor)
        top = step * count + start
        live = (top >= divisor) & (count > 0)
        if not live.any():
            return total
        # the lattice points under the line, counted along the other axis
        count, start, divisor, step = (
            np.where(live, np.floor(top / divisor), 0.0),
            np.where(live, np.mod(top, divisor), 0.0),
            np.where(live & (step > 0), step, 1.0),
            np.where(live, divisor, 0.0),
        )


def kv_steps(
    queries: Array, keys: Array, group: Array, tile_q: Array, tile_kv: Array, causal: Array, window: Array
) -> Array:
    """KV tiles that all query tiles of one head (or packed group) visit, exactly, masked tiles skipped.

    Rows are packed ``group`` to a query, so tile i ends at query floor(((i+1) tile_q - 1) / group); with
    nested floors this stays a sum of floors of a line. ``window`` 0 means none.
    """
    tiles = ceil_div(queries * group, tile_q)
    before = keys - queries  # keys older than the first query
    wide = group * tile_kv
    ends = floor_sum(tiles - 1, wide, tile_q, tile_q - 1 + np.maximum(before, 0) * group)
    visited = tiles + ends + np.floor((keys - 1) / tile_kv)
    slack = np.where(window > 0, window, np.inf) - 1 - before  # first query with a masked-out oldest key
    first = np.clip(np.ceil(group * np.where(np.isfinite(slack), slack, 0) / tile_q), 0, tiles)
    first = np.where(np.isfinite(slack), first, tiles)
    offset = np.where(first < tiles, first * tile_q - group * np.where(np.isfinite(slack), slack, 0), 0)
    skipped = floor_sum(tiles - first, wide, tile_q, np.maximum(offset, 0))
    return np.where(causal > 0, visited - skipped, tiles * ceil_div(keys, tile_kv))


def ragged_wait_s(
    gpu: Gpu, requests: float, keys: float, longest: float, heads: float, head_dim: float, *, packed: bool
) -> float:
    """How much longer FlashAttention 2 takes for requests of unequal lengths than for as many of ``keys`` each, the
    mean: the task of the longest begins at any time of the launch, and ends it alone. ``packed``: a launch that only
    decodes, whose tasks are KV heads; else query heads."""
    tasks = requests * heads
    if longest <= keys or (packed and tasks < _UNSPLIT_TASKS_PER_SM * gpu.sm_count):
        return 0.0
    tile_bytes = 2 * (64 + 2 * _TILE_KEYS) * head_dim  # queries, keys and values in 16 bits
    waves = max(1.0, tasks / (gpu.sm_count * max(1.0, gpu.smem_bytes_per_sm // tile_bytes)))
    takes = longest / keys / waves  # of the launch, while all tasks share the memory
    begins, over = 1 - 1 / waves, takes - 1  # at the latest
    late = (max(0.0, begins + over) ** 2 - max(0.0, over) ** 2) / (2 * begins) if begins else max(0.0, over)
    alone_s = longest / _TILE_KEYS * _TILE_CYCLES * head_dim / 128 / gpu.clock_boost_hz
    return late / takes * alone_s


def visible_pairs(queries: Array, keys: Array, causal: Array, window: Array) -> Array:
    """Query-key pairs under the mask."""
    before = keys - queries
    reach = np.where(window > 0, window, keys + 1)
    growing = np.clip(reach - 1 - before, 0, queries)  # queries that still see every older key
    seen = growing * before + growing * (growing + 1) / 2 + (queries - growing) * reach
    return np.where(causal > 0, seen, queries * keys)


def kv_cache_bytes(calls: Calls) -> float:
    """Bytes of one KV cache element."""
    return find_dtype(calls.choice("kv_dtype") or calls.choice("dtype")).act_bytes


def flash_works(gpu: Gpu, calls: Calls, requests: RequestBatch, heads: Heads) -> Works:
    """The attention kernel, and the merge of split keys where there is one."""
    dtype, kv_bytes, causal = calls.dtype, kv_cache_bytes(calls), calls["causal"]
    window = calls.given("window", 0.0) if "window" in calls.numbers else np.zeros(calls.count)
    backend_name = calls.choice("backend") or default_backend("attention", gpu, dtype.name)
    backend = tiling(backend_name, calls.choice("stack"), bool(np.all(heads.shared_where)))
    pipe = matmul_pipe(gpu, dtype.name)
    each = requests.each
    paged = calls.given("page_size", 0.0) > 0
    plan = _Plan(gpu, backend_name, backend, calls, requests, heads, window)
    steps, tasks, tile_q, tile_kv = plan.steps, plan.tasks, plan.tile_q, plan.tile_kv
    mean_steps = steps / tasks
    pairs = requests.total(visible_pairs(requests.queries, requests.keys, each(causal), each(window)))
    reach = np.where(each(window) > 0, requests.queries + each(window) - 1, np.inf)
    seen = np.where(each(causal) > 0, np.minimum(requests.keys, reach), requests.keys)
    scores = mean_steps * tile_q * tile_kv
    readers = np.maximum(1, tile_q / backend.rows_per_read)  # warps, or groups of them, that read all keys of a task
    converted = mean_steps * tile_kv * heads.kv_dim * readers if kv_bytes < dtype.act_bytes else np.zeros_like(scores)
    flops = 2 * scores * (heads.qk_dim + heads.v_dim)
    kv_token_bytes = heads.kv * heads.kv_dim * kv_bytes
    fresh = requests.total(np.minimum(seen, requests.queries))
    work = Work(
        tasks=tasks,
        schedule="longest_first",
        longest=plan.longest / mean_steps,
        shortest=plan.shortest / mean_steps,
        longest_count=plan.longest_count,
        tensor_flops=flops if pipe == "tensor" else 0.0,
        tensor_dtype=dtype.math,
        fma_flops=scores * SOFTMAX_FLOPS + mean_steps * tile_q * heads.v_dim * 2 + (flops if pipe == "fma" else 0.0),
        # exponentials; Blackwell's kernels compute half by polynomial (FA4)
        xu_ops=scores * (0.5 if gpu.instruction_path == TCGEN05 else 1.0),
        smem_bytes=mean_steps * tile_kv * heads.kv_dim * kv_bytes * (1 + readers),
        l2_bytes=mean_steps * tile_kv * heads.kv_dim * kv_bytes
        + tile_q * (heads.qk_dim * dtype.act_bytes + heads.v_dim * np.where(plan.splits > 1, 4.0, dtype.out_bytes)),
        other_warp_instructions=converted * CONVERT_INSTRUCTIONS / gpu.warp_threads,
        streamed_bytes=(requests.total(seen) - fresh) * kv_token_bytes,
        activation_bytes=fresh * kv_token_bytes
        + requests.total(requests.queries)
        * heads.queries
        * (heads.qk_dim * dtype.act_bytes + heads.v_dim * dtype.out_bytes),
        threads=float(backend.threads),
        registers_per_thread=backend.registers,
        smem_bytes_per_cta=np.minimum(
            (tile_q * heads.qk_dim + backend.stages * tile_kv * heads.kv_dim) * dtype.act_bytes, gpu.smem_bytes_per_cta
        ),
        serial_steps=plan.longest,
        mean_steps=mean_steps,
        step_cycles=backend.step_cycles,
        task_cycles=TASK_CYCLES,
        useful_flops=pairs * heads.queries * 2 * (heads.qk_dim + heads.v_dim),
        tile={"tile_q": tile_q, "tile_kv": tile_kv, "kv_splits": plan.splits},
    )
    merge = _merge(heads, plan, dtype)
    if backend is not FLASHINFER_FA3 or not paged.any():
        return work, merge
    return work, merge, _offsets(requests.total(requests.keys), paged)


class _Plan:
    """Tiles, steps and splits of each call; steps are KV tiles."""

    def __init__(
        self, gpu: Gpu, name: str, backend: Backend, calls: Calls, requests: RequestBatch, heads: Heads, window: Array
    ) -> None:
        each, causal, paged = requests.each, calls["causal"], calls.given("page_size", 0.0) > 0
        shared = heads.queries / heads.kv
        deciding = requests.least if backend.packs_mixed else requests.most
        pack = (deciding(requests.queries) <= backend.packs_up_to) & (shared <= heads.most_packed)
        group = np.where(pack, shared, 1.0)
        lanes = np.where(pack, heads.kv, heads.queries)  # heads, or packed groups of them
        rows = requests.total(requests.queries) * group / requests.count
        tile_q = _query_tile(backend, rows, heads.qk_dim)
        if name in PYTORCH:
            tile_q = np.where(heads.v_dim > 128, tile_q / 2, tile_q)
        tile_kv = _kv_tile(name, heads.qk_dim, causal, paged, tile_q, kv_cache_bytes(calls))
        if backend in FLASHINFER_MLA.values():
            tile_kv = np.full_like(tile_kv, 64.0)
        elif backend is FLASHINFER_FA3:  # hopper/prefill_sm90.cuh, getCTATileSize
            tile_q = np.where(heads.v_dim <= 64, 192.0, tile_q)
            tile_kv = np.where(heads.qk_dim > heads.v_dim, 128.0, tile_kv)
        self.tile_q, self.tile_kv = tile_q, tile_kv

        shape = (each(group), each(tile_q), each(tile_kv), each(causal), each(window))
        tiles = ceil_div(requests.queries * each(group), each(tile_q))
        walk, first_walk = _walks(requests, *shape)
        self.steps = requests.total(kv_steps(requests.queries, requests.keys, *shape)) * lanes  # of all tasks
        slots = backend.split_ctas_per_sm * gpu.sm_count
        chunk = _chunk(backend, requests, tiles, walk, lanes, self.steps, slots, tile_kv)
        splits = ceil_div(walk, each(chunk))
        self.tasks = requests.total(tiles * splits) * lanes
        self.splits = requests.most(splits)  # of the longest request
        self.longest = np.minimum(requests.most(walk), chunk)  # steps of a task
        self.shortest = requests.least(np.where(splits > 1, walk - (splits - 1) * each(chunk), first_walk))
        alike = (each(causal) == 0) | (each(window) > 0)  # else only the last tile under the mask sees all keys
        full_chunks = np.where(splits > 1, tiles * np.floor(walk / each(chunk)), np.where(alike, tiles, 1.0))
        longest_here = np.minimum(walk, each(chunk)) >= each(self.longest)
        self.longest_count = requests.total(np.where(longest_here, full_chunks, 0.0)) * lanes
        # outputs of split requests, before and after the merge
        self.partial_rows = requests.total(np.where(splits > 1, requests.queries * splits, 0.0)) * heads.queries
        self.merged_rows = requests.total(np.where(splits > 1, requests.queries, 0.0)) * heads.queries


def _query_tile(backend: Backend, rows: Array, head_dim: Array) -> Array:
    """The smallest tile that holds the mean rows, the largest otherwise; 64 at most for wide heads."""
    *smaller, largest = (float(size) for size in backend.query_tiles)
    tile = np.select([rows <= size for size in smaller], smaller, largest) if smaller else np.full_like(rows, largest)
    return np.where(head_dim >= 256, np.minimum(tile, 64.0), tile)


def _kv_tile(
    name: str, head_dim: Array, causal: Array, paged: NDArray[np.bool_], tile_q: Array, kv_bytes: float
) -> Array:
    if name == "fa3":  # FlashAttention-3's tile_size.h, forward, 16-bit
        return np.where(
            head_dim <= 64, np.where(paged, 96.0, 128.0),
            np.where(head_dim <= 128, np.where(paged, 96.0, np.where(causal > 0, 128.0, 192.0)), 80.0),
        )  # fmt: skip
    if name == "efficient":  # generate_kernels.py
        return np.where(head_dim <= 64, 64.0, 128.0)
    if name == "fa2_dropout":
        return np.select([head_dim <= 32, head_dim <= 96, head_dim <= 128], [128.0, 64.0, 32.0], 64.0)
    if name in ("fa4", "cudnn", "trtllm"):
        return np.where(head_dim <= 128, 128.0, 64.0)
    if name == "flashinfer":  # prefill.cuh, NUM_MMA_KV: what registers and half of an SM's shared memory hold
        short = np.where((tile_q <= 16) & (kv_bytes < 2), 256.0, 128.0)
        return np.where((head_dim <= 64) | (tile_q < 128), short, 64.0)
    return np.where(head_dim <= 64, 128.0, 64.0)


def _walks(
    requests: RequestBatch, group: Array, tile_q: Array, tile_kv: Array, causal: Array, window: Array
) -> tuple[Array, Array]:
    """KV tiles of a request's longest task (all, or those of a window) and of its first (the fewest under a causal
    mask)."""
    full = ceil_div(requests.keys, tile_kv)
    queries = np.minimum(ceil_div(tile_q, group), requests.queries)  # of one tile
    reach = np.where(window > 0, np.minimum(window - 1 + queries, requests.keys), requests.keys)
    longest = np.where(causal > 0, np.minimum(full, ceil_div(reach, tile_kv) + (window > 0)), full)
    first = ceil_div(requests.keys - requests.queries + queries, tile_kv)
    return longest, np.where(causal > 0, np.minimum(longest, first), longest)


def _chunk(
    backend: Backend,
    requests: RequestBatch,
    tiles: Array,
    walk: Array,
    lanes: Array,
    steps: Array,
    slots: float,
    tile_kv: Array,
) -> Array:
    """Maximum KV tiles per task."""
    most, least = requests.most(walk), np.ceil(backend.least_chunk / tile_kv)
    if backend.splitting == "never":
        return most
    if backend.splitting == "fill":
        return _filling_chunk(requests, tiles, walk, lanes, slots, least)
    if backend.splitting == "load":
        return np.minimum(most, np.maximum(least, np.ceil(LOAD_MARGIN * steps / slots)))
    share = np.ceil(steps / slots) * tile_kv  # tokens
    chunk = np.select([share <= up_to for up_to, _ in _MLA_CHUNKS], [size for _, size in _MLA_CHUNKS],
                      ceil_div(share, _MLA_GRAIN) * _MLA_GRAIN)  # fmt: skip
    return np.minimum(most, np.maximum(1.0, np.ceil(chunk / tile_kv)))


def _filling_chunk(
    requests: RequestBatch, tiles: Array, walk: Array, lanes: Array, slots: float, least: Array
) -> Array:
    """The smallest chunk of KV tiles with which tasks still fit ``slots`` CTAs, by bisection."""
    high = requests.most(walk)
    low = np.minimum(least, high)
    if not np.any(requests.total(tiles) * lanes < slots):
        return high
    for _ in range(int(np.ceil(np.log2(max(2.0, float(np.max(high)))))) + 1):
        middle = np.floor((low + high) / 2)
        fits = requests.total(tiles * ceil_div(walk, requests.each(middle))) * lanes <= slots
        high = np.where(fits, middle, high)
        low = np.where(fits, low, np.minimum(middle + 1, high))
    return high


def _merge(heads: Heads, plan: _Plan, dtype: DType) -> Work:
    """Adds up the partial outputs of split keys: one row of one head per task."""
    parts = np.where(plan.merged_rows > 0, plan.partial_rows / np.maximum(plan.merged_rows, 1), 0.0)
    row_bytes = parts * (heads.v_dim + 1) * 4 + heads.v_dim * dtype.out_bytes
    return Work(
        tasks=plan.merged_rows,
        fma_flops=parts * heads.v_dim * 2,
        xu_ops=parts,
        l2_bytes=row_bytes,
        activation_bytes=plan.merged_rows * row_bytes,
        threads=128.0,
        registers_per_thread=32.0,
        launches=np.where(plan.merged_rows > 0, 1.0, 0.0),
        useful_flops=plan.merged_rows * parts * heads.v_dim * 2,
    )


def _offsets(tokens: Array, paged: NDArray[np.bool_]) -> Work:
    """Offsets of each token in the KV blocks, which FlashInfer's FA3 reads token by token: a kernel before it
    (block_sparse_indices_to_vector_sparse_offsets), one thread per token."""
    threads, on = 512.0, paged.astype(np.float64)
    return Work(
        tasks=ceil_div(tokens, threads) * on,
        l2_bytes=threads * OFFSET_BYTES,
        activation_bytes=tokens * OFFSET_BYTES * on,
        threads=threads,
        registers_per_thread=32.0,
        launches=on,
    )
