"""Convolutions to measure: what is drawn, and what PyTorch is asked to run."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kernelcast.collect.families.vision import TABLE
from kernelcast.collect.sampling import Draw
from kernelcast.errors import KernelcastError
from kernelcast.ops import Kernel, kernel
from kernelcast.ops.conv_work import axes_of

SMALL: dict[str, Any] = {"batch": 2, "in_channels": 8, "out_channels": 12, "height": 9, "width": 7, "kernel_h": 3,
                         "kernel_w": 3, "padding": 1, "stride": 2, "dtype": "fp32", "stack": "torch"}  # fmt: skip


def _calls(family: str, count: int = 150) -> list[Kernel]:
    draw, found = Draw(0), []
    for _ in range(count):
        try:
            found.append(kernel(**TABLE[family][0](draw)))
        except KernelcastError:  # sizes that do not go together
            continue
    return found


@pytest.mark.parametrize("family", [name for name in TABLE if name.startswith("conv")])
def test_nearly_every_draw_is_a_call(family: str) -> None:
    calls = _calls(family)
    assert len(calls) > 120
    assert len({str(call) for call in calls}) > 110


def test_families_have_what_they_are_named_for() -> None:
    assert all(call.height == 1 and call.kernel_h == 1 for call in _calls("conv-1d"))  # type: ignore[attr-defined]
    assert all(len(axes_of(call)) == 3 for call in _calls("conv-3d"))
    assert all(call.groups > 1 for call in _calls("conv-depthwise"))  # type: ignore[attr-defined]
    assert {call.op for call in _calls("conv-transposed")} == {"conv2d_dgrad"}
    assert {call.op for call in _calls("conv-gradients")} == {"conv2d_dgrad", "conv2d_wgrad"}
    for family in ("conv-forward", "conv-gradients"):
        calls = _calls(family)
        assert {call.layout for call in calls} == {"nchw", "nhwc"}  # type: ignore[attr-defined]
        assert {call.dtype for call in calls} >= {"bf16", "fp16", "tf32"}


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize(
    "more",
    [{}, {"groups": 4}, {"depth": 5, "kernel_d": 3, "padding_d": 1}, {"stride_w": 1, "padding_w": 0, "dilation_w": 2},
     {"height": 1, "kernel_h": 1, "padding": 0, "stride": 1, "padding_w": 1, "stride_w": 2}],
)  # fmt: skip
def test_pytorch_runs_the_call_in_its_layout(layout: str, more: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    from kernelcast.collect.pool import TensorPool
    from kernelcast.collect.runners.vision import RUNNERS

    pool = TensorPool(2**20, 1, device="cpu")
    for op in ("conv2d", "conv2d_dgrad", "conv2d_wgrad"):
        recipe = RUNNERS[op]
        call: Any = kernel(op, **{**SMALL, "layout": layout, **more})
        axes = axes_of(call)
        made = recipe(call)
        sets = pool.sets(*made.tensors)
        result = made.launch(*sets[0])()
        given: Any = [result] if op == "conv2d" else result
        (found,) = (x for x in given if x is not None)
        outputs = [call.batch, call.out_channels, *(a.outputs for a in axes)]
        shapes = {
            "conv2d": outputs,
            "conv2d_dgrad": [call.batch, call.in_channels, *(a.length for a in axes)],
            "conv2d_wgrad": [call.out_channels, call.in_channels // call.groups, *(a.kernel for a in axes)],
        }
        assert list(found.shape) == shapes[op]
        if op != "conv2d":  # what came out of the forward has the size of its gradient
            assert math.prod(made.tensors[2].shape) == math.prod(outputs)
        last = torch.channels_last if len(axes) == 2 else torch.channels_last_3d
        image = sets[0][0] if layout == "nchw" else sets[0][0].movedim(-1, 1)
        assert image.is_contiguous(memory_format=torch.contiguous_format if layout == "nchw" else last)


def test_tf32_is_as_the_call_says() -> None:
    torch = pytest.importorskip("torch")
    from kernelcast.collect.runners.vision import RUNNERS

    for kind, allowed in (({"dtype": "tf32"}, True), ({}, True), ({"tf32": "off"}, False), ({"dtype": "bf16"}, False)):
        RUNNERS["conv2d"](kernel("conv2d", **{**SMALL, **kind}))
        assert torch.backends.cudnn.allow_tf32 == allowed
