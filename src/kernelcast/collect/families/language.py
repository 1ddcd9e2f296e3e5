"""What language models are made of: products, attention, norms, element-wise ops, lookups, mixtures of experts."""

from __future__ import annotations

import math

from kernelcast.collect.sampling import TP, Draw, Drawn, Table
from kernelcast.ops.grouped import TRITON_CONFIG
from kernelcast.ops.optimizer import FUNCTIONS

_CUDNN_SHARE = 0.03  # cuDNN builds a plan for every new shape, which takes most of a second
_HEAD_DIMS = (64, 128)
# Few enough to compile: configs of serving engines' tuned files, and some poor ones.
_BLOCKS = tuple(
    (m, n, k, group, 8 if m * n >= 16384 else 4, stages)
    for m in (16, 32, 64, 128)
    for n, k in ((32, 64), (64, 128), (128, 64), (128, 128), (256, 64))
    for group, stages in ((1, 3), (16, 4), (8, 2))
    if m * n <= 128 * 256 and stages * (m + n) * k * 2 <= 220_000
)
_CELLS = 2**28  # elements of the largest memory-bound tensor


def _linear(draw: Draw) -> tuple[int, int]:
    """(n, k) of a linear layer of a real model on one rank."""
    model, tp = draw.model(), draw.pick(TP)
    heads = (model.heads + 2 * model.kv_heads) * model.head_dim
    options = (
        (heads // tp, model.hidden),
        (model.hidden, model.heads * model.head_dim // tp),
        (2 * model.inter // tp, model.hidden),
        (model.hidden, model.inter // tp),
        (model.vocab // tp, model.hidden),
    )
    return draw.pick(options)


def _gemm(draw: Draw, dtypes: tuple[str, ...], grain: int = 1) -> Drawn:
    dtype = draw.pick(dtypes)
    n, k = _linear(draw) if draw.chance(0.5) else (draw.width(64, 32768), draw.width(64, 32768))
    n, k = max(grain, n // grain * grain), max(grain, k // grain * grain)
    call = {"op": "gemm", "m": draw.tokens(), "n": n, "k": k, "dtype": dtype, "stack": "torch"}
    return call if dtype == "fp8" else call | {"layout": draw.pick(("tn", "tn", "tn", "nn", "nt"))}


def _bmm(draw: Draw) -> Drawn:
    dtype = draw.pick(("bf16", "bf16", "fp16", "fp32", "tf32"))
    if draw.chance(0.5):  # attention by hand: scores, then values
        model, rows, keys = draw.model(), draw.size(1, 4096), draw.size(16, 8192, 8)
        m, n, k = (rows, keys, model.head_dim) if draw.chance(0.5) else (rows, model.head_dim, keys)
        return {"op": "bmm", "batch": draw.size(1, 64) * draw.pick((1, 8, 16, 32)), "m": m, "n": n, "k": k,
                "dtype": dtype, "stack": "torch"}  # fmt: skip
    sizes = {name: draw.width(16, 4096) for name in ("m", "n", "k")}
    return {"op": "bmm", "batch": draw.size(2, 512), **sizes, "dtype": dtype, "stack": "torch"}


def _heads(draw: Draw) -> Drawn:
    if draw.chance(0.6):
        model, tp = draw.model(), draw.pick(TP)
        heads = max(1, model.heads // tp)
        kv_heads = max(1, model.kv_heads // tp)
        return {"q_heads": heads // kv_heads * kv_heads, "kv_heads": kv_heads, "head_dim": model.head_dim}
    kv_heads = draw.pick((1, 2, 4, 8, 16))
    return {"q_heads": kv_heads * draw.pick((1, 2, 4, 5, 8)), "kv_heads": kv_heads, "head_dim": draw.pick(_HEAD_DIMS)}


def _square(draw: Draw, most: int = 16384) -> Drawn:
    length = draw.size(16, most, draw.pick((1, 16, 128)))
    return {"batch": draw.size(1, 64), "q_len": length, "kv_len": length}


def _sdpa(draw: Draw, op: str) -> Drawn:
    backend = "cudnn" if draw.chance(_CUDNN_SHARE) else "fa2"
    return {"op": op, **_square(draw, 8192), **_heads(draw), "causal": draw.chance(0.7), "backend": backend,
            "dtype": draw.pick(("bf16", "bf16", "fp16")), "stack": "torch"}  # fmt: skip


def _ragged(draw: Draw, backend: str) -> Drawn:
    shape = _square(draw)
    if draw.chance(0.3):  # a chunk of a longer prompt
        shape["kv_len"] = shape["q_len"] + draw.size(16, 16384, 16)
    return {"op": "attention", **shape, **_heads(draw), "head_dim": 128, "causal": draw.chance(0.85),
            "backend": backend, "dtype": "bf16", "stack": "flashinfer"}  # fmt: skip


def _decode(draw: Draw) -> Drawn:
    return {"op": "attention", "batch": draw.size(1, 512), "q_len": 1, "kv_len": draw.size(16, 65536), **_heads(draw),
            "head_dim": 128, "page_size": draw.pick((16, 64)), "backend": "flashinfer", "dtype": "bf16",
            "stack": "flashinfer"}  # fmt: skip


def _cells(draw: Draw, most: int = _CELLS, grain: int = 1) -> Drawn:
    """Rows and columns of an activation: a model's width, or any."""
    cols = draw.pick((draw.model().hidden, draw.model().inter)) if draw.chance(0.5) else draw.width(64, 32768)
    return {"rows": min(draw.tokens(65536), max(1, most // cols)), "cols": max(1, cols // grain) * grain}


def _over(draw: Draw, *ops: str) -> Drawn:
    cells = _cells(draw)
    return {"op": draw.pick(ops), **cells, "dtype": draw.pick(("bf16", "bf16", "fp16", "fp32")), "stack": "torch"}


def _over_flashinfer(draw: Draw, op: str) -> Drawn:
    cells = _cells(draw, grain=8)  # its kernels read 16 bytes at a time, and fault elsewhere
    return {"op": op, **cells, "dtype": draw.pick(("bf16", "fp16")), "stack": "flashinfer"}


def _flashinfer_norm(draw: Draw) -> Drawn:
    return _over_flashinfer(draw, "rmsnorm") | {"residual": draw.chance(0.5)}


def _rope(draw: Draw) -> Drawn:
    heads = _heads(draw) | {"head_dim": draw.pick((64, 128, 256))}  # those that FlashInfer compiles
    return {"op": "rope", "tokens": draw.tokens(32768), **heads, "dtype": "bf16", "stack": "flashinfer"}


def _embedding(draw: Draw, op: str) -> Drawn:
    model = draw.model()
    return {"op": op, "tokens": draw.tokens(65536), "hidden": model.hidden, "vocab": model.vocab,
            "dtype": draw.pick(("bf16", "fp32")), "stack": "torch"}  # fmt: skip


def _quantize(draw: Draw) -> Drawn:
    cells = _cells(draw, grain=128)  # blocks of 128 share a scale
    return {"op": "quantize", **cells, "to": "fp8", "scale": draw.pick(("token", "static", "block")), "dtype": "bf16"}


def _moe_gemm(draw: Draw) -> Drawn:
    layer, tp = draw.experts(), draw.pick((1, 2, 4, 8))
    inter = layer.inter // tp
    k, n = draw.pick(((layer.hidden, 2 * inter), (inter, layer.hidden)))
    return {"op": "moe_gemm", "tokens": draw.tokens(8192), "experts": layer.experts, "topk": layer.topk, "k": k, "n": n,
            "dtype": draw.pick(("bf16", "bf16", "fp8")),
            **dict(zip(TRITON_CONFIG, draw.pick(_BLOCKS), strict=True))}  # fmt: skip


def _adamw(draw: Draw) -> Drawn:
    elements = draw.size(1024, 2**28, 8)
    return {"op": "adamw", "elements": elements, "dtype": draw.pick(("bf16", "fp32")), "stack": "torch"}


def _strided(draw: Draw) -> Drawn:
    """Element-wise kernels that compute where each element lies: of rotated heads, norms by hand, repeated KV heads."""
    pattern = draw.pick(("heads", "heads", "row", "column", "head", "turned", "repeat", "repeat", "mixed"))
    if pattern in ("row", "column", "mixed"):
        cells = _cells(draw, 2**26)
    else:
        size = draw.pick((64, 64, 128, 128, 256))
        heads = draw.pick((8, 16, 32, 32))
        cells = {"rows": heads * min(draw.tokens(65536), max(1, 2**26 // (size * heads))), "cols": size}
    rows, cols = cells["rows"], cells["cols"]
    group = draw.pick((2, 4, 4, 7, 8))
    if pattern == "repeat":
        cells["rows"] = rows = max(1, rows // 8 // group) * 8 * group
    batch = 4 if pattern in ("head", "turned") and draw.chance(0.6) else 1  # one more axis
    cells["rows"] = rows = rows * batch
    head = math.gcd(rows // batch, 32)
    reads = {"heads": 1.0, "row": 1 + 1 / rows, "column": 1 + 1 / cols, "head": 1 + 1 / head, "turned": 2.0,
             "repeat": 1 / group, "mixed": 1.5}[pattern]  # fmt: skip
    call = {"op": "pointwise", **cells, "reads": reads, "writes": 1.0, "stack": "torch",
            "tensors": 1.0 if pattern in ("heads", "repeat") else 2.0, "flops": 1.0}  # fmt: skip
    if pattern == "mixed":
        return call | {"access": "cast", "dtype": "fp32"}
    axes = (3 if pattern in ("head", "turned", "repeat") else 2) + (batch > 1)
    return call | {"axes": axes, "access": "strided", "dtype": draw.pick(("bf16", "bf16", "bf16", "fp16", "fp32"))}


def _moved(draw: Draw) -> Drawn:
    """Casts, joins, transposes and lookups."""
    op = draw.pick(("copy", "copy", "cat", "transpose", "gather", "fill", "dropout_backward"))
    cells, dtype = _cells(draw), draw.pick(("bf16", "bf16", "fp32"))
    if op == "copy":
        return {"op": op, **cells, "dtype": dtype, "to": "fp32" if dtype == "bf16" else "bf16", "stack": "torch"}
    if op == "cat" and draw.chance(0.7):
        size = draw.pick((64, 128))
        cells = {"rows": draw.pick((8, 32)) * min(draw.tokens(65536), 2**20 // size), "cols": size}
    cells["cols"] = max(2, cells["cols"] // 2 * 2)
    more = {"batch": draw.pick((1, 1, 8, 32))} if op == "transpose" else {}
    if more:
        cells["rows"] = max(1, cells["rows"] // more["batch"])
    return {"op": op, **more, **cells, "dtype": dtype, "stack": "torch"}


def _mean(draw: Draw) -> Drawn:
    """Sums of short rows in fp32, as norms by hand take them, and down many rows, as gradients of biases are."""
    axis = draw.pick(("cols", "cols", "rows"))
    cells = _cells(draw)
    if axis == "cols" and draw.chance(0.5):
        cells = {"rows": draw.pick((8, 32)) * min(draw.tokens(65536), 2**15), "cols": draw.pick((64, 128))}
    return {"op": "reduce_sum", **cells, "axis": axis, "dtype": draw.pick(("fp32", "bf16")), "stack": "torch"}


def _one_query(draw: Draw) -> Drawn:
    """A decode step through PyTorch: a token for each sequence of a full cache."""
    heads = _heads(draw)
    if draw.chance(0.6):
        heads["kv_heads"] = heads["q_heads"]  # repeated before
    return {"op": "attention", "batch": draw.pick((1, 2, 4, 8, 16, 32, 64)), "q_len": 1,
            "kv_len": draw.pick((256, 512, 1024, 2048, 4096, 8192)), **heads, "causal": False, "backend": "cudnn",
            "dtype": "bf16", "stack": "torch"}  # fmt: skip


_POINTWISE = ("add", "mul", "sub", "div", "scale", "silu", "gelu", "gelu_tanh", "relu", "tanh", "sigmoid", "exp",
              "sqrt", "rsqrt", "pow", "copy", "fill", "where", "masked_fill", "clamp", "neg", "dropout")  # fmt: skip
_POINTWISE_BACKWARD = ("silu_backward", "gelu_backward", "gelu_tanh_backward", "relu_backward", "tanh_backward",
                       "sigmoid_backward")  # fmt: skip
_ROWWISE_BACKWARD = ("layernorm_backward", "rmsnorm_backward", "softmax_backward", "log_softmax_backward")


# ---- attention with masks, biases and dropout, experts of transformers, and optimizers that are not fused

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
    bias = draw.pick(("heads", "heads", "batch", "batch", "full", "shared", "keys"))
    scores = call["batch"] * call["q_heads"] * call["q_len"] * call["kv_len"]
    return "heads" if bias == "full" and scores > 2**28 else bias


def _efficient(draw: Draw, backward: bool) -> Drawn:
    dtype = draw.pick(("bf16", "bf16", "fp16", "fp32", "fp32"))
    call = _shape(draw, _MOST_SCORES // (2 if dtype == "fp32" else 1) // (8 if backward else 1))
    bias = _bias(draw, call, 0.7)
    causal = bias == "none" and call["q_len"] == call["kv_len"] and draw.chance(0.4)
    parameters = {**call, "causal": causal, "bias": bias, "dropout": draw.chance(0.4 if backward else 0.3),
             "backend": "efficient", "dtype": dtype, "stack": "torch"}  # fmt: skip
    if backward:
        return {"op": "masked_attention_backward", **parameters, "bias_gradient": bias != "none" and draw.chance(0.6)}
    return {"op": "masked_attention", **parameters}


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
    "gemm": (lambda draw: _gemm(draw, ("bf16", "bf16", "bf16", "fp16")), 16),
    "gemm-fp8": (lambda draw: _gemm(draw, ("fp8",), grain=16), 9),
    "gemm-fp32": (lambda draw: _gemm(draw, ("fp32", "tf32")), 5),
    "bmm": (_bmm, 6),
    "attention": (lambda draw: _sdpa(draw, "attention"), 8),
    "attention-backward": (lambda draw: _sdpa(draw, "attention_backward"), 4),
    "flashinfer-fa3": (lambda draw: _ragged(draw, "fa3"), 6),
    "flashinfer-fa2": (lambda draw: _ragged(draw, "flashinfer"), 6),
    "flashinfer-decode": (_decode, 6),
    "flashinfer-norm": (_flashinfer_norm, 2.5),
    "flashinfer-silu": (lambda draw: _over_flashinfer(draw, "silu_mul"), 2.5),
    "flashinfer-rope": (_rope, 1.5),
    "norm": (lambda draw: _over(draw, "layernorm", "rmsnorm"), 4),
    "softmax": (lambda draw: _over(draw, "softmax", "softmax", "log_softmax"), 3),
    "pointwise": (lambda draw: _over(draw, *_POINTWISE), 7),
    "backward": (lambda draw: _over(draw, *_POINTWISE_BACKWARD, *_ROWWISE_BACKWARD, *_ROWWISE_BACKWARD), 4),
    "reduce": (lambda draw: _over(draw, "reduce_sum", "cumsum", "argmax"), 1),
    "strided": (_strided, 3),
    "moved": (_moved, 3),
    "mean": (_mean, 1.5),
    "attention-decode": (_one_query, 0.5),
    "embedding": (lambda draw: _embedding(draw, "embedding"), 1),
    "embedding-backward": (lambda draw: _embedding(draw, "embedding_backward"), 0.5),
    "quantize": (_quantize, 1.5),
    "optimizer": (_adamw, 0.5),
    "moe-config": (_moe_gemm, 8),
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
