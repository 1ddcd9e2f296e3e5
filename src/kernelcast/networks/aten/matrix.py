"""Products of matrices: mm and its kin, with cuBLAS's word for how the operands lie."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kernelcast.calls import Launch
from kernelcast.networks.aten.table import Settings, launch, matrix_format, number_format, pointwise, rule
from kernelcast.networks.traced import Op, Tensor


def _column_major(matrix: Tensor) -> bool:
    """Transposed in memory: neighbours in a column lie side by side."""
    return matrix.stride[-2] == 1 and matrix.stride[-1] != 1


def layout(a: Tensor, b: Tensor) -> str:
    """tn: both run along the inner axis (a Linear's forward); nt: both across it (its weight gradient); else nn."""
    if _column_major(b):
        return "tn"
    return "nt" if _column_major(a) else "nn"


def product(a: Tensor, b: Tensor, settings: Settings, part: str = "matmul") -> Launch:
    (m, k), n = a.shape[-2:], b.shape[-1]
    return launch(part, "gemm", settings, m=m, n=n, k=k, layout=layout(a, b), dtype=matrix_format(a, settings))


@rule("mm", "_scaled_mm")
def _mm(op: Op, settings: Settings) -> Iterator[Launch]:
    yield product(op.arguments[0], op.arguments[1], settings)


@rule("addmm", "addmm_", "_addmm_activation")
def _addmm(op: Op, settings: Settings) -> Iterator[Launch]:
    """The bias is added as the product is written; one that is no vector is copied to the output first."""
    bias, a, b = op.arguments[:3]
    yield product(a, b, settings)
    if len(bias.shape) == 2 and min(bias.shape) > 1 and not op.in_place:
        yield pointwise("copy", settings, bias.elements, number_format(bias),
                        read_bytes=bias.bytes, written_bytes=bias.bytes)  # fmt: skip


@rule("bmm", "baddbmm")
def _bmm(op: Op, settings: Settings) -> Iterator[Launch]:
    """An operand that is the same for the whole batch (expanded: no step from one to the next) makes it one product."""
    a, b = op.arguments[-2:] if op.name == "bmm" else op.arguments[1:3]
    (batch, m, k), n = a.shape, b.shape[-1]
    if batch > 1 and (a.stride[0] == 0) != (b.stride[0] == 0):
        rows, columns = (m, batch * n) if a.stride[0] == 0 else (batch * m, n)
        yield launch("matmul", "gemm", settings, m=rows, n=columns, k=k, layout=layout(a, b),
                   dtype=matrix_format(a, settings))  # fmt: skip
        return
    yield launch("matmul", "bmm", settings, batch=batch, m=m, n=n, k=k, layout=layout(a, b),
               dtype=matrix_format(a, settings))  # fmt: skip


@rule("mv", "addmv")
def _mv(op: Op, settings: Settings) -> Iterator[Launch]:
    a = next(x for x in op.inputs if len(x.shape) == 2)
    yield launch("matmul", "gemm", settings, m=1, n=a.shape[0], k=a.shape[1], dtype=matrix_format(a, settings))


@rule("dot", "vdot")
def _dot(op: Op, settings: Settings) -> Iterator[Launch]:
    x = op.inputs[0]
    yield launch("reduction", "reduce_sum", settings, rows=1, cols=x.elements, axis="cols", dtype=number_format(x))


@rule("_grouped_mm", "_scaled_grouped_mm")
def _grouped(op: Op, settings: Settings) -> Iterator[Launch]:
    """One product for each group of rows (experts), in one launch; or for each group of the inner axis (gradients)."""
    a, b = op.arguments[:2]
    dtype = matrix_format(a, settings)
    if len(a.shape) == 2 and len(b.shape) == 3:  # rows dealt out to experts
        yield launch("experts", "moe_gemm", settings, tokens=a.shape[0], experts=b.shape[0], topk=1, k=a.shape[1],
                   n=b.shape[2], dtype=dtype)  # fmt: skip
        return
    groups = op.outputs[0].shape[0] if len(op.outputs[0].shape) == 3 else b.shape[0]
    if len(a.shape) == 2:  # weight gradients: (k, rows) x (rows, n), rows cut by expert
        each = max(1, math.ceil(a.shape[1] / groups))
        yield launch("experts", "bmm", settings, batch=groups, m=a.shape[0], n=b.shape[-1], k=each, layout="nt",
                   dtype=dtype)  # fmt: skip
        return
    yield launch("experts", "bmm", settings, batch=groups, m=a.shape[1], n=b.shape[-1], k=a.shape[2], dtype=dtype)
