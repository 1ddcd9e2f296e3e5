"""PipeWeave (arXiv 2601.14910): cycles of each pipeline in, efficiency of the math pipe out.

A network a family sees log(1 + cycles) of every pipeline, for the whole kernel (``all``, its work spread over all
SMs) and for the busiest SM (``sm_max``), and the GPU's own rates. Its output is

    efficiency = theoretical cycles of the main math pipe / measured cycles

Kept as published, faults too: absolute cycles and specs, and efficiency against math alone, so that targets of
memory-bound kernels are near 0. Kernels of one call add up before the network sees them. Beyond the original: tasks,
schedules and tiles are kernelcast's own rather than those of the nearest profiled shape, stores count beside loads,
and one network serves all dtypes of a family, with the dtype as an input. Collectives, for which the original has a
random forest a GPU, get the roofline.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernelcast.forecast.features import rows_of
from kernelcast.forecast.network import Floats
from kernelcast.forecast.predictor import Estimate, PredictorInput
from kernelcast.hardware import Gpu
from kernelcast.machine.analyse import PIPELINES, Analysis
from kernelcast.ops.dtypes import find_dtype
from kernelcast.ops.work import Array
from kernelcast_lab.baselines.family_net import NetBaseline, categorical_inputs, sigmoid
from kernelcast_lab.baselines.roofline import plain_estimate, roofline_s

PIPES = ("tensor", "fma", "xu", "smem", "l2", "dram", "issue")
MATH_PIPES = ("tensor", "fma", "issue")  # the main one is the first that the kernel uses; copies have only issue
LEAST_EFFICIENCY = 1e-4
_ROWS = [PIPELINES.index(name) for name in PIPES]
_DRAM = PIPES.index("dram")


@dataclass(frozen=True)
class Inputs:
    """What the network sees of many calls, and the time that its efficiency divides."""

    names: tuple[str, ...]
    values: Floats
    theoretical_s: Array


@dataclass(frozen=True)
class Pipeweave(NetBaseline):
    """PipeWeave's network; the roofline for families that it was not fitted on."""

    name: str = "pipeweave-1"

    def estimate(self, question: PredictorInput) -> Estimate:
        net = self.nets.get(question.kernel.family)
        if net is None:
            return plain_estimate(roofline_s(question), question)
        result = inputs(question)
        efficiency = sigmoid(net(result.values, categorical_inputs(question))[:, 0])
        return plain_estimate(result.theoretical_s / np.maximum(efficiency, LEAST_EFFICIENCY), question)


def inputs(question: PredictorInput) -> Inputs:
    """Features of each call."""
    gpu = question.gpu
    whole, busiest = (np.sum([f(work, gpu) for work in question.best], axis=0) for f in (_all_s, _sm_max_s))
    numbers = {f"{pipe}_all": whole[row] * gpu.clock_boost_hz for row, pipe in enumerate(PIPES)}
    numbers |= {f"{pipe}_sm_max": busiest[row] * gpu.clock_boost_hz for row, pipe in enumerate(PIPES)}
    numbers |= {
        name: np.array(value) for name, value in specs(gpu, find_dtype(question.calls.choice("dtype")).math).items()
    }
    values = rows_of({name: np.log1p(column) for name, column in numbers.items()}, question.calls.count)
    return Inputs(tuple(numbers), values, theoretical_s(whole))


def theoretical_s(whole_s: Array) -> Array:
    """Seconds of the main math pipe, from (pipes, calls) seconds of the whole kernel."""
    first, second, last = (whole_s[PIPES.index(name)] for name in MATH_PIPES)
    return np.where(first > 0, first, np.where(second > 0, second, last))


def specs(gpu: Gpu, math: str) -> dict[str, float]:
    """The GPU as numbers: SMs, clock, and rates per clock, bandwidths among them."""
    return {
        "sm_count": gpu.sm_count,
        "clock_mhz": gpu.clock_boost_hz / 1e6,
        "tensor_flops_per_clk_sm": gpu.tensor_flops_per_clk_sm.get(math, 0.0),
        "fma_flops_per_clk_sm": gpu.fma_flops_per_clk_sm.get("fp32", 0.0),
        "xu_ops_per_clk_sm": gpu.xu_ops_per_clk_sm,
        "issue_warps_per_clk_sm": gpu.issue_warps_per_clk_sm,
        "smem_bytes_per_clk_sm": gpu.smem_bytes_per_clk_sm,
        "smem_bytes_per_sm": gpu.smem_bytes_per_sm,
        "l2_bytes_per_clk": gpu.l2_bytes_per_clk,
        "l2_bytes": gpu.l2_bytes,
        "dram_bytes_per_clk": gpu.dram_bytes_per_s / gpu.clock_boost_hz,
    }


def _all_s(work: Analysis, gpu: Gpu) -> Array:
    """(pipes, calls) seconds of each pipe with the work spread evenly; DRAM moves every compulsory byte."""
    seconds = work.limits[_ROWS]
    seconds[_DRAM] = work.footprint_bytes / gpu.dram_bytes_per_s
    return seconds


def _sm_max_s(work: Analysis, gpu: Gpu) -> Array:
    """The same for the busiest SM, which has its share of the DRAM bandwidth for its own bytes."""
    seconds = work.busiest_limits[_ROWS]
    over_even = work.busiest * gpu.sm_count / np.maximum(work.tasks, 1e-9)
    seconds[_DRAM] = work.footprint_bytes / gpu.dram_bytes_per_s * over_even
    return seconds
