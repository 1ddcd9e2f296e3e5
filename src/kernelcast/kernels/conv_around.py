"""Kernels around a convolution, and convolutions that are no product.

cuDNN's tensor-core kernels want channels last, in whole vectors: it turns images and filters that lie otherwise, pads
channels, and turns the result back, each in a kernel of its own. Depthwise filters run on the vector units.

Instructions are from profiles of an H200 (PyTorch 2.11, cuDNN 9.19): time times the rate at which its SMs issue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls
from kernelcast.kernels.conv_sizes import Sizes, depthwise_in_pytorch
from kernelcast.kernels.dtypes import matmul_pipe
from kernelcast.kernels.vector import vector_kernel
from kernelcast.kernels.work import Array, Work, ceil_div

VECTOR_BYTES = 16.0  # channels of a pixel that one load takes
_TURNED_CHANNELS = 32.0  # side of the square that is turned at once
_TURN_INSTRUCTIONS = 40.0  # of a thread an element: 6.4 million in 11 us beside the start
_PAD_INSTRUCTIONS = 24.0  # 12.8 million in 13 us
_THREADS, _ELEMENTS = 256.0, 1024.0  # of a CTA


@dataclass(frozen=True)
class Image:
    """A tensor of pixels (or filters) with channels."""

    pixels: Array
    channels: Array
    is_filter: bool = False


def converted(calls: Calls, sizes: Sizes, gpu: Gpu) -> NDArray[np.bool_]:
    """Calls whose tensors are turned: channels first, on matrix units, and no product as they lie."""
    if calls.choice("layout") != "nchw" or matmul_pipe(gpu, calls.dtype.name) != "tensor":
        return np.zeros(calls.count, dtype=bool)
    return ~sizes.pointwise & ~sizes.depthwise


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
        width = np.where(turns, ceil_div(image.channels, _TURNED_CHANNELS) * _TURNED_CHANNELS, padded)
        each = np.where(turns, _TURN_INSTRUCTIONS, _PAD_INSTRUCTIONS)
        if not (turns | short).any():
            continue
        elements = image.pixels * width
        found.append(
            vector_kernel(
                gpu,
                tasks=ceil_div(elements, _ELEMENTS),
                threads=_THREADS,
                moved_bytes=image.pixels * (image.channels + padded) * calls.dtype.act_bytes,
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


@dataclass(frozen=True)
class Direct:
    """A pass without a product: ``outputs`` that each sum over ``taps``."""

    outputs: Array
    taps: Array
    instructions: Instructions


def direct_work(calls: Calls, sizes: Sizes, gpu: Gpu, direct: Direct, moved_bytes: Array) -> Work:
    """A thread an output; neighbours share what they read through L1."""
    own = depthwise_in_pytorch(calls, sizes)
    costs = zip(direct.instructions["pytorch"], direct.instructions[calls.choice("layout") or "nhwc"], strict=True)
    base, tap = (np.where(own, mine, cudnns) for mine, cudnns in costs)
    work = vector_kernel(
        gpu,
        tasks=ceil_div(direct.outputs, _THREADS),
        threads=_THREADS,
        moved_bytes=moved_bytes,
        flops=2 * direct.outputs * direct.taps,
        warp_instructions=direct.outputs * (base + tap * direct.taps) / gpu.warp_threads,
        registers=40.0,
    )
    return replace(work, tile={"tile_m": _THREADS, "tile_n": 1.0, "tile_k": 1.0, "split_k": 1.0, "algorithm": 2.0})
