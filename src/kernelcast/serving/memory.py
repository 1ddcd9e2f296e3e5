"""Memory of one GPU of a deployment: weights, KV cache, activations, and what the stack itself takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kernelcast.errors import KernelcastError
from kernelcast.kernels.dtypes import dtype
from kernelcast.networks.forward import Deployment
from kernelcast.networks.layers import Attention, Experts, LinearAttention

_LIVE_WIDTHS = 4.0  # of the hidden size, that live at once between the layers: input, residual, norm, output
_LOGIT_BYTES = 4.0 + 2.0  # as the head writes them, and in fp32 for sampling


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU, by use; the fullest of the layout."""

    weights_bytes: float
    cache_bytes: float
    activation_bytes: float
    stack_bytes: float
    available_bytes: float  # what the stack lets itself fill
    total_bytes: float  # of the GPU

    @property
    def used_bytes(self) -> float:
        return self.weights_bytes + self.cache_bytes + self.activation_bytes + self.stack_bytes

    @property
    def free_bytes(self) -> float:
        """Below zero when it does not fit."""
        return self.available_bytes - self.used_bytes


def memory(deployment: Deployment, contexts: Mapping[int, int], step_tokens: int, logit_rows: int) -> Memory:
    """``contexts``: how many sequences end with so many tokens in the cache. ``step_tokens``: of the largest pass."""
    gpu, stack = deployment.gpu, deployment.stack
    return Memory(
        weights_bytes=weight_bytes(deployment),
        cache_bytes=sum(count * cache_bytes(deployment, context) for context, count in contexts.items()),
        activation_bytes=_activation_bytes(deployment, step_tokens, logit_rows),
        stack_bytes=stack.reserved_bytes,
        available_bytes=stack.used_share * gpu.dram_bytes,
        total_bytes=float(gpu.dram_bytes),
    )


def weight_bytes(deployment: Deployment) -> float:
    """Weights of one GPU: layers cut by tp and pp, experts dealt out; embedding and head on one stage each."""
    parts, layout, kinds = deployment.model.parameters, deployment.layout, deployment.precision
    whole = dtype(kinds.between).weight_bytes
    matrices = (parts.attention + parts.mlp) / layout.tp * dtype(kinds.weights).weight_bytes
    experts = parts.experts / (layout.tp * layout.dp) * dtype(kinds.expert_weights).weight_bytes
    ends = (parts.embedding + parts.head) / layout.tp * whole
    on_a_stage = ends if layout.pp == 1 else ends / 2
    return (matrices + experts + parts.norms * whole) / layout.pp + on_a_stage


def read_weight_bytes(deployment: Deployment, tokens: float) -> float:
    """Weights that one GPU reads in a step of so many tokens: all but rows of the embedding that nobody asks for, and
    experts that no token goes to (each of E is missed by a token with probability 1 - topk / E)."""
    model, layout, kinds = deployment.model, deployment.layout, deployment.precision
    unread = 0.0
    for run in model.layer_kinds:
        if isinstance(run.layer.mlp, Experts):
            block = run.layer.mlp
            missed = (1 - block.topk / block.experts) ** tokens
            unread += run.count * missed * block.experts * block.expert.weights(model.hidden)
    unread *= dtype(kinds.expert_weights).weight_bytes / (layout.tp * layout.dp * layout.pp)
    if not model.tied_embeddings and layout.pp == 1:  # of several stages, half of both ends counts on each
        unread += model.parameters.embedding / layout.tp * dtype(kinds.between).weight_bytes
    return weight_bytes(deployment) - unread


def cache_bytes(deployment: Deployment, context_tokens: int) -> float:
    """Keys and values of one sequence on one GPU, and the states of linear attention. Heads are cut by tp until each
    GPU has one; a latent is not cut."""
    model, layout = deployment.model, deployment.layout
    if model.kind == "encoder":
        return 0.0
    numbers = state_bytes = 0.0
    for run in model.layer_kinds:
        mixer = run.layer.attention
        plain = isinstance(mixer, Attention)
        kept = min(context_tokens, (mixer.window if isinstance(mixer, Attention) else None) or context_tokens)
        cut = min(layout.tp, mixer.kv_heads) if isinstance(mixer, Attention) and plain else 1
        numbers += run.count * mixer.cache_values_per_token * kept / cut
        if isinstance(mixer, LinearAttention):
            state_bytes += run.count * mixer.state_values / layout.tp * dtype(mixer.state_dtype).act_bytes
    return (numbers * deployment.precision.cache_bytes + state_bytes) / (layout.pp * layout.dp)


def _activation_bytes(deployment: Deployment, tokens: int, logit_rows: int) -> float:
    """The widest moment of a pass: the inputs and outputs of the largest layer, or the logits."""
    model, tp = deployment.model, deployment.layout.tp
    widest = 0.0
    for run in model.layer_kinds:
        mlp = run.layer.mlp
        if isinstance(mlp, Experts):
            each = mlp.topk * (mlp.expert.up_width + mlp.inter) / deployment.layout.expert_tp / deployment.layout.ep
            shared = (mlp.shared.up_width + mlp.shared_inter) / tp if mlp.shared else 0.0
            width = each + shared + mlp.topk * model.hidden / deployment.layout.ep
        else:
            width = (mlp.up_width + mlp.inter) / tp
        widest = max(widest, width)
    between = tokens * (_LIVE_WIDTHS * model.hidden + widest) * deployment.precision.between_bytes
    return max(between, logit_rows * model.vocab * _LOGIT_BYTES)


def check_fits(deployment: Deployment, found: Memory, largest_batch: int | None = None) -> None:
    """Refuse what does not fit, and say by how much and what would."""
    if found.free_bytes >= 0:
        return
    gib = 2**30
    need = f"{found.used_bytes / gib:.1f} GiB a GPU (weights {found.weights_bytes / gib:.1f}, KV cache " \
           f"{found.cache_bytes / gib:.1f}, activations {found.activation_bytes / gib:.1f}, " \
           f"{deployment.stack.name} {found.stack_bytes / gib:.1f})"  # fmt: skip
    if found.weights_bytes + found.stack_bytes >= found.available_bytes:
        advice = "its weights alone are too large: cut it over more GPUs (--tp, --pp) or take a smaller format"
    elif largest_batch:
        advice = f"the largest batch of this kind is {largest_batch}"
    else:
        advice = "take fewer or shorter requests, more GPUs, or an fp8 KV cache"
    raise KernelcastError(
        f"{deployment.model.name} on {deployment.layout.gpus} x {deployment.gpu.id} needs {need}, "
        f"{-found.free_bytes / gib:.1f} GiB more than the {found.available_bytes / gib:.1f} that "
        f"{deployment.stack.name} fills; {advice}"
    )
