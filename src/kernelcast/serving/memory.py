"""Memory of one GPU of a deployment: weights, KV cache, activations, and what the stack itself takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from kernelcast.errors import KernelcastError
from kernelcast.kernels.dtypes import dtype
from kernelcast.networks.forward import Deployment
from kernelcast.networks.layers import Experts, LinearAttention, SelfAttention
from kernelcast.serving.workload import Workload
from kernelcast.timeline import Memory

_LIVE_WIDTHS = 4.0  # of the hidden size, that live at once between the layers: input, residual, norm, output
_LOGIT_BYTES = 4.0 + 2.0  # as the head writes them, and in fp32 for sampling


def memory(deployment: Deployment, contexts: Mapping[int, int], step_tokens: int, logit_rows: int) -> Memory:
    """The fullest GPU. ``contexts``: how many sequences end with so many tokens in the cache. ``step_tokens``: of the
    largest pass."""
    gpu, stack = deployment.gpu, deployment.stack
    parts = {
        "weights": weight_bytes(deployment),
        "cache": sum(count * cache_bytes(deployment, context) for context, count in contexts.items()),
        "activation": _activation_bytes(deployment, step_tokens, logit_rows),
        "stack": stack.reserved_bytes,
    }
    return Memory(parts, float(gpu.dram_bytes), stack.used_share * gpu.dram_bytes)


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
        window, cut = (mixer.window, min(layout.tp, mixer.kv_heads)) if isinstance(mixer, SelfAttention) else (None, 1)
        kept = min(context_tokens, window or context_tokens)
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


def checked_memory(deployment: Deployment, workload: Workload) -> Memory:
    """Of a batch; refuses what does not fit, and says by how much and what would."""
    found = _needed(deployment, workload)
    if found.fits:
        return found
    gib = 2**30
    need = f"{found.used_bytes / gib:.1f} GiB a GPU (weights {found['weights'] / gib:.1f}, KV cache " \
           f"{found['cache'] / gib:.1f}, activations {found['activation'] / gib:.1f}, " \
           f"{deployment.stack.name} {found['stack'] / gib:.1f})"  # fmt: skip
    most = largest_batch(deployment, workload)
    if found["weights"] + found["stack"] >= found.available_bytes:
        advice = "its weights alone are too large: cut it over more GPUs (--tp, --pp) or take a smaller format"
    elif most:
        advice = f"the largest batch of this kind is {most}"
    else:
        advice = "take fewer or shorter requests, more GPUs, or an fp8 KV cache"
    raise KernelcastError(
        f"{deployment.model.name} on {deployment.layout.gpus} x {deployment.gpu.id} needs {need}, "
        f"{found.missing_bytes / gib:.1f} GiB more than the {found.available_bytes / gib:.1f} that "
        f"{deployment.stack.name} fills; {advice}"
    )


def _needed(deployment: Deployment, workload: Workload) -> Memory:
    workload = workload.on(deployment)
    contexts = Counter(n + m for n, m in zip(workload.inputs, workload.outputs, strict=True))
    new = sum(workload.inputs) - sum(workload.past)
    found = _held(deployment, contexts, new, workload.chunk)
    draft = workload.speculation and workload.speculation.draft
    if not draft:
        return found
    beside = _held(draft, contexts, new, workload.chunk)
    shared = {name: found[name] + beside[name] for name in ("weights", "cache")}
    return replace(found, parts={**found.parts, **shared})


def _held(deployment: Deployment, contexts: Mapping[int, int], new_tokens: int, chunk: int | None) -> Memory:
    cut = deployment.layout.dp * deployment.layout.micro_batches
    tokens = min(new_tokens, chunk) if chunk else new_tokens
    return memory(deployment, contexts, math.ceil(tokens / cut), math.ceil(sum(contexts.values()) / cut))


def largest_batch(deployment: Deployment, workload: Workload) -> int:
    """How many requests like the mean of these fit."""
    workload = workload.on(deployment)
    inputs, outputs = (math.ceil(sum(x) / len(x)) for x in (workload.inputs, workload.outputs))
    new = inputs - sum(workload.past) // len(workload.past)

    def fits(batch: int) -> bool:
        return _held(deployment, {inputs + outputs: batch}, batch * new, workload.chunk).fits

    return _largest(fits)


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, by doubling and halving; 0 when none does."""
    if not fits(1):
        return 0
    high = 1
    while fits(2 * high) and high < 1 << 40:
        high *= 2
    low = high
    high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
