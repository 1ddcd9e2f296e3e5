"""Optimizers: PyTorch's fused ones, and the multi-tensor ops that the others are made of."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from kernelcast.forecast.calls import Launch
from kernelcast.tracing.aten.table import OpSettings, launch, number_format, pointwise, rule
from kernelcast.tracing.traced import Op, Tensor

_CHUNK = 65536  # elements of a CTA of the multi-tensor kernels


@rule("_fused_adamw_", "_fused_adam_")
def _adam(op: Op, settings: OpSettings) -> Iterator[Launch]:
    weights, _, moments = op.arguments[:3]
    yield launch("optimizer", "adamw", **_lists(weights), state_dtype=number_format(moments[0]))


@rule("_fused_sgd_", "_fused_adagrad_")
def _sgd(op: Op, settings: OpSettings) -> Iterator[Launch]:
    weights, _, buffers = op.arguments[:3]
    yield launch("optimizer", "sgd", **_lists(weights), momentum=bool(buffers))


def _lists(tensors: Any) -> dict[str, Any]:
    """A list of tensors as the multi-tensor kernels take it."""
    sizes = [x.elements for x in tensors if x.elements]
    return {"elements": sum(sizes), "tensors": len(sizes), "dtype": number_format(tensors[0]),
            "chunks": sum(math.ceil(size / _CHUNK) for size in sizes)}  # fmt: skip


# _foreach_*: what the multi-tensor kernel computes, with a list and a scalar, or a scalar a tensor; with two lists
_ONE_LIST = {
    **dict.fromkeys(("add", "sub", "mul", "div", "neg", "abs", "sign", "clamp_max", "clamp_min", "maximum", "minimum",
                     "trunc", "round", "floor", "ceil"), "scale"),
    **dict.fromkeys(("sqrt", "rsqrt", "reciprocal", "pow", "exp", "log", "expm1", "log1p", "sigmoid", "tanh", "sin",
                     "cos", "erf"), "sqrt"),
    "zero": "zero", "norm": "norm", "powsum": "norm", "max": "norm",
}  # fmt: skip
_TWO_LISTS = {
    **dict.fromkeys(("add", "sub", "mul", "maximum", "minimum", "clamp_max", "clamp_min"), "add"),
    **dict.fromkeys(("div", "pow"), "div"),
    "lerp": "lerp", "copy": "copy", "addcmul": "addcmul", "addcdiv": "addcdiv",
}  # fmt: skip


def _multi_tensor(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """A list of tensors in one pass where all have one format and equal strides; else a kernel for each tensor."""
    lists = [a for a in (*op.arguments, *op.options.values()) if isinstance(a, (tuple, list)) and a
             and all(isinstance(x, Tensor) for x in a)]  # fmt: skip
    first = lists[0] if lists else ()
    if not any(x.elements for x in first):
        return
    name = op.name.removeprefix("_foreach_").rstrip("_")
    several = sum(len(tensors) == len(first) for tensors in lists) > 1
    function = (_TWO_LISTS if several else _ONE_LIST).get(name, "scale")
    if function in ("addcmul", "addcdiv") and len({tuple(x.storage for x in tensors) for tensors in lists[:3]}) < 3:
        function = "lerp"  # a gradient times itself is read once
    if not _one_pass(lists):
        for x in first:
            yield pointwise("optimizer", x.elements, number_format(x), read_bytes=len(lists) * x.bytes,
                            written_bytes=x.bytes)  # fmt: skip
    elif function == "copy" and lists[1][0].dtype != first[0].dtype:
        yield launch("optimizer", "foreach", function=function, **_lists(lists[1]), to=number_format(first[0]))
    else:
        yield launch("optimizer", "foreach", function=function, **_lists(first))


def _one_pass(lists: list[Any]) -> bool:
    """can_use_fast_route: one format a list, no gaps, and lists of equal strides (a copy may change format)."""
    alike = all(len({x.dtype for x in tensors}) == 1 and all(x.dense for x in tensors) for tensors in lists)
    return alike and all(
        x.stride == z.stride or not x.elements for tensors in lists[1:] for x, z in zip(lists[0], tensors, strict=False)
    )


_FOREACH = sorted({*_ONE_LIST, *_TWO_LISTS})
rule(*(f"_foreach_{name}" for name in _FOREACH), "_foreach_lerp_scalar")(_multi_tensor)


@rule("_amp_foreach_non_finite_check_and_unscale_")
def _unscale(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """GradScaler: every gradient is looked at and divided by the scale."""
    if any(x.elements for x in op.arguments[0]):
        yield launch("optimizer", "foreach", function="scale", **_lists(op.arguments[0]))
