"""The depth of a traced model: which layer each op belongs to, and how layers are dealt out to pipeline stages."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace

import numpy as np

from kernelcast.errors import KernelcastError
from kernelcast.tracing.traced import Gradient, Op, Tensor, Trace
from kernelcast.training.places import is_list, together, with_tensors

# layers.3, h.3, encoder.layer.3, blocks.3: the first number in a module's path that follows such a word
_LAYER = re.compile(r"^(?:.*?\.)?(?:layers?|h|blocks?|block_list)\.\d+(?=\.|$)")


class Depth:
    """Units of a model: 0 before the first layer, 1 to ``layers``, and one behind the last."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        names = [_layer_name(op.module) for op in trace.ops]
        forward = [name for name, op in zip(names, trace.ops, strict=True) if op.phase == "forward" and name]
        self.names = list(dict.fromkeys(forward))
        self.layers = len(self.names)
        self.unit = self._units(names)
        self.owner = self._owners()

    def _units(self, names: list[str]) -> list[int]:
        """An op outside all layers goes with those around it: the first of a pass, or the op before it."""
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
                now = number.get(name, self.layers + 1 if at > behind else now)
            else:
                now = number.get(name, self.layers + 1 if at < first else 0 if at > ended else now)
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

    def tied_bytes(self) -> float:
        """Tables of tokens that the head reads as well: a pipeline keeps them on its first and its last stage."""
        tables = {op.arguments[0].storage: op.arguments[0] for op in self.trace.ops if op.name == "embedding"}
        used = {
            x.storage for op, unit in zip(self.trace.ops, self.unit, strict=True)
            if op.phase == "forward" and unit > self.layers and op.name != "embedding" for x in op.inputs
        }  # fmt: skip
        return float(sum(x.bytes for at, x in tables.items() if at in used))


def _layer_name(path: str) -> str:
    found = _LAYER.match(path)
    return found.group(0) if found else ""


def parts(depth: Depth, unit_s: Sequence[float], count: int, given: Sequence[int] | None = None) -> list[int]:
    """The part of each unit when the layers are cut into ``count`` runs; what comes before and behind goes with the
    first and the last. ``given``: layers of each part; else the slowest part is as fast as it can be."""
    layers = depth.layers
    if count == 1:
        return [0] * (layers + 2)
    if count > layers:
        raise KernelcastError(
            f"{count} parts (pp x virtual_stages) are more than the {layers} layers found in {depth.trace.name}"
        )
    if given is not None:
        if sum(given) != layers or min(given) < 1:
            raise KernelcastError(f"stage_layers {tuple(given)} must be 1 or more each and add up to {layers} layers")
        sizes = list(given)
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
    cut = np.zeros((count + 1, n + 1), dtype=int)
    best[0, 0] = spread[0, 0] = 0.0
    for k in range(1, count + 1):
        for end in range(k, n - (count - k) + 1):
            for start in range(k - 1, end):
                longest = max(best[k - 1, start], total[end] - total[start])
                squares = spread[k - 1, start] + (end - start - n / count) ** 2
                better = longest < best[k, end] * (1 - 1e-9)
                if better or (longest <= best[k, end] * (1 + 1e-9) and squares < spread[k, end]):
                    best[k, end], spread[k, end], cut[k, end] = longest, squares, start
    sizes, end = [], n
    for k in range(count, 0, -1):
        sizes.append(end - int(cut[k, end]))
        end = int(cut[k, end])
    return sizes[::-1]


def sent_bytes(depth: Depth, part_of: Sequence[int], part: int) -> tuple[float, str]:
    """What the forward pass of ``part`` hands to the next: results of its layers that those read. And their format."""
    made: dict[int, Tensor] = {}
    sent: dict[int, Tensor] = {}
    for op, unit in zip(depth.trace.ops, depth.unit, strict=True):
        if op.phase != "forward":
            continue
        if part_of[unit] == part + 1:
            sent |= {x.storage: made[x.storage] for x in op.inputs if x.storage in made}
        if part_of[unit] == part and unit > 0:  # masks and tables of positions are made anew on each stage
            made |= {out.storage: out for out in op.outputs if out.dtype in ("fp32", "bf16", "fp16")}
    dtype = next((x.dtype for x in sent.values()), "bf16")
    return float(sum(x.bytes for x in sent.values())), dtype


def optimizer_ops(depth: Depth, units: Container[int], shards: Callable[[Tensor], int]) -> Iterator[tuple[int, Op]]:
    """The optimizer's ops with their place, on the parameters of these units, of each the part that one of its
    ``shards`` ranks has."""
    owner = dict(depth.owner)

    def mine(group: Sequence[Tensor]) -> bool:
        unit = next((owner[x.storage] for x in group if x.storage in owner), 0)
        for x in group:
            owner.setdefault(x.storage, unit)
        return unit in units

    def part(x: Tensor) -> Tensor:
        ways = shards(x)
        return x if ways == 1 or x.elements <= 1 else replace(x, shape=(-(-x.elements // ways),), stride=(1,))

    for at, op in enumerate(depth.trace.ops):
        if op.phase != "optimizer":
            continue
        groups = together(op)
        chosen = [i for i, group in enumerate(groups) if mine(group)]
        if not chosen:
            continue
        arguments = tuple(
            tuple(one[i] for i in chosen if i < len(one)) if is_list(one) else one for one in op.arguments
        )
        outputs = [op.outputs[i] for i in chosen] if len(op.outputs) == len(groups) else op.outputs
        yield at, with_tensors(replace(op, arguments=arguments), part, tuple(part(x) for x in outputs))
