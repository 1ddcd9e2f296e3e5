"""Times of Triton configs on this machine's GPU: tensors of one problem, its launches, and rounds over many configs.

Several routings of a small batch, and several copies of a GEMM's weights, follow one another, so that weights come from
DRAM. The host runs ahead of the GPU, so that no kernel waits for its launch.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernelcast.advise.configs import Config, GemmProblem, MoeProblem, Problem
from kernelcast.measure import fused_moe

_TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LAUNCH_S = {"plain": 60e-6, "swift": 100e-6}  # of the host, about; the swift one makes a descriptor each time
_LEAST_LEAD_S, _MOST_LEAD_S = 3e-4, 0.06
_SLEEP_HZ = 1.9e9  # torch.cuda._sleep counts clocks
_RIGHT = 1e-2  # relative error against float32 that is still rounding


class Bench:
    """Tensors of one problem on the GPU, and its launches with any config of either kernel."""

    def __init__(self, problem: Problem, seed: int = 1000) -> None:
        if problem.dtype not in _TORCH_DTYPES:
            raise ValueError(f"the kernel takes {', '.join(_TORCH_DTYPES)}, not {problem.dtype}")
        self.problem = problem
        self.dense = isinstance(problem, GemmProblem)
        as_moe = problem if isinstance(problem, MoeProblem) else _as_experts(problem)
        self.shape, self.topk = as_moe, as_moe.topk
        self.rounds = as_moe.experts if self.dense else 4 if as_moe.tokens <= 16 else 2 if as_moe.tokens <= 256 else 1
        self.kinds: dict[str, Any] = {"dtype": _TORCH_DTYPES[problem.dtype], "device": "cuda"}
        self.sorted: dict[tuple[int, int], fused_moe.Sorted] = {}
        self._ran: set[tuple[str, Config]] = set()
        self._make_tensors(seed)

    def _make_tensors(self, seed: int) -> None:
        s, pairs = self.shape, self.shape.tokens * self.topk
        self.x = torch.randn(s.tokens, s.hidden, **self.kinds)
        self.chosen: list[Tensor] = []
        if self.dense:
            self.w13 = torch.randn(s.experts, s.inter, s.hidden, **self.kinds)
            self.both = torch.empty(s.tokens, s.inter, **self.kinds)
            self.chosen = [torch.zeros(s.tokens, dtype=torch.int32, device="cuda")] * self.rounds
            return
        self.w13 = torch.randn(s.experts, 2 * s.inter, s.hidden, **self.kinds)
        self.w2 = torch.randn(s.experts, s.hidden, s.inter, **self.kinds)
        self.inner = torch.randn(pairs, s.inter, **self.kinds)
        self.both = torch.empty(pairs, 2 * s.inter, **self.kinds)
        self.half = torch.empty(pairs, s.inter, **self.kinds)
        self.out_pairs = torch.empty(pairs, s.hidden, **self.kinds)
        self.share: list[Tensor] = []
        for turn in range(self.rounds):
            draw = torch.Generator(device="cuda").manual_seed(seed * turn + s.tokens)
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
        return [int(self.rows(turn, block_m).padded_rows) // block_m for turn in range(self.rounds)]

    def rows(self, turn: int, block_m: int) -> fused_moe.Sorted:
        if (turn, block_m) not in self.sorted:
            experts = 1 if self.dense else self.shape.experts
            made = fused_moe.sort_pairs(self.chosen[turn], experts, self.topk, block_m)
            if self.dense:
                made.expert_of_block.fill_(turn)  # other weights each time
            self.sorted[turn, block_m] = made
        return self.sorted[turn, block_m]

    def first(self, kernel: str, c: Config) -> None:
        for turn in range(self.rounds):
            rows = self.rows(turn, c.block_m)
            if kernel == "plain":
                fused_moe.plain_gemm(self.x, self.w13, self.both, rows, self.topk, c)
            else:
                out = self.both if self.dense else self.half
                fused_moe.swift_gemm(self.x, self.w13, out, rows, self.topk, c, gated=not self.dense)

    def second(self, kernel: str, c: Config) -> None:
        if self.dense:
            return
        for turn in range(self.rounds):
            rows = self.rows(turn, c.block_m)
            if kernel == "plain":
                fused_moe.plain_gemm(self.inner, self.w2, self.out_pairs, rows, 1, c)
            else:
                fused_moe.swift_gemm(self.inner, self.w2, self.out_pairs, rows, 1, c, gated=False)

    def timed(self, items: Sequence[tuple[str, Config]]) -> list[tuple[float, float]]:
        """One pass: seconds a launch of the first and of the second GEMM of each (kernel, config).

        The first item runs once more before, unmeasured: what follows a sleeping GPU comes out slow. So does every one
        that this problem has not run yet: its code is loaded at the first launch, while the GPU waits.
        """
        for kernel, c in items:
            if (kernel, c) not in self._ran:
                self.first(kernel, c)  # sorts, too
                self.second(kernel, c)
                self._ran.add((kernel, c))
        items = [items[0], *items]
        launches = len(items) * self.rounds * (1 if self.dense else 2)
        host_s = max(_LAUNCH_S[kernel] for kernel, _ in items)
        lead_s = min(max(launches * (host_s - self._least_s()), _LEAST_LEAD_S), _MOST_LEAD_S)
        torch.cuda._sleep(int(lead_s * _SLEEP_HZ))
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in items]
        for (kernel, c), (start, middle, end) in zip(items, marks, strict=True):
            start.record()
            self.first(kernel, c)
            middle.record()
            self.second(kernel, c)
            end.record()
        torch.cuda.synchronize()
        scale = 1e-3 / self.rounds
        return [(a.elapsed_time(b) * scale, b.elapsed_time(c) * scale) for a, b, c in marks][1:]

    def _least_s(self) -> float:
        """A lower estimate of one launch, for keeping the queue full."""
        s = self.shape
        n = s.inter if self.dense else 2 * s.inter
        used = 1 if self.dense else min(s.experts, s.tokens * s.topk)
        return 0.5 * max(used * n * s.hidden * 2 / 4.8e12, 2 * s.tokens * s.topk * n * s.hidden / 990e12)

    def layer_s(self, kernel: str, c: Config, replays: int = 12) -> tuple[float, float, float]:
        """Median, least and most seconds of the whole layer, sorting to sum, in a CUDA graph."""
        at = fused_moe.Buffers(self.both, self.half, self.out_pairs, torch.empty_like(self.x))
        layer = fused_moe.plain_layer if kernel == "plain" else fused_moe.swift_layer

        def once() -> None:
            for turn in range(self.rounds):
                layer(self.x, self.w13, self.w2, self.chosen[turn], self.share[turn], self.topk, c, at)

        with torch.cuda.stream(torch.cuda.Stream()):
            once()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            once()
            graph.capture_end()
            graph.replay()
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
            for mark in marks[:-1]:
                mark.record()
                graph.replay()
            marks[-1].record()
            torch.cuda.synchronize()
        times = [a.elapsed_time(b) * 1e-3 / self.rounds for a, b in itertools.pairwise(marks)]
        return statistics.median(times), min(times), max(times)


def _as_experts(problem: GemmProblem) -> MoeProblem:
    """A GEMM as one expert's, with so many copies of its weights that L2 does not hold them."""
    copies = 8 if problem.m <= 1024 else 4
    return MoeProblem(problem.m, problem.k, problem.n, copies, 1, problem.dtype)


