"""Pipeline parallelism: layers split into stages, and schedules that order the micro-batches of each stage."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from kernelcast.errors import KernelcastError
from kernelcast.tracing.traced import Gradient, Op, Tensor, Trace
from kernelcast.training.placement import of_parameters, parameter_groups, with_tensors

# layers.3, h.3, encoder.layer.3, blocks.3: the first number in a module's path after one of these names
_LAYER = re.compile(r"^(?:.*?\.)?(?:layers?|h|blocks?|block_list)\.\d+(?=\.|$)")


class LayerMap:
    """Units of a model: 0 before the first layer, 1 to ``layers``, and one behind the last."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        names = [_layer_name(op.module) for op in trace.ops]
        forward = [name for name, op in zip(names, trace.ops, strict=True) if op.phase == "forward" and name]
        self.names = list(dict.fromkeys(forward))
        self.count = len(self.names)
        self.unit = self._units(names)
        self.owner = self._owners()

    def _units(self, names: list[str]) -> list[int]:
        """The unit of an op outside all layers is that of the op before it, or of the first op of the pass."""
        number = {name: at + 1 for at, name in enumerate(self.names)}
        phases = [op.phase for op in self.trace.ops]
        inside = {
            phase: [at for at, name in enumerate(names) if phases[at] == phase and name in number]
            for phase in ("forward", "backward")
        }
        behind = max(inside["forward"], default=-1)
        first, ended = min(inside["backward"], default=len(names)), max(inside["backward"], default=-1)
        units, now = [], 0
        for at, name in enumerate(names):
            if phases[at] != "backward":
                now = number.get(name, self.count + 1 if at > behind else now)
            else:
                now = number.get(name, self.count + 1 if at < first else 0 if at > ended else now)
            units.append(now)
        return units

    def _owners(self) -> dict[int, int]:
        """The unit of every parameter (where the forward pass reads it first) and of every gradient's memory."""
        made: set[int] = set()
        owner: dict[int, int] = {}
        for op, unit in zip(self.trace.ops, self.unit, strict=True):
            for x in op.inputs if op.phase == "forward" else ():
                if x.storage not in made:
                    owner.setdefault(x.storage, unit)
            made.update(out.storage for out in op.outputs if all(out.storage != x.storage for x in op.inputs))
            for out in op.outputs if op.phase == "backward" else ():
                owner.setdefault(out.storage, unit)
        return owner

    def gradient_unit(self, gradient: Gradient) -> int:
        """Where its memory was first written."""
        unit = self.unit[gradient.ready]
        outputs = sorted(self.trace.ops[gradient.ready].outputs, key=lambda out: out.elements != gradient.elements)
        return self.owner.get(outputs[0].storage, unit) if outputs else unit

    def tied_bytes(self, frozen: bool = True) -> float:
        """Tables of tokens that the head reads as well: a pipeline keeps them on its first and its last stage.
        ``frozen``: those that are not trained too."""
        fixed = set() if frozen else {x.storage for x in self.trace.frozen}
        tables = {op.arguments[0].storage: op.arguments[0] for op in self.trace.ops if op.name == "embedding"}
        used = {
            x.storage for op, unit in zip(self.trace.ops, self.unit, strict=True)
            if op.phase == "forward" and unit > self.count and op.name != "embedding" for x in op.inputs
        }  # fmt: skip
        return float(sum(x.bytes for at, x in tables.items() if at in used - fixed))


def _layer_name(path: str) -> str:
    match = _LAYER.match(path)
    return match.group(0) if match else ""


def parts(layer_map: LayerMap, unit_s: Sequence[float], count: int, given: Sequence[int] | None = None) -> list[int]:
    """The part of each unit when the layers are split into ``count`` runs; what comes before and after is in the
    first and the last. With more parts than layers the embedding or the head is one of its own (Megatron's
    --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split). ``given``: layers of each
    part, of the first and the last 0 too; else the slowest part is as fast as it can be."""
    layers = layer_map.count
    first, last = unit_s[0] > 0, unit_s[layers + 1] > 0  # whether there is an embedding, and a head
    if count == 1:
        return [0] * (layers + 2)
    if given is not None:
        if sum(given) != layers or min(given[1:-1], default=1) < 1 or min(given) < 0:
            raise KernelcastError(
                f"stage_layers {tuple(given)} must add up to {layers} layers, 1 or more each; the first and the last "
                "may have none"
            )
        sizes = list(given)
    elif count > layers + first + last:
        raise KernelcastError(
            f"{count} parts (pp x virtual_stages) are more than the {layers} layers found in {layer_map.trace.name}, "
            "its embedding and its head"
        )
    elif count > layers:
        sizes = balanced(unit_s[1 - first : layers + 1 + last], count)
        some = [part for part, size in enumerate(sizes) for _ in range(size)]
        return [*[0] * (1 - first), *some, *[count - 1] * (1 - last)]
    else:
        times = np.array(unit_s[1 : layers + 1], dtype=float)
        times[0] += unit_s[0]
        times[-1] += unit_s[layers + 1]
        sizes = balanced(times.tolist(), count)
    layer_parts = [part for part, size in enumerate(sizes) for _ in range(size)]
    return [0, *layer_parts, count - 1]


