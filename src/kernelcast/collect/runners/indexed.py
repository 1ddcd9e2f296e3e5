"""Ops by an index through PyTorch: embedding bags, gather, scatter, advanced indexing, sort, topk, histograms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernelcast.collect.pool import MOST_SETS, TensorSpec, specs
from kernelcast.collect.runners import Launch, Recipe, Runner

_FEW_SETS = 64  # of calls that launch ten kernels and more: a graph of thousands takes longer to make than to run
_ROTATED_BYTES = 150e6  # of indices, which each set has of its own: about 2.5 times an L2


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _index(places: int, *shape: int) -> Tensor:
    return torch.randint(places, shape, device=_device())


def _recipe(
    tensors: Sequence[TensorSpec], launch: Callable[..., Launch], indices: int, most: int = MOST_SETS
) -> Recipe:
    """``indices``: int64 numbers that each set makes for itself."""
    bytes_of_a_set = 8 * indices + sum(spec.bytes for spec in tensors)
    sets = max(2, min(most, math.ceil(_ROTATED_BYTES / bytes_of_a_set)))
    return Recipe(tensors, launch, "aten", sets)


def _bags(call: Any) -> tuple[Tensor, Tensor]:
    count = call.bags * call.pooling
    return _index(call.vocab, count), torch.arange(0, count, call.pooling, device=_device())


def _embedding_bag(call: Any) -> Recipe:
    def launch(table: Tensor) -> Launch:
        ids, starts = _bags(call)
        return partial(torch.no_grad()(functional.embedding_bag), ids, table, starts, mode=call.mode)

    return _recipe(specs(call.dtype, (call.vocab, call.hidden)), launch, call.bags * call.pooling)


def _embedding_bag_backward(call: Any) -> Recipe:
    """One gradient of the table, through autograd; a small table is kept between sets, as nothing reads it."""

    def launch(table: Tensor, gradient: Tensor) -> Launch:
        ids, starts = _bags(call)
        leaf = table.detach().requires_grad_()
        bags = functional.embedding_bag(ids, leaf, starts, mode=call.mode)
        return partial(torch.autograd.grad, bags, leaf, gradient, retain_graph=True)

    tensors = specs(call.dtype, (call.vocab, call.hidden), (call.bags, call.hidden))
    return _recipe(tensors, launch, 3 * call.bags * call.pooling, _FEW_SETS)


def _element_index(call: Any) -> tuple[Tensor, int]:
    """An index of rows x cols, perhaps one a row; and its axis."""
    if call.expanded:
        return _index(call.size, call.rows, 1).expand(call.rows, call.cols), 0 if call.axis == "rows" else 1
    return _index(call.size, call.rows, call.cols), 0 if call.axis == "rows" else 1


def _indexed_by(call: Any) -> tuple[int, int]:
    """The tensor that the index is of."""
    return (call.size, call.cols) if call.axis == "rows" else (call.rows, call.size)


def _count(call: Any) -> int:
    return int(call.rows if call.expanded else call.rows * call.cols)


def _gather_elements(call: Any) -> Recipe:
    def launch(x: Tensor) -> Launch:
        index, axis = _element_index(call)
        return partial(torch.gather, x, axis, index)

    return _recipe(specs(call.dtype, _indexed_by(call)), launch, _count(call))


def _scatter(call: Any) -> Recipe:
    def launch(target: Tensor, source: Tensor) -> Launch:
        index, axis = _element_index(call)
        return partial(target.scatter_add_ if call.op == "scatter_add" else target.scatter_, axis, index, source)

    target = specs(call.dtype, _indexed_by(call), use="changed")
    return _recipe((*target, *specs(call.dtype, (call.rows, call.cols))), launch, _count(call))


def _index_rows(call: Any) -> Recipe:
    if call.indices == 1:
        shapes = [(call.size, call.cols)]
        places = [call.size]
    else:  # the rows as a grid that as many indices name
        side = max(1, round(call.size ** (1 / call.indices)))
        places = [*[side] * (call.indices - 1), max(1, call.size // side ** (call.indices - 1))]
        shapes = [(*places, call.cols)]

    def launch(x: Tensor) -> Launch:
        indices = tuple(_index(count, call.rows) for count in places)
        return partial(torch.Tensor.__getitem__, x, indices)

    return _recipe(specs(call.dtype, *shapes), launch, call.rows * call.indices)


def _index_add(call: Any) -> Recipe:
    def launch(target: Tensor, source: Tensor) -> Launch:
        return partial(target.index_add_, 0, _index(call.size, call.rows), source)

    return _rows_into(call, launch)


def _index_put(call: Any) -> Recipe:
    def launch(target: Tensor, source: Tensor) -> Launch:
        return partial(target.index_put_, (_index(call.size, call.rows),), source, accumulate=call.accumulate)

    return _rows_into(call, launch)


def _rows_into(call: Any, launch: Callable[..., Launch]) -> Recipe:
    target = specs(call.dtype, (call.size, call.cols), use="changed")
    many = call.op == "index_put" and call.accumulate
    return _recipe(
        (*target, *specs(call.dtype, (call.rows, call.cols))),
        launch,
        call.rows,
        _FEW_SETS if many else MOST_SETS,
    )


def _sort(call: Any) -> Recipe:
    shape = (call.rows, call.cols)
    if call.keys is None:
        return _recipe(specs(call.dtype, shape), lambda x: partial(torch.sort, x, dim=1), 0, _FEW_SETS)
    whole = torch.int64 if call.keys == "int64" else torch.int32
    most = max(2, min(2**31 - 1, call.rows * call.cols))  # as ids of experts, tokens or nodes are

    def launch(x: Tensor) -> Launch:
        return partial(torch.sort, torch.randint(most, shape, dtype=whole, device=_device()), dim=1)

    return _recipe(specs("fp32", (1,)), launch, call.rows * call.cols, _FEW_SETS)


def _topk(call: Any) -> Recipe:
    shape = (call.rows, call.cols)
    return _recipe(specs(call.dtype, shape), lambda x: partial(torch.topk, x, call.k, dim=1), 0, _FEW_SETS)


def _searchsorted(call: Any) -> Recipe:
    edges = torch.linspace(-3, 3, call.boundaries, device=_device())

    def launch(x: Tensor) -> Launch:
        return partial(torch.bucketize, x, edges.to(x.dtype))

    return _recipe(specs(call.dtype, (call.elements,)), launch, 0)


def _histogram(call: Any) -> Recipe:
    return _recipe(
        specs(call.dtype, (call.elements,)), lambda x: partial(torch.histc, x, bins=call.bins, min=-3, max=3), 0
    )


RUNNERS: Mapping[str, Runner] = {
    "embedding_bag": _embedding_bag,
    "embedding_bag_backward": _embedding_bag_backward,
    "gather_elements": _gather_elements,
    "scatter": _scatter,
    "scatter_add": _scatter,
    "index": _index_rows,
    "index_add": _index_add,
    "index_put": _index_put,
    "sort": _sort,
    "topk": _topk,
    "searchsorted": _searchsorted,
    "histogram": _histogram,
}
