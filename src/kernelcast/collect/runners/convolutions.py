"""Convolutions and their gradients through PyTorch, by cuDNN and by PyTorch's own depthwise kernels.

One axis runs as rows of one, as PyTorch does it itself; a transposed convolution is the gradient of an input.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernelcast.collect.pool import DTYPES, MOST_SETS, Spec, specs
from kernelcast.collect.runners import Launch, NotMeasurableError, Recipe, Runner
from kernelcast.ops.conv_work import axes_of


def _in_memory(call: Any, first: int, channels: int, sides: list[int]) -> tuple[int, ...]:
    """A shape in the order in which it lies in memory."""
    return (first, channels, *sides) if call.layout == "nchw" else (first, *sides, channels)


def _tensors(call: Any) -> tuple[Spec, ...]:
    """Input, filters and output in memory. The rows of depth are an axis only where a call has them."""
    if call.dtype not in DTYPES or call.dtype == "fp8":
        raise NotMeasurableError(f"PyTorch has no convolution in {call.dtype}")
    torch.backends.cudnn.allow_tf32 = call.dtype == "tf32" or (call.dtype == "fp32" and call.tf32 != "off")
    axes = axes_of(call)
    shapes = (
        _in_memory(call, call.batch, call.in_channels, [a.length for a in axes]),
        _in_memory(call, call.out_channels, call.in_channels // call.groups, [a.kernel for a in axes]),
        _in_memory(call, call.batch, call.out_channels, [a.outputs for a in axes]),
    )
    return specs(call.dtype, *shapes)


def _sets(call: Any) -> int:
    """Groups of several channels may run as a kernel each: only as many sets as a graph of them takes."""
    return MOST_SETS if call.groups in (1, call.in_channels) else max(16, MOST_SETS // call.groups)


def _channels_first(call: Any, tensor: Tensor) -> Tensor:
    return tensor if call.layout == "nchw" else tensor.movedim(-1, 1)


def _how(call: Any) -> tuple[Any, ...]:
    """Stride, padding, dilation, whether transposed, padding of the output and groups, as ATen takes them."""
    axes = axes_of(call)
    return ([a.stride for a in axes], [a.padding for a in axes], [a.dilation for a in axes], False,
            [0] * len(axes), call.groups)  # fmt: skip


def convolution(call: Any) -> Recipe:
    def launch(*tensors: Tensor) -> Launch:
        x, w = (_channels_first(call, tensor) for tensor in tensors)
        return partial(torch.ops.aten.convolution, x, w, None, *_how(call))

    return Recipe(_tensors(call)[:2], launch, "cudnn", most_sets=_sets(call))


def _gradient(of_input: bool, call: Any) -> Recipe:
    def launch(*tensors: Tensor) -> Launch:
        x, w, gradient = (_channels_first(call, tensor) for tensor in tensors)
        wanted = [of_input, not of_input, False]
        return partial(torch.ops.aten.convolution_backward, gradient, x, w, None, *_how(call), wanted)

    return Recipe(_tensors(call), launch, "cudnn", most_sets=_sets(call))


RUNNERS: Mapping[str, Runner] = {
    "conv2d": convolution,
    "conv2d_dgrad": partial(_gradient, True),
    "conv2d_wgrad": partial(_gradient, False),
}
