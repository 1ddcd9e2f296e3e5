"""Convolutions and their gradients through PyTorch, by cuDNN and by PyTorch's own depthwise kernels.

One axis runs as rows of one, as PyTorch does it itself; a transposed convolution is the gradient of an input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernelcast.collect.pool import DTYPES, MOST_SETS, TensorSpec, specs
from kernelcast.collect.runners import Launch, NotMeasurableError, Recipe, Runner
from kernelcast.ops.conv_work import axes_of


def _in_memory(call: Any, first: int, channels: int, sides: list[int]) -> tuple[int, ...]:
    """A shape in the order in which it lies in memory."""
    return (first, channels, *sides) if call.layout == "nchw" else (first, *sides, channels)


def _tensors(call: Any) -> tuple[TensorSpec, ...]:
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


# ---- layers over feature maps: batch and group norm, pooling, resampling, padding, layouts


aten = torch.ops.aten
Layer = Callable[[Tensor], Tensor]
_GRADIENT_SETS = 96  # each runs its forward first, and autograd's engine at every launch


def _aten(tensors: Sequence[TensorSpec], launch: Callable[..., Launch]) -> Recipe:
    return Recipe(tensors, launch, "aten")


def _map(call: Any, sizes: Sequence[int]) -> tuple[int, ...]:
    """[images, channels, …] as it lies in memory."""
    axes = (call.batch, *sizes, call.channels) if _is_last(call) else (call.batch, call.channels, *sizes)
    return tuple(int(size) for size in axes)


def _is_last(call: Any) -> bool:
    return bool(getattr(call, "layout", "nchw") == "nhwc")


def _viewed(call: Any, x: Tensor) -> Tensor:
    """The tensor with the channels as the second axis, in either memory format."""
    return x.permute(0, x.dim() - 1, *range(1, x.dim() - 1)) if _is_last(call) else x


def _forward(call: Any, sizes: Sequence[int], layer: Layer) -> Recipe:
    """The layer without autograd."""
    return _aten(specs(call.dtype, _map(call, sizes)), lambda x: partial(torch.no_grad()(layer), _viewed(call, x)))


def _backward(
    call: Any, sizes: Sequence[int], out_sizes: Sequence[int], layer: Layer, weights: Sequence[Tensor] = ()
) -> Recipe:
    """One gradient of the layer by its input and weights, through autograd, with the forward's results kept."""

    def launch(x: Tensor, gradient: Tensor) -> Launch:
        leaf = _viewed(call, x).detach().requires_grad_()
        y = layer(leaf)
        return partial(torch.autograd.grad, y, [leaf, *weights], _viewed(call, gradient), retain_graph=True)

    return Recipe(specs(call.dtype, _map(call, sizes), _map(call, out_sizes)), launch, "aten", _GRADIENT_SETS)


def _either(call: Any, sizes: Sequence[int], out_sizes: Sequence[int], layer: Layer) -> Recipe:
    """Forward or backward, by the op's name."""
    if call.op.endswith("_backward"):
        return _backward(call, sizes, out_sizes, layer)
    return _forward(call, sizes, layer)


def _square(spatial: int) -> tuple[int, int]:
    """Pixels as rows and columns, as near to a square as they divide."""
    side = int(spatial**0.5)
    while spatial % side:
        side -= 1
    return side, spatial // side


def _affine(call: Any, dtype: str) -> tuple[Tensor, Tensor]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = torch.ones(call.channels, dtype=DTYPES[dtype], device=device)
    return weight, torch.zeros_like(weight)


def _batch_norm(call: Any) -> Recipe:
    weight, bias = _affine(call, call.weights or call.dtype)
    mean, variance = bias.clone(), weight.clone()
    sizes = _square(call.spatial)
    backward = call.op.endswith("_backward")
    if backward:
        weight.requires_grad_()
        bias.requires_grad_()

    def layer(x: Tensor) -> Tensor:
        return functional.batch_norm(x, mean, variance, weight, bias, call.training)

    return _backward(call, sizes, sizes, layer, (weight, bias)) if backward else _forward(call, sizes, layer)


def _group_norm(call: Any) -> Recipe:
    weight, bias = _affine(call, call.dtype)
    sizes = _square(call.spatial)
    backward = call.op.endswith("_backward")
    if backward:
        weight.requires_grad_()
        bias.requires_grad_()

    def layer(x: Tensor) -> Tensor:
        return functional.group_norm(x, call.groups, weight, bias)

    return _backward(call, sizes, sizes, layer, (weight, bias)) if backward else _forward(call, sizes, layer)


