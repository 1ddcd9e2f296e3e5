"""Ops that go by an index: lookups, embedding bags, gather and scatter, sorting, histograms; forward and backward."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from kernelcast.forecast.calls import Launch
from kernelcast.tracing.aten.elementwise import copied
from kernelcast.tracing.aten.table import OpSettings, along, by_rows, launch, number_format, over, rule
from kernelcast.tracing.traced import Op, Tensor

_NARROW_BYTES = 2048  # shorter rows are copied by CTAs whose launch takes longer than their work
_UNSORTED_TOKENS = 3072  # up to this one kernel adds up the gradient of a table


@rule("embedding")
def _embedding(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """Tables of language models; narrow ones, of recommendation models, are rows picked as any others."""
    table, ids = op.arguments[:2]
    if table.cols * table.item_bytes < _NARROW_BYTES:
        yield _picked("index", table, ids.elements, table.cols, table.rows, indices=1)
    else:
        yield launch("embedding", "embedding", tokens=max(1, ids.elements), hidden=table.cols, vocab=table.rows,
                     dtype=number_format(table))  # fmt: skip


@rule("embedding_dense_backward")
def _embedding_backward(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """The kernels of embedding bags of one row, which were measured for narrow tables."""
    grad, ids, vocab = op.arguments[:3]
    if grad.cols * grad.item_bytes < _NARROW_BYTES and ids.elements > _UNSORTED_TOKENS:
        yield launch("embedding", "embedding_bag_backward", bags=ids.elements, pooling=1, hidden=grad.cols, vocab=vocab,
                     dtype=number_format(grad))  # fmt: skip
    else:
        yield launch("embedding", "embedding_backward", tokens=max(1, ids.elements), hidden=grad.cols, vocab=vocab,
                     dtype=number_format(grad))  # fmt: skip


@rule("_embedding_bag", "_embedding_bag_forward_only", "embedding_bag")
def _embedding_bag(op: Op, settings: OpSettings) -> Iterator[Launch]:
    table, ids = op.arguments[:2]
    yield _bags("embedding_bag", op, op.outputs[0], ids, table.rows, 4)


@rule("_embedding_bag_backward", "_embedding_bag_dense_backward", "_embedding_bag_sparse_backward")
def _embedding_bag_backward(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """Dense: the whole table. Sparse: the gradient of its bag for each row that was looked up."""
    grad, ids = op.arguments[:2]
    position = next(at for at, value in enumerate(op.arguments) if type(value) is int)
    sparse = "sparse" in op.name or (op.name == "_embedding_bag_backward" and bool(op.arguments[position + 3]))
    if sparse:
        yield by_rows("lookup", "gather", grad, ids.elements)
    else:
        yield _bags("embedding_bag_backward", op, grad, ids, op.arguments[position], position + 2)


def _bags(kernel: str, op: Op, bags: Tensor, ids: Tensor, vocab: int, mode_position: int) -> Launch:
    """``mode_position``: of the mode among the arguments: 0 sum, 1 mean, 2 max."""
    mode = op.arguments[mode_position] if mode_position < len(op.arguments) else 0
    count = max(1, bags.rows)
    return launch("embedding", kernel, bags=count, pooling=max(1, round(ids.elements / count)), hidden=bags.cols,
                  vocab=vocab, mode="mean" if mode == 1 else "sum", dtype=number_format(bags))  # fmt: skip


@rule("index_select", "take")
def _index_select(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """Rows along the axes after the selected axis; single elements where there are none."""
    source, out = op.arguments[0], op.outputs[0]
    cols, source_rows = 1, source.elements
    if op.name == "index_select" and source.shape:
        axis = op.arguments[1] % len(source.shape)
        cols, source_rows = math.prod(source.shape[axis + 1 :]), math.prod(source.shape[: axis + 1])
    yield _picked("index", source, out.elements // max(1, cols), cols, source_rows, indices=1)


def _picked(kernel: str, source: Tensor, rows: int, cols: int, source_rows: int, **given: Any) -> Launch:
    return by_rows("lookup", kernel, source, rows, cols, size=max(1, source_rows), **given)


def _named(x: Tensor, indices: Any, moved: Tensor) -> tuple[int, int, int, int]:
    """(rows named, columns, rows of ``x``, index tensors) of an advanced index; axes that it leaves out are columns."""
    axes = [at for at, index in enumerate(indices) if index is not None]
    source_rows = math.prod(x.shape[at] for at in axes)
    cols = max(1, x.elements // max(1, source_rows))
    return max(1, moved.elements // cols), cols, source_rows, len(axes)


@rule("index", "_unsafe_index")
def _index(op: Op, settings: OpSettings) -> Iterator[Launch]:
    source, indices = op.arguments[:2]
    rows, cols, source_rows, count = _named(source, indices, op.outputs[0])
    yield _picked("index", source, rows, cols, source_rows, indices=max(1, min(8, count)))


@rule("index_put", "_index_put_impl", "_unsafe_index_put")
def _index_put(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """Out-of-place variants copy the whole tensor first; equal indices are added up after a sort."""
    target, indices, values = op.arguments[:3]
    if not op.in_place:
        yield copied(target, op.outputs[0], "lookup")
    named = next((index for index in indices if index is not None), values)
    rows, cols, source_rows, _ = _named(target, indices, values)
    rows = max(rows, named.elements if named.dtype != "bool" else rows)  # a value may be broadcast
    yield _picked("index_put", target, rows, cols, source_rows, accumulate=bool(op.argument(3, "accumulate", False)))


@rule("index_add", "index_copy")
def _index_add(op: Op, settings: OpSettings) -> Iterator[Launch]:
    target, axis, _, source = op.arguments[:4]
    if not op.in_place:
        yield copied(target, op.outputs[0], "lookup")
    axis %= max(1, len(target.shape))
    cols = max(1, target.elements // max(1, target.shape[axis] if target.shape else 1))
    source_rows = target.shape[axis] if target.shape else 1
    kernel = "index_add" if op.name.startswith("index_add") else "index_put"
    yield _picked(kernel, target, source.elements // cols, cols, source_rows)


def _element_index(x: Tensor, axis: int, index: Tensor) -> dict[str, Any]:
    """Rows and columns of an index along the last axis, or down another; whether one serves all columns."""
    axis %= max(1, len(index.shape))
    if axis == len(index.shape) - 1 or not index.shape:
        return {"rows": max(1, index.rows), "cols": max(1, index.cols), "size": max(1, x.cols), "axis": "cols"}
    cols = max(1, math.prod(index.shape[axis + 1 :]))
    source_rows = math.prod(x.shape[: axis + 1])
    repeated = index.stride[-1] == 0 and index.shape[-1] > 1
    return {"rows": max(1, index.elements // cols), "cols": cols, "size": max(1, source_rows), "axis": "rows",
            "expanded": repeated}  # fmt: skip


@rule("gather")
def _gather(op: Op, settings: OpSettings) -> Iterator[Launch]:
    x, axis, index = op.arguments[:3]
    yield launch("lookup", "gather_elements", **_element_index(x, axis, index), dtype=number_format(x))


@rule("scatter", "scatter_add", "scatter_reduce", "scatter_value")
def _scatter(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """Out-of-place variants copy the whole tensor first; a mean counts what it adds."""
    target, axis, index = op.arguments[:3]
    if not op.in_place:
        yield copied(target, op.outputs[0], "lookup")
    adds = not op.name.startswith("scatter_value") and op.name.rstrip("_") != "scatter"
    count = 2 if "mean" in op.arguments else 1
    yield launch("lookup", "scatter_add" if adds else "scatter", count, **_element_index(target, axis, index),
                 dtype=number_format(target))  # fmt: skip


@rule("masked_select", "masked_scatter", "slice_scatter", "select_scatter", "index_fill", "nonzero", "nonzero_static")
def _one_by_one(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """Scatter elements by index; out-of-place variants copy the whole tensor first."""
    target = op.arguments[0]
    given = [x for x in op.inputs[1:] if x.dtype == target.dtype]
    moved = max(given or [op.outputs[0]], key=lambda x: x.elements)
    if op.name in ("masked_scatter", "slice_scatter", "select_scatter", "index_fill"):
        yield copied(target, op.outputs[0], "lookup")
    yield over("lookup", moved, read_bytes=moved.bytes + 8.0, tensors=2, access="strided", flops=0.0, cols=moved.cols)


@rule("topk", "kthvalue", "median")
def _topk(op: Op, settings: OpSettings) -> Iterator[Launch]:
    x = op.arguments[0]
    k = op.argument(1, "k", 1) if op.name == "topk" else 1  # a single element is selected by the same kernel
    rows, cols = along(x, op.argument(1 if op.name == "median" else 2, "dim", -1))
    yield by_rows("sort", "topk", x, rows, cols, k=max(1, min(k, cols)))


@rule("sort", "argsort", "_unique2", "unique_consecutive", "msort")
def _sort(op: Op, settings: OpSettings) -> Iterator[Launch]:
    x = op.inputs[0]
    axis = next((a for a in (*op.arguments[1:], op.options.get("dim")) if type(a) is int), -1)
    rows, cols = along(x, axis)
    keys = x.dtype if x.dtype in ("int64", "int32") else None
    if x.shape and x.stride[axis] != 1 and rows > 1 and cols > 1:  # made contiguous first
        yield copied(x, Tensor((rows, cols), (cols, 1), x.dtype), "sort")
    yield launch("sort", "sort", rows=rows, cols=cols, keys=keys, dtype="fp32" if keys else number_format(x))


@rule("searchsorted", "bucketize")
def _searchsorted(op: Op, settings: OpSettings) -> Iterator[Launch]:
    values, edges = op.arguments[:2] if op.name == "bucketize" else op.arguments[1::-1]
    elements = values.elements if isinstance(values, Tensor) else 1
    yield launch("lookup", "searchsorted", elements=max(1, elements), boundaries=max(1, edges.cols),
                 dtype=number_format(edges))  # fmt: skip


@rule("histc", "bincount", "_histogramdd_bin_edges")
def _histogram(op: Op, settings: OpSettings) -> Iterator[Launch]:
    yield launch("reduction", "histogram", elements=max(1, op.inputs[0].elements),
                 bins=max(1, op.outputs[0].elements), dtype="fp32")  # fmt: skip
