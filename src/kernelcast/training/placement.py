"""Placement of tensors on ranks (whole, or sharded along an axis), and how it propagates through ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from kernelcast.tracing.traced import Gradient, Op, Tensor, Trace

# model: by heads, width or vocabulary. tokens: by the sequence, between the layers that are tensor
# parallel. experts: each rank has some of them.
ShardedBy = Literal["model", "tokens", "experts"]
# Sums over a sharded axis are partial on each rank; other ops of a sharded tensor give a shard of the result.
_SUMS = {"sum", "mean", "native_layer_norm_backward", "_fused_rms_norm_backward", "linalg_vector_norm", "var_mean"}
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class Shard:
    """``outer``: how often the sharded axis repeats within this one, where a reshape joined it with those outside it
    (batch x heads as one axis)."""

    by: ShardedBy
    axis: int
    outer: int = 1


def shard_tensor(x: Tensor, shard: Shard | None, ranks: int) -> Tensor:
    """The shard of one rank: the axis divided (rounded up, as libraries pad), and the outer strides with it."""
    if shard is None or not x.shape:
        return x
    axis = shard.axis
    size = -(-x.shape[axis] // ranks)
    end = x.stride[axis] * x.shape[axis]
    inside = x.stride[axis] > 0
    stride = tuple(
        max(1, step * size // x.shape[axis]) if inside and at != axis and step >= end else step
        for at, step in enumerate(x.stride)
    )
    shape = tuple(size if at == axis else length for at, length in enumerate(x.shape))
    return replace(x, shape=shape, stride=stride)


def shard_in_view(x: Tensor, shard: Shard, out: Tensor) -> Shard | None:
    """In another view of the same memory: the axis that holds the outermost part of the sharded one. By strides, which
    every view (transpose, split, reshape, expand) keeps."""
    if out.shape == x.shape and out.stride == x.stride:
        return shard
    step = x.stride[shard.axis]
    end = step * x.shape[shard.axis] // shard.outer
    ends = [(at, s, s * n) for at, (n, s) in enumerate(zip(out.shape, out.stride, strict=True)) if n > 1 and s > 0]
    for at, _, outside in ends:  # the same axis, or its outer half
        if outside == end:
            return Shard(shard.by, at)
    for at, inside, outside in ends:  # joined with the axis outside it
        if inside <= step and outside >= end:
            return Shard(shard.by, at, max(1, outside // end))
    for at, inside, _ in ends:  # a piece of it
        if inside == step:
            return Shard(shard.by, at)
    return None


def shard_of_result(name: str, x: Tensor, shard: Shard, out: Tensor) -> Shard | None:
    """The shard of a result from that of an input; None where the axis was summed."""
    axis = shard.axis
    if not out.shape:
        return None
    if out.shape == x.shape:
        return shard
    size, off = x.shape[axis], len(x.shape) - len(out.shape)
    if out.shape[: axis + 1] == x.shape[: axis + 1]:  # the axes after it were reduced
        return shard
    if 0 <= axis - off < len(out.shape) and out.shape[axis - off] == size:  # those before were reduced or broadcast
        return Shard(shard.by, axis - off, shard.outer)
    if out.elements == x.elements:
        return _reshaped(x, shard, out)
    if name not in _SUMS and off == 0 and out.shape[axis] > 1:  # cat, index: longer or shorter along it
        return shard
    return None


def _reshaped(x: Tensor, shard: Shard, out: Tensor) -> Shard:
    """The axis of the reshaped tensor, by how many elements precede it."""
    before, running = math.prod(x.shape[: shard.axis]) * shard.outer, 1
    for at, size in enumerate(out.shape):
        if running <= before < running * size:
            return Shard(shard.by, at, max(1, before // running))
        running *= size
    return Shard(shard.by, len(out.shape) - 1)


def with_tensors(op: Op, change: Callable[[Tensor], Tensor], outputs: tuple[Tensor, ...]) -> Op:
    """The op with every tensor among its arguments changed."""
    arguments = tuple(_changed(value, change) for value in op.arguments)
    options = {key: _changed(value, change) for key, value in op.options.items()}
    return replace(op, arguments=arguments, options=options, outputs=outputs)


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return tuple(_changed(item, change) for item in value)
    return value


def is_tensor_list(value: Any) -> bool:
    """Whether an argument is a list of tensors."""
    return isinstance(value, (tuple, list)) and len(value) > 0 and all(isinstance(x, Tensor) for x in value)


def parameter_groups(op: Op) -> list[list[Tensor]]:
    """Tensors of an optimizer's op by parameter: itself, its gradient and its states, whose lists are parallel."""
    lists = [value for value in op.arguments if is_tensor_list(value)]
    if not lists:
        return [[x for x in op.inputs if x.shape]]
    return [[tensors[i] for tensors in lists if i < len(tensors)] for i in range(len(lists[0]))]


