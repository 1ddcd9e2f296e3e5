"""Bounds that need no simulation: how fast one request alone can be, and how many a second an engine can carry at most.

The first bounds come from the peaks of the GPU alone and cost nothing; the second from step times of a few passes. Both
are on the fast side, so that nothing is discarded that could win.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kernelcast.forecast.predict_table import Times
from kernelcast.inference.batch import BatchColumns
from kernelcast.inference.forward import Deployment
from kernelcast.inference.memory import cache_bytes, read_weight_bytes
from kernelcast.inference.pass_times import kernel_tables
from kernelcast.ops.dtypes import find_dtype
from kernelcast.search.plan.space import EngineOption, ServiceCandidate
from kernelcast.serving.goals import PERCENT, Goal
from kernelcast.serving.load import Load
from kernelcast.serving.service import EngineSettings
from kernelcast.serving.step_times import host_time

_TOKENS = (1, 16, 64, 256, 1024, 2048, 4096, 8192, 16384)
_SEQUENCES = (1, 16, 64, 256, 1024)
_PROMPTS = (128, 1024, 8192)


class CoarseSteps:
    """``decode`` and ``mixed`` in seconds, for sequences of one length: ``context`` tokens in the cache, or ``past``
    ones before a prompt. Attention of prefills and of decodes is added up."""

    def __init__(self, deployment: Deployment, times: Times, context: int, past: int, variant: str) -> None:
        self._stack = deployment.stack
        tokens, sequences, prompts = (np.array(grid) for grid in (_TOKENS, _SEQUENCES, _PROMPTS))
        passes = {
            "tokens": ("tokens", BatchColumns.uniform(1, tokens, 0)),
            "sequences": ("sequences", BatchColumns.uniform(sequences, 1, 64)),
            "decodes": ("lengths", BatchColumns.uniform(sequences, 1, max(1, context))),
            "prompts": ("lengths", BatchColumns.uniform(1, prompts, past)),
        }
        tables = kernel_tables(deployment, list(passes.values()), times)
        end = ("likely", "low", "high").index(variant)
        self._known = {name: table.kernels_s[end].tolist() for name, table in zip(passes, tables, strict=True)}
        count = sum(table.launched(self._stack)[0, 0] for table in tables[:3])
        self._gaps_s = float(count) * self._stack.gap_s + self._stack.step_s

    def _at(self, name: str, grid: Sequence[int], value: float) -> float:
        """Linear between passes, and extrapolated from the last two."""
        known = self._known[name]
        if value <= grid[-1]:
            return float(np.interp(value, grid, known))
        slope = max(0.0, (known[-1] - known[-2]) / (grid[-1] - grid[-2]))
        return known[-1] + slope * (value - grid[-1])

    def decode(self, sequences: int) -> float:
        """A step that decodes so many sequences."""
        kernels_s = (self._at("tokens", _TOKENS, sequences) + self._at("sequences", _SEQUENCES, sequences)
                     + self._at("decodes", _SEQUENCES, sequences))  # fmt: skip
        return kernels_s * self._stack.decode_factor + self._gaps_s

    def mixed(self, sequences: int, prompt_tokens: float) -> float:
        """A step that prefills so many tokens beside them."""
        kernels_s = self._at("tokens", _TOKENS, sequences + prompt_tokens) + self._at(
            "prompts", _PROMPTS, prompt_tokens
        )
        if sequences:
            kernels_s += self._at("decodes", _SEQUENCES, sequences) + self._at("sequences", _SEQUENCES, sequences)
        return kernels_s * min(self._stack.prompt_factor, self._stack.decode_factor)


_SLACK = 1.25  # that a run may carry over the even mix of ``rate``
_SURE = 1.1  # that coarse step times of one request may be over the real ones
_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
PREFILL, DECODE = "ttft", "tpot"  # phases of a disaggregated service, by the latency that each decides


@dataclass(frozen=True)
class LoadSummary:
    """A load in figures. ``inputs``: tokens of prompts that no prefix cache can have, at best."""

    rate: float  # requests per second; 0: none is given (a closed loop, all at once)
    input_mean: float
    output_mean: float
    output_least: int
    context_mean: float  # in the cache of a request that decodes
    inputs: tuple[int, ...]  # at the percentiles of goals, by ``PERCENT``

    @classmethod
    def of(cls, load: Load) -> LoadSummary:
        inputs = load.inputs
        if load.shared:
            inputs = np.maximum(inputs - [sum(tokens for _, tokens in pieces) for pieces in load.shared], 1)
        open_loop = not load.max_concurrency and math.isfinite(load.request_rate)
        at = tuple(int(np.percentile(inputs, p)) for p in PERCENT.values())
        return cls(load.request_rate if open_loop else 0.0, float(inputs.mean()), float(load.outputs.mean()),
                   int(load.outputs.min()), float((load.inputs + load.outputs / 2).mean()), at)  # fmt: skip

    def prompt(self, statistic: str) -> int:
        """Tokens of the prompt that a statistic of times to first token cannot be faster than."""
        return dict(zip(PERCENT, self.inputs, strict=True)).get(statistic, int(self.input_mean))

    def engines(self, each: float) -> int:
        """Engines that the rate needs at least, of so many requests per second each."""
        return max(1, math.ceil(self.rate / (each * _SLACK))) if each > 0 else 1 << 30


@dataclass(eq=False)
class EngineBounds:
    """Least seconds of a request alone, and most requests per second of one engine; by peaks, until it is built."""

    engine: EngineOption
    load: LoadSummary
    goals: tuple[Goal, ...]
    prefill_s: float = 0.0  # of the mean prompt
    token_s: float = 0.0
    front_s: float = 0.0  # before prefill
    peak_rate: float = 0.0
    steps: CoarseSteps | None = None
    rates: list[float] = field(default_factory=list)  # requests/s at most, by limits

    def __post_init__(self) -> None:
        """Bounds by the peaks of the GPU: arithmetic of a prompt, weights and caches that a step reads."""
        deployment, gpu, load = self.engine.deployment, self.engine.deployment.gpu, self.load
        unit = find_dtype(deployment.precision.weights).math
        peak = max(gpu.tensor_flops_per_s(unit), gpu.fma_flops_per_s(unit)) * self.engine.gpus
        active, layout = deployment.model.active_parameters, deployment.layout
        flops = 2.0 * (active.attention + active.mlp + active.experts)
        self.prefill_s = load.input_mean * flops / peak
        self.token_s = read_weight_bytes(deployment, 1) / gpu.dram_bytes_per_s
        cache_s = cache_bytes(deployment, int(load.context_mean)) * layout.dp / gpu.dram_bytes_per_s
        each_s = (load.input_mean + load.output_mean) * flops / peak
        self.peak_rate = 1.0 / max(each_s, load.output_mean * (cache_s / (layout.dp * layout.pp)), 1e-12)

    def build(self, times: Times, variant: str) -> None:
        """Bounds by step times: one prompt in one step, then one token a step."""
        deployment, load = self.engine.deployment, self.load
        self.steps = CoarseSteps(deployment, times, int(load.context_mean), int(load.input_mean / 2), variant)
        self.prefill_s = self.steps.mixed(0, max(1.0, load.input_mean)) / _SURE
        self.token_s = self.steps.decode(1) / _SURE
        self.front_s = host_time(variant, deployment.stack.request_s)
        self.rates = [self.rate(limits, self.goals) for limits in self.engine.limits]

    @property
    def best_rate(self) -> float:
        return max(self.rates, default=self.peak_rate)

    @property
    def cost(self) -> float:
        """At least, of engines like this that carry the load."""
        return self.load.engines(self.best_rate) * self.engine.usd_per_hour

    def share(self, goal: Goal) -> float:
        """The share of a goal that one request alone takes."""
        load, seconds = self.load, self.token_s
        if goal.metric != "tpot":
            seconds = self.front_s + self.prefill_s * min(1.0, load.prompt(goal.statistic) / load.input_mean)
            if goal.metric == "e2el" and goal.statistic == "mean":
                seconds += (load.output_mean - 1) * self.token_s
            elif goal.metric == "e2el":
                seconds = self.front_s + (load.output_least - 1) * self.token_s
        return seconds * 1e3 / goal.limit_ms

    def misses(self, *metrics: str) -> bool:
        """Whether one request alone breaks a goal (of these metrics)."""
        return any(self.share(goal) > 1 for goal in self.goals if not metrics or goal.metric in metrics)

    def rate(self, limits: EngineSettings, goals: Sequence[Goal], phase: str = "") -> float:
        """Requests per second of one engine: the best even mix of decodes and prefills whose step keeps the goals of a
        time per token. ``phase``: it only prefills, or only decodes."""
        assert self.steps is not None
        deployment, load, room = self.engine.deployment, self.load, limits.max_num_batched_tokens
        stages, stack = deployment.layout.pp, deployment.stack
        schedulers = stages * deployment.layout.dp
        front = 1.0 / max(1e-9, host_time("low", stack.front_s + stack.token_s * load.input_mean))  # of its host
        if phase == PREFILL:
            return min(front, schedulers * room / self.steps.mixed(0, room) / load.input_mean)
        held = limits.kv_tokens / stages / max(load.context_mean, 1.0) * _SLACK  # lengths differ, prefixes are shared
        most = max(1, int(min(max(1, limits.max_num_seqs // stages), held)))
        ceiling_s = min((goal.limit_ms / 1e3 for goal in goals if goal.metric == "tpot"), default=math.inf)
        best = 0.0
        for batch in sorted({min(n, most) for n in (*_BATCHES, most)}):
            rate, step_s = self._mix(self.steps, batch, room, phase)
            if step_s <= ceiling_s * _SLACK:
                best = max(best, rate)
        return best * schedulers if phase == DECODE else min(front, best * schedulers)

    def _mix(self, steps: CoarseSteps, batch: int, room: int, phase: str) -> tuple[float, float]:
        """Requests per second of steps that decode ``batch`` and prefill as many prompts as end, and the seconds of a
        step."""
        load = self.load
        if phase == DECODE:
            step_s = steps.decode(batch)
            return batch / load.output_mean / step_s, step_s
        if load.output_mean <= 1:
            return room / load.input_mean / steps.mixed(0, room), 0.0
        tokens = min(batch * load.input_mean / load.output_mean, max(1.0, room - batch))
        step_s = steps.mixed(batch, tokens)
        return tokens / load.input_mean / step_s, step_s

    def phase_rate(self, phase: str) -> float:
        """The rate as part of a disaggregated service: by step times, or by the arithmetic of that phase alone."""
        if self.steps is not None:
            return self.rate(self.engine.limits[0], self.goals, phase)
        load = self.load
        tokens = load.input_mean if phase == PREFILL else load.output_mean
        return self.peak_rate * (load.input_mean + load.output_mean) / tokens


@dataclass(frozen=True, eq=False)
class EnginePair:
    """Engines of one GPU, stack and format for the two phases of a disaggregated service."""

    prefill: EngineBounds
    decode: EngineBounds

    def least(self) -> ServiceCandidate:
        """The fewest of both that may carry the load."""
        load = self.prefill.load
        return self.candidate(
            load.engines(self.prefill.phase_rate(PREFILL)), load.engines(self.decode.phase_rate(DECODE))
        )

    def candidate(self, prefills: int, decodes: int) -> ServiceCandidate:
        prefill, decode = self.prefill.engine, self.decode.engine
        return ServiceCandidate(decode, decode.limits[0], decodes, prefill, prefill.limits[0], prefills)

    @property
    def misses(self) -> bool:
        return self.prefill.misses("ttft") or self.decode.misses("tpot")
