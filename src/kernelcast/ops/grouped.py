"""Grouped GEMMs: Triton's config as parameters, random routing, and the product that moe, moe_gemm and grouped_mm
share.

A random router sends each token to ``topk`` different experts, so an expert's rows are binomial: tokens draws of chance
topk / experts. With few tokens many experts get none (16 tokens, 8 of 128 experts: 82 are active), which sets how many
weights are read; with many, uneven loads add about half a block of padding per expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, ConfigurationColumns, Conflicts, Kernel, choice, more_than, size
from kernelcast.ops.dtypes import DType, matmul_pipe
from kernelcast.ops.gemm import MMA_SYNC, dequantise_flops, matrix_unit
from kernelcast.ops.vector import vector_kernel
from kernelcast.ops.work import Array, Number, Work, Works, ceil_div

TRITON_CONFIG = ("block_m", "block_n", "block_k", "group_m", "warps", "stages")
_LEVELS = 24  # experts are stood for by this many load levels: medians of equal slices of the normal distribution
_NORMAL_LEVELS = [NormalDist().inv_cdf((at + 0.5) / _LEVELS) for at in range(_LEVELS)]


class GroupedKernel(Kernel):
    """A family of ``tokens`` routed to ``topk`` of ``experts``, with an optional Triton config."""

    dtypes: ClassVar[tuple[str, ...]] = ("fp16", "bf16", "fp8", "fp8_block", "int8", "nvfp4", "int4")
    trailing_parameters = TRITON_CONFIG

    block_m: int | None = size("Triton BLOCK_SIZE_M, default: selected", default=None, low=8, high=1024)
    block_n: int | None = size("Triton BLOCK_SIZE_N, default: selected", default=None, low=8, high=1024)
    block_k: int | None = size("Triton BLOCK_SIZE_K, default: selected", default=None, low=8, high=1024)
    group_m: int | None = size("Triton GROUP_SIZE_M, default: selected", default=None, high=1024)
    warps: int | None = size("Triton num_warps, default: selected", default=None, high=32)
    stages: int | None = size("Triton num_stages, default: selected", default=None, high=16)

    @classmethod
    def configuration(cls, calls: Calls) -> ConfigurationColumns:
        chosen = np.all([np.isnan(calls[name]) for name in TRITON_CONFIG], axis=0)
        return {**calls.choices, "config": np.where(chosen, "chosen", "given").astype(object)}

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        return more_than(calls.numbers, "topk", "experts")


def active_experts(tokens: Array, experts: Array, topk: Array) -> Array:
    """Experts with any token, on average: experts x (1 - (1 - topk / experts)^tokens)."""
    return experts * -np.expm1(tokens * np.log1p(-np.minimum(topk / experts, 1 - 1e-12)))


def random_blocks(tokens: Array, experts: Array, topk: Array, block_m: Array) -> Array:
    """Row blocks over all experts on average, each expert's rows padded to ``block_m``."""
    chance = topk / experts
    mean, sigma = tokens * chance, np.sqrt(tokens * chance * (1 - chance))
    active = active_experts(tokens, experts, topk)
    total = np.zeros(1)
    for level in _NORMAL_LEVELS:
        load = np.clip(np.rint(mean + sigma * level), 0, tokens)
        # a load of one block or less is a block where there is any row at all
        total = total + np.where(load > block_m, np.ceil(load / block_m), active / experts)
    return np.maximum(active, experts * total / _LEVELS)


@dataclass(frozen=True, kw_only=True)
class TritonBlocks:
    """A Triton config for each call, or per candidate and call."""

    dtype: DType
    block_m: Array
    block_n: Array
    block_k: Array
    warps: Array
    stages: Array
    wide: Number = 1.0  # 1: wgmma or tcgen05, 0: mma.sync

    @property
    def stage_bytes(self) -> Array:
        return (self.block_m * self.dtype.act_bytes + self.block_n * self.dtype.weight_bytes) * self.block_k

    @property
    def threads(self) -> Array:
        return self.warps * 32


def grouped_gemm(
    gpu: Gpu, tile: TritonBlocks, n: Array, k: Array, *, blocks: Array, active: Array, rows: Array, pairs: Array
) -> Work:
    """One product per expert in one launch: its rows by its k x n weights.

    ``blocks`` of rows over all experts, of which ``active`` have any; ``rows`` go in, ``pairs`` come out.
    """
    dtype = tile.dtype
    on_tensor = matmul_pipe(gpu, dtype.name) == "tensor"
    block_m, block_n = tile.block_m, tile.block_n
    tasks, depth = blocks * ceil_div(n, block_n), ceil_div(k, tile.block_k)
    a_bytes = block_m * depth * tile.block_k * dtype.act_bytes
    b_bytes = block_n * depth * tile.block_k * dtype.weight_bytes
    flops = 2 * block_m * block_n * depth * tile.block_k
    return Work(
        tasks=tasks,
        tensor_flops=flops if on_tensor else 0.0,
        tensor_dtype=dtype.math,
        fma_flops=dequantise_flops(dtype, block_m, block_n, depth * tile.block_k) + (0.0 if on_tensor else flops),
        smem_bytes=np.where(
            np.asarray(tile.wide) > 0,
            matrix_unit(gpu).smem_bytes(a_bytes, b_bytes, block_m, block_n),
            MMA_SYNC.smem_bytes(a_bytes, b_bytes, block_m, block_n),
        ),
        l2_bytes=a_bytes + b_bytes + block_m * block_n * dtype.out_bytes,
        streamed_bytes=active * n * k * dtype.weight_bytes,
        activation_bytes=rows * k * dtype.act_bytes + pairs * n * dtype.out_bytes,
        threads=tile.threads,
        registers_per_thread=np.minimum(255, 40 + block_m * block_n / tile.threads),
        smem_bytes_per_cta=np.minimum(tile.stages * tile.stage_bytes, gpu.smem_bytes_per_cta),
        serial_steps=depth,
        useful_flops=2 * pairs * n * k,
        tile={"block_m": block_m, "block_n": block_n, "block_k": tile.block_k, "row_blocks": blocks},
    )


