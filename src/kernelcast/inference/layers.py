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
    # ops that move as many bytes: squared ReLU, and gated activations with another curve
    "relu2": "relu", "situ": "silu", "swigluoai": "silu", "swish": "silu", "gelu_fast": "gelu_tanh",
    "quick_gelu": "gelu_tanh",
}  # fmt: skip
_PLAIN = ("add", "mul", "pointwise", "argmax")  # PyTorch's own in every engine
_FOLLOWS = {"attention": "lengths", "linear attention": "lengths", "head": "sequences", "sampling": "sequences"}


class PassContext:
    """One pass (or many of the same traits, with columns for sizes) and the parts of its deployment."""

    def __init__(self, deployment: Deployment, sizes: LaunchSizes) -> None:
        self.deployment = deployment
        self.model, self.gpu, self.stack = deployment.model, deployment.gpu, deployment.stack
        self.precision, self.layout = deployment.precision, deployment.layout
        self.sizes, self.traits, self.tokens = sizes, sizes.traits, sizes.tokens
        formats = self.precision
        self.matrices, self.blocks, self.routed = (
            formats.runs(name, self.gpu) for name in (formats.weights, formats.mlp_weights, formats.expert_weights)
        )  # formats that the matrices of attention, of dense blocks and of routed experts run as

    @property
    def page_size(self) -> int:
        return self.stack.page_size if self.traits.has_past else 0

    def norm(self, op: str, count: int) -> Iterator[Launch]:
        """The norm before a part; the residual is added inside it, or in a kernel of its own."""
        rows, cols = self.tokens, self.model.hidden
        if self.stack.fused_residual:
            yield from self.elementwise("norms", op, count, rows=rows, cols=cols, residual=True)
        else:
            yield from self.elementwise("residual", "add", count, rows=rows, cols=cols)
            yield from self.elementwise("norms", op, count, rows=rows, cols=cols)

    def tensor_parallel_sum(self, count: int) -> Iterator[Launch]:
        """The sum over tensor parallel GPUs after a sharded layer."""
        world = self.layout.tp
        if world == 1:
            return
        sent = self.tokens * self.model.hidden * self.precision.between_bytes
        if self.layout.sequence_parallel:
            yield self.collective("reduce_scatter", count, sent, world)
            yield self.collective("all_gather", count, sent, world)
            return
        # Engines' all-reduces were measured as they choose them: their own kernel where GPUs reach each other's memory,
        # over PCIe that of a pair alone (vllm/distributed/device_communicators/custom_all_reduce.py), and NCCL's.
        own = self.layout.near(self.gpu, world) and self.stack.kernels != "torch"
        yield self.collective("all_reduce", count, sent, world, stack=self.stack.kernels if own else "nccl")

    def gemm(self, part: str, count: float, m: Any, n: int, k: int, dtype: str | None = None, *,
             after: str = "compiled") -> Launch:  # fmt: skip
        """In the format of attention's weights unless given. ``after``: "attention", whose outputs no compiler joins
        with their quantisation."""
        dtype = dtype or self.matrices
        inputs = "ready" if dtype in self.stack.fused_quantisation and after != "attention" else None
        return self.launch(part, "gemm", count, m=m, n=n, k=k, inputs=inputs, dtype=dtype)

    def collective(self, op: str, count: float, sent_bytes: Any, gpus: int, **parameters: Any) -> Launch:
        """A collective among ``gpus`` GPUs."""
        given = {"world": gpus, "fabric": self.layout.fabric(self.gpu, gpus), "stack": "nccl", **parameters}
        return self.launch("communication", op, count, bytes=_whole(sent_bytes), dtype=self.precision.between, **given)

    def elementwise(self, part: str, op: str, count: float = 1, **parameters: Any) -> Iterator[Launch]:
        """A vector kernel; or those that the stack runs instead."""
        kernels = self.stack.parts(op)
        if not kernels:
            stack = "torch" if op in _PLAIN else self.stack.small_ops
            yield self.launch(part, op, count, **parameters, stack=stack)
        for kernel in kernels:
            given: dict[str, Any] = {name: parameters[name] for name in ("rows", "cols") if name in parameters}
            given |= {name: self._value(name, value, parameters) for name, value in kernel.items() if name != "op"}
            yield self.launch(part, kernel["op"], count, **given, stack="torch")

    def activation(self, name: str) -> str:
        """The op of an activation function; where the stack runs it as several kernels, its own name."""
        if self.stack.parts(name):
            return name
        if name not in _ACTIVATIONS:
            raise KernelcastError(f"no kernel for the activation {name!r}; known: {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]

    def backend(self, op: str) -> str | None:
        """The attention backend of the stack whose kernels run."""
        stack = self.stack.mla_kernels if op == "mla" else self.stack.kernels
        parameters = {"stack": stack, "dtype": self.precision.vectors, "kv_dtype": self.precision.cache}
        return stack_backend(op, parameters, self.gpu)

    def launch(self, part: str, op: str, count: float, **parameters: Any) -> Launch:
        """A kernel of the stack, in the format of activations unless given."""
        given = {"stack": self.stack.kernels, "dtype": self.precision.vectors, **parameters}
        return Launch(part, Call.of(op, given), float(count), _FOLLOWS.get(part, "tokens"))

    def _value(self, name: str, value: Any, parameters: Mapping[str, Any]) -> Any:
        """A parameter as given; a size may be a product of parameters: "tokens*q_heads", "head_dim/2"."""
        if value == "vectors":
            return self.precision.vectors
        if name not in ("rows", "cols", "k") or not isinstance(value, str):
            return value
        whole, _, divisor = value.partition("/")
        return math.prod(parameters[factor] for factor in whole.split("*")) // int(divisor or 1)


def _whole(number: Any) -> Any:
    """Without its fraction: a number, or a column."""
    return np.floor(number) if np.ndim(number) else int(number)


def mixer_launches(ctx: PassContext, mixer: Mixer, count: int) -> Iterator[Launch]:
    """The kernels of ``count`` equal mixers."""
    yield from _LAUNCHES[type(mixer)](ctx, mixer, count)


def _attention(ctx: PassContext, mixer: SelfAttention, count: int) -> Iterator[Launch]:
    tp, width = ctx.layout.tp, ctx.model.hidden
    heads, kv_heads, dim = mixer.q_heads // tp, max(1, mixer.kv_heads // tp), mixer.head_dim
    gate = heads * dim if mixer.output_gate else 0
    kept = 0 if mixer.shares_kv else 1 if mixer.values_are_keys else 2  # projections of keys and values
    widths = [heads * dim + gate + kept * kv_heads * dim]
    if not ctx.stack.joined_projections:
        widths = [heads * dim + gate, *(kept * [kv_heads * dim])]
    for n in widths:
        yield ctx.gemm("projections", count, ctx.tokens, n, width)
    normed = (heads, *(() if mixer.shares_kv else (kv_heads,))) if mixer.qk_norm != "none" else ()
    if normed and ctx.stack.compiled_qk_norm:  # one kernel for the sums, which the rotation multiplies with
        yield from ctx.elementwise("norms", "pointwise", count, rows=ctx.tokens * sum(normed), cols=dim,
                                   reads=1.0, tensors=1.0)  # fmt: skip
    for each in normed if not ctx.stack.compiled_qk_norm else ():
        rows, cols = (1, each * dim) if mixer.qk_norm == "full" else (each, dim)
        yield from ctx.elementwise("norms", "rmsnorm", count, rows=ctx.tokens * rows, cols=cols)
    if mixer.rope:
        yield from ctx.elementwise("rotary", "rope", count, tokens=ctx.tokens, q_heads=heads, kv_heads=kv_heads,
                             head_dim=dim, rotary_dim=mixer.rotary_dim or None)  # fmt: skip
    if ctx.stack.kernels == "torch" and ctx.traits.has_past:  # an engine's attention layer does it itself
        yield from ctx.elementwise("cache", "kv_write", count, tokens=ctx.tokens, kv_heads=kv_heads, head_dim=dim)
    of_sinks = dict(ctx.stack.sink_attention).get(ctx.gpu.instruction_path) if mixer.sinks else None
    yield ctx.launch("attention", "attention", count, **ctx.sizes.lengths, q_heads=heads, kv_heads=kv_heads,
                   head_dim=dim, causal=ctx.model.kind == "decoder", window=mixer.window or 0, page_size=ctx.page_size,
                   kv_dtype=ctx.precision.cache, backend=of_sinks or ctx.backend("attention"))  # fmt: skip
    if gate:
        yield from ctx.elementwise("activation", "mul", count, rows=ctx.tokens, cols=gate)
    yield ctx.gemm("projections", count, ctx.tokens, width, heads * dim, after="activation" if gate else "attention")


def _latent(ctx: PassContext, mixer: LatentAttention, count: int) -> Iterator[Launch]:
    heads = mixer.q_heads // ctx.layout.tp
    if mixer.output_gate:
        yield ctx.gemm("projections", count, ctx.tokens, heads * mixer.v_head_dim, ctx.model.hidden)
        yield from ctx.elementwise("activation", "mul", count, rows=ctx.tokens, cols=heads * mixer.v_head_dim)
    if mixer.indexer is None and not ctx.stack.latent_layers:
        yield from _latent_parts(ctx, mixer, count)
        return
    sizes = {"q_rank": mixer.q_lora_rank or 0, "kv_rank": mixer.kv_lora_rank, "rope_dim": mixer.qk_rope_head_dim,
             "nope_dim": mixer.qk_nope_head_dim, "v_dim": mixer.v_head_dim}  # fmt: skip
    if mixer.indexer is None:
        yield _layer(ctx, "mla_layer", count, q_heads=heads, **sizes, absorbed="yes" if ctx.traits.absorbed else "no")
        return
    index = mixer.indexer
    yield _layer(ctx, "dsa_layer", count, q_heads=heads, **sizes, index_heads=index.heads, index_dim=index.head_dim,
                 index_topk=index.topk, indexer=not index.shared)  # fmt: skip


def _latent_parts(ctx: PassContext, mixer: LatentAttention, count: int) -> Iterator[Launch]:
    """Kernel by kernel, where no whole layer of the stack was measured."""
    width, tokens = ctx.model.hidden, ctx.tokens
    heads, latent = mixer.q_heads // ctx.layout.tp, mixer.kv_lora_rank
    query = heads * mixer.qk_head_dim
    if mixer.q_lora_rank is None:
        yield ctx.gemm("projections", count, tokens, query, width)
        yield ctx.gemm("projections", count, tokens, latent + mixer.qk_rope_head_dim, width)
    else:  # both down projections in one product, replicated on every GPU
        down = mixer.q_lora_rank + latent + mixer.qk_rope_head_dim
        yield ctx.gemm("projections", count, tokens, down, width)
        yield from ctx.elementwise("norms", "rmsnorm", count, rows=tokens, cols=mixer.q_lora_rank)
        yield ctx.gemm("projections", count, tokens, query, mixer.q_lora_rank)
    yield from ctx.elementwise("norms", "rmsnorm", count, rows=tokens, cols=latent)
    if mixer.rope:
        yield from ctx.elementwise("rotary", "rope", count, tokens=tokens, q_heads=heads, kv_heads=1,
                             head_dim=mixer.qk_rope_head_dim)  # fmt: skip
    absorbed = ctx.traits.absorbed
    if absorbed:  # queries into the latent, and values out of it, one small product a head
        for n, k in ((latent, mixer.qk_nope_head_dim), (mixer.v_head_dim, latent)):
            yield replace(ctx.launch("projections", "bmm", count, batch=heads, m=ctx.sizes.batch_tokens, n=n, k=k,
                                   dtype=ctx.precision.between), scales_with="lengths")  # fmt: skip
    else:
        up = heads * (mixer.qk_nope_head_dim + mixer.v_head_dim)
        expanded = ctx.gemm("projections", count, ctx.sizes.context_tokens, up, latent)
        yield replace(expanded, scales_with="lengths")
    yield ctx.launch("attention", "mla", count, **ctx.sizes.lengths, q_heads=heads, kv_rank=latent,
                   rope_dim=mixer.qk_rope_head_dim, nope_dim=mixer.qk_nope_head_dim, v_dim=mixer.v_head_dim,
                   page_size=ctx.page_size, kv_dtype=ctx.precision.cache, absorbed="yes" if absorbed else "no",
                   backend=ctx.backend("mla"), stack=ctx.stack.mla_kernels)  # fmt: skip
    yield ctx.gemm("projections", count, tokens, width, heads * mixer.v_head_dim)


def _layer(ctx: PassContext, op: str, count: int, **sizes: Any) -> Launch:
    """An attention layer as engines measure it, projections inside."""
    return ctx.launch("attention", op, count, **ctx.sizes.lengths, **sizes, hidden=ctx.model.hidden,
                    page_size=ctx.page_size, kv_dtype=ctx.precision.cache, dtype=ctx.matrices)  # fmt: skip


def _compressed(ctx: PassContext, mixer: CompressedAttention, count: int) -> Iterator[Launch]:
    tp, index = ctx.layout.tp, mixer.indexer
    chosen = {"index_heads": index.heads, "index_dim": index.head_dim, "index_topk": index.topk} if index else {}
    yield _layer(ctx, "compressed_layer", count, q_heads=mixer.q_heads // tp, q_rank=mixer.q_lora_rank,
                 head_dim=mixer.head_dim, rope_dim=mixer.rope_dim, o_rank=mixer.o_lora_rank,
                 o_groups=mixer.o_groups // tp, window=mixer.window, compress_ratio=mixer.ratio, **chosen)  # fmt: skip


def _block_sparse(ctx: PassContext, mixer: BlockSparseAttention, count: int) -> Iterator[Launch]:
    tp = ctx.layout.tp
    yield _layer(ctx, "block_sparse_layer", count, q_heads=mixer.q_heads // tp, kv_heads=max(1, mixer.kv_heads // tp),
                 head_dim=mixer.head_dim, index_heads=max(1, mixer.index_heads // tp), index_dim=mixer.index_dim,
                 block_size=mixer.block, topk_blocks=mixer.topk_blocks)  # fmt: skip


def _gated_delta(ctx: PassContext, mixer: LinearAttention, count: int) -> Iterator[Launch]:
    tp, sizes = ctx.layout.tp, ctx.sizes.new
    yield ctx.gemm("projections", count, ctx.tokens, mixer.in_width // tp, ctx.model.hidden)
    yield from ctx.elementwise("linear attention", "causal_conv1d", count, **sizes, channels=mixer.conv_channels // tp,
                         width=mixer.conv_width, kernel=_kernel(ctx))  # fmt: skip
    yield ctx.launch("linear attention", "gated_delta", count, **sizes, key_heads=mixer.key_heads // tp,
                   value_heads=mixer.value_heads // tp, key_dim=mixer.key_head_dim, value_dim=mixer.value_head_dim,
                   qk_norm=True, state_dtype=mixer.state_dtype, kernel=_kernel(ctx))  # fmt: skip
    yield from ctx.elementwise("norms", "rmsnorm", count, rows=ctx.tokens * mixer.value_heads // tp,
                         cols=mixer.value_head_dim)  # fmt: skip
    yield ctx.gemm("projections", count, ctx.tokens, ctx.model.hidden, mixer.value_width // tp)


def _kda(ctx: PassContext, mixer: Kda, count: int) -> Iterator[Launch]:
    """The down projections of the decay and of a low-rank gate are replicated on every GPU."""
    tp, sizes, width = ctx.layout.tp, ctx.sizes.new, mixer.width // ctx.layout.tp
    ranks = [mixer.decay_rank, *([mixer.gate_rank] if mixer.gate_rank else [])]
    yield ctx.gemm("projections", count, ctx.tokens, sum(ranks) + (mixer.in_width - sum(ranks)) // tp,
                      ctx.model.hidden)  # fmt: skip
    for rank in ranks:
        yield ctx.gemm("projections", count, ctx.tokens, width, rank)
    yield from ctx.elementwise("linear attention", "causal_conv1d", count, **sizes, channels=mixer.conv_channels // tp,
                         width=mixer.conv_width, kernel=_kernel(ctx), parts=3)  # fmt: skip
    yield ctx.launch("linear attention", "kda", count, **sizes, heads=mixer.heads // tp, key_dim=mixer.head_dim,
                   state_dtype=mixer.state_dtype, kernel=_kernel(ctx))  # fmt: skip
    yield from ctx.elementwise("norms", "rmsnorm", count, rows=ctx.tokens * mixer.heads // tp, cols=mixer.head_dim)
    yield ctx.gemm("projections", count, ctx.tokens, ctx.model.hidden, width)


def _mamba2(ctx: PassContext, mixer: Mamba2, count: int) -> Iterator[Launch]:
    """Groups of keys and queries are sharded too, or replicated where there are fewer than GPUs."""
    tp, sizes = ctx.layout.tp, ctx.sizes.new
    heads, groups = mixer.heads // tp, max(1, mixer.groups // tp)
    width = heads * mixer.head_dim
    channels = width + 2 * groups * mixer.state
    yield ctx.gemm("projections", count, ctx.tokens, width + channels + heads, ctx.model.hidden)
    yield from ctx.elementwise("linear attention", "causal_conv1d", count, **sizes, channels=channels,
                         width=mixer.conv_width, kernel=_kernel(ctx))  # fmt: skip
    yield ctx.launch("linear attention", "mamba2", count, **sizes, heads=heads, head_dim=mixer.head_dim,
                   state=mixer.state, groups=groups, chunk=mixer.chunk, state_dtype=mixer.state_dtype,
                   kernel=_kernel(ctx))  # fmt: skip
    if mixer.gated_norm:
        yield from ctx.elementwise("norms", "rmsnorm", count, rows=ctx.tokens * groups, cols=width // groups)
    else:
        yield from ctx.elementwise("activation", "silu_mul", count, rows=ctx.tokens, cols=width)
    yield ctx.gemm("projections", count, ctx.tokens, ctx.model.hidden, width)


def _parallel(ctx: PassContext, mixer: Parallel, count: int) -> Iterator[Launch]:
    yield from _attention(ctx, mixer.attention, count)
    yield from _mamba2(ctx, mixer.recurrent, count)
    yield from ctx.elementwise("residual", "add", count, rows=ctx.tokens, cols=ctx.model.hidden)


def _kernel(ctx: PassContext) -> str:
    """A few drafted tokens are checked by the kernel of decode."""
    return "recurrent" if ctx.traits.decodes else "auto"


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


def dispatch_combine(ctx: PassContext, block: Experts, count: int) -> DispatchCombine:
    """Nothing where one rank has every token. Without expert parallelism every GPU sees all tokens."""
    if ctx.layout.dp == 1:
        return [], [], None
    return (_allgather if ctx.layout.ep == 1 else _ALL2ALL[ctx.stack.exchange])(ctx, block, count)


def _one_byte(ctx: PassContext) -> bool:
    """Whether tokens are dispatched in 8 bits, the format of the experts' products."""
    return find_dtype(ctx.routed).act_bytes < 2


def _nccl(ctx: PassContext, block: Experts, count: int) -> DispatchCombine:
    world = ctx.layout.tp * ctx.layout.dp
    pairs = ctx.tokens * min(block.topk, ctx.layout.ep) / ctx.layout.tp
    there, back = (
        ctx.collective("all_to_all", count, np.maximum(world, pairs * block.width(ctx.model.hidden) * each), world)
        for each in (1.0 if _one_byte(ctx) else ctx.precision.between_bytes, ctx.precision.between_bytes)
    )
    return [there], [back], None


def _allgather(ctx: PassContext, block: Experts, count: int) -> DispatchCombine:
    """Tokens travel in the format of the experts' products where they were quantised before, in the norm."""
    world, values = ctx.layout.tp * ctx.layout.dp, ctx.tokens * ctx.layout.dp * block.width(ctx.model.hidden)
    between, routed = ctx.precision.between_bytes, find_dtype(ctx.routed).act_bytes
    sent = routed if ctx.routed in ctx.stack.fused_quantisation else between
    there = ctx.collective("all_gather", count, values * sent, world)
    return [there], [ctx.collective("reduce_scatter", count, values * between, world)], None


def _deepep(ctx: PassContext, block: Experts, count: int) -> DispatchCombine:
    decodes = ctx.traits.decodes
    parameters = _exchange_sizes(ctx, block) | {"mode": "low_latency" if decodes else "normal"}
    world = ctx.layout.tp * ctx.layout.dp
    if not ctx.layout.near(ctx.gpu, world):
        parameters |= {"nodes": -(-world // ctx.layout.gpus_per_node), "fabric": ctx.layout.between_nodes}
    sent = "fp8_block" if _one_byte(ctx) else "bf16"  # scales travel along
    there, back = (
        ctx.launch("communication", f"deepep_{what}", count, **parameters, dtype=dtype, stack="sglang")
        for what, dtype in (("dispatch", sent), ("combine", "bf16"))
    )
    blocks = ctx.routed == "fp8_block"
    return [there], [back], ("deepep_masked" if decodes else "deepep_contiguous") if blocks else None


def _alltoall(ctx: PassContext, block: Experts, count: int) -> DispatchCombine:
    """Over NVLink alone (MnnvlMemory.supports_mnnvl in tensorrt_llm/_mnnvl_utils.py); else tokens are gathered."""
    nvlink = fabric_type(ctx.layout.link or ctx.gpu.link_kind).startswith("nvlink")
    if not nvlink or not ctx.layout.near(ctx.gpu, ctx.layout.tp * ctx.layout.dp):
        return _allgather(ctx, block, count)
    parameters, sent = _exchange_sizes(ctx, block) | {"stack": "trtllm"}, "fp8" if _one_byte(ctx) else "bf16"
    steps = (("prepare", "bf16"), ("dispatch", "nvfp4" if ctx.routed == "nvfp4" else sent), ("combine", "bf16"))
    first, there, back = (
        ctx.launch("communication", f"alltoall_{what}", count, **parameters, dtype=dtype) for what, dtype in steps
    )
    return [first, there], [back], None


def _exchange_sizes(ctx: PassContext, block: Experts) -> dict[str, Any]:
    """GPUs that share a rank's tokens each send a shard of them."""
    layout = ctx.layout
    return {"tokens": -(-ctx.tokens // layout.tp), "hidden": block.width(ctx.model.hidden), "topk": block.topk,
            "experts": block.experts, "world": layout.tp * layout.dp}  # fmt: skip


_ALL2ALL: Mapping[str, Callable[[PassContext, Experts, int], DispatchCombine]] = {
    "nccl": _nccl,
    "allgather": _allgather,
    "deepep": _deepep,
    "alltoall": _alltoall,
}
ALL2ALL_BACKENDS = tuple(_ALL2ALL)


def dense(ctx: PassContext, block: Dense, count: int, part: str) -> Iterator[Launch]:
    inter, width = block.inter // ctx.layout.tp, ctx.model.hidden
    if not inter:
        raise KernelcastError(f"{ctx.layout.tp} GPUs cannot shard an MLP of width {block.inter}")
    activation = ctx.activation(block.activation)
    if block.gated and ctx.stack.joined_projections:
        yield ctx.gemm(part, count, ctx.tokens, 2 * inter, width, ctx.blocks)
    else:
        yield ctx.gemm(part, count * (2 if block.gated else 1), ctx.tokens, inter, width, ctx.blocks)
    if block.gated and ctx.stack.fused_activation and activation != "relu":
        yield from ctx.elementwise("activation", f"{activation}_mul", count, rows=ctx.tokens, cols=inter)
    else:
        yield from ctx.elementwise("activation", activation, count, rows=ctx.tokens, cols=inter)
        if block.gated:
            yield from ctx.elementwise("activation", "mul", count, rows=ctx.tokens, cols=inter)
    yield ctx.gemm(part, count, ctx.tokens, width, inter, ctx.blocks)


def experts(ctx: PassContext, block: Experts, count: int) -> Iterator[Launch]:
    """Routed and shared experts with dispatch and combine, and the sum over tensor parallel GPUs."""
    hidden, layout = ctx.model.hidden, ctx.layout
    width = block.width(hidden)
    yield ctx.launch("router", "gemm", count, m=ctx.tokens, n=block.experts, k=hidden, dtype=ctx.precision.between)
    if block.router_groups and ctx.stack.parts("grouped_topk"):
        yield from ctx.elementwise("router", "grouped_topk", count, rows=ctx.tokens, cols=block.experts,
                                   groups=block.router_groups, k=block.topk)  # fmt: skip
    if block.latent:
        yield ctx.gemm("experts", count, ctx.tokens, width, hidden, ctx.blocks)
    there, back, backend = dispatch_combine(ctx, block, count)
    beside = "all" if ctx.deployment.overlap else ""
    yield from (replace(launch, overlaps=beside) for launch in there)
    of_release = dict(ctx.stack.mxfp4_experts).get(ctx.gpu.instruction_path) if ctx.routed == "mxfp4" else None
    chosen = ctx.stack.moe_backend or backend or of_release
    dtype, kernel = served_experts(ctx.stack.kernels, ctx.gpu, ctx.routed, chosen)
    yield ctx.launch("experts", "moe", count, tokens=ctx.tokens * layout.dp, hidden=width, inter=block.inter,
                   topk=block.topk, tp=layout.expert_tp, ep=layout.ep,
                   **ctx.deployment.routed(block, decodes=ctx.traits.decodes), **ctx.deployment.slots(block.experts),
                   gated=block.gated, backend=kernel, dtype=dtype)  # fmt: skip
    yield from (replace(launch, overlaps=beside) for launch in back)
    if block.latent:
        if block.latent_norm:
            yield from ctx.elementwise("norms", "rmsnorm", count, rows=ctx.tokens, cols=width)
        yield ctx.gemm("experts", count, ctx.tokens, hidden, width, ctx.blocks)
    if block.shared:
        for launch in dense(ctx, block.shared, count, "shared experts"):
            yield replace(launch, overlaps="experts" if ctx.stack.shared_stream else "")
        if layout.dp > 1:  # else it is part of the sum over the experts
            yield from ctx.tensor_parallel_sum(count)
        yield from ctx.elementwise("residual", "add", count, rows=ctx.tokens, cols=hidden)
    if layout.dp == 1:
        yield from ctx.tensor_parallel_sum(count)
