"""A torch.profiler trace -> measured calls: kernels joined to the ATen ops that launched them, ops to kernel calls."""

from __future__ import annotations

import ast
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from kernelcast.diagnose.chrome_events import DEVICE, HOST, Event, arg, launch_config, shape_text, short_name
from kernelcast.diagnose.kernel_names import FUSIBLE_CATEGORIES, parse_kernel_name
from kernelcast.diagnose.measured import MeasuredCall, MeasuredKernel, Profile
from kernelcast.errors import KernelcastError
from kernelcast.forecast.calls import Launch
from kernelcast.hardware import Gpu
from kernelcast.tracing.aten import OpSettings, known_ops, op_launches
from kernelcast.tracing.aten.outputs import outputs_of
from kernelcast.tracing.aten.table import pointwise
from kernelcast.tracing.traced import Op, Tensor

NO_SHAPES = "the trace has no shapes: record it with record_shapes=True"
NO_OP = "no op of the trace launched it (a CUDA graph, or a library that PyTorch does not see)"
TO_HOST = "a copy between host and GPU is no kernel"
# Ops whose arguments are in another order than those of the op that calls them
_INNER = {"cudnn_convolution", "cudnn_convolution_transpose"}
# A lookup of whole rows, which the inner op describes as a lookup of single elements
_ROWS = {"gather": ("aten::index_select", "aten::embedding")}
# The library is in the op's name; the table of ops takes the library that PyTorch would prefer
_BACKENDS = {
    "_scaled_dot_product_flash_attention": "fa2",
    "_scaled_dot_product_efficient_attention": "fa2",
    "_scaled_dot_product_cudnn_attention": "cudnn",
}
_MARKS = 4  # annotations that a call keeps
# at::ScalarType's C++ names
_FORMATS = {
    "float": "fp32", "double": "fp64", "c10::BFloat16": "bf16", "c10::Half": "fp16", "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8", "long int": "int64", "long": "int64", "int": "int32", "short": "int16",
    "short int": "int16", "signed char": "int8", "unsigned char": "uint8", "bool": "bool",
    "c10::complex<float>": "complex64", "c10::complex<double>": "complex128",
}  # fmt: skip
_OPAQUE = re.compile(r"OpaqueType<(\d+)")
_BY_BYTES = {1: "int8", 2: "bf16", 4: "fp32", 8: "int64"}
_MIN_CHAIN = 2  # kernels of a fusible sequence


def gpu_name(trace: dict[str, Any]) -> str:
    """The GPU that the trace says it ran on, "" where it does not."""
    devices = trace.get("deviceProperties")
    return str(devices[0].get("name", "")) if isinstance(devices, list) and devices else ""


