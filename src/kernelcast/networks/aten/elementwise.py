"""Element-wise ops: by name where one vectorised kernel runs, else by what they move and how they reach it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from kernelcast.calls import Launch
from kernelcast.kernels import REGISTRY
from kernelcast.kernels.elementwise import Cost, Elementwise
from kernelcast.networks.aten.table import Settings, launch, number_format, pointwise, rule, split
from kernelcast.networks.traced import Op, Tensor

SECTOR_BYTES = 32.0  # the least that DRAM and L2 hand out
# ATen's name: the kernel's, which says what an element costs
_NAMES = {
    "add": "add", "sub": "sub", "rsub": "sub", "mul": "mul", "div": "div", "true_divide": "div", "neg": "neg",
    "relu": "relu", "gelu": "gelu", "silu": "silu", "sigmoid": "sigmoid", "tanh": "tanh", "exp": "exp", "exp2": "exp",
    "expm1": "exp", "log": "log", "log2": "log", "log1p": "log", "sin": "sin", "cos": "sin", "sqrt": "sqrt",
    "rsqrt": "rsqrt", "clamp": "clamp", "clamp_min": "relu", "clamp_max": "relu", "hardtanh": "clamp", "erf": "gelu",
    "where": "where", "masked_fill": "masked_fill", "native_dropout": "dropout", "bernoulli": "dropout",
    "native_dropout_backward": "dropout_backward", "_masked_scale": "dropout_backward",
    "gelu_backward": "gelu_backward", "silu_backward": "silu_backward", "sigmoid_backward": "sigmoid_backward",
    "tanh_backward": "tanh_backward", "threshold_backward": "relu_backward", "abs": "neg", "sign": "neg",
    "reciprocal": "rsqrt", "maximum": "add", "minimum": "add", "addcmul": "mul", "addcdiv": "div", "lerp": "mul",
    "eq": "add", "ne": "add", "lt": "add", "le": "add", "gt": "add", "ge": "add", "logical_not": "neg",
    "logical_and": "add", "logical_or": "add", "logical_xor": "add", "bitwise_and": "add", "bitwise_or": "add",
    "bitwise_not": "neg", "bitwise_xor": "add", "floor": "neg", "ceil": "neg", "round": "neg", "trunc": "neg",
    "remainder": "div", "fmod": "div", "floor_divide": "div", "isnan": "neg", "isinf": "neg", "isfinite": "neg",
    "nan_to_num": "clamp", "leaky_relu": "relu", "elu": "exp", "hardswish": "clamp", "hardsigmoid": "clamp",
    "mish": "tanh", "softplus": "log", "log_sigmoid_forward": "log", "leaky_relu_backward": "relu_backward",
    "elu_backward": "silu_backward", "hardswish_backward": "relu_backward", "softplus_backward": "sigmoid_backward",
    "mse_loss_backward": "mul", "atan2": "div", "__and__": "add", "__or__": "add", "polar": "sin", "asinh": "log",
    "square": "mul", "zeros_like": "fill", "ones_like": "fill", "full_like": "fill", "zeros": "fill", "ones": "fill",
    "full": "fill", "fill": "fill", "zero": "fill", "new_zeros": "fill", "new_ones": "fill", "new_full": "fill",
    "arange": "fill", "linspace": "fill", "scalar_tensor": "fill", "uniform": "dropout", "normal": "dropout",
    "randn": "dropout", "rand": "dropout", "randn_like": "dropout", "rand_like": "dropout", "randint": "dropout",
    "tril": "masked_fill", "triu": "masked_fill", "sgn": "neg", "hardtanh_backward": "relu_backward",
    "glu": "silu", "glu_backward": "silu_backward", "prelu": "relu", "_prelu_kernel": "relu",
    "_prelu_kernel_backward": "relu_backward", "bucketize": "div", "view_as_complex": "copy", "conj": "neg",
}  # fmt: skip


def cost_of(name: str) -> Cost:
    kernel = REGISTRY[name]
    assert issubclass(kernel, Elementwise)
    return kernel.cost


def kernel_name(op: Op) -> str | None:
    """The kernel of an element-wise op, None where it is none."""
    name = op.name if op.name in _NAMES else op.name.rstrip("_")
    if name == "pow":
        exponent = op.argument(1, "exponent")
        return "pow" if not isinstance(exponent, (int, float)) or exponent not in (2, 3, -1, -2, 0.5) else "scale"
    if name in ("gelu", "gelu_backward") and op.options.get("approximate") == "tanh":
        return _NAMES[name].replace("gelu", "gelu_tanh")
    found = _NAMES.get(name)
    if found in ("add", "sub", "mul", "div") and len(_operands(op)) == 1:
        return "scale"  # a number is the other operand
    return found


def is_elementwise(op: Op) -> bool:
    return op.name in _NAMES or op.name.rstrip("_") in (*_NAMES, "pow")


def _operands(op: Op) -> list[Tensor]:
    """Tensors that are read; one number (0 axes) is none."""
    return [x for x in op.inputs if x.shape and x.elements > 1] or op.inputs[:1]


def coalesced(tensors: Sequence[Tensor], shape: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Axes as PyTorch's TensorIterator sees them: sorted by stride, neighbours that lie end to end in every tensor
    joined; each with the stride of every tensor, 0 where it is broadcast."""
    axes: list[tuple[int, list[int]]] = []
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        axes.append((size, [_stride(x, axis - len(shape)) for x in tensors]))
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
    """Of an axis counted from the end; 0 where the tensor has it not, or once."""
    if -axis > len(x.shape) or x.shape[axis] == 1:
        return 0
    return x.stride[axis]


