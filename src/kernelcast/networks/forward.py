"""One forward pass of a model as kernel calls: what each GPU of a layout launches for one batch of tokens.

A pass is a batch of sequences, each with new tokens and tokens already in its cache: a prefill has no past, a decode
step one new token each, a chunked step some of both. Layers that are alike appear once, with their count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kernelcast.calls import Call, Launch
from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu, kind_of
from kernelcast.kernels.which import served_experts, stack_backend
from kernelcast.networks.architecture import Architecture
from kernelcast.networks.batch import Batch, Batches, Rows, Sizes
from kernelcast.networks.layers import Dense, Experts, Layer, LayerRun, LinearAttention, Mla, SelfAttention
from kernelcast.networks.precision import Precision
from kernelcast.parallel import Layout
from kernelcast.stacks import Stack

_ACTIVATIONS = {
    "silu": "silu", "swiglu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh", "relu": "relu",
}  # fmt: skip
_FOLLOWS = {"attention": "lengths", "linear attention": "lengths", "head": "sequences", "sampling": "sequences"}


@dataclass(frozen=True)
class Deployment:
    """A model on GPUs: all that decides which kernels run. ``precision`` not given: as the checkpoint is stored."""

    model: Architecture
    gpu: Gpu
    stack: Stack
    precision: Precision = field(default=None)  # type: ignore[assignment]  # never None once it is made
    layout: Layout = field(default_factory=Layout)
    skew: float = 0.0  # of tokens over experts: 0 balanced, else the exponent of their power law

    def __post_init__(self) -> None:
        if self.precision is None:
            object.__setattr__(self, "precision", Precision.of(self.model))
        for layer in (run.layer for run in self.model.layer_kinds):
            _check(layer, self)
        if self.layout.pp > self.model.layer_count:
            raise KernelcastError(f"pp {self.layout.pp} is more than the {self.model.layer_count} layers")


def _check(layer: Layer, deployment: Deployment) -> None:
    tp, mixer = deployment.layout.tp, layer.attention
    if isinstance(mixer, LinearAttention):
        if mixer.key_heads % tp:
            raise KernelcastError(
                f"tp {tp} does not divide the {mixer.key_heads} key heads of {deployment.model.name}'s linear attention"
            )
    elif mixer.q_heads % tp:
        raise KernelcastError(f"tp {tp} does not divide the {mixer.q_heads} heads of {deployment.model.name}")
    if isinstance(mixer, SelfAttention) and mixer.kv_heads % tp and tp % mixer.kv_heads:  # cut evenly, or copied evenly
        raise KernelcastError(
            f"tp {tp} does not divide the {mixer.kv_heads} key-value heads of {deployment.model.name}, nor they it"
        )
    if isinstance(layer.mlp, Experts):
        if layer.mlp.experts % deployment.layout.ep:
            raise KernelcastError(f"ep {deployment.layout.ep} does not divide {layer.mlp.experts} experts")
        if layer.mlp.inter % deployment.layout.expert_tp:
            raise KernelcastError(
                f"{deployment.layout.expert_tp} GPUs an expert do not divide its width of {layer.mlp.inter}"
            )
    elif deployment.layout.ep > 1 and not any(isinstance(run.layer.mlp, Experts) for run in deployment.model.layers):
        raise KernelcastError(f"ep {deployment.layout.ep}: {deployment.model.name} has no experts")
    elif layer.mlp.inter % tp:
        raise KernelcastError(f"tp {tp} does not divide the MLP's width of {layer.mlp.inter}")


def forward(deployment: Deployment, batch: Batch, *, in_order: bool = False) -> list[Launch]:
    """The calls of one pass on one GPU, all stages of a pipeline together; layers that are alike once with their count,
    or ``in_order`` one after another."""
    return list(_Pass(deployment, batch.sizes(head_rows(deployment, batch))).calls(in_order))


def forward_many(deployment: Deployment, batches: Batches) -> Iterator[tuple[Rows, list[Launch], dict[str, Rows]]]:
    """``forward`` of many batches at once. They come by form, with which the kernels that run are the same: the batches
    (rows) of one form, their launches with a column in place of each size, and where each batch finds its entry in the
    columns of launches that follow its tokens, its sequences or its lengths (``Launch.by``)."""
    for form, rows in batches.forms():
        own = batches.take(rows)
        sizes, places = own.sizes(form, head_rows(deployment, own))
        yield rows, list(_Pass(deployment, sizes).calls(in_order=False)), places


def head_rows(deployment: Deployment, batch: Any) -> Any:
    """Rows of the head: of one batch, or a column of those of many."""
    if deployment.model.head != "lm":  # BERT's pooler: the first token of each sequence
        return batch.sequences
    return batch.sequences * batch.head_rows if deployment.stack.head_rows == "last" else batch.tokens


class _Pass:
    """One pass under way (or many of one form, with columns for sizes): the deployment's parts at hand."""

    def __init__(self, deployment: Deployment, sizes: Sizes) -> None:
        self.model, self.gpu, self.stack = deployment.model, deployment.gpu, deployment.stack
        self.precision, self.layout = deployment.precision, deployment.layout
        self.skew = deployment.skew or None
        self.sizes, self.form, self.tokens = sizes, sizes.form, sizes.tokens

    def calls(self, in_order: bool) -> Iterator[Launch]:
        yield from self._small("embedding", "embedding", tokens=self.tokens, hidden=self.model.hidden,
                          vocab=max(1, self.model.vocab // self.layout.tp))  # fmt: skip
        if self.model.learned_positions:
            added = 2 if self.model.token_types else 1  # positions, and BERT's segments
            yield from self._small("embedding", "add", added, rows=self.tokens, cols=self.model.hidden)
        yield from self._joined(1)
        if self.model.embedding_norm:
            yield from self._small("norms", self.model.embedding_norm, rows=self.tokens, cols=self.model.hidden)
        runs = (LayerRun(1, layer) for layer in self.model.expand()) if in_order else self.model.layer_kinds
        for run in runs:
            yield from self._layer(run.layer, run.count)
        if self.layout.pp > 1:
            sent = self.tokens * self.model.hidden * self.precision.between_bytes
            yield self._sent("send_recv", self.layout.pp - 1, sent, self.layout.tp * self.layout.pp, world=None)
        if self.model.head == "lm":
            yield from self._head()
        else:  # BERT's pooler, whole on every GPU
            yield self._product("head", 1, self.sizes.rows, self.model.hidden, self.model.hidden)
            yield from self._small("head", "tanh", rows=self.sizes.rows, cols=self.model.hidden)

    def _layer(self, layer: Layer, count: int) -> Iterator[Launch]:
        behind = layer.norms.count == 4  # a norm behind the mixer and the feed-forward part too (Gemma)
        yield from self._norm(layer.norms.kind, count)
        if isinstance(layer.attention, Mla):
            yield from self._mla(layer.attention, count)
        elif isinstance(layer.attention, SelfAttention):
            yield from self._attention(layer.attention, count)
        else:
            yield from self._linear_attention(layer.attention, count)
        yield from self._joined(count)
        if behind:
            yield from self._small("norms", layer.norms.kind, count, rows=self.tokens, cols=self.model.hidden)
        yield from self._norm(layer.norms.kind, count)
        if isinstance(layer.mlp, Experts):
            yield from self._experts(layer.mlp, count)
        else:
            yield from self._dense(layer.mlp, count, "mlp")
            yield from self._joined(count)
        if behind:
            yield from self._small("norms", layer.norms.kind, count, rows=self.tokens, cols=self.model.hidden)

    def _norm(self, kind: str, count: int) -> Iterator[Launch]:
        """The norm before a part; the residual is added inside it, or in a kernel of its own."""
        if self.stack.fused_residual:
            yield from self._small("norms", kind, count, rows=self.tokens, cols=self.model.hidden, residual=True)
        else:
            yield from self._small("residual", "add", count, rows=self.tokens, cols=self.model.hidden)
            yield from self._small("norms", kind, count, rows=self.tokens, cols=self.model.hidden)

    def _attention(self, mixer: SelfAttention, count: int) -> Iterator[Launch]:
        tp, width = self.layout.tp, self.model.hidden
        heads, kv_heads, dim = mixer.q_heads // tp, max(1, mixer.kv_heads // tp), mixer.head_dim
        gate = heads * dim if mixer.output_gate else 0
        widths = [heads * dim + gate + 2 * kv_heads * dim]
        if not self.stack.joined_projections:
            widths = [heads * dim + gate, kv_heads * dim, kv_heads * dim]
        for n in widths:
            yield self._product("projections", count, self.tokens, n, width)
        for own in (heads, kv_heads) if mixer.qk_norm != "none" else ():
            rows, cols = (1, own * dim) if mixer.qk_norm == "full" else (own, dim)
            yield from self._small("norms", "rmsnorm", count, rows=self.tokens * rows, cols=cols)
        if mixer.rope:
            yield from self._small("rotary", "rope", count, tokens=self.tokens, q_heads=heads, kv_heads=kv_heads,
                              head_dim=dim, rotary_dim=mixer.rotary_dim or None)  # fmt: skip
        if self.stack.kernels == "torch" and self.form.cached:  # an engine's attention layer does it itself
            yield from self._small("cache", "kv_write", count, tokens=self.tokens, kv_heads=kv_heads, head_dim=dim)
        yield self._call("attention", "attention", count, **self.sizes.lengths, q_heads=heads, kv_heads=kv_heads,
                         head_dim=dim, causal=self.model.kind == "decoder", window=mixer.window or 0,
                         page_size=self.stack.page_size if self.form.cached else 0,
                         kv_dtype=self.precision.cache, backend=self._backend("attention"))  # fmt: skip
        if gate:
            yield from self._small("activation", "mul", count, rows=self.tokens, cols=gate)
        yield self._product("projections", count, self.tokens, width, heads * dim)

    def _mla(self, mixer: Mla, count: int) -> Iterator[Launch]:
        tp, width, tokens = self.layout.tp, self.model.hidden, self.tokens
        heads, latent = mixer.q_heads // tp, mixer.kv_lora_rank
        query = heads * mixer.qk_head_dim
        if mixer.q_lora_rank is None:
            yield self._product("projections", count, tokens, query, width)
            yield self._product("projections", count, tokens, latent + mixer.qk_rope_head_dim, width)
        else:  # both ways down in one product, whole on every GPU
            down = mixer.q_lora_rank + latent + mixer.qk_rope_head_dim
            yield self._product("projections", count, tokens, down, width)
            yield from self._small("norms", "rmsnorm", count, rows=tokens, cols=mixer.q_lora_rank)
            yield self._product("projections", count, tokens, query, mixer.q_lora_rank)
        yield from self._small("norms", "rmsnorm", count, rows=tokens, cols=latent)
        yield from self._small("rotary", "rope", count, tokens=tokens, q_heads=heads, kv_heads=1,
                          head_dim=mixer.qk_rope_head_dim)  # fmt: skip
        absorbed = self.form.absorbed
        if absorbed:  # queries into the latent, and values out of it, one small product a head
            for n, k in ((latent, mixer.qk_nope_head_dim), (mixer.v_head_dim, latent)):
                yield replace(self._call("projections", "bmm", count, batch=heads, m=self.sizes.batch_tokens, n=n, k=k,
                                         dtype=self.precision.between), by="lengths")  # fmt: skip
        else:
            up = heads * (mixer.qk_nope_head_dim + mixer.v_head_dim)
            expanded = self._product("projections", count, self.sizes.context_tokens, up, latent)
            yield replace(expanded, by="lengths")
        yield self._call("attention", "mla", count, **self.sizes.lengths, q_heads=heads, kv_rank=latent,
                         rope_dim=mixer.qk_rope_head_dim, nope_dim=mixer.qk_nope_head_dim, v_dim=mixer.v_head_dim,
                         page_size=self.stack.page_size if self.form.cached else 0,
                         kv_dtype=self.precision.cache, absorbed="yes" if absorbed else "no",
                         backend=self._backend("mla"), stack=self.stack.mla_kernels)  # fmt: skip
        yield self._product("projections", count, tokens, width, heads * mixer.v_head_dim)

    def _linear_attention(self, mixer: LinearAttention, count: int) -> Iterator[Launch]:
        tp, sizes = self.layout.tp, self.sizes.new
        yield self._product("projections", count, self.tokens, mixer.in_width // tp, self.model.hidden)
        yield from self._small("linear attention", "causal_conv1d", count, **sizes, channels=mixer.conv_channels // tp,
                          width=mixer.conv_width)  # fmt: skip
        yield self._call("linear attention", "gated_delta", count, **sizes, key_heads=mixer.key_heads // tp,
                         value_heads=mixer.value_heads // tp, key_dim=mixer.key_head_dim,
                         value_dim=mixer.value_head_dim, qk_norm=True, state_dtype=mixer.state_dtype,
                         kernel="recurrent" if self.form.checks else "auto")  # fmt: skip
        yield from self._small("norms", "rmsnorm", count, rows=self.tokens * mixer.value_heads // tp,
                          cols=mixer.value_head_dim)  # fmt: skip
        yield self._product("projections", count, self.tokens, self.model.hidden, mixer.value_width // tp)

    def _dense(self, block: Dense, count: int, part: str, tp: int | None = None) -> Iterator[Launch]:
        inter, width = block.inter // (tp or self.layout.tp), self.model.hidden
        if not inter:
            raise KernelcastError(f"{tp} GPUs cannot cut a block of width {block.inter}")
        activation = block.activation if self.stack.parts(block.activation) else _activation(block.activation)
        if block.gated and self.stack.joined_projections:
            yield self._product(part, count, self.tokens, 2 * inter, width)
        else:
            yield self._product(part, count * (2 if block.gated else 1), self.tokens, inter, width)
        if block.gated and self.stack.fused_activation and activation != "relu":
            yield from self._small("activation", f"{activation}_mul", count, rows=self.tokens, cols=inter)
        else:
            yield from self._small("activation", activation, count, rows=self.tokens, cols=inter)
            if block.gated:
                yield from self._small("activation", "mul", count, rows=self.tokens, cols=inter)
        yield self._product(part, count, self.tokens, width, inter)

    def _experts(self, block: Experts, count: int) -> Iterator[Launch]:
        width, layout = self.model.hidden, self.layout
        kind, backend = served_experts(self.stack.kernels, self.gpu, self.precision.expert_weights)
        yield self._call("router", "gemm", count, m=self.tokens, n=block.experts, k=width, dtype=self.precision.between)
        if layout.dp > 1:
            yield from self._exchanged(block, count)
        yield self._call("experts", "moe", count, tokens=self.tokens * layout.dp, hidden=width, inter=block.inter,
                         experts=block.experts, topk=block.topk, tp=layout.expert_tp, ep=layout.ep, skew=self.skew,
                         gated=block.gated, backend=backend, dtype=kind)  # fmt: skip
        if block.shared:
            yield from self._dense(block.shared, count, "shared experts")
            if layout.dp > 1:  # else the sum over the experts has it
                yield from self._joined(count)
            yield from self._small("residual", "add", count, rows=self.tokens, cols=width)
        if layout.dp == 1:
            yield from self._joined(count)

    def _exchanged(self, block: Experts, count: int) -> Iterator[Launch]:
        """Tokens to the GPUs that hold their experts, and results back: two all-to-alls over all of them."""
        world = self.layout.tp * self.layout.dp
        pairs = self.tokens * min(block.topk, self.layout.ep) / self.layout.tp
        for numbers in (self.precision.expert_weights, self.precision.between):
            one_byte = numbers not in ("bf16", "fp16", "fp32", "tf32", "int4")
            sent = pairs * self.model.hidden * (1.0 if one_byte else self.precision.between_bytes)
            yield self._sent("all_to_all", count, np.maximum(world, sent), world)

    def _joined(self, count: int) -> Iterator[Launch]:
        """What follows a layer that was cut: the sum over the GPUs that cut it."""
        world = self.layout.tp
        if world == 1:
            return
        sent = self.tokens * self.model.hidden * self.precision.between_bytes
        if self.layout.sequence_parallel:
            yield self._sent("reduce_scatter", count, sent, world)
            yield self._sent("all_gather", count, sent, world)
            return
        near = self.layout.fabric(self.gpu, world) is None and not kind_of(self.gpu.link_kind).startswith("pcie")
        own = near and self.stack.kernels != "torch"  # engines have an all-reduce of their own over NVLink
        yield self._sent("all_reduce", count, sent, world, stack=self.stack.kernels if own else "nccl")

    def _head(self) -> Iterator[Launch]:
        rows, vocab, tp = self.sizes.rows, self.model.vocab, self.layout.tp
        if self.model.final_norm:
            fused = {"residual": True} if self.stack.fused_residual else {}
            yield from self._small("norms", self.model.final_norm, 1, rows=self.tokens, cols=self.model.hidden, **fused)
        yield self._call("head", "gemm", 1, m=rows, n=-(-vocab // tp), k=self.model.hidden,
                         dtype=self.precision.between)  # fmt: skip
        if tp > 1:
            gathered = self._sent("all_gather", 1, rows * vocab * self.precision.between_bytes, tp)
            yield replace(gathered, by="sequences")
        yield from self._small("sampling", "copy", 1, rows=rows, cols=vocab, to="fp32")
        yield self._call("sampling", "argmax", 1, rows=rows, cols=vocab, dtype="fp32", stack="torch")

    def _product(self, part: str, count: float, m: Any, n: int, k: int) -> Launch:
        inputs = "ready" if self.stack.fused_quantisation and self.precision.quantised else None
        return self._call(part, "gemm", count, m=m, n=n, k=k, inputs=inputs, dtype=self.precision.weights)

    def _sent(self, op: str, count: float, sent_bytes: Any, gpus: int, **parameters: Any) -> Launch:
        """A collective among so many GPUs."""
        given = {"world": gpus, "fabric": self.layout.fabric(self.gpu, gpus), "stack": "nccl", **parameters}
        return self._call("communication", op, count, bytes=_whole(sent_bytes), dtype=self.precision.between, **given)

    def _small(self, part: str, op: str, count: float = 1, **parameters: Any) -> Iterator[Launch]:
        """A vector kernel; or those that the stack runs in its place."""
        kernels = self.stack.parts(op)
        if not kernels:
            yield self._call(part, op, count, **parameters, stack=self.stack.small_ops)
        for kernel in kernels:
            given: dict[str, Any] = {name: parameters[name] for name in ("rows", "cols") if name in parameters}
            given |= {name: self._own(name, value, parameters) for name, value in kernel.items() if name != "op"}
            yield self._call(part, kernel["op"], count, **given, stack=self.stack.small_ops)

    def _own(self, name: str, value: Any, parameters: Mapping[str, Any]) -> Any:
        """A parameter as it stands; a size may be a product of the op's own: "tokens*q_heads", "head_dim/2"."""
        if value == "vectors":
            return self.precision.vectors
        if name not in ("rows", "cols") or not isinstance(value, str):
            return value
        whole, _, divisor = value.partition("/")
        return math.prod(parameters[word] for word in whole.split("*")) // int(divisor or 1)

    def _backend(self, op: str) -> str | None:
        """What the stack whose kernels run takes for its attention."""
        stack = self.stack.mla_kernels if op == "mla" else self.stack.kernels
        words = {"stack": stack, "dtype": self.precision.vectors, "kv_dtype": self.precision.cache}
        return stack_backend(op, words, self.gpu)

    def _call(self, part: str, op: str, count: float, **parameters: Any) -> Launch:
        """A kernel of the stack, in the format of vectors unless told otherwise."""
        given = {"stack": self.stack.kernels, "dtype": self.precision.vectors, **parameters}
        return Launch(part, Call.of(op, given), float(count), _FOLLOWS.get(part, "tokens"))


def _whole(number: Any) -> Any:
    """Without its fraction: a number, or a column."""
    return np.floor(number) if np.ndim(number) else int(number)


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise KernelcastError(f"no kernel for the activation {name!r}; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]
