"""Times of Triton configs on this machine's GPU: tensors of one problem, its launches, and rounds over many configs.

Several routings of a small batch, and several copies of a GEMM's weights, follow one another, so that weights come from
DRAM. The host runs ahead of the GPU, so that no kernel waits for its launch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernelcast.collect import fused_moe
from kernelcast.collect.timing import captured, replayed_s, stream
from kernelcast.tune.configs import Config, GemmProblem, MoeProblem, Problem, variant

_TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LAUNCH_S = 60e-6  # of the host, about
_LEAST_LEAD_S, _MOST_LEAD_S = 3e-4, 0.06
_SLEEP_HZ = 1.9e9  # torch.cuda._sleep counts clocks
_PASSES = 7
_RIGHT = 1e-2  # relative error against float32 that is still rounding


class Bench:
    """Tensors of one problem on the GPU, and its launches with any config."""

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
        self._ran: set[Config] = set()
        self._make_tensors(seed)

    def _make_tensors(self, seed: int) -> None:
        s, pairs = self.shape, self.shape.tokens * self.topk
        self.x = torch.randn(s.tokens, s.hidden, **self.kinds)
        self.chosen: list[Tensor] = []
        if self.dense:
            self.w13 = torch.randn(s.experts, s.inter, s.hidden, **self.kinds)
            self.out = torch.empty(s.tokens, s.inter, **self.kinds)
            self.chosen = [torch.zeros(s.tokens, dtype=torch.int32, device="cuda")] * self.rounds
            return
        self.w13 = torch.randn(s.experts, 2 * s.inter, s.hidden, **self.kinds)
        self.w2 = torch.randn(s.experts, s.hidden, s.inter, **self.kinds)
        self.inner = torch.randn(pairs, s.inter, **self.kinds)
        self.buffers = fused_moe.Buffers.of(self.x, self.topk, s.inter)
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
            made = fused_moe.sort_pairs(self.chosen[turn], experts, block_m)
            if self.dense:
                made.expert_of_block.fill_(turn)  # other weights each time
            self.sorted[turn, block_m] = made
        return self.sorted[turn, block_m]

    def first(self, c: Config) -> None:
        out = self.out if self.dense else self.buffers.both
        for turn in range(self.rounds):
            fused_moe.grouped_gemm("plain", self.x, self.w13, out, self.rows(turn, c.block_m), self.topk, c)

    def second(self, c: Config) -> None:
        for turn in range(0 if self.dense else self.rounds):
            rows = self.rows(turn, c.block_m)
            fused_moe.grouped_gemm("plain", self.inner, self.w2, self.buffers.pairs, rows, 1, c)

    def timed(self, configs: Sequence[Config]) -> list[tuple[float, float]]:
        """One pass of the plain kernel: seconds a launch of the first and of the second GEMM with each config.

        The first config runs once more before, unmeasured: what follows a sleeping GPU comes out slow. So does every
        one that this problem has not run yet: its code is loaded at the first launch, while the GPU waits.
        """
        for c in configs:
            if c not in self._ran:
                self.first(c)  # sorts, too
                self.second(c)
                self._ran.add(c)
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
        """What ``timed`` gives, of each config in all passes."""
        found = [self.timed(configs) for _ in range(passes if configs else 0)]
        return [[each[at] for each in found] for at in range(len(configs))]

    def _least_s(self) -> float:
        """A lower estimate of one launch, for keeping the queue full."""
        s = self.shape
        n = s.inter if self.dense else 2 * s.inter
        used = 1 if self.dense else min(s.experts, s.tokens * s.topk)
        return 0.5 * max(used * n * s.hidden * 2 / 4.8e12, 2 * s.tokens * s.topk * n * s.hidden / 990e12)

    def layer_s(self, c: Config, kernel: str = "plain", replays: int = 12) -> tuple[float, float, float]:
        """Median, least and most seconds of the whole layer, sorting to sum, in a CUDA graph."""

        def once() -> None:
            for chosen, share in zip(self.chosen, self.share, strict=True):
                fused_moe.layer(kernel, self.x, self.w13, self.w2, chosen, share, self.topk, c, self.buffers)

        with torch.cuda.stream(stream()):
            once()
            torch.cuda.synchronize()
            times = [seconds / self.rounds for seconds in replayed_s(captured([once]), replays)]
        return statistics.median(times), min(times), max(times)


def _as_experts(problem: GemmProblem) -> MoeProblem:
    """A GEMM as one expert's, with so many copies of its weights that L2 does not hold them."""
    copies = 8 if problem.m <= 1024 else 4
    return MoeProblem(problem.m, problem.k, problem.n, copies, 1, problem.dtype)


class Measurer:
    """What ``tune`` is given on a machine with a GPU: each config checked against float32, then timed in turn."""

    def __init__(self) -> None:
        self._checked: dict[tuple[int, ...], bool] = {}
        self._bench: Bench | None = None

    def __call__(self, problem: Problem, configs: Sequence[Config]) -> list[float]:
        if self._bench is None or self._bench.problem != problem:
            self._bench = None  # its memory first
            self._bench = Bench(problem)
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
    """Whether a config gives what float32 gives, on fresh random inputs."""
    tokens, experts, topk, k, n = 40, 4, 2, 512, 512
    kinds: dict[str, Any] = {"dtype": _TORCH_DTYPES[dtype], "device": "cuda"}
    x, w = torch.randn(tokens, k, **kinds), torch.randn(experts, n, k, **kinds)
    expert = torch.rand(tokens, experts, device="cuda").topk(topk, 1).indices.flatten().to(torch.int32)
    token = torch.arange(tokens * topk, device="cuda") // topk
    truth = torch.stack([x[t].float() @ w[e].float().T for t, e in zip(token.tolist(), expert.tolist(), strict=True)])
    out = torch.full((tokens * topk, n), float("nan"), **kinds)
    rows = fused_moe.sort_pairs(expert, experts, config.block_m)
    fused_moe.grouped_gemm("plain", x, w, out, rows, topk, config)
    torch.cuda.synchronize()
    return float((out.float() - truth).norm() / truth.norm()) < _RIGHT
