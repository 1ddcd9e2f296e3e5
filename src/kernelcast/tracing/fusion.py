"""What a compiler like TorchInductor makes of a traced step: chains of element-wise ops and reductions as one kernel.

Matrix products, attention, lookups and sorts stay as they are. An op joins a group where it reads what the group
writes, or reads the same memory, over the same elements; a norm or a softmax is a reduction and what follows it, in one
kernel a row. A fused kernel moves what crosses its boundary: it reads what others wrote, and writes what others read.
Where a group starts orders the groups: a group takes an op only when all the op reads comes from groups that started
before it, so that no two groups wait for one another.

Before that TorchInductor takes ops apart (norms of feature maps into statistics and what follows, the bias of a
convolution), and lays feature maps out channels last where it expects convolutions to gain by it (decide_layout_opt in
torch/_inductor/graph.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kernelcast.forecast.calls import Launch
from kernelcast.tracing.aten.elementwise import cost_of, kernel_name
from kernelcast.tracing.aten.products import in_format
from kernelcast.tracing.aten.table import OpSettings, number_format, pointwise, rule
from kernelcast.tracing.traced import Gradient, Op, Tensor, Trace

FUSED = "fused"
_COPIES = ("_to_copy", "clone", "copy", "copy_", "contiguous", "expand_copy", "permute_copy", "view_copy")
# Ops over rows: FLOPs and special functions of an element, the axis that is reduced.
_ROWS = {
    "native_layer_norm": (8.0, 0.0), "_fused_rms_norm": (5.0, 0.0), "rms_norm": (5.0, 0.0),
    "_softmax": (7.0, 1.0), "_safe_softmax": (7.0, 1.0), "_log_softmax": (7.0, 1.0),
    "_softmax_backward_data": (4.0, 0.0), "_log_softmax_backward_data": (4.0, 1.0),
}  # fmt: skip
_REDUCTIONS = ("sum", "mean", "amax", "amin", "var", "var_mean", "linalg_vector_norm", "logsumexp")
_NORMS = ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "cudnn_batch_norm",
          "_batch_norm_no_update")  # fmt: skip
_NORMALISE, _GROUP_NORM, _LAYER_NORM = "_native_batch_norm_legit_no_training", "native_group_norm", "native_layer_norm"
_LONGEST_ROW = (
    8192  # a longer one is split among CTAs, so that its statistics are a kernel (Reduction.num_splits in ir.py)
)
# Windows of pooling that are read where the result is needed (lowering.py falls back to PyTorch's kernel beyond).
_POOLING, _LARGEST_WINDOW = ("max_pool2d_with_indices", "avg_pool2d"), 25
# PyTorch's kernels of these do more; its copies to another memory format skip through memory, Triton's go by tiles.
_TAKEN_APART = (*_NORMS, *_POOLING, *_COPIES, "logsumexp")
_NORM_FLOPS = 4.0
# Ops whose output has the memory format of their input, beside element-wise ones and copies.
_KEEP_FORMAT = (*_NORMS, "max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "cat", "constant_pad_nd",
                "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d")  # fmt: skip
# Time of a convolution channels last over channels first, as decide_layout_opt weighs their FLOPs.
_GROUPED, _WIDENING, _SMALL, _OTHER = 1.358, 0.725, 0.783, 0.823


@dataclass(frozen=True)
class _Walk:
    """Elements and work of an op's kernel. ``cols``: of the rows that it reduces, 0 where it reduces none."""

    elements: int
    cols: int = 0
    fuses: bool = False
    flops: float = 0.0
    xu_ops: float = 0.0


@dataclass(eq=False)
class _Group:
    """Ops that become one kernel. ``cols``: of the rows that it reduces, 0 while it reduces none."""

    start: int
    elements: int
    phase: str
    fuses: bool
    cols: int = 0
    flops: float = 0.0
    xu_ops: float = 0.0
    ops: list[Op] = field(default_factory=list)
    read: dict[int, Tensor] = field(default_factory=dict)  # by storage, its largest view
    written: dict[int, Tensor] = field(default_factory=dict)

    def add(self, op: Op, walk: _Walk) -> None:
        self.ops.append(op)
        self.cols = self.cols or walk.cols
        self.flops += walk.flops
        self.xu_ops += walk.xu_ops
        for x in op.inputs:
            if x.storage not in self.written:
                self.read[x.storage] = _larger(self.read.get(x.storage), x)
        for x in op.outputs or op.inputs[:1]:
            self.written[x.storage] = _larger(self.written.get(x.storage), x)

    def absorb(self, other: _Group) -> None:
        """The ops of a group that this one alone waits for, before its own."""
        self.ops = other.ops + self.ops
        self.flops += other.flops
        self.xu_ops += other.xu_ops
        for own, others in ((self.read, other.read), (self.written, other.written)):
            own.update({storage: _larger(own.get(storage), x) for storage, x in others.items()})
        for storage in other.written.keys() - other.read.keys():
            self.read.pop(storage, None)


