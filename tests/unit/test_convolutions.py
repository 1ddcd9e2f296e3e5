"""Convolutions and their gradients: each term of their work with its arithmetic, layouts, axes, groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernelcast.errors import KernelcastError
from kernelcast.hardware import gpu
from kernelcast.ops import kernel
from kernelcast.ops.base import columns_of
from kernelcast.ops.conv2d import ALGORITHMS, Conv2d
from kernelcast.ops.conv_work import STEP_CYCLES, ConvSizes, axes_of, depthwise_in_pytorch
from kernelcast.ops.work import Work, Works

H200 = gpu("h200_sxm")
RESNET: dict[str, Any] = {
    "batch": 32, "in_channels": 256, "out_channels": 512, "height": 14, "width": 14,
    "kernel_h": 3, "kernel_w": 3, "padding": 1,
}  # fmt: skip
OPS = ("conv2d", "conv2d_dgrad", "conv2d_wgrad")


def works(op: str, **values: Any) -> Works:
    call = kernel(op, **values)
    return type(call).work(columns_of([call]), H200)


def one(op: str, **values: Any) -> Work:
    (work,) = works(op, **values)
    return work


def of(work: Work, name: str) -> float:
    return float(np.ravel(getattr(work, name))[0])


def tiled(work: Work, tile_m: int, tile_n: int, split: float | None = None) -> dict[str, float]:
    """The numbers of a candidate."""
    tile = {name: np.broadcast_to(value, work.shape)[:, 0] for name, value in work.tile.items()}
    fits = (tile["tile_m"] == tile_m) & (tile["tile_n"] == tile_n)
    at = int(np.argmax(fits if split is None else fits & (tile["split_k"] == split)))
    assert fits[at]
    names = ("tasks", "serial_steps", "tensor_flops", "smem_bytes", "l2_bytes", "launches")
    return {name: float(np.broadcast_to(getattr(work, name), work.shape)[at, 0]) for name in names}


def test_forward_is_a_product_of_patches() -> None:
    # stride 2: out = floor((14 + 2 - 3) / 2) + 1 = 7, so m = 32 · 49 = 1568; n = 512; k = 256 · 9
    work = one("conv2d", **RESNET, stride=2)
    assert of(work, "useful_flops") == 2 * 1568 * 512 * 2304
    found = tiled(work, 128, 128)
    assert found["tasks"] == 13 * 4  # 1568 / 128 = 12.25, 512 / 128
    assert found["serial_steps"] == 9 * 4  # 256 channels a tap, 64 a step
    assert found["tensor_flops"] == 2 * 128 * 128 * 36 * 64
    assert found["l2_bytes"] == 2 * 128 * 36 * 64 * 2 + 128 * 128 * 2
    # the input itself, not the 1568 x 2304 of its patches
    assert of(work, "activation_bytes") == (32 * 256 * 14 * 14 + 32 * 512 * 7 * 7) * 2
    assert of(work, "streamed_bytes") == 512 * 256 * 9 * 2
    assert work.step_cycles == STEP_CYCLES


def test_a_step_never_spans_two_taps() -> None:
    # 72 channels: two steps of 64 a tap, though 9 · 72 would fit in 11
    assert tiled(one("conv2d", **{**RESNET, "in_channels": 72}), 64, 64)["serial_steps"] == 18
    # three channels take a whole step of 64 bytes (32 of bf16) for each of 49 taps, after padding to eight
    stem = {"batch": 32, "in_channels": 3, "out_channels": 64, "height": 224, "width": 224, "kernel_h": 7,
            "kernel_w": 7, "stride": 2, "padding": 3}  # fmt: skip
    *before, work = works("conv2d", **stem)
    found = tiled(work, 64, 64)
    assert found["serial_steps"] == 49 and found["tensor_flops"] == 2 * 64 * 64 * 49 * 32
    assert [of(pad, "activation_bytes") for pad in before] == [32 * 224 * 224 * 11 * 2, 64 * 49 * 11 * 2]


def test_stride_skips_input() -> None:
    # 1x1 filters two apart see a quarter of the pixels
    sizes = {"batch": 1, "in_channels": 8, "out_channels": 8, "height": 16, "width": 16, "kernel_h": 1, "kernel_w": 1}
    assert of(one("conv2d", **sizes, stride=2), "activation_bytes") == (8 * 8 * 8 + 8 * 8 * 8) * 2


def test_dgrad_is_a_product_of_output_patches() -> None:
    # stride 1: m = 32 · 14 · 14 = 6272 pixels of dx, n = 256, k = 512 · 9
    work = one("conv2d_dgrad", **RESNET)
    assert tiled(work, 128, 128)["tasks"] == 49 * 2 and tiled(work, 128, 128)["serial_steps"] == 9 * 8
    assert of(work, "useful_flops") == 2 * 6272 * 256 * 4608
    assert of(work, "activation_bytes") == 6272 * (512 + 256) * 2  # dy in, dx out
    assert of(work, "streamed_bytes") == 512 * 256 * 9 * 2


def test_strided_dgrad_skips_the_taps_that_meet_nothing() -> None:
    # stride 2, 3x3: four classes of 32 · 7 · 7 pixels with 2.25 taps on average; FLOPs are the forward's
    work, forward = one("conv2d_dgrad", **RESNET, stride=2), one("conv2d", **RESNET, stride=2)
    assert of(work, "useful_flops") == of(forward, "useful_flops") == 2 * (32 * 49) * 512 * 256 * 9
    assert of(work, "activation_bytes") == (32 * 49 * 512 + 32 * 196 * 256) * 2
    # 1x1: one class has the only tap, the other three pixels are zeros
    point = one("conv2d_dgrad", **{**RESNET, "kernel_h": 1, "kernel_w": 1, "padding": 0, "stride": 2})
    assert of(point, "useful_flops") == 2 * (32 * 49) * 512 * 256
    assert of(point, "activation_bytes") == (32 * 49 * 512 + 32 * 196 * 256) * 2


@pytest.mark.parametrize(
    ("target", "dtype", "depth", "visited"),
    [("h200_sxm", "tf32", 8, 8), ("a100_sxm", "tf32", 1, 4), ("a100_sxm", "tf32", 8, 1), ("t4", "fp32", 1, 1)],
)
def test_strided_dgrad_of_older_kernels_visits_every_tap(target: str, dtype: str, depth: int, visited: int) -> None:
    """Stride 2 leaves an eighth of 3x3x3 taps, a quarter of 3x3, where kernels skip the others."""
    frames = {"depth": depth, "kernel_d": 3, "stride_d": 2, "padding_d": 1} if depth > 1 else {}
    call = kernel("conv2d_dgrad", **{**RESNET, "stride": 2}, **frames, dtype=dtype)
    work = type(call).work(columns_of([call]), gpu(target))[0]
    pixels, taps = 32 * 14 * 14 * depth, 27 if depth > 1 else 9
    assert of(work, "useful_flops") == pytest.approx(2 * pixels * 256 * 512 * taps / visited)


def test_wgrad_is_a_product_over_all_pixels() -> None:
    # m = 512 filters, n = 256 for each of 9 taps, k = 32 · 14 · 14 = 6272, whole or split to fill 132 SMs
    work = one("conv2d_wgrad", **RESNET)
    whole, split = tiled(work, 128, 128, 1.0), tiled(work, 256, 128, 3.0)
    assert whole["tasks"] == 4 * 9 * 2 and whole["serial_steps"] == 98
    assert split["tasks"] == 2 * 9 * 2 * 3 and split["serial_steps"] == 33
    assert whole["launches"] == 1 and split["launches"] == 2  # another kernel adds the parts up
    assert of(work, "useful_flops") == 2 * 512 * 2304 * 6272
    assert of(work, "activation_bytes") == (6272 * 512 + 6272 * 256 + 512 * 2304) * 2  # dy and x in, dw out
    assert of(work, "streamed_bytes") == 0


def test_wgrad_turns_operands_of_four_bytes_in_shared_memory() -> None:
    # a step of 128 x 128 x 32: 16 KiB of each operand, read and written once more; steps of bf16 have as many bytes
    tf32, bf16 = (tiled(one("conv2d_wgrad", **RESNET, dtype=d), 128, 128, 1.0) for d in ("tf32", "bf16"))
    assert tf32["serial_steps"] == 2 * bf16["serial_steps"]
    each = tf32["smem_bytes"] / tf32["serial_steps"] - bf16["smem_bytes"] / bf16["serial_steps"]
    assert each == pytest.approx(2 * 2 * 128 * 32 * 4)


def test_winograd_for_fp32_3x3() -> None:
    # 14x14 outputs are 4x4 tiles of 4x4: m = 32 · 16 = 512 for each of 36 products of 512 x 256 x 512
    work = one("conv2d", **RESNET, dtype="fp32")
    algorithm = np.broadcast_to(work.tile["algorithm"], work.shape)[:, 0]
    winograd, gemm = (algorithm == ALGORITHMS.index(name) for name in ("winograd", "implicit_gemm"))
    assert winograd.sum() == gemm.sum() > 0
    useful = np.broadcast_to(work.useful_flops, work.shape)[:, 0]
    assert np.all(useful[winograd] == 2 * 36 * 512 * 256 * 512)
    assert np.all(useful[gemm] == 2 * (32 * 14 * 14) * 2304 * 512)
    for other in ({"dtype": "bf16"}, {"dtype": "fp32", "stride": 2}, {"dtype": "fp32", "stack": "torch"}):
        assert np.all(np.asarray(one("conv2d", **RESNET, **other).tile["algorithm"]) == 0)


@pytest.mark.parametrize("op", OPS)
def test_channels_first_are_turned_around_the_product(op: str) -> None:
    # x 32 · 196 · 256, filters 512 · 9 · 256, y 32 · 196 · 512: each read and written in bf16; the result comes last
    moved = {"x": 32 * 196 * 256, "w": 512 * 9 * 256, "y": 32 * 196 * 512}
    order = {"conv2d": "xwy", "conv2d_dgrad": "ywx", "conv2d_wgrad": "xyw"}[op]
    first, second, product, last = works(op, **RESNET, layout="nchw")
    assert [of(w, "activation_bytes") for w in (first, second, last)] == [4 * moved[name] for name in order]
    assert np.ravel(product.tensor_flops)[0] > 0 and all(np.all(w.tensor_flops == 0) for w in (first, second, last))
    assert len(works(op, **RESNET, layout="nhwc")) == len(works(op, **RESNET)) == 1


def test_what_is_not_turned() -> None:
    point = {**RESNET, "kernel_h": 1, "kernel_w": 1, "padding": 0}
    assert len(works("conv2d", **point, layout="nchw")) == 1  # a product as it lies
    assert len(works("conv2d", **point, layout="nchw", stride=2)) == 3  # filters of one tap lie both ways at once
    assert len(works("conv2d", **RESNET, layout="nchw", dtype="fp32", tf32="off")) == 1  # no matrix units
    assert len(works("conv2d", **{**RESNET, "out_channels": 256}, groups=256, layout="nchw")) == 1


def test_turning_few_channels_costs_a_square_of_them() -> None:
    # 32 images of 196 pixels: seven squares of 32 x 32 each, of which what is empty counts four fifths
    image, filters, *_ = works("conv2d", **{**RESNET, "in_channels": 3}, layout="nchw")
    assert of(image, "tasks") == np.ceil(32 * (0.8 * 7 * 1024 + 0.2 * 196 * 3) / 1024)
    assert of(filters, "tasks") == np.ceil(512 * (0.8 * 1024 + 0.2 * 27) / 1024)  # nine taps: a square each


def test_small_groups_share_a_tile() -> None:
    # 32 groups of 4 channels: two products of 64 x 64 a tap, of which a sixteenth is not zero
    work = one("conv2d", **{**RESNET, "in_channels": 128, "out_channels": 128}, groups=32)
    found = tiled(work, 64, 64)
    assert found["tasks"] == 98 * 2 and found["serial_steps"] == 9
    assert of(work, "useful_flops") == 2 * 6272 * 128 * 4 * 9


DEPTHWISE = {**RESNET, "out_channels": 256, "groups": 256}


@pytest.mark.parametrize(
    ("op", "layout", "outputs", "each"),
    [
        ("conv2d", "nchw", 32 * 256 * 196, 110 + 9 * 14.5),
        ("conv2d", "nhwc", 32 * 256 * 196, 9 * 4.0),
        ("conv2d_dgrad", "nchw", 32 * 256 * 196, 150 + 9 * 20),
        ("conv2d_wgrad", "nhwc", 32 * 256 * 196, 9 * 3.5),
    ],
)
def test_depthwise_runs_on_the_vector_units(op: str, layout: str, outputs: int, each: float) -> None:
    work = one(op, **DEPTHWISE, layout=layout)
    assert np.all(np.asarray(work.tile["algorithm"]) == ALGORITHMS.index("direct"))
    assert np.all(np.asarray(work.tensor_flops) == 0)
    tasks = of(work, "tasks")
    assert tasks == outputs / 256
    assert of(work, "fma_flops") * tasks == 2 * 9 * outputs
    l2_bytes = of(work, "l2_bytes")
    beside = 2 * l2_bytes / 16 / 32  # index arithmetic of 16-byte vectors
    assert of(work, "other_warp_instructions") == pytest.approx(outputs / tasks * each / 32 + beside)


def test_pytorchs_gradient_of_depthwise_filters_is_a_cta_an_element() -> None:
    # 256 · 9 elements of filters; 32 images of 196 pixels: seven times a warp of them, 100 instructions an image
    work = one("conv2d_wgrad", **DEPTHWISE, layout="nchw")
    assert of(work, "tasks") == 256 * 9 and of(work, "serial_steps") == 4 * 7
    assert of(work, "other_warp_instructions") == 32 * (7 * 36 + 100)
    assert of(work, "fma_flops") == pytest.approx(2 * 32 * 196)


def test_unusual_depthwise_filters_take_cudnns_general_kernel() -> None:
    usual, dilated, wide = (
        one("conv2d", **{**DEPTHWISE, **more}, layout="nhwc")
        for more in ({}, {"dilation": 2, "padding": 2}, {"kernel_h": 9, "kernel_w": 9, "padding": 4})
    )
    each = [of(work, "other_warp_instructions") - 2 * of(work, "l2_bytes") / 512 for work in (usual, dilated, wide)]
    assert each == pytest.approx([256 * 9 * 4 / 32, 256 * 9 * 60 / 32, 256 * 81 * 60 / 32])


def test_groups_without_a_kernel_run_one_after_another() -> None:
    # four groups of 56 channels: m = 6272 in 98 tiles of 64, each for all four groups in turn, nine taps each
    work = one("conv2d", **{**RESNET, "in_channels": 224, "out_channels": 224}, groups=4)
    found = tiled(work, 64, 64)
    assert found["tasks"] == 98 and found["serial_steps"] == 4 * 9
    assert of(work, "launches") == 2 and of(work, "useful_flops") == 2 * 6272 * 224 * 56 * 9


def test_single_pixels_channels_first_are_a_product_for_each_image() -> None:
    point = {**RESNET, "kernel_h": 1, "kernel_w": 1, "padding": 0}
    # 196 pixels are two tiles of 128 in each of 32 images; 6272 pixels of all are 49
    assert tiled(one("conv2d", **point, layout="nchw"), 128, 128)["tasks"] == 32 * 2 * 4
    assert tiled(one("conv2d", **point, layout="nhwc"), 128, 128)["tasks"] == 49 * 4
    assert tiled(one("conv2d_wgrad", **point, layout="nchw"), 128, 128, 1.0)["serial_steps"] == 4  # 196 / 64
    # its sums of each image, written and read in fp32
    more = [of(one("conv2d_wgrad", **point, layout=layout), "activation_bytes") for layout in ("nchw", "nhwc")]
    assert more[0] - more[1] == 2 * 32 * 512 * 256 * 4


def test_rows_that_are_no_whole_vectors_take_older_kernels_or_are_turned() -> None:
    point = {**RESNET, "kernel_h": 1, "kernel_w": 1, "padding": 0, "layout": "nchw"}
    whole, narrow = (one("conv2d", **{**point, "height": h, "width": w}) for h, w in ((16, 16), (14, 14)))
    flops = [tiled(work, 128, 128)["tensor_flops"] for work in (whole, narrow)]  # 512 and 392 bytes a row
    assert flops[1] == 1.6 * flops[0] and of(narrow, "step_cycles") == 1.6 * STEP_CYCLES
    assert len(works("conv2d", **{**point, "height": 7, "width": 7})) == 3  # 98 bytes
    assert len(works("conv2d", **{**point, "height": 7, "width": 7, "dtype": "tf32"})) == 1
    assert len(works("conv2d", **{**point, "height": 1, "width": 1})) == 1


def _own(**values: Any) -> bool:
    columns = columns_of([Conv2d(**{**DEPTHWISE, "layout": "nchw", **values})])
    return bool(depthwise_in_pytorch(columns, ConvSizes(columns))[0])


def test_which_depthwise_kernels_are_pytorchs() -> None:
    assert _own(dtype="bf16") and _own(dtype="tf32") and not _own(dtype="bf16", layout="nhwc")
    assert not _own(dtype="fp16") and _own(dtype="fp16", kernel_h=7, kernel_w=7, padding=3)
    assert _own(dtype="fp16", stride=2) and not _own(dtype="fp16", stride=2, batch=1)
    assert not _own(dtype="fp16", stride=2, height=28, width=28)
    assert _own(dtype="fp16", dilation=2, padding=2) and _own(dtype="fp16", depth=4, kernel_d=3)
    assert not _own(groups=128) and not _own(dtype="bf16", groups=1)


def test_one_axis_and_three() -> None:
    line = {"batch": 8, "in_channels": 80, "out_channels": 512, "height": 1, "width": 3000, "kernel_h": 1,
            "kernel_w": 3, "padding": 0, "padding_w": 1, "stride_w": 2}  # fmt: skip
    assert of(one("conv2d", **line), "useful_flops") == 2 * (8 * 1500) * 512 * 240
    video = {**RESNET, "depth": 16, "kernel_d": 3, "padding_d": 1, "stride_d": 2}
    assert of(one("conv2d", **video), "useful_flops") == 2 * (32 * 8 * 196) * 512 * 256 * 27
    assert [axis.outputs for axis in axes_of(kernel("conv2d", **video))] == [8, 14, 14]
    assert [axis.outputs for axis in axes_of(kernel("conv2d", **line))] == [1, 1500]


def test_hints_tell_the_implicit_product() -> None:
    """Stride 2 of 14 x 14 pixels, padded by 1: 7 x 7 outputs, four classes of input pixels with 9 / 4 taps each."""
    products = {
        "conv2d": (32 * 49, 512, 256 * 9, 1),
        "conv2d_dgrad": (32 * 49, 256, 512 * 9 / 4, 4),
        "conv2d_wgrad": (512, 256 * 9, 32 * 49, 1),
    }
    for op, product in products.items():
        call = kernel(op, **RESNET, stride=2)
        hints = type(call).shape_features(columns_of([call]), H200)
        found = [2 ** float(hints[f"product_log_{name}"][0]) for name in ("m", "n", "k", "batch")]
        assert found == pytest.approx(product), op
        assert hints["log_stride"] == 1.0 and hints["log_step"] == 2.0 and hints["whole_vectors"] == 1.0


def test_refuses() -> None:
    with pytest.raises(KernelcastError, match="in_channels 256 is no multiple of groups 3"):
        Conv2d(**RESNET, groups=3)
    with pytest.raises(KernelcastError, match="kernel_h spans 31 pixels, more than the padded height 16"):
        Conv2d(**RESNET, dilation=15)
    with pytest.raises(KernelcastError, match="kernel_d spans 3 pixels, more than the padded depth 1"):
        Conv2d(**RESNET, kernel_d=3)
    with pytest.raises(KernelcastError, match="kernel_w spans 31 pixels, more than the padded width 16"):
        Conv2d(**RESNET, dilation_w=15)


@pytest.mark.parametrize(
    ("dtype", "tf32", "place", "runs"),
    [("fp32", None, "h200_sxm", "tf32"), ("fp32", "off", "h200_sxm", "fp32"), ("fp32", None, "v100_pcie", "fp32"),
     ("bf16", "off", "h200_sxm", "bf16")],
)  # fmt: skip
def test_pytorch_computes_fp32_as_tf32_unless_it_is_off(dtype: str, tf32: str | None, place: str, runs: str) -> None:
    usual = Conv2d.with_defaults({"stack": "torch", "dtype": dtype, "tf32": tf32, "layout": None}, gpu(place))
    assert usual["dtype"] == runs and usual["layout"] == "nhwc"
    assert usual["tf32"] == ("off" if (dtype, tf32) == ("fp32", "off") else None)
