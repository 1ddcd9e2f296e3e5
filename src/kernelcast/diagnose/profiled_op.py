"""An op as torch.profiler writes it down -> ``networks.traced.Op``: the ATen arguments, from four parallel lists."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kernelcast.diagnose.chrome_events import Event, arg
from kernelcast.tracing.aten.outputs import outputs_of
from kernelcast.tracing.traced import Op, Tensor

# at::ScalarType's C++ names
_FORMATS = {
    "float": "fp32", "double": "fp64", "c10::BFloat16": "bf16", "c10::Half": "fp16", "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8", "long int": "int64", "long": "int64", "int": "int32", "short": "int16",
    "short int": "int16", "signed char": "int8", "unsigned char": "uint8", "bool": "bool",
    "c10::complex<float>": "complex64", "c10::complex<double>": "complex128",
}  # fmt: skip
_OPAQUE = re.compile(r"OpaqueType<(\d+)")
_BY_BYTES = {1: "int8", 2: "bf16", 4: "fp32", 8: "int64"}


def op_of(event: Event, kernel_names: Iterable[str] = ()) -> Op | None:
    """The op with its arguments and outputs; None where the trace has no shapes, or the op's outputs cannot be told.

    ``kernel_names``: what it launched, which tells the format of a list of tensors (the profiler does not).
    """
    arguments = arguments_of(event, _list_format(kernel_names))
    if arguments is None:
        return None
    name = str(event["name"]).partition("::")[2] or str(event["name"])
    bare = Op(name, arguments, {}, (), "kernel", "forward", "")
    try:
        return replace(bare, outputs=outputs_of(bare) or ())
    except (AttributeError, IndexError, TypeError, ValueError):  # arguments in another order than this release's
        return None


def arguments_of(event: Event, list_format: str = "bf16") -> tuple[Any, ...] | None:
    dims, types = arg(event, "Input Dims"), arg(event, "Input type")
    if not isinstance(dims, list) or not isinstance(types, list) or len(dims) != len(types):
        return None
    strides = arg(event, "Input Strides") or [None] * len(dims)
    values = arg(event, "Concrete Inputs") or [""] * len(dims)
    if len(strides) != len(dims) or len(values) != len(dims):
        return None
    return tuple(_argument(*four, list_format=list_format) for four in zip(dims, types, strides, values, strict=True))


def _argument(dims: Any, kind: str, strides: Any, value: str, *, list_format: str) -> Any:
    if kind in _FORMATS:
        return _tensor(dims, strides, _FORMATS[kind])
    if kind == "TensorList" or (dims and isinstance(dims[0], list)):
        steps = strides or [None] * len(dims)
        return tuple(_tensor(shape, step, list_format) for shape, step in zip(dims, steps, strict=True))
    return _value(value)


def _tensor(dims: Any, strides: Any, dtype: str) -> Tensor:
    shape = tuple(int(n) for n in dims)
    if strides is None or len(strides) != len(shape):  # as if contiguous
        strides = [math.prod(max(1, size) for size in shape[axis + 1 :]) for axis in range(len(shape))]
    return Tensor(shape, tuple(int(n) for n in strides), dtype)


def _value(text: Any) -> Any:
    """'2' -> 2, '0.5' -> 0.5, '[1, 2]' -> (1, 2), 'True' -> True, '' -> None; other words as they are."""
    if not isinstance(text, str) or not text:
        return None
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return tuple(found) if isinstance(found, list) else found


def _list_format(kernel_names: Iterable[str]) -> str:
    """CatArrayBatchedCopy<OpaqueType<2u>, ...> moves items of two bytes."""
    for name in kernel_names:
        found = _OPAQUE.search(name)
        if found:
            return _BY_BYTES.get(int(found[1]), "bf16")
        if "float" in name and "bfloat" not in name.lower():
            return "fp32"
    return "bf16"