def _larger(known: Tensor | None, new: Tensor) -> Tensor:
    return new if known is None or new.bytes > known.bytes else known


def fuse(trace: Trace) -> Trace:
    """The step as a compiler would run it: groups of ops as single ops called ``fused``, and no Python in between."""
    groups = _grouped(replace(trace, ops=_lowered(trace)) if trace.mode == "inference" else trace)
    readers: dict[int, set[int]] = {}
    for at, group in enumerate(groups):
        for storage in group.read:
            readers.setdefault(storage, set()).add(at)
    ops = tuple(_joined(each, at, readers) if _written_anew(each) else each.ops[0] for at, each in enumerate(groups))
    at_op = {id(op): at for at, group in enumerate(groups) for op in group.ops}
    gradients = tuple(replace(each, ready=at_op[id(_writer(trace, each, at_op))]) for each in trace.gradients)
    return replace(trace, ops=ops, gradients=gradients, module_calls={}, compiled=True)


def _written_anew(group: _Group) -> bool:
    """Several ops; or one that the compiler has taken apart, of which PyTorch's kernel does more."""
    return len(group.ops) > 1 or (group.fuses and group.ops[0].name in _TAKEN_APART)


def _lowered(trace: Trace) -> tuple[Op, ...]:
    """The ops with feature maps channels last where that pays, and a convolution's bias as an op of its own."""
    apart = itertools.count(-2, -1)  # storages of what lies between the parts of an op
    ops = list(_without_statistics(_without_bias(trace.ops, apart), apart))
    if not _pays(op for op in ops if _convolves(op)):
        return tuple(ops)
    last: set[int] = set()  # storages of feature maps

    def moved(x: Tensor) -> Tensor:
        return in_format(x, last=True) if x.storage in last and len(x.shape) == 4 and x.dense else x

    for at, op in enumerate(ops):
        keeps = op.name in _KEEP_FORMAT or op.name in _COPIES or kernel_name(op) is not None
        if _convolves(op) or (keeps and any(x.storage in last for x in op.inputs)):
            last |= {x.storage for x in op.outputs[:1] if len(x.shape) == 4}
        if _convolves(op):
            last.add(op.arguments[1].storage)
        arguments, options = _mapped(op.arguments, moved), _mapped(op.options, moved)
        ops[at] = replace(op, arguments=arguments, options=options, outputs=_mapped(op.outputs, moved))
    return (*ops, *_as_eager(ops, last, apart))


def _as_eager(ops: Sequence[Op], last: Container[int], apart: Iterator[int]) -> Iterator[Op]:
    """What nobody reads is a result: it is copied to the format that the eager model gives it (keep_output_stride)."""
    read = {x.storage for op in ops for x in op.inputs}
    for op in ops:
        for x in op.outputs[:1]:
            if x.storage in last and x.storage not in read and len(x.shape) == 4:
                result = replace(in_format(x, last=False), storage=next(apart))
                yield replace(op, name="clone", arguments=(x,), options={}, outputs=(result,))


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _mapped(item, change) for name, item in value.items()}
    return type(value)(_mapped(item, change) for item in value) if isinstance(value, (list, tuple)) else value


def _convolves(op: Op) -> bool:
    """Over images, not transposed."""
    return op.name == "convolution" and len(op.outputs[0].shape) == 4 and not op.arguments[6]


def _without_bias(ops: Iterable[Op], apart: Iterator[int]) -> Iterator[Op]:
    for op in ops:
        if op.name != "convolution" or op.arguments[2] is None:
            yield op
            continue
        bias, out = op.arguments[2], op.outputs[0]
        product = replace(out, storage=next(apart))
        yield replace(op, arguments=(*op.arguments[:2], None, *op.arguments[3:]), outputs=(product,))
        yield replace(op, name="add", arguments=(product, bias), options={})


