"""NeuSight (ASPLOS'25): the utilisation that a tile reaches, from four numbers of the tile.

    utilisation = σ(γ) − σ(α) / waves,   waves = ceil(tiles / SMs)
    time = waves × tile FLOPs / (min(peak of an SM, intensity × bandwidth of an SM) × utilisation)

A network a family gives γ and α, so no time is below the roofline. The network sees (log2) the tile's FLOPs over the
FLOP/s of an SM, its bytes over the bandwidth of an SM, and its bytes over the memory and over the L2 of an SM.

Where this differs from the original: the tile is kernelcast's best candidate, not that of the nearest profiled kernel
(which this data does not have, and which is often wrong), and this makes the baseline stronger; a tile's bytes are its
share of the compulsory ones; the network is 4×256 rather than 8×512, so that its weights ship small; op and
dtype are inputs. A call of several kernels adds up: the law for those with tiles, bytes over bandwidth for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernelcast.forecast.network import Floats
from kernelcast.forecast.predictor import Estimate, PredictorInput
from kernelcast.hardware import Gpu
from kernelcast.machine.analyse import Analysis
from kernelcast.ops.work import Array
from kernelcast_lab.baselines.family_net import FamilyNet, NetBaseline, categorical_inputs, sigmoid
from kernelcast_lab.baselines.roofline import FMA, TENSOR, bytes_s, memory_bound_s, plain_estimate, roofline_s

# Products, attention, MoE; "memory" is element-wise ops, softmax and norms. NeuSight calls any other op memory-bound.
FAMILIES = ("gemm", "attention", "mla", "moe", "memory")
NAMES = ("tile_math", "tile_bytes", "bytes_over_memory", "bytes_over_l2")
LEAST_UTILISATION = 1e-4  # γ and α are free, so the law itself may fall below 0
_LEAST_S = 1e-12  # log2 of a tile without math


@dataclass(frozen=True)
class Tiles:
    """One kernel of many calls, as tiles."""

    values: Floats  # (calls, 4), log2
    waves: Array
    roofline_s: Array  # of one tile on one SM


@dataclass(frozen=True)
class Neusight(NetBaseline):
    """NeuSight's law. A family that it was not fitted on gets the roofline; one that it never models, its bytes."""

    name: str = "neusight-1"

    def estimate(self, question: PredictorInput) -> Estimate:
        family = question.kernel.family
        if family not in FAMILIES:
            return plain_estimate(memory_bound_s(question), question)
        if family not in self.nets:
            return plain_estimate(roofline_s(question), question)
        tiled, rest = split(question)
        time = np.zeros(question.calls.count)
        for work in rest:
            time = time + bytes_s(work, question.gpu)
        for work in tiled:
            time = time + _tiled_s(self.nets[family], work, question)
        return plain_estimate(time, question)


def split(question: PredictorInput) -> tuple[list[Analysis], list[Analysis]]:
    """Kernels that the law is for and the others; where none has a named tile, every task is one."""
    works = question.best
    if not any(work.tile for work in works):
        return works, []
    return [p for p in works if p.tile], [p for p in works if not p.tile]


def _tiled_s(net: FamilyNet, work: Analysis, question: PredictorInput) -> Array:
    result = tiles(work, question.gpu)
    out = net(result.values, categorical_inputs(question))
    return law_s(result.waves, result.roofline_s, out[:, 0], out[:, 1])


def tiles(work: Analysis, gpu: Gpu) -> Tiles:
    """Waves and the four numbers of one kernel."""
    count = np.maximum(work.tasks, 1.0)
    main = np.where(work.limits[TENSOR] > 0, work.limits[TENSOR], work.limits[FMA])
    tile_math_s = main * gpu.sm_count / count  # a limit is spread over all SMs, a tile is on one
    tile_bytes = work.footprint_bytes / count
    tile_bytes_s = tile_bytes * gpu.sm_count / gpu.dram_bytes_per_s
    numbers = (
        np.maximum(tile_math_s, _LEAST_S),
        np.maximum(tile_bytes_s, _LEAST_S),
        np.maximum(tile_bytes, 1.0) * gpu.sm_count / gpu.dram_bytes,
        np.maximum(tile_bytes, 1.0) * gpu.sm_count / gpu.l2_bytes,
    )
    return Tiles(
        values=np.log2(np.stack(numbers, axis=1)).astype(np.float32),
        waves=np.ceil(count / gpu.sm_count),
        roofline_s=np.maximum(tile_math_s, tile_bytes_s),  # FLOPs / min(peak, intensity × bandwidth)
    )


def law_s(waves: Array, tile_roofline_s: Array, gamma: Array, alpha: Array) -> Array:
    """Seconds of a kernel: its waves, each a tile long at the utilisation reached."""
    utilisation = sigmoid(gamma) - sigmoid(alpha) / waves
    return waves * tile_roofline_s / np.maximum(utilisation, LEAST_UTILISATION)
