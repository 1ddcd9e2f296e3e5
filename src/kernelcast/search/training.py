"""The layout that trains a model fastest on so many GPUs: every layout that is valid, those that fit, ranked by time.

Layouts are those that Megatron-LM accepts: sizes that divide the GPUs, heads, widths, experts and the batch. Memory
decides first (``training/job_memory.py``), then steps are forecast together, in the order of the least time that their
FLOPs and their pipeline allow; once that is more than the best step found, the rest cannot be faster.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from kernelcast.errors import DoesNotFit, KernelcastError
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.end_to_end import end_to_end
from kernelcast.forecast.predict_table import Times
from kernelcast.hardware import Gpu
from kernelcast.inference.deployment import check_heads, node_gpus
from kernelcast.models.architecture import Architecture
from kernelcast.models.layers import Dense, Experts, LatentAttention
from kernelcast.ops.dtypes import matmul_flops_per_s
from kernelcast.results import LEVELS
from kernelcast.stacks.training_stack import TrainingStack, training_stack
from kernelcast.training.job import Recompute, TrainingJob, TrainingPrecision
from kernelcast.training.job import precision as named_precision
from kernelcast.training.job_flops import model_flops
from kernelcast.training.job_memory import least_bytes, peak
from kernelcast.training.layout import TrainingLayout
from kernelcast.training.step import STEP
from kernelcast.training.training_forecast import TrainingForecast
from kernelcast.training.transformer_step import forecast_many

_CHUNK = 512  # steps that are forecast together
_LEAST_TOKENS = 1024  # of a context parallel rank: fewer are never worth its communication
_UNEVEN = 1.25  # layers of the largest part over the mean, at most
_MICRO_BATCHES = (1, 2, 4, 8)
_ALL = Recompute("full")
_VIRTUAL = (1, 2, 3, 4, 5, 6, 8, 10, 12)


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What may vary. Empty: every size that the model, the GPUs and the batch allow. ``recompute`` not given: none, the
    outputs of norms and activations (and of latent attention's up-projections), and all."""

    tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    cp: tuple[int, ...] = ()
    ep: tuple[int, ...] = ()
    expert_tp: tuple[int, ...] = ()
    virtual_stages: tuple[int, ...] = ()
    micro_batch: tuple[int, ...] = ()
    zero: tuple[int, ...] = ()
    recompute: tuple[Recompute, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LayoutSearch:
    """``ranked``: forecasts of layouts that fit, fastest first. ``tried`` layouts were valid, ``too_large`` of them do
    not fit, ``slower`` cannot be faster than the best by their FLOPs and bubble alone."""

    ranked: tuple[TrainingForecast, ...] = field(repr=False)
    tried: int
    too_large: int
    slower: int

    @property
    def best(self) -> TrainingForecast:
        return self.ranked[0]

    @cached_property
    def close(self) -> tuple[TrainingForecast, ...]:
        """Other layouts that may be the fastest. Layouts of a model share most of their error: what is forecast too
        long in one is in the other. So of two, each kind of time (compute, each sort of communication, bubble, …) is
        taken to be off by the interval's share, by itself: they are close where the difference of the steps is within
        the square root of the sum of squares of what differs, times that share."""
        best = self.best
        share = (best.high_s - best.low_s) / 2 / best.time_s

        def spread_s(other: TrainingForecast) -> float:
            return share * math.hypot(*(other.parts_s[name] - time_s for name, time_s in best.parts_s.items()))

        return tuple(each for each in self.ranked[1:] if each.time_s - best.time_s <= spread_s(each))

    @cached_property
    def surer(self) -> TrainingForecast | None:
        """The fastest on better evidence than the best has; None: none is."""
        level, run = LEVELS.index(self.best.support), end_to_end()
        known = (each for each in self.ranked if LEVELS.index(run.level(each.setting)) < level)
        return next((each for each in known if LEVELS.index(each.support) < level), None)

    @property
    def lead(self) -> float:
        """How much longer the next layout takes, as a share."""
        return self.ranked[1].time_s / self.best.time_s - 1 if len(self.ranked) > 1 else 0.0


def search_layouts(
    model: Architecture, gpu: Gpu, gpus: int, *, global_batch: int, seq: int,
    precision: TrainingPrecision | str = "bf16", stack: TrainingStack | str = "megatron",
    space: SearchSpace | None = None, base: TrainingLayout | None = None, conditions: Conditions = STEP,
    times: Times | None = None, progress: Callable[[int, int], None] | None = None, **settings: Any,
) -> LayoutSearch:  # fmt: skip
    """Layouts of ``gpus`` GPUs that train ``global_batch`` sequences of ``seq`` tokens a step, fastest first. ``base``:
    what no size decides (nodes, links, cp_comm, overlap). ``settings``: other fields of a ``TrainingJob``."""
    if gpus < 1 or global_batch < 1:
        raise KernelcastError(f"gpus and global_batch must be 1 or more, not {gpus} and {global_batch}")
    jobs = list(layouts(model, gpu, gpus, global_batch=global_batch, seq=seq, precision=precision, stack=stack,
                        space=space or SearchSpace(), base=base or TrainingLayout(), **settings))  # fmt: skip
    if not jobs:
        raise KernelcastError(
            f"no layout of {gpus} GPUs divides {model.name} and a global batch of {global_batch}: give other gpus, "
            "global_batch, or fewer limits on sizes"
        )
    fitting = sorted(_fitting(jobs), key=least_s)
    if not fitting:
        raise _none_fits(jobs)
    ranked = _ranked(fitting, conditions, times, progress)
    return LayoutSearch(ranked=ranked, tried=len(jobs), too_large=len(jobs) - len(fitting),
                        slower=len(fitting) - len(ranked))  # fmt: skip


def _ranked(
    jobs: Sequence[TrainingJob], conditions: Conditions, times: Times | None,
    progress: Callable[[int, int], None] | None,
) -> tuple[TrainingForecast, ...]:  # fmt: skip
    """Forecasts, fastest first; equal ones as they were listed. ``jobs``: by the least time they can take."""
    times = times or Times(jobs[0].gpu, conditions)
    found: list[TrainingForecast] = []
    best_s = float("inf")
    for first in range(0, len(jobs), _CHUNK):
        some = [job for job in jobs[first : first + _CHUNK] if least_s(job) < best_s]
        if not some:
            break
        found += forecast_many(some, conditions, times)
        best_s = min(each.time_s for each in found)
        if progress is not None:
            progress(min(first + _CHUNK, len(jobs)), len(jobs))
    return tuple(sorted(found, key=lambda each: each.time_s))


def least_s(job: TrainingJob) -> float:
    """No step is faster than its model's FLOPs at the peak of its fastest products, with the bubble of 1F1B: a stage
    waits for the passes of one micro-batch through all others. (With virtual stages parts may be uneven: no bubble.)"""
    layout, format = job.layout, job.precision
    peak_flops = max(matmul_flops_per_s(job.gpu, name) for name in {format.forward, format.dgrad, format.attention})
    waits = (layout.pp - 1) / layout.micro_batches if layout.schedule == "1f1b" else 0.0
    return model_flops(job) / job.gpus / peak_flops * (1 + waits)


def _sharded(job: TrainingJob) -> tuple[int, ...]:
    """What decides what a rank holds all the time."""
    layout = job.layout
    return layout.tp, layout.cp, layout.pp, layout.ep, layout.expert_tp, layout.zero


def _fitting(jobs: Sequence[TrainingJob]) -> Iterator[TrainingJob]:
    """Those that fit. Where parameters and states alone do not, or not with everything recomputed (which needs the
    least of all ways), the other jobs of that layout are not looked at."""
    available = jobs[0].gpu.dram_bytes - jobs[0].reserved_bytes
    held: dict[tuple[int, ...], bool] = {}
    recomputed: dict[tuple[TrainingLayout, int], bool] = {}
    for job in jobs:
        key, layout = _sharded(job), (job.layout, job.micro_batch)
        if key not in held:
            held[key] = least_bytes(job) <= available
        if held[key] and layout not in recomputed:
            recomputed[layout] = peak(replace(job, recompute=_ALL)).fits
        if held[key] and recomputed[layout] and (job.recompute == _ALL or peak(job).fits):
            yield job


def _none_fits(jobs: Sequence[TrainingJob]) -> DoesNotFit:
    """Of the layouts that hold least, the one that lacks least."""
    held = {_sharded(job): job for job in jobs}
    least = sorted(held, key=lambda key: least_bytes(held[key]))[:8]
    missing = [(peak(job).missing_bytes, at) for at, job in enumerate(jobs) if _sharded(job) in least]
    job = jobs[min(missing)[1]]
    memory = peak(job)
    return DoesNotFit(
        f"none of {len(jobs):,} layouts of {job.model.name} on {job.gpus} x {job.gpu.id} fits: {job.layout.label}, "
        f"micro-batch {job.micro_batch}, recompute {job.recompute.mode} comes closest and lacks "
        f"{memory.missing_bytes / 2**30:,.1f} GiB a GPU; give more GPUs, a shorter seq or offload",
        memory,
    )


# ---- every valid layout


def layouts(
    model: Architecture, gpu: Gpu, gpus: int, *, global_batch: int, seq: int, precision: TrainingPrecision | str,
    stack: TrainingStack | str, space: SearchSpace, base: TrainingLayout, **settings: Any,
) -> Iterator[TrainingJob]:  # fmt: skip
    """Jobs of every valid layout, in a fixed order."""
    run = training_stack(stack) if isinstance(stack, str) else stack
    formats = named_precision(precision) if isinstance(precision, str) else precision
    recomputes = space.recompute or _recomputes(model)
    for tp, cp, pp, ep, expert_tp in _sizes(model, gpu, gpus, seq, space, base):
        dp = gpus // (tp * cp * pp)
        zeros = (space.zero or (run.zero,)) if dp * cp > 1 else (0,)
        for micro_batch, virtual in itertools.product(space.micro_batch or _MICRO_BATCHES, _virtual(model, pp, space)):
            micro_batches, rest = divmod(global_batch, dp * micro_batch)
            if rest or (virtual > 1 and micro_batches % pp):
                continue
            for zero, recompute in itertools.product(zeros, recomputes):
                layout = job_layout(base, gpus, global_batch, micro_batch, tp=tp, cp=cp, pp=pp, ep=ep,
                                    expert_tp=expert_tp, virtual_stages=virtual, zero=zero)  # fmt: skip
                yield TrainingJob(model=model, gpu=gpu, layout=layout, seq=seq, micro_batch=micro_batch, stack=run,
                                  precision=formats, recompute=recompute, **settings)  # fmt: skip


def job_layout(
    base: TrainingLayout, gpus: int, global_batch: int, micro_batch: int, *, tp: int = 1, cp: int = 1, pp: int = 1,
    ep: int = 1, expert_tp: int = 1, virtual_stages: int = 1, zero: int = 0,
) -> TrainingLayout:  # fmt: skip
    """A layout whose data parallel ranks and micro-batches follow from the GPUs and the batch."""
    dp, rest = divmod(gpus, tp * cp * pp)
    if rest:
        raise KernelcastError(f"tp {tp} x cp {cp} x pp {pp} do not divide {gpus} GPUs")
    micro_batches, rest = divmod(global_batch, dp * micro_batch)
    if rest:
        raise KernelcastError(f"global_batch {global_batch} is no multiple of micro_batch {micro_batch} x dp {dp}")
    schedule: dict[str, Any] = {"schedule": "interleaved", "virtual_stages": virtual_stages}
    return replace(base, tp=tp, cp=cp, pp=pp, dp=dp, ep=ep, expert_tp=expert_tp, zero=zero if dp * cp > 1 else 0,
                   sequence_parallel=tp > 1, micro_batches=micro_batches,
                   **(schedule if virtual_stages > 1 else {}))  # fmt: skip


def _sizes(
    model: Architecture, gpu: Gpu, gpus: int, seq: int, space: SearchSpace, base: TrainingLayout
) -> Iterator[tuple[int, int, int, int, int]]:
    """tp, cp, pp, ep, expert_tp. Tensor parallel ranks share a node's links; experts are on all ranks of a stage."""
    blocks = [run.layer.mlp for run in model.distinct_layers if isinstance(run.layer.mlp, Experts)]
    divisors = [size for size in range(1, gpus + 1) if gpus % size == 0]
    node = node_gpus(gpu, base.gpus_per_node)
    tensor = [tp for tp in space.tp or divisors if tp <= node and _shards(model, tp)]
    context = [cp for cp in space.cp or divisors if seq % (2 * cp if cp > 1 else 1) == 0
               and (cp == 1 or seq // cp >= _LEAST_TOKENS)]  # fmt: skip
    for tp, cp, pp in itertools.product(tensor, context, space.pp or divisors):
        if gpus % (tp * cp * pp) or not _divides_layers(model, pp):
            continue
        ranks = gpus // pp
        every = space.ep or (divisors if blocks else (1,))
        for expert_tp, ep in itertools.product((space.expert_tp or sorted({1, tp})) if blocks else (1,), every):
            if ranks % (ep * expert_tp):
                continue
            if all(block.experts % ep == 0 and block.inter % expert_tp == 0 for block in blocks):
                yield tp, cp, pp, ep, expert_tp


def _shards(model: Architecture, tp: int) -> bool:
    """Whether heads and widths divide."""
    for run in model.distinct_layers:
        layer = run.layer
        dense = layer.mlp.shared if isinstance(layer.mlp, Experts) else layer.mlp
        if dense is not None and dense.inter % tp:
            return False
        try:
            if layer.attention is not None:
                check_heads(layer.attention, tp, model.name)
        except KernelcastError:
            return False
    return True


def _divides_layers(model: Architecture, parts: int) -> bool:
    """Whether no part has far more than its share."""
    layers = model.layer_count
    return parts <= layers and -(-layers // parts) * parts <= _UNEVEN * layers


def _virtual(model: Architecture, pp: int, space: SearchSpace) -> Sequence[int]:
    if pp == 1:
        return (1,)
    return [v for v in space.virtual_stages or _VIRTUAL if _divides_layers(model, pp * v)]


def _recomputes(model: Architecture) -> tuple[Recompute, ...]:
    """None; what is cheap to make again; all."""
    layers = [run.layer for run in model.distinct_layers]
    cheap = ["layernorm"]
    cheap += ["moe_act"] if any(isinstance(layer.mlp, Experts) for layer in layers) else []
    cheap += ["mlp_act"] if any(isinstance(layer.mlp, Dense) for layer in layers) else []
    cheap += ["mla_up_proj"] if any(isinstance(layer.attention, LatentAttention) for layer in layers) else []
    return Recompute(), Recompute("selective", modules=tuple(cheap)), _ALL
