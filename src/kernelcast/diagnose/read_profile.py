"""A torch.profiler trace -> measured calls: kernels joined to the ATen ops that launched them, ops to kernel calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kernelcast.diagnose.chrome_events import DEVICE, HOST, Event, arg, launch_facts, shape_text, short_name
from kernelcast.diagnose.kernel_names import read_name
from kernelcast.diagnose.measured import MeasuredCall, MeasuredKernel, Profile
from kernelcast.diagnose.neighbours import Neighbourhood, crosses_to_host, neighbourhoods
from kernelcast.diagnose.profiled_op import arguments_of, op_of
from kernelcast.errors import KernelcastError
from kernelcast.forecast.calls import Launch
from kernelcast.hardware import Gpu
from kernelcast.tracing.aten import Settings, cost, known_ops
from kernelcast.tracing.aten.table import pointwise
from kernelcast.tracing.traced import Op, Tensor

NO_SHAPES = "the trace has no shapes: record it with record_shapes=True"
NO_OP = "no op of the trace launched it (a CUDA graph, or a library of its own)"
TO_HOST = "a copy between host and GPU is no kernel"
# Ops whose arguments stand in another order than those of the op that calls them
_INNER = {"cudnn_convolution", "cudnn_convolution_transpose"}
# A lookup of whole rows, which the op within tells as one of single elements
_ROWS = {"gather": ("aten::index_select", "aten::embedding")}
# The library that ran is in the op's name; the table of ops takes the one that PyTorch would prefer
_BACKENDS = {
    "_scaled_dot_product_flash_attention": "fa2",
    "_scaled_dot_product_efficient_attention": "fa2",
    "_scaled_dot_product_cudnn_attention": "cudnn",
}
_MARKS = 4  # annotations that a call keeps


def gpu_name(trace: dict[str, Any]) -> str:
    """The GPU that the trace says it ran on, "" where it does not."""
    devices = trace.get("deviceProperties")
    return str(devices[0].get("name", "")) if isinstance(devices, list) and devices else ""


def profile_of(trace: dict[str, Any], chip: Gpu) -> Profile:
    """The measured calls of a trace. ``chip``: its generation decides which kernel call stands for an op."""
    spans = [event for event in trace["traceEvents"] if isinstance(event, dict) and event.get("ph") == "X"]
    device = sorted((e for e in spans if e.get("cat") in DEVICE), key=lambda event: float(event["ts"]))
    if not device:
        raise KernelcastError(
            "the trace has no GPU kernels: profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        )
    ops = _Ops(spans)
    joined: dict[Any, _Launched] = {}
    for event, around in zip(device, neighbourhoods(device), strict=True):
        owner = ops.owner(event)
        one = joined.setdefault(id(event if owner is None else owner), _Launched(owner, ops.mark(event)))
        one.kernels.append(event)
        one.around.append(around)
    end_us = max(float(event["ts"]) + float(event["dur"]) for event in device)
    return Profile(
        source="torch.profiler",
        calls=tuple(_alike(joined.values(), chip)),
        launches=len(device),
        span_us=end_us - float(device[0]["ts"]),
        gpu_name=gpu_name(trace),
    )


@dataclass
class _Launched:
    """One op and what it launched; or a kernel alone."""

    op: Event | None
    mark: str
    kernels: list[Event] = field(default_factory=list)
    around: list[Neighbourhood] = field(default_factory=list)

    @property
    def key(self) -> str:
        """What makes two calls alike: the op with its arguments, and the kernels with their grids."""
        names = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")
        given = [arg(self.op, name) for name in names] if self.op is not None else []
        launched = [(event["name"], launch_facts(event)[:2]) for event in self.kernels]
        return json.dumps([self.op["name"] if self.op is not None else "", given, launched])


class _Ops:
    """The ops of a trace: which one a kernel belongs to."""

    def __init__(self, spans: Sequence[Event]) -> None:
        ops = [event for event in spans if event.get("cat") == "cpu_op"]
        marks = [
            e for e in spans if e.get("cat") == "user_annotation" and not str(e["name"]).startswith("ProfilerStep")
        ]
        launches = [event for event in spans if event.get("cat") in HOST]
        self._named = {number: event for event in ops if (number := arg(event, "External id")) is not None}
        self._launch = {arg(event, "correlation"): event for event in launches}
        self._parents = _parents([*ops, *marks, *launches])
        self._known = set(known_ops())

    def _around_launch(self, event: Event) -> Event | None:
        return self._parents.get(id(self._launch.get(arg(event, "correlation"))))

    def owner(self, event: Event) -> Event | None:
        """The nearest op around the launch that a rule knows; else the innermost."""
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
        marks = (str(found["name"]) for found in self._outwards(start) if found.get("cat") == "user_annotation")
        return next(marks, "")

    def _outwards(self, event: Event | None) -> Iterator[Event]:
        while event is not None:
            yield event
            event = self._parents.get(id(event))


def _parents(events: Sequence[Event]) -> dict[int, Event]:
    """Each event's nearest one around it on its thread."""
    found: dict[int, Event] = {}
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
            found[id(event)] = stack[-1][1]
        stack.append((start + float(event["dur"]), event))
    return found


