"""Tensor cores through PyTorch: matrix products by cuBLAS (cuBLASLt for fp8), attention by FlashAttention 2 and
cuDNN."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernelcast.collect.pool import TensorSpec, specs
from kernelcast.collect.runners import Launch, NotMeasurableError, Recipe, Runner

_BACKENDS = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def _precision(dtype: str) -> None:
    """Whether fp32 may be multiplied as tf32."""
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"


def gemm(call: Any) -> Recipe:
    """A [m, k] and B [k, n] are views of memory in the call's layout."""
    _precision(call.dtype)
    if call.dtype == "fp8":
        return _fp8(call)
    layout = call.layout or "tn"
    a_shape = (call.k, call.m) if layout == "nt" else (call.m, call.k)
    b_shape = (call.n, call.k) if layout == "tn" else (call.k, call.n)

    def launch(a: Tensor, b: Tensor, c: Tensor) -> Launch:
        return partial(torch.mm, a.t() if layout == "nt" else a, b.t() if layout == "tn" else b, out=c)

    product = specs(call.dtype, (call.m, call.n), use="written")
    return Recipe((*specs(call.dtype, a_shape, b_shape), *product), launch, "cublas")


def _fp8(call: Any) -> Recipe:
    scale = torch.ones((), device="cuda")

    def launch(a: Tensor, b: Tensor) -> Launch:
        return partial(torch._scaled_mm, a, b.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)

    return Recipe(specs("fp8", (call.m, call.k), (call.n, call.k)), launch, "cublaslt")


def bmm(call: Any) -> Recipe:
    _precision(call.dtype)
    factors = specs(call.dtype, (call.batch, call.m, call.k), (call.batch, call.k, call.n))
    product = specs(call.dtype, (call.batch, call.m, call.n), use="written")
    return Recipe((*factors, *product), lambda a, b, c: partial(torch.bmm, a, b, out=c), "cublas")


def _queries_keys_values(call: Any) -> tuple[TensorSpec, ...]:
    """[batch, length, heads, size] in memory, as a projection leaves them."""
    if call.backend not in _BACKENDS:
        raise NotMeasurableError(f"PyTorch has no attention backend {call.backend}; it has {', '.join(_BACKENDS)}")
    keys = (call.batch, call.kv_len, call.kv_heads or call.q_heads, call.head_dim)
    return specs(call.dtype, (call.batch, call.q_len, call.q_heads, call.head_dim), keys, keys)


