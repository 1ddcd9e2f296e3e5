"""Memory of one GPU of a deployment: weights, KV cache, activations, and what the stack itself takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import DoesNotFit
from kernelcast.inference.batch import Ints
from kernelcast.inference.forward import Deployment
from kernelcast.inference.workload import RequestColumns, Workload
from kernelcast.models.layers import Experts, Parallel, SelfAttention
from kernelcast.models.recurrent import RecurrentMixer
from kernelcast.ops.dtypes import find_dtype
from kernelcast.schedule import Memory

_LIVE_WIDTHS = 4.0  # of the hidden size, that live at once between the layers: input, residual, norm, output
# Beside input and norm where an image encoder rotates in fp32 (vllm/model_executor/layers/rotary_embedding/common.py,
# enable_fp32_compute): queries, keys, values; queries and keys side by side, in fp32, and rotated in fp32.
_ROTATED_WIDTHS = 3.0 + 2.0 + 2 * 4.0
_STEPS = 65  # batch sizes that are tried at once in the search for the largest


def memory(deployment: Deployment, contexts: Mapping[int, int], step_tokens: int, logit_rows: int) -> Memory:
    """Memory of the fullest GPU. ``contexts``: sequences by the tokens in their cache at the end. ``step_tokens``: of
    the largest pass."""
    cache = sum(count * cache_bytes(deployment, context) for context, count in contexts.items())
    return _filled(deployment, cache, step_tokens, logit_rows)


def _filled(deployment: Deployment, cache: Any, step_tokens: Any, logit_rows: Any) -> Memory:
    """The memory with a cache of so many bytes: of one batch, or columns of many."""
    gpu, stack = deployment.gpu, deployment.stack
    parts = {
        "weights": weight_bytes(deployment),
        "cache": cache,
        "activation": _activation_bytes(deployment, step_tokens, logit_rows),
        "stack": stack.held_bytes(deployment.layout.tp, linked=deployment.linked),
    }
    return Memory(parts, float(gpu.dram_bytes), stack.used_share * gpu.allocatable_bytes)


def weight_bytes(deployment: Deployment) -> float:
    """Weights of one GPU: layers sharded by tp and pp, routed experts by ep too, routers and shared experts as
    other matrices; embedding, vision encoder and head on the stages at the ends."""
    model, layout = deployment.model, deployment.layout
    parts, whole = model.parameters, find_dtype(deployment.precision.between).weight_bytes
    routed, held = _routed_weights(deployment, 0), _routed_weights(deployment, deployment.redundant, padded=True)
    formats = deployment.precision
    attention = parts.attention * _number_bytes(deployment, formats.weights)
    others = (parts.mlp + parts.experts - routed) * _number_bytes(deployment, formats.mlp_weights)
    matrices = (attention + others) / layout.tp
    experts = held / (layout.tp * layout.dp) * _number_bytes(deployment, formats.expert_weights)
    ends = (parts.embedding + parts.vision + parts.head) / layout.tp * whole
    on_a_stage = ends if layout.pp == 1 else ends / 2
    return (matrices + experts + parts.norms * whole) / layout.pp + on_a_stage


def _routed_weights(deployment: Deployment, spare: int, *, padded: bool = False) -> float:
    """Weights of all routed experts, with ``spare`` copies per layer; ``padded``: as they lie in memory."""
    model = deployment.model
    blocks = [(run.count, run.layer.mlp) for run in model.distinct_layers if isinstance(run.layer.mlp, Experts)]
    return sum(
        n * (b.experts + spare) * b.expert_weights(model.hidden) * (_padding(deployment, b) if padded else 1)
        for n, b in blocks
    )


def _padding(deployment: Deployment, block: Experts) -> float:
    """How much larger experts get where a kernel pads them to whole tiles."""
    multiples = dict(deployment.stack.mxfp4_padding).get(deployment.gpu.instruction_path)
    if multiples is None or deployment.precision.expert_weights != "mxfp4":
        return 1.0
    hidden, inter = block.width(deployment.model.hidden), block.inter / deployment.layout.expert_tp
    sizes = zip((inter, hidden), multiples, strict=True)
    return math.prod(math.ceil(size / multiple) * multiple / size for size, multiple in sizes)


def _number_bytes(deployment: Deployment, dtype: str) -> float:
    """Bytes of one weight with its share of a scale: those of the checkpoint where its format is used as stored."""
    stored = deployment.model.quantization
    if stored and deployment.precision.stored and stored.four_bit_bytes and dtype in ("int4", "mxfp4"):
        return stored.four_bit_bytes
    return find_dtype(dtype).weight_bytes


def read_weight_bytes(deployment: Deployment, tokens: Any) -> Any:
    """Weights that one GPU reads in a step of so many text tokens: all but unused rows of the embedding, the vision
    encoder, and experts that no token is routed to (each of E is missed by a token with probability
    1 - topk / E). Columns: columns."""
    model, layout, formats = deployment.model, deployment.layout, deployment.precision
    tokens, unread = np.minimum(tokens, 1) if deployment.identical else tokens, 0.0
    for run in model.distinct_layers:
        if isinstance(run.layer.mlp, Experts):
            block = run.layer.mlp
            missed = (1 - block.topk / block.experts) ** tokens
            unread += (
                run.count * missed * block.experts * block.expert_weights(model.hidden) * _padding(deployment, block)
            )
    unread *= _number_bytes(deployment, formats.expert_weights) / (layout.tp * layout.dp * layout.pp)
    if layout.pp == 1:  # of several stages, half of both ends counts on each
        ends = model.parameters.vision + (0 if model.tied_embeddings else model.parameters.embedding)
        unread += ends / layout.tp * find_dtype(formats.between).weight_bytes
    return weight_bytes(deployment) - unread


def cache_bytes(deployment: Deployment, context_tokens: Any, step_tokens: int = 0) -> Any:
    """KV cache of one sequence on one GPU: keys, values, the keys of indexers, and recurrent states. Of a column of
    contexts: a column. ``step_tokens``: of a prefill, that windows have beside those before it."""
    model, layout = deployment.model, deployment.layout
    kept = 0.0 * context_tokens
    if model.kind == "encoder":
        return kept
    for run in model.distinct_layers:
        if mixer := run.layer.attention:
            value_bytes = deployment.precision.cache_bytes
            if isinstance(mixer, SelfAttention) and mixer.window:
                mixer = replace(mixer, window=mixer.window + step_tokens)
            kept = kept + run.count * mixer.cache_bytes(context_tokens, value_bytes, layout.tp)
    return kept / (layout.pp * layout.dp)


def state_bytes(deployment: Deployment) -> float:
    """States of the recurrent layers of one sequence on one GPU, whatever its length."""
    layout, value_bytes = deployment.layout, deployment.precision.cache_bytes
    mixers = [(run.count, run.layer.attention) for run in deployment.model.distinct_layers]
    kept = sum(
        count * mixer.cache_bytes(0, value_bytes, layout.tp)
        for count, mixer in mixers
        if isinstance(mixer, RecurrentMixer | Parallel)
    )
    return float(kept) / (layout.pp * layout.dp)


def _activation_bytes(deployment: Deployment, tokens: Any, logit_rows: Any) -> Any:
    """The widest moment of a pass: the inputs and outputs of the largest layer, or the logits; and the workspace of
    routed experts, where it stays allocated."""
    model, tp = deployment.model, deployment.layout.tp
    widest = workspace = 0.0
    for run in model.distinct_layers:
        mlp = run.layer.mlp
        if isinstance(mlp, Experts):
            each = mlp.topk * (mlp.expert.up_width + mlp.inter) / deployment.layout.expert_tp / deployment.layout.ep
            shared = (mlp.shared.up_width + mlp.shared_inter) / tp if mlp.shared else 0.0
            width = shared
            workspace = max(workspace, each + mlp.topk * mlp.width(model.hidden) / deployment.layout.ep)
        else:
            width = (mlp.up_width + mlp.inter) / tp if mlp else 0.0
        widest = max(widest, width)
    number_bytes = deployment.precision.between_bytes
    between = tokens * (_LIVE_WIDTHS * model.hidden + widest) * number_bytes
    logits = logit_rows * model.vocab * deployment.stack.logit_bytes
    beside = tokens * workspace * number_bytes
    if deployment.stack.experts_workspace:
        return np.maximum(between, logits) + beside
    return np.maximum(between + beside, logits)


def encoder_bytes(deployment: Deployment, step_tokens: int) -> tuple[float, float]:
    """What engines find an image encoder to need before they size the KV cache: its widest moment over as many image
    tokens as a step has, or the largest image (vllm/v1/core/encoder_cache_manager.py, compute_mm_encoder_budget), and
    the outputs, which are kept beside the text model's own largest step."""
    vision = deployment.model.vision
    if vision is None:
        return 0.0, 0.0
    tokens, number_bytes = max(step_tokens, vision.most_tokens), deployment.precision.between_bytes
    tp, ups = deployment.layout.tp, 2 if vision.gated else 1
    width = _LIVE_WIDTHS * vision.hidden + (ups + 1) * vision.inter / tp
    if vision.image is None:  # images of any size: positions are rotations
        width = max(width, (2.0 + _ROTATED_WIDTHS / tp) * vision.hidden)
    return tokens * vision.merge**2 * (vision.pixels + width) * number_bytes, tokens * vision.out_hidden * number_bytes


