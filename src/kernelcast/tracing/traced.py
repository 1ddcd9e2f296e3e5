"""A recorded step of a PyTorch model: every ATen op with its tensors, in order. Plain values; no torch needed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

OpType = Literal["kernel", "view", "host"]  # launches a kernel; a view of the same storage; neither (empty, detach)
Phase = Literal["forward", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")

ITEM_BYTES = {
    "fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """Metadata of a tensor. ``storage`` numbers the memory: views of one tensor share it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    storage: int = -1

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def distinct(self) -> int:
        """Elements in memory: an expanded axis repeats the same ones."""
        return math.prod(size for size, step in zip(self.shape, self.stride, strict=True) if step or size == 0)

    @property
    def bytes(self) -> int:
        return self.distinct * self.item_bytes

    @property
    def dense(self) -> bool:
        """Every element once, without gaps, in some order of the axes (channels last, a transposed matrix)."""
        expected = 1
        for step, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size == 1:
                continue
            if step != expected:
                return False
            expected *= size
        return True

    @property
    def rows(self) -> int:
        """Rows of the tensor as a matrix of its last axis."""
        return self.elements // max(1, self.cols)

    @property
    def cols(self) -> int:
        return self.shape[-1] if self.shape else 1


@dataclass(frozen=True, slots=True)
class Op:
    """One call of an ATen op: ``mm``, ``add_``, ... with its arguments, tensors as ``Tensor``."""

    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    outputs: tuple[Tensor, ...]
    op_type: OpType
    phase: Phase
    module: str  # where in the model: layers.0.mlp
    at: int = 0  # calls of Python functions that the program made before it, since the step began
    recomputed: bool = False  # of the forward pass, run again in the backward pass (activation checkpointing)

    @property
    def inputs(self) -> list[Tensor]:
        """Every tensor among the arguments, lists included."""
        return list(_tensors((self.arguments, tuple(self.options.values()))))

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument given by position or by name."""
        return self.arguments[position] if position < len(self.arguments) else self.options.get(name, default)

    @property
    def in_place(self) -> bool:
        return self.name.endswith("_") and not self.name.startswith("__")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


@dataclass(frozen=True)
class Gradient:
    """A parameter's gradient: its size, and the op after which it is ready."""

    bytes: int
    elements: int
    ready: int  # index of the op in the trace


@dataclass(frozen=True)
class Footprint:
    """Bytes of one step, at its peak. Parts add up to ``peak``."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    inputs: int = 0
    activations: int = 0  # all else that lives at the peak: what backward needs, and temporaries

    @property
    def peak(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.inputs + self.activations


@dataclass(frozen=True)
class Trace:
    """One step of a model."""

    name: str
    mode: Literal["inference", "training"]
    ops: tuple[Op, ...]
    parameters: int  # number of parameters
    parameter_tensors: int
    footprint: Footprint
    gradients: tuple[Gradient, ...] = ()
    module_calls: dict[str, int] = field(default_factory=dict)  # by phase: Python's time is proportional to them
    tokens: int = 0  # that the step reads: batch x sequence, where the inputs have a sequence axis
    samples: int = 0
    python_calls: dict[str, int] = field(default_factory=dict)  # by phase: of functions, by the program itself
    built: dict[str, Any] = field(default_factory=dict)  # which class, inputs and formats, where a command chose them
    notes: tuple[str, ...] = ()  # assumptions
    tp_plan: dict[str, str] = field(default_factory=dict)  # the model's own tensor parallel plan
    unsharded: tuple[tuple[str, int], ...] = ()  # of a tensor-parallel rank: replicated modules, and their parameters
    unmasked: bool = False  # transformers left out attention masks, which it builds where a CUDA graph is captured
    nodes: int = 0  # of autograd's graph in the backward pass, those that launch nothing too
    compiled: bool = False  # its kernels are launched by what a compiler made of it
    frozen: tuple[Tensor, ...] = ()  # parameters that get no gradient (what LoRA leaves as it is)

    @property
    def kernels(self) -> list[Op]:
        return [op for op in self.ops if op.op_type == "kernel"]

    def phase(self, name: str) -> list[Op]:
        return [op for op in self.ops if op.phase == name]
