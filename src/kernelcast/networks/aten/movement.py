"""Copies, casts and joins: ops that move numbers and compute nothing."""

from __future__ import annotations

from collections.abc import Iterator

from kernelcast.calls import Launch
from kernelcast.networks.aten.elementwise import access, axes_of, turned
from kernelcast.networks.aten.table import Settings, number_format, over, rule, vectorised
from kernelcast.networks.traced import Op, Tensor


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


def made_contiguous(x: Tensor, part: str) -> Iterator[Launch]:
    """The copy that kernels make of what they read in order of the axes, where it does not lie so."""
    steps, step = [], 1
    for size in reversed(x.shape):
        steps.append(step)
        step *= size
    wanted = tuple(reversed(steps))
    if any(a != b and size > 1 for a, b, size in zip(x.stride, wanted, x.shape, strict=True)):
        yield copied(x, Tensor(x.shape, wanted, x.dtype), part)


@rule("_to_copy", "clone", "contiguous", "copy", "_copy_from", "repeat", "flip", "rot90", "as_strided_copy",
      "view_copy", "lift_fresh_copy", "channel_shuffle", "pixel_shuffle", "pixel_unshuffle",
      "expand_copy", "permute_copy")  # fmt: skip
def _copy(op: Op, settings: Settings) -> Iterator[Launch]:
    yield copied(op.inputs[0], op.outputs[0])


@rule("slice_backward", "select_backward", "diagonal_backward", "unfold_backward")
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


@rule("cat", "stack", "_cat", "concat")
def _cat(op: Op, settings: Settings) -> Iterator[Launch]:
    """A vectorised copy of all parts, or, where one has gaps (half of each head), an element at a time."""
    out = op.outputs[0]
    if any(not x.dense for x in op.inputs if x.elements):
        yield over("copy", out, read_bytes=out.bytes, written_bytes=out.bytes, tensors=2, access="strided", axes=4,
                   flops=0.0, cols=out.cols)  # fmt: skip
    else:
        yield vectorised("copy", "cat", out)
