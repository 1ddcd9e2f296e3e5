"""Features of a call for the learned efficiency: what the machine found, as ratios of times.

Ratios transfer between GPUs; raw specs and absolute times do not. A GPU enters only through them, its sustained
shares, and how its matrix instructions work. Families add features of shape (``Kernel.shape_features``), the same on
every GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernelcast.forecast.predictor import ranked_times, sustained_shares, sustained_start_s, work_times
from kernelcast.hardware import Gpu
from kernelcast.hardware.gpu import TCGEN05, WGMMA
from kernelcast.machine.analyse import PIPELINES, Analysis, summed
from kernelcast.machine.limits import PER_SM
from kernelcast.ops.work import Array, Number

GPU_FEATURES = ("sustained_tensor", "sustained_dram", "wgmma", "tcgen05")
LIMIT_SHARES = tuple(f"{name}_share" for name in PIPELINES)  # each limit's part of the time, as a log
KEEP = 3  # candidates whose features count
_STEP_CYCLES = 500.0  # one dependent load-compute step: about one trip to L2 and back
_SMALLEST = 1e-3  # a limit below a thousandth of the time does not matter
_NO_BUSIEST = ("dram", "link", "launch")
_CORE = np.array([name in PER_SM for name in PIPELINES])


@dataclass(frozen=True)
class Features:
    """One row a call."""

    names: tuple[str, ...]
    values: NDArray[np.float32]
    estimate_s: Array  # the generic time, which the learned efficiency corrects
    bound_s: Array


def features(ranked: Sequence[tuple[Analysis, ...]], hints: Mapping[str, Array], gpu: Gpu) -> Features:
    """``ranked``: for each work its best few candidates."""
    best = [candidates[0] for candidates in ranked]
    times = work_times(best, gpu)
    total = summed(times)
    limits = [at_boost(work.limits, gpu) for work in best]
    bound = summed([work.max(axis=0) for work in limits])
    columns: dict[str, Number] = {
        "launches_worth": _log(total / sustained_start_s(gpu)),
        "over_bound": _log(total / bound),
        **_limits(best, limits, gpu, total),
        **_memory(best, gpu),
    }
    tiled = [index for index, candidates in enumerate(ranked) if candidates[0].tile]
    for number, index in enumerate(tiled):  # numbered among themselves: small kernels around them come and go
        columns |= _tiles(f"k{number}", ranked[index], times[index] / total, total, gpu)
    columns |= hints
    columns |= gpu_features(gpu)
    return Features(tuple(columns), rows_of(columns, len(total)), total, bound)


def rows_of(columns: Mapping[str, Number], count: int) -> NDArray[np.float32]:
    """One row a call; a column of one number is the same for all. Columns lie together in memory, as they are made."""
    values = np.empty((len(columns), count), dtype=np.float32)
    for at, column in enumerate(columns.values()):
        values[at] = column
    return values.T


def aligned(have: tuple[str, ...], values: NDArray[np.float32], want: tuple[str, ...]) -> NDArray[np.float32]:
    """Columns in the order of ``want``; one that is missing is 0."""
    if have == want:
        return values
    order, missing = _places(have, want)
    out = values.T[order]
    if missing:
        out[missing] = 0.0
    return out.T


@functools.lru_cache(maxsize=256)
def _places(have: tuple[str, ...], want: tuple[str, ...]) -> tuple[list[int], list[int]]:
    """Of each wanted column, its place; and those that are not there."""
    position = {name: at for at, name in enumerate(have)}
    return [position.get(name, 0) for name in want], [at for at, name in enumerate(want) if name not in position]


def _log(ratio: Array) -> Array:
    return np.log2(np.maximum(ratio, 1e-9))


def at_boost(limits: Array, gpu: Gpu) -> Array:
    """(pipelines, calls) at the advertised boost clock, which limits of the GPUs that were fitted are at."""
    return limits if gpu.clock_reserve == 1 else limits * np.where(_CORE, gpu.clock_reserve, 1.0)[:, None]


def _limits(best: Sequence[Analysis], limits: Sequence[Array], gpu: Gpu, total: Array) -> dict[str, Array]:
    """Each pipeline's share of the time: spread evenly, and on the busiest SM at the rate it sustains."""
    even = summed(limits) / total
    busiest = summed([work.busiest_limits for work in best]) / sustained_shares(gpu) / total
    columns = {}
    logs = (np.log2(np.maximum(share, _SMALLEST)) for share in (even, busiest))
    for name, share, most in zip(PIPELINES, *logs, strict=True):
        columns[f"{name}_share"] = share
        if name not in _NO_BUSIEST:
            columns[f"{name}_busiest"] = most
    return columns


