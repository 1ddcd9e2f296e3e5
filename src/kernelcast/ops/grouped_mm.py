"""grouped_mm: torch._grouped_mm, one product for each group of rows in one launch, as mixtures of experts call it."""

from __future__ import annotations

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, Kernel, choice, size
from kernelcast.ops.dtypes import matmul_pipe
from kernelcast.ops.grouped import Blocks, active_experts, grouped_gemm, random_blocks
from kernelcast.ops.vector import vector_kernel
from kernelcast.ops.work import Array, Work, Works, ceil_div

# GroupMM.cu, dispatch_bf16_grouped_kernel_on_tile_size: the large tile unless a group has 128 rows or columns or less.
_SMALL, _LARGE = (64.0, 128.0, 128.0), (128.0, 256.0, 64.0)
_SMALL_SIDE = 128.0
_THREADS_A_WARPGROUP = 128.0
_ADDRESS_BYTES = 5 * 8.0  # of a group: three pointers, sizes, strides, which a small kernel computes before


class GroupedMm(Kernel):
    """Rows of ``groups`` by a matrix each (torch._grouped_mm, CUTLASS): an expert's forward and its two gradients.

    ``layout`` as of gemm: tn the forward by a weight [n, k], nn the gradient of the rows, nt that of the weights, whose
    groups cut the inner axis: each group has a product [m, rows] by [rows, n] of its own.
    """

    op = "grouped_mm"
    dtypes = ("bf16", "fp16")
    examples = (
        {"rows": 8192, "groups": 8, "n": 28672, "k": 4096},
        {"rows": 32768, "groups": 128, "n": 2048, "k": 768, "layout": "nt"},
    )

    rows: int = size("rows of all groups: tokens times experts a token")
    groups: int = size("groups (experts), to which rows go at random", high=65536)
    n: int = size("columns of the product")
    k: int = size("inner size; rows of the product where the groups cut the inner axis")
    layout: str | None = choice(
        "tn, nn: groups of rows; nt: groups of the inner axis", ("tn", "nn", "nt"), default=None
    )

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        return super().shape_features(calls, gpu) | {"log_group": np.log2(calls["rows"] / calls["groups"] + 1e-3)}

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        product = _by_inner(calls, gpu) if calls.choice("layout") == "nt" else _by_rows(calls, gpu)
        return _addresses(gpu, calls), product


def _tile(calls: Calls, m: Array, n: Array) -> Blocks:
    small = (m <= _SMALL_SIDE) | (n <= _SMALL_SIDE)
    block_m, block_n, block_k = (np.where(small, a, b) for a, b in zip(_SMALL, _LARGE, strict=True))
    return Blocks(kind=calls.dtype, block_m=block_m, block_n=block_n, block_k=block_k,
                  warps=np.full_like(block_m, 12.0), stages=np.full_like(block_m, 4.0))  # fmt: skip


def _by_rows(calls: Calls, gpu: Gpu) -> Work:
    rows, groups, n, k = (calls[x] for x in ("rows", "groups", "n", "k"))
    tile, one = _tile(calls, np.floor(rows / groups), n), np.ones_like(rows)
    blocks = random_blocks(rows, groups, one, tile.block_m)
    active = active_experts(rows, groups, one)
    return grouped_gemm(gpu, tile, n, k, blocks=np.ceil(blocks - 1e-6), active=active, rows=rows, pairs=rows)


def _by_inner(calls: Calls, gpu: Gpu) -> Work:
    """Every group's product [k, rows of the group] by [rows of the group, n] is written, be its rows none."""
    rows, groups, n, m = (calls[x] for x in ("rows", "groups", "n", "k"))
    tile, inner = _tile(calls, m, n), rows / groups
    depth = random_blocks(rows, groups, np.ones_like(rows), tile.block_k) / groups  # of the mean group
    kind, product = calls.dtype, tile.block_m * tile.block_n
    columns = ceil_div(n, tile.block_n)
    tasks = groups * ceil_div(m, tile.block_m) * columns
    flops, on_tensor = 2 * product * depth * tile.block_k, matmul_pipe(gpu, kind.name) == "tensor"
    read_bytes = (tile.block_m + tile.block_n) * depth * tile.block_k * kind.act_bytes
    return Work(
        tasks=tasks,
        tensor_flops=flops if on_tensor else 0.0,
        tensor_dtype=kind.math,
        fma_flops=0.0 if on_tensor else flops,
        smem_bytes=2 * read_bytes,
        l2_bytes=read_bytes + product * kind.out_bytes,
        activation_bytes=rows * (m + n) * kind.act_bytes + groups * m * n * kind.out_bytes,
        threads=tile.threads,
        registers_per_thread=168.0,
        smem_bytes_per_cta=np.minimum(tile.stages * tile.stage_bytes, gpu.smem_bytes_per_cta),
        serial_steps=np.maximum(1.0, depth),
        useful_flops=2 * groups * m * n * inner,
        tile={"block_m": tile.block_m, "block_n": tile.block_n, "block_k": tile.block_k},
    )


def _addresses(gpu: Gpu, calls: Calls) -> Work:
    """Where each group lies, for the product that follows (prepare_grouped_gemm_data): one CTA, a thread a group."""
    groups = calls["groups"]
    return vector_kernel(gpu, tasks=np.ones_like(groups), threads=_THREADS_A_WARPGROUP,
                         moved_bytes=groups * _ADDRESS_BYTES)  # fmt: skip
