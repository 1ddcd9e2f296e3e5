"""Element-wise ops: by name where one vectorised kernel runs, else by what they move and how they reach it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from kernelcast.forecast.calls import Launch
from kernelcast.ops import REGISTRY
from kernelcast.ops.elementwise import Cost, Elementwise
from kernelcast.tracing.aten.table import (
    OpSettings,
    by_rows,
    launch,
    number_format,
    over,
    pointwise,
    rule,
    total_bytes,
    vectorised,
)
from kernelcast.tracing.traced import Op, Tensor

SECTOR_BYTES = 32.0  # the smallest transfer of DRAM and L2
_SAME_NAME = (
    "add sub mul div neg relu gelu silu sigmoid tanh exp log sin sqrt rsqrt clamp where masked_fill fill "
    "gelu_backward silu_backward sigmoid_backward tanh_backward"
)  # ops whose kernel has their name
_LIKE = {  # the kernel whose cost an element of these has
    "add": "maximum minimum eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor "
    "__and__ __or__",
    "sub": "rsub",
    "mul": "addcmul lerp mse_loss_backward square",
    "div": "true_divide addcdiv remainder fmod floor_divide atan2",
    "neg": "abs sign sgn conj logical_not bitwise_not floor ceil round trunc isnan isinf isfinite",
    "relu": "clamp_min clamp_max leaky_relu prelu _prelu_kernel",
    "gelu": "erf",
    "silu": "glu",
    "tanh": "mish",
    "exp": "exp2 expm1 elu",
    "log": "log2 log1p softplus log_sigmoid_forward asinh",
    "sin": "cos polar",
    "rsqrt": "reciprocal",
    "clamp": "hardtanh nan_to_num hardswish hardsigmoid",
    "masked_fill": "tril triu",
    "dropout": "native_dropout bernoulli uniform normal randn rand randn_like rand_like randint",
    "dropout_backward": "native_dropout_backward _masked_scale",
    "silu_backward": "elu_backward glu_backward",
    "sigmoid_backward": "softplus_backward",
    "relu_backward": "threshold_backward leaky_relu_backward hardswish_backward hardtanh_backward "
    "_prelu_kernel_backward",
    "fill": "zeros_like ones_like full_like zeros ones full zero new_zeros new_ones new_full arange linspace "
    "scalar_tensor",
    "copy": "view_as_complex",
}
# ATen's name: the kernel's
_NAMES = {name: name for name in _SAME_NAME.split()} | {
    name: kernel for kernel, ops in _LIKE.items() for name in ops.split()
}


def cost_of(name: str) -> Cost:
    kernel = REGISTRY[name]
    assert issubclass(kernel, Elementwise)
    return kernel.cost


def kernel_name(op: Op) -> str | None:
    """The kernel of an element-wise op, None for other ops."""
    name = op.name if op.name in _NAMES else op.name.rstrip("_")
    if name == "pow":
        exponent = op.argument(1, "exponent")
        return "pow" if not isinstance(exponent, (int, float)) or exponent not in (2, 3, -1, -2, 0.5) else "scale"
    if name in ("gelu", "gelu_backward") and op.options.get("approximate") == "tanh":
        return _NAMES[name].replace("gelu", "gelu_tanh")
    kernel = _NAMES.get(name)
    if kernel in ("add", "sub", "mul", "div") and len(_operands(op)) == 1:
        return "scale"  # a number is the other operand
    return kernel


def is_elementwise(op: Op) -> bool:
    return op.name in _NAMES or op.name.rstrip("_") in (*_NAMES, "pow")


def _operands(op: Op) -> list[Tensor]:
    """Tensors that are read, without scalars (0 axes)."""
    return [x for x in op.inputs if x.shape and x.elements > 1] or op.inputs[:1]


def coalesced(tensors: Sequence[Tensor], shape: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Axes as PyTorch's TensorIterator sees them: sorted by stride, neighbours that are contiguous in every tensor
    joined; each with the stride of every tensor, 0 where it is broadcast."""
    rank = len(shape)
    axes = [(size, [_stride(x, axis - rank) for x in tensors]) for axis, size in enumerate(shape) if size != 1]
    axes.sort(key=lambda entry: [step or float("inf") for step in entry[1]])
    joined: list[tuple[int, list[int]]] = []
    for size, steps in axes:
        if joined and all(step == joined[-1][0] * inner for step, inner in zip(steps, joined[-1][1], strict=True)):
            joined[-1] = (joined[-1][0] * size, joined[-1][1])
        else:
            joined.append((size, steps))
    return joined


