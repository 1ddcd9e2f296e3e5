"""Which layers tensor parallelism cuts, and how: Megatron's cut, told by the names that public models give them; or a
plan, which says it module by module."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from kernelcast.errors import KernelcastError
from kernelcast.tracing.traced import Op, Tensor, Trace
from kernelcast.training.placement import Dealing, Place, carried, in_view

# gathered: by columns, and every rank is given the others' outputs. whole: every rank has all of it.
Role = Literal["column", "row", "vocabulary", "experts", "gathered", "whole"]

# How a module's path ends. column: each rank has some of the outputs (heads, width of the MLP). row: each has some of
# the inputs, and the outputs are summed. vocabulary: each has some of the rows of a table of tokens. experts: a block
# of grouped products, the first by columns and the second by rows. The first pattern that fits counts.
MEGATRON: dict[str, Role] = {
    r"experts": "experts",
    # attention in
    r"(q|k|v)_proj": "column",
    r"(qkv|qkv_proj|query_key_value|Wqkv|W_pack|c_attn|in_proj|linear_qkv|to_qkv)": "column",
    r"(query|key|value|to_q|to_k|to_v|q_lin|k_lin|v_lin|wq|wk|wv)": "column",
    r"(SelfAttention|EncDecAttention)\.(q|k|v)": "column",
    r"(q_b_proj|kv_b_proj)": "column",  # MLA: from the small latent to heads
    # attention out
    r"(o_proj|out_proj|out_lin|wo|linear_proj)": "row",
    r"(attn|attention|self_attn|self_attention)\.(c_proj|dense|proj|o)": "row",
    r"attention\.output\.dense": "row",
    r"(SelfAttention|EncDecAttention)\.o": "row",
    r"to_out\.0": "row",
    # MLP in
    r"(gate_proj|up_proj|gate_up_proj|c_fc|fc1|fc_in|wi|wi_0|wi_1|w1|w3|lin1|linear_fc1|dense_h_to_4h)": "column",
    r"intermediate\.dense": "column",
    # MLP out
    r"(down_proj|fc2|fc_out|w2|lin2|linear_fc2|dense_4h_to_h)": "row",
    r"mlp\.(c_proj|proj)": "row",
    r"output\.dense": "row",
    # tables of tokens
    r"(embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|embed|shared)": "vocabulary",
    r"(lm_head|embed_out|output_layer)": "column",
    r"(predictions\.decoder|cls\.predictions\.decoder)": "column",
}


# What Hugging Face's plans call them.
STYLES: dict[str, Role] = {
    "colwise": "column", "packed_colwise": "column", "rowwise": "row", "packed_rowwise": "row",
    "rowwise_split_input": "row", "colwise_gather_output": "gathered", "colwise_rep": "gathered",
    "embedding_rowwise": "vocabulary", "vocabulary": "vocabulary", "moe_tp_experts": "experts", "experts": "experts",
    "grouped_gemm": "experts", "replicate": "whole", "replicated": "whole", "replicated_with_grad_allreduce": "whole",
    "ep_router": "whole", "mla_kv_a_proj": "whole", "sequence_parallel": "whole", "gather": "whole",
}  # fmt: skip


@dataclass(frozen=True)
class Roles:
    """A table of patterns -> roles; give another one for a model with other names."""

    table: Mapping[str, Role] = field(default_factory=lambda: MEGATRON)

    @classmethod
    def of_plan(cls, plan: Mapping[str, str], beside: Mapping[str, Role] | None = None) -> Roles:
        """``layers.*.mlp.up_proj = "colwise"``: how a path ends, where a star is one name. ``beside``: what comes
        first. A plan's entries for parameters (``experts.gate_up_proj``) say nothing that the module's own does not."""
        for path, style in plan.items():
            if style not in STYLES:
                raise KernelcastError(f"the plan cuts {path} {style!r}; known: {', '.join(STYLES)}")
        parts = {path: ".".join("[^.]+" if x == "*" else re.escape(x) for x in path.split(".")) for path in plan}
        return cls({**(beside or {}), **{parts[path]: STYLES[style] for path, style in plan.items()}})

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], Role]]:
        return [(re.compile(rf"(?:^|\.)(?:{pattern})$"), role) for pattern, role in self.table.items()]

    def of(self, path: str) -> Role | None:
        return next((role for pattern, role in self._patterns if pattern.search(path)), None)


def read_plan(path: Path) -> dict[str, str]:
    """Of a TOML or JSON file: module -> how it is cut, at the top or in a table ``tp_plan``."""
    try:
        text = path.read_text(encoding="utf-8")
        found: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise KernelcastError(f"{path} is no plan: {' '.join(str(error).split())}") from error
    found = found.get("tp_plan", found) if isinstance(found, dict) else found
    if not isinstance(found, dict) or not found or not all(isinstance(style, str) for style in found.values()):
        raise KernelcastError(f'{path} is no plan: it must name modules, as in "layers.*.mlp.up_proj" = "colwise"')
    return dict(found)


# Gradients of one input from several layers (q, k and v, and the residual stream, which one rank adds) are summed
# before the ranks join them.
_LINEAR = {"add", "add_"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"}
_Seen = dict[Tensor, Place | None]


def _operands(op: Op) -> tuple[Tensor, Tensor]:
    """Of a matrix product. The last two axes of each, and of the result, are its matrix: of a rows and inner, of b
    inner and columns; experts' weights and their gradients have one axis more than tokens."""
    tensors = [x for x in op.arguments if isinstance(x, Tensor)]
    a, b = tensors[1:3] if op.name in ("addmm", "baddbmm") else tensors[:2]
    return a, b


