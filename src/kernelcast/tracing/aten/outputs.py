"""Outputs of ATen ops from their arguments: a profiler writes down what goes into an op, not what comes out.

Sizes and formats follow PyTorch's rules for broadcasting and promotion; axes are in memory as in the input that has the
output's shape, else contiguous. An op that is not here and not element-wise has no outputs (``None``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kernelcast.tracing.aten.elementwise import is_elementwise
from kernelcast.tracing.aten.rows import REDUCTIONS, reduced_axes
from kernelcast.tracing.traced import Op, Tensor

_COMPARE = {"eq", "ne", "lt", "le", "gt", "ge", "logical_not", "logical_and", "logical_or", "logical_xor", "isnan",
            "isinf", "isfinite", "any", "all"}  # fmt: skip
_MADE = {"zeros", "ones", "full", "arange", "linspace", "scalar_tensor", "randn", "rand", "randint"}
_RANK = ("bool", "uint8", "int8", "int16", "int32", "int64", "fp8", "fp16", "bf16", "fp32", "fp64", "complex64",
         "complex128")  # fmt: skip
_FLOATING = _RANK.index("fp8")
# integers become the default format where the result is no whole number
_TO_FLOAT = {"div", "true_divide", "exp", "log", "sin", "cos", "sqrt", "rsqrt", "sigmoid", "tanh", "reciprocal", "erf",
             "log2", "exp2", "mean", "std", "var", "softmax", "_softmax"}  # fmt: skip


def outputs_of(op: Op) -> tuple[Tensor, ...] | None:
    """The outputs of ``op``, or None without a rule."""
    if op.in_place:
        return tuple(op.inputs[:1])
    if op.name in _RULES:
        return _RULES[op.name](op)
    if op.name in _SHAPES:
        return (contiguous(_SHAPES[op.name](op), _FORMATS.get(op.name) or op.inputs[0].dtype),)
    return _elementwise(op) if is_elementwise(op) else None


def contiguous(shape: Sequence[int], dtype: str) -> Tensor:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return Tensor(tuple(shape), tuple(reversed(strides)), dtype)


def in_order_of(x: Tensor, dtype: str) -> Tensor:
    """A dense tensor with the memory order of ``x`` (a TensorIterator's output)."""
    steps, step = [0] * len(x.shape), 1
    for axis in sorted(range(len(x.shape)), key=lambda axis: (x.stride[axis], -axis)):
        steps[axis] = step
        step *= max(1, x.shape[axis])
    return Tensor(x.shape, tuple(steps), dtype)


def broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape that all of these stretch to."""
    longest = max((len(shape) for shape in shapes), default=0)
    axes = []
    for axis in range(-longest, 0):
        sizes = {shape[axis] for shape in shapes if len(shape) >= -axis} - {1}
        axes.append(max(sizes, default=1))
    return tuple(axes)


def promoted(tensors: Sequence[Tensor]) -> str:
    """A scalar (0 axes) decides only where it is of a higher category, float over integer, than the tensors."""
    with_axes = [x for x in tensors if x.shape] or list(tensors)
    ranks = [_RANK.index(x.dtype) for x in with_axes]
    highest = max(ranks)
    if {"fp16", "bf16"} <= {x.dtype for x in with_axes} and highest < _RANK.index("fp32"):
        return "fp32"
    scalars = [_RANK.index(x.dtype) for x in tensors if not x.shape]
    if highest < _FLOATING <= max(scalars, default=0):
        return "fp32"
    return _RANK[highest]


def _elementwise(op: Op) -> tuple[Tensor, ...]:
    inputs = op.inputs
    if not inputs or op.name in _MADE:
        return _made(op)
    shape, dtype = broadcast([x.shape for x in inputs]), promoted(inputs)
    if op.name == "where":  # the first says which
        dtype = promoted(inputs[1:] or inputs)
    if op.name in _COMPARE:
        dtype = "bool"
    elif op.name in _TO_FLOAT and _RANK.index(dtype) < _FLOATING:
        dtype = "fp32"
    like = next((x for x in inputs if x.shape == shape and x.distinct == x.elements), None)
    out = in_order_of(like, dtype) if like else contiguous(shape, dtype)
    return (out, contiguous(shape, "bool")) if op.name == "native_dropout" else (out,)


def _made(op: Op) -> tuple[Tensor, ...]:
    """arange and similar ops take the tensor to fill, or numbers alone."""
    given = [x for x in op.inputs if x.elements > 1]
    if given:
        return (given[-1],)
    sizes = [value for value in op.arguments if isinstance(value, (list, tuple)) and value]
    if sizes and all(isinstance(n, int) for n in sizes[0]):
        return (contiguous(sizes[0], "fp32"),)
    numbers = [value for value in op.arguments if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if op.name == "arange" and numbers:
        start, end = (0, numbers[0]) if len(numbers) == 1 else numbers[:2]
        step = numbers[2] if len(numbers) > 2 and numbers[2] else 1
        return (contiguous((max(1, math.ceil((end - start) / step)),), "int64"),)
    return (contiguous((), "fp32"),)


def _copied(op: Op) -> tuple[Tensor, ...]:
    x = op.inputs[0]
    return (Tensor(x.shape, x.stride, x.dtype) if x.dense else contiguous(x.shape, x.dtype),)


def _joined(op: Op) -> tuple[Tensor, ...]:
    parts, axis = [x for x in op.inputs if x.shape != (0,)], op.argument(1, "dim", 0)
    if not parts:
        return ()
    shape = list(parts[0].shape)
    if op.name == "stack":
        shape.insert(axis % (len(shape) + 1), len(parts))
    else:
        shape[axis] = sum(x.shape[axis] for x in parts)
    return (contiguous(shape, promoted(parts)),)


def _best(op: Op) -> tuple[Tensor, ...]:
    """topk, sort: values and indices."""
    x = op.inputs[0]
    shape = list(x.shape)
    if op.name == "topk":
        shape[op.argument(2, "dim", -1)] = op.arguments[1]
    return contiguous(shape, x.dtype), contiguous(shape, "int64")


def _like_second(op: Op) -> tuple[Tensor, ...]:
    """A gradient of the second argument: losses, pools."""
    return (contiguous(op.arguments[1].shape, op.arguments[1].dtype),)


_RULES: dict[str, Callable[[Op], tuple[Tensor, ...]]] = {
    **dict.fromkeys(("cat", "stack", "_cat", "concat"), _joined),
    **dict.fromkeys(("clone", "contiguous", "_to_copy", "roll", "flip"), _copied),
    **dict.fromkeys(("topk", "sort"), _best),
    **dict.fromkeys(("nll_loss_backward", "max_pool2d_with_indices_backward", "avg_pool2d_backward",
                     "_adaptive_avg_pool2d_backward"), _like_second),
}  # fmt: skip

# ---- one contiguous output in the format of the first input: the rules say its shape


def _reduced(op: Op) -> Sequence[int]:
    x = op.inputs[0]
    gone = reduced_axes(op, x)
    return [size for axis, size in enumerate(x.shape) if axis not in gone]


def _repeated(op: Op) -> Sequence[int]:
    shape, times = op.inputs[0].shape, op.arguments[1]
    padded = (1,) * (len(times) - len(shape)) + shape
    return [size * n for size, n in zip(padded, times, strict=True)]


def _indexed(op: Op) -> Sequence[int]:
    """Broadcast indices in place of the axes that they index."""
    ids = op.inputs[1:]
    return (*broadcast([x.shape for x in ids]), *op.arguments[0].shape[len(ids) :])


def _selected(op: Op) -> Sequence[int]:
    source, axis, ids = op.arguments[:3]
    shape = list(source.shape)
    shape[axis] = ids.elements
    return shape


def _product(op: Op) -> Sequence[int]:
    a, b = [x for x in op.inputs if len(x.shape) >= 2][-2:]
    return (*a.shape[:-1], b.shape[-1])


def _convolved(op: Op) -> Sequence[int]:
    x, weight, _, stride, padding, dilation, transposed = op.arguments[:7]
    groups = op.argument(8, "groups", 1)
    sizes = []
    for axis, size in enumerate(x.shape[2:]):
        reach = dilation[axis % len(dilation)] * (weight.shape[2 + axis] - 1)
        step, pad = stride[axis % len(stride)], padding[axis % len(padding)]
        sizes.append(
            (size - 1) * step - 2 * pad + reach + 1 if transposed else (size + 2 * pad - reach - 1) // step + 1
        )
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    return (x.shape[0], channels, *sizes)


def _whole_sizes(op: Op) -> Sequence[int]:
    """Gradients of a part: the whole's sizes are the first list of numbers."""
    return next(value for value in op.arguments if isinstance(value, (tuple, list)) and value)


def _padded(op: Op) -> Sequence[int]:
    """Two numbers an axis, the last axis first."""
    x, pads = op.arguments[:2]
    shape = list(x.shape)
    for axis in range(len(pads) // 2):
        shape[-1 - axis] += pads[2 * axis] + pads[2 * axis + 1]
    return shape


def _pooled(op: Op) -> Sequence[int]:
    """(x, window, stride, padding, dilation, ...) or (x, size)."""
    x, window = op.arguments[:2]
    axes = len(window)
    if op.name.startswith("_adaptive"):
        return (*x.shape[:-axes], *window)
    stride, padding = op.argument(2, "stride") or window, op.argument(3, "padding") or (0,) * axes
    sizes = [
        (x.shape[axis - axes] + 2 * padding[axis % len(padding)] - window[axis]) // stride[axis % len(stride)] + 1
        for axis in range(axes)
    ]
    return (*x.shape[:-axes], *sizes)


_FORMATS = {"any": "bool", "all": "bool", "argmax": "int64", "argmin": "int64"}  # others: as the first input
_SHAPES: dict[str, Callable[[Op], Sequence[int]]] = {
    **dict.fromkeys((*REDUCTIONS, "logsumexp", "argmax", "argmin"), _reduced),
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "native_layer_norm", "_fused_rms_norm",
                     "rms_norm", "native_group_norm", "native_batch_norm", "_softmax_backward_data",
                     "_log_softmax_backward_data", "_scaled_dot_product_cudnn_attention",
                     "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
                     "_scaled_dot_product_fused_attention_overrideable", "index_add", "scatter", "scatter_add",
                     "index_put", "index_copy", "scatter_reduce"), lambda op: op.inputs[0].shape),
    **dict.fromkeys(("index", "_unsafe_index"), _indexed),
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_addmm_activation"), _product),
    **dict.fromkeys(("convolution", "_convolution", "cudnn_convolution"), _convolved),
    **dict.fromkeys(("slice_backward", "select_backward"), _whole_sizes),
    **dict.fromkeys(("max_pool2d", "max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d"), _pooled),
    "constant_pad_nd": _padded,
    "embedding": lambda op: (*op.arguments[1].shape, op.arguments[0].cols),
    "gather": lambda op: op.arguments[2].shape,
    "index_select": _selected,
    "repeat": _repeated,
}  # fmt: skip