# GroupMM.cu, dispatch_bf16_grouped_kernel_on_tile_size: the large tile unless a group has 128 rows or columns or less.
_SMALL, _LARGE = (64.0, 128.0, 128.0), (128.0, 256.0, 64.0)
_SMALL_SIDE = 128.0
_THREADS_A_WARPGROUP = 128.0
_ADDRESS_BYTES = 5 * 8.0  # of a group: three pointers, sizes, strides, which a small kernel computes before


class GroupedMm(Kernel):
    """One product per group of rows in one launch (torch._grouped_mm, CUTLASS): an expert's forward and its two
    gradients.

    ``layout`` as for gemm: tn the forward by a weight [n, k], nn the gradient of the rows, nt that of the weights,
    whose groups split the inner axis: each group has a product [m, rows] by [rows, n].
    """

    op = "grouped_mm"
    dtypes = ("bf16", "fp16")
    examples = (
        {"rows": 8192, "groups": 8, "n": 28672, "k": 4096},
        {"rows": 32768, "groups": 128, "n": 2048, "k": 768, "layout": "nt"},
    )

    rows: int = size("rows of all groups: tokens times experts per token")
    groups: int = size("groups (experts), with rows routed at random", high=65536)
    n: int = size("columns of the product")
    k: int = size("inner dimension; rows of the product where groups split the inner axis")
    layout: str | None = choice(
        "tn, nn: groups of rows; nt: groups split the inner axis", ("tn", "nn", "nt"), default=None
    )

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        return super().shape_features(calls, gpu) | {"log_group": np.log2(calls["rows"] / calls["groups"] + 1e-3)}

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        product = _by_inner(calls, gpu) if calls.choice("layout") == "nt" else _by_rows(calls, gpu)
        return _addresses(gpu, calls), product


def _tile(calls: Calls, m: Array, n: Array) -> TritonBlocks:
    small = (m <= _SMALL_SIDE) | (n <= _SMALL_SIDE)
    block_m, block_n, block_k = (np.where(small, a, b) for a, b in zip(_SMALL, _LARGE, strict=True))
    return TritonBlocks(dtype=calls.dtype, block_m=block_m, block_n=block_n, block_k=block_k,
                  warps=np.full_like(block_m, 12.0), stages=np.full_like(block_m, 4.0))  # fmt: skip


def _by_rows(calls: Calls, gpu: Gpu) -> Work:
    rows, groups, n, k = (calls[x] for x in ("rows", "groups", "n", "k"))
    tile, ones = _tile(calls, np.floor(rows / groups), n), np.ones_like(rows)
    blocks = random_blocks(rows, groups, ones, tile.block_m)
    active = active_experts(rows, groups, ones)
    return grouped_gemm(gpu, tile, n, k, blocks=np.ceil(blocks - 1e-6), active=active, rows=rows, pairs=rows)


def _by_inner(calls: Calls, gpu: Gpu) -> Work:
    """Every group's product [k, rows of the group] by [rows of the group, n] is written, even without rows."""
    rows, groups, n, m = (calls[x] for x in ("rows", "groups", "n", "k"))
    tile, inner = _tile(calls, m, n), rows / groups
    depth = random_blocks(rows, groups, np.ones_like(rows), tile.block_k) / groups  # of the mean group
    dtype, product = calls.dtype, tile.block_m * tile.block_n
    columns = ceil_div(n, tile.block_n)
    tasks = groups * ceil_div(m, tile.block_m) * columns
    flops, on_tensor = 2 * product * depth * tile.block_k, matmul_pipe(gpu, dtype.name) == "tensor"
    read_bytes = (tile.block_m + tile.block_n) * depth * tile.block_k * dtype.act_bytes
    return Work(
        tasks=tasks,
        tensor_flops=flops if on_tensor else 0.0,
        tensor_dtype=dtype.math,
        fma_flops=0.0 if on_tensor else flops,
        smem_bytes=2 * read_bytes,
        l2_bytes=read_bytes + product * dtype.out_bytes,
        activation_bytes=rows * (m + n) * dtype.act_bytes + groups * m * n * dtype.out_bytes,
        threads=tile.threads,
        registers_per_thread=168.0,
        smem_bytes_per_cta=np.minimum(tile.stages * tile.stage_bytes, gpu.smem_bytes_per_cta),
        serial_steps=np.maximum(1.0, depth),
        useful_flops=2 * groups * m * n * inner,
        tile={"block_m": tile.block_m, "block_n": tile.block_n, "block_k": tile.block_k},
    )


def _addresses(gpu: Gpu, calls: Calls) -> Work:
    """Pointers of each group for the product that follows (prepare_grouped_gemm_data): one CTA."""
    groups = calls["groups"]
    return vector_kernel(gpu, tasks=np.ones_like(groups), threads=_THREADS_A_WARPGROUP,
                         moved_bytes=groups * _ADDRESS_BYTES)  # fmt: skip
