"""The table of rules, and what every rule is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from kernelcast.forecast.calls import Call, Launch
from kernelcast.tracing.traced import Op, Tensor

_KERNEL_DTYPES = ("fp32", "bf16", "fp16")
_MOST = 2**31 - 1  # of one size of a kernel call
_NARROW, _WIDTH = (
    256,
    1024,
)  # columns below which few vector kernels were measured; and the width that they are forecast with then


@dataclass(frozen=True)
class OpSettings:
    """Settings that decide which kernel an op launches, beside its tensors."""

    tf32: bool = False  # fp32 products on tensor cores (torch.set_float32_matmul_precision("high"))
    capability: str = "9.0"  # compute capability of the GPU
    l2_bytes: float = 50e6  # what stays within reach between two uses of a sector
    tf32_convolutions: bool = True  # fp32 convolutions on tensor cores (torch.backends.cudnn.allow_tf32)

    @property
    def has_tf32(self) -> bool:
        """Ampere and newer."""
        major = self.capability.split(".")[0]
        return major.isdigit() and int(major) >= 8


@dataclass(frozen=True)
class OpLaunches:
    """The kernel calls of an op. ``by_bytes``: no rule for it, so it is timed by the bytes that it moves."""

    launches: tuple[Launch, ...]
    by_bytes: bool = False


Rule = Callable[[Op, OpSettings], Iterable[Launch]]
_RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a function for these ops."""

    def register(function: Rule) -> Rule:
        for name in names:
            if name in _RULES:
                raise ValueError(f"two rules for {name}")
            _RULES[name] = function
        return function

    return register


def known_ops() -> list[str]:
    return sorted(_RULES)


def op_launches(op: Op, settings: OpSettings) -> OpLaunches:
    """The launches of ``op``."""
    rule_of_op = _RULES.get(op.name) or _RULES.get(op.name.rstrip("_"))
    if rule_of_op is not None:
        return OpLaunches(tuple(rule_of_op(op, settings)))
    return OpLaunches((by_bytes(op),), by_bytes=True)


def launch(part: str, op: str, count: float = 1, **given: Any) -> Launch:
    """The launch of one of PyTorch's kernels; parameters that are None are left out."""
    return Launch(part, Call.of(op, {"stack": "torch", **given}), count)


def vectorised(part: str, op: str, x: Tensor, dtype: str | None = None, **given: Any) -> Launch:
    """A kernel that treats a tensor as one long vector: the width of its last axis does not matter, so narrow tensors
    are forecast with a width that was measured."""
    rows, cols = split(x.elements, x.cols if x.cols >= _NARROW else _WIDTH)
    if cols < _NARROW <= x.elements:
        rows, cols = max(1, round(x.elements / _WIDTH)), min(_WIDTH, x.elements)
    return launch(part, op, rows=rows, cols=cols, dtype=dtype or number_format(x), **given)


def total_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(x.bytes for x in tensors)


def number_format(tensor: Tensor) -> str:
    """The format that a vector kernel of this tensor counts in."""
    if tensor.dtype in _KERNEL_DTYPES:
        return tensor.dtype
    return "fp32" if tensor.item_bytes >= 4 else "bf16"


def matrix_format(tensor: Tensor, settings: OpSettings) -> str:
    if tensor.dtype == "fp32":
        return "tf32" if settings.tf32 else "fp32"
    return tensor.dtype if tensor.dtype in ("bf16", "fp16", "fp8", "int8") else "fp32"


