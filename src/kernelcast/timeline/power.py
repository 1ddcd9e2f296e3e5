"""What the GPU's power limit costs: matrix products, one after another, at no more FLOPs than its watts pay for.

``tensor_flops_per_j`` of a GPU is measured on products in 16 bits. Narrower formats need less energy, nobody here
measured how much: they are left as they are. A clock is lowered within a fraction of a second: a short run ends before
it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernelcast.calls import Call
from kernelcast.hardware import Gpu

WINDOW_S = 0.25  # shorter runs end before a GPU lowers its clock
_SIXTEEN_BITS = ("bf16", "fp16", "int4")  # multiplied in 16 bits


def product_flops(call: Call) -> Any:
    """FLOPs of the matrix products of a call in 16 bits; 0 of any other call. A column where its sizes are some."""
    given = call.words
    if given.get("dtype") not in _SIXTEEN_BITS:
        return 0.0
    if call.op in ("gemm", "bmm", "moe_gemm"):
        rows = given["tokens"] * given["topk"] if call.op == "moe_gemm" else given["m"]
        return 2.0 * given.get("batch", 1) * rows * given["n"] * given["k"]
    if call.op == "moe":
        products = 3 if given.get("gated", True) else 2
        pairs = given["tokens"] * given["topk"] / given.get("ep", 1)
        return 2.0 * products * pairs * given["hidden"] * given["inter"] / given.get("tp", 1)
    return 0.0


def throttled_s(call: Call, time_s: Any, gpu: Gpu) -> Any:
    """How much longer a call takes in a run that keeps the GPU at its power limit. Columns in, columns out."""
    if not gpu.tensor_flops_per_j:
        return 0.0
    return np.maximum(0.0, product_flops(call) / (gpu.tensor_flops_per_j * gpu.power_w) - time_s)
