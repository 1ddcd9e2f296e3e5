"""What autograd keeps of one layer between its forward and its backward pass, tensor by tensor, in bytes a token.

Korthikanti et al. 2022 (arXiv 2205.05198, section 4) count the tensors of a GPT layer that are kept for the backward
pass; here each is written out, so that grouped queries, gated MLPs, latent attention and experts are exact:

    norm            its input (b h), or fp32 and normalised copies of it where it is not fused
    linear layer    its input (b h; quantised: as quantised), unless its weight is frozen and has no adapter
    attention       q, k, v, the output, and the logarithm of each row's sum (4 bytes a head)
    gated MLP       gate and up (2 b f) and their product (b f)
    experts         the same of topk tokens a token, and the router's scores in fp32

A layer is a list of ``Step``s in forward order. While the backward pass of one runs, what it and those before it keep
is alive, with the gradient of its output and of its input: ``most_alive`` walks the list.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from kernelcast.models.layers import Dense, Experts, LatentAttention, Layer, Mamba2, Mixer, NormOp, SelfAttention
from kernelcast.training.layout import ContextExchange

_FP32 = 4.0


@dataclass(frozen=True)
class Step:
    """One operation, or one tensor. ``kept``: bytes a token that its backward pass reads; ``input`` and ``output``: of
    the gradients that are alive beside it. ``modules``: those of ``--recompute-modules`` that make what is kept
    again."""

    kept: float = 0.0
    input: float = 0.0
    output: float = 0.0
    modules: tuple[str, ...] = ()
    is_product: bool = False  # of a linear layer


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """All that decides what a rank keeps of a layer, and nothing else: results are cached by it.

    ``element``: bytes of an activation. ``linear``: of an input of a linear layer as it is kept. ``trained``: linear
    layers whose inputs are needed for a weight's gradient, in LoRA those with an adapter of ``rank``.
    """

    hidden: int
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    cp_comm: ContextExchange = "p2p"
    expert_tp: int = 1
    element: float = 2.0
    linear: float = 2.0
    attention: float = 2.0  # of q, k, v and the output of attention: 1 where it runs in fp8
    quantised: bool = False
    trained: tuple[str, ...] = ("qkv", "proj", "fc1", "fc2")
    rank: int = 0
    fused_norms: bool = True
    fused_activation: bool = True
    saved: tuple[tuple[str, float], ...] = ()  # of activations, tensors kept beside what they give; else their input
    activation_input: float = 1.0  # bytes of an activation's input as it is kept, over those of its format
    masked: bool = False  # dropout before the residual, whose mask takes a byte a number
    busiest: float = 1.0  # tokens of the busiest rank's experts over the mean

    @property
    def whole(self) -> float:
        """The hidden width of a token."""
        return self.element * self.hidden

    @property
    def stream(self) -> float:
        """The residual and what norms write: sharded by tokens with sequence parallelism."""
        return self.whole / self.tp if self.sequence_parallel else self.whole

    @property
    def entering(self) -> float:
        """The gradient of a column-parallel layer's input, and with sequence parallelism the input gathered again."""
        return self.whole * (2 if self.sequence_parallel else 1)

    def input_of(self, name: str, width: float, times: float = 1.0) -> float:
        """Kept of a linear layer's input of ``width`` values (``times`` layers read it), which nothing else keeps."""
        if name not in self.trained:
            return 0.0
        adapter = self.element * self.rank  # what the adapter's first product gives
        return width * (self.linear * times if self.quantised else self.element) + adapter

    def copy_of(self, name: str, width: float, times: float = 1.0) -> float:
        """The same of an input that another operation keeps as it is: the quantised copy alone."""
        if name not in self.trained:
            return 0.0
        return (width * self.linear * times if self.quantised else 0.0) + self.element * self.rank


def norm(shape: Sharded, width: float) -> list[Step]:
    """Its input, and the scale of each row; in eager PyTorch an fp32 copy and the normalised rows."""
    kept = width if shape.fused_norms else width * (_FP32 / shape.element + 1)
    return [Step(kept + _FP32, width, width)]


def _column_input(shape: Sharded, name: str, kept: float, times: float = 1.0) -> Step:
    """What a norm wrote and a column-parallel layer (``times`` of them) reads."""
    width = kept / shape.element
    return Step(shape.input_of(name, width, times), modules=("layernorm",))