def _pool(call: Any) -> Recipe:
    sizes, kernel = [call.height, call.width], [call.kernel_h, call.kernel_w]
    if call.depth > 1 or call.kernel_d > 1:
        sizes, kernel = [call.depth, *sizes], [call.kernel_d, *kernel]
    stride = [call.stride] * len(kernel)
    padding = [min(call.padding, side // 2) for side in kernel]
    out = [(n + 2 * p - k) // call.stride + 1 for n, p, k in zip(sizes, padding, kernel, strict=True)]
    name = "max_pool" if call.op.startswith("max") else "avg_pool"
    operation: Callable[..., Tensor] = getattr(functional, f"{name}{len(kernel)}d")
    # the indices of the maxima are always written
    return _either(call, sizes, out, lambda x: operation(x, kernel, stride, padding))


def _adaptive(call: Any) -> Recipe:
    out = (call.out_height, call.out_width)
    return _either(call, [call.height, call.width], out, lambda x: functional.adaptive_avg_pool2d(x, out))


def _interpolate(call: Any) -> Recipe:
    out = [call.out_height, call.out_width]
    return _either(call, [call.height, call.width], out, lambda x: functional.interpolate(x, size=out, mode=call.mode))


def _pad(call: Any) -> Recipe:
    """Images and channels as two axes; what does not divide evenly by two goes to the far side."""
    channels = next(n for n in (64, 32, 16, 8, 4, 2, 1) if call.images % n == 0)
    small = (call.images // channels, channels, call.height, call.width)
    added = [call.out_width - call.width, call.out_height - call.height]
    borders = [part for more in added for part in (more // 2, more - more // 2)]

    def layer(x: Tensor) -> Tensor:
        return functional.pad(x, borders, mode=call.mode)

    if call.op == "pad":
        return _aten(specs(call.dtype, small), lambda x: partial(torch.no_grad()(layer), x))

    def launch(x: Tensor, gradient: Tensor) -> Launch:
        leaf = x.detach().requires_grad_()
        return partial(torch.autograd.grad, layer(leaf), leaf, gradient, retain_graph=True)

    return _aten(specs(call.dtype, small, (*small[:2], call.out_height, call.out_width)), launch)


def _channels_last(call: Any) -> Recipe:
    height, width = _square(call.spatial)
    if call.to == "nhwc":
        shape = (call.batch, call.channels, height, width)
        copied = partial(torch.clone, memory_format=torch.channels_last)
        return _aten(specs(call.dtype, shape), lambda x: partial(copied, x))
    copied = partial(torch.clone, memory_format=torch.contiguous_format)
    shape = (call.batch, height, width, call.channels)
    return _aten(specs(call.dtype, shape), lambda x: partial(copied, x.permute(0, 3, 1, 2)))


def _channel_cat(call: Any) -> Recipe:
    """The first takes what does not divide evenly."""
    each = call.channels // call.parts
    channels = [call.channels - each * (call.parts - 1), *[each] * (call.parts - 1)]
    height, width = _square(call.spatial)
    last = _is_last(call)
    shapes = [(call.batch, height, width, n) if last else (call.batch, n, height, width) for n in channels]
    return _aten(
        specs(call.dtype, *shapes), lambda *parts: partial(torch.cat, [_viewed(call, x) for x in parts], dim=1)
    )


def _roll(call: Any) -> Recipe:
    shape = (call.outer, call.length, call.inner)
    return _aten(specs(call.dtype, shape), lambda x: partial(torch.roll, x, -call.shift, 1))


def _both(runner: Runner, *names: str) -> dict[str, Runner]:
    return {name + way: runner for name in names for way in ("", "_backward")}


RUNNERS: Mapping[str, Runner] = {
    "conv2d": convolution,
    "conv2d_dgrad": partial(_gradient, True),
    "conv2d_wgrad": partial(_gradient, False),
    **_both(_batch_norm, "batch_norm"),
    **_both(_group_norm, "group_norm"),
    **_both(_pool, "max_pool", "avg_pool"),
    **_both(_adaptive, "adaptive_avg_pool"),
    **_both(_interpolate, "interpolate"),
    **_both(_pad, "pad"),
    "channels_last": _channels_last,
    "channel_cat": _channel_cat,
    "roll": _roll,
}