def _without_statistics(ops: Iterable[Op], apart: Iterator[int]) -> Iterator[Op]:
    """A norm with statistics of its own input reads it twice: for them, and when they are complete (decompositions of
    native_batch_norm and native_group_norm in torch/_decomp); so does one of rows that are split."""
    for op in ops:
        by_group, row = op.name == _GROUP_NORM, math.prod(op.arguments[1]) if op.name == _LAYER_NORM else 0
        if not by_group and row <= _LONGEST_ROW and not (op.name in _NORMS and any(y is True for y in op.arguments)):
            yield op
            continue
        x, weight, bias = (op.arguments[0], *op.arguments[2:4]) if row else op.arguments[:3]
        # images x groups, rows, or channels
        count = op.arguments[3] * op.arguments[6] if by_group else x.elements // row if row else x.shape[1]
        mean, variance = (Tensor((count,), (1,), "fp32", next(apart)) for _ in range(2))
        yield replace(op, name="var_mean", arguments=(x,), options={}, outputs=(variance, mean))
        yield replace(op, name=_NORMALISE, arguments=(x, weight, bias, mean, variance), options={},
                      outputs=op.outputs[:1])  # fmt: skip


def _pays(convolutions: Iterable[Op]) -> bool:
    flops = weighted = 0.0
    for op in convolutions:
        weight = op.arguments[1]
        filters, channels = weight.shape[:2]
        taken = 2.0 * op.outputs[0].elements * weight.elements / filters
        grouped = op.argument(8, "groups", 1) > 1 and channels > 1
        widening = channels > 2 and 2 * channels <= filters
        small = filters <= 64 and channels <= 64
        flops += taken
        weighted += taken * (_GROUPED if grouped else _WIDENING if widening else _SMALL if small else _OTHER)
    return 0 < weighted <= flops


def _writer(trace: Trace, gradient: Gradient, kept: Container[int]) -> Op:
    """The last op of those ``kept``, by id, that writes the gradient, or of which it is a view."""
    made = {x.storage for x in trace.ops[gradient.ready].outputs if x.elements == gradient.elements}
    before = [op for op in trace.ops[gradient.ready :: -1] if id(op) in kept]
    return next((op for op in before if made.intersection(x.storage for x in op.outputs)), before[0])


def _grouped(trace: Trace) -> list[_Group]:
    """Every kernel of the trace in a group, in the order of starts: inputs of a group are ready by then."""
    groups: list[_Group] = []
    writer: dict[int, _Group] = {}  # of a storage, the last one
    touching: dict[int, _Group] = {}  # the last group that fuses and reads it
    reading: dict[int, list[_Group]] = {}  # all that read it since it was written
    began, phase = -1, None
    for at, op in enumerate(op for op in trace.ops if op.op_type == "kernel" and not _constant(op)):
        walk, group = _walk(op), None
        if op.phase != phase:
            began, phase = at - 1, op.phase
        if walk.fuses:
            near = [
                candidate
                for x in op.inputs
                for candidate in (writer.get(x.storage), touching.get(x.storage))
                if candidate
            ]
            group = next((g for g in sorted(near, key=lambda g: -g.start) if _joins(op, walk, g, writer)), None)
        if group is None:
            # what reads nothing can run first in its phase
            group = _Group(at if op.inputs else began, walk.elements, op.phase, walk.fuses)
            groups.append(group)
        for x in op.inputs:
            before = writer.get(x.storage)
            if before and before is not group and _inlined(before, group, reading):
                group.absorb(before)
                groups.remove(before)
                writer.update({storage: group for storage in before.written if writer.get(storage) is before})
                touching.update({storage: group for storage in before.read if touching.get(storage) is before})
                for storage in before.read:
                    reading[storage] = [group if each is before else each for each in reading.get(storage, ())]
        group.add(op, walk)
        for x in op.inputs:
            reading.setdefault(x.storage, []).append(group)
        for x in op.outputs or op.inputs[:1]:
            writer[x.storage] = group
            reading[x.storage] = []
        if walk.fuses:
            touching.update(dict.fromkeys((x.storage for x in op.inputs), group))
    return sorted(groups, key=lambda group: group.start)


def _constant(op: Op) -> bool:
    """A number that the compiler writes into the code."""
    return not op.inputs and kernel_name(op) is not None and all(x.elements == 1 for x in op.outputs)


def _joins(op: Op, walk: _Walk, group: _Group, writer: dict[int, _Group]) -> bool:
    """Whether the op can run inside the group's kernel."""
    if not group.fuses or group.phase != op.phase:
        return False
    if walk.elements != group.elements and not (group.cols and walk.elements * group.cols == group.elements):
        return False  # other elements, and not one number a row of a reduction
    if walk.cols and group.cols and walk.cols != group.cols:
        return False
    if op.name in _NORMS and group.cols:
        return False  # its statistics are complete when the kernel ends that makes them
    if op.in_place and writer.get(op.inputs[0].storage) is not group:
        return False  # others may still read what it writes over
    return all(g is group or g.start < group.start for g in (writer.get(x.storage) for x in op.inputs) if g)


