"""Pipeline schedules: which micro-batch each stage works on, in which order, and when that lets it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

    @property
    def busy_s(self) -> tuple[float, ...]:
        return tuple(sum(end - start for _, start, end in stage) for stage in self.tasks)


def orders(schedule: str, stages: int, micro_batches: int, virtual: int = 1) -> list[list[Task]]:
    """The tasks of each stage in the order in which it takes them."""
    if schedule == "gpipe":
        return [
            [Task(False, i, s) for i in range(micro_batches)] + [Task(True, i, s) for i in range(micro_batches)]
            for s in range(stages)
        ]
    return [_one_forward_one_backward(stage, stages, micro_batches, virtual) for stage in range(stages)]


def _one_forward_one_backward(stage: int, stages: int, micro_batches: int, virtual: int) -> list[Task]:
    """Some forward passes to fill the pipeline, then one forward and one backward in turn, then what is left.

    Interleaved as in Megatron-LM (Narayanan et al. 2021, schedules.py): groups of ``stages`` micro-batches pass one
    part of the stage after another.
    """
    forward = [Task(False, *_turn(k, stages, virtual, stage)) for k in range(micro_batches * virtual)]
    backward = [Task(True, i, _mirrored(p, stages, virtual)) for _, i, p in forward]
    warm = stages - stage - 1 if virtual == 1 else (stages - stage - 1) * 2 + (virtual - 1) * stages
    warm = min(warm, len(forward))
    tasks = forward[:warm]
    for one, other in zip(forward[warm:], backward, strict=False):
        tasks += [one, other]
    return tasks + backward[len(forward) - warm :]


def _turn(k: int, stages: int, virtual: int, stage: int) -> tuple[int, int]:
    """Micro-batch and part of a stage's k-th forward pass."""
    if virtual == 1:
        return k, stage
    within = k % (stages * virtual)
    return (k // (stages * virtual)) * stages + within % stages, (within // stages) * stages + stage


def _mirrored(part: int, stages: int, virtual: int) -> int:
    """Backward passes take a stage's parts from the last to the first."""
    return (virtual - 1 - part // stages) * stages + part % stages


def run(order: list[list[Task]], timing: Timing, micro_batches: int) -> Timetable:
    """Each stage takes its next task as soon as it is free and the task's input has come."""
    parts, stages = len(timing.forward_s), len(order)
    done: dict[Task, float] = {}
    clocks, at = [0.0] * stages, [0] * stages
    table: list[list[tuple[Task, float, float]]] = [[] for _ in order]
    left = sum(len(tasks) for tasks in order)
    while left:
        before = left
        for stage, tasks in enumerate(order):
            while at[stage] < len(tasks):
                task = tasks[at[stage]]
                ready = _ready_s(task, parts, stages, timing.send_s, done)
                if ready is None:
                    break
                start = max(clocks[stage], ready)
                clocks[stage] = done[task] = start + _time_s(task, timing, micro_batches)
                table[stage].append((task, start, clocks[stage]))
                at[stage] += 1
                left -= 1
        if left == before:
            raise RuntimeError("a pipeline schedule waits for itself")
    return Timetable(tuple(tuple(stage) for stage in table))


def _ready_s(
    task: Task, parts: int, stages: int, send_s: Sequence[float], done: dict[Task, float]
) -> float | None:  # fmt: skip
    """When a task's inputs are there; None while what makes them has not run."""
    if not task.backward:
        source = task._replace(part=task.part - 1) if task.part else None
        link = task.part - 1
    elif task.part == parts - 1:
        source, link = task._replace(backward=False), -1
    else:
        source, link = task._replace(part=task.part + 1), task.part
    if source is None:
        return 0.0
    if source not in done or (task.backward and task._replace(backward=False) not in done):
        return None
    across = source.part % stages != task.part % stages
    return done[source] + (send_s[link] if across else 0.0)


def _time_s(task: Task, timing: Timing, micro_batches: int) -> float:
    if not task.backward:
        return timing.forward_s[task.part]
    last = task.micro_batch == micro_batches - 1
    return (timing.last_backward_s if last else timing.backward_s)[task.part]


def most_in_flight(order: Sequence[Task]) -> int:
    """Forward passes of a stage whose backward pass has not run, at most."""
    held = most = 0
    for task in order:
        held += -1 if task.backward else 1
        most = max(most, held)
    return most
