"""Kernels around a convolution, and convolutions that are no product.

cuDNN's tensor-core kernels want channels last, in whole vectors: it turns images and filters that lie otherwise, pads
channels, and turns the result back, each in a kernel of its own. Depthwise filters run on the vector units.

Instructions are from profiles of an H200 (PyTorch 2.11, cuDNN 9.19): time times the rate at which its SMs issue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls
from kernelcast.ops.conv_sizes import Sizes, as_it_lies, depthwise_in_pytorch
from kernelcast.ops.dtypes import matmul_pipe
from kernelcast.ops.vector import vector_kernel
from kernelcast.ops.work import Array, Work, ceil_div

VECTOR_BYTES = 16.0  # channels of a pixel that one load takes
_SQUARE = 32.0  # pixels and channels that are turned at once: few of either fill a part of it
_EMPTY = 0.8  # of an element's instructions, for a place of a square that holds none: 2.4 million of 3x3 in 12 us
_TURN_INSTRUCTIONS = 40.0  # of a thread an element: 6.4 million in 11 us beside the start
_PAD_INSTRUCTIONS = 24.0  # 12.8 million in 13 us
_THREADS, _ELEMENTS = 256.0, 1024.0  # of a CTA


@dataclass(frozen=True)
class Image:
    """A tensor of images (or filters), each of so many pixels (or taps), with channels."""

    count: Array
    pixels: Array
    channels: Array
    is_filter: bool = False


def converted(calls: Calls, sizes: Sizes, gpu: Gpu) -> NDArray[np.bool_]:
    """Calls whose tensors are turned: channels first, on matrix units, and no product as they lie."""
    if calls.choice("layout") != "nchw" or matmul_pipe(gpu, calls.dtype.name) != "tensor":
        return np.zeros(calls.count, dtype=bool)
    return ~as_it_lies(calls, sizes) & ~sizes.depthwise


def around(calls: Calls, sizes: Sizes, gpu: Gpu, images: Sequence[Image]) -> tuple[Work, ...]:
    """A kernel for each tensor that is turned or padded, in the order of a call."""
    if matmul_pipe(gpu, calls.dtype.name) != "tensor":
        return ()
    turned = converted(calls, sizes, gpu)
    last = calls.choice("layout") != "nchw"
    found = []
    for image in images:
        grain = VECTOR_BYTES / calls.dtype.act_bytes
        padded = ceil_div(image.channels, grain) * grain
        short = (padded > image.channels) & (sizes.groups == 1) & last
        turns = turned & ~(image.is_filter & (sizes.taps == 1))  # a filter of one tap lies both ways at once
        if not (turns | short).any():
            continue
        squares = ceil_div(image.channels, _SQUARE) * ceil_div(image.pixels, _SQUARE)
        real = image.pixels * image.channels
        elements = image.count * np.where(turns, real + _EMPTY * (squares * _SQUARE**2 - real), image.pixels * padded)
        each = np.where(turns, _TURN_INSTRUCTIONS, _PAD_INSTRUCTIONS)
        found.append(
            vector_kernel(
                gpu,
                tasks=ceil_div(elements, _ELEMENTS),
                threads=_THREADS,
                moved_bytes=image.count * image.pixels * (image.channels + padded) * calls.dtype.act_bytes,
                warp_instructions=each * elements / gpu.warp_threads,
                runs=turns | short,
            )
        )
    return tuple(found)


# Instructions of a thread: for an output, and for each tap of it (of filters: for each product of a pixel).
Instructions = Mapping[str, tuple[float, float]]
FORWARD: Instructions = {"pytorch": (110.0, 14.5), "nhwc": (0.0, 4.0), "nchw": (10.0, 6.5)}
OF_INPUT: Instructions = {"pytorch": (150.0, 20.0), "nhwc": (0.0, 8.5), "nchw": (10.0, 6.5)}
OF_FILTERS: Instructions = {"pytorch": (0.0, 36.0), "nhwc": (0.0, 3.5), "nchw": (10.0, 13.0)}
_GENERAL = 60.0  # a tap of a filter that cuDNN has no kernel of its own for (conv2d_grouped_direct_kernel): 37 to 135
_APART = 1.5  # of a tap's instructions, where outputs lie two pixels apart and share less
# PyTorch's gradient of depthwise filters: a CTA an element of a filter, a warp an image, a lane a pixel.
_IMAGE_INSTRUCTIONS = 100.0  # of a warp, to begin an image
_PIXEL_CYCLES = 290.0  # of a warp, for the next 32 pixels, where few CTAs leave nothing else to do
_WARPS = 8.0


@dataclass(frozen=True)
class Direct:
    """A pass without a product: ``outputs`` that each sum over ``taps``."""

    outputs: Array
    taps: Array
    instructions: Instructions


def direct_work(calls: Calls, sizes: Sizes, gpu: Gpu, direct: Direct, moved_bytes: Array) -> Work:
    """A thread an output; neighbours share what they read through L1."""
    own, layout = depthwise_in_pytorch(calls, sizes), calls.choice("layout") or "nhwc"
    (own_base, own_tap), (base, tap) = direct.instructions["pytorch"], direct.instructions[layout]
    step = sizes.axes[1].stride * sizes.axes[2].stride
    cudnns = np.where(sizes.ordinary | (layout == "nchw"), tap * np.where(step > 1, _APART, 1.0), _GENERAL)
    each = np.where(own, own_base + own_tap * direct.taps, base + cudnns * direct.taps)
    work = vector_kernel(
        gpu,
        tasks=ceil_div(direct.outputs, _THREADS),
        threads=_THREADS,
        moved_bytes=moved_bytes,
        flops=2 * direct.outputs * direct.taps,
        warp_instructions=direct.outputs * each / gpu.warp_threads,
        registers=40.0,
    )
    if direct.instructions is OF_FILTERS:
        work = _by_filter(gpu, sizes, work, own)
    return replace(work, tile={"tile_m": _THREADS, "tile_n": 1.0, "tile_k": 1.0, "split_k": 1.0, "algorithm": 2.0})


def _by_filter(gpu: Gpu, sizes: Sizes, work: Work, own: NDArray[np.bool_]) -> Work:
    """The same for PyTorch's own gradient of filters: so many CTAs, and lanes that a small image leaves empty."""
    tasks, rows = sizes.filter_elements, ceil_div(sizes.m / sizes.batch, gpu.warp_threads)  # of 32 pixels
    each = np.asarray(work.tasks) / tasks  # from one of the general CTAs to one of these
    instructions = sizes.batch * (rows * OF_FILTERS["pytorch"][1] + _IMAGE_INSTRUCTIONS)

    def chosen(mine: Array, other: Any) -> Array:
        return np.where(own, mine, other)

    return replace(
        work,
        tasks=chosen(tasks, work.tasks),
        fma_flops=chosen(work.fma_flops * each, work.fma_flops),
        l2_bytes=chosen(work.l2_bytes * each, work.l2_bytes),
        other_warp_instructions=chosen(instructions, work.other_warp_instructions),
        serial_steps=chosen(ceil_div(sizes.batch, _WARPS) * rows, 1.0),
        step_cycles=chosen(np.full_like(tasks, _PIXEL_CYCLES), 0.0),
    )
