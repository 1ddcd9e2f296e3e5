"""Expert parallelism on a traced step: each rank holds some of the experts, and tokens are dispatched and combined.

Ranks are assumed to be balanced: as many tokens come in as go out, so that the grouped products keep their rows and
have fewer experts. Dispatch comes before a block's first product, combine after its last, forward and backward.
"""

from __future__ import annotations

from itertools import groupby

from kernelcast.errors import KernelcastError
from kernelcast.tracing.traced import Op, Tensor, Trace
from kernelcast.training.placement import Shard, TraceSharder, shard_of_result

_EXPERTS = Shard("experts", 0)


def _blocks(trace: Trace) -> list[tuple[int, int, Tensor]]:
    """Runs of grouped products of the same module and phase: the indices of the first and the last, and the tokens that
    are dispatched."""
    products = [(at, op) for at, op in enumerate(trace.ops) if op.name == "_grouped_mm"]
    tokens: dict[str, Tensor] = {}
    blocks = []
    for (module, _), run in groupby(products, key=lambda product: (product[1].module, product[1].phase)):
        members = list(run)
        sent = tokens.setdefault(module, members[0][1].arguments[0])
        blocks.append((members[0][0], members[-1][0], sent))
    return blocks


class _ExpertParallel(TraceSharder):
    def run(self) -> Trace:
        blocks = _blocks(self.trace)
        if not blocks:
            raise KernelcastError(f"ep {self.ranks}: {self.trace.name} has no grouped products (_grouped_mm)")
        before = {first: tokens for first, _, tokens in blocks}
        after = {last: tokens for _, last, tokens in blocks}
        for op in self.trace.ops:  # the weights first: copies of them come before the products
            if op.name == "_grouped_mm" and len(op.arguments[1].shape) == 3:
                self._weight(op)
        for at, op in enumerate(self.trace.ops):
            if at in before:
                self.collective("all_to_all", before[at], "ep", op)
            self._shard_op(op)
            if at in after:
                self.collective("all_to_all", after[at], "ep", op)
        return self.sharded()

    def _weight(self, op: Op) -> None:
        weight = op.arguments[1]
        if weight.shape[0] % self.ranks:
            raise KernelcastError(f"ep {self.ranks} does not divide the {weight.shape[0]} experts of {op.module}")
        if self.shard(weight) is None:
            self.set_shard(weight, _EXPERTS)

    def _shard_op(self, op: Op) -> None:
        if op.name == "_grouped_mm":
            if len(op.outputs[0].shape) == 3:
                self.set_shard(op.outputs[0], _EXPERTS)
            ends = op.inputs[2:]  # of each expert's tokens
            self.emit(op, {x: _EXPERTS for x in ends if len(x.shape) == 1})
            return
        if op.phase == "optimizer":
            self.shard_states(op)
        else:
            for x in op.inputs:
                shard = self.shard(x)
                for out in op.outputs if shard is not None and x.elements > 1 else ():
                    if shard is not None and self.shard(out) is None:
                        self.set_shard(out, shard_of_result(op.name, x, shard, out))
        self.emit(op)


def shard_experts(trace: Trace, ranks: int) -> Trace:
    """The step as one of ``ranks`` ranks of expert parallelism runs it, its collectives among the ops."""
    return trace if ranks == 1 else _ExpertParallel(trace, ranks).run()
