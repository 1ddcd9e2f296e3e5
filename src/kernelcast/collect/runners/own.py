"""Our own Triton kernels: a grouped GEMM with its block sizes as parameters, and quantisation to fp8."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from kernelcast.collect.pool import Spec, specs
from kernelcast.collect.runners import NotMeasurableError, Recipe, Runner
from kernelcast.collect.triton_kernels import Routing, moe_gemm, quantise
from kernelcast.ops.grouped import TRITON_CONFIG

_BLOCK = 128  # columns that share a scale


def grouped(call: Any) -> Recipe:
    blocks = {name: getattr(call, name) for name in TRITON_CONFIG}
    missing = [name for name, value in blocks.items() if value is None]
    if missing:
        raise NotMeasurableError(f"moe_gemm is measured with its block sizes given; missing {', '.join(missing)}")
    pairs = call.tokens * call.topk
    experts = torch.arange(pairs, device="cuda") % call.experts  # every expert gets the same, or one more
    routing = Routing.of(experts, call.experts, call.topk, blocks.pop("block_m"))
    narrow = specs(call.dtype, (call.tokens, call.k), (call.experts, call.n, call.k))
    out = Spec((pairs, call.n), torch.bfloat16, "written")
    return Recipe((*narrow, out), lambda a, b, c: partial(moe_gemm, a, b, c, routing, **blocks), "kernelcast_moe")


def quantize(call: Any) -> Recipe:
    if call.to != "fp8":
        raise NotMeasurableError(f"quantize is measured to fp8, not {call.to}")
    given, shape = call.scale == "static", (call.rows, call.cols)
    if call.scale == "block":
        if call.cols % _BLOCK:
            raise NotMeasurableError(f"block scales need cols in multiples of {_BLOCK}, not {call.cols}")
        shape = (call.rows * call.cols // _BLOCK, _BLOCK)
    scales = torch.ones(shape[0], device="cuda")
    tensors = (*specs(call.dtype, shape), *specs("fp8", shape, use="written"))
    return Recipe(tensors, lambda x, y: partial(quantise, x, y, scales, given), "kernelcast_quantise")


RUNNERS: Mapping[str, Runner] = {"moe_gemm": grouped, "quantize": quantize}
