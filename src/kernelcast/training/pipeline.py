"""Pipeline schedules: which micro-batch each stage works on, in which order, and when that lets it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple


class Task(NamedTuple):
    """One pass of a micro-batch through one part of the model."""

    backward: bool
    micro_batch: int
    part: int  # of the model's depth: part % stages is the stage


@dataclass(frozen=True)
class Timing:
    """Seconds of every task: by part; and to send a result on from each part."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    last_backward_s: Sequence[float]  # of the last micro-batch, whose gradients are sent meanwhile
    send_s: Sequence[float]  # after part i to part i + 1, and the gradient back


@dataclass(frozen=True)
class Timetable:
    """When each task of each stage starts and ends."""

    tasks: tuple[tuple[tuple[Task, float, float], ...], ...]

    @property
    def ends_s(self) -> tuple[float, ...]:
        return tuple(max((end for _, _, end in stage), default=0.0) for stage in self.tasks)


def orders(schedule: str, stages: int, micro_batches: int, virtual: int = 1) -> list[list[Task]]:
    """The tasks of each stage in the order in which it takes them."""
    return [_order(schedule, stage, stages, micro_batches, virtual) for stage in range(stages)]


def _order(schedule: str, stage: int, stages: int, micro_batches: int, virtual: int) -> list[Task]:
    """Some forward passes to fill the pipeline (GPipe: all), then one forward and one backward in turn, then what is
    left. Interleaved as in Megatron-LM (Narayanan et al. 2021, schedules.py): groups of ``stages`` micro-batches pass
    one part of the stage after another, backward from its last part to its first.
    """
    parts = range(stage, stages * virtual, stages)
    groups = [range(first, min(first + stages, micro_batches)) for first in range(0, micro_batches, stages)]
    forward = [Task(False, i, part) for group in groups for part in parts for i in group]
    backward = [Task(True, i, part) for group in groups for part in reversed(parts) for i in group]
    if schedule == "gpipe":
        return forward + backward
    warm = stages - stage - 1 if virtual == 1 else (stages - stage - 1) * 2 + (virtual - 1) * stages
    warm = min(warm, len(forward))
    tasks = forward[:warm]
    for one, other in zip(forward[warm:], backward, strict=False):
        tasks += [one, other]
    return tasks + backward[len(forward) - warm :]


def run(order: list[list[Task]], timing: Timing, micro_batches: int) -> Timetable:
    """Each stage takes its next task as soon as it is free and the task's input has come."""
    parts, stages = len(timing.forward_s), len(order)
    done: dict[Task, float] = {}
    clocks = [0.0] * stages
    table: list[list[tuple[Task, float, float]]] = [[] for _ in order]
    left = [list(reversed(tasks)) for tasks in order]
    while any(left):
        before = len(done)
        for stage, tasks in enumerate(left):
            while tasks:
                source = _source(tasks[-1], parts)
                if source is not None and source not in done:
                    break
                task, ready_s = tasks.pop(), 0.0
                if source is not None:
                    across = source.part % stages != stage
                    ready_s = done[source] + (timing.send_s[min(source.part, task.part)] if across else 0.0)
                start = max(clocks[stage], ready_s)
                clocks[stage] = done[task] = start + _time_s(task, timing, micro_batches)
                table[stage].append((task, start, clocks[stage]))
        if len(done) == before:
            raise RuntimeError("a pipeline schedule waits for itself")
    return Timetable(tuple(tuple(stage) for stage in table))


def _source(task: Task, parts: int) -> Task | None:
    """The task whose result this one takes in."""
    if not task.backward:
        return task._replace(part=task.part - 1) if task.part else None
    return task._replace(backward=False) if task.part == parts - 1 else task._replace(part=task.part + 1)


def _time_s(task: Task, timing: Timing, micro_batches: int) -> float:
    if not task.backward:
        return timing.forward_s[task.part]
    last = task.micro_batch == micro_batches - 1
    return (timing.last_backward_s if last else timing.backward_s)[task.part]


def most_in_flight(order: Sequence[Task]) -> int:
    """Forward passes of a stage whose backward pass has not run, at most."""
    return max(accumulate(-1 if task.backward else 1 for task in order))
