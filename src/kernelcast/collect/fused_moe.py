"""A fused mixture-of-experts GEMM in Triton, as serving engines have it, and times of its configs.

(token, expert) pairs are sorted by expert, each expert's padded to whole blocks, and multiplied block by block. Several
routings of a small batch, and several copies of a GEMM's weights, follow one another, so that weights come from DRAM.
The host runs ahead of the GPU, so that no kernel waits for its launch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernelcast.tune.configs import Config, GemmProblem, MoeProblem, Problem, variant

_CHUNK = 1024  # pairs that the sorting kernels process at once
_TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LAUNCH_S = 60e-6  # of the host, about
_LEAST_LEAD_S, _MOST_LEAD_S = 3e-4, 0.06
_SLEEP_HZ = 1.9e9  # torch.cuda._sleep counts clocks
_PASSES = 7
_RIGHT = 1e-2  # relative error against float32 that is still rounding


@triton.jit(do_not_specialize=["pairs"])
def _count(expert_of_pair, counts, pairs, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    expert = tl.program_id(0)
    matches = tl.zeros((CHUNK,), dtype=tl.int32)
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        matches += (tl.load(expert_of_pair + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(matches))


@triton.jit(do_not_specialize=["pairs", "block_m"])
def _sort(  # type: ignore[no-untyped-def]
    expert_of_pair, counts, pair_of_row, expert_of_block, padded_rows, pairs, experts, block_m,
    CHUNK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    every = tl.arange(0, EXPERTS)
    count = tl.load(counts + every, mask=every < experts, other=0)
    padded = (count + block_m - 1) // block_m * block_m
    first = tl.sum(tl.where(every < expert, padded, 0))
    rows = tl.sum(tl.where(every == expert, count, 0))
    padded_count = tl.sum(tl.where(every == expert, padded, 0))
    seen = 0
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        hit = (tl.load(expert_of_pair + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
        tl.store(pair_of_row + first + seen + tl.cumsum(hit, 0) - 1, pair, mask=hit > 0)
        seen += tl.sum(hit)
    for start in range(rows, padded_count, CHUNK):
        row = start + tl.arange(0, CHUNK)
        tl.store(pair_of_row + first + row, pairs, mask=row < padded_count)
    for start in range(0, padded_count // block_m, CHUNK):
        block = start + tl.arange(0, CHUNK)
        tl.store(expert_of_block + first // block_m + block, expert, mask=block < padded_count // block_m)
    if expert == experts - 1:
        tl.store(padded_rows, first + padded_count)


@dataclass(frozen=True)
class SortedPairs:
    """Pairs by expert. The host does not know how many rows there are (``padded_rows`` is on the GPU), so grids are
    made for the most there can be, and programs past the end leave at once: engines do the same."""

    pair_of_row: Tensor
    expert_of_block: Tensor
    padded_rows: Tensor
    pairs: int

    @property
    def row_blocks(self) -> int:
        return self.expert_of_block.numel()


def sort_pairs(expert_of_pair: Tensor, experts: int, block_m: int) -> SortedPairs:
    """``expert_of_pair``: [tokens * topk] int32."""
    pairs, device = expert_of_pair.numel(), expert_of_pair.device
    most = min(pairs * block_m, pairs + experts * (block_m - 1))
    blocks = triton.cdiv(most, block_m)
    whole: dict[str, Any] = {"dtype": torch.int32, "device": device}
    counts = torch.empty(experts, **whole)
    rows, owners = torch.empty(blocks * block_m, **whole), torch.empty(blocks, **whole)
    padded_rows = torch.empty(1, **whole)
    _count[(experts,)](expert_of_pair, counts, pairs, CHUNK=_CHUNK)
    _sort[(experts,)](
        expert_of_pair, counts, rows, owners, padded_rows, pairs, experts, block_m, CHUNK=_CHUNK,
        EXPERTS=triton.next_power_of_2(experts),
    )  # fmt: skip
    return SortedPairs(rows, owners, padded_rows, pairs)


@triton.jit
def tile_of(program, row_blocks, column_blocks, group_m):  # type: ignore[no-untyped-def]
    in_group = group_m * column_blocks
    first = program // in_group * group_m
    height = min(row_blocks - first, group_m)
    return first + program % in_group % height, program % in_group // height


@triton.jit(do_not_specialize=["pairs", "row_blocks", "topk", "group_m"])
def _plain_gemm(  # type: ignore[no-untyped-def]
    a, b, c, pair_of_row, expert_of_block, padded_rows, pairs, row_blocks, n, k, topk, group_m,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row_block, column_block = tile_of(tl.program_id(0), row_blocks, tl.cdiv(n, BLOCK_N), group_m)
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


def grouped_gemm(a: Tensor, b: Tensor, c: Tensor, rows: SortedPairs, topk: int, config: Config) -> Any:
    """c[pair] = a[pair // topk] b[its expert]^T; b [experts, n, k], all contiguous."""
    _, n, k = b.shape
    grid = (rows.row_blocks * triton.cdiv(n, config.block_n),)
    return _plain_gemm[grid](a, b, c, *launch_arguments(rows, n, k, topk, config), **block_sizes(config))


def launch_arguments(rows: SortedPairs, n: int, k: int, topk: int, config: Config) -> tuple[Any, ...]:
    return (rows.pair_of_row, rows.expert_of_block, rows.padded_rows, rows.pairs, rows.row_blocks, n, k, topk,
            config.group_m)  # fmt: skip


def block_sizes(config: Config) -> dict[str, int]:
    return {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "num_warps": config.warps,
            "num_stages": config.stages}  # fmt: skip


class ConfigBench:
    """Tensors of one problem on the GPU, and its launches with any config."""

    def __init__(self, problem: Problem, seed: int = 1000) -> None:
        if problem.dtype not in _TORCH_DTYPES:
            raise ValueError(f"the kernel takes {', '.join(_TORCH_DTYPES)}, not {problem.dtype}")
        self.problem = problem
        self.dense = isinstance(problem, GemmProblem)
        as_moe = problem if isinstance(problem, MoeProblem) else _as_experts(problem)
        self.shape, self.topk = as_moe, as_moe.topk
        self.rounds = as_moe.experts if self.dense else 4 if as_moe.tokens <= 16 else 2 if as_moe.tokens <= 256 else 1
        self.tensor_options: dict[str, Any] = {"dtype": _TORCH_DTYPES[problem.dtype], "device": "cuda"}
        self.sorted: dict[tuple[int, int], SortedPairs] = {}
        self._compiled: set[Config] = set()
        self._make_tensors(seed)

    def _make_tensors(self, seed: int) -> None:
        s, pairs = self.shape, self.shape.tokens * self.topk
        self.x = torch.randn(s.tokens, s.hidden, **self.tensor_options)
        self.chosen: list[Tensor] = []
        if self.dense:
            self.w13 = torch.randn(s.experts, s.inter, s.hidden, **self.tensor_options)
            self.out = torch.empty(s.tokens, s.inter, **self.tensor_options)
            self.chosen = [torch.zeros(s.tokens, dtype=torch.int32, device="cuda")] * self.rounds
            return
        self.w13 = torch.randn(s.experts, 2 * s.inter, s.hidden, **self.tensor_options)
        self.w2 = torch.randn(s.experts, s.hidden, s.inter, **self.tensor_options)
        self.inner = torch.randn(pairs, s.inter, **self.tensor_options)
        self.gate_up = torch.empty(pairs, 2 * s.inter, **self.tensor_options)
        self.pair_out = torch.empty(pairs, s.hidden, **self.tensor_options)
        self.share: list[Tensor] = []
        for routing in range(self.rounds):
            draw = torch.Generator(device="cuda").manual_seed(seed * routing + s.tokens)
            logits = torch.randn(s.tokens, s.experts, device="cuda", generator=draw)
            share, expert = torch.softmax(logits, 1).topk(self.topk, 1)
            self.chosen.append(expert.flatten().to(torch.int32))
            self.share.append(share.flatten().contiguous())

    @property
    def active(self) -> list[int]:
        """Experts that get any token, by routing."""
        return [1] if self.dense else [int(chosen.unique().numel()) for chosen in self.chosen]

    def blocks(self, block_m: int) -> list[int]:
        """Row blocks, by routing."""
        return [int(self.rows(routing, block_m).padded_rows) // block_m for routing in range(self.rounds)]

    def rows(self, routing: int, block_m: int) -> SortedPairs:
        if (routing, block_m) not in self.sorted:
            experts = 1 if self.dense else self.shape.experts
            pairs = sort_pairs(self.chosen[routing], experts, block_m)
            if self.dense:
                pairs.expert_of_block.fill_(routing)  # other weights each time
            self.sorted[routing, block_m] = pairs
        return self.sorted[routing, block_m]

    def first(self, c: Config) -> None:
        out = self.out if self.dense else self.gate_up
        for routing in range(self.rounds):
            grouped_gemm(self.x, self.w13, out, self.rows(routing, c.block_m), self.topk, c)

    def second(self, c: Config) -> None:
        for routing in range(0 if self.dense else self.rounds):
            rows = self.rows(routing, c.block_m)
            grouped_gemm(self.inner, self.w2, self.pair_out, rows, 1, c)

    def timed(self, configs: Sequence[Config]) -> list[tuple[float, float]]:
        """One pass of the plain kernel: seconds a launch of the first and of the second GEMM with each config.

        The first config runs once more before, unmeasured: what follows a sleeping GPU comes out slow. So does every
        one that this problem has not run yet: its code is loaded at the first launch, while the GPU waits.
        """
        for c in configs:
            if c not in self._compiled:
                self.first(c)  # sorts, too
                self.second(c)
                self._compiled.add(c)
        configs = [configs[0], *configs]
        launches = len(configs) * self.rounds * (1 if self.dense else 2)
        lead_s = min(max(launches * (_LAUNCH_S - self._least_s()), _LEAST_LEAD_S), _MOST_LEAD_S)
        torch.cuda._sleep(int(lead_s * _SLEEP_HZ))
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in configs]
        for c, (start, middle, end) in zip(configs, marks, strict=True):
            start.record()
            self.first(c)
            middle.record()
            self.second(c)
            end.record()
        torch.cuda.synchronize()
        scale = 1e-3 / self.rounds
        return [(a.elapsed_time(b) * scale, b.elapsed_time(c) * scale) for a, b, c in marks][1:]

    def samples(self, configs: Sequence[Config], passes: int) -> list[list[tuple[float, float]]]:
        """The results of ``timed`` for each config, in all passes."""
        timings = [self.timed(configs) for _ in range(passes if configs else 0)]
        return [[each[at] for each in timings] for at in range(len(configs))]

    def _least_s(self) -> float:
        """A lower estimate of one launch, for keeping the queue full."""
        s = self.shape
        n = s.inter if self.dense else 2 * s.inter
        used = 1 if self.dense else min(s.experts, s.tokens * s.topk)
        return 0.5 * max(used * n * s.hidden * 2 / 4.8e12, 2 * s.tokens * s.topk * n * s.hidden / 990e12)


def _as_experts(problem: GemmProblem) -> MoeProblem:
    """A GEMM as one expert's, with so many copies of its weights that L2 does not hold them."""
    copies = 8 if problem.m <= 1024 else 4
    return MoeProblem(problem.m, problem.k, problem.n, copies, 1, problem.dtype)


class Measurer:
    """The ``measure`` function of ``tune`` on a GPU: each config is checked against float32, then timed in turn."""

    def __init__(self) -> None:
        self._checked: dict[tuple[int, ...], bool] = {}
        self._bench: ConfigBench | None = None

    def __call__(self, problem: Problem, configs: Sequence[Config]) -> list[float]:
        if self._bench is None or self._bench.problem != problem:
            self._bench = None  # its memory first
            self._bench = ConfigBench(problem)
        good = [c for c in configs if self._runs(c, problem.dtype)]
        samples = dict(zip(good, self._bench.samples(good, _PASSES), strict=True))
        return [statistics.median(map(sum, samples[c])) if c in samples else math.inf for c in configs]

    def _runs(self, config: Config, dtype: str) -> bool:
        key = variant(config)
        if key not in self._checked:
            try:
                self._checked[key] = checked(config, dtype)
            except Exception:  # too much shared memory, or a config that this Triton cannot compile
                self._checked[key] = False
        return self._checked[key]


def checked(config: Config, dtype: str = "bf16") -> bool:
    """Whether a config's result matches float32, on fresh random inputs."""
    tokens, experts, topk, k, n = 40, 4, 2, 512, 512
    options: dict[str, Any] = {"dtype": _TORCH_DTYPES[dtype], "device": "cuda"}
    x, w = torch.randn(tokens, k, **options), torch.randn(experts, n, k, **options)
    expert = torch.rand(tokens, experts, device="cuda").topk(topk, 1).indices.flatten().to(torch.int32)
    token = torch.arange(tokens * topk, device="cuda") // topk
    truth = torch.stack([x[t].float() @ w[e].float().T for t, e in zip(token.tolist(), expert.tolist(), strict=True)])
    out = torch.full((tokens * topk, n), float("nan"), **options)
    rows = sort_pairs(expert, experts, config.block_m)
    grouped_gemm(x, w, out, rows, topk, config)
    torch.cuda.synchronize()
    return float((out.float() - truth).norm() / truth.norm()) < _RIGHT