def profile_of(trace: dict[str, Any], gpu: Gpu) -> Profile:
    """The measured calls of a trace. ``gpu``: its generation decides which kernels an op launches."""
    events = [event for event in trace["traceEvents"] if isinstance(event, dict) and event.get("ph") == "X"]
    device = sorted((e for e in events if e.get("cat") in DEVICE), key=lambda event: float(event["ts"]))
    if not device:
        raise KernelcastError(
            "the trace has no GPU kernels: profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        )
    ops = _Ops(events)
    joined: dict[Any, _LaunchedOp] = {}
    for event, context in zip(device, kernel_contexts(device), strict=True):
        owner = ops.owner(event)
        launched = joined.setdefault(id(event if owner is None else owner), _LaunchedOp(owner, ops.mark(event)))
        launched.kernels.append(event)
        launched.contexts.append(context)
    end_us = max(float(event["ts"]) + float(event["dur"]) for event in device)
    return Profile(
        source="torch.profiler",
        calls=tuple(_grouped(joined.values(), gpu)),
        launches=len(device),
        duration_us=end_us - float(device[0]["ts"]),
        gpu_name=gpu_name(trace),
    )


@dataclass
class _LaunchedOp:
    """One op and what it launched; or a kernel alone."""

    op: Event | None
    mark: str
    kernels: list[Event] = field(default_factory=list)
    contexts: list[KernelContext] = field(default_factory=list)

    @property
    def key(self) -> str:
        """The key by which calls are grouped: the op with its arguments, and the kernels with their grids."""
        names = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")
        arguments = [arg(self.op, name) for name in names] if self.op is not None else []
        launched = [(event["name"], launch_config(event)[:2]) for event in self.kernels]
        return json.dumps([self.op["name"] if self.op is not None else "", arguments, launched])


class _Ops:
    """The ops of a trace, and which of them launched a kernel."""

    def __init__(self, events: Sequence[Event]) -> None:
        ops = [event for event in events if event.get("cat") == "cpu_op"]
        marks = [
            e for e in events if e.get("cat") == "user_annotation" and not str(e["name"]).startswith("ProfilerStep")
        ]
        launches = [event for event in events if event.get("cat") in HOST]
        self._named = {number: event for event in ops if (number := arg(event, "External id")) is not None}
        self._launch = {arg(event, "correlation"): event for event in launches}
        self._parents = _parents([*ops, *marks, *launches])
        self._known = set(known_ops())

    def _around_launch(self, event: Event) -> Event | None:
        return self._parents.get(id(self._launch.get(arg(event, "correlation"))))

    def owner(self, event: Event) -> Event | None:
        """The nearest op around the launch that has a rule; else the innermost."""
        first = self._named.get(arg(event, "External id")) or self._around_launch(event)
        for op in self._outwards(first):
            name = str(op["name"]).removeprefix("aten::")
            known = name in self._known or name.rstrip("_") in self._known
            if op.get("cat") != "cpu_op" or name in _INNER or not known:
                continue
            outer = self._parents.get(id(op))
            return outer if outer is not None and outer["name"] in _ROWS.get(name, ()) else op
        return first if first is not None and first.get("cat") == "cpu_op" else None

    def mark(self, event: Event) -> str:
        """The innermost annotation of the program around the launch."""
        launched = arg(event, "correlation") in self._launch
        start = self._around_launch(event) if launched else self._named.get(arg(event, "External id"))
        marks = (str(outer["name"]) for outer in self._outwards(start) if outer.get("cat") == "user_annotation")
        return next(marks, "")

    def _outwards(self, event: Event | None) -> Iterator[Event]:
        while event is not None:
            yield event
            event = self._parents.get(id(event))


def _parents(events: Sequence[Event]) -> dict[int, Event]:
    """The innermost event around each event on its thread."""
    parents: dict[int, Event] = {}
    order = sorted(events, key=lambda e: (str(e.get("pid")), str(e.get("tid")), float(e["ts"]), -float(e["dur"])))
    stack: list[tuple[float, Event]] = []
    thread = None
    for event in order:
        start = float(event["ts"])
        if (event.get("pid"), event.get("tid")) != thread:
            thread, stack = (event.get("pid"), event.get("tid")), []
        while stack and stack[-1][0] <= start:
            stack.pop()
        if stack:
            parents[id(event)] = stack[-1][1]
        stack.append((start + float(event["dur"]), event))
    return parents


def _grouped(launched: Iterable[_LaunchedOp], gpu: Gpu) -> Iterator[MeasuredCall]:
    """Calls that differ in nothing but their time, as a single call with their mean."""
    groups: dict[str, list[_LaunchedOp]] = {}
    for call in launched:
        groups.setdefault(call.key, []).append(call)
    for members in groups.values():
        count = len(members)
        calls, why = _kernel_calls(members[0], gpu)
        kernels = tuple(_kernel(alike) for alike in zip(*(member.kernels for member in members), strict=True))
        contexts = [context for member in members for context in member.contexts]
        op = members[0].op
        yield MeasuredCall(
            name=str(op["name"]) if op is not None else kernels[0].name,
            shapes=shape_text(arg(op, "Input Dims") or ()) if op is not None else "",
            kernels=kernels,
            calls=calls,
            unmatched=why,
            count=count,
            idle_us=sum(context.idle_us for context in contexts) / count,
            chain=sum(context.chain for context in contexts) / len(contexts),
            chain_saved_us=sum(context.chain_saved_us for context in contexts) / count,
            marks=tuple(dict.fromkeys(m.mark for m in members if m.mark))[:_MARKS],
        )


def _kernel(events: Sequence[Event]) -> MeasuredKernel:
    mean_us = sum(float(event["dur"]) for event in events) / len(events)
    return MeasuredKernel(short_name(str(events[0]["name"])), mean_us, *launch_config(events[0]))


def _kernel_calls(launched: _LaunchedOp, gpu: Gpu) -> tuple[tuple[Launch, ...], str]:
    """The op's kernel calls, or why there are none."""
    names = [str(event["name"]) for event in launched.kernels]
    if all(crosses_to_host(name) for name in names):
        return (), TO_HOST
    if launched.op is None:
        return (), NO_OP
    if arg(launched.op, "Input Dims") is None:
        return (), NO_SHAPES
    tf32 = any(parse_kernel_name(name).dtype == "tf32" for name in names)
    settings = OpSettings(tf32=tf32, capability=gpu.compute_capability)
    if str(launched.op["name"]).startswith("triton_"):
        return _fused(launched.op)
    op = op_of(launched.op, names)
    if op is None:
        return (), f"the arguments of {launched.op['name']} are unknown"
    try:
        costed = op_launches(_as_launched(op), settings)
    except (AttributeError, AssertionError, IndexError, KeyError, TypeError, ValueError):
        return (), f"the arguments of {launched.op['name']} are unknown"
    if costed.by_bytes:
        return (), f"no model of {launched.op['name']}"
    return tuple(_with_backend(launch, op.name) for launch in costed.launches), ""


def _as_launched(op: Op) -> Op:
    """A convolution's bias is added by a separate op, which the trace has."""
    if op.name in ("convolution", "_convolution") and len(op.arguments) > 2:
        return replace(op, arguments=(*op.arguments[:2], None, *op.arguments[3:]))
    return op


def _with_backend(launch: Launch, op: str) -> Launch:
    backend = _BACKENDS.get(op)
    if backend is None or launch.op != "attention":
        return launch
    return replace(launch, call=launch.call.replace(backend=backend))


def _fused(event: Event) -> tuple[tuple[Launch, ...], str]:
    """A kernel that torch.compile made: every tensor is read or written once, the last one written."""
    tensors = [value for value in arguments_of(event) or () if isinstance(value, Tensor)]
    if not tensors or parse_kernel_name(str(event["name"])).category not in FUSIBLE_CATEGORIES:
        return (), f"no model of {event['name']}"
    largest = max(tensors, key=lambda x: x.elements)
    dtype = largest.dtype if largest.dtype in ("fp32", "bf16", "fp16") else "fp32"
    *read, written = (x.bytes for x in tensors)
    return (pointwise("fused", largest.elements, dtype, read_bytes=sum(read), written_bytes=written),), ""


class KernelContext(NamedTuple):
    """A kernel's context in the order of kernels on the GPU."""

    idle_us: float  # the GPU had nothing to do before it
    chain: int  # kernels of its sequence of fusible kernels, 0 where it is in none
    chain_saved_us: float


def kernel_contexts(device: Sequence[Event]) -> list[KernelContext]:
    """The context of each of these kernels, which are in the order of their start.

    One kernel for a whole sequence of fusible kernels (neighbours on one stream that read and write element by element,
    or row by row) would take about as long as the longest: the others' time is saved at best.
    """
    starts_us, times_us = (np.array([float(event[name]) for event in device]) for name in ("ts", "dur"))
    ended_us = np.maximum.accumulate(starts_us + times_us)  # all kernels up to each
    idle_us = np.maximum(0.0, starts_us - np.concatenate([starts_us[:1], ended_us[:-1]]))
    chains = [(0, 0.0)] * len(device)
    for (fusible, _), sequence in itertools.groupby(range(len(device)), lambda at: _chain_key(device[at])):
        members = list(sequence)
        if not fusible or len(members) < _MIN_CHAIN:
            continue
        longest = max(members, key=lambda at: times_us[at])
        for at in members:
            chains[at] = (len(members), 0.0 if at == longest else float(times_us[at]))
    return [KernelContext(idle, *chain) for idle, chain in zip(idle_us.tolist(), chains, strict=True)]


def _chain_key(event: Event) -> tuple[bool, object]:
    """Whether a kernel is fusible (copies to and from the host are not), and its stream."""
    name = str(event["name"])
    return parse_kernel_name(name).category in FUSIBLE_CATEGORIES and not crosses_to_host(name), arg(event, "stream")


def crosses_to_host(name: str) -> bool:
    return name.startswith("Memcpy") and "DtoD" not in name


def op_of(event: Event, kernel_names: Iterable[str] = ()) -> Op | None:
    """The op with its arguments and outputs; None where the trace has no shapes or no outputs follow.

    ``kernel_names``: of the kernels it launched, which name the format of a list of tensors.
    """
    arguments = arguments_of(event, _list_format(kernel_names))
    if arguments is None:
        return None
    name = str(event["name"]).partition("::")[2] or str(event["name"])
    bare = Op(name, arguments, {}, (), "kernel", "forward", "")
    try:
        return replace(bare, outputs=outputs_of(bare) or ())
    except (AttributeError, IndexError, TypeError, ValueError):  # arguments in another order than this release's
        return None


def arguments_of(event: Event, list_format: str = "bf16") -> tuple[Any, ...] | None:
    dims, types = arg(event, "Input Dims"), arg(event, "Input type")
    if not isinstance(dims, list) or not isinstance(types, list) or len(dims) != len(types):
        return None
    strides = arg(event, "Input Strides") or [None] * len(dims)
    values = arg(event, "Concrete Inputs") or [""] * len(dims)
    if len(strides) != len(dims) or len(values) != len(dims):
        return None
    return tuple(_argument(*four, list_format=list_format) for four in zip(dims, types, strides, values, strict=True))


def _argument(dims: Any, type_name: str, strides: Any, value: str, *, list_format: str) -> Any:
    if type_name in _FORMATS:
        return _tensor(dims, strides, _FORMATS[type_name])
    if type_name == "TensorList" or (dims and isinstance(dims[0], list)):
        steps = strides or [None] * len(dims)
        return tuple(_tensor(shape, step, list_format) for shape, step in zip(dims, steps, strict=True))
    return _value(value)


def _tensor(dims: Any, strides: Any, dtype: str) -> Tensor:
    shape = tuple(int(n) for n in dims)
    if strides is None or len(strides) != len(shape):  # as if contiguous
        strides = [math.prod(max(1, size) for size in shape[axis + 1 :]) for axis in range(len(shape))]
    return Tensor(shape, tuple(int(n) for n in strides), dtype)


def _value(text: Any) -> Any:
    """'2' -> 2, '0.5' -> 0.5, '[1, 2]' -> (1, 2), 'True' -> True, '' -> None; other texts as they are."""
    if not isinstance(text, str) or not text:
        return None
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return tuple(value) if isinstance(value, list) else value


def _list_format(kernel_names: Iterable[str]) -> str:
    """CatArrayBatchedCopy<OpaqueType<2u>, ...> moves items of two bytes."""
    for name in kernel_names:
        if match := _OPAQUE.search(name):
            return _BY_BYTES.get(int(match[1]), "bf16")
        if "float" in name and "bfloat" not in name.lower():
            return "fp32"
    return "bf16"