def axes_of(tensors: Sequence[Tensor], shape: Sequence[int]) -> int:
    """How many axes a kernel walks that cannot take its tensors as one long vector."""
    return min(16, max(2, len(coalesced(tensors, shape))))


def _stride(x: Tensor, axis: int) -> int:
    """The stride of an axis counted from the end; 0 where the tensor lacks it or its size is 1."""
    if -axis > len(x.shape) or x.shape[axis] == 1:
        return 0
    return x.stride[axis]


def access(inputs: Sequence[Tensor], out: Tensor) -> str:
    """How the kernel reaches its tensors: vector, cast or strided."""
    axes = coalesced([out, *inputs], out.shape)
    if len(axes) > 1 or (axes and any(step != 1 for step in axes[0][1])):
        return "strided"
    return "cast" if len({x.dtype for x in (out, *inputs)} - {"bool"}) > 1 else "vector"


def fetched_bytes(inputs: Sequence[Tensor], out: Tensor, l2_bytes: float) -> float:
    """Bytes fetched from memory, in whole sectors. A tensor that is strided in the order of the output uses one element
    of a sector; the next is wanted when the axis that runs along the sector moves on, and is there if L2 held it so
    long."""
    axes = coalesced([out, *inputs], out.shape)
    total = 0.0
    for at, x in enumerate(inputs, 1):
        steps = [step[at] for _, step in axes]
        whole = 1.0
        if steps and steps[0] > 1:
            before = next((i for i, step in enumerate(steps) if step == 1), len(steps))
            passed = math.prod(size for size, step in axes[:before] if step[at]) * SECTOR_BYTES
            if passed > l2_bytes:
                whole = min(SECTOR_BYTES / x.item_bytes, float(steps[0]))
        total += whole * x.bytes
    return total


