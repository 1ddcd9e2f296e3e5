"""Convolutions through PyTorch: cuDNN, channels last, forward and both gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from kernelcast.measure.pool import Pool, specs
from kernelcast.measure.runners import Prepared, Runner
from kernelcast.measure.runners.matmul import precision


def _sizes(call: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Input, weight and output in memory: channels last."""
    out_h = (call.height + 2 * call.padding - call.dilation * (call.kernel_h - 1) - 1) // call.stride + 1
    out_w = (call.width + 2 * call.padding - call.dilation * (call.kernel_w - 1) - 1) // call.stride + 1
    return (
        (call.batch, call.height, call.width, call.in_channels),
        (call.out_channels, call.kernel_h, call.kernel_w, call.in_channels // call.groups),
        (call.batch, out_h, out_w, call.out_channels),
    )


def _channels_first(tensor: Tensor) -> Tensor:
    return tensor.permute(0, 3, 1, 2)


def forward(call: Any, pool: Pool) -> Prepared:
    precision(call.dtype)
    image, weight, _ = _sizes(call)

    def launch(x: Tensor, w: Tensor) -> Callable[[], object]:
        x, w = _channels_first(x), _channels_first(w)
        return lambda: conv2d(
            x, w, stride=call.stride, padding=call.padding, dilation=call.dilation, groups=call.groups
        )

    return Prepared([launch(x, w) for x, w in pool.sets(*specs(call.dtype, image, weight))], "cudnn")


def _gradient(of_input: bool) -> Runner:
    def runner(call: Any, pool: Pool) -> Prepared:
        precision(call.dtype)
        pair = [2 * [value] for value in (call.stride, call.padding, call.dilation)]

        def launch(x: Tensor, w: Tensor, grad: Tensor) -> Callable[[], object]:
            x, w, grad = (_channels_first(t) for t in (x, w, grad))
            return lambda: torch.ops.aten.convolution_backward(
                grad, x, w, None, *pair, False, [0, 0], call.groups, [of_input, not of_input, False]
            )

        return Prepared([launch(*t) for t in pool.sets(*specs(call.dtype, *_sizes(call)))], "cudnn")

    return runner


RUNNERS: Mapping[str, Runner] = {"conv2d": forward, "conv2d_dgrad": _gradient(True), "conv2d_wgrad": _gradient(False)}
