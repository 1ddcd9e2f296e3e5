"""Convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kernelcast.calls import Launch
from kernelcast.networks.aten.table import (
    Settings,
    launch,
    matrix_format,
    number_format,
    over,
    rule,
)
from kernelcast.networks.traced import Op, Tensor


def _sizes(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> dict[str, int]:
    """conv2d's parameters; one axis becomes rows of one, three axes fold depth into the rows (near enough)."""
    spatial, kernel = list(x.shape[2:]), list(weight.shape[2:])
    while len(spatial) > 2:
        spatial = [spatial[0] * spatial[1], *spatial[2:]]
        kernel = [kernel[0] * kernel[1], *kernel[2:]]
    if len(spatial) == 1:
        spatial, kernel = [1, *spatial], [1, *kernel]
        padding = (0, *padding)
    same = max(padding) if len(x.shape) == 4 else 0
    height = spatial[0] + (2 * padding[-2] if not same and len(padding) > 1 else 0)
    width = spatial[1] + (2 * padding[-1] if not same else 0)
    return {"batch": x.shape[0], "in_channels": x.shape[1], "out_channels": weight.shape[0], "height": height,
            "width": width, "kernel_h": kernel[0], "kernel_w": kernel[1], "stride": max(stride), "padding": same,
            "dilation": max(dilation), "groups": groups}  # fmt: skip


@rule("convolution", "cudnn_convolution", "_convolution", "convolution_overrideable")
def _forward(op: Op, settings: Settings) -> Iterator[Launch]:
    x, weight, bias, stride, padding, dilation, transposed = op.arguments[:7]
    groups = op.argument(8, "groups", 1)
    kind = matrix_format(x, settings)
    sized = op.outputs[0] if transposed else x  # transposed: a convolution's gradient by its input, run forward
    sizes = _sizes(sized, weight, stride, padding, dilation, groups)
    yield launch("convolution", "conv2d_dgrad" if transposed else "conv2d", **sizes, dtype=kind)
    if bias is not None:
        out = op.outputs[0]
        yield over("convolution", out, read_bytes=out.bytes, written_bytes=out.bytes, tensors=2, access="strided")


@rule("convolution_backward")
def _backward(op: Op, settings: Settings) -> Iterator[Launch]:
    """Gradients of the input, of the weight, and of the bias, as asked for."""
    grad, x, weight, _, stride, padding, dilation, transposed, _, groups, wanted = op.arguments[:11]
    kind = matrix_format(x, settings)
    sizes = _sizes(grad if transposed else x, weight, stride, padding, dilation, groups)
    if wanted[0]:
        yield launch("convolution", "conv2d" if transposed else "conv2d_dgrad", **sizes, dtype=kind)
    if wanted[1]:
        yield launch("convolution", "conv2d_wgrad", **sizes, dtype=kind)
    if wanted[2]:
        channels = grad.shape[1]
        yield launch("reduction", "reduce_sum", rows=channels, cols=max(1, grad.elements // channels),
                     axis="cols", dtype=number_format(grad))  # fmt: skip
