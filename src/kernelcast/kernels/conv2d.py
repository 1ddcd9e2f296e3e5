"""conv2d as an implicit GEMM: a row of A for each output pixel, a column of B for each output channel; conv2d_dgrad and
conv2d_wgrad, the gradients of its input and of its filters, as such products too (cuDNN).

``tile["algorithm"]`` is the place of a candidate's algorithm in ``ALGORITHMS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, Conflicts, Kernel, Words, choice, conflict, size
from kernelcast.kernels.conv_sizes import Sizes, columns_by_axis
from kernelcast.kernels.dtypes import DType
from kernelcast.kernels.gemm import matmul_work, product_hints
from kernelcast.kernels.vector import side_instructions
from kernelcast.kernels.work import Array, Work, Works, ceil_div
from kernelcast.stacks import runner

# The number of an algorithm is its place here:
# 0 implicit_gemm: tiles gather the patches from L2.
# 1 winograd: F(4x4, 3x3) needs 36 products a channel for 16 outputs, not 144 (Lavin and Gray,
#   arXiv 1509.09308). cuDNN and MIOpen use it for 3x3 filters in fp32.
# 2 direct: a thread an output pixel, for grouped and depthwise filters.
ALGORITHMS = ("implicit_gemm", "winograd", "direct")
LAYOUTS = ("nhwc", "nchw")
_LAYOUT_HELP = "nchw: as PyTorch makes tensors; nhwc: channels last (not said: nhwc)"
_WINOGRAD_PRODUCTS = 36.0
_DIRECT_THREADS = 256.0


@dataclass(frozen=True)
class Plan:
    """What one of the three passes multiplies, moves and, without tiles, does on the vector units."""

    product: tuple[Array, Array, Array, Array]  # (m, n, k, how many) of the implicit GEMM
    winograd: tuple[Array, Array, Array]  # (m, n, k) of each of Winograd's products
    activation_bytes: Array
    memory_share: Array  # of im2col's matrix, what is in memory: what L2 must hold shrinks alike
    # direct on the vector units; demand is that of one task
    tasks: Array
    flops: Array
    l2_bytes: Array
    operands: Array  # loaded one by one
    steps: Array


class Conv2d(Kernel):
    """Two-dimensional convolution, channels last, as an implicit GEMM (cuDNN).

    m = batch · out_h · out_w, n = out_channels / groups, k = in_channels / groups · kernel_h · kernel_w, once
    a group. DRAM sees each input element once, however many patches share it. 3x3 filters in fp32 may also
    run by Winograd's method, grouped (depthwise) ones direct on the vector units.
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
    reads_filters: ClassVar[bool] = True  # as weights, from DRAM

    batch: int = size("images")
    in_channels: int = size("channels of the input")
    out_channels: int = size("channels of the output (filters)")
    height: int = size("rows of the input")
    width: int = size("columns of the input")
    kernel_h: int = size("rows of a filter")
    kernel_w: int = size("columns of a filter")
    stride: int = size("step between outputs, both ways", default=1)
    padding: int = size("zeros added on each side", default=0, low=0)
    dilation: int = size("step between the elements of a filter", default=1)
    groups: int = size("groups of channels that are convolved apart", default=1)
    stride_w: int | None = size("step between outputs along the columns, where it differs", default=None)
    padding_w: int | None = size("zeros beside the columns, where they differ", default=None, low=0)
    dilation_w: int | None = size("step between the columns of a filter, where it differs", default=None)
    depth: int | None = size("frames of the input (three axes; not said: 1)", default=None)
    kernel_d: int | None = size("frames of a filter", default=None)
    stride_d: int | None = size("step between frames of the output", default=None)
    padding_d: int | None = size("zeros added before and after the frames", default=None, low=0)
    dilation_d: int | None = size("step between the frames of a filter", default=None)
    layout: str | None = choice(_LAYOUT_HELP, LAYOUTS, default=None)
    tf32: str | None = choice("off: fp32 stays fp32 (cudnn.allow_tf32 is on by default)", ("off",), default=None)

    @classmethod
    def kinds(cls, calls: Calls) -> Mapping[str, str | NDArray[Any] | None]:
        groups = calls["groups"]
        filters = np.where(groups == 1, "dense", np.where(groups == calls["in_channels"], "depthwise", "grouped"))
        return {**calls.choices, "filters": filters.astype(object)}

    @classmethod
    def usual(cls, words: Words, gpu: Gpu) -> dict[str, str | None]:
        """Channels last, and the format that the stack computes in, where the GPU has it and it is not turned off."""
        stack, off = runner(words.get("stack")), words["tf32"] == "off" and words["dtype"] == "fp32"
        runs = dict(stack.runs).get(f"{cls.family} {words['dtype']}") if stack and not off else None
        dtype = runs if runs and gpu.tensor_flops_per_s(runs) else words["dtype"]
        return {**words, "layout": words["layout"] or "nhwc", "dtype": dtype, "tf32": "off" if off else None}

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        found: Conflicts = []
        for name in ("in_channels", "out_channels"):
            uneven = calls[name] % calls["groups"] != 0
            found += conflict(uneven, f"groups {{groups:.0f}} must divide {name} {{{name}:.0f}}", calls.numbers)
        names = (("depth", "kernel_d"), ("height", "kernel_h"), ("width", "kernel_w"))
        for (name, filter_name), axis in zip(names, columns_by_axis(calls), strict=True):
            text = f"{filter_name} spans {{span:.0f}} pixels, more than the padded {name} {{padded:.0f}}"
            found += conflict(axis.spare < 0, text, {"span": axis.span, "padded": axis.spare + axis.span})
        return found

    @classmethod
    def plan(cls, calls: Calls, sizes: Sizes) -> Plan:
        """Direct: a thread an output pixel of one channel (PyTorch's conv_depthwise2d_forward), no padding to tiles.

        Neighbours share their patches through L1, so a CTA reads its part of one group's input once.
        """
        kind = calls.dtype
        tasks = sizes.groups * sizes.n * ceil_div(sizes.m, _DIRECT_THREADS)
        pixels = sizes.output_elements / tasks
        input_per_pixel = sizes.input_elements / (sizes.groups * sizes.m)
        return Plan(
            product=(sizes.m, sizes.n, sizes.k, sizes.groups),
            winograd=(sizes.winograd_tiles, sizes.n, sizes.channels),
            activation_bytes=sizes.input_elements * kind.act_bytes + sizes.output_elements * kind.out_bytes,
            memory_share=sizes.input_elements / (sizes.groups * sizes.m * sizes.k),
            tasks=tasks,
            flops=2 * pixels * sizes.k,
            l2_bytes=pixels * (input_per_pixel * kind.act_bytes + kind.out_bytes) + sizes.k * kind.weight_bytes,
            operands=pixels * sizes.k,  # every product loads its own, from L1
            steps=sizes.k,
        )

    @classmethod
    def hints(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        """Of the parameters, and of the implicit GEMM: which kernel cuDNN takes depends on both."""
        product = product_hints(gpu, *cls.plan(calls, Sizes.of(calls)).product)
        found = super().hints(calls, gpu) | {"log_stride": np.log2(calls["stride"])}
        return found | {f"product_{name}": hint for name, hint in product.items()}

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        """The tiles of the GEMM; for 3x3 filters in fp32 Winograd's, for grouped ones the vector units."""
        kind, sizes = calls.dtype, Sizes.of(calls)
        plan = cls.plan(calls, sizes)
        m, n, k, count = plan.product
        gemm = matmul_work(gpu, kind, m, n, k, batch=count, weights=cls.reads_filters)
        gemm = replace(
            gemm,
            activation_bytes=plan.activation_bytes,
            refetched_bytes=np.asarray(gemm.refetched_bytes) * plan.memory_share,
            tile={**gemm.tile, "algorithm": 0.0},
        )
        work, grouped = gemm, sizes.groups > 1
        if kind.math == "fp32" and sizes.winograd.any():
            work = _with_candidates(work, _winograd(gpu, kind, gemm, plan), sizes.winograd)
        if grouped.any():
            work = _with_candidates(work, _direct(gpu, gemm, plan), grouped)
        return (work,)


class Conv2dDgrad(Conv2d):
    """Gradient of a convolution's input, from that of its output and the filters. Parameters are the forward's.

    m = batch · height · width, n = in_channels / groups, k = out_channels / groups · kernel_h · kernel_w, once a group.
    With a stride only every stride-th tap of the filter meets an output: pixels fall into stride² classes with their
    own taps, each a product of its own (CUTLASS's strided dgrad); classes without a tap are zero.
    """

    op = "conv2d_dgrad"

    @classmethod
    def plan(cls, calls: Calls, sizes: Sizes) -> Plan:
        """Direct: a thread an input pixel of one channel (conv_depthwise2d_backward), dy shared through L1."""
        kind, classes, pixels = calls.dtype, np.ones(calls.count), calls["batch"]
        for axis in sizes.axes:
            classes = classes * np.minimum(axis.stride, axis.kernel)
            pixels = pixels * ceil_div(axis.length, axis.stride)  # of a class
        k = sizes.n * sizes.taps / classes
        tasks = ceil_div(sizes.whole, _DIRECT_THREADS)
        each = sizes.whole / tasks
        return Plan(
            product=(pixels, sizes.channels, k, sizes.groups * classes),
            winograd=(sizes.winograd_tiles, sizes.channels, sizes.n),  # dx has about as many tiles as y
            activation_bytes=sizes.output_elements * kind.act_bytes + sizes.whole * kind.out_bytes,
            memory_share=np.minimum(1.0, sizes.output_elements / (sizes.groups * pixels * k)),  # dy itself
            tasks=tasks,
            flops=2 * each * k,
            l2_bytes=each * (kind.act_bytes + kind.out_bytes) + k * kind.weight_bytes,  # dy comes in once
            operands=each * k,
            steps=k,
        )


class Conv2dWgrad(Conv2d):
    """Gradient of a convolution's filters, from its input and the gradient of its output. Parameters are the forward's.

    m = out_channels / groups, n = in_channels / groups · kernel_h · kernel_w, k = batch · out_h · out_w, once a group:
    few tiles with a long sum each, so that libraries split k.
    """

    op = "conv2d_wgrad"
    reads_filters = False

    @classmethod
    def plan(cls, calls: Calls, sizes: Sizes) -> Plan:
        """Direct: a CTA an element of a filter, over all pixels (conv_depthwise2d_grad_weight_kernel)."""
        kind, filters = calls.dtype, sizes.groups * sizes.n * sizes.k  # elements
        read = sizes.output_elements + sizes.input_elements
        return Plan(
            product=(sizes.n, sizes.k, sizes.m, sizes.groups),
            winograd=(sizes.n, sizes.channels, sizes.winograd_tiles),
            activation_bytes=read * kind.act_bytes + filters * kind.out_bytes,
            memory_share=sizes.input_elements / (sizes.groups * sizes.m * sizes.k),
            tasks=filters,
            flops=2 * sizes.m,
            l2_bytes=2 * sizes.m * kind.act_bytes + kind.out_bytes,
            operands=2 * sizes.m,
            steps=ceil_div(sizes.m, _DIRECT_THREADS),
        )


def _winograd(gpu: Gpu, kind: DType, gemm: Work, plan: Plan) -> Work:
    """36 products of tiles, channels and filters. The transforms around them are not counted."""
    m, n, k = plan.winograd
    work = matmul_work(gpu, kind, m, n, k, batch=_WINOGRAD_PRODUCTS)
    return replace(
        work,
        streamed_bytes=gemm.streamed_bytes,
        activation_bytes=gemm.activation_bytes,
        refetched_bytes=0.0,
        tile={**work.tile, "algorithm": 1.0},
    )


def _direct(gpu: Gpu, gemm: Work, plan: Plan) -> Work:
    return replace(
        gemm,
        tasks=plan.tasks,
        tensor_flops=0.0,
        fma_flops=plan.flops,
        smem_bytes=0.0,
        l2_bytes=plan.l2_bytes,
        multicast_bytes=0.0,
        other_warp_instructions=side_instructions(gpu, plan.l2_bytes, plan.operands),
        refetched_bytes=0.0,
        threads=_DIRECT_THREADS,
        registers_per_thread=40.0,
        smem_bytes_per_cta=0.0,
        serial_steps=plan.steps,
        useful_flops=plan.tasks * plan.flops,
        tile={"tile_m": _DIRECT_THREADS, "tile_n": 1.0, "tile_k": 1.0, "split_k": 1.0, "algorithm": 2.0},
    )


def _with_candidates(works: Work, extra: Work, where: NDArray[np.bool_]) -> Work:
    """``works`` and the candidates of ``extra``; calls outside ``where`` repeat those of ``works`` there."""
    shape = works.shape
    more = (min(extra.shape[0], shape[0]), shape[1])

    def join(many: Any, others: Any) -> Array:
        table = np.broadcast_to(np.asarray(many, dtype=np.float64), shape)
        return np.concatenate([table, np.where(where, np.broadcast_to(others, more), table[: more[0]])])

    numbers: dict[str, Any] = {
        name: join(value, getattr(extra, name))
        for name, value in vars(works).items()
        if isinstance(value, float | int | np.ndarray)
    }
    tile = {name: join(value, extra.tile[name]) for name, value in works.tile.items()}
    return replace(works, **numbers, tile=tile)
