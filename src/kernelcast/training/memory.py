"""Memory of a traced step: what it holds at its peak, whether that fits, and the lifetime of each tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kernelcast.errors import DoesNotFit
from kernelcast.hardware import Gpu
from kernelcast.ops.work import Array
from kernelcast.schedule import Memory
from kernelcast.tracing.traced import Tensor, Trace

# Context, cuBLAS and cuDNN workspaces of one process; what the caching allocator cannot use adds a twentieth.
FRAMEWORK_BYTES = 1.2e9
FRAGMENTED = 0.05


def with_overhead(parts: Mapping[str, float], gpu: Gpu) -> Memory:
    """The parts with CUDA context, workspaces and fragmentation added."""
    overhead = FRAMEWORK_BYTES + FRAGMENTED * sum(parts.values())
    return Memory({**parts, "overhead": overhead}, gpu.dram_bytes, gpu.dram_bytes)


def step_memory(trace: Trace, gpu: Gpu) -> Memory:
    """Memory of one GPU that runs a whole traced step."""
    names = ("parameters", "gradients", "optimizer", "inputs", "activations")
    return with_overhead({name: float(getattr(trace.footprint, name)) for name in names}, gpu)


def check_fits(trace: Trace, gpu: Gpu) -> None:
    """Refuse a step that does not fit, and say by how much and what needs less."""
    memory = step_memory(trace, gpu)
    if memory.fits:
        return
    named = ("parameters", "gradients", "optimizer", "activations")
    parts = ", ".join(f"{name} {memory[name] / 2**30:,.1f}" for name in named if memory[name])
    less = "a smaller batch, checkpointing, or several GPUs (dp with zero, tp, pp) need less of each"
    raise DoesNotFit(
        f"{trace.name} needs {memory.used_bytes / 2**30:,.1f} GiB at its peak ({parts}), "
        f"{memory.missing_bytes / 2**30:,.1f} GiB more than {gpu.id} has; "
        + (less if trace.mode == "training" else "take a smaller batch, or a GPU with more memory")
    )


@dataclass(frozen=True)
class Lifetime:
    """Memory from the op that makes it to the one that uses it last. ``unit``: of the op that makes it."""

    made: int
    last: int
    bytes: float
    unit: int


def activations(trace: Trace, units: Sequence[int]) -> list[Lifetime]:
    """Tensors of the forward and backward pass, less gradients of parameters. ``units``: of each op."""
    kept = {out.storage for g in trace.gradients for out in trace.ops[g.ready].outputs if out.elements == g.elements}
    made: dict[int, tuple[int, Tensor]] = {}
    last: dict[int, int] = {}
    for at, op in enumerate(trace.ops):
        if op.phase == "optimizer":
            break
        known = kept.union(x.storage for x in op.inputs)
        for x in op.outputs:
            if x.storage not in known:
                made.setdefault(x.storage, (at, x))
        last |= {x.storage: at for x in (*op.inputs, *op.outputs)}
    return [Lifetime(at, last[storage], x.bytes, units[at]) for storage, (at, x) in made.items()]


def alive_bytes(lifetimes: Iterable[Lifetime], ops: int) -> Array:
    """During each op."""
    change = np.zeros(ops + 1)
    for lifetime in lifetimes:
        change[lifetime.made] += lifetime.bytes
        change[lifetime.last + 1] -= lifetime.bytes
    return np.cumsum(change)[:-1]
