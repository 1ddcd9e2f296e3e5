"""Expert parallelism on a traced step: each rank holds some of the experts, and tokens travel to them and back.

Ranks are taken to be in balance: as many tokens come in as go out, so that the grouped products keep their rows and
have fewer experts. Tokens travel before a block's first product and after its last, forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernelcast.errors import KernelcastError
from kernelcast.networks.traced import Op, Tensor, Trace
from kernelcast.training.cut import collective, cut_gradient, product_of
from kernelcast.training.places import Place, carried, in_view, shrunk, with_tensors


@dataclass(frozen=True)
class Block:
    """Grouped products of one module in one phase: the places of its first and last, and the tokens that travel."""

    first: int
    last: int
    tokens: Tensor


def blocks(trace: Trace) -> list[Block]:
    """Runs of grouped products of the same module and phase, in order."""
    found: list[Block] = []
    tokens: dict[str, Tensor] = {}
    name = ("", "")
    for at, op in enumerate(trace.ops):
        if op.name != "_grouped_mm":
            continue
        tokens.setdefault(op.module, op.arguments[0])
        if (op.module, op.phase) == name:
            found[-1] = replace(found[-1], last=at)
        else:
            found.append(Block(at, at, tokens[op.module]))
        name = (op.module, op.phase)
    return found


class _Dealing:
    """One trace being dealt out to ``ways`` ranks."""

    def __init__(self, trace: Trace, ways: int) -> None:
        self.trace, self.ways = trace, ways
        self._cut: dict[int, tuple[Tensor, Place]] = {}

    def place(self, x: Tensor) -> Place | None:
        if x.storage not in self._cut or not x.shape:
            return None
        seen, place = self._cut[x.storage]
        return in_view(seen, place, x)

    def put(self, x: Tensor, place: Place | None) -> None:
        if place is not None and x.storage >= 0 and x.storage not in self._cut:
            self._cut[x.storage] = (x, place)

    def run(self) -> Trace:
        found = blocks(self.trace)
        if not found:
            raise KernelcastError(f"ep {self.ways}: {self.trace.name} has no grouped products of experts (_grouped_mm)")
        before, after = {b.first: b for b in found}, {b.last: b for b in found}
        for op in self.trace.ops:  # the weights first: copies of them come before the products
            if op.name == "_grouped_mm" and len(op.arguments[1].shape) == 3:
                self._check(op)
                self.put(op.arguments[1], Place("experts", 0))
        ops: list[Op] = []
        moved: list[int] = []
        for at, op in enumerate(self.trace.ops):
            if at in before:
                ops.append(collective("all_to_all", before[at].tokens, "ep", op))
            moved.append(len(ops))
            ops.append(self._one(op))
            if at in after:
                ops.append(collective("all_to_all", after[at].tokens, "ep", op))
        gradients = tuple(
            cut_gradient(g, self.trace.ops[g.ready], ops[moved[g.ready]], moved[g.ready]) for g in self.trace.gradients
        )
        return replace(self.trace, ops=tuple(ops), gradients=gradients)

    def _check(self, op: Op) -> None:
        experts = op.arguments[1].shape[0]
        if experts % self.ways:
            raise KernelcastError(f"ep {self.ways} does not divide the {experts} experts of {op.module}")

    def _one(self, op: Op) -> Op:
        if op.name == "_grouped_mm" and len(op.outputs[0].shape) == 3:
            self.put(op.outputs[0], Place("experts", 0))
        elif op.phase == "optimizer":
            share_states(op, self)
        elif op.name != "_grouped_mm":
            for x in op.inputs:
                place = self.place(x)
                for out in op.outputs if place is not None and x.elements > 1 else ():
                    self.put(out, carried(op.name, x, place, out) if place is not None else None)
        seen: dict[Tensor, Place] = {}
        if op.name == "_grouped_mm":
            p = product_of(op)
            seen = {x: Place("experts", 0) for x in op.inputs if x not in (p.a, p.b) and len(x.shape) == 1}  # the ends
        outputs = tuple(shrunk(x, self.place(x), self.ways) for x in op.outputs)
        return with_tensors(op, lambda x: shrunk(x, seen.get(x) or self.place(x), self.ways), outputs)


def share_states(op: Op, known: _Dealing) -> None:
    """States of the optimizer are dealt out as their parameters are: lists of both go side by side."""
    lists = [one for one in op.arguments if isinstance(one, (tuple, list)) and one and isinstance(one[0], Tensor)]
    for group in zip(*lists, strict=False) if len({len(one) for one in lists}) == 1 else ():
        found = next(((x, place) for x in group if (place := known.place(x)) is not None), None)
        for x in group if found else ():
            if found and x.shape == found[0].shape:
                known.put(x, found[1])


def deal_experts(trace: Trace, ways: int) -> Trace:
    """The step as one of ``ways`` ranks of expert parallelism runs it, its collectives among the ops."""
    return trace if ways == 1 else _Dealing(trace, ways).run()