def _memory(best: Sequence[Analysis], gpu: Gpu) -> dict[str, Array]:
    footprint = functools.reduce(np.maximum, [work.footprint_bytes for work in best])
    dram = summed([work.dram_bytes for work in best])
    again = summed([work.refetched_bytes for work in best])
    logs = np.log2(np.maximum(np.array([footprint, dram]) / gpu.l2_bytes, 1e-4))
    return {"footprint_over_l2": logs[0], "dram_over_l2": logs[1], "refetched": again / (dram + again + 1.0)}


def _tiles(prefix: str, candidates: tuple[Analysis, ...], share: Array, total: Array, gpu: Gpu) -> dict[str, Number]:
    """How the tasks of one kernel fall onto the SMs, for its best candidates."""
    first = candidates[0]
    waits = np.log2(np.maximum(np.array([first.setup_s, first.step_s]) / total, _SMALLEST))
    columns: dict[str, Number] = {
        "share": share,
        "waves": _log(first.waves + 1e-3),
        "padding": first.padding,
        "ctas": first.ctas_per_sm,
        "steps": _log(first.serial_steps),
        "chain": _log(first.serial_steps * _STEP_CYCLES / gpu.clock_boost_hz / total),
        "setup": waits[0],
        "walk": waits[1],
        "resident": first.kept_share,
    }
    columns |= _candidates(candidates[:KEEP], gpu)
    return {f"{prefix}_{name}": value for name, value in columns.items()}


def _candidates(candidates: tuple[Analysis, ...], gpu: Gpu) -> dict[str, Number]:
    """What names each of the best, how evenly it falls, how far it is behind; a family with fewer repeats its last."""
    first = candidates[0]
    ranks = [min(rank, len(candidates) - 1) for rank in range(KEEP)]
    times = ranked_times(first, gpu)
    tails: Sequence[Array] | Array = [] if first.ranked else [first.tail]
    logs: Mapping[str, Number] = first.candidates.tile_logs
    behind = None
    if first.ranked is not None:
        tails, logs = first.ranked.tails, first.ranked.tile_logs
        times = np.array(work_times(candidates, gpu)) if times is None else times
        behind = _behind(times[1:], times[0]) if len(candidates) > 1 else None
    columns: dict[str, Number] = {}
    for rank, at in enumerate(ranks):
        columns[f"tail_{rank}"] = tails[at]
        if rank:
            columns[f"behind_{rank}"] = 0.0 if behind is None else behind[at - 1]
        columns |= {f"{name}_{rank}": _of_rank(value, at, first) for name, value in logs.items()}
    return columns


def _of_rank(values: Number, rank: int, first: Analysis) -> Number:
    """Of one candidate; what is the same for all of them has no ranks."""
    if first.ranked is None or not isinstance(values, np.ndarray) or values.ndim < 2:
        return values
    return values[rank]


def _behind(others: Array, leader: Array) -> Array:
    """How much longer other candidates take; nothing where the kernel does not run."""
    runs = leader > 0
    return np.where(runs, _log(others / np.where(runs, leader, 1.0)), 0.0)


def gpu_features(gpu: Gpu) -> dict[str, float]:
    """Features that are the same for every call on a GPU, so they identify it."""
    shares = sustained_shares(gpu)[:, 0]
    values = (
        float(shares[PIPELINES.index("tensor")]),
        float(shares[PIPELINES.index("dram")]),
        float(gpu.instruction_path == WGMMA),
        float(gpu.instruction_path == TCGEN05),
    )
    return dict(zip(GPU_FEATURES, values, strict=True))
