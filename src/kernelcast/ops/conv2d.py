"""conv2d as an implicit GEMM: one row of A per output pixel, one column of B per output channel; conv2d_dgrad and
conv2d_wgrad, the gradients of input and filters, are such products too (cuDNN). 1d is an image of one row, 3d has
frames; a transposed convolution is conv2d_dgrad of its forward.

``tile["algorithm"]`` is the index of a candidate's algorithm in ``ALGORITHMS``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.hardware.gpu import FMA, MMA_SYNC
from kernelcast.ops.base import (
    Calls,
    Configuration,
    ConfigurationColumns,
    Conflicts,
    Kernel,
    choice,
    conflict,
    grain,
    not_multiple,
    size,
)
from kernelcast.ops.conv_work import (
    FORWARD,
    OF_FILTERS,
    OF_INPUT,
    ConvProduct,
    ConvSizes,
    Direct,
    Image,
    columns_by_axis,
    depthwise_in_pytorch,
    direct_work,
    layout_kernels,
    product_work,
    transposed,
    untransposed,
)
from kernelcast.ops.dtypes import matmul_pipe
from kernelcast.ops.gemm import product_features
from kernelcast.ops.vector import ACCUMULATOR_BYTES, VECTOR_BYTES
from kernelcast.ops.work import Array, Work, Works
from kernelcast.stacks import runner

# The number of an algorithm is its index here:
# 0 implicit_gemm: tiles gather the patches from L2.
# 1 winograd: F(4x4, 3x3) needs 36 products a channel for 16 outputs, not 144 (Lavin and Gray,
#   arXiv 1509.09308). cuDNN and MIOpen use it for 3x3 filters in fp32,
#   which PyTorch selects only with torch.backends.cudnn.benchmark.
# 2 direct: one thread per output pixel, for depthwise filters.
ALGORITHMS = ("implicit_gemm", "winograd", "direct")
LAYOUTS = ("nhwc", "nchw")
_LAYOUT_HELP = "nchw: PyTorch's default; nhwc: channels last (default: nhwc)"
_WINOGRAD_PRODUCTS = 36.0
_LOOP_LAUNCHES = 0.5  # of a start, for each group that runs by itself: cuDNN has several streams
_PACKED_CHANNELS = 64.0  # of the groups that share a tile


@dataclass(frozen=True)
class ConvPlan:
    """What one of the three passes multiplies and moves."""

    product: ConvProduct
    winograd: ConvProduct
    direct: Direct
    images: tuple[Image, ...]  # its tensors, the result last
    streamed_bytes: Array  # filters that are read
    activation_bytes: Array


class Conv2d(Kernel):
    """1d to 3d convolution as an implicit GEMM (cuDNN), channels last or first.

    m = batch · outputs, n = out_channels / groups, k = in_channels / groups · taps, once per group; small groups share
    a tile. DRAM reads each input element once, however many patches share it. Channels first tensors are transposed by
    separate kernels, except for pointwise products. 3x3 filters in fp32 may also run by Winograd's algorithm. Depthwise
    filters run direct on the vector units: ATen's kernels channels first, cuDNN's channels last.
    """

    op = "conv2d"
    dtypes = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8")
    examples = (
        {
            "batch": 32, "in_channels": 256, "out_channels": 256, "height": 14, "width": 14,
            "kernel_h": 3, "kernel_w": 3, "padding": 1,
        },
        {
            "batch": 32, "in_channels": 96, "out_channels": 96, "height": 56, "width": 56,
            "kernel_h": 7, "kernel_w": 7, "padding": 3, "groups": 96,
        },
    )  # fmt: skip

    batch: int = size("images")
    in_channels: int = size("input channels")
    out_channels: int = size("output channels (filters)")
    height: int = size("rows of the input")
    width: int = size("columns of the input")
    kernel_h: int = size("rows of a filter")
    kernel_w: int = size("columns of a filter")
    stride: int = size("stride along rows and columns", default=1)
    padding: int = size("zero padding on each side", default=0, low=0)
    dilation: int = size("dilation", default=1)
    groups: int = size("groups of channels", default=1)
    stride_w: int | None = size("stride along the columns, default: stride", default=None)
    padding_w: int | None = size("padding along the columns, default: padding", default=None, low=0)
    dilation_w: int | None = size("dilation along the columns, default: dilation", default=None)
    depth: int | None = size("frames of the input (3d), default: 1", default=None)
    kernel_d: int | None = size("frames of a filter", default=None)
    stride_d: int | None = size("stride along the frames", default=None)
    padding_d: int | None = size("padding along the frames", default=None, low=0)
    dilation_d: int | None = size("dilation along the frames", default=None)
    layout: str | None = choice(_LAYOUT_HELP, LAYOUTS, default=None)
    tf32: str | None = choice("off: fp32 stays fp32 (cudnn.allow_tf32 is on by default)", ("off",), default=None)

    @classmethod
    def configuration(cls, calls: Calls) -> ConfigurationColumns:
        groups = calls["groups"]
        filters = np.where(groups == 1, "dense", np.where(groups == calls["in_channels"], "depthwise", "grouped"))
        return {**calls.choices, "filters": filters.astype(object)}

    @classmethod
    def with_defaults(cls, configuration: Configuration, gpu: Gpu) -> dict[str, str | None]:
        """Channels last, and the dtype that the stack computes in (tf32), where the GPU has it and it is not turned
        off."""
        stack, off = (
            runner(configuration.get("stack")),
            configuration["tf32"] == "off" and configuration["dtype"] == "fp32",
        )
        runs = dict(stack.runs).get(f"{cls.family} {configuration['dtype']}") if stack and not off else None
        dtype = runs if runs and gpu.tensor_flops_per_s(runs) else configuration["dtype"]
        return {
            **configuration,
            "layout": configuration["layout"] or "nhwc",
            "dtype": dtype,
            "tf32": "off" if off else None,
        }

    @classmethod
    def alike(cls, name: str, value: str | None, other: str | None) -> bool:
        """With the defaults filled in, the dtype says what is computed in: fp32 is the same, whether TF32 is turned off
        or the GPU has none."""
        return name == "tf32" or super().alike(name, value, other)

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        broken = [
            *not_multiple(calls.numbers, "in_channels", "groups"),
            *not_multiple(calls.numbers, "out_channels", "groups"),
        ]
        names = (("depth", "kernel_d"), ("height", "kernel_h"), ("width", "kernel_w"))
        for (name, filter_name), axis in zip(names, columns_by_axis(calls), strict=True):
            text = f"{filter_name} spans {{span:.0f}} pixels, more than the padded {name} {{padded:.0f}}"
            broken += conflict(axis.spare < 0, text, {"span": axis.extent, "padded": axis.spare + axis.extent})
        return broken

    @classmethod
    def plan(cls, calls: Calls, sizes: ConvSizes, gpu: Gpu) -> ConvPlan:
        dtype, (packed, count, rounds), narrow = calls.dtype, _packed(sizes), _narrow(calls, sizes)
        m, images = _by_image(calls, sizes, sizes.m)
        n, inner = packed * sizes.n, packed * sizes.channels
        return ConvPlan(
            product=ConvProduct(m, n, inner, sizes.taps * rounds, count * images, packed, narrow),
            winograd=_winograd_product(sizes.winograd_tiles, sizes.n, sizes.channels),
            direct=Direct(sizes.output_elements, sizes.taps, FORWARD),
            images=(sizes.input, sizes.filters, sizes.output),
            streamed_bytes=sizes.filter_elements * dtype.weight_bytes,
            activation_bytes=sizes.input_elements * dtype.act_bytes + sizes.output_elements * dtype.out_bytes,
        )

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        """Of the parameters and of the implicit GEMM: cuDNN selects kernels by both."""
        sizes = ConvSizes(calls)
        gemm = cls.plan(calls, sizes, gpu).product
        product = product_features(gpu, gemm.m, gemm.columns, gemm.k, gemm.count)
        features = super().shape_features(calls, gpu) | {"log_stride": np.log2(calls["stride"])}
        features |= {f"product_{name}": hint for name, hint in product.items()}
        return features | _selection_features(calls, sizes, gpu)

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        """Tiles of the GEMM; Winograd for 3x3 filters in fp32; vector units for depthwise filters; and kernels that
        transpose or pad the tensors."""
        sizes = ConvSizes(calls)
        plan = cls.plan(calls, sizes, gpu)
        work = product_work(gpu, calls.dtype, plan.product)
        if calls.dtype.math == "fp32" and calls.choice("stack") != "torch" and sizes.winograd.any():
            winograd = product_work(gpu, calls.dtype, plan.winograd)
            winograd = replace(winograd, tile={**winograd.tile, "algorithm": 1.0})
            work = _joined(work, _where(sizes.winograd, winograd, work))
        if sizes.depthwise.any():
            moved = plan.streamed_bytes + plan.activation_bytes
            work = _where(sizes.depthwise, direct_work(calls, sizes, gpu, plan.direct, moved), work)
        rounds = np.where(sizes.looped, np.maximum(1.0, _LOOP_LAUNCHES * sizes.groups), 1.0)
        work = replace(
            work,
            streamed_bytes=plan.streamed_bytes,
            activation_bytes=plan.activation_bytes,
            launches=work.launches * rounds,
        )
        return (
            *layout_kernels(calls, sizes, gpu, plan.images[:-1]),
            work,
            *layout_kernels(calls, sizes, gpu, plan.images[-1:]),
        )


class Conv2dDgrad(Conv2d):
    """Gradient of a convolution's input. Parameters are the forward's.

    m = batch · height · width, n = in_channels / groups, k = out_channels / groups · kernel_h · kernel_w, once per
    group. With a stride, pixels fall into stride² classes that meet different taps, each a product (CUTLASS's strided
    dgrad), where a kernel skips the taps that a pixel does not meet (``_skips_taps``).
    """

    op = "conv2d_dgrad"

    @classmethod
    def plan(cls, calls: Calls, sizes: ConvSizes, gpu: Gpu) -> ConvPlan:
        dtype, (packed, count, rounds), narrow = calls.dtype, _packed(sizes), _narrow(calls, sizes)
        classes, pixels = np.ones(calls.count), calls["batch"]
        skips = _skips_taps(calls, sizes, gpu)
        for axis in sizes.axes:
            classes = classes * np.where(skips, np.minimum(axis.stride, axis.kernel), 1.0)
            pixels = pixels * np.where(skips, np.ceil(axis.length / axis.stride), axis.length)  # of a class
        taps, count = sizes.taps * rounds / classes, count * classes
        m, images = _by_image(calls, sizes, pixels)
        n, inner = packed * sizes.channels, packed * sizes.n
        return ConvPlan(
            product=ConvProduct(m, n, inner, taps, count * images, packed, narrow),
            winograd=_winograd_product(sizes.winograd_tiles, sizes.channels, sizes.n),  # dx has about as many as y
            direct=Direct(sizes.whole, sizes.taps, OF_INPUT),  # visits every tap, whether it meets an output or not
            images=(sizes.output, sizes.filters, sizes.input),
            streamed_bytes=sizes.filter_elements * dtype.weight_bytes,
            activation_bytes=sizes.output_elements * dtype.act_bytes + sizes.whole * dtype.out_bytes,
        )


class Conv2dWgrad(Conv2d):
    """Gradient of a convolution's filters. Parameters are the forward's.

    m = out_channels / groups, n = in_channels / groups per tap, k = batch · out_h · out_w, once per group: few tiles
    with a long k, which libraries split.
    """

    op = "conv2d_wgrad"

    @classmethod
    def plan(cls, calls: Calls, sizes: ConvSizes, gpu: Gpu) -> ConvPlan:
        dtype, (packed, count, rounds) = calls.dtype, _packed(sizes)
        pixels, images = _by_image(calls, sizes, sizes.m)
        read = sizes.output_elements + sizes.input_elements
        # sums of each image, which another kernel adds up (reduce_wgrad_nchw_helper)
        partial = np.where(images > 1, 2 * images * sizes.filter_elements * ACCUMULATOR_BYTES, 0.0)
        return ConvPlan(
            product=ConvProduct(
                packed * sizes.n, packed * sizes.channels, pixels, rounds, count * images, tap_columns=sizes.taps,
                splits=True, packed=packed, pixels_inner=True, narrow=_narrow(calls, sizes),
            ),
            winograd=_winograd_product(sizes.n, sizes.channels, sizes.winograd_tiles, splits=True),
            direct=Direct(sizes.output_elements, sizes.taps, OF_FILTERS),  # a product for each pixel and tap
            images=(sizes.input, sizes.output, sizes.filters),
            streamed_bytes=np.zeros(calls.count),
            activation_bytes=read * dtype.act_bytes + sizes.filter_elements * dtype.out_bytes + partial,
        )  # fmt: skip


def _skips_taps(calls: Calls, sizes: ConvSizes, gpu: Gpu) -> NDArray[np.bool_]:
    """Whether the gradient of a strided input skips taps that meet no output. Hopper's kernels do
    (``dgrad_implicit_gemm_indexed`` in profiles); before them those of two axes on tensor cores (CUTLASS's iterators of
    ``Conv2dDgrad`` have a strided form, those of ``Conv3dDgrad`` test every tap), none on vector units: fp32 on Turing.
    """
    if gpu.instruction_path not in (MMA_SYNC, FMA):
        return np.ones(calls.count, dtype=bool)
    flat = (sizes.axes[0].length == 1) & (sizes.axes[0].kernel == 1)
    return np.broadcast_to(flat & (matmul_pipe(gpu, calls.dtype.name) == "tensor"), (calls.count,))


def _packed(sizes: ConvSizes) -> tuple[Array, Array, Array]:
    """Groups that share a tile, how many such products there are, and how many run one after another (a loop over
    groups counts as a longer k)."""
    most = np.floor(_PACKED_CHANNELS / np.maximum(sizes.n, sizes.channels))
    packed = np.where(sizes.looped, 1.0, np.clip(most, 1.0, sizes.groups))
    products = np.ceil(sizes.groups / packed)
    return packed, np.where(sizes.looped, 1.0, products), np.where(sizes.looped, products, 1.0)


def _by_image(calls: Calls, sizes: ConvSizes, pixels: Array) -> tuple[Array, Array]:
    """(pixels per product, products): one product per image where channels-first images are multiplied without a
    transpose."""
    images = np.where(untransposed(calls, sizes) & (sizes.m > sizes.batch), sizes.batch, 1.0)
    return pixels / images, images


def _narrow(calls: Calls, sizes: ConvSizes) -> NDArray[np.bool_]:
    """Untransposed images whose rows of pixels are no multiple of 16 bytes."""
    row_bytes = sizes.m / sizes.batch * calls.dtype.act_bytes
    return untransposed(calls, sizes) & (sizes.m > sizes.batch) & (np.mod(row_bytes, VECTOR_BYTES) > 0)


def _winograd_product(m: Array, n: Array, k: Array, splits: bool = False) -> ConvProduct:
    """36 products of tiles, channels and filters. The transforms are not counted."""
    ones = np.ones_like(m)
    return ConvProduct(m, n, k, ones, _WINOGRAD_PRODUCTS * ones, splits=splits)


def _selection_features(calls: Calls, sizes: ConvSizes, gpu: Gpu) -> dict[str, Array]:
    """What cuDNN and PyTorch select kernels by beside sizes: vector alignment, taps, groups, axes."""
    frames, rows, columns = sizes.axes
    inputs, outputs = sizes.channels * sizes.groups, sizes.n * sizes.groups
    numbers = {
        "taps": sizes.taps, "groups": sizes.groups, "group_channels": sizes.channels, "group_filters": sizes.n,
        "input_pixels": sizes.input_pixels, "output_pixels": sizes.m, "row": columns.outputs,
        "frames": frames.length, "step": columns.stride * rows.stride * frames.stride, "packed": _packed(sizes)[0],
    }  # fmt: skip
    facts = {
        "pointwise": sizes.pointwise, "depthwise": sizes.depthwise, "own": depthwise_in_pytorch(calls, sizes),
        "converted": transposed(calls, sizes, gpu), "looped": sizes.looped, "ordinary": sizes.ordinary,
        "one_row": rows.length * rows.kernel == 1,
        "dilated": rows.dilation * columns.dilation > 1, "first_layer": inputs <= 4, "narrow": _narrow(calls, sizes),
        "whole_vectors": (inputs % 8 == 0) & (outputs % 8 == 0), "unpadded": columns.padding == 0,
        "by_strides": (columns.stride == columns.kernel) & (columns.kernel > 1),
    }  # fmt: skip
    features = {f"log_{name}": np.log2(np.maximum(value, 1e-9)) for name, value in numbers.items()}
    features |= {f"grain_{name}": grain(value) for name, value in (("inputs", inputs), ("outputs", outputs))}
    features |= {f"mod8_{name}": np.mod(value, 8) for name, value in (("inputs", inputs), ("outputs", outputs))}
    return features | {name: np.asarray(value, dtype=np.float64) for name, value in facts.items()}


def _table(value: Any, shape: tuple[int, int]) -> Array:
    return np.broadcast_to(np.asarray(value, dtype=np.float64), shape)


def _merged(works: Work, extra: Work, how: Any) -> Work:
    """``how`` applied to every number of the two works."""
    numbers = {
        name: how(value, getattr(extra, name))
        for name, value in vars(works).items()
        if isinstance(value, float | int | np.ndarray)
    }
    return replace(works, **numbers, tile={name: how(value, extra.tile[name]) for name, value in works.tile.items()})


def _where(where: NDArray[np.bool_], those: Work, others: Work) -> Work:
    """The candidates of ``those`` for some calls, of ``others`` for the rest."""
    shape = others.shape

    def chosen(other: Any, that: Any) -> Array:
        return np.where(where, _table(that, shape), _table(other, shape))

    return _merged(others, those, chosen)


def _joined(works: Work, extra: Work) -> Work:
    """The candidates of both."""
    shape = works.shape
    return _merged(works, extra, lambda a, b: np.concatenate([_table(a, shape), _table(b, shape)]))