def of_parameters(op: Op, chosen: Sequence[int]) -> Op:
    """An optimizer's op on these of its parameters, by their places in ``parameter_groups``."""
    count = len(parameter_groups(op))
    arguments = tuple(
        tuple(value[i] for i in chosen if i < len(value)) if is_tensor_list(value) else value for value in op.arguments
    )
    outputs = tuple(op.outputs[i] for i in chosen) if len(op.outputs) == count else op.outputs
    return replace(op, arguments=arguments, outputs=outputs)


def is_collective(op: Op) -> bool:
    return op.name in _COLLECTIVES and "group" in op.options


class TraceSharder:
    """A trace being sharded over ``ranks`` ranks: the placement of its tensors, and the ops of one rank so far."""

    def __init__(self, trace: Trace, ranks: int) -> None:
        self.trace, self.ranks = trace, ranks
        self._ops: list[Op] = []
        self._positions: list[int] = []  # where each op of the trace went
        self._shards: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Shard] = {}
        self._views: dict[int, tuple[Tensor, Shard]] = {}  # a sharded view of each memory

    def shard(self, x: Tensor) -> Shard | None:
        shard = self._shards.get((x.storage, x.shape, x.stride))
        if shard is not None or x.storage not in self._views or not x.shape:
            return shard
        return shard_in_view(*self._views[x.storage], x)

    def set_shard(self, x: Tensor, shard: Shard | None) -> None:
        if shard is not None and x.storage >= 0:
            self._shards[x.storage, x.shape, x.stride] = shard
            self._views[x.storage] = (x, shard)

    def set_whole(self, x: Tensor) -> None:
        """From here on it is replicated on every rank."""
        self._shards = {key: shard for key, shard in self._shards.items() if key[0] != x.storage}
        self._views.pop(x.storage, None)

    def emit(self, op: Op, seen: Mapping[Tensor, Shard | None] = MappingProxyType({})) -> None:
        """The op with the shapes of one rank; ``seen``: inputs that it has in another placement."""
        outputs = tuple(shard_tensor(out, self.shard(out), self.ranks) for out in op.outputs)
        self._positions.append(len(self._ops))
        self._ops.append(
            with_tensors(op, lambda x: shard_tensor(x, seen[x] if x in seen else self.shard(x), self.ranks), outputs)
        )

    def collective(self, name: str, x: Tensor, group: str, like: Op) -> None:
        """A collective as an op of the trace, in the phase and module of ``like``. ``x``: the whole tensor."""
        self._ops.append(Op(name, (x,), {"group": group}, (x,), "kernel", like.phase, like.module))

    def shard_states(self, op: Op) -> None:
        """An optimizer's states are sharded as their parameter is."""
        for group in parameter_groups(op):
            known = next(((x, shard) for x in group if (shard := self.shard(x)) is not None), None)
            for x in group if known else ():
                if known and x.shape == known[0].shape and self.shard(x) is None:
                    self.set_shard(x, known[1])

    def sharded(self) -> Trace:
        """The trace of one rank."""
        gradients = tuple(self._gradient(g) for g in self.trace.gradients)
        frozen = tuple(shard_tensor(x, self.shard(x), self.ranks) for x in self.trace.frozen)
        return replace(self.trace, ops=tuple(self._ops), gradients=gradients, frozen=frozen)

    def _gradient(self, gradient: Gradient) -> Gradient:
        """The gradient with the size that its op writes on one rank."""
        at = self._positions[gradient.ready]
        for old, new in zip(self.trace.ops[gradient.ready].outputs, self._ops[at].outputs, strict=True):
            if old.elements == gradient.elements:
                return Gradient(new.elements * (gradient.bytes // gradient.elements), new.elements, at)
        return replace(gradient, ready=at)
