"""A fused mixture-of-experts layer whose GEMM is ``swift``: the product's ``plain`` one with what its diagnosis told.

Two grouped GEMMs make a layer: the first gives gate and up of each pair, the second brings silu(gate) * up back to the
model's width; the weighted sum over a token's experts ends it. The swift one differs in four things:

- *a tile of few tokens is transposed.* Hopper's wide matrix instruction wants 64 rows; with 16 or 32 rows of tokens
  the compiler falls back to the narrow one. Weights as rows and tokens as columns keep the wide one.
- *weights come by bulk copies* (TMA), which need no registers for addresses.
- *silu(gate) * up is done where the sums are*: gate and up alternate in the rows of the first weights, so a pair lies
  in one thread. The plain one writes both, and a kernel of its own reads them again.
- *no masks in the loop*, where the inner dimension is whole blocks; padding rows read row 0 and are not stored.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernelcast.collect import fused_moe
from kernelcast.collect.fused_moe import ConfigBench, SortedPairs, tile_of
from kernelcast.collect.timing import captured, replayed_s, stream
from kernelcast.tune.configs import Config


@triton.jit(do_not_specialize=["pairs", "row_blocks", "topk", "group_m"])
def _swift_gemm(  # type: ignore[no-untyped-def]
    a, weights, c, pair_of_row, expert_of_block, padded_rows, pairs, row_blocks, n, k, topk, group_m,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WHOLE_K: tl.constexpr, GATED: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    row_block, column_block = tile_of(tl.program_id(0), row_blocks, tl.cdiv(n, BLOCK_N), group_m)
    if row_block * BLOCK_M >= tl.load(padded_rows):
        return
    pair = tl.load(pair_of_row + row_block * BLOCK_M + tl.arange(0, BLOCK_M))
    real = pair < pairs
    expert = tl.load(expert_of_block + row_block)
    depth = tl.arange(0, BLOCK_K)
    token = tl.where(real, pair, 0) // topk
    a_at = a + token.to(tl.int64)[:, None] * k + depth[None, :]
    first_row = expert * n + column_block * BLOCK_N
    if TURNED:
        total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(tl.cdiv(k, BLOCK_K)):
        w = weights.load([first_row, step * BLOCK_K])
        if WHOLE_K:
            x = tl.load(a_at)
        else:
            x = tl.load(a_at, mask=depth[None, :] < k - step * BLOCK_K, other=0.0)
        if TURNED:
            total = tl.dot(w, x.T, total)
        else:
            total = tl.dot(x, w.T, total)
        a_at += BLOCK_K
    if TURNED:
        total = total.T
    if GATED:
        gate, up = tl.split(tl.reshape(total, (BLOCK_M, BLOCK_N // 2, 2)))
        result = gate * tl.sigmoid(gate) * up
        width = n // 2
        columns = column_block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        result = total
        width = n
        columns = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    out = c + pair.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(out, result.to(c.dtype.element_ty), mask=real[:, None] & (columns[None, :] < width))


def grouped_gemm(
    kernel: str, a: Tensor, b: Tensor, c: Tensor, rows: SortedPairs, topk: int, config: Config, gated: bool = False
) -> Any:
    """c[pair] = a[pair // topk] b[its expert]^T; b [experts, n, k], all contiguous. ``kernel``: plain or swift.

    ``gated``, of the swift one alone: rows of b alternate gate and up, and c has silu(gate) * up, half as wide.
    """
    if kernel == "plain":
        return fused_moe.grouped_gemm(a, b, c, rows, topk, config)
    experts, n, k = b.shape
    grid = (rows.row_blocks * triton.cdiv(n, config.block_n),)
    weights = TensorDescriptor.from_tensor(b.view(experts * n, k), [config.block_n, config.block_k])
    return _swift_gemm[grid](
        a, weights, c, *fused_moe.launch_arguments(rows, n, k, topk, config), WHOLE_K=k % config.block_k == 0,
        GATED=gated, TURNED=config.block_m < 64, **fused_moe.block_sizes(config),
    )  # fmt: skip


def alternating(gate_and_up: Tensor) -> Tensor:
    """[experts, gate rows then up rows, k] -> rows alternate: done once, when weights are loaded."""
    experts, rows, k = gate_and_up.shape
    return gate_and_up.view(experts, 2, rows // 2, k).transpose(1, 2).reshape(experts, rows, k).contiguous()


@triton.jit
def _silu_mul(x, y, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * 2 * width + at, mask=at < width, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(y + row * width + at, (gate * tl.sigmoid(gate) * up).to(y.dtype.element_ty), mask=at < width)


@triton.jit
def _add_up(x, share, y, width, TOPK: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in tl.static_range(TOPK):
        pair = token * TOPK + i
        total += tl.load(x + pair * width + at, mask=at < width, other=0.0).to(tl.float32) * tl.load(share + pair)
    tl.store(y + token * width + at, total.to(y.dtype.element_ty), mask=at < width)


def silu_mul(x: Tensor, y: Tensor) -> None:
    rows, width = y.shape
    block = min(1024, triton.next_power_of_2(width))
    _silu_mul[(rows, triton.cdiv(width, block))](x, y, width, BLOCK=block)


def add_up(x: Tensor, share: Tensor, y: Tensor) -> None:
    """y[token] = sum over its pairs of share * x[pair]."""
    tokens, width = y.shape
    block = min(1024, triton.next_power_of_2(width))
    _add_up[(tokens, triton.cdiv(width, block))](x, share, y, width, TOPK=x.shape[0] // tokens, BLOCK=block)


@dataclass(frozen=True)
class Buffers:
    """What a layer writes on its way, for ``tokens`` tokens."""

    both: Tensor  # gate and up
    inner: Tensor
    pairs: Tensor
    out: Tensor

    @classmethod
    def of(cls, x: Tensor, topk: int, inter: int) -> Buffers:
        tokens, hidden = x.shape
        sizes = ((tokens * topk, 2 * inter), (tokens * topk, inter), (tokens * topk, hidden), (tokens, hidden))
        return cls(*(torch.empty(shape, dtype=x.dtype, device=x.device) for shape in sizes))


def layer(
    kernel: str, x: Tensor, w13: Tensor, w2: Tensor, expert_of_pair: Tensor, share: Tensor, topk: int, config: Config,
    at: Buffers,
) -> Tensor:  # fmt: skip
    """``w13`` for the swift kernel as ``alternating`` gives it."""
    rows = fused_moe.sort_pairs(expert_of_pair, w13.shape[0], config.block_m)
    if kernel == "plain":
        grouped_gemm(kernel, x, w13, at.both, rows, topk, config)
        silu_mul(at.both, at.inner)
    else:
        grouped_gemm(kernel, x, w13, at.inner, rows, topk, config, gated=True)
    grouped_gemm(kernel, at.inner, w2, at.pairs, rows, 1, config)
    add_up(at.pairs, share, at.out)
    return at.out


def reference(x: Tensor, w13: Tensor, w2: Tensor, expert_of_pair: Tensor, share: Tensor, topk: int) -> Tensor:
    """The layer in float32, expert by expert; ``w13`` has gate rows, then up rows."""
    tokens = x.shape[0]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    token_of_pair = torch.arange(tokens * topk, device=x.device) // topk
    for expert in range(w13.shape[0]):
        pairs = torch.nonzero(expert_of_pair == expert).flatten()
        gate, up = (x[token_of_pair[pairs]].float() @ w13[expert].float().T).chunk(2, dim=1)
        rows = (torch.nn.functional.silu(gate) * up) @ w2[expert].float().T
        out.index_add_(0, token_of_pair[pairs], rows * share[pairs][:, None])
    return out


def layer_s(bench: ConfigBench, c: Config, kernel: str = "plain", replays: int = 12) -> tuple[float, float, float]:
    """Median, least and most seconds of the whole layer, sorting to sum, in a CUDA graph."""
    buffers = Buffers.of(bench.x, bench.topk, bench.shape.inter)

    def once() -> None:
        for chosen, share in zip(bench.chosen, bench.share, strict=True):
            layer(kernel, bench.x, bench.w13, bench.w2, chosen, share, bench.topk, c, buffers)

    with torch.cuda.stream(stream()):
        once()
        torch.cuda.synchronize()
        times = [seconds / bench.rounds for seconds in replayed_s(captured([once]), replays)]
    return statistics.median(times), min(times), max(times)
