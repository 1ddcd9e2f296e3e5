"""Optimizers: PyTorch's fused ones, and the multi-tensor ops that the others are made of."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from kernelcast.calls import Launch
from kernelcast.networks.aten.table import Settings, launch, number_format, pointwise, rule
from kernelcast.networks.traced import Op, Tensor

_CHUNK = 65536  # elements of a CTA of the multi-tensor kernels


@rule("_fused_adamw_", "_fused_adam_")
def _adam(op: Op, settings: Settings) -> Iterator[Launch]:
    weights, _, moments = op.arguments[:3]
    yield launch("optimizer", "adamw", elements=_elements(weights), tensors=len(weights),
                 dtype=number_format(weights[0]), state_dtype=number_format(moments[0]))  # fmt: skip


@rule("_fused_sgd_", "_fused_adagrad_")
def _sgd(op: Op, settings: Settings) -> Iterator[Launch]:
    weights, _, buffers = op.arguments[:3]
    yield launch("optimizer", "sgd", elements=_elements(weights), tensors=len(weights),
                 momentum=bool(buffers), dtype=number_format(weights[0]))  # fmt: skip


def _elements(tensors: Any) -> int:
    return sum(x.elements for x in tensors)


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


def _multi_tensor(op: Op, settings: Settings) -> Iterator[Launch]:
    """A list of tensors in one pass where all have one format and lie alike; else a kernel for each tensor."""
    lists = [a for a in (*op.arguments, *op.options.values()) if isinstance(a, (tuple, list)) and a
             and all(isinstance(x, Tensor) for x in a)]  # fmt: skip
    first = lists[0] if lists else ()
    name = op.name.removeprefix("_foreach_").rstrip("_")
    function = (_TWO_LISTS if len([x for x in lists if len(x) == len(first)]) > 1 else _ONE_LIST).get(name, "scale")
    sizes = [x.elements for x in first if x.elements]
    if not sizes:
        return
    source = lists[1][0] if function == "copy" else first[0]
    to = number_format(first[0]) if function == "copy" and source.dtype != first[0].dtype else None
    if _one_pass(lists):
        yield launch("optimizer", "foreach", function=function, elements=sum(sizes), tensors=len(sizes),
                     chunks=sum(math.ceil(size / _CHUNK) for size in sizes), dtype=number_format(source),
                     to=to)  # fmt: skip
        return
    read = 1 if len(lists) == 1 else len(lists)
    for x in first:
        yield pointwise("optimizer", x.elements, number_format(x), read_bytes=read * x.bytes, written_bytes=x.bytes)


def _one_pass(lists: list[Any]) -> bool:
    """can_use_fast_route: one format a list, no gaps, and lists whose tensors lie alike (a copy may change format)."""
    alike = all(len({x.dtype for x in one}) == 1 and all(x.dense for x in one) for one in lists)
    return alike and all(
        x.stride == z.stride or not x.elements for one in lists[1:] for x, z in zip(lists[0], one, strict=False)
    )


_FOREACH = sorted({*_ONE_LIST, *_TWO_LISTS})
rule(*(f"_foreach_{name}" for name in _FOREACH), "_foreach_lerp_scalar")(_multi_tensor)


@rule("_amp_foreach_non_finite_check_and_unscale_")
def _unscale(op: Op, settings: Settings) -> Iterator[Launch]:
    """GradScaler: every gradient is looked at and divided by the scale."""
    gradients = op.arguments[0]
    sizes = [x.elements for x in gradients if x.elements]
    if sizes:
        yield launch("optimizer", "foreach", function="scale", elements=sum(sizes), tensors=len(sizes),
                     chunks=sum(math.ceil(size / _CHUNK) for size in sizes),
                     dtype=number_format(gradients[0]))  # fmt: skip
