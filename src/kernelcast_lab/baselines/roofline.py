"""The roofline: useful FLOPs over the peak or compulsory bytes over the bandwidth, whichever takes longer.

Vendor peaks, no launch floor, no waves, no L2: a kernel that neither pads nor waits. Kernels of one call add up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernelcast.forecast.evidence import EvidenceMatch, without_evidence
from kernelcast.forecast.predictor import Estimate, PredictorInput
from kernelcast.hardware import Gpu, fabric
from kernelcast.machine.analyse import PIPELINES, Analysis, Score, by_pipelines
from kernelcast.ops.base import Configuration, Kernel
from kernelcast.ops.dtypes import find_dtype
from kernelcast.ops.work import Array
from kernelcast.results import EXTRAPOLATED

TENSOR, FMA, LINK = (PIPELINES.index(name) for name in ("tensor", "fma", "link"))


@dataclass(frozen=True)
class Roofline:
    """Peaks alone."""

    name: str = "roofline-1"
    keep: int = 1

    def score(self, target: Gpu) -> Score:
        return by_pipelines

    def what_if_spread(self, family: str) -> None:
        return None

    def matches(self, kernel: type[Kernel], choices: Configuration, target: Gpu) -> tuple[EvidenceMatch, ...]:
        return (without_evidence(kernel, choices, target),)

    def estimate(self, question: PredictorInput) -> Estimate:
        return plain_estimate(roofline_s(question), question)


def roofline_s(question: PredictorInput) -> Array:
    """Seconds of each call."""
    math = find_dtype(question.calls.choice("dtype")).math
    works = [np.maximum(math_s(work, question.gpu, math), bytes_s(work, question.gpu)) for work in question.best]
    return np.maximum(np.sum(works, axis=0), link_s(question))


def memory_bound_s(question: PredictorInput) -> Array:
    """Seconds of each call if bytes were all that counts."""
    works = [bytes_s(work, question.gpu) for work in question.best]
    return np.maximum(np.sum(works, axis=0), link_s(question))


def math_s(work: Analysis, gpu: Gpu, math: str) -> Array:
    """Useful FLOPs over the peak of the unit that does them: the matrix unit where the kernel uses it at all."""
    tensor_peak = gpu.tensor_flops_per_s(math)
    on_tensor = work.useful_flops / tensor_peak if tensor_peak else np.zeros(1)
    # Without matrix work all FLOPs are vector FLOPs, so limit / FLOPs is 1 / peak in the kernel's own vector dtype.
    on_vector = work.useful_flops * work.limits[FMA] / np.maximum(work.flops, 1.0)
    return np.where(work.limits[TENSOR] > 0, on_tensor, on_vector)


def bytes_s(work: Analysis, gpu: Gpu) -> Array:
    """Compulsory bytes, weights and activations alike, over the DRAM bandwidth."""
    return work.footprint_bytes / gpu.dram_bytes_per_s


def link_s(question: PredictorInput) -> Array:
    """Bytes to other GPUs over the link's rate, with the algorithm that sends least; no message latency."""
    total = np.zeros(question.calls.count)
    if not any(np.any(work.limits[LINK] > 0) for work in question.best):
        return total
    for tested in question.kernel.work(question.calls, question.gpu):  # an Analysis has link times, but not link bytes
        between = fabric(tested.link or question.gpu.link_kind, question.gpu)
        sent_bytes = np.broadcast_to(np.asarray(tested.link_bytes, dtype=np.float64), tested.shape)
        total = total + np.min(sent_bytes, axis=0) / between.bytes_per_s
    return total


def plain_estimate(time_s: Array, question: PredictorInput) -> Estimate:
    """A time and nothing else: not raised to the machine's bound, which would help a baseline."""
    count = question.calls.count
    time = np.broadcast_to(np.where(time_s > 0, time_s, question.gpu.launch_floor_s), (count,))
    return Estimate(time, time, time, time, np.full(count, EXTRAPOLATED))
