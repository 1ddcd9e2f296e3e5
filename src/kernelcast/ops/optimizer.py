"""adamw and sgd: PyTorch's fused optimizers, one pass over all parameters (MultiTensorApply.cuh); foreach: one op over
lists of tensors, as unfused optimizers launch it (ForeachFunctors.cuh).

Each CTA takes a chunk of 65,536 elements of one tensor; a launch takes as many tensors as its arguments hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, choice, flag, grain, size
from kernelcast.ops.dtypes import find_dtype
from kernelcast.ops.vector import ACCUMULATOR_BYTES, VECTOR_DTYPES, MemoryKernel, vector_kernel
from kernelcast.ops.work import Array, Number, Work, Works, ceil_div

CHUNK = 65536.0  # kChunkSize: elements of a CTA
THREADS = 512.0  # kBlockSize
VECTOR = 4.0  # kILP: elements of one load
# What the 4 KB of arguments of a launch describe (depth_to_max_blocks, depth_to_max_tensors): so few CTAs that some SMs
# have three and others two. PyTorch 2.11 with CUDA 13 launches 387 times for 8.1e9 parameters: 320 chunks each.
LAUNCH_CHUNKS = 320.0
# A CTA walks its chunk in steps of 2,048 elements: loads, arithmetic, stores, and only then the next loads.
STEP_CYCLES, _ADAM_STEP_CYCLES = 1000.0, 2000.0
# Threads load four values at a time: of 16 bits only 8 bytes. However many CTAs run, an H200 moves 1.8 to 2.4 TB/s
# of them, and 3.8 of fp32: as if L2 gave them three times.
NARROW_AGAIN = 2.0
LAUNCH_TENSORS = (110.0, 64.0, 48.0, 36.0)  # with 1, 2, 3 or 4 lists of them: parameters, gradients, states


class MultiTensorKernel(MemoryKernel):
    """One CTA per chunk of a tensor."""

    family = "multi_tensor"

    elements: int = size("elements of all tensors of a list", high=1 << 42)
    tensors: int = size("tensors in a list", default=1)
    chunks: int | None = size("chunks of up to 65,536 elements, default: those of equal tensors", default=None)

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        """How many, how full the chunks are, and how the CTAs of a launch fill the SMs."""
        elements, tensors, pieces = calls["elements"], calls["tensors"], chunks_of(calls)
        in_launch = pieces / launches_of(tensors, pieces, LAUNCH_TENSORS[1])
        return {
            "log_elements": np.log2(elements),
            "log_tensors": np.log2(tensors),
            "log_chunks": np.log2(pieces),
            "log_full": np.log2(elements / (pieces * CHUNK)),
            "in_launch": np.log2(in_launch / gpu.sm_count),
            "uneven": np.log2(ceil_div(in_launch, gpu.sm_count) * gpu.sm_count / in_launch),
            "unaligned": unaligned(calls),
            "line_grain": _line_grain(calls),
        }


def chunks_of(calls: Calls) -> Array:
    """CTAs of all launches."""
    equal = calls["tensors"] * ceil_div(calls["elements"], calls["tensors"] * CHUNK)
    return np.maximum(calls.given("chunks", equal), ceil_div(calls["elements"], CHUNK))


def launches_of(tensors: Array, chunks: Array, most_tensors: Number) -> Array:
    return np.maximum(ceil_div(tensors, most_tensors), ceil_div(chunks, LAUNCH_CHUNKS))


def _update(
    gpu: Gpu,
    calls: Calls,
    *,
    launch_tensors: Number,
    numbers: Number,
    states: float = 0.0,
    state_bytes: float = 0.0,
    flops: Number,
    xu_ops: float = 0.0,
    step_cycles: float = STEP_CYCLES,
) -> Work:
    """Each parameter moves ``numbers`` values of its dtype and ``states`` others, in loads and stores of four."""
    elements, tensors, element_bytes = calls["elements"], calls["tensors"], calls.dtype.act_bytes
    chunks = chunks_of(calls)
    update = vector_kernel(
        gpu,
        tasks=chunks,
        threads=THREADS,
        moved_bytes=elements * (numbers * element_bytes + states * state_bytes),
        flops=flops * elements,
        xu_ops=xu_ops * elements,
        converted=elements * (numbers * (element_bytes < 4) + states * (state_bytes < 4)),
        warp_instructions=(numbers + states) * elements / VECTOR / gpu.warp_threads,
        again_bytes=again_bytes(calls, elements * numbers * element_bytes, element_bytes)
        + again_bytes(calls, elements * states * state_bytes, state_bytes),
        registers=48.0,
        steps=ceil_div(np.minimum(elements / tensors, CHUNK), THREADS * VECTOR),
        launches=launches_of(tensors, chunks, launch_tensors),
    )
    return chunk_loop(gpu, update, step_cycles)


def _alignment(calls: Calls) -> tuple[NDArray[np.bool_], Array]:
    """Whether tensors are allocated separately, as a model's, whose chunks are given; equal ones are views of one
    buffer, with so many elements each."""
    return ~np.isnan(calls["chunks"]) | (calls["tensors"] == 1), np.floor(calls["elements"] / calls["tensors"])


def unaligned(calls: Calls) -> Array:
    """1 where threads load single values: sizes that are no multiple of four."""
    apart, each = _alignment(calls)
    return np.where(apart, 0.0, np.mod(each, VECTOR) > 0)


def _line_grain(calls: Calls) -> Array:
    """log2 of the alignment of tensors in bytes, up to a line of 128: an access across lines takes one more."""
    apart, each = _alignment(calls)
    return np.where(apart, grain(np.full(calls.count, 128.0)), grain(each * calls.dtype.act_bytes))


def again_bytes(calls: Calls, moved_bytes: Array, number_bytes: float) -> Array:
    """What narrow accesses take of L2 beyond the bytes that they move."""
    return moved_bytes * ((NARROW_AGAIN if number_bytes < ACCUMULATOR_BYTES else 0.0) + unaligned(calls))


def chunk_loop(gpu: Gpu, work: Work, step_cycles: float = STEP_CYCLES) -> Work:
    """With the time of CTAs to process their chunks. Launches are serial: each has its own waves and uneven SMs."""
    threads, registers = np.asarray(work.threads), np.asarray(work.registers_per_thread)
    resident = np.minimum(gpu.max_threads_per_sm // threads, gpu.registers_per_sm // (threads * registers))
    slots, tasks, launches = gpu.sm_count * resident, np.asarray(work.tasks), np.maximum(work.launches, 1.0)
    again = launches * ceil_div(tasks / launches, slots) / np.maximum(1.0, ceil_div(tasks, slots))
    uneven = launches * ceil_div(tasks / launches, gpu.sm_count) / np.maximum(1.0, ceil_div(tasks, gpu.sm_count))
    return replace(
        work,
        other_warp_instructions=np.asarray(work.other_warp_instructions) * uneven,
        step_cycles=step_cycles,
        mean_steps=np.asarray(work.serial_steps) * again,
    )


class Adamw(MultiTensorKernel):
    """Fused AdamW step: reads parameters, gradients and both moments, writes parameters and moments.

    A small kernel counts the steps of all tensors first. ``dtype`` is that of parameters and gradients.
    """

    op = "adamw"
    examples = (
        {"elements": 1235814400, "tensors": 146, "state_dtype": "fp32"},
        {"elements": 16777216, "dtype": "fp32"},
    )

    state_dtype: str | None = choice("dtype of the moments, default: dtype", VECTOR_DTYPES, default=None, unset="dtype")

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        tensors = calls["tensors"]
        steps = vector_kernel(
            gpu,
            tasks=tensors,
            threads=THREADS,
            moved_bytes=2 * tensors * ACCUMULATOR_BYTES,
            flops=tensors,
            launches=ceil_div(tensors, LAUNCH_TENSORS[0]),
        )
        update = _update(
            gpu,
            calls,
            launch_tensors=LAUNCH_TENSORS[3],
            numbers=3.0,
            states=4.0,
            state_bytes=find_dtype(calls.choice("state_dtype") or calls.choice("dtype")).act_bytes,
            # decay 1; moments 3 and 4; a root 6, two quotients 8 each, ε, step size and difference 3
            flops=33.0,
            xu_ops=3.0,
            step_cycles=_ADAM_STEP_CYCLES,
        )
        return steps, update


class Sgd(MultiTensorKernel):
    """Fused SGD step: reads parameters and gradients, writes parameters; with momentum its buffer too."""

    op = "sgd"
    examples = ({"elements": 25557032, "tensors": 161, "momentum": True, "dtype": "fp32"}, {"elements": 25557032})

    momentum: bool = flag("momentum buffer", default=False)

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        momentum = calls["momentum"]
        update = _update(
            gpu,
            calls,
            launch_tensors=np.where(momentum > 0, LAUNCH_TENSORS[2], LAUNCH_TENSORS[1]),
            numbers=3 + 2 * momentum,
            flops=2 + 2 * momentum,
        )
        return (update,)


@dataclass(frozen=True)
class Function:
    """Cost of an element: values read and written, FLOPs and special functions in fp32."""

    reads: float
    writes: float
    flops: float = 1.0
    xu_ops: float = 0.0
    makes: bool = False  # writes to new tensors
    step_cycles: float = STEP_CYCLES  # of 2,048 elements


FUNCTIONS: Mapping[str, Function] = {
    "zero": Function(0, 1, 0, step_cycles=300),  # no load to wait for
    "copy": Function(1, 1, 0),  # to other tensors that are there
    "scale": Function(1, 1),  # and a sum with a scalar, a quotient by one for each tensor
    "sqrt": Function(1, 1, 6, 1, makes=True, step_cycles=1600),
    "add": Function(2, 1, 2),
    "mul": Function(2, 1),
    "div": Function(2, 1, 8, 1),
    "lerp": Function(2, 1, 3),
    "addcmul": Function(3, 1, 3),
    "addcdiv": Function(3, 1, 10, 1),
    "norm": Function(1, 0, 2),  # of each tensor: sums of its chunks, and those of the sums
}


class Foreach(MultiTensorKernel):
    """A function of lists of tensors, element-wise (torch._foreach_add_, …), or the norm of each tensor."""

    op = "foreach"
    examples = (
        {"elements": 124439808, "tensors": 148, "function": "lerp", "dtype": "fp32"},
        {"elements": 16777216, "tensors": 4, "function": "norm"},
    )

    function: str = choice("function", tuple(FUNCTIONS), default="scale")
    to: str | None = choice("dtype of a copy, default: dtype", VECTOR_DTYPES, default=None, unset="dtype")

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        cost = FUNCTIONS[calls.choice("function")]
        wide, out = calls.dtype.act_bytes, find_dtype(calls.choice("to") or calls.choice("dtype")).act_bytes
        elements, tensors, chunks = calls["elements"], calls["tensors"], chunks_of(calls)
        lists = max(1, int(cost.reads) + cost.makes + (cost is FUNCTIONS["copy"]))
        computes = cost.flops > 0 or wide != out
        work = vector_kernel(
            gpu,
            tasks=chunks,
            threads=THREADS,
            moved_bytes=elements * (cost.reads * wide + cost.writes * out),
            flops=cost.flops * elements,
            xu_ops=cost.xu_ops * elements,
            converted=elements * (cost.reads * (wide < 4) + cost.writes * (out < 4)) if computes else 0.0,
            warp_instructions=(cost.reads + cost.writes) * elements / VECTOR / gpu.warp_threads,
            again_bytes=again_bytes(calls, elements * cost.reads * wide, wide)
            + again_bytes(calls, elements * cost.writes * out, out),
            steps=ceil_div(np.minimum(elements / tensors, CHUNK), THREADS * VECTOR),
            launches=launches_of(tensors, chunks, LAUNCH_TENSORS[lists - 1]),
        )
        work = chunk_loop(gpu, work, cost.step_cycles)
        return (work,) if calls.choice("function") != "norm" else (work, _joined(gpu, tensors, chunks))


def _joined(gpu: Gpu, tensors: Array, chunks: Array) -> Work:
    """The norms of chunks to one norm per tensor: one CTA per tensor (lpnorm_cleanup)."""
    return vector_kernel(
        gpu,
        tasks=tensors,
        threads=THREADS,
        moved_bytes=(chunks + tensors) * ACCUMULATOR_BYTES,
        flops=chunks,
    )