def _inlined(before: _Group, group: _Group, reading: Mapping[int, Sequence[_Group]]) -> bool:
    """Whether element-wise ops can run where their results are read, which nobody else has read so far."""
    alike = before.fuses and group.fuses and before.phase == group.phase and before.elements == group.elements
    if not alike or before.cols or before.start > group.start or any(op.in_place for op in before.ops):
        return False
    return all(each in (before, group) for storage in before.written for each in reading.get(storage, ()))


def _walk(op: Op) -> _Walk:
    tensors = (*op.inputs, *op.outputs)
    if op.name in _ROWS:
        x = op.inputs[0]
        axis = op.argument(1, "dim", -1) if "softmax" in op.name and op.name[-1] != "a" else -1
        cols = x.shape[axis] if isinstance(axis, int) and x.shape else x.cols
        flops, xu_ops = _ROWS[op.name]
        return _Walk(x.elements, cols, True, flops * x.elements, xu_ops * x.elements)
    if op.name in _REDUCTIONS and op.outputs and op.inputs:
        x = op.inputs[0]
        kept = max(1, op.outputs[0].elements)
        cols = x.elements // kept
        return _Walk(x.elements, cols, cols > 1 and kept * cols == x.elements, float(x.elements))
    if op.name in _NORMS and op.phase == "forward" and not any(flag is True for flag in op.arguments):
        elements = op.outputs[0].elements
        return _Walk(elements, 0, True, _NORM_FLOPS * elements)
    if op.name in _POOLING and op.phase == "forward":
        kernel = op.arguments[1]
        window = kernel[0] * kernel[-1] if isinstance(kernel, (list, tuple)) else kernel * kernel
        return _Walk(op.outputs[0].elements, 0, window <= _LARGEST_WINDOW, float(window * op.outputs[0].elements))
    name = kernel_name(op)
    if name is not None or op.name in _COPIES:
        elements = (op.outputs or op.inputs)[0].elements
        fuses = all(x.elements <= elements for x in tensors)
        flops, xu_ops = (cost_of(name).flops, cost_of(name).xu_ops) if name else (0.0, 0.0)
        return _Walk(elements, 0, fuses, flops * elements, xu_ops * elements)
    return _Walk(max((x.elements for x in tensors), default=0))


def _joined(group: _Group, at: int, readers: dict[int, set[int]]) -> Op:
    """One op that reads and writes what crosses the group's boundary."""
    last = group.ops[-1]
    inside = {x.storage for op in group.ops for x in op.inputs}  # read by the kernel itself
    first = {x.storage for op in group.ops for x in (op.outputs or op.inputs)[:1]}
    wanted = [
        x
        for storage, x in group.written.items()
        if readers.get(storage, set()) - {at} or storage in group.read
        or (storage in first and storage not in inside)
    ]  # fmt: skip
    outputs = tuple(wanted or [last.outputs[0] if last.outputs else last.inputs[0]])
    options = {name: getattr(group, name) for name in ("elements", "flops", "xu_ops", "cols")}
    options["ops"] = len(group.ops)
    return Op(FUSED, tuple(group.read.values()), options, outputs, "kernel", last.phase, last.module)


@rule(FUSED)
def _fused(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """One kernel over the group's elements, by its boundary bytes. Triton code has the address of each element."""
    largest = max((*op.inputs, *op.outputs), key=lambda x: x.bytes)
    elements, flops, xu_ops, cols = (op.options.get(name, 0) for name in ("elements", "flops", "xu_ops", "cols"))
    elements = max(1, int(elements or largest.elements))
    yield pointwise(
        "fused", elements, number_format(largest), read_bytes=boundary_bytes(op.inputs),
        written_bytes=boundary_bytes(op.outputs), flops=round(flops / elements, 3),
        xu_ops=round(xu_ops / elements, 3), cols=int(cols) or largest.cols,
    )  # fmt: skip


def boundary_bytes(tensors: Iterable[Tensor]) -> float:
    """Every storage once, however many views of it there are."""
    sizes: dict[int, int] = {}
    for x in tensors:
        sizes[x.storage] = max(sizes.get(x.storage, 0), x.bytes)
    return float(sum(sizes.values()))
