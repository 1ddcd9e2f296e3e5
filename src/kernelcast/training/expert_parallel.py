"""Expert parallelism on a traced step: each rank holds some of the experts, and tokens travel to them and back.

Ranks are taken to be in balance: as many tokens come in as go out, so that the grouped products keep their rows and
have fewer experts. Tokens travel before a block's first product and after its last, forward and backward.
"""

from __future__ import annotations

from itertools import groupby

from kernelcast.errors import KernelcastError
from kernelcast.tracing.traced import Op, Tensor, Trace
from kernelcast.training.placement import Dealing, Place, carried

_DEALT = Place("experts", 0)


def _blocks(trace: Trace) -> list[tuple[int, int, Tensor]]:
    """Runs of grouped products of the same module and phase: the places of the first and the last, and the tokens that
    travel."""
    products = [(at, op) for at, op in enumerate(trace.ops) if op.name == "_grouped_mm"]
    tokens: dict[str, Tensor] = {}
    found = []
    for (module, _), run in groupby(products, key=lambda product: (product[1].module, product[1].phase)):
        members = list(run)
        sent = tokens.setdefault(module, members[0][1].arguments[0])
        found.append((members[0][0], members[-1][0], sent))
    return found


class _Experts(Dealing):
    def run(self) -> Trace:
        blocks = _blocks(self.trace)
        if not blocks:
            raise KernelcastError(f"ep {self.ways}: {self.trace.name} has no grouped products of experts (_grouped_mm)")
        before = {first: tokens for first, _, tokens in blocks}
        after = {last: tokens for _, last, tokens in blocks}
        for op in self.trace.ops:  # the weights first: copies of them come before the products
            if op.name == "_grouped_mm" and len(op.arguments[1].shape) == 3:
                self._weight(op)
        for at, op in enumerate(self.trace.ops):
            if at in before:
                self.send("all_to_all", before[at], "ep", op)
            self._one(op)
            if at in after:
                self.send("all_to_all", after[at], "ep", op)
        return self.dealt()

    def _weight(self, op: Op) -> None:
        weight = op.arguments[1]
        if weight.shape[0] % self.ways:
            raise KernelcastError(f"ep {self.ways} does not divide the {weight.shape[0]} experts of {op.module}")
        if self.place(weight) is None:
            self.put(weight, _DEALT)

    def _one(self, op: Op) -> None:
        if op.name == "_grouped_mm":
            if len(op.outputs[0].shape) == 3:
                self.put(op.outputs[0], _DEALT)
            ends = op.inputs[2:]  # of each expert's tokens
            self.emit(op, {x: _DEALT for x in ends if len(x.shape) == 1})
            return
        if op.phase == "optimizer":
            self.share_states(op)
        else:
            for x in op.inputs:
                place = self.place(x)
                for out in op.outputs if place is not None and x.elements > 1 else ():
                    if place is not None and self.place(out) is None:
                        self.put(out, carried(op.name, x, place, out))
        self.emit(op)


def deal_experts(trace: Trace, ways: int) -> Trace:
    """The step as one of ``ways`` ranks of expert parallelism runs it, its collectives among the ops."""
    return trace if ways == 1 else _Experts(trace, ways).run()
