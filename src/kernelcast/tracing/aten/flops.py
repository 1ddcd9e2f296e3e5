"""FLOPs of the ops that torch's own counter counts (torch.utils.flop_counter), by the same rules."""

from __future__ import annotations

import math
from typing import Any

from kernelcast.tracing.traced import Op

# products, and where their first operand is among the arguments
_PRODUCTS = {"mm": 0, "bmm": 0, "_scaled_mm": 0, "_grouped_mm": 0, "addmm": 1, "baddbmm": 1}


def op_flops(op: Op) -> int:
    """0 for an op that is no product, convolution or attention."""
    if op.name in _PRODUCTS:
        a, b = op.arguments[_PRODUCTS[op.name] :][:2]
        return 2 * math.prod(a.shape) * int(b.shape[-1])
    if op.name in ("convolution", "_convolution", "cudnn_convolution"):
        x, weight = (t.shape for t in op.arguments[:2])
        return _convolution(x, weight, op.outputs[0].shape, op.argument(6, "transposed"))
    if op.name == "convolution_backward":
        return _convolution_backward(op)
    return _attention(op) if op.name.startswith("_scaled_dot_product") else 0


def _convolution(x: Any, weight: Any, out: Any, transposed: bool) -> int:
    spatial = x[2:] if transposed else out[2:]
    return int(2 * x[0] * math.prod(spatial) * math.prod(weight))


def _convolution_backward(op: Op) -> int:
    grad, x, weight = (t.shape for t in op.arguments[:3])
    transposed, wanted = op.arguments[7], op.arguments[10]
    total = 0
    if wanted[0]:  # the gradient convolved with the weights, the other way round
        total += _convolution(grad, weight, x, not transposed)
    if wanted[1]:  # input and gradient convolved, over the batch; the counter knows no groups here
        over, by = (grad, x) if transposed else (x, grad)
        total += int(2 * over[1] * math.prod(weight[2:]) * math.prod(by))
    return total


def _attention(op: Op) -> int:
    """Two products forward, five backward; masks are not subtracted."""
    backward = op.name.endswith("backward")
    query, key, value = op.arguments[1:4] if backward else op.arguments[:3]
    batch, heads, queries, size = query.shape
    pairs = batch * heads * queries * key.shape[2]
    width = value.shape[3]
    return 2 * pairs * (3 * size + 2 * width) if backward else 2 * pairs * (size + width)