class _Cut(Dealing):
    """Tensor parallelism: layers are cut by their roles, and terms of sums joined."""

    def __init__(self, trace: Trace, ways: int, sequence_parallel: bool, roles: Roles) -> None:
        super().__init__(trace, ways)
        self.sequence_parallel, self.roles = sequence_parallel, roles
        self._terms: set[int] = set()  # memory that holds a term of a sum
        self._sources: dict[int, Tensor] = {}  # of copies of parameters
        self._made: set[int] = set()
        self._gathered: set[tuple[int, str]] = set()
        self._tables: set[tuple[int, ...]] = set()  # shapes of cut tables of tokens
        self._cut_weights = 0
        self._whole: dict[str, dict[int, Tensor]] = {}  # weights that no role cuts, by module

    def run(self) -> Trace:
        for op in self.trace.ops:
            made = [out for out in op.outputs if not any(out.storage == x.storage >= 0 for x in op.inputs)]
            if op.phase == "optimizer":
                self._join_rest(op)
                self.share_states(op)
                self.emit(op)
            elif op.outputs and not made and not op.in_place:
                self._view(op)
            else:
                self._compute(op)
            self._made.update(out.storage for out in made)
        if not self._cut_weights:
            raise KernelcastError(
                f"tp {self.ways}: no layer of {self.trace.name} has a name that the table of roles knows; "
                "give a plan (`tp_plan`, or roles=)"
            )
        return replace(self.dealt(), uncut=self._uncut())

    def _uncut(self) -> tuple[tuple[str, int], ...]:
        """Modules whose weights every rank has whole, layers of the same name as one, with their numbers."""
        found: dict[str, int] = {}
        for module, weights in self._whole.items():
            left = sum(x.elements for x in weights.values() if self.place(x) is None)
            if left:
                name = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module) or "(outside all modules)"
                found[name] = found.get(name, 0) + left
        return tuple(sorted(found.items(), key=lambda pair: -pair[1]))

    def _note(self, op: Op, weight: Tensor) -> None:
        """A weight that a product, a convolution or a table of tokens reads."""
        if op.phase == "forward" and self._is_parameter(weight) and len(weight.shape) > 1:
            source = self._sources.get(weight.storage, weight)
            self._whole.setdefault(op.module, {})[source.storage] = source

    # ---- weights ----

    def _is_parameter(self, x: Tensor) -> bool:
        return x.storage not in self._made or x.storage in self._sources

    def _cut_weight(self, x: Tensor, axis: int) -> None:
        """Cut a weight, and the parameter that it is a copy of (autocast's)."""
        self._cut_weights += 1
        self.put(x, Place("model", axis))
        source = self._sources.get(x.storage)
        if source is not None and len(source.shape) == len(x.shape):
            order = sorted(range(len(x.shape)), key=lambda at: -x.stride[at])
            self.put(source, Place("model", order.index(axis)))

    def _give_role(self, op: Op, a: Tensor, weight: Tensor) -> None:
        if op.phase != "forward" or self.place(weight) is not None or not self._is_parameter(weight):
            return
        role = self.roles.of(op.module)
        if role == "experts" and op.name == "_grouped_mm":
            place = self.place(a)
            role = "row" if place is not None and place.kind == "model" else "column"
        if role in ("column", "row", "gathered"):
            self._cut_weight(weight, len(weight.shape) - (2 if role == "row" else 1))

    # ---- sums ----

    def _join(self, x: Tensor, op: Op) -> None:
        """Before ``op`` uses a term of a sum as a number of its own, the ranks add theirs up."""
        self._terms.discard(x.storage)
        if x.elements == 1:
            return
        axis = 1 if len(x.shape) > 2 else 0
        if self.sequence_parallel and len(x.shape) >= 2 and x.shape[axis] >= self.ways:
            self.send("reduce_scatter", x, "tp", op)
            self.put(x, Place("tokens", axis))
        else:
            self.send("all_reduce", x, "tp", op)

    def _join_rest(self, op: Op) -> None:
        """Gradients of what every rank has whole but saw only a part of (norms between cut layers): in one message."""
        terms = {x.storage: x for x in op.inputs if x.storage in self._terms}
        self._terms -= set(terms)
        size = sum(x.elements for x in terms.values())
        if size:
            self.send("all_reduce", Tensor((size,), (1,), next(iter(terms.values())).dtype), "tp", op)

    def _gather(self, x: Tensor, op: Op) -> None:
        """All tokens, where a cut layer needs them; once a phase (the backward pass gathers again, to save memory)."""
        if (x.storage, op.phase) not in self._gathered:
            self._gathered.add((x.storage, op.phase))
            self.send("all_gather", x, "tp", op)

    # ---- one op after another ----

    def _view(self, op: Op) -> None:
        for out in op.outputs:
            x = next(x for x in op.inputs if x.storage == out.storage)
            place = self.place(x)
            self.put(out, in_view(x, place, out) if place is not None and out.shape else None)
        self.emit(op)

    def _compute(self, op: Op) -> None:
        terms = {x.storage: x for x in op.inputs if x.storage in self._terms}
        whole = all(x.storage in terms or self.place(x) is None for x in op.inputs if x.shape)
        if terms and op.phase == "backward" and op.name in _LINEAR and whole:
            self._terms.update(out.storage for out in op.outputs)
        else:
            for x in terms.values():
                self._join(x, op)
        if op.name in _PRODUCTS:
            self._product(op)
        elif op.name == "embedding":
            self._embedding(op)
        elif op.name == "embedding_dense_backward":
            self._embedding_backward(op)
        else:
            if op.name in ("_to_copy", "clone") and op.phase == "forward" and self._is_parameter(op.inputs[0]):
                self._sources[op.outputs[0].storage] = self._sources.get(op.inputs[0].storage, op.inputs[0])
            if op.name == "convolution":
                self._note(op, op.arguments[1])
            self._other(op)

    def _product(self, op: Op) -> None:
        (a, b), out = _operands(op), op.outputs[0]
        self._note(op, b)
        self._give_role(op, a, b)
        rows, columns, a_inner, b_inner = len(a.shape) - 2, len(b.shape) - 1, len(a.shape) - 1, len(b.shape) - 2
        seen: _Seen = {a: self.place(a), b: self.place(b)}
        if {place.kind for place in seen.values() if place} == {"model", "tokens"}:
            for x, place in list(seen.items()):
                if place and place.kind == "tokens":
                    self._gather(x, op)
                    seen[x] = None
        at_a, at_b = seen[a], seen[b]
        found, result = at_a or at_b, None
        if found is not None:
            if (at_a and at_a.axis == a_inner) or (at_b and at_b.axis == b_inner):
                self._terms.add(out.storage)
                seen = {a: Place(found.kind, a_inner), b: Place(found.kind, b_inner)}
            elif at_b and at_b.axis == columns:
                result = Place(found.kind, len(out.shape) - 1)
            elif at_a and at_a.axis == rows:
                result = Place(found.kind, len(out.shape) - 2)
            else:  # a batch of products
                result = Place(found.kind, 0, found.outer)
                seen = {a: result, b: result}
        self.put(out, result)
        self._beside(op, result, seen)
        self.emit(op, seen)
        if result is not None and op.phase == "forward" and self.roles.of(op.module) == "gathered":
            self.send("all_gather", out, "tp", op)
            self.gathered(out)

    def _beside(self, op: Op, result: Place | None, seen: _Seen) -> None:
        """Other inputs (a bias) are cut where the result is and they have that axis."""
        if result is None:
            return
        out = op.outputs[0]
        for x in op.inputs:
            axis = result.axis - (len(out.shape) - len(x.shape))
            if x in seen or not 0 <= axis < len(x.shape) or self.place(x) is not None:
                continue
            if x.shape[axis] == out.shape[result.axis] and x.shape[axis] > 1:
                seen[x] = Place(result.kind, axis)
                if result.kind == "model" and op.phase == "forward" and self._is_parameter(x):
                    self._cut_weight(x, axis)

    def _embedding(self, op: Op) -> None:
        table = op.arguments[0]
        self._note(op, table)
        if self.place(table) is None and self.roles.of(op.module) == "vocabulary":
            self._cut_weight(table, 0)
        place = self.place(table)
        if place is not None and place.axis == 0:
            self._tables.add(table.shape)
            self._terms.add(op.outputs[0].storage)
        self.emit(op)

    def _embedding_backward(self, op: Op) -> None:
        grad, out = op.arguments[0], op.outputs[0]
        cut, seen = self.place(grad) is not None, {}
        if out.shape in self._tables:
            if cut:
                self._gather(grad, op)
                seen = {grad: None}
            self.put(out, Place("model", 0))
            op = replace(op, arguments=(*op.arguments[:2], -(-op.arguments[2] // self.ways), *op.arguments[3:]))
        elif cut:
            self._terms.add(out.storage)
        self.emit(op, seen)

    def _other(self, op: Op) -> None:
        """Element by element, over rows, attention: results are cut where inputs are."""
        cut = [(x, place) for x in op.inputs if x.shape and (place := self.place(x)) is not None]
        for out in op.outputs if cut else ():
            if self.place(out) is not None:
                continue
            x, place = min(cut, key=lambda pair: (pair[0].shape != out.shape, -pair[0].elements))
            goes = carried(op.name, x, place, out)
            self.put(out, goes)
            if goes is None and out.elements > 1:
                self._terms.add(out.storage)
        seen: _Seen = {}
        if cut and op.outputs and op.outputs[0].shape:
            self._beside(op, self.place(op.outputs[0]), seen)
        self.emit(op, seen)
        if cut and op.name in ("_log_softmax", "_softmax", "nll_loss_forward"):
            self._join_rows(op, *cut[0])

    def _join_rows(self, op: Op, x: Tensor, place: Place) -> None:
        """A softmax or loss over a cut vocabulary: the ranks join the largest and the sum of each row."""
        if place.kind == "model" and place.axis == len(x.shape) - 1:
            for _ in range(1 if op.name == "nll_loss_forward" else 2):
                self.send("all_reduce", Tensor((x.rows,), (1,), "fp32"), "tp", op)


def cut_tensors(trace: Trace, ways: int, sequence_parallel: bool = False, roles: Roles | None = None) -> Trace:
    """The step as one of ``ways`` ranks of tensor parallelism runs it, its collectives among the ops."""
    if ways == 1:
        return trace
    heads = {op.arguments[0].shape[1] for op in trace.ops if op.name.startswith("_scaled_dot_product")
             and op.phase == "forward"}  # fmt: skip
    for count in sorted(heads):
        if count % ways:
            raise KernelcastError(f"tp {ways} does not divide the {count} heads of {trace.name}")
    return _Cut(trace, ways, sequence_parallel, roles or Roles.of_plan(_known(trace.tp_plan), MEGATRON)).run()


def _known(plan: Mapping[str, str]) -> dict[str, str]:
    """Of a model's own plan what has a role here: it fills what Megatron's names leave."""
    return {path: style for path, style in plan.items() if style in STYLES}