def balanced(times_s: Sequence[float], count: int) -> list[int]:
    """Sizes of ``count`` runs whose longest is shortest; of those, the ones nearest to equal sizes."""
    total = np.concatenate([[0.0], np.cumsum(times_s)])
    n = len(times_s)
    best = np.full((count + 1, n + 1), np.inf)
    spread = np.full((count + 1, n + 1), np.inf)
    starts = np.zeros((count + 1, n + 1), dtype=int)
    best[0, 0] = spread[0, 0] = 0.0
    for k in range(1, count + 1):
        for end in range(k, n - (count - k) + 1):
            for start in range(k - 1, end):
                longest = max(best[k - 1, start], total[end] - total[start])
                squares = spread[k - 1, start] + (end - start - n / count) ** 2
                better = longest < best[k, end] * (1 - 1e-9)
                if better or (longest <= best[k, end] * (1 + 1e-9) and squares < spread[k, end]):
                    best[k, end], spread[k, end], starts[k, end] = longest, squares, start
    sizes, end = [], n
    for k in range(count, 0, -1):
        sizes.append(end - int(starts[k, end]))
        end = int(starts[k, end])
    return sizes[::-1]


def sent_bytes(layer_map: LayerMap, part_of: Sequence[int], part: int) -> tuple[float, str]:
    """The activations that the forward pass of ``part`` sends to the next part, and their format."""
    made: dict[int, Tensor] = {}
    sent: dict[int, Tensor] = {}
    embedding = part_of.count(part) == 1 and part_of[0] == part  # alone
    for op, unit in zip(layer_map.trace.ops, layer_map.unit, strict=True):
        if op.phase != "forward":
            continue
        if part_of[unit] == part + 1:
            sent |= {x.storage: made[x.storage] for x in op.inputs if x.storage in made}
        if part_of[unit] == part and (unit > 0 or embedding):  # masks and position tables are recomputed on each stage
            made |= {out.storage: out for out in op.outputs if out.dtype in ("fp32", "bf16", "fp16")}
    sizes = sorted(sent.values(), key=lambda x: -x.bytes)[: 1 if embedding else None]
    return float(sum(x.bytes for x in sizes)), next((x.dtype for x in sizes), "bf16")


