"""Copies, casts, joins, lookups and scatters: ops that move numbers and compute nothing."""

from __future__ import annotations

from collections.abc import Iterator

from kernelcast.calls import Launch
from kernelcast.networks.aten.elementwise import access, axes_of, coalesced
from kernelcast.networks.aten.table import Settings, launch, number_format, pointwise, rule, split
from kernelcast.networks.traced import Op, Tensor


def copied(source: Tensor, out: Tensor, settings: Settings, part: str = "copy") -> Launch:
    """A copy: dense and alike, cast to another format, turned, or of parts."""
    way = access([source], out)
    rows, cols = split(out.elements, out.cols)
    if way == "vector" and number_format(source) == number_format(out):
        return launch(part, "copy", settings, rows=rows, cols=cols, dtype=number_format(out))
    if way == "cast" and {source.dtype, out.dtype} <= {"fp32", "bf16", "fp16"}:
        return launch(part, "copy", settings, rows=rows, cols=cols, dtype=source.dtype, to=out.dtype)
    axes = coalesced([out, source], out.shape)
    if way == "strided" and axes and axes[0][1][1] not in (0, 1) and len(axes) > 1:  # neighbours lie apart
        inner = axes[0][0]
        other = next((size for size, steps in axes if steps[1] == 1), 0)
        if other:
            return launch(part, "transpose", settings, batch=max(1, out.elements // (inner * other)), rows=inner,
                        cols=other, dtype=number_format(out))  # fmt: skip
    return pointwise(part, settings, out.elements, number_format(out), read_bytes=source.bytes, written_bytes=out.bytes,
                     tensors=1, access=None if way == "vector" else way, axes=axes_of([out, source], out.shape),
                     flops=0.0, cols=out.cols)  # fmt: skip


@rule("_to_copy", "clone", "contiguous", "copy", "_copy_from", "repeat", "roll", "flip", "rot90", "constant_pad_nd",
      "slice_backward", "select_backward", "as_strided_copy", "view_copy", "lift_fresh_copy", "diagonal_backward",
      "unfold_backward", "channel_shuffle", "pixel_shuffle", "expand_copy", "permute_copy")  # fmt: skip
def _copy(op: Op, settings: Settings) -> Iterator[Launch]:
    out = op.outputs[0]
    if op.name == "copy_":
        yield copied(op.arguments[1], out, settings)
        return
    source = op.inputs[0]
    if op.name in ("slice_backward", "select_backward", "constant_pad_nd", "diagonal_backward", "unfold_backward"):
        # the whole is filled, then the part is copied into it
        rows, cols = split(out.elements, out.cols)
        yield launch("copy", "fill", settings, rows=rows, cols=cols, dtype=number_format(out))
        part = Tensor(source.shape, _inner_strides(source, out), out.dtype)
        yield copied(source, part, settings)
        return
    yield copied(source, out, settings)


def _inner_strides(source: Tensor, out: Tensor) -> tuple[int, ...]:
    """Of the part of ``out`` that ``source`` goes to."""
    if len(source.shape) == len(out.shape):
        return out.stride
    return out.stride[-len(source.shape) :] if source.shape else ()


@rule("copy_")
def _copy_into(op: Op, settings: Settings) -> Iterator[Launch]:
    target, source = op.arguments[:2]
    yield copied(source, target, settings)


@rule("cat", "stack", "_cat", "concat")
def _cat(op: Op, settings: Settings) -> Iterator[Launch]:
    """A vectorised copy of all parts, or, where one has gaps (half of each head), an element at a time."""
    out = op.outputs[0]
    if any(not x.dense for x in op.inputs if x.elements):
        yield pointwise("copy", settings, out.elements, number_format(out), read_bytes=out.bytes, tensors=2,
                        written_bytes=out.bytes, access="strided", axes=4, flops=0.0, cols=out.cols)  # fmt: skip
        return
    rows, cols = split(out.elements, out.cols)
    yield launch("copy", "cat", settings, rows=rows, cols=cols, dtype=number_format(out))


@rule("embedding", "embedding_bag", "_embedding_bag")
def _embedding(op: Op, settings: Settings) -> Iterator[Launch]:
    table, ids = op.arguments[:2]
    yield launch("embedding", "embedding", settings, tokens=max(1, ids.elements), hidden=table.cols, vocab=table.rows,
               dtype=number_format(table))  # fmt: skip


@rule("embedding_dense_backward")
def _embedding_backward(op: Op, settings: Settings) -> Iterator[Launch]:
    grad, ids, vocab = op.arguments[:3]
    yield launch("embedding", "embedding_backward", settings, tokens=max(1, ids.elements), hidden=grad.cols,
                 vocab=vocab, dtype=number_format(grad))  # fmt: skip


@rule("index_select", "index", "_unsafe_index", "take")
def _index(op: Op, settings: Settings) -> Iterator[Launch]:
    """Whole rows are gathered; single elements are looked up one by one."""
    source, out = op.arguments[0], op.outputs[0]
    first = op.name == "index_select" or (isinstance(op.arguments[1], (tuple, list)) and len(op.arguments[1]) == 1)
    if first and len(source.shape) >= 2 and out.elements >= source.cols:
        cols = source.elements // source.shape[0] if op.name == "index" else source.cols
        yield launch("lookup", "gather", settings, rows=max(1, out.elements // cols), cols=cols,
                   dtype=number_format(source))  # fmt: skip
        return
    yield _scattered(out, settings, extra=8.0)


def _scattered(moved: Tensor, settings: Settings, extra: float) -> Launch:
    """Elements one by one, each with its index."""
    return pointwise("lookup", settings, moved.elements, number_format(moved), read_bytes=moved.bytes + extra,
                     written_bytes=moved.bytes, tensors=2, access="strided", flops=0.0, cols=moved.cols)  # fmt: skip


@rule("gather", "masked_select")
def _gather(op: Op, settings: Settings) -> Iterator[Launch]:
    yield _scattered(op.outputs[0], settings, 8.0 * op.outputs[0].elements)


@rule("index_put", "_index_put_impl", "_unsafe_index_put", "scatter", "scatter_add", "index_add", "index_copy",
      "scatter_reduce", "slice_scatter", "select_scatter", "masked_scatter", "index_fill", "scatter_value")  # fmt: skip
def _scatter(op: Op, settings: Settings) -> Iterator[Launch]:
    """Elements into their places; without the underscore into a copy of the whole."""
    target = op.arguments[0]
    given = [x for x in op.inputs[1:] if x.dtype == target.dtype]
    values = max(given, key=lambda x: x.elements, default=None) or max(op.inputs[1:], key=lambda x: x.elements)
    if not op.in_place:
        yield copied(target, op.outputs[0], settings, "lookup")
    yield _scattered(values, settings, 8.0)
