"""A torch.profiler trace -> measured calls: kernels joined to the ATen ops that launched them, ops to kernel calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kernelcast.advise.chrome_events import DEVICE, HOST, Event, arg, launch_facts, shape_text, short_name
from kernelcast.advise.kernel_names import read_name
from kernelcast.advise.measured import MeasuredCall, MeasuredKernel, Profile
from kernelcast.advise.profiled_op import arguments_of, op_of
from kernelcast.advise.timeline import Place, crosses_to_host, places, span_us
from kernelcast.calls import Launch
from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu
from kernelcast.networks.aten import Settings, cost, known_ops
from kernelcast.networks.aten.table import pointwise
from kernelcast.networks.traced import Op, Tensor

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
    for event, place in zip(device, places(device), strict=True):
        owner = ops.owner(event)
        key = id(owner) if owner is not None else id(event)
        joined.setdefault(key, _Launched(owner, ops.mark(event))).add(event, place)
    return Profile(
        source="torch.profiler",
        calls=tuple(_alike(joined.values(), chip)),
        launches=len(device),
        span_us=span_us(device),
        gpu_name=gpu_name(trace),
    )


@dataclass
class _Launched:
    """One op and what it launched; or a kernel alone."""

    op: Event | None
    mark: str
    kernels: list[Event] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)

    def add(self, event: Event, place: Place) -> None:
        self.kernels.append(event)
        self.places.append(place)

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
        self._named = {number: event for event in ops if (number := arg(event, "External id")) is not None}
        self._parents = _parents([*ops, *marks])
        launches = [event for event in spans if event.get("cat") in HOST]
        self._launch = {arg(event, "correlation"): event for event in launches}
        self._launch_parents = _parents([*ops, *marks, *launches])
        self._known = set(known_ops())

    def innermost(self, event: Event) -> Event | None:
        found = self._named.get(arg(event, "External id"))
        if found is not None:
            return found
        launch = self._launch.get(arg(event, "correlation"))
        return self._launch_parents.get(id(launch)) if launch is not None else None

    def owner(self, event: Event) -> Event | None:
        """The nearest op around the launch that a rule knows; else the innermost."""
        first = self.innermost(event)
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
        launch = self._launch.get(arg(event, "correlation"))
        start = self._launch_parents.get(id(launch)) if launch is not None else self.innermost(event)
        for found in self._outwards(start):
            if found.get("cat") == "user_annotation":
                return str(found["name"])
        return ""

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
        kernels = tuple(_kernel([m.kernels[at] for m in members]) for at in range(len(members[0].kernels)))
        around = [place for member in members for place in member.places]
        op = members[0].op
        yield MeasuredCall(
            name=str(op["name"]) if op is not None else kernels[0].name,
            shapes=shape_text(arg(op, "Input Dims") or ()) if op is not None else "",
            kernels=kernels,
            calls=calls,
            unmatched=why,
            count=count,
            idle_us=sum(place.idle_us for place in around) / count,
            chain=sum(place.chain for place in around) / len(around),
            chain_saved_us=sum(place.chain_saved_us for place in around) / count,
            marks=tuple(dict.fromkeys(m.mark for m in members if m.mark))[:_MARKS],
        )


def _kernel(events: Sequence[Event]) -> MeasuredKernel:
    grid, block, registers, smem = launch_facts(events[0])
    mean_us = sum(float(event["dur"]) for event in events) / len(events)
    return MeasuredKernel(short_name(str(events[0]["name"])), mean_us, grid, block, registers, smem)


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
        return _fused(launched.op, settings)
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
    if backend is None or launch.op != "attention":
        return launch
    return replace(launch, call=launch.call.replace(backend=backend))


def _fused(event: Event, settings: Settings) -> tuple[tuple[Launch, ...], str]:
    """A kernel that torch.compile made: every tensor is read or written once, the last one written."""
    tensors = [value for value in arguments_of(event) or () if isinstance(value, Tensor)]
    if not tensors or read_name(str(event["name"])).kind not in ("pointwise", "reduce", "copy"):
        return (), f"no model of {event['name']}"
    largest = max(tensors, key=lambda x: x.elements)
    dtype = largest.dtype if largest.dtype in ("fp32", "bf16", "fp16") else "fp32"
    read = sum(x.bytes for x in tensors[:-1])
    return (
        pointwise("fused", settings, largest.elements, dtype, read_bytes=read, written_bytes=tensors[-1].bytes),
    ), ""
