"""Matrix products (mm, addmm, bmm and similar), with the layout of their operands as cuBLAS names it; convolutions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from kernelcast.forecast.calls import Launch
from kernelcast.ops import kernel
from kernelcast.ops.base import columns_of
from kernelcast.ops.conv_work import ConvSizes, depthwise_in_pytorch
from kernelcast.tracing.aten.table import (
    OpSettings,
    by_rows,
    launch,
    matrix_format,
    op_launches,
    over,
    rule,
)
from kernelcast.tracing.traced import Op, Tensor

_THIN = 32  # length of the inner axis, up to which a product with a vector is a sum


def _column_major(matrix: Tensor) -> bool:
    """Transposed in memory: a column is contiguous."""
    return matrix.stride[-2] == 1 and matrix.stride[-1] != 1


def layout(a: Tensor, b: Tensor) -> str:
    """tn: both run along the inner axis (a Linear's forward); nt: both across it (its weight gradient); else nn."""
    if _column_major(b):
        return "tn"
    return "nt" if _column_major(a) else "nn"


def _product(a: Tensor, b: Tensor, settings: OpSettings, kernel: str = "gemm", **sizes: int) -> Launch:
    """A matrix by a column is a row by its transpose: the same call of cuBLAS, and the form that was measured."""
    (m, k), n = a.shape[-2:], b.shape[-1]
    if kernel == "gemm" and not sizes and n == 1 < m:
        return launch("matmul", kernel, m=1, n=m, k=k, layout="nn" if _column_major(a) else "tn",
                      dtype=matrix_format(a, settings))  # fmt: skip
    sizes = {"m": m, "n": n, "k": k, **sizes}
    return launch("matmul", kernel, **sizes, layout=layout(a, b), dtype=matrix_format(a, settings))


@rule("mm", "_scaled_mm")
def _mm(op: Op, settings: OpSettings) -> Iterator[Launch]:
    yield _product(op.arguments[0], op.arguments[1], settings)


@rule("addmm", "addmm_", "_addmm_activation")
def _addmm(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """The bias is added in the epilogue; a bias that is not a vector is copied to the output first."""
    bias, a, b = op.arguments[:3]
    yield _product(a, b, settings)
    if len(bias.shape) == 2 and min(bias.shape) > 1 and not op.in_place:
        yield over("copy", bias)


@rule("bmm", "baddbmm")
def _bmm(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """An operand that is expanded over the batch (stride 0) makes it one product."""
    a, b = op.arguments[-2:] if op.name == "bmm" else op.arguments[1:3]
    (batch, m, k), n = a.shape, b.shape[-1]
    if min(m, n) == 1 and k <= _THIN:  # a loop over time: no tiles, a sum of few numbers for each output
        yield by_rows("matmul", "reduce_sum", a, batch * m * n, k, axis="cols")
    elif k == 1:  # each number of a column with each of a row
        out = op.outputs[0]
        yield over("matmul", out, read_bytes=a.bytes + b.bytes, tensors=2, access="strided")
    elif batch > 1 and (a.stride[0] == 0) != (b.stride[0] == 0):
        yield _product(a, b, settings, **({"n": batch * n} if a.stride[0] == 0 else {"m": batch * m}))
    else:
        yield _product(a, b, settings, "bmm", batch=batch)


@rule("mv", "addmv")
def _mv(op: Op, settings: OpSettings) -> Iterator[Launch]:
    a = next(x for x in op.inputs if len(x.shape) == 2)
    yield _product(a, Tensor((a.shape[1], 1), (1, 1), a.dtype), settings)


@rule("dot", "vdot")
def _dot(op: Op, settings: OpSettings) -> Iterator[Launch]:
    x = op.inputs[0]
    yield by_rows("reduction", "reduce_sum", x, 1, x.elements, axis="cols")


@rule("_grouped_mm", "_scaled_grouped_mm")
def _grouped(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """One product for each group of rows (experts), in one launch; or for each group of the inner axis (gradients)."""
    a, b = op.arguments[:2]
    dtype = matrix_format(a, settings)
    has_kernel = op.name == "_grouped_mm" and dtype in ("bf16", "fp16")
    if len(a.shape) == 2 and len(b.shape) == 3:  # rows routed to experts
        sizes = {"k": a.shape[1], "n": b.shape[2], "dtype": dtype}
        if has_kernel:
            yield launch("experts", "grouped_mm", rows=a.shape[0], groups=b.shape[0], **sizes, layout=layout(a, b))
        else:
            yield launch("experts", "moe_gemm", tokens=a.shape[0], experts=b.shape[0], topk=1, **sizes)
        return
    groups = op.outputs[0].shape[0] if len(op.outputs[0].shape) == 3 else b.shape[0]
    if len(a.shape) == 2:  # weight gradients: (k, rows) x (rows, n), rows split by expert
        if has_kernel:
            yield launch("experts", "grouped_mm", rows=a.shape[1], groups=groups, k=a.shape[0], n=b.shape[-1],
                         layout="nt", dtype=dtype)  # fmt: skip
            return
        each = max(1, math.ceil(a.shape[1] / groups))
        yield launch("experts", "bmm", batch=groups, m=a.shape[0], n=b.shape[-1], k=each, layout="nt", dtype=dtype)
        return
    yield launch("experts", "bmm", batch=groups, m=a.shape[1], n=b.shape[-1], k=a.shape[2], dtype=dtype)


# ---- Convolutions

_PART = "convolution"


def _each(value: Sequence[int], axes: int) -> list[int]:
    """A number for every axis: ATen takes one for all too."""
    return list(value) if len(value) == axes else [value[0]] * axes


def _sizes(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> dict[str, int]:
    """conv2d's parameters; one axis becomes rows of one, as in ATen."""
    axes = len(x.shape) - 2
    ways = [_each(value, axes) for value in (stride, padding, dilation)]
    sizes = {"batch": x.shape[0], "in_channels": x.shape[1], "out_channels": weight.shape[0], "groups": groups}
    if axes == 1:
        sizes |= {"height": 1, "width": x.shape[2], "kernel_h": 1, "kernel_w": weight.shape[2], "stride": 1,
                  "padding": 0, "stride_w": ways[0][0], "padding_w": ways[1][0]}  # fmt: skip
        return sizes | ({"dilation_w": ways[2][0]} if ways[2][0] > 1 else {})
    sizes |= {"height": x.shape[-2], "width": x.shape[-1], "kernel_h": weight.shape[-2], "kernel_w": weight.shape[-1]}
    for name, (*_, rows, columns) in zip(("stride", "padding", "dilation"), ways, strict=True):
        sizes |= {name: rows} if rows == columns else {name: rows, f"{name}_w": columns}
    if axes == 3:
        sizes |= {"depth": x.shape[2], "kernel_d": weight.shape[2], "stride_d": ways[0][0], "padding_d": ways[1][0]}
        sizes |= {"dilation_d": ways[2][0]} if ways[2][0] > 1 else {}
    return sizes


def channels_last(x: Tensor) -> bool:
    """Whether a tensor is channels last, as ATen derives it from strides (is_channels_last_strides_2d and _3d)."""
    if len(x.shape) not in (4, 5) or x.stride[1] == 0:
        return False
    least = 0
    for axis in (1, *range(len(x.shape) - 1, 1, -1), 0):
        if x.shape[axis] == 0 or x.stride[axis] < least or (axis == 0 and least == x.stride[1]):
            return False
        least = x.stride[axis] * max(1, x.shape[axis])
    return True


def in_format(x: Tensor, last: bool) -> Tensor:
    """The tensor dense, channels last or first."""
    order = (1, *range(len(x.shape) - 1, 1, -1), 0) if last else range(len(x.shape) - 1, -1, -1)
    steps, step = [0] * len(x.shape), 1
    for axis in order:
        steps[axis], step = step, step * x.shape[axis]
    return Tensor(x.shape, tuple(steps), x.dtype, x.storage)


def _converted(x: Tensor, last: bool, settings: OpSettings) -> Iterator[Launch]:
    """The copy of a tensor whose memory format is not cuDNN's (``contiguous(memory_format)``)."""
    wanted = in_format(x, last)
    same = all(a == b or size == 1 for a, b, size in zip(x.stride, wanted.stride, x.shape, strict=True))
    if not same:
        yield from _as_op("clone", (x,), wanted, settings)


def _as_op(name: str, inputs: Sequence[Any], out: Tensor, settings: OpSettings) -> Iterator[Launch]:
    """The launches of another ATen op that a convolution calls."""
    inner = op_launches(Op(name, tuple(inputs), {}, (out,), "kernel", "forward", ""), settings)
    for each in inner.launches:
        yield replace(each, part=_PART)


def _dtype(x: Tensor, settings: OpSettings) -> dict[str, str]:
    """fp32 runs as TF32 unless ``torch.backends.cudnn.allow_tf32`` is off, where the GPU has it."""
    if x.dtype != "fp32":
        return {"dtype": matrix_format(x, settings)}
    if settings.tf32_convolutions and settings.has_tf32:
        return {"dtype": "tf32"}
    return {"dtype": "fp32", "tf32": "off"}


def _adds_bias(call: dict[str, Any]) -> bool:
    """PyTorch's own depthwise kernels do."""
    if call["groups"] == 1:
        return False
    columns = columns_of([kernel("conv2d", **call)])
    return bool(depthwise_in_pytorch(columns, ConvSizes(columns))[0])


@rule("convolution", "cudnn_convolution", "_convolution", "convolution_overrideable")
def _forward(op: Op, settings: OpSettings) -> Iterator[Launch]:
    x, weight, bias, stride, padding, dilation, transposed = op.arguments[:7]
    groups, out = op.argument(8, "groups", 1), op.outputs[0]
    last = channels_last(x) or channels_last(weight)
    for tensor in (x, weight):
        yield from _converted(tensor, last, settings)
    sized = out if transposed else x  # transposed: a convolution's gradient by its input, run forward
    sizes = _sizes(sized, weight, stride, padding, dilation, groups)
    call: dict[str, Any] = {**sizes, "layout": "nhwc" if last else "nchw", **_dtype(x, settings)}
    yield launch(_PART, "conv2d_dgrad" if transposed else "conv2d", **call)
    if bias is not None and (transposed or not _adds_bias(call)):
        made = in_format(out, last)
        column = Tensor(
            (1, bias.elements, *[1] * (len(out.shape) - 2)), (0, 1, *[0] * (len(out.shape) - 2)), bias.dtype
        )
        yield from _as_op("add_", (made, column), made, settings)


@rule("convolution_backward")
def _backward(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """Gradients of the input, of the weight, and of the bias, by the output mask."""
    grad, x, weight, _, stride, padding, dilation, transposed, _, groups, wanted = op.arguments[:11]
    last = channels_last(x) or channels_last(weight)
    for tensor in (grad, x, weight)[: 3 if wanted[0] else 2]:
        yield from _converted(tensor, last, settings)
    sizes = _sizes(grad if transposed else x, weight, stride, padding, dilation, groups)
    call: dict[str, Any] = {**sizes, "layout": "nhwc" if last else "nchw", **_dtype(x, settings)}
    if wanted[0]:
        yield launch(_PART, "conv2d" if transposed else "conv2d_dgrad", **call)
    if wanted[1]:
        yield launch(_PART, "conv2d_wgrad", **call)
    if wanted[2]:
        channels = grad.shape[1]
        pixels = max(1, grad.elements // channels)
        rows, cols, axis = (pixels, channels, "rows") if last else (channels, pixels, "cols")
        yield by_rows("reduction", "reduce_sum", grad, rows, cols, axis=axis)
