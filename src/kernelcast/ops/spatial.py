"""What layers over images share: the layout of a feature map, and kernels that give a thread an output."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, Kernel, choice
from kernelcast.ops.vector import SECTOR_BYTES, VECTOR_DTYPES, Mask, paced, vector_kernel
from kernelcast.ops.work import Array, Number, Work, ceil_div

LAYOUTS = ("nchw", "nhwc")


class SpatialKernel(Kernel):
    """A layer over feature maps that bytes, the chain of loads in a thread, or too few CTAs limit."""

    family = "spatial"
    dtypes: ClassVar[tuple[str, ...]] = VECTOR_DTYPES


def layout() -> str:
    """The parameter."""
    found: str = choice("order in memory; nhwc: channels last", LAYOUTS, default="nchw")
    return found


def last(calls: Calls) -> bool:
    """Whether channels lie innermost."""
    return bool(calls.choice("layout") == "nhwc")


def width_of(calls: Calls) -> float:
    """Bytes of an element."""
    return calls.dtype.act_bytes


def each_output(
    gpu: Gpu,
    outputs: Array,
    *,
    threads: float,
    a_thread: Number = 1.0,
    moved_bytes: Number,
    again_bytes: Number = 0.0,
    instructions: Number,
    flops: Number = 0.0,
    steps: Number = 1.0,
    step_cycles: Number = 0.0,
    registers: float = 32.0,
    runs: Mask = True,
) -> Work:
    """Threads that each make ``a_thread`` outputs, one after another; ``instructions`` are a thread's for one."""
    work = vector_kernel(
        gpu,
        tasks=ceil_div(outputs, threads * np.asarray(a_thread, dtype=np.float64)),
        threads=threads,
        moved_bytes=moved_bytes,
        again_bytes=again_bytes,
        flops=flops * outputs,
        warp_instructions=instructions * outputs / gpu.warp_threads,
        registers=registers,
        steps=steps,
        runs=runs,
    )
    return paced(work, gpu, step_cycles)


def scattered_bytes(element_bytes: float, stride: Number) -> Array:
    """What an SM fetches for an element whose neighbour in the warp lies ``stride`` elements on, beyond itself."""
    return np.clip(element_bytes * np.asarray(stride, dtype=np.float64), element_bytes, SECTOR_BYTES) - element_bytes


def power_below(count: Number) -> Array:
    """The largest power of two that is at most ``count``."""
    return 2 ** np.floor(np.log2(np.maximum(count, 1.0)))


def only(work: Work, runs: NDArray[np.bool_]) -> Work:
    """The same kernel in the calls that launch it."""
    on = runs.astype(np.float64)
    return replace(
        work,
        tasks=work.tasks * on,
        activation_bytes=work.activation_bytes * on,
        streamed_bytes=work.streamed_bytes * on,
        refetched_bytes=work.refetched_bytes * on,
        launches=work.launches * on,
        useful_flops=work.useful_flops * on,
    )