def transposed(part: str, inputs: Sequence[Tensor], out: Tensor) -> Launch | None:
    """A kernel that reads a tensor across the order in which it writes, as a transposing copy does: each element costs
    a sector, beside which what else it reads and computes weighs little."""
    axes = coalesced([out, *inputs], out.shape)
    for at in range(1, len(inputs) + 1):
        across = len(axes) > 1 and axes[0][1][at] not in (0, 1)  # neighbours of the output are apart in it
        rows = next((size for size, steps in axes if steps[at] == 1), 0)
        if across and rows:
            inner = axes[0][0]
            return launch(part, "transpose", batch=max(1, out.elements // (inner * rows)), rows=inner, cols=rows,
                          dtype=number_format(out))  # fmt: skip
    return None


@rule(*_NAMES, "pow", "pow_", "sgn_")
def _elementwise(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """One kernel, by its name where it runs vectorised, else by what it moves."""
    name = kernel_name(op)
    assert name is not None
    cost = cost_of(name)
    inputs = _operands(op) if cost.reads else []
    out = op.outputs[0] if op.outputs else op.inputs[0]
    how = access(inputs, out)
    dtype = number_format(out if name != "copy" and out.dtype not in ("bool", "int64") else (inputs or [out])[0])
    floats = [x for x in inputs if x.dtype != "bool"]
    plain = how == "vector" and out.dtype in ("fp32", "bf16", "fp16") and len(floats) == cost.reads
    if plain and all(x.elements == out.elements for x in inputs):
        yield vectorised("element-wise", name, out, dtype)
        return
    across, fetched = transposed("element-wise", inputs, out), fetched_bytes(inputs, out, settings.l2_bytes)
    if across is not None and fetched <= total_bytes(inputs):  # else sectors come from memory more than once
        yield across
        return
    yield pointwise(
        "element-wise", out.elements, dtype, tensors=len(inputs),
        read_bytes=fetched, written_bytes=total_bytes(op.outputs or [out]),
        access=None if how == "vector" else how, axes=axes_of([out, *inputs], out.shape),
        flops=max(cost.flops, 1.0), xu_ops=cost.xu_ops, cols=out.cols,
    )  # fmt: skip


@rule("mse_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "smooth_l1_loss", "l1_loss")
def _elementwise_loss(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """The difference of each element, and their mean."""
    x = op.inputs[0]
    yield over("loss", x, read_bytes=total_bytes(op.inputs), flops=4.0)
    yield by_rows("loss", "reduce_sum", x, 1, x.elements, axis="cols")


# ---- Copies, casts and joins: ops that move numbers and compute nothing


def copied(source: Tensor, out: Tensor, part: str = "copy") -> Launch:
    """A copy: dense in the same layout, cast to another format, transposed, or of parts."""
    how = access([source], out)
    if how == "vector" and number_format(source) == number_format(out):
        return vectorised(part, "copy", out)
    if how == "cast" and {source.dtype, out.dtype} <= {"fp32", "bf16", "fp16"}:
        return vectorised(part, "copy", out, source.dtype, to=out.dtype)
    across = transposed(part, [source], out) if how == "strided" else None
    if across is not None:
        return across
    return over(part, out, read_bytes=source.bytes, tensors=1, flops=0.0, cols=out.cols,
                access=None if how == "vector" else how, axes=axes_of([out, source], out.shape))  # fmt: skip


@rule("_to_copy", "clone", "contiguous", "copy", "_copy_from", "repeat", "flip", "rot90", "as_strided_copy",
      "view_copy", "lift_fresh_copy", "channel_shuffle", "pixel_shuffle", "pixel_unshuffle",
      "expand_copy", "permute_copy")  # fmt: skip
def _copy(op: Op, settings: OpSettings) -> Iterator[Launch]:
    yield copied(op.inputs[0], op.outputs[0])


@rule("slice_backward", "select_backward", "diagonal_backward")
def _part(op: Op, settings: OpSettings) -> Iterator[Launch]:
    yield from filled(op.inputs[0], op.outputs[0])


def filled(source: Tensor, out: Tensor) -> Iterator[Launch]:
    """The whole is filled, then the part is copied into it."""
    yield vectorised("copy", "fill", out)
    inner = out.stride[len(out.stride) - len(source.shape) :]  # of the part that it goes to
    yield copied(source, Tensor(source.shape, inner, out.dtype))


@rule("copy_")
def _copy_into(op: Op, settings: OpSettings) -> Iterator[Launch]:
    target, source = op.arguments[:2]
    yield copied(source, target)


def in_order(*tensors: Tensor, part: str = "copy") -> Iterator[Launch]:
    """Copies of non-contiguous tensors, which kernels over rows make first."""
    for x in tensors:
        if not is_contiguous(x):
            steps = [math.prod(x.shape[axis + 1 :]) for axis in range(len(x.shape))]
            yield copied(x, Tensor(x.shape, tuple(steps), x.dtype), part)


def is_contiguous(x: Tensor) -> bool:
    steps = [(step, math.prod(x.shape[axis + 1 :])) for axis, step in enumerate(x.stride) if x.shape[axis] != 1]
    return x.elements <= 1 or all(step == wanted for step, wanted in steps)


def layout_of(x: Tensor) -> str:
    """nhwc where the channels are innermost."""
    mapped = len(x.shape) >= 4 and x.shape[1] > 1 and math.prod(x.shape[2:]) > 1
    return "nhwc" if mapped and x.stride[1] == 1 else "nchw"


@rule("cat", "stack", "_cat", "concat")
def _cat(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """A vectorised copy of all parts; feature maps by their channels; where a part has gaps (half of each head), an
    element at a time."""
    out = op.outputs[0]
    if any(not x.dense for x in op.inputs if x.elements):
        yield over("copy", out, tensors=2, access="strided", axes=4, flops=0.0, cols=out.cols)
    elif op.name in ("cat", "_cat", "concat") and len(out.shape) >= 4 and op.argument(1, "dim", 0) == 1:
        batch, channels = out.shape[:2]
        yield launch("copy", "channel_cat", batch=max(1, batch), channels=max(1, channels),
                     spatial=max(1, out.elements // max(1, batch * channels)), parts=max(1, len(op.inputs)),
                     layout=layout_of(out), dtype=number_format(out))  # fmt: skip
    else:
        yield vectorised("copy", "cat", out)
