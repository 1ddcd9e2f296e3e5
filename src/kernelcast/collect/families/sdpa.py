"""Attention with masks, biases and dropout as encoders and image models have it, experts of transformers, and
optimizers that are not fused."""

from __future__ import annotations

from kernelcast.collect.families.table import Drawn, Table
from kernelcast.collect.shapes import Draw
from kernelcast.ops.optimizer import FUNCTIONS

# (heads, size) of encoders, encoder-decoders and image models
_HEADS = ((12, 64), (16, 64), (8, 64), (20, 64), (16, 80), (12, 32), (32, 128), (16, 128), (8, 40), (8, 80), (8, 160),
          (10, 64), (6, 64), (16, 72), (32, 64), (25, 64), (32, 80), (32, 96), (16, 256), (4, 32))  # fmt: skip
_LENGTHS = (49, 64, 77, 128, 196, 197, 256, 257, 384, 448, 512, 576, 577, 729, 768, 1024, 1500, 2048, 4096)
_MOST_SCORES = 2**30  # of a call: some milliseconds
_EXPERT_ROWS = 65536


def _shape(draw: Draw, most_scores: int) -> Drawn:
    """``most_scores``: of heads of 64; of wider ones less."""
    heads, size = draw.pick(_HEADS)
    most_scores = most_scores * 64 // max(64, size)
    if draw.chance(0.3):
        heads = draw.pick((1, 2, 4, 8, 12, 16, 24, 32))
    length = draw.pick(_LENGTHS) if draw.chance(0.6) else draw.size(16, 4096, draw.pick((1, 8, 64)))
    keys = length if draw.chance(0.85) else draw.size(16, 4096, draw.pick((1, 8)))
    room = max(1, most_scores // (heads * length * keys))
    batch = min(room, draw.pick((1, 2, 4, 8, 16, 32, 64)) if draw.chance(0.7) else draw.size(1, 256))
    return {"batch": batch, "q_len": length, "kv_len": keys, "q_heads": heads, "head_dim": size}


def _bias(draw: Draw, call: Drawn, share: float) -> str:
    """Mostly that of a model's relative positions, or a mask of each sequence."""
    if not draw.chance(share):
        return "none"
    kind = draw.pick(("heads", "heads", "batch", "batch", "full", "shared", "keys"))
    scores = call["batch"] * call["q_heads"] * call["q_len"] * call["kv_len"]
    return "heads" if kind == "full" and scores > 2**28 else kind


def _efficient(draw: Draw, backward: bool) -> Drawn:
    dtype = draw.pick(("bf16", "bf16", "fp16", "fp32", "fp32"))
    call = _shape(draw, _MOST_SCORES // (2 if dtype == "fp32" else 1) // (8 if backward else 1))
    bias = _bias(draw, call, 0.7)
    causal = bias == "none" and call["q_len"] == call["kv_len"] and draw.chance(0.4)
    found = {**call, "causal": causal, "bias": bias, "dropout": draw.chance(0.4 if backward else 0.3),
             "backend": "efficient", "dtype": dtype, "stack": "torch"}  # fmt: skip
    if backward:
        return {"op": "masked_attention_backward", **found, "bias_gradient": bias != "none" and draw.chance(0.6)}
    return {"op": "masked_attention", **found}


def _flash(draw: Draw, backward: bool) -> Drawn:
    call = _shape(draw, _MOST_SCORES // (4 if backward else 1))
    causal = call["q_len"] == call["kv_len"] and draw.chance(0.5)
    return {"op": "masked_attention_backward" if backward else "masked_attention", **call, "causal": causal,
            "bias": "none", "dropout": True, "backend": "fa2", "dtype": draw.pick(("bf16", "bf16", "fp16")),
            "stack": "torch"}  # fmt: skip


def _cudnn(draw: Draw, backward: bool) -> Drawn:
    call = _shape(draw, _MOST_SCORES // (4 if backward else 1))
    bias = _bias(draw, call, 0.55)
    causal = bias == "none" and call["q_len"] == call["kv_len"] and draw.chance(0.5)
    dropout = bias == "none" or draw.chance(0.3)
    return {"op": "masked_attention_backward" if backward else "masked_attention", **call, "causal": causal,
            "bias": bias, "dropout": dropout, "backend": "cudnn", "dtype": draw.pick(("bf16", "bf16", "fp16")),
            "stack": "torch"}  # fmt: skip


def _grouped(draw: Draw) -> Drawn:
    """An expert layer's forward or one of its gradients."""
    layer = draw.experts()
    hidden, inter = (layer.hidden, layer.inter) if draw.chance(0.6) else (draw.width(256, 8192), draw.width(256, 8192))
    hidden, inter = hidden // 8 * 8, inter // 8 * 8
    n, k = draw.pick(((2 * inter, hidden), (hidden, inter)))
    groups = layer.experts if draw.chance(0.6) else draw.size(2, 256)
    groups = min(groups, max(2, 2**32 // (n * k)))  # 8 GiB of weights
    most = min(_EXPERT_ROWS, 2**42 // (n * k) // 2)  # 4 ms at half of the peak
    rows = draw.tokens(8192) * layer.topk if draw.chance(0.5) else draw.size(8, _EXPERT_ROWS)
    layout = draw.pick(("tn", "tn", "nn", "nt"))
    n, k = (k, n) if layout == "nn" else (n, k)
    return {"op": "grouped_mm", "rows": max(1, min(rows, most)), "groups": groups, "n": n, "k": k, "layout": layout,
            "dtype": "bf16", "stack": "torch"}  # fmt: skip


def _foreach(draw: Draw) -> Drawn:
    tensors = draw.size(1, 512)
    each = draw.size(64, 2**24, draw.pick((1, 8, 64, 1024)))
    each = max(1, min(each, 2**28 // tensors))
    function = draw.pick(tuple(FUNCTIONS))
    dtype = draw.pick(("fp32", "fp32", "bf16"))
    call = {"op": "foreach", "function": function, "elements": each * tensors, "tensors": tensors, "dtype": dtype,
            "stack": "torch"}  # fmt: skip
    if function == "copy" and draw.chance(0.7):
        return call | {"to": "bf16" if dtype == "fp32" else "fp32"}
    return call


def _fused(draw: Draw) -> Drawn:
    """A fused optimizer over the tensors of a model."""
    tensors = draw.size(1, 512)
    each = max(8, min(draw.size(64, 2**24, draw.pick((1, 8, 64, 1024))), 2**27 // tensors))
    call = {"elements": each * tensors, "tensors": tensors, "dtype": draw.pick(("bf16", "fp32")), "stack": "torch"}
    if draw.chance(0.3):
        return {"op": "sgd", "momentum": draw.chance(0.7), **call}
    return {"op": "adamw", **call}


TABLE: Table = {
    "sdpa-efficient": (lambda draw: _efficient(draw, False), 12),
    "sdpa-efficient-backward": (lambda draw: _efficient(draw, True), 7),
    "sdpa-dropout": (lambda draw: _flash(draw, False), 4),
    "sdpa-dropout-backward": (lambda draw: _flash(draw, True), 2.5),
    "sdpa-cudnn": (lambda draw: _cudnn(draw, False), 0.8),
    "sdpa-cudnn-backward": (lambda draw: _cudnn(draw, True), 0.6),
    "grouped-mm": (_grouped, 5),
    "foreach": (_foreach, 4),
    "fused-optimizer": (_fused, 1.5),
}