def optimizer_ops(
    layer_map: LayerMap, units: Container[int], shards: Callable[[Tensor], int]
) -> Iterator[tuple[int, Op]]:
    """The optimizer's ops with their index, on the parameters of these units; of each only the shard of one of its
    ``shards`` ranks has."""
    owner = dict(layer_map.owner)

    def mine(group: Sequence[Tensor]) -> bool:
        unit = next((owner[x.storage] for x in group if x.storage in owner), 0)
        for x in group:
            owner.setdefault(x.storage, unit)
        return unit in units

    def part(x: Tensor) -> Tensor:
        ways = shards(x)
        return x if ways == 1 or x.elements <= 1 else replace(x, shape=(-(-x.elements // ways),), stride=(1,))

    for at, op in enumerate(layer_map.trace.ops):
        if op.phase != "optimizer":
            continue
        groups = parameter_groups(op)
        chosen = [i for i, group in enumerate(groups) if mine(group)]
        if not chosen:
            continue
        own = of_parameters(op, chosen)
        yield at, with_tensors(own, part, tuple(part(x) for x in own.outputs))


FORWARD, BACKWARD, WEIGHT = range(3)  # WEIGHT: gradients of weights, where a schedule runs them apart


class PipelineTask(NamedTuple):
    """One pass of a micro-batch through one part of the model."""

    what: int
    micro_batch: int
    part: int  # of the model's layer_map: part % stages is the stage

    @property
    def backward(self) -> bool:
        return self.what == BACKWARD


@dataclass(frozen=True)
class PipelineTimes:
    """Seconds of every task: by part; and to send a result on from each part."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    last_backward_s: Sequence[float]  # of the last micro-batch, whose gradients are sent meanwhile
    send_s: Sequence[float]  # after part i to part i + 1, and the gradient back


@dataclass(frozen=True)
class PipelineSchedule:
    """When each task of each stage starts and ends."""

    tasks: tuple[tuple[tuple[PipelineTask, float, float], ...], ...]

    @property
    def ends_s(self) -> tuple[float, ...]:
        return tuple(max((end for _, _, end in stage), default=0.0) for stage in self.tasks)


def orders(schedule: str, stages: int, micro_batches: int, virtual: int = 1) -> list[list[PipelineTask]]:
    """The tasks of each stage in the order in which it takes them."""
    return [_order(schedule, stage, stages, micro_batches, virtual) for stage in range(stages)]


def _order(schedule: str, stage: int, stages: int, micro_batches: int, virtual: int) -> list[PipelineTask]:
    """Some forward passes to fill the pipeline (GPipe: all), then one forward and one backward in turn, then what is
    left. Interleaved as in Megatron-LM (Narayanan et al. 2021, schedules.py): groups of ``stages`` micro-batches pass
    one part of the stage after another, backward from its last part to its first.
    """
    parts = range(stage, stages * virtual, stages)
    groups = [range(first, min(first + stages, micro_batches)) for first in range(0, micro_batches, stages)]
    forward = [PipelineTask(FORWARD, i, part) for group in groups for part in parts for i in group]
    backward = [PipelineTask(BACKWARD, i, part) for group in groups for part in reversed(parts) for i in group]
    if schedule == "gpipe":
        return forward + backward
    warm = stages - stage - 1 if virtual == 1 else (stages - stage - 1) * 2 + (virtual - 1) * stages
    warm = min(warm, len(forward))
    tasks = forward[:warm]
    for pair in zip(forward[warm:], backward, strict=False):
        tasks += pair
    return tasks + backward[len(forward) - warm :]


def in_order(
    order: Sequence[Sequence[PipelineTask]], parts: int
) -> Iterator[tuple[int, PipelineTask, PipelineTask | None]]:
    """All tasks, each after what it needs: its stage, and the task whose result is its input."""
    left, done = [list(reversed(tasks)) for tasks in order], set[PipelineTask]()
    while any(left):
        before = len(done)
        for stage, tasks in enumerate(left):
            while tasks and ((source := _source(tasks[-1], parts)) is None or source in done):
                done.add(task := tasks.pop())
                yield stage, task, source
        if len(done) == before:
            raise RuntimeError("a pipeline schedule waits for itself")


def run(order: list[list[PipelineTask]], timing: PipelineTimes, micro_batches: int) -> PipelineSchedule:
    """Each stage starts its next task as soon as it is free and the task's input has arrived."""
    stages = len(order)
    done: dict[PipelineTask, float] = {}
    clocks = [0.0] * stages
    table: list[list[tuple[PipelineTask, float, float]]] = [[] for _ in order]
    for stage, task, source in in_order(order, len(timing.forward_s)):
        start = clocks[stage]
        if source is not None:
            across = source.part % stages != stage
            start = max(start, done[source] + (timing.send_s[min(source.part, task.part)] if across else 0.0))
        clocks[stage] = done[task] = start + _time_s(task, timing, micro_batches)
        table[stage].append((task, start, clocks[stage]))
    return PipelineSchedule(tuple(tuple(stage) for stage in table))


def _source(task: PipelineTask, parts: int) -> PipelineTask | None:
    """The task whose result is its input."""
    what, i, part = task
    if what == WEIGHT:
        return PipelineTask(BACKWARD, i, part)
    if what == FORWARD:
        return PipelineTask(FORWARD, i, part - 1) if part else None
    return PipelineTask(FORWARD, i, part) if part == parts - 1 else PipelineTask(BACKWARD, i, part + 1)


def _time_s(task: PipelineTask, timing: PipelineTimes, micro_batches: int) -> float:
    if task.what == FORWARD:
        return timing.forward_s[task.part]
    last = task.micro_batch == micro_batches - 1
    return (timing.last_backward_s if last else timing.backward_s)[task.part]


def most_in_flight(order: Sequence[PipelineTask]) -> int:
    """Forward passes of a stage whose backward pass has not run, at most."""
    return max(accumulate((task.what == FORWARD) - task.backward for task in order))


class HeldPasses(NamedTuple):
    """While a task of a stage runs: the passes of each part that hold activations, the one that runs among them."""

    backward: bool
    part: int
    held: tuple[tuple[int, int], ...]  # (part, passes)


def held_passes(order: Sequence[PipelineTask]) -> set[HeldPasses]:
    """Every state that a stage is in. With virtual stages it holds other numbers of passes of each of its parts."""
    held: Counter[int] = Counter()
    states = set()
    for task in order:
        held[task.part] += task.what == FORWARD
        states.add(HeldPasses(task.backward, task.part, tuple(sorted(held.items()))))
        held[task.part] -= task.backward
    return states
