"""Kernels of each layer: attention and recurrent mixers, dense MLPs, and experts with dispatch and combine.

How tokens reach the GPUs of their experts and come back, by engine (``Stack.exchange``). ``nccl``: two all-to-alls.
``allgather``: every GPU gets all tokens, and sums are reduce-scattered (vLLM's default, --all2all-backend).
``deepep``: DeepSeek's library, its low-latency kernels in decode (SGLang, --moe-a2a-backend; vLLM too).
``alltoall``: TensorRT-LLM's own kernels over NVLink.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kernelcast.errors import KernelcastError
from kernelcast.forecast.calls import Call, Launch
from kernelcast.hardware import fabric_type
from kernelcast.inference.batch import LaunchSizes
from kernelcast.inference.deployment import Deployment
from kernelcast.models.layers import (
    BlockSparseAttention,
    CompressedAttention,
    Dense,
    Experts,
    Kda,
    LatentAttention,
    LinearAttention,
    Mamba2,
    Mixer,
    Parallel,
    SelfAttention,
)
from kernelcast.ops.dtypes import find_dtype
from kernelcast.ops.kernel_selection import served_experts, stack_backend

_ACTIVATIONS = {
    "silu": "silu", "swiglu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh", "relu": "relu",
    # what moves as many bytes: the square of a ReLU, and gated ones whose curve differs
    "relu2": "relu", "situ": "silu", "swigluoai": "silu", "swish": "silu", "gelu_fast": "gelu_tanh",
    "quick_gelu": "gelu_tanh",
}  # fmt: skip
_PLAIN = ("add", "mul", "pointwise")  # PyTorch's own in every engine
_FOLLOWS = {"attention": "lengths", "linear attention": "lengths", "head": "sequences", "sampling": "sequences"}


class PassContext:
    """One pass under way (or many of one form, with columns for sizes): the deployment's parts at hand."""

    def __init__(self, deployment: Deployment, sizes: LaunchSizes) -> None:
        self.deployment = deployment
        self.model, self.gpu, self.stack = deployment.model, deployment.gpu, deployment.stack
        self.precision, self.layout = deployment.precision, deployment.layout
        self.sizes, self.form, self.tokens = sizes, sizes.form, sizes.tokens
        kinds = self.precision
        self.matrices, self.blocks, self.routed = (
            kinds.runs(name, self.gpu) for name in (kinds.weights, kinds.mlp_weights, kinds.expert_weights)
        )  # formats that the matrices of attention, of dense blocks and of routed experts run as

    @property
    def page_size(self) -> int:
        return self.stack.page_size if self.form.cached else 0

    def norm(self, kind: str, count: int) -> Iterator[Launch]:
        """The norm before a part; the residual is added inside it, or in a kernel of its own."""
        rows, cols = self.tokens, self.model.hidden
        if self.stack.fused_residual:
            yield from self.small("norms", kind, count, rows=rows, cols=cols, residual=True)
        else:
            yield from self.small("residual", "add", count, rows=rows, cols=cols)
            yield from self.small("norms", kind, count, rows=rows, cols=cols)

    def joined(self, count: int) -> Iterator[Launch]:
        """What follows a layer that was cut: the sum over the GPUs that cut it."""
        world = self.layout.tp
        if world == 1:
            return
        sent = self.tokens * self.model.hidden * self.precision.between_bytes
        if self.layout.sequence_parallel:
            yield self.sent("reduce_scatter", count, sent, world)
            yield self.sent("all_gather", count, sent, world)
            return
        link = fabric_type(self.layout.link or self.gpu.link_kind)
        near = self.layout.near(self.gpu, world) and not link.startswith("pcie")
        own = near and self.stack.kernels != "torch"  # engines have an all-reduce of their own over NVLink
        yield self.sent("all_reduce", count, sent, world, stack=self.stack.kernels if own else "nccl")

    def product(self, part: str, count: float, m: Any, n: int, k: int, kind: str | None = None) -> Launch:
        """In the format of attention's matrices unless told otherwise."""
        kind = kind or self.matrices
        inputs = "ready" if self.stack.fused_quantisation and find_dtype(kind).act_bytes < 2 else None
        return self.call(part, "gemm", count, m=m, n=n, k=k, inputs=inputs, dtype=kind)

    def sent(self, op: str, count: float, sent_bytes: Any, gpus: int, **parameters: Any) -> Launch:
        """A collective among so many GPUs."""
        given = {"world": gpus, "fabric": self.layout.fabric(self.gpu, gpus), "stack": "nccl", **parameters}
        return self.call("communication", op, count, bytes=_whole(sent_bytes), dtype=self.precision.between, **given)

    def small(self, part: str, op: str, count: float = 1, **parameters: Any) -> Iterator[Launch]:
        """A vector kernel; or those that the stack runs in its place."""
        kernels = self.stack.parts(op)
        if not kernels:
            stack = "torch" if op in _PLAIN else self.stack.small_ops
            yield self.call(part, op, count, **parameters, stack=stack)
        for kernel in kernels:
            given: dict[str, Any] = {name: parameters[name] for name in ("rows", "cols") if name in parameters}
            given |= {name: self._own(name, value, parameters) for name, value in kernel.items() if name != "op"}
            yield self.call(part, kernel["op"], count, **given, stack=self.stack.small_ops)

    def activation(self, name: str) -> str:
        """The op of an activation function; where the stack runs it as several kernels, its own name."""
        if self.stack.parts(name):
            return name
        if name not in _ACTIVATIONS:
            raise KernelcastError(f"no kernel for the activation {name!r}; known: {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]

    def backend(self, op: str) -> str | None:
        """What the stack whose kernels run takes for its attention."""
        stack = self.stack.mla_kernels if op == "mla" else self.stack.kernels
        words = {"stack": stack, "dtype": self.precision.vectors, "kv_dtype": self.precision.cache}
        return stack_backend(op, words, self.gpu)

    def call(self, part: str, op: str, count: float, **parameters: Any) -> Launch:
        """A kernel of the stack, in the format of vectors unless told otherwise."""
        given = {"stack": self.stack.kernels, "dtype": self.precision.vectors, **parameters}
        return Launch(part, Call.of(op, given), float(count), _FOLLOWS.get(part, "tokens"))

    def _own(self, name: str, value: Any, parameters: Mapping[str, Any]) -> Any:
        """A parameter as it stands; a size may be a product of the op's own: "tokens*q_heads", "head_dim/2"."""
        if value == "vectors":
            return self.precision.vectors
        if name not in ("rows", "cols") or not isinstance(value, str):
            return value
        whole, _, divisor = value.partition("/")
        return math.prod(parameters[word] for word in whole.split("*")) // int(divisor or 1)


def _whole(number: Any) -> Any:
    """Without its fraction: a number, or a column."""
    return np.floor(number) if np.ndim(number) else int(number)


def mixer_launches(run: PassContext, mixer: Mixer, count: int) -> Iterator[Launch]:
    """The kernels of ``count`` mixers of one kind."""
    yield from _LAUNCHES[type(mixer)](run, mixer, count)


def _attention(run: PassContext, mixer: SelfAttention, count: int) -> Iterator[Launch]:
    tp, width = run.layout.tp, run.model.hidden
    heads, kv_heads, dim = mixer.q_heads // tp, max(1, mixer.kv_heads // tp), mixer.head_dim
    gate = heads * dim if mixer.output_gate else 0
    kept = 0 if mixer.shares_kv else 1 if mixer.values_are_keys else 2  # projections of keys and values
    widths = [heads * dim + gate + kept * kv_heads * dim]
    if not run.stack.joined_projections:
        widths = [heads * dim + gate, *(kept * [kv_heads * dim])]
    for n in widths:
        yield run.product("projections", count, run.tokens, n, width)
    for own in (heads, *(() if mixer.shares_kv else (kv_heads,))) if mixer.qk_norm != "none" else ():
        rows, cols = (1, own * dim) if mixer.qk_norm == "full" else (own, dim)
        yield from run.small("norms", "rmsnorm", count, rows=run.tokens * rows, cols=cols)
    if mixer.rope:
        yield from run.small("rotary", "rope", count, tokens=run.tokens, q_heads=heads, kv_heads=kv_heads,
                             head_dim=dim, rotary_dim=mixer.rotary_dim or None)  # fmt: skip
    if run.stack.kernels == "torch" and run.form.cached:  # an engine's attention layer does it itself
        yield from run.small("cache", "kv_write", count, tokens=run.tokens, kv_heads=kv_heads, head_dim=dim)
    yield run.call("attention", "attention", count, **run.sizes.lengths, q_heads=heads, kv_heads=kv_heads,
                   head_dim=dim, causal=run.model.kind == "decoder", window=mixer.window or 0,
                   page_size=run.page_size, kv_dtype=run.precision.cache, backend=run.backend("attention"))  # fmt: skip
    if gate:
        yield from run.small("activation", "mul", count, rows=run.tokens, cols=gate)
    yield run.product("projections", count, run.tokens, width, heads * dim)


def _latent(run: PassContext, mixer: LatentAttention, count: int) -> Iterator[Launch]:
    heads = mixer.q_heads // run.layout.tp
    if mixer.output_gate:
        yield run.product("projections", count, run.tokens, heads * mixer.v_head_dim, run.model.hidden)
        yield from run.small("activation", "mul", count, rows=run.tokens, cols=heads * mixer.v_head_dim)
    if mixer.indexer is None and not run.stack.latent_layers:
        yield from _latent_parts(run, mixer, count)
        return
    sizes = {"q_rank": mixer.q_lora_rank or 0, "kv_rank": mixer.kv_lora_rank, "rope_dim": mixer.qk_rope_head_dim,
             "nope_dim": mixer.qk_nope_head_dim, "v_dim": mixer.v_head_dim}  # fmt: skip
    if mixer.indexer is None:
        yield _layer(run, "mla_layer", count, q_heads=heads, **sizes, absorbed="yes" if run.form.absorbed else "no")
        return
    index = mixer.indexer
    yield _layer(run, "dsa_layer", count, q_heads=heads, **sizes, index_heads=index.heads, index_dim=index.head_dim,
                 index_topk=index.topk, indexer=not index.shared)  # fmt: skip


def _latent_parts(run: PassContext, mixer: LatentAttention, count: int) -> Iterator[Launch]:
    """Kernel by kernel, where no whole layer of the stack was measured."""
    width, tokens = run.model.hidden, run.tokens
    heads, latent = mixer.q_heads // run.layout.tp, mixer.kv_lora_rank
    query = heads * mixer.qk_head_dim
    if mixer.q_lora_rank is None:
        yield run.product("projections", count, tokens, query, width)
        yield run.product("projections", count, tokens, latent + mixer.qk_rope_head_dim, width)
    else:  # both ways down in one product, whole on every GPU
        down = mixer.q_lora_rank + latent + mixer.qk_rope_head_dim
        yield run.product("projections", count, tokens, down, width)
        yield from run.small("norms", "rmsnorm", count, rows=tokens, cols=mixer.q_lora_rank)
        yield run.product("projections", count, tokens, query, mixer.q_lora_rank)
    yield from run.small("norms", "rmsnorm", count, rows=tokens, cols=latent)
    if mixer.rope:
        yield from run.small("rotary", "rope", count, tokens=tokens, q_heads=heads, kv_heads=1,
                             head_dim=mixer.qk_rope_head_dim)  # fmt: skip
    absorbed = run.form.absorbed
    if absorbed:  # queries into the latent, and values out of it, one small product a head
        for n, k in ((latent, mixer.qk_nope_head_dim), (mixer.v_head_dim, latent)):
            yield replace(run.call("projections", "bmm", count, batch=heads, m=run.sizes.batch_tokens, n=n, k=k,
                                   dtype=run.precision.between), scales_with="lengths")  # fmt: skip
    else:
        up = heads * (mixer.qk_nope_head_dim + mixer.v_head_dim)
        expanded = run.product("projections", count, run.sizes.context_tokens, up, latent)
        yield replace(expanded, scales_with="lengths")
    yield run.call("attention", "mla", count, **run.sizes.lengths, q_heads=heads, kv_rank=latent,
                   rope_dim=mixer.qk_rope_head_dim, nope_dim=mixer.qk_nope_head_dim, v_dim=mixer.v_head_dim,
                   page_size=run.page_size, kv_dtype=run.precision.cache, absorbed="yes" if absorbed else "no",
                   backend=run.backend("mla"), stack=run.stack.mla_kernels)  # fmt: skip
    yield run.product("projections", count, tokens, width, heads * mixer.v_head_dim)


def _layer(run: PassContext, op: str, count: int, **sizes: Any) -> Launch:
    """An attention layer as engines measure it, projections inside."""
    return run.call("attention", op, count, **run.sizes.lengths, **sizes, hidden=run.model.hidden,
                    page_size=run.page_size, kv_dtype=run.precision.cache, dtype=run.matrices)  # fmt: skip


def _compressed(run: PassContext, mixer: CompressedAttention, count: int) -> Iterator[Launch]:
    tp, index = run.layout.tp, mixer.indexer
    chosen = {"index_heads": index.heads, "index_dim": index.head_dim, "index_topk": index.topk} if index else {}
    yield _layer(run, "compressed_layer", count, q_heads=mixer.q_heads // tp, q_rank=mixer.q_lora_rank,
                 head_dim=mixer.head_dim, rope_dim=mixer.rope_dim, o_rank=mixer.o_lora_rank,
                 o_groups=mixer.o_groups // tp, window=mixer.window, compress_ratio=mixer.ratio, **chosen)  # fmt: skip


def _block_sparse(run: PassContext, mixer: BlockSparseAttention, count: int) -> Iterator[Launch]:
    tp = run.layout.tp
    yield _layer(run, "block_sparse_layer", count, q_heads=mixer.q_heads // tp, kv_heads=max(1, mixer.kv_heads // tp),
                 head_dim=mixer.head_dim, index_heads=max(1, mixer.index_heads // tp), index_dim=mixer.index_dim,
                 block_size=mixer.block, topk_blocks=mixer.topk_blocks)  # fmt: skip


def _gated_delta(run: PassContext, mixer: LinearAttention, count: int) -> Iterator[Launch]:
    tp, sizes = run.layout.tp, run.sizes.new
    yield run.product("projections", count, run.tokens, mixer.in_width // tp, run.model.hidden)
    yield from run.small("linear attention", "causal_conv1d", count, **sizes, channels=mixer.conv_channels // tp,
                         width=mixer.conv_width, kernel=_kernel(run))  # fmt: skip
    yield run.call("linear attention", "gated_delta", count, **sizes, key_heads=mixer.key_heads // tp,
                   value_heads=mixer.value_heads // tp, key_dim=mixer.key_head_dim, value_dim=mixer.value_head_dim,
                   qk_norm=True, state_dtype=mixer.state_dtype, kernel=_kernel(run))  # fmt: skip
    yield from run.small("norms", "rmsnorm", count, rows=run.tokens * mixer.value_heads // tp,
                         cols=mixer.value_head_dim)  # fmt: skip
    yield run.product("projections", count, run.tokens, run.model.hidden, mixer.value_width // tp)


def _kda(run: PassContext, mixer: Kda, count: int) -> Iterator[Launch]:
    """The first steps of the decay and of a low-rank gate are whole on every GPU."""
    tp, sizes, width = run.layout.tp, run.sizes.new, mixer.width // run.layout.tp
    ranks = [mixer.decay_rank, *([mixer.gate_rank] if mixer.gate_rank else [])]
    yield run.product("projections", count, run.tokens, sum(ranks) + (mixer.in_width - sum(ranks)) // tp,
                      run.model.hidden)  # fmt: skip
    for rank in ranks:
        yield run.product("projections", count, run.tokens, width, rank)
    yield from run.small("linear attention", "causal_conv1d", count, **sizes, channels=mixer.conv_channels // tp,
                         width=mixer.conv_width, kernel=_kernel(run), parts=3)  # fmt: skip
    yield run.call("linear attention", "kda", count, **sizes, heads=mixer.heads // tp, key_dim=mixer.head_dim,
                   state_dtype=mixer.state_dtype, kernel=_kernel(run))  # fmt: skip
    yield from run.small("norms", "rmsnorm", count, rows=run.tokens * mixer.heads // tp, cols=mixer.head_dim)
    yield run.product("projections", count, run.tokens, run.model.hidden, width)


def _mamba2(run: PassContext, mixer: Mamba2, count: int) -> Iterator[Launch]:
    """Groups of keys and queries are cut too, or copied where there are fewer than GPUs."""
    tp, sizes = run.layout.tp, run.sizes.new
    heads, groups = mixer.heads // tp, max(1, mixer.groups // tp)
    width = heads * mixer.head_dim
    channels = width + 2 * groups * mixer.state
    yield run.product("projections", count, run.tokens, width + channels + heads, run.model.hidden)
    yield from run.small("linear attention", "causal_conv1d", count, **sizes, channels=channels,
                         width=mixer.conv_width, kernel=_kernel(run))  # fmt: skip
    yield run.call("linear attention", "mamba2", count, **sizes, heads=heads, head_dim=mixer.head_dim,
                   state=mixer.state, groups=groups, chunk=mixer.chunk, state_dtype=mixer.state_dtype,
                   kernel=_kernel(run))  # fmt: skip
    if mixer.gated_norm:
        yield from run.small("norms", "rmsnorm", count, rows=run.tokens * groups, cols=width // groups)
    else:
        yield from run.small("activation", "silu_mul", count, rows=run.tokens, cols=width)
    yield run.product("projections", count, run.tokens, run.model.hidden, width)


def _parallel(run: PassContext, mixer: Parallel, count: int) -> Iterator[Launch]:
    yield from _attention(run, mixer.attention, count)
    yield from _mamba2(run, mixer.recurrent, count)
    yield from run.small("residual", "add", count, rows=run.tokens, cols=run.model.hidden)


def _kernel(run: PassContext) -> str:
    """A few drafted tokens are checked by the kernel of decode."""
    return "recurrent" if run.form.checks else "auto"


_LAUNCHES: Mapping[type, Callable[[PassContext, Any, int], Iterator[Launch]]] = {
    SelfAttention: _attention,
    LatentAttention: _latent,
    CompressedAttention: _compressed,
    BlockSparseAttention: _block_sparse,
    LinearAttention: _gated_delta,
    Kda: _kda,
    Mamba2: _mamba2,
    Parallel: _parallel,
}


DispatchCombine = tuple[list[Launch], list[Launch], str | None]
"""Launches before and after the experts, and the experts' kernel where the exchange decides it."""


def dispatch_combine(run: PassContext, block: Experts, count: int) -> DispatchCombine:
    """Nothing where one rank has every token. Experts that are cut, not dealt out, see all tokens."""
    if run.layout.dp == 1:
        return [], [], None
    return (_allgather if run.layout.ep == 1 else _ALL2ALL[run.stack.exchange])(run, block, count)


def _one_byte(run: PassContext) -> bool:
    """Whether tokens are sent in eight bits: as the experts take them."""
    return run.routed not in ("bf16", "fp16", "fp32", "tf32", "int4", "int8_wo", "mxfp4")


def _nccl(run: PassContext, block: Experts, count: int) -> DispatchCombine:
    world = run.layout.tp * run.layout.dp
    pairs = run.tokens * min(block.topk, run.layout.ep) / run.layout.tp
    there, back = (
        run.sent("all_to_all", count, np.maximum(world, pairs * block.width(run.model.hidden) * each), world)
        for each in (1.0 if _one_byte(run) else run.precision.between_bytes, run.precision.between_bytes)
    )
    return [there], [back], None


def _allgather(run: PassContext, block: Experts, count: int) -> DispatchCombine:
    world = run.layout.tp * run.layout.dp
    all_bytes = run.tokens * run.layout.dp * block.width(run.model.hidden) * run.precision.between_bytes
    there, back = (run.sent(op, count, all_bytes, world) for op in ("all_gather", "reduce_scatter"))
    return [there], [back], None


def _deepep(run: PassContext, block: Experts, count: int) -> DispatchCombine:
    decodes = run.form.checks
    words = _words(run, block) | {"mode": "low_latency" if decodes else "normal"}
    world = run.layout.tp * run.layout.dp
    if not run.layout.near(run.gpu, world):
        words |= {"nodes": -(-world // run.layout.gpus_per_node), "fabric": run.layout.between_nodes}
    sent = "fp8_block" if _one_byte(run) else "bf16"  # scales travel along
    there, back = (
        run.call("communication", f"deepep_{what}", count, **words, dtype=kind, stack="sglang")
        for what, kind in (("dispatch", sent), ("combine", "bf16"))
    )
    blocks = run.routed == "fp8_block"
    return [there], [back], ("deepep_masked" if decodes else "deepep_contiguous") if blocks else None


def _alltoall(run: PassContext, block: Experts, count: int) -> DispatchCombine:
    if not run.layout.near(run.gpu, run.layout.tp * run.layout.dp):  # over NVLink alone
        return _nccl(run, block, count)
    words, sent = _words(run, block) | {"stack": "trtllm"}, "fp8" if _one_byte(run) else "bf16"
    kinds = (("prepare", "bf16"), ("dispatch", "nvfp4" if run.routed == "nvfp4" else sent), ("combine", "bf16"))
    first, there, back = (
        run.call("communication", f"alltoall_{what}", count, **words, dtype=kind) for what, kind in kinds
    )
    return [first, there], [back], None


def _words(run: PassContext, block: Experts) -> dict[str, Any]:
    """GPUs that share a rank's tokens send a part each."""
    layout = run.layout
    return {"tokens": -(-run.tokens // layout.tp), "hidden": block.width(run.model.hidden), "topk": block.topk,
            "experts": block.experts, "world": layout.tp * layout.dp}  # fmt: skip


_ALL2ALL: Mapping[str, Callable[[PassContext, Experts, int], DispatchCombine]] = {
    "nccl": _nccl,
    "allgather": _allgather,
    "deepep": _deepep,
    "alltoall": _alltoall,
}
ALL2ALL_BACKENDS = tuple(_ALL2ALL)


def dense(run: PassContext, block: Dense, count: int, part: str) -> Iterator[Launch]:
    inter, width = block.inter // run.layout.tp, run.model.hidden
    if not inter:
        raise KernelcastError(f"{run.layout.tp} GPUs cannot cut a block of width {block.inter}")
    activation = run.activation(block.activation)
    if block.gated and run.stack.joined_projections:
        yield run.product(part, count, run.tokens, 2 * inter, width, run.blocks)
    else:
        yield run.product(part, count * (2 if block.gated else 1), run.tokens, inter, width, run.blocks)
    if block.gated and run.stack.fused_activation and activation != "relu":
        yield from run.small("activation", f"{activation}_mul", count, rows=run.tokens, cols=inter)
    else:
        yield from run.small("activation", activation, count, rows=run.tokens, cols=inter)
        if block.gated:
            yield from run.small("activation", "mul", count, rows=run.tokens, cols=inter)
    yield run.product(part, count, run.tokens, width, inter, run.blocks)


def experts(run: PassContext, block: Experts, count: int) -> Iterator[Launch]:
    """Routed experts and the shared one; the sum over the GPUs that cut them is inside."""
    hidden, layout = run.model.hidden, run.layout
    width = block.width(hidden)
    yield run.call("router", "gemm", count, m=run.tokens, n=block.experts, k=hidden, dtype=run.precision.between)
    if block.latent:
        yield run.product("experts", count, run.tokens, width, hidden, run.blocks)
    there, back, backend = dispatch_combine(run, block, count)
    beside = "all" if run.deployment.overlap else ""
    yield from (replace(launch, overlaps=beside) for launch in there)
    kind = run.routed
    own: str | None = run.stack.moe_backend or backend
    if own is None:  # a kernel that was asked for runs in the format that it is given
        kind, own = served_experts(run.stack.kernels, run.gpu, kind)
    yield run.call("experts", "moe", count, tokens=run.tokens * layout.dp, hidden=width, inter=block.inter,
                   experts=block.experts, topk=block.topk, tp=layout.expert_tp, ep=layout.ep, **run.deployment.routed,
                   **run.deployment.slots(block.experts),
                   gated=block.gated, backend=own, dtype=kind)  # fmt: skip
    yield from (replace(launch, overlaps=beside) for launch in back)
    if block.latent:
        if block.latent_norm:
            yield from run.small("norms", "rmsnorm", count, rows=run.tokens, cols=width)
        yield run.product("experts", count, run.tokens, hidden, width, run.blocks)
    if block.shared:
        for launch in dense(run, block.shared, count, "shared experts"):
            yield replace(launch, overlaps="experts" if run.stack.shared_stream else "")
        if layout.dp > 1:  # else the sum over the experts has it
            yield from run.joined(count)
        yield from run.small("residual", "add", count, rows=run.tokens, cols=hidden)
    if layout.dp == 1:
        yield from run.joined(count)
