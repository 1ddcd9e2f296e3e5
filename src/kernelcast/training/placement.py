"""Where a tensor lies when ranks share the work: cut along an axis, or whole; and how that carries through an op."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from kernelcast.tracing.traced import Gradient, Op, Tensor, Trace

# model: by heads, width or vocabulary. tokens: by the sequence, between the layers that tensor parallelism cuts.
# experts: each rank has some of them.
Kind = Literal["model", "tokens", "experts"]
# Sums over an axis that is cut give each rank a term of the sum; other ops of a cut tensor give a part of the result.
_SUMS = {"sum", "mean", "native_layer_norm_backward", "_fused_rms_norm_backward", "linalg_vector_norm", "var_mean"}
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class Place:
    """``outer``: how often the cut axis repeats within this one, where a reshape joined it with those outside it
    (batch x heads as one axis)."""

    kind: Kind
    axis: int
    outer: int = 1


def shrunk(x: Tensor, place: Place | None, ways: int) -> Tensor:
    """The part of one rank: the axis divided (rounded up, as libraries pad), and the strides outside it with it."""
    if place is None or not x.shape:
        return x
    axis = place.axis
    size = -(-x.shape[axis] // ways)
    end = x.stride[axis] * x.shape[axis]
    inside = x.stride[axis] > 0
    stride = tuple(
        max(1, step * size // x.shape[axis]) if inside and at != axis and step >= end else step
        for at, step in enumerate(x.stride)
    )
    shape = tuple(size if at == axis else length for at, length in enumerate(x.shape))
    return replace(x, shape=shape, stride=stride)


def in_view(x: Tensor, place: Place, out: Tensor) -> Place | None:
    """The place in another view of the same memory: the axis that holds the outermost part of the cut one. Found by
    strides, for every view (transpose, split, reshape, expand) keeps them."""
    if out.shape == x.shape and out.stride == x.stride:
        return place
    step = x.stride[place.axis]
    end = step * x.shape[place.axis] // place.outer
    ends = [(at, s, s * n) for at, (n, s) in enumerate(zip(out.shape, out.stride, strict=True)) if n > 1 and s > 0]
    for at, _, outside in ends:  # the same axis, or its outer half
        if outside == end:
            return Place(place.kind, at)
    for at, inside, outside in ends:  # joined with the axis outside it
        if inside <= step and outside >= end:
            return Place(place.kind, at, max(1, outside // end))
    for at, inside, _ in ends:  # a piece of it
        if inside == step:
            return Place(place.kind, at)
    return None


def carried(name: str, x: Tensor, place: Place, out: Tensor) -> Place | None:
    """The place of a result that goes with an input's; None where the axis was summed away."""
    axis = place.axis
    if not out.shape:
        return None
    if out.shape == x.shape:
        return place
    size, off = x.shape[axis], len(x.shape) - len(out.shape)
    if out.shape[: axis + 1] == x.shape[: axis + 1]:  # what follows was reduced
        return place
    if 0 <= axis - off < len(out.shape) and out.shape[axis - off] == size:  # what precedes was, or was broadcast
        return Place(place.kind, axis - off, place.outer)
    if out.elements == x.elements:
        return _reshaped(x, place, out)
    if name not in _SUMS and off == 0 and out.shape[axis] > 1:  # cat, index: longer or shorter along it
        return place
    return None


def _reshaped(x: Tensor, place: Place, out: Tensor) -> Place:
    """By how many elements precede it."""
    before, running = math.prod(x.shape[: place.axis]) * place.outer, 1
    for at, size in enumerate(out.shape):
        if running <= before < running * size:
            return Place(place.kind, at, max(1, before // running))
        running *= size
    return Place(place.kind, len(out.shape) - 1)


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


def is_list(value: Any) -> bool:
    """Whether an argument is a list of tensors."""
    return isinstance(value, (tuple, list)) and len(value) > 0 and all(isinstance(x, Tensor) for x in value)


def together(op: Op) -> list[list[Tensor]]:
    """Tensors of an optimizer's op by parameter: the parameter, its gradient and its states, whose lists go side by
    side."""
    lists = [one for one in op.arguments if is_list(one)]
    if not lists:
        return [[x for x in op.inputs if x.shape]]
    return [[one[i] for one in lists if i < len(one)] for i in range(len(lists[0]))]


def is_collective(op: Op) -> bool:
    return op.name in _COLLECTIVES and "group" in op.options


class Dealing:
    """One trace being dealt out to ``ways`` ranks: where its tensors lie, and the ops of one rank so far."""

    def __init__(self, trace: Trace, ways: int) -> None:
        self.trace, self.ways = trace, ways
        self._ops: list[Op] = []
        self._moved: list[int] = []  # where each op of the trace went
        self._places: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Place] = {}
        self._views: dict[int, tuple[Tensor, Place]] = {}  # one cut view of each memory

    def place(self, x: Tensor) -> Place | None:
        found = self._places.get((x.storage, x.shape, x.stride))
        if found is not None or x.storage not in self._views or not x.shape:
            return found
        return in_view(*self._views[x.storage], x)

    def put(self, x: Tensor, place: Place | None) -> None:
        if place is not None and x.storage >= 0:
            self._places[x.storage, x.shape, x.stride] = place
            self._views[x.storage] = (x, place)

    def gathered(self, x: Tensor) -> None:
        """From here on every rank has all of it."""
        self._places = {key: place for key, place in self._places.items() if key[0] != x.storage}
        self._views.pop(x.storage, None)

    def emit(self, op: Op, seen: Mapping[Tensor, Place | None] = MappingProxyType({})) -> None:
        """The op with the shapes of one rank; ``seen``: inputs that it has otherwise than they lie."""
        outputs = tuple(shrunk(out, self.place(out), self.ways) for out in op.outputs)
        self._moved.append(len(self._ops))
        self._ops.append(
            with_tensors(op, lambda x: shrunk(x, seen[x] if x in seen else self.place(x), self.ways), outputs)
        )

    def send(self, name: str, x: Tensor, group: str, like: Op) -> None:
        """A collective as an op of the trace, in the place and phase of ``like``. ``x``: the whole tensor."""
        self._ops.append(Op(name, (x,), {"group": group}, (x,), "kernel", like.phase, like.module))

    def share_states(self, op: Op) -> None:
        """An optimizer's states are cut as their parameter is."""
        for group in together(op):
            known = next(((x, place) for x in group if (place := self.place(x)) is not None), None)
            for x in group if known else ():
                if known and x.shape == known[0].shape and self.place(x) is None:
                    self.put(x, known[1])

    def dealt(self) -> Trace:
        """The trace of one rank."""
        gradients = tuple(self._gradient(g) for g in self.trace.gradients)
        return replace(self.trace, ops=tuple(self._ops), gradients=gradients)

    def _gradient(self, gradient: Gradient) -> Gradient:
        """The gradient with the size that its op writes after the cut."""
        at = self._moved[gradient.ready]
        for old, new in zip(self.trace.ops[gradient.ready].outputs, self._ops[at].outputs, strict=True):
            if old.elements == gradient.elements:
                return Gradient(new.elements * (gradient.bytes // gradient.elements), new.elements, at)
        return replace(gradient, ready=at)