def access(inputs: Sequence[Tensor], out: Tensor) -> str:
    """How the kernel reaches its tensors: vector, cast or strided."""
    axes = coalesced([out, *inputs], out.shape)
    if len(axes) > 1 or (axes and any(step != 1 for step in axes[0][1])):
        return "strided"
    return "cast" if len({x.dtype for x in (out, *inputs) if x.dtype not in ("bool",)}) > 1 else "vector"


def fetched_bytes(inputs: Sequence[Tensor], out: Tensor, l2_bytes: float) -> float:
    """What comes from memory: whole sectors. A tensor that lies across the order of the output uses one element of a
    sector; the next is wanted when the axis that runs along the sector moves on, and is there if L2 held it so long."""
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


def elementwise(op: Op, settings: Settings, name: str, part: str = "element-wise") -> Launch:
    """One element-wise kernel, by its name where it runs vectorised, else by what it moves."""
    inputs = _operands(op) if cost_of(name).reads else []
    out = op.outputs[0] if op.outputs else op.inputs[0]
    way = access(inputs, out)
    dtype = number_format(out if name != "copy" and out.dtype not in ("bool", "int64") else (inputs or [out])[0])
    floats = [x for x in inputs if x.dtype != "bool"]
    cost = cost_of(name)
    plain = way == "vector" and out.dtype in ("fp32", "bf16", "fp16") and len(floats) == cost.reads
    if plain and all(x.elements == out.elements for x in inputs):
        rows, cols = split(out.elements, out.cols)
        return launch(part, name, settings, rows=rows, cols=cols, dtype=dtype)
    read = fetched_bytes(inputs, out, settings.l2_bytes)
    written = sum(x.bytes for x in op.outputs) if op.outputs else out.bytes
    return pointwise(
        part, settings, out.elements, dtype, read_bytes=read, written_bytes=written, tensors=len(inputs),
        access=None if way == "vector" else way, axes=axes_of([out, *inputs], out.shape),
        flops=max(cost.flops, 1.0), xu_ops=cost.xu_ops, cols=out.cols,
    )  # fmt: skip


def _rule(op: Op, settings: Settings) -> Iterator[Launch]:
    name = kernel_name(op)
    assert name is not None
    yield elementwise(op, settings, name)


rule(*_NAMES, "pow", "pow_", *(f"{name}_" for name in ("sgn",)))(_rule)


@rule("mse_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "smooth_l1_loss", "l1_loss")
def _elementwise_loss(op: Op, settings: Settings) -> Iterator[Launch]:
    """The difference of each element, and their mean."""
    x = op.inputs[0]
    yield pointwise("loss", settings, x.elements, number_format(x), read_bytes=sum(t.bytes for t in op.inputs),
                    written_bytes=x.bytes, flops=4.0)  # fmt: skip
    yield launch("loss", "reduce_sum", settings, rows=1, cols=x.elements, axis="cols", dtype=number_format(x))