def split(elements: int, cols: int = 0) -> tuple[int, int]:
    """Elements as rows and columns that a kernel call can have."""
    cols = cols or 1024
    if cols > elements or elements % cols:
        cols = math.gcd(elements, 4096)  # the largest power of two up to that
    rows = max(1, elements // cols)
    while rows > _MOST:
        rows, cols = rows // 2, cols * 2
    return rows, cols


def over(part: str, x: Tensor, **given: Any) -> Launch:
    """``pointwise`` over the elements of a tensor, which it reads and writes once unless other bytes are given."""
    return pointwise(part, x.elements, number_format(x), **{"read_bytes": x.bytes, "written_bytes": x.bytes, **given})


def by_rows(
    part: str, kernel: str, x: Tensor, rows: int | None = None, cols: int | None = None, **given: Any
) -> Launch:
    """A kernel over rows: those of ``x`` along its last axis unless others are given."""
    rows, cols = x.rows if rows is None else rows, x.cols if cols is None else cols
    return launch(part, kernel, **{"rows": max(1, rows), "cols": max(1, cols), "dtype": number_format(x), **given})


def along(x: Tensor, axis: int) -> tuple[int, int]:
    """Rows and columns of an op over one axis."""
    cols = x.shape[axis] if x.shape else 1
    return max(1, x.elements // max(1, cols)), max(1, cols)


def pointwise(
    part: str,
    elements: int,
    dtype: str,
    *,
    read_bytes: float,
    written_bytes: float,
    tensors: int = 0,
    access: str | None = None,
    axes: int | None = None,
    flops: float = 1.0,
    xu_ops: float = 0.0,
    cols: int = 0,
    count: float = 1,
) -> Launch:
    """A kernel over ``elements`` that moves so many bytes."""
    width = {"fp32": 4, "bf16": 2, "fp16": 2}[dtype]
    rows, columns = split(max(1, elements), cols)
    total = max(1, elements) * width
    return launch(
        part, "pointwise", count, rows=rows, cols=columns, dtype=dtype,
        reads=round(read_bytes / total, 4), writes=round(written_bytes / total, 4), tensors=float(tensors),
        access=access, axes=axes if access == "strided" else None, flops=flops, xu_ops=xu_ops,
    )  # fmt: skip


def by_bytes(op: Op) -> Launch:
    """An op without a rule: every input read once, every output written once."""
    inputs = {x.storage: x for x in op.inputs}.values()
    outputs = op.outputs or tuple(op.inputs[:1])
    largest = max((*op.inputs, *outputs), key=lambda x: x.elements)
    read, written = total_bytes(inputs), total_bytes(outputs)
    return over("other", largest, read_bytes=read, written_bytes=written, tensors=len(inputs))


# ---- FLOPs of the ops that torch's own counter counts (torch.utils.flop_counter), by the same rules

# products, and where their first operand is among the arguments
_PRODUCTS = {"mm": 0, "bmm": 0, "_scaled_mm": 0, "_grouped_mm": 0, "addmm": 1, "baddbmm": 1}


def model_flops(op: Op) -> int:
    """FLOPs of an op that the model asks for: none that are computed again, by checkpointing or in a fused backward
    pass of attention."""
    if op.recomputed:
        return 0
    fused_backward = op.name.startswith("_scaled_dot_product") and op.name.endswith("backward")
    return _attention(op, recomputed=False) if fused_backward else op_flops(op)


def product_format(op: Op, settings: OpSettings) -> str:
    """The format that a product, convolution or attention multiplies in."""
    convolution = "convolution" in op.name
    return matrix_format(op.inputs[0], replace(settings, tf32=settings.tf32_convolutions) if convolution else settings)


def op_flops(op: Op) -> int:
    """FLOPs of an op; 0 unless it is a product, convolution or attention."""
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
    if wanted[0]:  # the gradient convolved with the weights, transposed
        total += _convolution(grad, weight, x, not transposed)
    if wanted[1]:  # input and gradient convolved, over the batch; the counter ignores groups here
        over, by = (grad, x) if transposed else (x, grad)
        total += int(2 * over[1] * math.prod(weight[2:]) * math.prod(by))
    return total


def _attention(op: Op, recomputed: bool = True) -> int:
    """Two products forward, four backward, and the scores ``recomputed``; masks are not subtracted."""
    backward = op.name.endswith("backward")
    query, key, value = op.arguments[1:4] if backward else op.arguments[:3]
    batch, heads, queries, size = query.shape
    pairs = batch * heads * queries * key.shape[2]
    width = value.shape[3]
    return 2 * pairs * ((2 + recomputed) * size + 2 * width) if backward else 2 * pairs * (size + width)
