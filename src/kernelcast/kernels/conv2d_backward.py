"""conv2d_dgrad and conv2d_wgrad: gradients of a convolution's input and of its filters, as implicit GEMMs (cuDNN)."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls
from kernelcast.kernels.conv2d import (
    DIRECT_THREADS,
    WINOGRAD_PRODUCTS,
    Conv2d,
    Sizes,
    sizes_of,
    with_candidates,
)
from kernelcast.kernels.dtypes import DType
from kernelcast.kernels.gemm import matmul_work
from kernelcast.kernels.vector import side_instructions
from kernelcast.kernels.work import Array, Number, Work, Works, ceil_div


class Conv2dDgrad(Conv2d):
    """Gradient of a convolution's input, from that of its output and the filters. Parameters are the forward's.

    m = batch · height · width, n = in_channels / groups, k = out_channels / groups · kernel_h · kernel_w, once a group.
    With a stride only every stride-th tap of the filter meets an output: pixels fall into stride² classes with their
    own taps, each a product of its own (CUTLASS's strided dgrad); classes without a tap are zero.
    """

    op = "conv2d_dgrad"

    @classmethod
    def product(cls, calls: Calls) -> tuple[Array, Array, Array, Array]:
        sizes, stride = sizes_of(calls), calls["stride"]
        classes = np.minimum(stride, calls["kernel_h"]) * np.minimum(stride, calls["kernel_w"])
        pixels = calls["batch"] * ceil_div(calls["height"], stride) * ceil_div(calls["width"], stride)  # of a class
        k = sizes.n * calls["kernel_h"] * calls["kernel_w"] / classes
        return pixels, calls["in_channels"] / sizes.groups, k, sizes.groups * classes

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        kind, sizes = calls.dtype, sizes_of(calls)
        pixels, channels, k, count = cls.product(calls)
        gradient = sizes.groups * sizes.m * sizes.n  # elements of dy
        whole = calls["batch"] * calls["in_channels"] * calls["height"] * calls["width"]  # and of dx
        gemm = matmul_work(gpu, kind, pixels, channels, k, batch=count)
        gemm = dataclasses.replace(
            gemm,
            activation_bytes=gradient * kind.act_bytes + whole * kind.out_bytes,
            # of the patches only dy itself is in memory, as in the forward pass
            refetched_bytes=np.asarray(gemm.refetched_bytes) * np.minimum(1.0, gradient / (sizes.groups * pixels * k)),
            tile={**gemm.tile, "algorithm": 0.0},
        )
        tiles = sizes.winograd_tiles  # one filter pixel a step: dx has about as many tiles as y
        return (_candidates(gpu, kind, sizes, gemm, (tiles, channels, sizes.n), _direct(gpu, kind, gemm, whole, k)),)


class Conv2dWgrad(Conv2d):
    """Gradient of a convolution's filters, from its input and the gradient of its output. Parameters are the forward's.

    m = out_channels / groups, n = in_channels / groups · kernel_h · kernel_w, k = batch · out_h · out_w, once a group:
    few tiles with a long sum each, so that libraries split k.
    """

    op = "conv2d_wgrad"

    @classmethod
    def product(cls, calls: Calls) -> tuple[Array, Array, Array, Array]:
        sizes = sizes_of(calls)
        return sizes.n, sizes.k, sizes.m, sizes.groups

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        kind, sizes = calls.dtype, sizes_of(calls)
        filters = sizes.groups * sizes.n * sizes.k  # elements
        m, n, k, count = cls.product(calls)
        gemm = matmul_work(gpu, kind, m, n, k, batch=count, weights=False)
        share = sizes.input_elements / (sizes.groups * sizes.m * sizes.k)  # of the patches the input itself
        gemm = dataclasses.replace(
            gemm,
            activation_bytes=(sizes.groups * sizes.m * sizes.n + sizes.input_elements) * kind.act_bytes
            + filters * kind.out_bytes,
            refetched_bytes=np.asarray(gemm.refetched_bytes) * share,
            tile={**gemm.tile, "algorithm": 0.0},
        )
        channels = calls["in_channels"] / sizes.groups
        direct = _filter_elements(gpu, kind, sizes, gemm, filters)
        return (_candidates(gpu, kind, sizes, gemm, (sizes.n, channels, sizes.winograd_tiles), direct),)


def _candidates(
    gpu: Gpu, kind: DType, sizes: Sizes, gemm: Work, winograd: tuple[Array, Array, Array], direct: Work
) -> Work:
    """The tiles of the GEMM; for 3x3 filters in fp32 Winograd's, for grouped ones the vector units (as in conv2d)."""
    work = gemm
    if kind.math == "fp32" and sizes.winograd.any():
        m, n, k = winograd
        products = matmul_work(gpu, kind, m, n, k, batch=WINOGRAD_PRODUCTS)
        products = dataclasses.replace(
            products,
            streamed_bytes=gemm.streamed_bytes,
            activation_bytes=gemm.activation_bytes,
            refetched_bytes=0.0,
            tile={**products.tile, "algorithm": 1.0},
        )
        work = with_candidates(work, products, sizes.winograd)
    grouped: NDArray[np.bool_] = sizes.groups > 1
    return with_candidates(work, direct, grouped) if grouped.any() else work


def _direct(gpu: Gpu, kind: DType, gemm: Work, pixels: Array, k: Array) -> Work:
    """A thread an input pixel of one channel (conv_depthwise2d_backward): dy comes in once, shared through L1."""
    tasks = ceil_div(pixels, DIRECT_THREADS)
    each = pixels / tasks
    l2_bytes = each * (kind.act_bytes + kind.out_bytes) + k * kind.weight_bytes
    return _on_vector_units(gpu, gemm, tasks, 2 * each * k, l2_bytes, each * k, k)


def _filter_elements(gpu: Gpu, kind: DType, sizes: Sizes, gemm: Work, filters: Array) -> Work:
    """A CTA an element of a filter, over all pixels (conv_depthwise2d_grad_weight_kernel)."""
    pixels = sizes.m
    return _on_vector_units(
        gpu,
        gemm,
        tasks=filters,
        flops=2 * pixels,
        l2_bytes=2 * pixels * kind.act_bytes + kind.out_bytes,
        operands=2 * pixels,
        steps=ceil_div(pixels, DIRECT_THREADS),
    )


def _on_vector_units(
    gpu: Gpu, gemm: Work, tasks: Array, flops: Array, l2_bytes: Array, operands: Array, steps: Number
) -> Work:
    """``gemm`` without tiles: FLOPs, L2 bytes and single loads of operands are those of one task."""
    return dataclasses.replace(
        gemm,
        tasks=tasks,
        tensor_flops=0.0,
        fma_flops=flops,
        smem_bytes=0.0,
        l2_bytes=l2_bytes,
        multicast_bytes=0.0,
        other_warp_instructions=side_instructions(gpu, l2_bytes, operands),
        refetched_bytes=0.0,
        threads=DIRECT_THREADS,
        registers_per_thread=40.0,
        smem_bytes_per_cta=0.0,
        serial_steps=steps,
        useful_flops=tasks * flops,
        tile={"tile_m": DIRECT_THREADS, "tile_n": 1.0, "tile_k": 1.0, "split_k": 1.0, "algorithm": 2.0},
    )
