"""Who stands in for a GPU that was not measured: its nearest kin of a known generation, or of each generation the GPU
most like it; and what is known to differ between the two."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kernelcast.forecast.features import LIMIT_SHARES, gpu_features
from kernelcast.forecast.generic import sustained_shares
from kernelcast.forecast.network import Floats
from kernelcast.hardware import Gpu, gpu
from kernelcast.hardware.paths import FMA, MFMA, MMA_SYNC, TCGEN05, WGMMA
from kernelcast.machine.analyse import PIPELINES

# How far kernels of one path are from those of another: each is written anew for the next one. AMD's are their own.
_PATH_PLACES = {FMA: -1.0, MMA_SYNC: 0.0, WGMMA: 1.0, TCGEN05: 2.0, MFMA: -4.0}


def stand_in(target: Gpu, measured: Sequence[str]) -> Gpu:
    """The measured GPU to take the name of: itself, else the nearest of its compute capability, else of its instruction
    path, whose kernels it runs, first those that multiply most of its formats (sm_120 has the fp8 of sm_89, which sm_80
    has not), else of all."""
    if target.id in measured:
        return gpu(target.id)
    known = [gpu(name) for name in measured]
    kin = [g for g in known if g.compute_capability == target.compute_capability]
    if not kin:
        kin = [g for g in known if g.instruction_path == target.instruction_path]
        missing = [len(set(target.tensor_flops_per_clk_sm) - set(g.tensor_flops_per_clk_sm)) for g in kin]
        kin = [g for g, lacks in zip(kin, missing, strict=True) if lacks == min(missing)]
    return min(kin or known, key=lambda g: (distance(g, target), g.id))


def clock_shift(kin: Gpu, target: Gpu) -> float:
    """What the networks learned of ``kin`` has its power limit in it: long matrix products run at a lower clock there.

    The log of how much less the target's clock is lowered (below 0) or more; 0 where that was not measured on both.
    """
    if kin.id == target.id or not (kin.long_tensor_fraction and target.long_tensor_fraction):
        return 0.0
    tensor = PIPELINES.index("tensor")
    held = [g.long_tensor_fraction / float(sustained_shares(g)[tensor, 0]) for g in (kin, target)]  # type: ignore[operator]
    return float(np.log(held[0] / held[1]))


def format_shift(kin: Gpu, target: Gpu, dtype: str | None) -> float:
    """The same for a format: what ``kin`` sustains in it, against 16 bits, is in what the networks learned; the log of
    how much less the target sustains of it (above 0) or more; 0 where that was not measured on both."""
    if kin.id == target.id or dtype is None:
        return 0.0
    shares = []
    for one in (kin, target):
        share, plain = one.sustained_tensor_fractions.get(dtype), one.sustained_tensor_fraction
        if not share or not plain:
            return 0.0
        shares.append(share / plain)
    return float(np.log(shares[0] / shares[1]))


def distance(one: Gpu, other: Gpu) -> float:
    """How unlike two GPUs are: the factors between their main numbers, as logs; DRAM's counts twice, because it
    tells a data-centre part with HBM from a card with GDDR. The rate of matrix products tells an H20 from an H100."""
    numbers = ("dram_bytes_per_s", "dram_bytes_per_s", "sm_count", "l2_bytes", "power_w", "mfu_flops_per_s")
    return float(sum(abs(np.log(getattr(one, name) / getattr(other, name))) for name in numbers))


def as_gpu(names: Sequence[str], values: Floats, kin: Gpu, target: Gpu) -> Floats:
    """The features that name a GPU as they are on ``kin``: half a name would be worse than none.

    The launch floor is such a name too: it is the shortest kernel that somebody measured there. Where it is the bound,
    the distance to the bound moves with it.
    """
    named = gpu_features(kin)
    changed = values.copy()
    for at, name in enumerate(names):
        if name in named:
            changed[:, at] = named[name]
    if kin.launch_floor_s != target.launch_floor_s and "launch_share" in names:
        limits = [at for at, name in enumerate(names) if name in LIMIT_SHARES]
        changed[:, names.index("launch_share")] += np.float32(np.log2(kin.launch_floor_s / target.launch_floor_s))
        moved = changed[:, limits].max(axis=1) - values[:, limits].max(axis=1)
        changed[:, names.index("over_bound")] -= moved
    return changed


def unlikeness(one: Gpu, other: Gpu) -> float:
    """How little the kernels of one GPU tell of another's: steps between their instruction paths, and the log of the
    factor between their DRAM rates, which tells HBM from GDDR."""
    paths = abs(_PATH_PLACES[one.instruction_path] - _PATH_PLACES[other.instruction_path])
    return paths + abs(float(np.log(one.dram_bytes_per_s / other.dram_bytes_per_s)))


def shares(known: Sequence[Gpu], target: Gpu, likeness: float) -> NDArray[np.float64]:
    """How much each of the GPUs that a new one is answered as counts. ``likeness`` 0: all the same; the larger, the
    more those that are most like it."""
    weights = np.exp(-likeness * np.array([unlikeness(one, target) for one in known]))
    return np.asarray(weights / weights.sum())
