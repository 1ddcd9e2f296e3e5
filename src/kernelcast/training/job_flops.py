"""FLOPs of a training job's step: the model's, and what runs beyond them."""

from __future__ import annotations

from kernelcast.models.layers import Layer
from kernelcast.training.job import TrainingJob


def _attention_flops(job: TrainingJob, layer: Layer) -> float:
    """Of the forward pass for one token: of the keys before it, the mean over the sequence."""
    length = min(job.mean_length or job.seq, job.seq) if job.packed else job.seq
    if layer.attention is None:
        return 0.0
    mean = (length + 1) / 2 if job.model.kind == "decoder" else length
    window = getattr(layer.attention, "window", None)
    if window and window < length:
        mean = window * (1 - window / (2 * length))
    return float(layer.attention.query_flops(mean))


def _token_flops(job: TrainingJob) -> tuple[float, float]:
    """Of the forward pass for one token: linear layers with the head, and attention."""
    model, linear, attention = job.model, 0.0, 0.0
    layers = [(run.count, run.layer) for run in model.layers]
    heads = 1
    if job.mtp and model.mtp_module:
        layers += [(model.mtp_layers * run.count, run.layer) for run in model.mtp_module]
        linear += 2 * model.mtp_layers * 2 * model.hidden**2
        heads += model.mtp_layers
    for count, layer in layers:
        used = layer.attention.weights(model.hidden) if layer.attention is not None else 0
        used += layer.mlp.active_weights(model.hidden) if layer.mlp is not None else 0
        linear += count * 2 * used
        attention += count * _attention_flops(job, layer)
    return linear + heads * 2 * model.vocab * model.hidden, attention


def model_flops(job: TrainingJob) -> float:
    """Of a step on all GPUs: forward, gradients of inputs and of weights. Frozen weights have no gradient."""
    linear, attention = _token_flops(job)
    return job.tokens * ((2 if job.lora else 3) * linear + 3 * attention)


def recomputed_share(job: TrainingJob) -> float:
    """FLOPs that run beyond the model's, over the model's: a layer's forward pass again, scores in the backward pass of
    attention (five products for four)."""
    linear, attention = _token_flops(job)
    again = 0.5 * attention
    recompute, layers = job.recompute, job.model.layer_count
    if recompute.mode == "full":
        block = recompute.layers * job.layout.parts if recompute.method == "block" and recompute.layers else layers
        head = 2 * job.model.vocab * job.model.hidden
        again += min(1.0, block / layers) * (linear - head + attention)
    elif recompute.mode == "selective" and "core_attn" in recompute.modules:
        again += attention
    elif recompute.mode == "selective" and "op" in recompute.modules:
        again += (linear - 2 * job.model.vocab * job.model.hidden) / 2
    return again / ((2 if job.lora else 3) * linear + 3 * attention)
