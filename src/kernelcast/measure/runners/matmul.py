"""Matrix products through PyTorch: cuBLAS, and cuBLASLt for fp8."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kernelcast.measure.pool import Pool, specs
from kernelcast.measure.runners import Prepared, Runner


def precision(dtype: str) -> None:
    """Whether fp32 may be multiplied as tf32."""
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"


def _operands(call: Any, pool: Pool) -> list[tuple[Tensor, Tensor, Tensor]]:
    """A [m, k] and B [k, n] as views of memory in the call's layout, and the output."""
    layout = call.layout or "tn"
    a_shape = (call.k, call.m) if layout == "nt" else (call.m, call.k)
    b_shape = (call.n, call.k) if layout == "tn" else (call.k, call.n)
    found = []
    product = specs(call.dtype, (call.m, call.n), use="written")
    for a, b, c in pool.sets(*specs(call.dtype, a_shape, b_shape), *product):
        found.append((a.t() if layout == "nt" else a, b.t() if layout == "tn" else b, c))
    return found


def gemm(call: Any, pool: Pool) -> Prepared:
    precision(call.dtype)
    if call.dtype == "fp8":
        return _fp8(call, pool)
    sets = _operands(call, pool)
    return Prepared([_mm(a, b, c) for a, b, c in sets], "cublas")


def _mm(a: Tensor, b: Tensor, c: Tensor) -> Callable[[], object]:
    return lambda: torch.mm(a, b, out=c)


def _fp8(call: Any, pool: Pool) -> Prepared:
    one = torch.ones((), device="cuda")
    sets = pool.sets(*specs("fp8", (call.m, call.k), (call.n, call.k)))

    def launch(a: Tensor, b: Tensor) -> Callable[[], object]:
        return lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return Prepared([launch(a, b) for a, b in sets], "cublaslt")


def bmm(call: Any, pool: Pool) -> Prepared:
    precision(call.dtype)
    factors = specs(call.dtype, (call.batch, call.m, call.k), (call.batch, call.k, call.n))
    product = specs(call.dtype, (call.batch, call.m, call.n), use="written")

    def launch(a: Tensor, b: Tensor, c: Tensor) -> Callable[[], object]:
        return lambda: torch.bmm(a, b, out=c)

    return Prepared([launch(a, b, c) for a, b, c in pool.sets(*factors, *product)], "cublas")


RUNNERS: Mapping[str, Runner] = {"gemm": gemm, "bmm": bmm}
