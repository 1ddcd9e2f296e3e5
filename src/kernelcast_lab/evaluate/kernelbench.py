"""Forecasts of KernelBench's problems: the time of one call between two CUDA events, and of its kernels."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

from kernelcast.forecast.conditions import Conditions
from kernelcast.results import Interval
from kernelcast.schedule import usual_host
from kernelcast.tracing.traced import Op, Tensor, Trace
from kernelcast.training.step import Step, run_step
from kernelcast_lab.data.kernelbench import MODES, build

# The same call again and again finds in L2 whatever the one before it left there.
REPEATED = Conditions(rotation=1.0, input_rotation=1.0)


@functools.lru_cache(maxsize=8)  # rows of one problem follow one another on several GPUs and in several modes
def traced(problem: str, version: str) -> Trace:
    from kernelcast.tracing import trace

    return trace(*build(problem, version), "inference", dtype="fp32", name=problem)


def forecast(problem: str, version: str, mode: str, gpu: str) -> Step:
    """One call, eager or as a mode of torch.compile runs it; products in fp32, convolutions in TF32 where there is."""
    from kernelcast.tracing.fusion import fuse

    fused, graph = MODES[mode]
    step = traced(problem, version)
    step = fuse(step) if fused else replace(step, compiled=graph)  # torch.compile's own graphs of eager kernels
    if graph:
        step = replace(step, ops=(*_copied(problem, version), *step.ops))
    # The first event is recorded right before the call: what a training or serving loop does between steps is outside.
    return run_step(step, gpu, REPEATED, graph=graph, on=replace(usual_host(gpu), step_s=0.0))


def _copied(problem: str, version: str) -> Iterator[Op]:
    """A graph reads its inputs from memory of its own, where torch.compile copies those of each call
    (torch/_inductor/cudagraph_trees.py)."""
    for at, x in enumerate(build(problem, version)[1], start=1):
        dtype = "fp32" if x.is_floating_point() else "int64"
        given = Tensor(tuple(x.shape), x.stride(), dtype, storage=-10 * at)
        yield Op("clone", (given,), {}, (replace(given, storage=-10 * at - 1),), "kernel", "forward", "")


def times(step: Step) -> dict[str, Interval]:
    """Wall time of the call, and the time of its kernels."""
    kernels, (below, above) = step.kernel_time_s, step.kernel_spread
    return {
        "time_s": Interval(step.time_s, float(step.low_s), float(step.high_s)),
        "kernel_time_s": Interval(kernels, kernels * (1 - below), kernels * (1 + above)),
    }
