"""Products of matrices: mm and its kin, with cuBLAS's word for how the operands lie."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kernelcast.forecast.calls import Launch
from kernelcast.tracing.aten.table import Settings, launch, matrix_format, number_format, over, rule
from kernelcast.tracing.traced import Op, Tensor

_THIN = 32  # numbers of the inner axis, up to which a product with a vector is asked as a sum


def _column_major(matrix: Tensor) -> bool:
    """Transposed in memory: neighbours in a column lie side by side."""
    return matrix.stride[-2] == 1 and matrix.stride[-1] != 1


def layout(a: Tensor, b: Tensor) -> str:
    """tn: both run along the inner axis (a Linear's forward); nt: both across it (its weight gradient); else nn."""
    if _column_major(b):
        return "tn"
    return "nt" if _column_major(a) else "nn"


def _product(a: Tensor, b: Tensor, settings: Settings, kernel: str = "gemm", **sizes: int) -> Launch:
    (m, k), n = a.shape[-2:], b.shape[-1]
    sizes = {"m": m, "n": n, "k": k, **sizes}
    return launch("matmul", kernel, **sizes, layout=layout(a, b), dtype=matrix_format(a, settings))


@rule("mm", "_scaled_mm")
def _mm(op: Op, settings: Settings) -> Iterator[Launch]:
    yield _product(op.arguments[0], op.arguments[1], settings)


@rule("addmm", "addmm_", "_addmm_activation")
def _addmm(op: Op, settings: Settings) -> Iterator[Launch]:
    """The bias is added as the product is written; one that is no vector is copied to the output first."""
    bias, a, b = op.arguments[:3]
    yield _product(a, b, settings)
    if len(bias.shape) == 2 and min(bias.shape) > 1 and not op.in_place:
        yield over("copy", bias, read_bytes=bias.bytes, written_bytes=bias.bytes)


@rule("bmm", "baddbmm")
def _bmm(op: Op, settings: Settings) -> Iterator[Launch]:
    """An operand that is the same for the whole batch (expanded: no step from one to the next) makes it one product."""
    a, b = op.arguments[-2:] if op.name == "bmm" else op.arguments[1:3]
    (batch, m, k), n = a.shape, b.shape[-1]
    if min(m, n) == 1 and k <= _THIN:  # a loop over time: no tiles, a sum of few numbers for each output
        yield launch("matmul", "reduce_sum", rows=max(1, batch * m * n), cols=k, axis="cols", dtype=number_format(a))
    elif k == 1:  # each number of a column with each of a row
        out = op.outputs[0]
        yield over("matmul", out, read_bytes=a.bytes + b.bytes, written_bytes=out.bytes, tensors=2, access="strided")
    elif batch > 1 and (a.stride[0] == 0) != (b.stride[0] == 0):
        yield _product(a, b, settings, **({"n": batch * n} if a.stride[0] == 0 else {"m": batch * m}))
    else:
        yield _product(a, b, settings, "bmm", batch=batch)


@rule("mv", "addmv")
def _mv(op: Op, settings: Settings) -> Iterator[Launch]:
    a = next(x for x in op.inputs if len(x.shape) == 2)
    yield launch("matmul", "gemm", m=1, n=a.shape[0], k=a.shape[1], dtype=matrix_format(a, settings))


@rule("dot", "vdot")
def _dot(op: Op, settings: Settings) -> Iterator[Launch]:
    x = op.inputs[0]
    yield launch("reduction", "reduce_sum", rows=1, cols=x.elements, axis="cols", dtype=number_format(x))


@rule("_grouped_mm", "_scaled_grouped_mm")
def _grouped(op: Op, settings: Settings) -> Iterator[Launch]:
    """One product for each group of rows (experts), in one launch; or for each group of the inner axis (gradients)."""
    a, b = op.arguments[:2]
    dtype = matrix_format(a, settings)
    own = op.name == "_grouped_mm" and dtype in ("bf16", "fp16")
    if len(a.shape) == 2 and len(b.shape) == 3:  # rows dealt out to experts
        sizes = {"k": a.shape[1], "n": b.shape[2], "dtype": dtype}
        if own:
            yield launch("experts", "grouped_mm", rows=a.shape[0], groups=b.shape[0], **sizes, layout=layout(a, b))
        else:
            yield launch("experts", "moe_gemm", tokens=a.shape[0], experts=b.shape[0], topk=1, **sizes)
        return
    groups = op.outputs[0].shape[0] if len(op.outputs[0].shape) == 3 else b.shape[0]
    if len(a.shape) == 2:  # weight gradients: (k, rows) x (rows, n), rows cut by expert
        if own:
            yield launch("experts", "grouped_mm", rows=a.shape[1], groups=groups, k=a.shape[0], n=b.shape[-1],
                         layout="nt", dtype=dtype)  # fmt: skip
            return
        each = max(1, math.ceil(a.shape[1] / groups))
        yield launch("experts", "bmm", batch=groups, m=a.shape[0], n=b.shape[-1], k=each, layout="nt", dtype=dtype)
        return
    yield launch("experts", "bmm", batch=groups, m=a.shape[1], n=b.shape[-1], k=a.shape[2], dtype=dtype)