def _attention(mixer: SelfAttention, shape: Sharded) -> list[Step]:
    """Norm, q, k, v in one product, rotary embedding, attention, output product."""
    q = shape.element * mixer.q_width / shape.tp
    kv = (1 if mixer.values_are_keys else 2) * shape.element * mixer.kv_width / min(shape.tp, mixer.kv_heads)
    qkv = q * (2 if mixer.output_gate else 1) + kv
    scaled = 0.0 if mixer.qk_norm == "none" else norm(shape, q + kv / 2)[0].kept
    return [
        *norm(shape, shape.stream),
        _column_input(shape, "qkv", shape.stream),
        Step(scaled, shape.entering, qkv, is_product=True),
        *_core(shape, q, kv, q, mixer.q_heads),
    ]


def _core(shape: Sharded, q: float, kv: float, out: float, heads: int, up: tuple[str, ...] = ()) -> list[Step]:
    """Flash attention and the product behind it, which reads the output that attention keeps (another tensor, where an
    all-to-all moved heads to other ranks in between, or attention keeps it in fp8). Keys and values of other context
    parallel ranks are gathered, or those of the next arrive while one block runs."""
    gathered = kv * {"all_gather": shape.cp - 1, "p2p": 2, "a2a": 0}[shape.cp_comm] if shape.cp > 1 else 0.0
    moved = out if shape.attention < shape.element or (shape.cp > 1 and shape.cp_comm == "a2a") else 0.0
    share = shape.attention / shape.element
    return [
        Step(share * (q + kv), modules=up),
        Step(share * out, q + kv + gathered, out, ("attention",)),
        Step(_FP32 * heads / shape.tp, modules=("core_attn",)),
        Step(
            shape.input_of("proj", out / shape.element) if moved else shape.copy_of("proj", out / shape.element),
            out,
            shape.whole,
            is_product=True,
        ),
    ]


def _latent(mixer: LatentAttention, shape: Sharded) -> list[Step]:
    """Latents are not sharded by heads, but by tokens with sequence parallelism; queries, keys and values are."""
    stream = shape.stream / shape.whole * shape.element
    heads = shape.element * mixer.q_heads / shape.tp
    q, k, v = heads * mixer.qk_head_dim, heads * mixer.qk_head_dim, heads * mixer.v_head_dim
    up = ("mla_up_proj",)
    steps = [*norm(shape, shape.stream), _column_input(shape, "qkv", shape.stream, 2 if mixer.q_lora_rank else 1)]
    latents = mixer.kv_lora_rank
    if mixer.q_lora_rank:
        latents += mixer.q_lora_rank
    down = stream * (latents + mixer.qk_rope_head_dim)
    expanded = heads * (mixer.qk_nope_head_dim + mixer.v_head_dim)
    return [
        *steps,
        Step(0.0, shape.entering, down, is_product=True),
        *norm(shape, stream * latents),
        Step(shape.input_of("qkv", latents * stream / shape.element), modules=up),
        Step(0.0, stream * latents, q + expanded, is_product=True),
        *_core(shape, q, k + v, v, mixer.q_heads, up),
    ]


def _other(mixer: Mixer, shape: Sharded) -> list[Step]:
    """Mamba-2 keeps what in_proj wrote, its output and the normed one; its convolution and states are made again
    (mamba_split_conv1d_scan_combined). Of a mixer that is not written out: each product's output, and as much again."""
    if isinstance(mixer, Mamba2):
        width, more = mixer.in_width, 2 * mixer.width
    else:
        width = more = mixer.weights(shape.hidden) // shape.hidden
    written, inside = (shape.element * size / shape.tp for size in (width, width + more))
    return [*norm(shape, shape.stream), _column_input(shape, "qkv", shape.stream),
            Step(inside, shape.entering, written)]  # fmt: skip


@functools.lru_cache(maxsize=64)
def joining_steps(shape: Sharded) -> tuple[Step, ...]:
    """Before a module for multi-token prediction: norms of the state and of the token's embedding, and a product of
    both side by side."""
    both = 2 * shape.stream
    return (*norm(shape, shape.stream), *norm(shape, shape.stream),
            Step(shape.input_of("fc1", both / shape.element), both, shape.stream))  # fmt: skip


def _block(
    block: Dense, shape: Sharded, rows: float, shards: int, modules: tuple[str, ...], act: str, entering: float,
    leaving: float,
) -> list[Step]:  # fmt: skip
    """Up, activation and down on ``rows`` tokens a token. ``modules``: that run all of it again."""
    up, inter = (rows * shape.element * width / shards for width in (block.up_width, block.inter))
    separate = 0.0 if shape.fused_activation or not block.gated else inter  # the activation's output, times up
    up_kept = up * shape.activation_input * dict(shape.saved).get(block.activation, 1.0)
    return [
        Step(0.0, entering, up, is_product=True),
        Step(up_kept + separate, up, inter, modules),
        Step(shape.input_of("fc2", inter / shape.element), modules=(*modules, act)),
        Step(0.0, inter, leaving, is_product=True),
    ]


