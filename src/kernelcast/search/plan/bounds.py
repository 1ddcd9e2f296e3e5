"""What needs no simulation: how fast one request alone can be, and how many a second an engine can carry at most.

Two steps. The first knows the chip's peaks alone (``physical``) and costs nothing; the second has step times
(``alone``, ``carried``) of a few passes. Both are on the fast side, so that nothing is discarded that could win.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernelcast.forecast.predict_table import Times
from kernelcast.inference.batch import BatchColumns
from kernelcast.inference.forward import Deployment
from kernelcast.inference.memory import cache_bytes, read_weight_bytes
from kernelcast.inference.pass_times import kernel_tables
from kernelcast.ops.dtypes import find_dtype
from kernelcast.search.goals import PERCENT, Goal
from kernelcast.search.plan.grid import Place
from kernelcast.serving.load import Load
from kernelcast.serving.service import EngineSettings
from kernelcast.serving.step_times import host_time

_TOKENS = (1, 16, 64, 256, 1024, 2048, 4096, 8192, 16384)
_SEQUENCES = (1, 16, 64, 256, 1024)
_PROMPTS = (128, 1024, 8192)


class CoarseSteps:
    """``decode`` and ``mixed`` in seconds, for sequences of one length: ``context`` tokens in the cache, or ``past``
    ones before a prompt that is read. Attention of prompts and of decodes is added up."""

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

    def _at(self, sort: str, grid: Sequence[int], value: float) -> float:
        """Between passes, and on from the last two."""
        known = self._known[sort]
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
        """A step that reads so many tokens of prompts beside them."""
        kernels_s = self._at("tokens", _TOKENS, sequences + prompt_tokens) + self._at(
            "prompts", _PROMPTS, prompt_tokens
        )
        if sequences:
            kernels_s += self._at("decodes", _SEQUENCES, sequences) + self._at("sequences", _SEQUENCES, sequences)
        return kernels_s * min(self._stack.prompt_factor, self._stack.decode_factor)


_SLACK = 1.25  # that a run may carry over the even mix of ``carried``
_SURE = 1.1  # that coarse step times of one request may be over the real ones
_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
READ, WROTE = "ttft", "tpot"


@dataclass(frozen=True)
class Demand:
    """A load in figures. ``inputs``: tokens of prompts that no cache can have, at best."""

    rate: float  # requests per second that come; 0: no rate is asked for (a closed loop, all at once)
    under_way: int  # of a closed loop: requests at a time
    input_mean: float
    output_mean: float
    output_least: int
    context_mean: float  # in the cache of one that decodes
    inputs: tuple[int, ...]  # at the percentiles of goals, by ``PERCENT``

    @classmethod
    def of(cls, load: Load) -> Demand:
        own = load.inputs.copy()
        if load.shared:
            own = own - np.array([sum(tokens for _, tokens in pieces) for pieces in load.shared])
            own = np.maximum(own, 1)
        open_loop = not load.max_concurrency and math.isfinite(load.request_rate)
        at = tuple(int(np.percentile(own, p)) for p in PERCENT.values())
        return cls(load.request_rate if open_loop else 0.0, load.max_concurrency, float(own.mean()),
                   float(load.outputs.mean()), int(load.outputs.min()),
                   float((load.inputs + load.outputs / 2).mean()), at)  # fmt: skip

    def prompt(self, statistic: str) -> int:
        """Tokens of the prompt that a statistic of times to first token cannot be faster than."""
        return dict(zip(PERCENT, self.inputs, strict=True)).get(statistic, int(self.input_mean))


@dataclass(frozen=True)
class Floor:
    """Least seconds of a request alone, and most requests per second of one engine."""

    read_s: float  # of the mean prompt
    token_s: float
    front_s: float  # before it is read
    rate: float

    def share(self, goal: Goal, demand: Demand) -> float:
        """Of a goal, that one request alone takes."""
        if goal.metric == "tpot":
            return self.token_s * 1e3 / goal.limit_ms
        ttft_s = self.front_s + self.read_s * min(1.0, demand.prompt(goal.statistic) / demand.input_mean)
        if goal.metric == "ttft":
            return ttft_s * 1e3 / goal.limit_ms
        if goal.statistic == "mean":
            return (ttft_s + (demand.output_mean - 1) * self.token_s) * 1e3 / goal.limit_ms
        return (self.front_s + (demand.output_least - 1) * self.token_s) * 1e3 / goal.limit_ms


def physical(place: Place, demand: Demand) -> Floor:
    """By the peaks of the chip: arithmetic of a prompt, weights that a step reads, caches that it reads."""
    where, gpus = place.deployment, place.gpus
    unit = find_dtype(where.precision.weights).math
    peak = max(where.gpu.tensor_flops_per_s(unit), where.gpu.fma_flops_per_s(unit)) * gpus
    active = where.model.active_parameters
    flops = 2.0 * (active.attention + active.mlp + active.experts)
    read_s = demand.input_mean * flops / peak
    ranks = where.layout.dp * where.layout.pp
    token_s = read_weight_bytes(where, 1) / where.gpu.dram_bytes_per_s
    kept_s = cache_bytes(where, int(demand.context_mean)) * where.layout.dp / where.gpu.dram_bytes_per_s / ranks
    each_s = (demand.input_mean + demand.output_mean) * flops / peak
    return Floor(read_s, token_s, 0.0, 1.0 / max(each_s, demand.output_mean * kept_s, 1e-12))


def alone(steps: CoarseSteps, place: Place, demand: Demand, variant: str) -> Floor:
    """By step times: one prompt in one go, then one token a step; no rate yet."""
    read_s = steps.mixed(0, max(1.0, demand.input_mean)) / _SURE
    stack = place.deployment.stack
    return Floor(read_s, steps.decode(1) / _SURE, host_time(variant, stack.request_s), 0.0)


def batch_of(place: Place, limits: EngineSettings, demand: Demand) -> int:
    """Requests that one scheduler holds at a time, at most."""
    stages = place.deployment.layout.pp
    held = limits.kv_tokens / stages / max(demand.context_mean, 1.0) * _SLACK  # lengths differ, and prefixes are shared
    return max(1, int(min(max(1, limits.max_num_seqs // stages), held)))


def carried(steps: CoarseSteps, place: Place, limits: EngineSettings, demand: Demand, goals: Sequence[Goal],
            part: str = "") -> float:  # fmt: skip
    """Requests per second of one engine: the best even mix of decodes and prompts whose step keeps the goals of a time
    per token. ``part``: only reads prompts (``READ``), or only decodes (``WROTE``)."""
    most, room = batch_of(place, limits, demand), limits.max_num_batched_tokens
    schedulers = place.deployment.layout.pp * place.deployment.layout.dp
    stack = place.deployment.stack
    front = 1.0 / max(
        1e-9, host_time("low", stack.front_s + stack.token_s * demand.input_mean)
    )  # its host reads them first
    if part == READ:
        return min(front, schedulers * room / steps.mixed(0, room) / demand.input_mean)
    ceiling_s = min((goal.limit_ms / 1e3 for goal in goals if goal.metric == "tpot"), default=math.inf)
    best = 0.0
    for batch in sorted({min(n, most) for n in (*_BATCHES, most)}):
        rate, step_s = _mix(steps, batch, room, demand, part)
        if step_s <= ceiling_s * _SLACK:
            best = max(best, rate)
    return best * schedulers if part == WROTE else min(front, best * schedulers)


def _mix(steps: CoarseSteps, batch: int, room: int, demand: Demand, part: str) -> tuple[float, float]:
    """Requests per second of steps that decode ``batch`` and read as many prompts as end, and how long one takes."""
    if part == WROTE:
        step_s = steps.decode(batch)
        return batch / demand.output_mean / step_s, step_s
    if demand.output_mean <= 1:
        return room / demand.input_mean / steps.mixed(0, room), 0.0
    tokens = min(batch * demand.input_mean / demand.output_mean, max(1.0, room - batch))
    step_s = steps.mixed(batch, tokens)
    return tokens / demand.input_mean / step_s, step_s


def engines_for(rate: float, each: float) -> int:
    """Engines that a rate needs at least."""
    return max(1, math.ceil(rate / (each * _SLACK))) if each > 0 else 1 << 30
