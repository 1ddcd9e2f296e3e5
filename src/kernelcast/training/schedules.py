"""How long a pipeline's schedule takes, for many jobs at once.

The tasks of each stage run in the schedule's order, each as soon as the stage is free and its input has come
(``pipeline.py`` orders 1F1B, interleaved and GPipe). A schedule of many micro-batches is periodic in the middle: a few
periods are run, and the rest adds the time of one.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from kernelcast.ops.work import Array
from kernelcast.training.pipeline import BACKWARD, FORWARD, WEIGHT, PipelineTask, in_order, orders

_PERIODS = 4  # that are run: the pipeline fills, runs evenly, drains


class _Step(NamedTuple):
    stage: int
    what: int
    part: int
    source: int  # the step whose result it needs, -1: none
    link: int  # that the result comes over, -1: none


def tasks_of(schedule: str, stages: int, micro_batches: int, virtual: int = 1) -> list[list[PipelineTask]]:
    """The tasks of each stage in order. zb-h1 (Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241):
    gradients of weights wait until there is nothing else to do, as many micro-batches behind as there are stages before
    it, so that a stage holds no more activations than with 1F1B."""
    if schedule != "zb-h1":
        return orders(schedule, stages, micro_batches, virtual)
    return [_zero_bubble(stage, stages, micro_batches) for stage in range(stages)]


def _zero_bubble(stage: int, stages: int, micro_batches: int) -> list[PipelineTask]:
    warm = min(stages - stage - 1, micro_batches)
    tasks = [PipelineTask(FORWARD, i, stage) for i in range(warm)]
    done = 0
    for at in range(micro_batches):
        if at + warm < micro_batches:
            tasks.append(PipelineTask(FORWARD, at + warm, stage))
        tasks.append(PipelineTask(BACKWARD, at, stage))
        if at - done >= stage:
            tasks.append(PipelineTask(WEIGHT, done, stage))
            done += 1
    return tasks + [PipelineTask(WEIGHT, i, stage) for i in range(done, micro_batches)]


@functools.lru_cache(maxsize=256)
def _steps(schedule: str, stages: int, micro_batches: int, virtual: int) -> tuple[_Step, ...]:
    """All tasks in an order in which each comes after what it needs."""
    number = dict[PipelineTask, int]()
    steps: list[_Step] = []
    for stage, task, source in in_order(tasks_of(schedule, stages, micro_batches, virtual), stages * virtual):
        link, at = -1, -1
        if source is not None:
            at = number[source]
            link = min(source.part, task.part) if source.part % stages != stage else -1
        number[task] = len(steps)
        steps.append(_Step(stage, task.what, task.part, at, link))
    return tuple(steps)


def _run(schedule: str, stages: int, micro_batches: int, virtual: int, times_s: Array, send_s: Array) -> Array:
    jobs = times_s.shape[-1]
    clocks = [np.zeros(jobs)] * stages
    done: list[Array] = []
    for stage, what, part, source, link in _steps(schedule, stages, micro_batches, virtual):
        start = clocks[stage]
        if source >= 0:
            start = np.maximum(start, done[source] + send_s[link] if link >= 0 else done[source])
        clocks[stage] = start + times_s[what, part]
        done.append(clocks[stage])
    return np.array(clocks)


def stage_ends(schedule: str, stages: int, micro_batches: int, virtual: int, times_s: Array, send_s: Array) -> Array:
    """(stages, jobs): when each stage has done its last task. ``times_s``: (3, parts, jobs), of a forward pass, of a
    backward pass (without the gradients of weights in zb-h1, else with them) and of those; ``send_s``: (parts - 1,
    jobs), to the next part."""
    if stages == 1:
        return micro_batches * times_s.sum(axis=(0, 1))[None]
    if schedule != "zb-h1":
        times_s = np.stack([times_s[0], times_s[1] + times_s[2]])
    if micro_batches <= (_PERIODS + 1) * stages:
        return _run(schedule, stages, micro_batches, virtual, times_s, send_s)
    most = _PERIODS * stages + micro_batches % stages
    ends, before = (_run(schedule, stages, n, virtual, times_s, send_s) for n in (most, most - stages))
    whole: Array = ends + (ends - before) * (micro_batches - most) / stages
    return whole


def dual_pipe_end(stages: int, micro_batches: int, times_s: Array) -> Array:
    """(stages, jobs) of DualPipe: each rank has a stage and its mirror, and half of the micro-batches come from either
    side. Its bubble is (stages / 2 - 1) (F&B + B - 3 W), B with W in it (DeepSeek-V3, arXiv 2412.19437, table 2)."""
    both = (times_s + times_s[:, ::-1]) / 2
    forward, backward, weight = both
    bubble = max(0.0, stages / 2 - 1) * np.maximum(0.0, forward + 2 * (backward + weight) - 3 * weight)
    busy: Array = micro_batches * both.sum(axis=0)
    return busy + bubble.mean(axis=0)
