"""Gradients of the activations and of dropout, in the same table of costs as elementwise.py."""

from __future__ import annotations

from kernelcast.kernels.elementwise import Cost, Elementwise


class SiluBackward(Elementwise):
    """dy · σ(x) · (1 + x · (1 − σ(x))): reads dy and x."""

    op = "silu_backward"
    cost = Cost(reads=2, flops=8, xu_ops=2)  # a sigmoid, and five


class GeluBackward(Elementwise):
    """Gradient of the exact GELU, dy · (Φ(x) + x · φ(x)): reads dy and x."""

    op = "gelu_backward"
    cost = Cost(reads=2, flops=38, xu_ops=2)  # erf as in gelu, an exp, and four


class GeluTanhBackward(Elementwise):
    """Gradient of GELU in tanh's approximation: reads dy and x."""

    op = "gelu_tanh_backward"
    cost = Cost(reads=2, flops=28, xu_ops=2)  # gelu_tanh, and the derivatives of tanh and its argument


class ReluBackward(Elementwise):
    """dy where the output is positive, else 0 (threshold_backward): reads dy and y."""

    op = "relu_backward"
    cost = Cost(reads=2, flops=1)


class TanhBackward(Elementwise):
    """dy · (1 − y²): reads dy and y."""

    op = "tanh_backward"
    cost = Cost(reads=2, flops=3)


class SigmoidBackward(Elementwise):
    """dy · y · (1 − y): reads dy and y."""

    op = "sigmoid_backward"
    cost = Cost(reads=2, flops=3)


class DropoutBackward(Elementwise):
    """dy · mask · scale: reads dy and the boolean mask that the forward pass wrote."""

    op = "dropout_backward"
    cost = Cost(flops=2, mask_bytes=1, instructions=1)  # the mask becomes a number