def _alike(launched: Iterable[_Launched], chip: Gpu) -> Iterator[MeasuredCall]:
    """Calls that are the same but for their time, as one with their mean."""
    groups: dict[str, list[_Launched]] = {}
    for one in launched:
        groups.setdefault(one.key, []).append(one)
    for members in groups.values():
        count = len(members)
        calls, why = _kernel_calls(members[0], chip)
        kernels = tuple(_kernel(alike) for alike in zip(*(member.kernels for member in members), strict=True))
        around = [one for member in members for one in member.around]
        op = members[0].op
        yield MeasuredCall(
            name=str(op["name"]) if op is not None else kernels[0].name,
            shapes=shape_text(arg(op, "Input Dims") or ()) if op is not None else "",
            kernels=kernels,
            calls=calls,
            unmatched=why,
            count=count,
            idle_us=sum(one.idle_us for one in around) / count,
            chain=sum(one.chain for one in around) / len(around),
            chain_saved_us=sum(one.chain_saved_us for one in around) / count,
            marks=tuple(dict.fromkeys(m.mark for m in members if m.mark))[:_MARKS],
        )


def _kernel(events: Sequence[Event]) -> MeasuredKernel:
    mean_us = sum(float(event["dur"]) for event in events) / len(events)
    return MeasuredKernel(short_name(str(events[0]["name"])), mean_us, *launch_facts(events[0]))


def _kernel_calls(launched: _Launched, chip: Gpu) -> tuple[tuple[Launch, ...], str]:
    """What the op stands for, or why nothing."""
    names = [str(event["name"]) for event in launched.kernels]
    if all(crosses_to_host(name) for name in names):
        return (), TO_HOST
    if launched.op is None:
        return (), NO_OP
    if arg(launched.op, "Input Dims") is None:
        return (), NO_SHAPES
    tf32 = any(read_name(name).dtype == "tf32" for name in names)
    settings = Settings(tf32=tf32, capability=chip.compute_capability)
    if str(launched.op["name"]).startswith("triton_"):
        return _fused(launched.op)
    op = op_of(launched.op, names)
    if op is None:
        return (), f"cannot tell the arguments of {launched.op['name']}"
    try:
        found = cost(_as_launched(op), settings)
    except (AttributeError, AssertionError, IndexError, KeyError, TypeError, ValueError):
        return (), f"cannot tell the arguments of {launched.op['name']}"
    if found.by_bytes:
        return (), f"no model of {launched.op['name']}"
    return tuple(_as_ran(launch, op.name) for launch in found.launches), ""


def _as_launched(op: Op) -> Op:
    """A convolution's bias is added by an op of its own, which the trace has."""
    if op.name in ("convolution", "_convolution") and len(op.arguments) > 2:
        return replace(op, arguments=(*op.arguments[:2], None, *op.arguments[3:]))
    return op


def _as_ran(launch: Launch, op: str) -> Launch:
    backend = _BACKENDS.get(op)
    known = backend is not None and launch.op == "attention"
    return replace(launch, call=launch.call.replace(backend=backend)) if known else launch


def _fused(event: Event) -> tuple[tuple[Launch, ...], str]:
    """A kernel that torch.compile made: every tensor is read or written once, the last one written."""
    tensors = [value for value in arguments_of(event) or () if isinstance(value, Tensor)]
    if not tensors or read_name(str(event["name"])).kind not in ("pointwise", "reduce", "copy"):
        return (), f"no model of {event['name']}"
    largest = max(tensors, key=lambda x: x.elements)
    dtype = largest.dtype if largest.dtype in ("fp32", "bf16", "fp16") else "fp32"
    *read, written = (x.bytes for x in tensors)
    return (pointwise("fused", largest.elements, dtype, read_bytes=sum(read), written_bytes=written),), ""
