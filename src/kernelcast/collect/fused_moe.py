"""A fused mixture-of-experts layer in Triton, twice: ``plain``, built like the kernels that serving engines ship, and
``swift``, with what diagnosis of the plain one told to change.

Both sort (token, expert) pairs by expert, pad each expert's to whole blocks, and multiply block by block. Two grouped
GEMMs make a layer: the first gives gate and up of each pair, the second brings silu(gate) * up back to the model's
width; the weighted sum over a token's experts ends it. The swift one differs in four things:

- *a tile of few tokens is turned round.* Hopper's wide matrix instruction wants 64 rows; with 16 or 32 rows of tokens
  the compiler falls back to the narrow one. Weights as rows and tokens as columns keep the wide one.
- *weights come by bulk copies* (TMA), which need no registers for addresses.
- *silu(gate) * up is done where the sums are*: gate and up alternate in the rows of the first weights, so a pair lies
  in one thread. The plain one writes both, and a kernel of its own reads them again.
- *no masks in the loop*, where the inner dimension is whole blocks; padding rows read row 0 and are not stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernelcast.tune.configs import Config

_CHUNK = 1024  # pairs that the sorting kernels look at in one go


# ---------------------------------------------------------------------------------------------- sorting pairs by expert
@triton.jit(do_not_specialize=["pairs"])
def _count(expert_of_pair, counts, pairs, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    expert = tl.program_id(0)
    found = tl.zeros((CHUNK,), dtype=tl.int32)
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        found += (tl.load(expert_of_pair + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found))


@triton.jit(do_not_specialize=["pairs", "block_m"])
def _place(  # type: ignore[no-untyped-def]
    expert_of_pair, counts, pair_of_row, expert_of_block, padded_rows, pairs, experts, block_m,
    CHUNK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    every = tl.arange(0, EXPERTS)
    count = tl.load(counts + every, mask=every < experts, other=0)
    padded = (count + block_m - 1) // block_m * block_m
    first = tl.sum(tl.where(every < expert, padded, 0))
    own = tl.sum(tl.where(every == expert, count, 0))
    own_padded = tl.sum(tl.where(every == expert, padded, 0))
    seen = 0
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        hit = (tl.load(expert_of_pair + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
        tl.store(pair_of_row + first + seen + tl.cumsum(hit, 0) - 1, pair, mask=hit > 0)
        seen += tl.sum(hit)
    for start in range(own, own_padded, CHUNK):
        row = start + tl.arange(0, CHUNK)
        tl.store(pair_of_row + first + row, pairs, mask=row < own_padded)
    for start in range(0, own_padded // block_m, CHUNK):
        block = start + tl.arange(0, CHUNK)
        tl.store(expert_of_block + first // block_m + block, expert, mask=block < own_padded // block_m)
    if expert == experts - 1:
        tl.store(padded_rows, first + own_padded)


@dataclass(frozen=True)
class Sorted:
    """Pairs by expert. The host does not know how many rows there are (``padded_rows`` is on the GPU), so grids are
    made for the most there can be, and programs past the end leave at once: engines do the same."""

    pair_of_row: Tensor
    expert_of_block: Tensor
    padded_rows: Tensor
    pairs: int

    @property
    def row_blocks(self) -> int:
        return self.expert_of_block.numel()


def sort_pairs(expert_of_pair: Tensor, experts: int, block_m: int) -> Sorted:
    """``expert_of_pair``: [tokens * topk] int32."""
    pairs, device = expert_of_pair.numel(), expert_of_pair.device
    most = min(pairs * block_m, pairs + experts * (block_m - 1))
    blocks = triton.cdiv(most, block_m)
    whole: dict[str, Any] = {"dtype": torch.int32, "device": device}
    counts = torch.empty(experts, **whole)
    rows, owners = torch.empty(blocks * block_m, **whole), torch.empty(blocks, **whole)
    padded_rows = torch.empty(1, **whole)
    _count[(experts,)](expert_of_pair, counts, pairs, CHUNK=_CHUNK)
    _place[(experts,)](
        expert_of_pair, counts, rows, owners, padded_rows, pairs, experts, block_m, CHUNK=_CHUNK,
        EXPERTS=triton.next_power_of_2(experts),
    )  # fmt: skip
    return Sorted(rows, owners, padded_rows, pairs)


# -------------------------------------------------------------------------------------------------------- grouped GEMMs
@triton.jit
def _tile_of(program, row_blocks, column_blocks, group_m):  # type: ignore[no-untyped-def]
    in_group = group_m * column_blocks
    first = program // in_group * group_m
    height = min(row_blocks - first, group_m)
    return first + program % in_group % height, program % in_group // height


@triton.jit(do_not_specialize=["pairs", "row_blocks", "topk", "group_m"])
def _plain_gemm(  # type: ignore[no-untyped-def]
    a, b, c, pair_of_row, expert_of_block, padded_rows, pairs, row_blocks, n, k, topk, group_m,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row_block, column_block = _tile_of(tl.program_id(0), row_blocks, tl.cdiv(n, BLOCK_N), group_m)
    if row_block * BLOCK_M >= tl.load(padded_rows):
        return
    pair = tl.load(pair_of_row + row_block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    real = pair < pairs
    expert = tl.load(expert_of_block + row_block).to(tl.int64)
    depth = tl.arange(0, BLOCK_K)
    columns = (column_block * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)) % n
    a_at = a + (pair // topk)[:, None] * k + depth[None, :]
    b_at = b + expert * n * k + columns[None, :] * k + depth[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(tl.cdiv(k, BLOCK_K)):
        inside = depth < k - step * BLOCK_K
        x = tl.load(a_at, mask=real[:, None] & inside[None, :], other=0.0)
        w = tl.load(b_at, mask=inside[:, None], other=0.0)
        total = tl.dot(x, w, total)
        a_at += BLOCK_K
        b_at += BLOCK_K
    columns_out = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    out = c + pair[:, None] * n + columns_out[None, :]
    tl.store(out, total.to(c.dtype.element_ty), mask=real[:, None] & (columns_out[None, :] < n))


@triton.jit(do_not_specialize=["pairs", "row_blocks", "topk", "group_m"])
def _swift_gemm(  # type: ignore[no-untyped-def]
    a, weights, c, pair_of_row, expert_of_block, padded_rows, pairs, row_blocks, n, k, topk, group_m,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WHOLE_K: tl.constexpr, GATED: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    row_block, column_block = _tile_of(tl.program_id(0), row_blocks, tl.cdiv(n, BLOCK_N), group_m)
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
    kernel: str, a: Tensor, b: Tensor, c: Tensor, rows: Sorted, topk: int, config: Config, gated: bool = False
) -> Any:
    """c[pair] = a[pair // topk] b[its expert]^T; b [experts, n, k], all contiguous. ``kernel``: plain or swift.

    ``gated``, of the swift one alone: rows of b alternate gate and up, and c has silu(gate) * up, half as wide.
    """
    experts, n, k = b.shape
    grid = (rows.row_blocks * triton.cdiv(n, config.block_n),)
    at = (rows.pair_of_row, rows.expert_of_block, rows.padded_rows, rows.pairs, rows.row_blocks, n, k, topk,
          config.group_m)  # fmt: skip
    how = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "num_warps": config.warps,
           "num_stages": config.stages}  # fmt: skip
    if kernel == "plain":
        return _plain_gemm[grid](a, b, c, *at, **how)
    weights = TensorDescriptor.from_tensor(b.view(experts * n, k), [config.block_n, config.block_k])
    return _swift_gemm[grid](
        a, weights, c, *at, WHOLE_K=k % config.block_k == 0, GATED=gated, TURNED=config.block_m < 64, **how
    )


def alternating(gate_and_up: Tensor) -> Tensor:
    """[experts, gate rows then up rows, k] -> rows alternate: done once, when weights are loaded."""
    experts, rows, k = gate_and_up.shape
    return gate_and_up.view(experts, 2, rows // 2, k).transpose(1, 2).reshape(experts, rows, k).contiguous()


# ------------------------------------------------------------------------------------------------------ what is between
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


# ------------------------------------------------------------------------------------------------------------ the layer
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
    rows = sort_pairs(expert_of_pair, w13.shape[0], config.block_m)
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
