"""Tiled attention with an online softmax: what attention and mla share.

A task is one tile of query rows of one head against its keys and values, walked in steps of ``tile_kv`` tokens,
or a chunk of that walk when the keys are split to fill the GPU. Queries of the heads that share a KV head may be
packed into one tile (FlashInfer always; FlashAttention for short queries).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls
from kernelcast.kernels.dtypes import DType, dtype, matmul_pipe
from kernelcast.kernels.requests import Heads, Requests
from kernelcast.kernels.work import Array, Work, Works, ceil_div

SOFTMAX_FLOPS = 8.0  # per score: scale, running max, subtract, sum, rescale, convert (FlashAttention-2, alg. 1)
LOAD_MARGIN = 1.1  # FlashAttention-3 splits a request that has more than 1.1 times an SM's mean share
# Page table, queries, first keys, write-back: about five trips to DRAM and back, which nothing hides.
TASK_CYCLES = 4000.0
MIN_CHUNK_TOKENS = 256.0  # shorter splits cost more in merging than they win


@dataclass(frozen=True)
class Backend:
    """How one attention library tiles. Query tiles ascend; a call takes the smallest that holds its rows."""

    query_tiles: tuple[int, ...]
    packs_up_to: float  # queries per request up to which heads of one group share a tile
    split_ctas_per_sm: float  # CTAs per SM that splitting the keys aims at
    split_by_load: bool  # split a request that is longer than an SM's share, rather than when SMs are left over
    threads: int
    rows_per_read: float  # query rows that share one read of K and V from shared memory
    stages: int
    step_cycles: float  # load, multiply, softmax, multiply, as far as the next step's does not hide it


# FlashInfer: scheduler.cuh picks 16, 64 or 128 packed rows and splits for two CTAs an SM. FlashAttention 2:
# flash_fwd_launch_template.h; num_splits_heuristic fills the SMs once. FlashAttention 3: tile_size.h, and the dynamic
# splits of flash_prepare_scheduler.cu. cuDNN, TensorRT-LLM and FA4 on Blackwell: two tiles of 128 rows in flight.
# Triton: the serving engines' own kernels.
BACKENDS = {
    "fa2": Backend((64, 128), 1, 1, False, 128, 32, 1, 1500),
    "fa3": Backend((64, 128), 64, 1, True, 384, 64, 2, 600),
    "fa4": Backend((128, 256), 128, 1, True, 384, 128, 2, 300),
    "flashinfer": Backend((16, 64, 128), np.inf, 2, False, 128, 32, 1, 1500),
    "cudnn": Backend((64, 128), 1, 1, False, 384, 64, 2, 600),
    "trtllm": Backend((16, 64, 128), np.inf, 1, True, 384, 64, 2, 300),
    "triton": Backend((16, 64, 128), np.inf, 1, False, 128, 32, 2, 1500),
}


def default_backend(gpu: Gpu) -> str:
    """What serving engines use on this generation when nobody chooses."""
    if gpu.compute_capability.startswith("9."):
        return "fa3"
    return "trtllm" if gpu.compute_capability.startswith("10.") else "fa2"


def floor_sum(count: Array, divisor: Array, step: Array, start: Array) -> Array:
    """Sum of floor((start + step i) / divisor) for i = 0 … count-1, by Euclid's algorithm, for whole columns.

    All whole numbers, start and step not negative. Exact below 2**53.
    """
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


def visible_pairs(queries: Array, keys: Array, causal: Array, window: Array) -> Array:
    """Query-key pairs under the mask."""
    before = keys - queries
    reach = np.where(window > 0, window, keys + 1)
    growing = np.clip(reach - 1 - before, 0, queries)  # queries that still see every older key
    seen = growing * before + growing * (growing + 1) / 2 + (queries - growing) * reach
    return np.where(causal > 0, seen, queries * keys)


def kv_cache_bytes(calls: Calls) -> float:
    """Of one number of the KV cache."""
    return dtype(calls.choice("kv_dtype") or calls.choice("dtype")).act_bytes


def flash_works(gpu: Gpu, calls: Calls, requests: Requests, heads: Heads) -> Works:
    """The attention kernel, and the merge of split keys where there is one."""
    kind, kv_bytes, causal = calls.dtype, kv_cache_bytes(calls), calls["causal"]
    window = calls.given("window", 0.0) if "window" in calls.numbers else np.zeros(calls.count)
    backend_name = calls.choice("backend") or default_backend(gpu)
    backend = BACKENDS[backend_name]
    pipe = matmul_pipe(gpu, kind.name)
    each = requests.each
    plan = _plan(gpu, backend_name, requests, heads, causal, window, calls.given("page_size", 0.0) > 0)
    steps, tasks, tile_q, tile_kv = plan.steps, plan.tasks, plan.tile_q, plan.tile_kv
    mean_steps = steps / tasks
    pairs = requests.total(visible_pairs(requests.queries, requests.keys, each(causal), each(window)))
    reach = np.where(each(window) > 0, requests.queries + each(window) - 1, np.inf)
    seen = np.where(each(causal) > 0, np.minimum(requests.keys, reach), requests.keys)
    scores = mean_steps * tile_q * tile_kv
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
        tensor_dtype=kind.math,
        fma_flops=scores * SOFTMAX_FLOPS + mean_steps * tile_q * heads.v_dim * 2 + (flops if pipe == "fma" else 0.0),
        # exponentials; Blackwell's kernels compute half by polynomial (FA4)
        xu_ops=scores * (0.5 if gpu.compute_capability.startswith("10.") else 1.0),
        smem_bytes=mean_steps * tile_kv * heads.kv_dim * kv_bytes * (1 + np.maximum(1, tile_q / backend.rows_per_read)),
        l2_bytes=mean_steps * tile_kv * heads.kv_dim * kv_bytes
        + tile_q * (heads.qk_dim * kind.act_bytes + heads.v_dim * np.where(plan.splits > 1, 4.0, kind.out_bytes)),
        streamed_bytes=(requests.total(seen) - fresh) * kv_token_bytes,
        activation_bytes=fresh * kv_token_bytes
        + requests.total(requests.queries)
        * heads.queries
        * (heads.qk_dim * kind.act_bytes + heads.v_dim * kind.out_bytes),
        threads=float(backend.threads),
        registers_per_thread=168.0,
        smem_bytes_per_cta=np.minimum(
            (tile_q * heads.qk_dim + backend.stages * tile_kv * heads.kv_dim) * kind.act_bytes, gpu.smem_bytes_per_cta
        ),
        serial_steps=plan.longest,
        step_cycles=backend.step_cycles,
        task_cycles=TASK_CYCLES,
        useful_flops=pairs * heads.queries * 2 * (heads.qk_dim + heads.v_dim),
        tile={"tile_q": tile_q, "tile_kv": tile_kv, "kv_splits": plan.splits},
    )
    return work, _merge(heads, plan, kind)


@dataclass(frozen=True)
class _Plan:
    """Tiles, steps and splits of each call; steps are KV tiles."""

    tile_q: Array
    tile_kv: Array
    steps: Array  # of all tasks
    tasks: Array
    splits: Array  # of the longest request
    longest: Array  # steps of a task
    shortest: Array
    longest_count: Array
    partial_rows: Array  # outputs of split requests, before and
    merged_rows: Array  # after adding them up


def _plan(
    gpu: Gpu, name: str, requests: Requests, heads: Heads, causal: Array, window: Array, paged: NDArray[np.bool_]
) -> _Plan:
    backend, each = BACKENDS[name], requests.each
    shared = heads.queries / heads.kv
    pack = (requests.most(requests.queries) <= backend.packs_up_to) & (shared <= heads.most_packed)
    group = np.where(pack, shared, 1.0)
    lanes = np.where(pack, heads.kv, heads.queries)  # heads, or groups of them, that walk the keys alike
    rows = requests.total(requests.queries) * group / requests.count
    tile_q = _query_tile(backend, rows, heads.qk_dim)
    tile_kv = _kv_tile(name, heads.qk_dim, causal, paged)

    shape = (each(group), each(tile_q), each(tile_kv), each(causal), each(window))
    tiles = ceil_div(requests.queries * each(group), each(tile_q))
    walk, first_walk = _walks(requests, *shape)
    steps = requests.total(kv_steps(requests.queries, requests.keys, *shape)) * lanes
    slots = backend.split_ctas_per_sm * gpu.sm_count
    least = np.ceil(MIN_CHUNK_TOKENS / tile_kv)
    if backend.split_by_load:
        chunk = np.minimum(requests.most(walk), np.maximum(least, np.ceil(LOAD_MARGIN * steps / slots)))
    else:
        chunk = _filling_chunk(requests, tiles, walk, lanes, slots, least)
    splits = ceil_div(walk, each(chunk))
    longest = np.minimum(requests.most(walk), chunk)
    alike = (each(causal) == 0) | (each(window) > 0)  # else only the last tile under the mask walks it all
    full_chunks = np.where(splits > 1, tiles * np.floor(walk / each(chunk)), np.where(alike, tiles, 1.0))
    return _Plan(
        tile_q=tile_q,
        tile_kv=tile_kv,
        steps=steps,
        tasks=requests.total(tiles * splits) * lanes,
        splits=requests.most(splits),
        longest=longest,
        shortest=requests.least(np.where(splits > 1, walk - (splits - 1) * each(chunk), first_walk)),
        longest_count=requests.total(np.where(np.minimum(walk, each(chunk)) >= each(longest), full_chunks, 0.0))
        * lanes,
        partial_rows=requests.total(np.where(splits > 1, requests.queries * splits, 0.0)) * heads.queries,
        merged_rows=requests.total(np.where(splits > 1, requests.queries, 0.0)) * heads.queries,
    )


def _query_tile(backend: Backend, rows: Array, head_dim: Array) -> Array:
    """The smallest tile that holds the mean rows, the largest otherwise; 64 at most for wide heads."""
    *smaller, largest = (float(size) for size in backend.query_tiles)
    tile = np.select([rows <= size for size in smaller], smaller, largest)
    return np.where(head_dim >= 256, np.minimum(tile, 64.0), tile)


def _kv_tile(name: str, head_dim: Array, causal: Array, paged: NDArray[np.bool_]) -> Array:
    if name == "fa3":  # FlashAttention-3's tile_size.h, forward, 16-bit
        return np.where(
            head_dim <= 64, np.where(paged, 96.0, 128.0),
            np.where(head_dim <= 128, np.where(paged, 96.0, np.where(causal > 0, 128.0, 192.0)), 80.0),
        )  # fmt: skip
    if name in ("fa4", "cudnn", "trtllm"):
        return np.where(head_dim <= 128, 128.0, 64.0)
    return np.where(head_dim <= 64, 128.0, 64.0)


def _walks(
    requests: Requests, group: Array, tile_q: Array, tile_kv: Array, causal: Array, window: Array
) -> tuple[Array, Array]:
    """KV tiles of a request's longest task (all, or a window's reach) and of its first (under a mask the fewest)."""
    full = ceil_div(requests.keys, tile_kv)
    queries = np.minimum(ceil_div(tile_q, group), requests.queries)  # of one tile
    reach = np.where(window > 0, np.minimum(window - 1 + queries, requests.keys), requests.keys)
    longest = np.where(causal > 0, np.minimum(full, ceil_div(reach, tile_kv) + (window > 0)), full)
    first = ceil_div(requests.keys - requests.queries + queries, tile_kv)
    return longest, np.where(causal > 0, np.minimum(longest, first), longest)


def _filling_chunk(requests: Requests, tiles: Array, walk: Array, lanes: Array, slots: float, least: Array) -> Array:
    """KV tiles a task may take so that tasks just fill ``slots`` CTAs: the smallest that does, by bisection."""
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


def _merge(heads: Heads, plan: _Plan, kind: DType) -> Work:
    """Add up the partial outputs of split keys: one row of one head a task."""
    parts = np.where(plan.merged_rows > 0, plan.partial_rows / np.maximum(plan.merged_rows, 1), 0.0)
    row_bytes = parts * (heads.v_dim + 1) * 4 + heads.v_dim * kind.out_bytes
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