def _experts(block: Experts, shape: Sharded) -> list[Step]:
    """Norm, router, shared experts, dispatch, the experts of this rank and combination. Tokens are dispatched from
    where they are: with sequence parallelism each rank of a tensor parallel group has a part of them."""
    here = 1 / shape.tp if shape.sequence_parallel else 1.0
    width = shape.element * block.width(shape.hidden)
    rows = here * block.topk * shape.busiest
    moe = ("moe",)
    # fp32 probabilities of all experts, the same for the balancing loss, their scattered copy, the map of the routed,
    # and the map of rows that the fused permutation keeps (two int32 an expert)
    scores = here * block.experts * (3 * _FP32 + 1 + 8)
    steps = [
        *norm(shape, shape.stream),
        Step(shape.stream, modules=("layernorm",)),  # the router reads it as it is
        Step(scores, shape.stream, here * block.experts * _FP32, moe),
    ]
    if block.shared:
        copies = shape.copy_of("fc1", shape.stream / shape.element)
        both = ("shared_experts", "moe")
        steps += [Step(copies, modules=both)]
        steps += _block(block.shared, shape, 1.0, shape.tp, both, "moe_act", shape.entering, shape.whole)
    dispatched = rows * width * shape.expert_tp  # every rank of an expert's shards gets all its tokens
    return [
        *steps,
        Step(0.0, shape.stream, rows * width),  # permutation
        Step(0.0, rows * width, dispatched),  # exchange and sorting by expert
        Step(shape.input_of("fc1", dispatched / shape.element), modules=moe),
        *_block(block.expert, shape, rows * shape.expert_tp, shape.expert_tp, moe, "moe_act", dispatched, dispatched),
        Step(0.0, dispatched, rows * width),
        Step(0.0, rows * width, shape.stream),
    ]


@functools.lru_cache(maxsize=4096)
def layer_steps(layer: Layer, shape: Sharded) -> tuple[Step, ...]:
    """Everything that a layer keeps, without recomputation."""
    steps: list[Step] = []
    if isinstance(layer.attention, LatentAttention):
        steps += _latent(layer.attention, shape)
    elif isinstance(layer.attention, SelfAttention):
        steps += _attention(layer.attention, shape)
    elif layer.attention is not None:
        steps += _other(layer.attention, shape)
    if isinstance(layer.mlp, Experts):
        steps += _experts(layer.mlp, shape)
    elif layer.mlp is not None:
        steps += [*norm(shape, shape.stream), _column_input(shape, "fc1", shape.stream)]
        steps += _block(layer.mlp, shape, 1.0, shape.tp, ("mlp",), "mlp_act", shape.entering, shape.whole)
    if shape.masked:
        steps.append(Step((bool(layer.attention) + bool(layer.mlp)) * shape.stream / shape.element))
    return tuple(steps)


@functools.lru_cache(maxsize=4096)
def head_steps(
    norm_op: NormOp | None, shape: Sharded, logits: float, fused_loss: bool, eager: float = _FP32
) -> tuple[Step, ...]:
    """Last norm, product with the vocabulary (``logits`` values a token on this rank) and loss. A fused cross entropy
    overwrites the logits with their gradient. F.cross_entropy keeps the logarithms of probabilities in fp32; its
    backward pass makes their gradient and that of the logits, in fp32 both (``eager``: bytes of each; Hugging Face's
    loss of encoders casts nothing)."""
    written = shape.element * logits
    each = eager * logits
    loss = Step(written) if fused_loss else Step(each, each, each)
    first = norm(shape, shape.stream) if norm_op else []
    return (*first, Step(shape.stream, shape.entering, written), loss)


def kept(steps: tuple[Step, ...], recomputed: tuple[str, ...] = ()) -> float:
    """Bytes a token between the forward and the backward pass; ``recomputed``: modules that keep nothing."""
    if "op" in recomputed:  # the layer's input, what attention gives, and half of what products give
        given = sum(step.output for step in steps if step.is_product) / 2
        attention = sum(step.kept for step in steps if {"attention", "core_attn"} & set(step.modules))
        return min(sum(step.kept for step in steps), steps[0].kept + attention + given)
    return sum(step.kept for step in steps if not any(name in recomputed for name in step.modules))


@functools.lru_cache(maxsize=4096)
def most_alive(steps: tuple[Step, ...], residual: float) -> float:
    """Bytes a token at the peak of the layer's backward pass: all of it is there again where it was recomputed.
    ``residual``: the gradient that passes beside the layer."""
    alive, most = 0.0, 0.0
    for step in steps:
        alive += step.kept
        most = max(most, alive + step.input + step.output)
    return most + residual
