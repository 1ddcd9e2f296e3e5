"""Triton kernels of this project and how they are launched: a grouped GEMM of a mixture-of-experts layer with its block
sizes as parameters, and quantisation of activations to fp8.

The grouped GEMM computes C[p] = A[p // topk] B[expert of p]^T for each (token, expert) pair p. Pairs are sorted by
expert and each expert's are padded to a multiple of BLOCK_M, so that a program has rows of one expert alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernelcast.collect.pool import TensorSpec, specs
from kernelcast.collect.runners import NotMeasurableError, Recipe, Runner
from kernelcast.ops.grouped import TRITON_CONFIG


@triton.jit
def _moe_gemm(  # type: ignore[no-untyped-def]
    a, b, c, pair_of_row, expert_of_block, pairs, row_blocks, n, k, topk,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    # programs in groups of GROUP_M row blocks walk the columns together, so that they share B in L2
    program = tl.program_id(0)
    column_blocks = tl.cdiv(n, BLOCK_N)
    in_group = GROUP_M * column_blocks
    group = program // in_group
    first = group * GROUP_M
    height = min(row_blocks - first, GROUP_M)
    row_block = first + (program % in_group) % height
    column_block = (program % in_group) // height

    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    pair = tl.load(pair_of_row + rows)
    real = pair < pairs
    expert = tl.load(expert_of_block + row_block).to(tl.int64)
    columns = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)

    a_at = a + (pair // topk).to(tl.int64)[:, None] * k + depth[None, :]
    b_at = b + expert * n * k + columns.to(tl.int64)[None, :] * k + depth[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(tl.cdiv(k, BLOCK_K)):
        left = k - step * BLOCK_K
        x = tl.load(a_at, mask=real[:, None] & (depth[None, :] < left), other=0.0)
        w = tl.load(b_at, mask=(columns[None, :] < n) & (depth[:, None] < left), other=0.0)
        total = tl.dot(x, w, total)
        a_at += BLOCK_K
        b_at += BLOCK_K
    out = c + pair.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(out, total.to(c.dtype.element_ty), mask=real[:, None] & (columns[None, :] < n))


@dataclass(frozen=True)
class PairRouting:
    """Pairs sorted by expert, each expert's padded to whole blocks."""

    pair_of_row: Tensor
    expert_of_block: Tensor
    pairs: int
    topk: int
    block_m: int

    @classmethod
    def of(cls, expert_of_pair: Tensor, experts: int, topk: int, block_m: int) -> PairRouting:
        pairs = expert_of_pair.numel()
        order = torch.argsort(expert_of_pair, stable=True)
        load = torch.bincount(expert_of_pair, minlength=experts)
        blocks = (load + block_m - 1) // block_m
        ends = torch.cumsum(blocks * block_m, 0)
        starts = ends - blocks * block_m
        before = torch.cumsum(load, 0) - load
        sorted_expert = expert_of_pair[order]
        position = starts[sorted_expert] + torch.arange(pairs, device=order.device) - before[sorted_expert]
        rows = torch.full((int(ends[-1]),), pairs, dtype=torch.int32, device=order.device)
        rows[position] = order.to(torch.int32)
        owner = torch.repeat_interleave(torch.arange(experts, device=order.device), blocks).to(torch.int32)
        return cls(rows, owner, pairs, topk, block_m)


def moe_gemm(
    a: Tensor, b: Tensor, c: Tensor, routing: PairRouting, *, block_n: int, block_k: int, group_m: int, warps: int,
    stages: int,
) -> Any:  # fmt: skip
    """a [tokens, k], b [experts, n, k], c [pairs, n], all contiguous."""
    _, n, k = b.shape
    row_blocks = routing.expert_of_block.numel()
    return _moe_gemm[(row_blocks * triton.cdiv(n, block_n),)](
        a, b, c, routing.pair_of_row, routing.expert_of_block, routing.pairs, row_blocks, n, k, routing.topk,
        BLOCK_M=routing.block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=group_m, num_warps=warps, num_stages=stages,
    )  # fmt: skip


@triton.jit
def _quantise(x, y, scales, cols, LARGEST: tl.constexpr, WIDTH: tl.constexpr, GIVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < cols
    values = tl.load(x + row * cols + at, mask=inside, other=0.0).to(tl.float32)
    if GIVEN:
        scale = tl.load(scales)
    else:
        scale = tl.maximum(tl.max(tl.abs(values), axis=0), 1e-10) / LARGEST
        tl.store(scales + row, scale)
    narrow = tl.clamp(values / scale, -LARGEST, LARGEST)
    tl.store(y + row * cols + at, narrow.to(y.dtype.element_ty), mask=inside)


FP8_LARGEST = 448.0  # of e4m3


def quantise(x: Tensor, y: Tensor, scales: Tensor, given: bool) -> Any:
    """x [rows, cols] to fp8, a scale a row (a block of 128, when x is viewed so), or one given scale."""
    rows, cols = x.shape
    width = triton.next_power_of_2(cols)
    return _quantise[(rows,)](
        x, y, scales, cols, LARGEST=FP8_LARGEST, WIDTH=width, GIVEN=given, num_warps=max(1, min(16, width // 512))
    )


_BLOCK = 128  # columns that share a scale


def grouped(call: Any) -> Recipe:
    blocks = {name: getattr(call, name) for name in TRITON_CONFIG}
    missing = [name for name, value in blocks.items() if value is None]
    if missing:
        raise NotMeasurableError(f"moe_gemm is measured with its block sizes given; missing {', '.join(missing)}")
    pairs = call.tokens * call.topk
    experts = torch.arange(pairs, device="cuda") % call.experts  # every expert gets the same, or one more
    routing = PairRouting.of(experts, call.experts, call.topk, blocks.pop("block_m"))
    narrow = specs(call.dtype, (call.tokens, call.k), (call.experts, call.n, call.k))
    out = TensorSpec((pairs, call.n), torch.bfloat16, "written")
    return Recipe((*narrow, out), lambda a, b, c: partial(moe_gemm, a, b, c, routing, **blocks), "kernelcast_moe")


def quantize(call: Any) -> Recipe:
    if call.to != "fp8":
        raise NotMeasurableError(f"quantize is measured to fp8, not {call.to}")
    given, shape = call.scale == "static", (call.rows, call.cols)
    if call.scale == "block":
        if call.cols % _BLOCK:
            raise NotMeasurableError(f"block scales need cols in multiples of {_BLOCK}, not {call.cols}")
        shape = (call.rows * call.cols // _BLOCK, _BLOCK)
    scales = torch.ones(shape[0], device="cuda")
    tensors = (*specs(call.dtype, shape), *specs("fp8", shape, use="written"))
    return Recipe(tensors, lambda x, y: partial(quantise, x, y, scales, given), "kernelcast_quantise")


RUNNERS: Mapping[str, Runner] = {"moe_gemm": grouped, "quantize": quantize}