class Measurer:
    """What ``tune`` is given on a machine with a GPU: each config checked against float32, then timed in turn."""

    def __init__(self, kernel: str = "plain", rounds: int = 7) -> None:
        self.kernel, self.rounds = kernel, rounds
        self.wrong: list[Config] = []  # compiled, but gave another result
        self._checked: dict[tuple[int, ...], bool] = {}
        self._bench: Bench | None = None

    def __call__(self, problem: Problem, configs: Sequence[Config]) -> list[float]:
        if self._bench is None or self._bench.problem != problem:
            self._bench = None  # its memory first
            self._bench = Bench(problem)
        good = [c for c in configs if self._runs(c, problem.dtype)]
        samples: dict[Config, list[float]] = {c: [] for c in good}
        for _ in range(self.rounds if good else 0):
            for c, (first, second) in zip(good, self._bench.timed([(self.kernel, c) for c in good]), strict=True):
                samples[c].append(first + second)
        return [statistics.median(samples[c]) if samples.get(c) else math.inf for c in configs]

    def _runs(self, config: Config, dtype: str) -> bool:
        key = (config.block_m, config.block_n, config.block_k, config.warps, config.stages)
        if key not in self._checked:
            try:
                self._checked[key] = checked(self.kernel, config, dtype)
            except Exception:  # too much shared memory, or a config that this Triton cannot compile
                self._checked[key] = False
        return self._checked[key]


def checked(kernel: str, config: Config, dtype: str = "bf16") -> bool:
    """Whether a config gives what float32 gives, on fresh random inputs."""
    tokens, experts, topk, k, n = 40, 4, 2, 512, 512
    kinds: dict[str, Any] = {"dtype": _TORCH_DTYPES[dtype], "device": "cuda"}
    x, w = torch.randn(tokens, k, **kinds), torch.randn(experts, n, k, **kinds)
    expert = torch.rand(tokens, experts, device="cuda").topk(topk, 1).indices.flatten().to(torch.int32)
    token = torch.arange(tokens * topk, device="cuda") // topk
    truth = torch.stack([x[t].float() @ w[e].float().T for t, e in zip(token.tolist(), expert.tolist(), strict=True)])
    out = torch.full((tokens * topk, n), float("nan"), **kinds)
    rows = fused_moe.sort_pairs(expert, experts, topk, config.block_m)
    if kernel == "plain":
        fused_moe.plain_gemm(x, w, out, rows, topk, config)
    else:
        fused_moe.swift_gemm(x, w, out, rows, topk, config, gated=False)
    torch.cuda.synchronize()
    return float((out.float() - truth).norm() / truth.norm()) < _RIGHT
