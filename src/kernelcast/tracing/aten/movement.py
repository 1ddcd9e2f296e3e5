"""Copies, casts and joins: ops that move numbers and compute nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kernelcast.forecast.calls import Launch
from kernelcast.tracing.aten.elementwise import access, axes_of, turned
from kernelcast.tracing.aten.table import Settings, launch, number_format, over, rule, vectorised
from kernelcast.tracing.traced import Op, Tensor


def copied(source: Tensor, out: Tensor, part: str = "copy") -> Launch:
    """A copy: dense and alike, cast to another format, turned, or of parts."""
    way = access([source], out)
    if way == "vector" and number_format(source) == number_format(out):
        return vectorised(part, "copy", out)
    if way == "cast" and {source.dtype, out.dtype} <= {"fp32", "bf16", "fp16"}:
        return vectorised(part, "copy", out, source.dtype, to=out.dtype)
    across = turned(part, [source], out) if way == "strided" else None
    if across is not None:
        return across
    return over(part, out, read_bytes=source.bytes, written_bytes=out.bytes, tensors=1, flops=0.0, cols=out.cols,
                access=None if way == "vector" else way, axes=axes_of([out, source], out.shape))  # fmt: skip


@rule("_to_copy", "clone", "contiguous", "copy", "_copy_from", "repeat", "flip", "rot90", "as_strided_copy",
      "view_copy", "lift_fresh_copy", "channel_shuffle", "pixel_shuffle", "pixel_unshuffle",
      "expand_copy", "permute_copy")  # fmt: skip
def _copy(op: Op, settings: Settings) -> Iterator[Launch]:
    yield copied(op.inputs[0], op.outputs[0])


@rule("slice_backward", "select_backward", "diagonal_backward")
def _part(op: Op, settings: Settings) -> Iterator[Launch]:
    yield from filled(op.inputs[0], op.outputs[0])


def filled(source: Tensor, out: Tensor) -> Iterator[Launch]:
    """The whole is filled, then the part is copied into it."""
    yield vectorised("copy", "fill", out)
    inner = out.stride[len(out.stride) - len(source.shape) :]  # of the part that it goes to
    yield copied(source, Tensor(source.shape, inner, out.dtype))


@rule("copy_")
def _copy_into(op: Op, settings: Settings) -> Iterator[Launch]:
    target, source = op.arguments[:2]
    yield copied(source, target)


def in_order(*tensors: Tensor, part: str = "copy") -> Iterator[Launch]:
    """Copies of those that do not lie in the order of their axes, which kernels over rows make for themselves."""
    for x in tensors:
        if not is_contiguous(x):
            steps = [math.prod(x.shape[axis + 1 :]) for axis in range(len(x.shape))]
            yield copied(x, Tensor(x.shape, tuple(steps), x.dtype), part)


def is_contiguous(x: Tensor) -> bool:
    steps = [(step, math.prod(x.shape[axis + 1 :])) for axis, step in enumerate(x.stride) if x.shape[axis] != 1]
    return x.elements <= 1 or all(step == wanted for step, wanted in steps)


def layout_of(x: Tensor) -> str:
    """nhwc where the channels lie innermost."""
    mapped = len(x.shape) >= 4 and x.shape[1] > 1 and math.prod(x.shape[2:]) > 1
    return "nhwc" if mapped and x.stride[1] == 1 else "nchw"


@rule("cat", "stack", "_cat", "concat")
def _cat(op: Op, settings: Settings) -> Iterator[Launch]:
    """A vectorised copy of all parts; feature maps by their channels; where a part has gaps (half of each head), an
    element at a time."""
    out = op.outputs[0]
    if any(not x.dense for x in op.inputs if x.elements):
        yield over("copy", out, read_bytes=out.bytes, written_bytes=out.bytes, tensors=2, access="strided", axes=4,
                   flops=0.0, cols=out.cols)  # fmt: skip
    elif op.name in ("cat", "_cat", "concat") and len(out.shape) >= 4 and op.argument(1, "dim", 0) == 1:
        batch, channels = out.shape[:2]
        yield launch("copy", "channel_cat", batch=max(1, batch), channels=max(1, channels),
                     spatial=max(1, out.elements // max(1, batch * channels)), parts=max(1, len(op.inputs)),
                     layout=layout_of(out), dtype=number_format(out))  # fmt: skip
    else:
        yield vectorised("copy", "cat", out)
