"""Optimizers: PyTorch's fused ones, and the multi-tensor ops that the others are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kernelcast.calls import Launch
from kernelcast.networks.aten.table import Settings, launch, number_format, pointwise, rule
from kernelcast.networks.traced import Op, Tensor


@rule("_fused_adamw_", "_fused_adam_")
def _adam(op: Op, settings: Settings) -> Iterator[Launch]:
    weights, _, moments = op.arguments[:3]
    yield launch("optimizer", "adamw", settings, elements=_elements(weights), tensors=len(weights),
               dtype=number_format(weights[0]), state_dtype=number_format(moments[0]))  # fmt: skip


@rule("_fused_sgd_", "_fused_adagrad_")
def _sgd(op: Op, settings: Settings) -> Iterator[Launch]:
    weights, _, buffers = op.arguments[:3]
    yield launch("optimizer", "sgd", settings, elements=_elements(weights), tensors=len(weights),
               momentum=bool(buffers), dtype=number_format(weights[0]))  # fmt: skip


def _elements(tensors: Any) -> int:
    return sum(x.elements for x in tensors)


def multi_tensor(op: Op, settings: Settings) -> Iterator[Launch]:
    """A list of tensors in one pass: lists that are read, and the list that is written."""
    lists = [a for a in (*op.arguments, *op.options.values()) if isinstance(a, (tuple, list)) and a
             and all(isinstance(x, Tensor) for x in a)]  # fmt: skip
    if not lists:
        return
    read = sum(x.bytes for one in lists for x in one)
    written = sum(x.bytes for x in (op.outputs or lists[0])) if op.name != "_foreach_norm" else 0
    yield pointwise("optimizer", settings, _elements(lists[0]), number_format(lists[0][0]), read_bytes=read,
                    written_bytes=written, tensors=len(lists))  # fmt: skip


_FOREACH = ("add", "sub", "mul", "div", "sqrt", "addcmul", "addcdiv", "lerp", "neg", "norm", "reciprocal", "maximum",
            "minimum", "pow", "copy", "zero", "abs", "sign", "exp", "log", "rsqrt", "clamp_max", "clamp_min", "max",
            "lerp_scalar")  # fmt: skip
rule(*(f"_foreach_{name}" for name in _FOREACH), "_amp_foreach_non_finite_check_and_unscale_")(multi_tensor)
