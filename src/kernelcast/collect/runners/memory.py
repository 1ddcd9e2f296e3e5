"""Memory-bound ops through PyTorch: element-wise, norms, softmax, lookups, reductions, gradients, the optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernelcast.collect.pool import DTYPES, TensorSpec, Use, specs
from kernelcast.collect.runners import Launch, Recipe, Runner

aten = torch.ops.aten
_READ: tuple[Use, ...] = ("read",)


def _aten(tensors: Sequence[TensorSpec], launch: Callable[..., Launch]) -> Recipe:
    return Recipe(tensors, launch, "aten")


def _made(uses: Sequence[Use], make: Callable[..., Launch]) -> Runner:
    """Tensors of rows x cols that are read, written or changed, from which ``make`` makes a launch of a call."""

    def runner(call: Any) -> Recipe:
        shape = (call.rows, call.cols)
        return _aten([spec for use in uses for spec in specs(call.dtype, shape, use=use)], partial(make, call))

    return runner


def _of(reads: int, operation: Callable[..., object], *more: object) -> Runner:
    """f(x, …, more): PyTorch makes room for the result."""
    return _made(_READ * reads, lambda call, *tensors: partial(operation, *tensors, *more))


def _into(reads: int, operation: Callable[..., object], *more: object) -> Runner:
    """y = f(x, …, more), into memory of its own."""

    def make(call: Any, *tensors: Tensor) -> Launch:
        *inputs, y = tensors
        return partial(operation, *inputs, *more, out=y)

    return _made((*_READ * reads, "written"), make)


def _where(call: Any, x: Tensor, z: Tensor, y: Tensor) -> Launch:
    return partial(torch.where, x > 0, x, z, out=y)


def _masked_fill(call: Any, x: Tensor) -> Launch:
    return partial(torch.masked_fill, x, x > 0, 0.5)


def _dropout_backward(call: Any, x: Tensor) -> Launch:
    return partial(aten.native_dropout_backward, x, x > 0, 1.1)


def _norm(call: Any, x: Tensor) -> Launch:
    weight = torch.ones(call.cols, dtype=x.dtype, device="cuda")
    if call.op == "layernorm":
        return partial(functional.layer_norm, x, (call.cols,), weight, torch.zeros_like(weight))
    return partial(functional.rms_norm, x, (call.cols,), weight)


def _norm_after_residual(call: Any, x: Tensor, residual: Tensor) -> Launch:
    """Eager PyTorch adds in a kernel of its own."""
    norm = _norm(call, x)

    def run() -> object:
        x.add_(residual)
        return norm()

    return run


def _any_norm(call: Any) -> Recipe:
    runner = _made(("changed", "read"), _norm_after_residual) if call.residual else _made(_READ, _norm)
    return runner(call)


def _layernorm_backward(call: Any, gradient: Tensor, x: Tensor) -> Launch:
    weight, sizes = torch.ones(call.cols, dtype=x.dtype, device="cuda"), [call.cols]
    bias = torch.zeros_like(weight)
    _, mean, rstd = aten.native_layer_norm(x, sizes, weight, bias, 1e-5)
    wanted = [True, True, True]
    return partial(aten.native_layer_norm_backward, gradient, x, sizes, mean, rstd, weight, bias, wanted)


def _rmsnorm_backward(call: Any, gradient: Tensor, x: Tensor) -> Launch:
    weight, sizes = torch.ones(call.cols, dtype=x.dtype, device="cuda"), [call.cols]
    _, rstd = aten._fused_rms_norm(x, sizes, weight, 1e-5)
    return partial(aten._fused_rms_norm_backward, gradient, x, sizes, rstd, weight, [True, True])


def _softmax_backward(operation: Callable[..., object]) -> Runner:
    return _made(_READ * 2, lambda call, gradient, y: partial(operation, gradient, y, 1, y.dtype))


def _reduce(call: Any, x: Tensor) -> Launch:
    return partial(torch.sum, x, dim=0 if (call.axis or "rows") == "rows" else 1)


def _copy(call: Any, x: Tensor) -> Launch:
    return partial(x.to, DTYPES[call.to or call.dtype], copy=True)


def _embedding(call: Any) -> Recipe:
    ids = torch.randint(call.vocab, (call.tokens,), device="cuda")
    return _aten(specs(call.dtype, (call.vocab, call.hidden)), partial(partial, functional.embedding, ids))


def _embedding_backward(call: Any) -> Recipe:
    ids = torch.randint(call.vocab, (call.tokens,), device="cuda")

    def launch(gradient: Tensor) -> Launch:
        return partial(aten.embedding_dense_backward, gradient, ids, call.vocab, -1, False)

    return _aten(specs(call.dtype, (call.tokens, call.hidden)), launch)


def _pointwise(call: Any) -> Recipe:
    """An element-wise kernel whose tensors lie in different orders, or of which one is broadcast.

    ``tensors`` and ``reads`` say which: one tensor read whole lies with its heads and tokens exchanged, one read in
    part is repeated for groups of heads; beside a whole one, the second has a number for each column, row or head.
    """
    rows, cols = call.rows, call.cols
    if call.access == "cast":  # a tensor of 16 bits times one of 32: the result has 32
        return _aten((*specs("bf16", (rows, cols)), *specs("fp32", (rows, cols))), _product)
    if call.tensors == 1 and call.reads < 1:
        return _repeated(call)
    batch = 4 if call.axes == 4 else 1
    heads = math.gcd(rows // batch, 32)
    tokens = rows // heads // batch
    whole = (batch, tokens, heads, cols)  # as a projection leaves them
    if call.tensors == 1:
        wide = specs(call.dtype, (batch, tokens, heads, 2 * cols))
        return _aten(wide, lambda x: partial(torch.neg, x.transpose(1, 2)[..., :cols]))
    if call.reads >= 2:
        turned = specs(call.dtype, whole, (batch, heads, tokens, cols))
        return _aten(turned, lambda x, z: _product(x.transpose(1, 2), z))
    second, by_row = call.reads - 1, abs((call.reads - 1) * rows - 1) < 0.5
    small: tuple[int, ...] = (1, cols) if by_row else (rows, 1)
    if abs(second * heads - 1) < 0.05 and call.axes != 2:
        small = (1, tokens, 1, cols)  # positions are the same for all
    shape = (rows, cols) if len(small) == 2 else whole
    return _aten(specs(call.dtype, shape, small), _product)


def _product(x: Tensor, z: Tensor) -> Launch:
    return partial(torch.mul, x, z)


def _repeated(call: Any) -> Recipe:
    """Keys or values copied for every query head of their group: [batch, KV heads, group, tokens, size]."""
    group = round(1 / call.reads)
    heads = math.gcd(call.rows // group, 8)
    tokens = call.rows // group // heads
    repeats = (heads, group, tokens, call.cols)
    return _aten(specs(call.dtype, (heads, 1, tokens, call.cols)), lambda x: partial(_copied, x.expand(repeats)))


def _copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _cat(call: Any) -> Recipe:
    """Two halves side by side, as rotating them leaves them."""
    half = (call.rows, call.cols // 2)
    return _aten(specs(call.dtype, half, half), lambda x, z: partial(torch.cat, (x, z), dim=1))


def _transpose(call: Any) -> Recipe:
    return _aten(specs(call.dtype, (call.batch, call.rows, call.cols)), lambda x: partial(_copied, x.mT))


def _gather(call: Any) -> Recipe:
    ids = torch.randint(call.rows, (call.rows,), device="cuda")
    return _aten(specs(call.dtype, (call.rows, call.cols)), lambda x: partial(torch.index_select, x, 0, ids))


RUNNERS: Mapping[str, Runner] = {
    "pointwise": _pointwise,
    "cat": _cat,
    "transpose": _transpose,
    "gather": _gather,
    **{name: _into(2, getattr(torch, name)) for name in ("add", "mul", "sub", "div")},
    **{
        name: _into(1, getattr(torch, name))
        for name in ("tanh", "sigmoid", "exp", "sqrt", "rsqrt", "neg", "log", "sin")
    },
    "scale": _into(1, torch.mul, 1.5),
    "pow": _into(1, torch.pow, 2.7),
    "clamp": _into(1, torch.clamp, -1.0, 1.0),
    "silu": _of(1, functional.silu),
    "gelu": _of(1, functional.gelu),
    "gelu_tanh": _of(1, partial(functional.gelu, approximate="tanh")),
    "relu": _of(1, functional.relu),
    "copy": _made(_READ, _copy),
    "fill": _made(("written",), lambda call, x: partial(x.fill_, 0.5)),
    "where": _made(("read", "read", "written"), _where),
    "masked_fill": _made(_READ, _masked_fill),
    "dropout": _of(1, functional.dropout, 0.1),
    "layernorm": _any_norm,
    "rmsnorm": _any_norm,
    "softmax": _of(1, torch.softmax, 1),
    "log_softmax": _of(1, torch.log_softmax, 1),
    "reduce_sum": _made(_READ, _reduce),
    "cumsum": _of(1, torch.cumsum, 1),
    "argmax": _of(1, torch.argmax, 1),
    # of two tensors the first is the gradient
    "dropout_backward": _made(_READ, _dropout_backward),
    "layernorm_backward": _made(_READ * 2, _layernorm_backward),
    "rmsnorm_backward": _made(_READ * 2, _rmsnorm_backward),
    "softmax_backward": _softmax_backward(aten._softmax_backward_data),
    "log_softmax_backward": _softmax_backward(aten._log_softmax_backward_data),
    "silu_backward": _of(2, aten.silu_backward),
    "gelu_backward": _of(2, aten.gelu_backward),
    "gelu_tanh_backward": _of(2, partial(aten.gelu_backward, approximate="tanh")),
    "relu_backward": _of(2, aten.threshold_backward, 0),
    "tanh_backward": _of(2, aten.tanh_backward),
    "sigmoid_backward": _of(2, aten.sigmoid_backward),
    "embedding": _embedding,
    "embedding_backward": _embedding_backward,
}