def does_not_fit(deployment: Deployment, workload: Workload, memory: Memory) -> DoesNotFit:
    """The error that says by how much a batch does not fit, and what would fit."""
    gib = 2**30
    need = f"{memory.used_bytes / gib:.1f} GiB a GPU (weights {memory['weights'] / gib:.1f}, KV cache " \
           f"{memory['cache'] / gib:.1f}, activations {memory['activation'] / gib:.1f}, " \
           f"{deployment.stack.name} {memory['stack'] / gib:.1f})"  # fmt: skip
    if memory["weights"] + memory["stack"] >= memory.available_bytes:
        advice = "its weights alone are too large: take more GPUs (`tp`, `pp`) or a smaller format"
    elif most := largest_batch(deployment, workload):
        advice = f"the largest batch of such requests is {most}"
    else:
        advice = "take fewer or shorter requests, more GPUs, or an fp8 KV cache"
    return DoesNotFit(
        f"{deployment.model.name} on {deployment.layout.gpus} x {deployment.gpu.id} needs {need}, "
        f"{memory.missing_bytes / gib:.1f} GiB more than the {memory.available_bytes / gib:.1f} that "
        f"{deployment.stack.name} fills; {advice}",
        memory,
    )


def workload_memory(deployment: Deployment, requests: RequestColumns) -> Memory:
    """Memory of many batches in columns, one entry each, with the weights and cache of draft models."""

    def held(deployment: Deployment) -> Memory:
        cache = requests.total(cache_bytes(deployment, requests.inputs + requests.outputs))
        return _held(
            deployment, cache, requests.total(requests.inputs - requests.cached), requests.chunk, requests.batch
        )

    memory = held(deployment)
    parts = {name: np.broadcast_to(size, requests.count).copy() for name, size in memory.parts.items()}
    for draft, members in requests.drafts():
        beside = held(draft)
        for name in ("weights", "cache"):
            parts[name][members] += np.broadcast_to(beside[name], requests.count)[members]
    return replace(memory, parts=parts)


