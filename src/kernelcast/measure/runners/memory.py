"""Memory-bound ops through PyTorch: element-wise, norms, softmax, lookups, reductions, gradients, the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernelcast.measure.pool import DTYPES, Pool, Use, specs
from kernelcast.measure.runners import Prepared, Runner

Make = Callable[..., Callable[[], object]]
aten = torch.ops.aten


def _over(uses: Sequence[Use], make: Make, source: str = "aten") -> Runner:
    """Tensors of rows x cols that are read, written or changed, from which ``make`` makes a launch."""

    def runner(call: Any, pool: Pool) -> Prepared:
        shape = (call.rows, call.cols)
        tensors = [spec for use in uses for spec in specs(call.dtype, shape, use=use)]
        return Prepared([make(call, *members) for members in pool.sets(*tensors)], source)

    return runner


_ONE: Sequence[Use] = ("read",)
_TWO: Sequence[Use] = ("read", "read")
_ONE_OUT: Sequence[Use] = ("read", "written")
_TWO_OUT: Sequence[Use] = ("read", "read", "written")


def _unary(name: str) -> Runner:
    """y = f(x), into memory of its own."""
    operation = getattr(torch, name)
    return _over(_ONE_OUT, lambda call, x, y: lambda: operation(x, out=y))


def _binary(name: str) -> Runner:
    operation = getattr(torch, name)
    return _over(_TWO_OUT, lambda call, x, z, y: lambda: operation(x, z, out=y))


def _chosen(call: Any, x: Tensor, z: Tensor, y: Tensor) -> Callable[[], object]:
    mask = x > 0
    return lambda: torch.where(mask, x, z, out=y)


def _masked(call: Any, x: Tensor) -> Callable[[], object]:
    mask = x > 0
    return lambda: x.masked_fill(mask, 0.5)


def _norm(kind: str) -> Make:
    def make(call: Any, x: Tensor) -> Callable[[], object]:
        weight = torch.ones(call.cols, dtype=x.dtype, device="cuda")
        bias = torch.zeros_like(weight)
        if kind == "layernorm":
            return lambda: functional.layer_norm(x, (call.cols,), weight, bias)
        return lambda: functional.rms_norm(x, (call.cols,), weight)

    return make


def _with_residual(kind: str) -> Runner:
    """A norm, after the residual is added where the call says so (eager PyTorch adds in a kernel of its own)."""

    def runner(call: Any, pool: Pool) -> Prepared:
        if not getattr(call, "residual", False):
            return _over(_ONE, _norm(kind))(call, pool)

        def make(call: Any, x: Tensor, r: Tensor) -> Callable[[], object]:
            norm = _norm(kind)(call, x)

            def run() -> object:
                x.add_(r)
                return norm()

            return run

        return _over(("changed", "read"), make)(call, pool)

    return runner


def _norm_backward(kind: str) -> Make:
    def make(call: Any, x: Tensor, grad: Tensor) -> Callable[[], object]:
        weight = torch.ones(call.cols, dtype=x.dtype, device="cuda")
        if kind == "layernorm":
            bias = torch.zeros_like(weight)
            _, mean, rstd = aten.native_layer_norm(x, [call.cols], weight, bias, 1e-5)
            return lambda: aten.native_layer_norm_backward(
                grad, x, [call.cols], mean, rstd, weight, bias, [True, True, True]
            )
        _, rstd = aten._fused_rms_norm(x, [call.cols], weight, 1e-5)
        return lambda: aten._fused_rms_norm_backward(grad, x, [call.cols], rstd, weight, [True, True])

    return make


def _softmax_backward(log: bool) -> Make:
    operation = aten._log_softmax_backward_data if log else aten._softmax_backward_data

    def make(call: Any, y: Tensor, grad: Tensor) -> Callable[[], object]:
        return lambda: operation(grad, y, 1, y.dtype)

    return make


def _reduce(call: Any, x: Tensor) -> Callable[[], object]:
    away = 0 if (call.axis or "rows") == "rows" else 1
    return lambda: torch.sum(x, dim=away)


def _embedding(call: Any, pool: Pool) -> Prepared:
    ids = torch.randint(call.vocab, (call.tokens,), device="cuda")
    sets = pool.sets(*specs(call.dtype, (call.vocab, call.hidden)))
    return Prepared([partial(functional.embedding, ids, table) for (table,) in sets], "aten")


def _embedding_backward(call: Any, pool: Pool) -> Prepared:
    ids = torch.randint(call.vocab, (call.tokens,), device="cuda")
    sets = pool.sets(*specs(call.dtype, (call.tokens, call.hidden)))
    return Prepared(
        [partial(aten.embedding_dense_backward, grad, ids, call.vocab, -1, False) for (grad,) in sets], "aten"
    )


def _adamw(call: Any, pool: Pool) -> Prepared:
    state = call.state_dtype or call.dtype
    shape = (call.elements,)
    steps = torch.ones((), device="cuda")
    launches = []
    gradient = specs(call.dtype, shape)
    states = specs(state, shape, shape, use="changed")
    for p, g, m, v in pool.sets(*specs(call.dtype, shape, use="changed"), *gradient, *states):
        v.abs_()

        step = partial(
            torch._fused_adamw_, [p], [g], [m], [v], [], [steps], lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.01,
            eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        launches.append(step)
    return Prepared(launches, "aten")


def _copy(call: Any, x: Tensor) -> Callable[[], object]:
    to = DTYPES[getattr(call, "to", None) or call.dtype]
    return lambda: x.to(to, copy=True)


def _pointwise(call: Any, pool: Pool) -> Prepared:
    """An element-wise kernel whose tensors lie in different orders, or of which one is broadcast.

    ``tensors`` and ``reads`` say which: one tensor read whole lies with its heads and tokens exchanged, one read in
    part is repeated for groups of heads; beside a whole one, the second has a number for each column, row or head.
    """
    if call.access == "cast":
        return _mixed(call, pool)
    rows, cols = call.rows, call.cols
    if call.tensors == 1 and call.reads < 1:
        return _repeated(call, pool)
    batch = 4 if call.axes == 4 else 1
    heads = next(h for h in (32, 16, 8, 4, 2, 1) if rows % (h * batch) == 0)
    tokens = rows // heads // batch
    whole = (batch, tokens, heads, cols)  # as a projection leaves them
    if call.tensors == 1:
        sets = pool.sets(*specs(call.dtype, (batch, tokens, heads, 2 * cols)))
        return Prepared([partial(torch.neg, x.transpose(1, 2)[..., :cols]) for (x,) in sets], "aten")
    if call.reads >= 2:
        sets = pool.sets(*specs(call.dtype, whole, (batch, heads, tokens, cols)))
        return Prepared([partial(torch.mul, x.transpose(1, 2), z) for x, z in sets], "aten")
    second, by_row = call.reads - 1, abs((call.reads - 1) * rows - 1) < 0.5
    small: tuple[int, ...] = (1, cols) if by_row else (rows, 1)
    if abs(second * heads - 1) < 0.05 and call.axes != 2:
        small = (batch, tokens, 1, cols) if batch == 1 else (1, tokens, 1, cols)  # positions are the same for all
    shape = (rows, cols) if len(small) == 2 else whole
    sets = pool.sets(*specs(call.dtype, shape, small))
    return Prepared([partial(torch.mul, x, z) for x, z in sets], "aten")


def _repeated(call: Any, pool: Pool) -> Prepared:
    """Keys or values copied for every query head of their group: [batch, KV heads, group, tokens, size]."""
    group = round(1 / call.reads)
    tokens = call.rows // group
    heads = next(h for h in (8, 4, 2, 1) if tokens % h == 0)
    shape = (heads, 1, tokens // heads, call.cols)
    sets = pool.sets(*specs(call.dtype, shape))
    return Prepared([partial(_copied, x.expand(heads, group, tokens // heads, call.cols)) for (x,) in sets], "aten")


def _copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _mixed(call: Any, pool: Pool) -> Prepared:
    """A tensor of 16 bits times one of 32: the result has 32."""
    shape = (call.rows, call.cols)
    sets = pool.sets(*specs("bf16", shape), *specs("fp32", shape))
    return Prepared([partial(torch.mul, x, z) for x, z in sets], "aten")


def _cat(call: Any, pool: Pool) -> Prepared:
    """Two halves side by side, as rotating them leaves them."""
    half = (call.rows, call.cols // 2)
    sets = pool.sets(*specs(call.dtype, half, half))
    return Prepared([partial(torch.cat, (x, z), dim=1) for x, z in sets], "aten")


def _transpose(call: Any, pool: Pool) -> Prepared:
    sets = pool.sets(*specs(call.dtype, (call.batch, call.rows, call.cols)))
    return Prepared([partial(_copied, x.mT) for (x,) in sets], "aten")


def _gather(call: Any, pool: Pool) -> Prepared:
    ids = torch.randint(call.rows, (call.rows,), device="cuda")
    sets = pool.sets(*specs(call.dtype, (call.rows, call.cols)))
    return Prepared([partial(torch.index_select, x, 0, ids) for (x,) in sets], "aten")


def _dropout_backward(call: Any, x: Tensor) -> Callable[[], object]:
    mask = x > 0
    return lambda: aten.native_dropout_backward(x, mask, 1.1)


RUNNERS: Mapping[str, Runner] = {
    "pointwise": _pointwise,
    "cat": _cat,
    "transpose": _transpose,
    "gather": _gather,
    "dropout_backward": _over(_ONE, _dropout_backward),
    **{name: _binary(name) for name in ("add", "mul", "sub", "div")},
    **{name: _unary(name) for name in ("tanh", "sigmoid", "exp", "sqrt", "rsqrt", "neg", "log", "sin")},
    "scale": _over(_ONE_OUT, lambda call, x, y: lambda: torch.mul(x, 1.5, out=y)),
    "pow": _over(_ONE_OUT, lambda call, x, y: lambda: torch.pow(x, 2.7, out=y)),
    "clamp": _over(_ONE_OUT, lambda call, x, y: lambda: torch.clamp(x, -1.0, 1.0, out=y)),
    "silu": _over(_ONE, lambda call, x: lambda: functional.silu(x)),
    "gelu": _over(_ONE, lambda call, x: lambda: functional.gelu(x)),
    "gelu_tanh": _over(_ONE, lambda call, x: lambda: functional.gelu(x, approximate="tanh")),
    "relu": _over(_ONE, lambda call, x: lambda: functional.relu(x)),
    "copy": _over(_ONE, _copy),
    "fill": _over(("written",), lambda call, x: lambda: x.fill_(0.5)),
    "where": _over(_TWO_OUT, _chosen),
    "masked_fill": _over(_ONE, _masked),
    "dropout": _over(_ONE, lambda call, x: lambda: functional.dropout(x, 0.1)),
    "layernorm": _with_residual("layernorm"),
    "rmsnorm": _with_residual("rmsnorm"),
    "softmax": _over(_ONE, lambda call, x: lambda: torch.softmax(x, dim=1)),
    "log_softmax": _over(_ONE, lambda call, x: lambda: torch.log_softmax(x, dim=1)),
    "layernorm_backward": _over(_TWO, _norm_backward("layernorm")),
    "rmsnorm_backward": _over(_TWO, _norm_backward("rmsnorm")),
    "softmax_backward": _over(_TWO, _softmax_backward(log=False)),
    "log_softmax_backward": _over(_TWO, _softmax_backward(log=True)),
    "silu_backward": _over(_TWO, lambda call, x, g: lambda: aten.silu_backward(g, x)),
    "gelu_backward": _over(_TWO, lambda call, x, g: lambda: aten.gelu_backward(g, x)),
    "gelu_tanh_backward": _over(_TWO, lambda call, x, g: lambda: aten.gelu_backward(g, x, approximate="tanh")),
    "relu_backward": _over(_TWO, lambda call, x, g: lambda: aten.threshold_backward(g, x, 0)),
    "tanh_backward": _over(_TWO, lambda call, x, g: lambda: aten.tanh_backward(g, x)),
    "sigmoid_backward": _over(_TWO, lambda call, x, g: lambda: aten.sigmoid_backward(g, x)),
    "reduce_sum": _over(_ONE, _reduce),
    "cumsum": _over(_ONE, lambda call, x: lambda: torch.cumsum(x, dim=1)),
    "argmax": _over(_ONE, lambda call, x: lambda: torch.argmax(x, dim=1)),
    "embedding": _embedding,
    "embedding_backward": _embedding_backward,
    "adamw": _adamw,
}
