"""Tensor parallelism on a traced step: Megatron's sharding, propagated from the weights through every op by the shapes.

The name of a layer, or a plan, says how its weight is sharded; from there on each op's result is sharded where its
inputs are. A product over a sharded axis leaves a partial sum on each rank: it stays one as long as only sums use it,
and is reduced before any other op (all-reduce; with sequence parallelism reduce-scatter, and all-gather where a sharded
layer needs all tokens). Ops of the result have the shapes that one rank sees.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from kernelcast.errors import KernelcastError
from kernelcast.tracing.traced import Op, Tensor, Trace
from kernelcast.training.placement import Shard, TraceSharder, shard_in_view, shard_of_result

# gathered: by columns, and the outputs are all-gathered. whole: replicated on every rank.
ShardStyle = Literal["column", "row", "vocabulary", "experts", "gathered", "whole"]

# How a module's path ends. column: each rank has some of the outputs (heads, width of the MLP). row: each has some of
# the inputs, and the outputs are summed. vocabulary: each has some of the rows of a table of tokens. experts: a block
# of grouped products, the first by columns and the second by rows. The first pattern that fits counts.
MEGATRON: dict[str, ShardStyle] = {
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
STYLES: dict[str, ShardStyle] = {
    "colwise": "column", "packed_colwise": "column", "rowwise": "row", "packed_rowwise": "row",
    "rowwise_split_input": "row", "colwise_gather_output": "gathered", "colwise_rep": "gathered",
    "embedding_rowwise": "vocabulary", "vocabulary": "vocabulary", "moe_tp_experts": "experts", "experts": "experts",
    "grouped_gemm": "experts", "replicate": "whole", "replicated": "whole", "replicated_with_grad_allreduce": "whole",
    "ep_router": "whole", "mla_kv_a_proj": "whole", "sequence_parallel": "whole", "gather": "whole",
}  # fmt: skip


@dataclass(frozen=True)
class TensorParallelPlan:
    """A table of patterns -> styles; give another one for a model with other names."""

    table: Mapping[str, ShardStyle] = field(default_factory=lambda: MEGATRON)

    @classmethod
    def of(cls, plan: Mapping[str, str], beside: Mapping[str, ShardStyle] | None = None) -> TensorParallelPlan:
        """``layers.*.mlp.up_proj = "colwise"``: how a path ends, where a star is one name. ``beside``: what comes
        first. A plan's entries for parameters (``experts.gate_up_proj``) add nothing to the module's."""
        for path, style in plan.items():
            if style not in STYLES:
                raise KernelcastError(f"the plan shards {path} {style!r}; known: {', '.join(STYLES)}")
        parts = {path: ".".join("[^.]+" if x == "*" else re.escape(x) for x in path.split(".")) for path in plan}
        return cls({**(beside or {}), **{parts[path]: STYLES[style] for path, style in plan.items()}})

    @classmethod
    def of_model(cls, trace: Trace) -> TensorParallelPlan:
        """Megatron's names, then the model's plan for all other modules."""
        return cls.of({path: style for path, style in trace.tp_plan.items() if style in STYLES}, MEGATRON)

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], ShardStyle]]:
        return [(re.compile(rf"(?:^|\.)(?:{pattern})$"), style) for pattern, style in self.table.items()]

    def style(self, path: str) -> ShardStyle | None:
        path = path.removesuffix(".base_layer")  # peft's name of the layer beside a LoRA
        return next((style for pattern, style in self._patterns if pattern.search(path)), None)


def read_plan(path: Path) -> dict[str, str]:
    """The plan of a TOML or JSON file: module -> style, at the top level or in a table ``tp_plan``."""
    try:
        text = path.read_text(encoding="utf-8")
        plan: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise KernelcastError(f"{path} is no plan: {' '.join(str(error).split())}") from error
    plan = plan.get("tp_plan", plan) if isinstance(plan, dict) else plan
    if not isinstance(plan, dict) or not plan or not all(isinstance(style, str) for style in plan.values()):
        raise KernelcastError(f'{path} is no plan: it must name modules, as in "layers.*.mlp.up_proj" = "colwise"')
    return dict(plan)


# Gradients of one input from several layers (q, k and v, and the residual stream) are summed before the all-reduce.
_LINEAR = {"add", "add_"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm"}
_COPIES = {"_to_copy", "clone", "mul", "div", "clamp", "reciprocal"}  # a weight in 8 bits is scaled and clamped first
_Seen = dict[Tensor, Shard | None]


def _operands(op: Op) -> tuple[Tensor, Tensor]:
    """The operands of a matrix product. The last two axes of each, and of the result, are its matrix; experts' weights
    and their gradients have one axis more than tokens."""
    tensors = [x for x in op.arguments if isinstance(x, Tensor)]
    a, b = tensors[1:3] if op.name in ("addmm", "baddbmm") else tensors[:2]
    return a, b


def _copied(op: Op, sources: Mapping[int, Tensor], made: Container[int]) -> Tensor | None:
    """The parameter that an op copies: in another format, or scaled to fit it. ``sources``: of copies; ``made``: what
    ops have written."""
    if not op.inputs or len(op.outputs) != 1 or op.in_place:
        return None
    x, *others = op.inputs
    scaled = op.name in _COPIES and all(other.elements < x.elements for other in others)
    if not scaled or op.outputs[0].elements != x.elements or len(x.shape) < 2:
        return None
    return sources.get(x.storage, None if x.storage in made else x)


class _TensorParallel(TraceSharder):
    """Layers are sharded by the plan, and partial sums reduced."""

    def __init__(self, trace: Trace, ranks: int, sequence_parallel: bool, tp_plan: TensorParallelPlan) -> None:
        super().__init__(trace, ranks)
        self.sequence_parallel, self.plan = sequence_parallel, tp_plan
        self._partial: set[int] = set()  # memory that holds a partial sum
        self._sources: dict[int, Tensor] = {}  # of copies of parameters
        self._made: set[int] = set()
        self._gathered: set[tuple[int, str]] = set()
        self._tables: set[tuple[int, ...]] = set()  # shapes of sharded embedding tables
        self._sharded_weights = 0
        self._weights: dict[str, dict[int, Tensor]] = {}  # read by products, by module

    def run(self) -> Trace:
        self._shard_sources()
        for op in self.trace.ops:
            made = [out for out in op.outputs if not any(out.storage == x.storage >= 0 for x in op.inputs)]
            if op.phase == "optimizer":
                self._reduce_rest(op)
                self.shard_states(op)
                self.emit(op)
            elif op.outputs and not made and not op.in_place:
                self._view(op)
            else:
                self._compute(op)
            self._made.update(out.storage for out in made)
        if not self._sharded_weights:
            raise KernelcastError(
                f"tp {self.ranks}: no layer of {self.trace.name} has a name that the Megatron table knows; "
                "give a `tp_plan`"
            )
        return replace(self.sharded(), unsharded=self._unsharded())

    def _unsharded(self) -> tuple[tuple[str, int], ...]:
        """Modules whose weights every rank has whole, layers of the same name as one, with their parameters."""
        sizes: dict[str, int] = {}
        for module, weights in self._weights.items():
            left = sum(x.elements for x in weights.values() if self.shard(x) is None)
            if left:
                name = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module) or "(outside all modules)"
                sizes[name] = sizes.get(name, 0) + left
        return tuple(sorted(sizes.items(), key=lambda pair: -pair[1]))

    def _record_weight(self, op: Op, weight: Tensor) -> None:
        """Record the weight of a product, a convolution or an embedding."""
        if op.phase == "forward" and self._is_parameter(weight) and len(weight.shape) > 1:
            source = self._sources.get(weight.storage, weight)
            self._weights.setdefault(op.module, {})[source.storage] = source

    # ---- weights ----

    def _shard_sources(self) -> None:
        """Shard parameters that products read as copies (autocast's, FP8's): a rank casts its shard alone."""
        sources: dict[int, Tensor] = {}
        made: set[int] = set()
        for op in self.trace.ops:
            if op.phase != "forward":
                continue
            if op.name in _PRODUCTS and op.name != "_grouped_mm":
                weight = _operands(op)[1]
                source, style = sources.get(weight.storage), self.plan.style(op.module)
                if source is not None and style in ("column", "row", "gathered") and self.shard(source) is None:
                    self._sources[weight.storage] = source
                    self._shard_weight(weight, len(weight.shape) - (2 if style == "row" else 1))
            elif source := _copied(op, sources, made):
                sources[op.outputs[0].storage] = source
            made.update(out.storage for out in op.outputs if all(out.storage != x.storage for x in op.inputs))
        self._shards = {key: shard for key, shard in self._shards.items() if key[0] not in made}
        self._views = {storage: view for storage, view in self._views.items() if storage not in made}

    def _is_parameter(self, x: Tensor) -> bool:
        return x.storage not in self._made or x.storage in self._sources

    def _shard_weight(self, x: Tensor, axis: int) -> None:
        """Shard a weight, and the parameter that it is a copy of (autocast's)."""
        self._sharded_weights += 1
        self.set_shard(x, Shard("model", axis))
        source = self._sources.get(x.storage)
        if source is not None and len(source.shape) == len(x.shape):
            order = sorted(range(len(x.shape)), key=lambda at: -x.stride[at])
            self.set_shard(source, Shard("model", order.index(axis)))

    def _apply_plan(self, op: Op, a: Tensor, weight: Tensor) -> None:
        if op.phase != "forward" or self.shard(weight) is not None or not self._is_parameter(weight):
            return
        style = self.plan.style(op.module)
        if style == "experts" and op.name == "_grouped_mm":
            shard = self.shard(a)
            style = "row" if shard is not None and shard.by == "model" else "column"
        if style in ("column", "row", "gathered"):
            self._shard_weight(weight, len(weight.shape) - (2 if style == "row" else 1))

    # ---- sums ----

    def _reduce(self, x: Tensor, op: Op) -> None:
        """Before ``op`` uses a partial sum as a number, the ranks reduce it."""
        self._partial.discard(x.storage)
        if x.elements == 1:
            return
        axis = 1 if len(x.shape) > 2 else 0
        if self.sequence_parallel and len(x.shape) >= 2 and x.shape[axis] >= self.ranks:
            self.collective("reduce_scatter", x, "tp", op)
            self.set_shard(x, Shard("tokens", axis))
        else:
            self.collective("all_reduce", x, "tp", op)

    def _reduce_rest(self, op: Op) -> None:
        """Gradients of replicated weights that saw a shard of the tokens or heads (norms): in one message."""
        partial = {x.storage: x for x in op.inputs if x.storage in self._partial}
        self._partial -= set(partial)
        size = sum(x.elements for x in partial.values())
        if size:
            self.collective("all_reduce", Tensor((size,), (1,), next(iter(partial.values())).dtype), "tp", op)

    def _gather(self, x: Tensor, op: Op) -> None:
        """All tokens, where a sharded layer needs them; once a phase (the backward pass gathers again)."""
        if (x.storage, op.phase) not in self._gathered:
            self._gathered.add((x.storage, op.phase))
            self.collective("all_gather", x, "tp", op)

    # ---- one op after another ----

    def _view(self, op: Op) -> None:
        for out in op.outputs:
            x = next(x for x in op.inputs if x.storage == out.storage)
            shard = self.shard(x)
            self.set_shard(out, shard_in_view(x, shard, out) if shard is not None and out.shape else None)
        self.emit(op)

    def _compute(self, op: Op) -> None:
        partial = {x.storage: x for x in op.inputs if x.storage in self._partial}
        whole = all(x.storage in partial or self.shard(x) is None for x in op.inputs if x.shape)
        if partial and op.phase == "backward" and op.name in _LINEAR and whole:
            self._partial.update(out.storage for out in op.outputs)
        else:
            for x in partial.values():
                self._reduce(x, op)
        if op.name in _PRODUCTS:
            self._product(op)
        elif op.name == "embedding":
            self._embedding(op)
        elif op.name == "embedding_dense_backward":
            self._embedding_backward(op)
        else:
            if op.phase == "forward" and (source := _copied(op, self._sources, self._made)):
                self._sources[op.outputs[0].storage] = source
            if op.name == "convolution":
                self._record_weight(op, op.arguments[1])
            self._other(op)

    def _product(self, op: Op) -> None:
        (a, b), out = _operands(op), op.outputs[0]
        self._record_weight(op, b)
        self._apply_plan(op, a, b)
        rows, columns, a_inner, b_inner = len(a.shape) - 2, len(b.shape) - 1, len(a.shape) - 1, len(b.shape) - 2
        seen: _Seen = {a: self.shard(a), b: self.shard(b)}
        if {shard.by for shard in seen.values() if shard} == {"model", "tokens"}:
            for x, shard in list(seen.items()):
                if shard and shard.by == "tokens":
                    self._gather(x, op)
                    seen[x] = None
        at_a, at_b = seen[a], seen[b]
        shard, result = at_a or at_b, None
        if shard is not None:
            if (at_a and at_a.axis == a_inner) or (at_b and at_b.axis == b_inner):
                self._partial.add(out.storage)
                seen = {a: Shard(shard.by, a_inner), b: Shard(shard.by, b_inner)}
            elif at_b and at_b.axis == columns:
                result = Shard(shard.by, len(out.shape) - 1)
            elif at_a and at_a.axis == rows:
                result = Shard(shard.by, len(out.shape) - 2)
            else:  # a batch of products
                result = Shard(shard.by, 0, shard.outer)
                seen = {a: result, b: result}
        self.set_shard(out, result)
        self._shard_others(op, result, seen)
        self.emit(op, seen)
        if result is not None and op.phase == "forward" and self.plan.style(op.module) == "gathered":
            self.collective("all_gather", out, "tp", op)
            self.set_whole(out)

    def _shard_others(self, op: Op, result: Shard | None, seen: _Seen) -> None:
        """Other inputs (a bias) are sharded where the result is and they have that axis."""
        if result is None:
            return
        out = op.outputs[0]
        for x in op.inputs:
            axis = result.axis - (len(out.shape) - len(x.shape))
            if x in seen or not 0 <= axis < len(x.shape) or self.shard(x) is not None:
                continue
            if x.shape[axis] == out.shape[result.axis] and x.shape[axis] > 1:
                seen[x] = Shard(result.by, axis)
                if result.by == "model" and op.phase == "forward" and self._is_parameter(x):
                    self._shard_weight(x, axis)

    def _embedding(self, op: Op) -> None:
        table = op.arguments[0]
        self._record_weight(op, table)
        if self.shard(table) is None and self.plan.style(op.module) == "vocabulary":
            self._shard_weight(table, 0)
        shard = self.shard(table)
        if shard is not None and shard.axis == 0:
            self._tables.add(table.shape)
            self._partial.add(op.outputs[0].storage)
        self.emit(op)

    def _embedding_backward(self, op: Op) -> None:
        grad, out = op.arguments[0], op.outputs[0]
        sharded, seen = self.shard(grad) is not None, {}
        if out.shape in self._tables:
            if sharded:
                self._gather(grad, op)
                seen = {grad: None}
            self.set_shard(out, Shard("model", 0))
            op = replace(op, arguments=(*op.arguments[:2], -(-op.arguments[2] // self.ranks), *op.arguments[3:]))
        elif sharded:
            self._partial.add(out.storage)
        self.emit(op, seen)

    def _other(self, op: Op) -> None:
        """Pointwise ops, reductions over rows, attention: results are sharded where inputs are."""
        sharded = [(x, shard) for x in op.inputs if x.shape and (shard := self.shard(x)) is not None]
        for out in op.outputs if sharded else ():
            if self.shard(out) is not None:
                continue
            x, shard = min(sharded, key=lambda pair: (pair[0].shape != out.shape, -pair[0].elements))
            placed = shard_of_result(op.name, x, shard, out)
            self.set_shard(out, placed)
            if placed is None and out.elements > 1:
                self._partial.add(out.storage)
        seen: _Seen = {}
        if sharded and op.outputs and op.outputs[0].shape:
            self._shard_others(op, self.shard(op.outputs[0]), seen)
        self.emit(op, seen)
        if sharded and op.name in ("_log_softmax", "_softmax", "nll_loss_forward"):
            self._reduce_rows(op, *sharded[0])

    def _reduce_rows(self, op: Op, x: Tensor, shard: Shard) -> None:
        """A softmax or loss over a sharded vocabulary: the ranks reduce the maximum and the sum of each row."""
        if shard.by == "model" and shard.axis == len(x.shape) - 1:
            for _ in range(1 if op.name == "nll_loss_forward" else 2):
                self.collective("all_reduce", Tensor((x.rows,), (1,), "fp32"), "tp", op)


def shard_tensors(
    trace: Trace, ranks: int, sequence_parallel: bool = False, tp_plan: TensorParallelPlan | None = None
) -> Trace:
    """The step as one of ``ranks`` ranks of tensor parallelism runs it, its collectives among the ops."""
    if ranks == 1:
        return trace
    heads = {op.arguments[0].shape[1] for op in trace.ops if op.name.startswith("_scaled_dot_product")
             and op.phase == "forward"}  # fmt: skip
    for count in sorted(heads):
        if count % ranks:
            raise KernelcastError(f"tp {ranks} does not divide the {count} heads of {trace.name}")
    return _TensorParallel(trace, ranks, sequence_parallel, tp_plan or TensorParallelPlan.of_model(trace)).run()
