"""Tensor parallelism on a traced step: Megatron's cut, carried from the weights through every op by the shapes.

A layer's role (roles.py) says how its weight is cut; from there on each op's result is cut where its inputs are, as
the op demands. A product over a cut axis leaves each rank with a term of a sum: it stays one as long as only sums use
it, and the ranks join it before any other op does (all-reduce; with sequence parallelism reduce-scatter, and
all-gather where a cut layer needs all tokens). Ops of the result have the shapes that one rank sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kernelcast.errors import KernelcastError
from kernelcast.networks.traced import Gradient, Op, Tensor, Trace
from kernelcast.training.places import Place, carried, in_view, shrunk, with_tensors
from kernelcast.training.roles import Role, Roles

# Gradients of one input from several layers (q, k and v, and the residual stream, which one rank adds) are summed
# before the ranks join them.
_LINEAR = {"add", "add_"}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"}
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_Key = tuple[int, tuple[int, ...], tuple[int, ...]]


def collective(name: str, x: Tensor, group: str, like: Op) -> Op:
    """A collective as an op of the trace, in the place and phase of ``like``. ``x``: the whole tensor."""
    return Op(name, (x,), {"group": group}, (x,), "kernel", like.phase, like.module)


def is_collective(op: Op) -> bool:
    return op.name in COLLECTIVES and "group" in op.options


@dataclass(frozen=True)
class Product:
    """Operands of a matrix product and which axis of each is which: (rows or batch ..., inner, columns)."""

    a: Tensor
    b: Tensor
    rows: int  # of a
    a_inner: int
    b_inner: int
    columns: int  # of b
    out_rows: int
    out_columns: int


def product_of(op: Op) -> Product:
    tensors = [x for x in op.arguments if isinstance(x, Tensor)]
    a, b = tensors[1:3] if op.name in ("addmm", "baddbmm") else tensors[:2]
    if op.name == "_grouped_mm":
        if len(b.shape) == 3:  # rows (tokens) x an expert's weight
            return Product(a, b, 0, 1, 1, 2, 0, 1)
        return Product(a, b, 0, 1, 0, 1, 1, 2)  # gradients of the experts: (n, tokens) x (tokens, k) -> (experts, n, k)
    rank = len(a.shape)
    return Product(a, b, rank - 2, rank - 1, rank - 2, rank - 1, rank - 2, rank - 1)


class Cut:
    """One trace being cut for ``ways`` ranks."""

    def __init__(self, trace: Trace, ways: int, sequence_parallel: bool, roles: Roles) -> None:
        self.trace, self.ways, self.sequence_parallel, self.roles = trace, ways, sequence_parallel, roles
        self.ops: list[Op] = []
        self.moved: list[int] = []  # where each op of the trace went
        self._places: dict[_Key, Place] = {}
        self._views: dict[int, tuple[Tensor, Place]] = {}  # one cut view of each memory
        self._terms: set[int] = set()  # memory that holds a term of a sum
        self._sources: dict[int, Tensor] = {}  # of copies of parameters
        self._made: set[int] = set()
        self._gathered: set[tuple[int, str]] = set()
        self._tables: set[tuple[int, ...]] = set()  # shapes of cut tables of tokens
        self._known_roles: dict[str, Role | None] = {}
        self.cut_weights = 0

    # ---- what is known ----

    def place(self, x: Tensor) -> Place | None:
        found = self._places.get((x.storage, x.shape, x.stride))
        if found is not None or x.storage not in self._views:
            return found
        seen, place = self._views[x.storage]
        return in_view(seen, place, x) if x.shape else None

    def put(self, x: Tensor, place: Place | None) -> None:
        if place is None:
            return
        if x.storage >= 0:
            self._places[x.storage, x.shape, x.stride] = place
            self._views[x.storage] = (x, place)

    def _role(self, path: str) -> Role | None:
        if path not in self._known_roles:
            self._known_roles[path] = self.roles.of(path)
        return self._known_roles[path]

    def _is_parameter(self, x: Tensor) -> bool:
        return x.storage not in self._made or x.storage in self._sources

    def _cut_weight(self, x: Tensor, axis: int) -> None:
        """Cut a weight, and the parameter that it is a copy of (autocast's)."""
        self.cut_weights += 1
        self.put(x, Place("model", axis))
        source = self._sources.get(x.storage)
        if source is not None and len(source.shape) == len(x.shape):
            order = sorted(range(len(x.shape)), key=lambda at: -x.stride[at])
            self.put(source, Place("model", order.index(axis)))

    # ---- one op after another ----

    def run(self) -> Trace:
        for op in self.trace.ops:
            self._step(op)
        if not self.cut_weights:
            raise KernelcastError(
                f"tp {self.ways}: no layer of {self.trace.name} has a name that the table of roles knows; give roles="
            )
        places = [self.moved[g.ready] for g in self.trace.gradients]
        gradients = tuple(
            cut_gradient(g, self.trace.ops[g.ready], self.ops[at], at)
            for g, at in zip(self.trace.gradients, places, strict=True)
        )
        return replace(self.trace, ops=tuple(self.ops), gradients=gradients)

    def _step(self, op: Op) -> None:
        if op.phase == "optimizer":
            self._optimizer(op)
        elif op.outputs and all(self._is_view(out, op) for out in op.outputs) and not op.in_place:
            self._view(op)
        else:
            self._compute(op)
        self._made.update(out.storage for out in op.outputs if not self._is_view(out, op))

    def _is_view(self, out: Tensor, op: Op) -> bool:
        return any(out.storage == x.storage and x.storage >= 0 for x in op.inputs)

    def _view(self, op: Op) -> None:
        for out in op.outputs:
            x = next(x for x in op.inputs if x.storage == out.storage)
            place = self.place(x)
            self.put(out, in_view(x, place, out) if place is not None and out.shape else None)
        self._emit(op, {})

    def _emit(self, op: Op, seen: dict[Tensor, Place | None], arguments: tuple[Any, ...] | None = None) -> None:
        """The op with the shapes of one rank; ``seen``: inputs that it has otherwise than they lie."""
        changed = op if arguments is None else replace(op, arguments=arguments)
        outputs = tuple(shrunk(out, self.place(out), self.ways) for out in op.outputs)
        self.moved.append(len(self.ops))
        self.ops.append(
            with_tensors(changed, lambda x: shrunk(x, seen[x] if x in seen else self.place(x), self.ways), outputs)
        )

    def _send(self, name: str, x: Tensor, op: Op) -> None:
        self.ops.append(collective(name, x, "tp", op))

    # ---- sums ----

    def _join(self, x: Tensor, op: Op) -> None:
        """Before ``op`` uses a term of a sum as a number of its own, the ranks add theirs up."""
        self._terms.discard(x.storage)
        if x.elements == 1 or op.phase == "optimizer":
            return
        axis = 1 if len(x.shape) > 2 else 0
        if self.sequence_parallel and len(x.shape) >= 2 and x.shape[axis] >= self.ways:
            self._send("reduce_scatter", x, op)
            self.put(x, Place("tokens", axis))
        else:
            self._send("all_reduce", x, op)

    def _gather(self, x: Tensor, op: Op) -> None:
        """All tokens, where a cut layer needs them; once a phase (the backward pass gathers again, to save memory)."""
        if (x.storage, op.phase) not in self._gathered:
            self._gathered.add((x.storage, op.phase))
            self._send("all_gather", x, op)

    def _compute(self, op: Op) -> None:
        terms = [x for x in op.inputs if x.storage in self._terms]
        numbers = [x for x in op.inputs if x.shape]
        whole = all(x.storage in self._terms or self.place(x) is None for x in numbers)
        if terms and op.phase == "backward" and op.name in _LINEAR and whole:
            self._terms.update(out.storage for out in op.outputs)
        else:
            for x in {x.storage: x for x in terms}.values():
                self._join(x, op)
            terms = []
        if op.name in PRODUCTS:
            self._product(op)
        elif op.name == "embedding":
            self._embedding(op)
        elif op.name == "embedding_dense_backward":
            self._embedding_backward(op)
        else:
            if op.name in ("_to_copy", "clone") and op.phase == "forward" and self._is_parameter(op.inputs[0]):
                self._sources[op.outputs[0].storage] = self._sources.get(op.inputs[0].storage, op.inputs[0])
            self._other(op)

    # ---- rules ----

    def _product(self, op: Op) -> None:
        p = product_of(op)
        self._give_role(op, p)
        places = {"a": self.place(p.a), "b": self.place(p.b)}
        kinds = {place.kind for place in places.values() if place}
        if kinds == {"model", "tokens"}:
            for name, x in (("a", p.a), ("b", p.b)):
                place = places[name]
                if place is not None and place.kind == "tokens":
                    self._gather(x, op)
                    places[name] = None
        pa, pb = places["a"], places["b"]
        seen: dict[Tensor, Place | None] = {p.a: pa, p.b: pb}
        found = pa or pb
        out = op.outputs[0]
        result: Place | None = None
        if found is not None:
            if (pa and pa.axis == p.a_inner) or (pb and pb.axis == p.b_inner):
                self._terms.add(out.storage)
                seen |= {p.a: Place(found.kind, p.a_inner), p.b: Place(found.kind, p.b_inner)}
            elif pb and pb.axis == p.columns:
                result = Place(found.kind, p.out_columns)
            elif pa and pa.axis == p.rows:
                result = Place(found.kind, p.out_rows)
            else:  # a batch of products
                result = Place(found.kind, 0, found.outer)
                seen |= {p.a: result, p.b: result}
        self.put(out, result)
        self._beside(op, (p.a, p.b), result, seen)
        self._emit(op, seen)

    def _beside(self, op: Op, known: Sequence[Tensor], result: Place | None, seen: dict[Tensor, Place | None]) -> None:
        """Other inputs (a bias) are cut where the result is and they have that axis."""
        if result is None:
            return
        out = op.outputs[0]
        for x in op.inputs:
            axis = result.axis - (len(out.shape) - len(x.shape))
            if x in known or x in seen or axis < 0 or not x.shape or self.place(x) is not None:
                continue
            if axis < len(x.shape) and x.shape[axis] == out.shape[result.axis] and x.shape[axis] > 1:
                seen[x] = Place(result.kind, axis)
                if result.kind == "model" and op.phase == "forward" and self._is_parameter(x):
                    self._cut_weight(x, axis)

    def _give_role(self, op: Op, p: Product) -> None:
        if op.phase != "forward" or self.place(p.b) is not None or not self._is_parameter(p.b):
            return
        role = self._role(op.module)
        if role == "experts" and op.name == "_grouped_mm":
            place = self.place(p.a)
            role = "row" if place is not None and place.kind == "model" else "column"
        if role == "column":
            self._cut_weight(p.b, p.columns)
        elif role == "row":
            self._cut_weight(p.b, p.b_inner)

    def _embedding(self, op: Op) -> None:
        table = op.arguments[0]
        if self.place(table) is None and self._role(op.module) == "vocabulary":
            self._cut_weight(table, 0)
        place = self.place(table)
        if place is not None and place.axis == 0:
            self._tables.add(table.shape)
            self._terms.add(op.outputs[0].storage)
        self._emit(op, {})

    def _embedding_backward(self, op: Op) -> None:
        grad, out = op.arguments[0], op.outputs[0]
        place, arguments = self.place(grad), op.arguments
        seen: dict[Tensor, Place | None] = {}
        if out.shape in self._tables:
            if place is not None:
                self._gather(grad, op)
                seen[grad] = None
            self.put(out, Place("model", 0))
            arguments = (*arguments[:2], -(-arguments[2] // self.ways), *arguments[3:])
        elif place is not None:
            self._terms.add(out.storage)
        self._emit(op, seen, arguments)

    def _other(self, op: Op) -> None:
        """Element by element, over rows, attention: results are cut where inputs are."""
        cut = [(x, place) for x in op.inputs if x.shape and (place := self.place(x)) is not None]
        seen: dict[Tensor, Place | None] = {}
        for out in op.outputs:
            mine = sorted(cut, key=lambda pair: (pair[0].shape != out.shape, -pair[0].elements))
            if self.place(out) is not None or not mine:
                continue
            x, place = mine[0]
            goes = carried(op.name, x, place, out)
            if goes is not None:
                self.put(out, goes)
            elif out.elements > 1 and out.storage not in self._terms:
                self._terms.add(out.storage)
        if cut and op.outputs and op.outputs[0].shape:
            self._beside(op, [x for x, _ in cut], self.place(op.outputs[0]), seen)
        self._emit_rows(op, cut, seen)

    def _emit_rows(self, op: Op, cut: list[tuple[Tensor, Place]], seen: dict[Tensor, Place | None]) -> None:
        """A softmax or loss over a cut vocabulary: the ranks join the largest and the sum of each row."""
        self._emit(op, seen)
        if op.name not in ("_log_softmax", "_softmax", "nll_loss_forward") or not cut:
            return
        x, place = cut[0]
        if place.kind == "model" and place.axis == len(x.shape) - 1:
            for _ in range(1 if op.name == "nll_loss_forward" else 2):
                self._send("all_reduce", Tensor((x.rows,), (1,), "fp32"), op)

    def _optimizer(self, op: Op) -> None:
        """Lists of parameters, gradients and states go side by side: a state is cut as its parameter is."""
        self._join_rest(op)
        share_out(op, self)
        self._emit(op, {})

    def _join_rest(self, op: Op) -> None:
        """Gradients of what every rank has whole but saw only a part of (norms between cut layers): in one message."""
        terms = {x.storage: x for x in op.inputs if x.storage in self._terms}
        self._terms -= set(terms)
        size = sum(x.elements for x in terms.values())
        if size:
            self._send("all_reduce", Tensor((size,), (1,), next(iter(terms.values())).dtype), op)


def share_out(op: Op, known: Cut) -> None:
    lists = [value for value in (*op.arguments, *op.options.values()) if isinstance(value, (tuple, list))]
    lists = [one for one in lists if one and all(isinstance(x, Tensor) for x in one)]
    singles = tuple(x for x in op.arguments if isinstance(x, Tensor))
    groups = zip(*lists, strict=False) if len({len(one) for one in lists}) == 1 else (singles,)
    for group in groups:
        found = next(((x, place) for x in group if x.shape and (place := known.place(x)) is not None), None)
        if found is None:
            continue
        for x in group:
            if x.shape == found[0].shape and known.place(x) is None:
                known.put(x, found[1])


def cut_gradient(gradient: Gradient, before: Op, after: Op, at: int) -> Gradient:
    """The gradient with the size that its op writes after the cut."""
    for old, new in zip(before.outputs, after.outputs, strict=True):
        if old.elements == gradient.elements:
            item = gradient.bytes // gradient.elements
            return Gradient(new.elements * item, new.elements, at)
    return replace(gradient, ready=at)


def cut_tensors(trace: Trace, ways: int, sequence_parallel: bool = False, roles: Roles | None = None) -> Trace:
    """The step as one of ``ways`` ranks of tensor parallelism runs it, its collectives among the ops."""
    if ways == 1:
        return trace
    heads = {op.arguments[0].shape[1] for op in trace.ops if op.name.startswith("_scaled_dot_product")
             and op.phase == "forward"}  # fmt: skip
    for count in sorted(heads):
        if count % ways:
            raise KernelcastError(f"tp {ways} does not divide the {count} heads of {trace.name}")
    return Cut(trace, ways, sequence_parallel, roles or Roles()).run()