def _attend(call: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shared = (call.kv_heads or call.q_heads) != call.q_heads
    with sdpa_kernel(_BACKENDS[call.backend]):
        return scaled_dot_product_attention(q, k, v, is_causal=call.causal, enable_gqa=shared)


def attention(call: Any) -> Recipe:
    def launch(*tensors: Tensor) -> Launch:
        return partial(torch.no_grad()(_attend), call, *(x.transpose(1, 2) for x in tensors))

    return Recipe(_queries_keys_values(call), launch, f"sdpa_{call.backend}")


def attention_backward(call: Any) -> Recipe:
    """One gradient of attention, through autograd, with the forward's results kept."""

    def launch(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> Launch:
        leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
        out = _attend(call, *leaves)
        return partial(torch.autograd.grad, out, leaves, gradient.transpose(1, 2), retain_graph=True)

    inputs = _queries_keys_values(call)
    return Recipe((*inputs, inputs[0]), launch, f"sdpa_{call.backend}", most_sets=16)


# ---- attention with bias, dropout or in fp32, grouped products, ops over lists of tensors, by the backends' own ops


aten = torch.ops.aten
_DROPPED = 0.125  # cuDNN takes sixteenths
_STEP = 16  # elements: rows of a bias start at multiples for the memory-efficient kernel, else PyTorch copies it
_LISTS = {"zero": 1, "scale": 1, "sqrt": 1, "norm": 1, "copy": 2, "add": 2, "mul": 2, "div": 2, "lerp": 2,
          "addcmul": 3, "addcdiv": 3}  # fmt: skip


def _bias_shape(call: Any) -> tuple[int, int, int, int]:
    """[batch, heads, queries, keys], 1 along the axes that it has not; rows padded."""
    keys = -(-call.kv_len // _STEP) * _STEP if call.backend == "efficient" else call.kv_len
    batch, heads, queries = call.batch, call.q_heads, call.q_len
    return {
        "full": (batch, heads, queries, keys), "heads": (1, heads, queries, keys), "batch": (batch, 1, queries, keys),
        "shared": (1, 1, queries, keys), "keys": (batch, 1, 1, keys),
    }[call.bias]  # fmt: skip


def _tensors(call: Any) -> tuple[Any, ...]:
    """Q, K and V, [batch, length, heads, size] in memory as a projection leaves them; the bias."""
    keys = (call.batch, call.kv_len, call.kv_heads or call.q_heads, call.head_dim)
    inputs = specs(call.dtype, (call.batch, call.q_len, call.q_heads, call.head_dim), keys, keys)
    return inputs if call.bias == "none" else (*inputs, *specs(call.dtype, _bias_shape(call)))


def _forward(call: Any, tensors: tuple[Tensor, ...], keep: bool) -> Callable[[], Any]:
    """The op of the backend; ``keep``: with the log-sums that a backward pass needs."""
    q, k, v = (x.transpose(1, 2) for x in tensors[:3])
    bias, dropped = _bias(call, tensors), _DROPPED if call.dropout else 0.0
    if call.backend == "cudnn":
        return partial(aten._scaled_dot_product_cudnn_attention, q, k, v, bias, keep, dropped, call.causal, False)
    if call.backend == "fa2":
        return partial(aten._scaled_dot_product_flash_attention, q, k, v, dropped, call.causal, False)
    return partial(aten._scaled_dot_product_efficient_attention, q, k, v, bias, keep, dropped, call.causal)


def _bias(call: Any, tensors: tuple[Tensor, ...]) -> Tensor | None:
    if call.bias == "none":
        return None
    bias = tensors[3][..., : call.kv_len]
    heads = bias.shape[:2] if call.backend == "cudnn" else (call.batch, call.q_heads)
    return bias.expand(*heads, call.q_len, call.kv_len)


def masked_attention(call: Any) -> Recipe:
    def launch(*tensors: Tensor) -> Launch:
        return torch.no_grad()(_forward(call, tensors, call.dropout))

    return Recipe(_tensors(call), launch, f"sdpa_{call.backend}")


def masked_attention_backward(call: Any) -> Recipe:
    def launch(*tensors: Tensor) -> Launch:
        with torch.no_grad():
            kept = _forward(call, tensors, True)()
        return torch.no_grad()(_backward(call, tensors, kept))

    inputs = _tensors(call)
    return Recipe((*inputs, inputs[0]), launch, f"sdpa_{call.backend}", most_sets=16)


def _backward(call: Any, tensors: tuple[Tensor, ...], kept: Any) -> Launch:
    *inputs, gradient = tensors
    q, k, v, dy = (x.transpose(1, 2) for x in (*inputs[:3], gradient))
    bias, dropped = _bias(call, tuple(inputs)), _DROPPED if call.dropout else 0.0
    if call.backend == "efficient":
        out, sums, seed, offset = kept[:4]
        wanted, state = [True, True, True, call.bias_gradient], _random_state(seed, offset)
        return lambda: aten._scaled_dot_product_efficient_attention_backward(
            dy, q, k, v, bias, out, sums, *state(), dropped, wanted, call.causal
        )
    out, sums, cum_q, cum_k, max_q, max_k, seed, offset = kept[:8]
    state = _random_state(seed, offset)
    if call.backend == "fa2":
        return lambda: aten._scaled_dot_product_flash_attention_backward(
            dy, q, k, v, out, sums, cum_q, cum_k, max_q, max_k, dropped, call.causal, *state()
        )
    return lambda: aten._scaled_dot_product_cudnn_attention_backward(
        dy, q, k, v, out, sums, *state(), bias, cum_q, cum_k, max_q, max_k, dropped, call.causal
    )


def _random_state(*state: Tensor | None) -> Callable[[], tuple[Tensor | None, ...]]:
    """Where the random numbers stand: read by the host, unless a graph is captured, whose kernels read them."""
    there = tuple(None if x is None else x.to("cuda") for x in state)
    return lambda: there if torch.cuda.is_current_stream_capturing() else state


def _offsets(rows: int, groups: int) -> Tensor:
    """Where groups of rows of random sizes end."""
    counts = torch.bincount(torch.randint(groups, (rows,)), minlength=groups)
    return counts.cumsum(0).to(torch.int32).to("cuda")


def grouped_mm(call: Any) -> Recipe:
    offsets = _offsets(call.rows, call.groups)
    layout = call.layout or "tn"
    second_shapes = {  # of nt: [k, rows] by [rows, n]
        "nt": (call.rows, call.n), "tn": (call.groups, call.n, call.k), "nn": (call.groups, call.k, call.n),
    }  # fmt: skip

    def launch(a: Tensor, b: Tensor) -> Launch:
        first, second = a.t() if layout == "nt" else a, b.transpose(-2, -1) if layout == "tn" else b
        return partial(torch._grouped_mm, first, second, offs=offsets)

    return Recipe(specs(call.dtype, (call.rows, call.k), second_shapes[layout]), launch, "cutlass")


def foreach(call: Any) -> Recipe:
    """Lists of equal tensors that lie one after another; the first is changed."""
    each = call.elements // call.tensors
    shape = (call.tensors, each)
    count = _LISTS[call.function]
    reads = specs(call.dtype, *[shape] * (count - 1))
    first = specs(call.to or call.dtype, shape, use="changed")

    def launch(*tensors: Tensor) -> Launch:
        return _list_op(call.function, [list(x.unbind()) for x in tensors])

    return Recipe((*first, *reads), launch, "aten", most_sets=64)


def _list_op(function: str, lists: list[list[Tensor]]) -> Launch:
    first = lists[0]
    if function in ("scale", "norm", "sqrt", "zero"):
        more = {"scale": (0.999,), "norm": (2,)}.get(function, ())
        name = {"scale": "mul_", "zero": "zero_"}.get(function, function)
        return partial(getattr(torch, f"_foreach_{name}"), first, *more)
    weight = {"lerp": (0.1,), "addcmul": (1e-3,), "addcdiv": (1e-3,)}.get(function, ())
    return partial(getattr(torch, f"_foreach_{function}_"), *lists, *weight)


def adamw(call: Any) -> Recipe:
    """Parameters, gradients and both moments, each a list of equal tensors that lie one after another."""
    shape = (call.tensors, call.elements // call.tensors)
    steps = [torch.ones((), device="cuda") for _ in range(call.tensors)]

    def launch(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> Launch:
        v.abs_()
        lists = [list(x.unbind()) for x in (p, g, m, v)]
        return partial(
            torch._fused_adamw_, *lists, [], steps, lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    states = specs(call.state_dtype or call.dtype, shape, shape, use="changed")
    return Recipe(
        (*specs(call.dtype, shape, use="changed"), *specs(call.dtype, shape), *states),
        launch,
        "aten",
        most_sets=64,
    )


def sgd(call: Any) -> Recipe:
    shape = (call.tensors, call.elements // call.tensors)

    def launch(p: Tensor, g: Tensor, *buffer: Tensor) -> Launch:
        lists = [list(x.unbind()) for x in (p, g)]
        momenta = list(buffer[0].unbind()) if buffer else []
        return partial(
            torch._fused_sgd_, *lists, momenta, weight_decay=1e-4, momentum=0.9 if buffer else 0.0, lr=1e-3,
            dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
        )  # fmt: skip

    changed = specs(call.dtype, shape, use="changed")
    buffers = changed if call.momentum else ()
    return Recipe((*changed, *specs(call.dtype, shape), *buffers), launch, "aten", most_sets=64)


RUNNERS: Mapping[str, Runner] = {
    "gemm": gemm,
    "bmm": bmm,
    "attention": attention,
    "attention_backward": attention_backward,
    "adamw": adamw,
    "sgd": sgd,
    "masked_attention": masked_attention,
    "masked_attention_backward": masked_attention_backward,
    "grouped_mm": grouped_mm,
    "foreach": foreach,
}
