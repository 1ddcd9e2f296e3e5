"""A pass under way: how a part of a layer launches kernels, whichever part it is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kernelcast.errors import KernelcastError
from kernelcast.forecast.calls import Call, Launch
from kernelcast.hardware import kind_of
from kernelcast.inference.batch import Sizes
from kernelcast.inference.deployment import Deployment
from kernelcast.ops.dtypes import dtype
from kernelcast.ops.kernel_selection import stack_backend

_ACTIVATIONS = {
    "silu": "silu", "swiglu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh", "relu": "relu",
    # what moves as many bytes: the square of a ReLU, and gated ones whose curve differs
    "relu2": "relu", "situ": "silu", "swigluoai": "silu", "swish": "silu", "gelu_fast": "gelu_tanh",
    "quick_gelu": "gelu_tanh",
}  # fmt: skip
_PLAIN = ("add", "mul", "pointwise")  # PyTorch's own in every engine
_FOLLOWS = {"attention": "lengths", "linear attention": "lengths", "head": "sequences", "sampling": "sequences"}


class Pass:
    """One pass under way (or many of one form, with columns for sizes): the deployment's parts at hand."""

    def __init__(self, deployment: Deployment, sizes: Sizes) -> None:
        self.deployment = deployment
        self.model, self.gpu, self.stack = deployment.model, deployment.gpu, deployment.stack
        self.precision, self.layout = deployment.precision, deployment.layout
        self.sizes, self.form, self.tokens = sizes, sizes.form, sizes.tokens
        kinds = self.precision
        self.matrices, self.blocks, self.routed = (
            kinds.runs(name, self.gpu) for name in (kinds.weights, kinds.mlp_weights, kinds.expert_weights)
        )  # formats that the matrices of attention, of dense blocks and of routed experts run as

    @property
    def page_size(self) -> int:
        return self.stack.page_size if self.form.cached else 0

    def norm(self, kind: str, count: int) -> Iterator[Launch]:
        """The norm before a part; the residual is added inside it, or in a kernel of its own."""
        rows, cols = self.tokens, self.model.hidden
        if self.stack.fused_residual:
            yield from self.small("norms", kind, count, rows=rows, cols=cols, residual=True)
        else:
            yield from self.small("residual", "add", count, rows=rows, cols=cols)
            yield from self.small("norms", kind, count, rows=rows, cols=cols)

    def joined(self, count: int) -> Iterator[Launch]:
        """What follows a layer that was cut: the sum over the GPUs that cut it."""
        world = self.layout.tp
        if world == 1:
            return
        sent = self.tokens * self.model.hidden * self.precision.between_bytes
        if self.layout.sequence_parallel:
            yield self.sent("reduce_scatter", count, sent, world)
            yield self.sent("all_gather", count, sent, world)
            return
        link = kind_of(self.layout.link or self.gpu.link_kind)
        near = self.layout.near(self.gpu, world) and not link.startswith("pcie")
        own = near and self.stack.kernels != "torch"  # engines have an all-reduce of their own over NVLink
        yield self.sent("all_reduce", count, sent, world, stack=self.stack.kernels if own else "nccl")

    def product(self, part: str, count: float, m: Any, n: int, k: int, kind: str | None = None) -> Launch:
        """In the format of attention's matrices unless told otherwise."""
        kind = kind or self.matrices
        inputs = "ready" if self.stack.fused_quantisation and dtype(kind).act_bytes < 2 else None
        return self.call(part, "gemm", count, m=m, n=n, k=k, inputs=inputs, dtype=kind)

    def sent(self, op: str, count: float, sent_bytes: Any, gpus: int, **parameters: Any) -> Launch:
        """A collective among so many GPUs."""
        given = {"world": gpus, "fabric": self.layout.fabric(self.gpu, gpus), "stack": "nccl", **parameters}
        return self.call("communication", op, count, bytes=_whole(sent_bytes), dtype=self.precision.between, **given)

    def small(self, part: str, op: str, count: float = 1, **parameters: Any) -> Iterator[Launch]:
        """A vector kernel; or those that the stack runs in its place."""
        kernels = self.stack.parts(op)
        if not kernels:
            stack = "torch" if op in _PLAIN else self.stack.small_ops
            yield self.call(part, op, count, **parameters, stack=stack)
        for kernel in kernels:
            given: dict[str, Any] = {name: parameters[name] for name in ("rows", "cols") if name in parameters}
            given |= {name: self._own(name, value, parameters) for name, value in kernel.items() if name != "op"}
            yield self.call(part, kernel["op"], count, **given, stack=self.stack.small_ops)

    def activation(self, name: str) -> str:
        """The op of an activation function; where the stack runs it as several kernels, its own name."""
        if self.stack.parts(name):
            return name
        if name not in _ACTIVATIONS:
            raise KernelcastError(f"no kernel for the activation {name!r}; known: {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]

    def backend(self, op: str) -> str | None:
        """What the stack whose kernels run takes for its attention."""
        stack = self.stack.mla_kernels if op == "mla" else self.stack.kernels
        words = {"stack": stack, "dtype": self.precision.vectors, "kv_dtype": self.precision.cache}
        return stack_backend(op, words, self.gpu)

    def call(self, part: str, op: str, count: float, **parameters: Any) -> Launch:
        """A kernel of the stack, in the format of vectors unless told otherwise."""
        given = {"stack": self.stack.kernels, "dtype": self.precision.vectors, **parameters}
        return Launch(part, Call.of(op, given), float(count), _FOLLOWS.get(part, "tokens"))

    def _own(self, name: str, value: Any, parameters: Mapping[str, Any]) -> Any:
        """A parameter as it stands; a size may be a product of the op's own: "tokens*q_heads", "head_dim/2"."""
        if value == "vectors":
            return self.precision.vectors
        if name not in ("rows", "cols") or not isinstance(value, str):
            return value
        whole, _, divisor = value.partition("/")
        return math.prod(parameters[word] for word in whole.split("*")) // int(divisor or 1)


def _whole(number: Any) -> Any:
    """Without its fraction: a number, or a column."""
    return np.floor(number) if np.ndim(number) else int(number)