def _held(deployment: Deployment, cache: Any, new_tokens: Any, chunk: Any, batch: Any) -> Memory:
    parts = deployment.layout.dp * deployment.layout.micro_batches
    tokens = np.where(chunk, np.minimum(new_tokens, chunk), new_tokens)
    return _filled(deployment, cache, -(-tokens // parts), -(-batch // parts))


def largest_batch(deployment: Deployment, workload: Workload) -> int:
    """How many requests like the mean of these fit."""
    workload = workload.on(deployment)
    inputs, outputs = (math.ceil(sum(x) / len(x)) for x in (workload.inputs, workload.outputs))
    new = inputs - sum(workload.past) // len(workload.past)
    each = cache_bytes(deployment, inputs + outputs)

    def fits(batches: Ints) -> NDArray[np.bool_]:
        return np.asarray(_held(deployment, batches * each, batches * new, workload.chunk, batches).fits)

    return _largest(fits)


def largest_input(deployment: Deployment, workload: Workload) -> int:
    """The longest prompt that as many requests of such outputs may have: by memory, and by the model's context."""
    workload = workload.on(deployment)
    count, outputs = len(workload.inputs), max(workload.outputs)

    def fits(lengths: Ints) -> NDArray[np.bool_]:
        cache = count * cache_bytes(deployment, lengths + outputs)
        return np.asarray(_held(deployment, cache, count * lengths, workload.chunk, count).fits)

    return max(0, min(_largest(fits), deployment.model.max_context - outputs))


def _largest(fits: Callable[[Ints], NDArray[np.bool_]]) -> int:
    """The largest number that fits, by doubling and then by ever finer steps; 0 when none does."""
    powers = 1 << np.arange(41, dtype=np.int64)
    count = int(fits(powers).sum())
    if count in (0, len(powers)):
        return int(powers[-1]) if count else 0
    low, high = int(powers[count - 1]), int(powers[count])
    while high - low > 1:
        between = np.unique(np.linspace(low, high, _STEPS).astype(np.int64))
        count = int(fits(between[:-1]).sum())  # the first fits, the last does not
        low, high = int(between[count - 1]), int(between[count])
    return low
