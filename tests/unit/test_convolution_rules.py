"""Convolutions of ATen as kernel calls: sizes of one to three axes, layouts, formats, biases and what is copied."""

from __future__ import annotations

from typing import Any

import pytest

from kernelcast.ops import kernel
from kernelcast.tracing.aten import OpSettings, op_launches
from kernelcast.tracing.aten.products import channels_last
from kernelcast.tracing.traced import Op, Tensor

HOPPER = OpSettings(capability="9.0")


def first(*shape: int, dtype: str = "bf16") -> Tensor:
    """Dense, the last axis innermost."""
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= size
    return Tensor(shape, tuple(reversed(steps)), dtype)


def last(*shape: int, dtype: str = "bf16") -> Tensor:
    """Dense, channels innermost."""
    moved = first(shape[0], *shape[2:], shape[1])
    return Tensor(shape, (moved.stride[0], 1, *moved.stride[1:-1]), dtype)


def convolved(*given: Tensor, **how: Any) -> list[dict[str, Any]]:
    """Input, filters, output, and a bias."""
    (x, weight, out), bias = given[:3], given[3] if len(given) > 3 else None
    axes = len(x.shape) - 2
    ways = [how.get(name, (usual,) * axes) for name, usual in (("stride", 1), ("padding", 0), ("dilation", 1))]
    arguments = (x, weight, bias, *ways, how.get("transposed", False), (0,) * axes, how.get("groups", 1))
    found = op_launches(Op("convolution", arguments, {}, (out,), "kernel", "forward", ""), how.get("settings", HOPPER))
    for one in found.launches:
        kernel(one.op, **{name: value for name, value in one.arguments.items() if name != "op"})  # a call that exists
    return [one.arguments for one in found.launches]


def test_one_axis_is_rows_of_one() -> None:
    (call,) = convolved(first(8, 80, 3000), first(512, 80, 3), first(8, 512, 1500), stride=(2,), padding=(1,))
    assert (call["height"], call["kernel_h"], call["padding"], call["stride"]) == (1, 1, 0, 1)
    assert (call["width"], call["kernel_w"], call["padding_w"], call["stride_w"]) == (3000, 3, 1, 2)
    assert call["layout"] == "nchw"


def test_three_axes_have_frames() -> None:
    (call,) = convolved(first(2, 3, 16, 224, 224), first(768, 3, 2, 16, 16), first(2, 768, 8, 14, 14),
                        stride=(2, 16, 16))  # fmt: skip
    assert (call["depth"], call["kernel_d"], call["stride_d"], call["padding_d"]) == (16, 2, 2, 0)
    assert (call["height"], call["kernel_h"], call["stride"], call.get("stride_w")) == (224, 16, 16, None)


def test_a_filter_of_one_row_is_padded_one_way() -> None:
    (call,) = convolved(first(2, 64, 17, 17), first(64, 64, 1, 7), first(2, 64, 17, 17), padding=(0, 3))
    assert (call["padding"], call["padding_w"], call["kernel_h"], call["kernel_w"]) == (0, 3, 1, 7)


@pytest.mark.parametrize(("x_last", "weight_last"), [(True, True), (True, False), (False, True), (False, False)])
def test_one_tensor_with_channels_last_takes_the_other_along(x_last: bool, weight_last: bool) -> None:
    shapes = ((2, 64, 28, 28), (128, 64, 3, 3))
    x, weight = (last(*s) if is_last else first(*s) for s, is_last in zip(shapes, (x_last, weight_last), strict=True))
    found = convolved(x, weight, first(2, 128, 28, 28), padding=(1, 1))
    assert found[-1]["layout"] == ("nhwc" if x_last or weight_last else "nchw")
    assert len(found) == 1 + (x_last != weight_last)  # the other is copied first


def test_ambiguous_strides_are_channels_first() -> None:
    assert not channels_last(first(8, 64, 1, 1)) and not channels_last(first(64, 1, 3, 3))
    assert channels_last(last(8, 64, 1, 1)) and channels_last(last(2, 16, 4, 8, 8))
    assert not channels_last(Tensor((8, 1, 1, 1), (1, 1, 1, 1), "bf16"))


def test_a_permuted_sequence_is_copied_and_stays_channels_first() -> None:
    x = Tensor((4, 256, 1000), (256000, 1, 256), "bf16")
    copied, call = convolved(x, first(256, 256, 3), first(4, 256, 1000), padding=(1,))
    assert copied["op"] == "transpose" and copied["rows"] * copied["cols"] * copied["batch"] == x.elements
    assert call["layout"] == "nchw"


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        (HOPPER, ("tf32", None)),
        (OpSettings(capability="9.0", tf32_convolutions=False), ("fp32", "off")),
        (OpSettings(capability="7.0"), ("fp32", "off")),
    ],
)
def test_fp32_runs_as_tf32_unless_it_is_off(settings: OpSettings, kind: tuple[str, str | None]) -> None:
    x, weight, out = (first(*s, dtype="fp32") for s in ((2, 64, 8, 8), (64, 64, 1, 1), (2, 64, 8, 8)))
    (call,) = convolved(x, weight, out, settings=settings)
    assert (call["dtype"], call.get("tf32")) == kind


def test_the_bias_is_added_by_a_kernel_of_its_own() -> None:
    shapes = ((2, 64, 8, 8), (128, 64, 1, 1), (2, 128, 8, 8))
    for lay in (first, last):
        conv, bias = convolved(*(lay(*s) for s in shapes), first(128))
        assert conv["op"] == "conv2d" and bias["op"] == "pointwise"
        assert bias["rows"] * bias["cols"] == 2 * 128 * 64
        assert bias["reads"] == pytest.approx(1.0, rel=0.02) and bias["writes"] == 1.0


def test_pytorchs_depthwise_kernels_add_it_themselves() -> None:
    shapes = ((2, 64, 8, 8), (64, 1, 7, 7), (2, 64, 8, 8))
    how: dict[str, Any] = {"groups": 64, "padding": (3, 3)}
    assert len(convolved(*(first(*s) for s in shapes), first(64), **how)) == 1
    assert len(convolved(*(last(*s) for s in shapes), first(64), **how)) == 2


def test_transposed_is_the_gradient_of_its_input() -> None:
    (call,) = convolved(first(8, 512, 32, 32), first(512, 256, 2, 2), first(8, 256, 64, 64), stride=(2, 2),
                        transposed=True)  # fmt: skip
    assert (call["op"], call["height"], call["in_channels"], call["out_channels"]) == ("conv2d_dgrad", 64, 256, 512)


def test_gradients_have_the_layout_of_what_they_came_from() -> None:
    x, weight, grad = last(2, 16, 32, 32), last(64, 16, 3, 3), first(2, 64, 32, 32)
    arguments = (grad, x, weight, (64,), (1, 1), (1, 1), (1, 1), False, (0, 0), 1, (True, True, True))
    found = op_launches(
        Op("convolution_backward", arguments, {}, (x, weight, first(64)), "kernel", "backward", ""), HOPPER
    )
    copied, dgrad, wgrad, bias = (one.arguments for one in found.launches)
    assert copied["op"] == "transpose"  # the gradient comes channels first
    assert (dgrad["op"], wgrad["op"], dgrad["layout"], wgrad["layout"]) == ("conv2d_dgrad", "conv2d_wgrad", "nhwc",
                                                                            "nhwc")  # fmt: skip
    assert (bias["op"], bias["rows"], bias["cols"], bias["axis"]) == ("reduce_sum", 2 * 32 * 32, 64, "rows")
