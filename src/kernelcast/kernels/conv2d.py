"""conv2d as an implicit GEMM: a row of A for each output pixel, a column of B for each output channel.

``tile["algorithm"]`` is the place of a candidate's algorithm in ``ALGORITHMS``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, Kernel, size
from kernelcast.kernels.dtypes import DType
from kernelcast.kernels.gemm import matmul_work, product_hints
from kernelcast.kernels.vector import side_instructions
from kernelcast.kernels.work import Array, Work, Works, ceil_div

# The number of an algorithm is its place here:
# 0 implicit_gemm: tiles gather the patches from L2.
# 1 winograd: F(4x4, 3x3) needs 36 products a channel for 16 outputs, not 144 (Lavin and Gray,
#   arXiv 1509.09308). cuDNN and MIOpen use it for 3x3 filters in fp32.
# 2 direct: a thread an output pixel, for grouped and depthwise filters.
ALGORITHMS = ("implicit_gemm", "winograd", "direct")
_WINOGRAD_SIDE = 4.0  # of a tile of outputs
WINOGRAD_PRODUCTS = 36.0
DIRECT_THREADS = 256.0


@dataclass(frozen=True)
class Sizes:
    """A convolution as ``groups`` products of m x k by k x n; all arrays (calls,)."""

    m: Array
    n: Array
    k: Array
    groups: Array
    input_elements: Array  # that any output needs: a stride beyond the kernel skips some
    winograd_tiles: Array  # of 4x4 outputs
    winograd: NDArray[np.bool_]  # the filter allows it


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

    @classmethod
    def conflicts(cls, calls: Calls) -> list[tuple[NDArray[np.bool_], str]]:
        found: list[tuple[NDArray[np.bool_], str]] = []
        groups = calls["groups"]
        for name in ("in_channels", "out_channels"):
            broken = calls[name] % groups != 0
            if broken.any():
                i = int(np.argmax(broken))
                found.append((broken, f"groups {groups[i]:.0f} must divide {name} {calls[name][i]:.0f}"))
        for name, filter_name in (("height", "kernel_h"), ("width", "kernel_w")):
            spare = _spare(calls, name, filter_name)
            if (spare < 0).any():
                i = int(np.argmax(spare < 0))
                padded = calls[name][i] + 2 * calls["padding"][i]
                span = f"{filter_name} spans {padded - spare[i]:.0f} pixels"
                found.append((spare < 0, f"{span}, more than the padded {name} {padded:.0f}"))
        return found

    @classmethod
    def product(cls, calls: Calls) -> tuple[Array, Array, Array, Array]:
        """(m, n, k, how many) of the implicit GEMM."""
        sizes = sizes_of(calls)
        return sizes.m, sizes.n, sizes.k, sizes.groups

    @classmethod
    def hints(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        """Of the parameters, and of the implicit GEMM: which kernel cuDNN takes depends on both."""
        m, n, k, count = cls.product(calls)
        found = super().hints(calls, gpu) | {"log_stride": np.log2(calls["stride"])}
        return found | {f"product_{name}": hint for name, hint in product_hints(gpu, m, n, k, count).items()}

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        kind, sizes = calls.dtype, sizes_of(calls)
        m, n, k, count = cls.product(calls)
        gemm = matmul_work(gpu, kind, m, n, k, batch=count)
        output_elements = sizes.groups * sizes.m * sizes.n
        # Of im2col's matrix only the input itself is in memory; what L2 must hold shrinks alike.
        share = sizes.input_elements / (sizes.groups * sizes.m * sizes.k)
        gemm = dataclasses.replace(
            gemm,
            activation_bytes=sizes.input_elements * kind.act_bytes + output_elements * kind.out_bytes,
            refetched_bytes=np.asarray(gemm.refetched_bytes) * share,
            tile={**gemm.tile, "algorithm": 0.0},
        )
        work = gemm
        if kind.math == "fp32" and sizes.winograd.any():
            work = with_candidates(work, _winograd(gpu, kind, sizes, gemm), sizes.winograd)
        if (sizes.groups > 1).any():
            work = with_candidates(work, _direct(gpu, kind, sizes, gemm), sizes.groups > 1)
        return (work,)


def _spare(calls: Calls, name: str, filter_name: str) -> Array:
    """Steps of one pixel that the filter can move along this side; negative: it does not fit."""
    span = calls["dilation"] * (calls[filter_name] - 1) + 1
    return calls[name] + 2 * calls["padding"] - span


def sizes_of(calls: Calls) -> Sizes:
    groups, stride, kernel_h, kernel_w = (calls[x] for x in ("groups", "stride", "kernel_h", "kernel_w"))
    out_h = np.floor(_spare(calls, "height", "kernel_h") / stride) + 1
    out_w = np.floor(_spare(calls, "width", "kernel_w") / stride) + 1
    m = calls["batch"] * out_h * out_w
    k = calls["in_channels"] / groups * kernel_h * kernel_w
    whole = calls["batch"] * calls["in_channels"] * calls["height"] * calls["width"]
    return Sizes(
        m=m,
        n=calls["out_channels"] / groups,
        k=k,
        groups=groups,
        input_elements=np.minimum(whole, groups * m * k),
        winograd_tiles=calls["batch"] * ceil_div(out_h, _WINOGRAD_SIDE) * ceil_div(out_w, _WINOGRAD_SIDE),
        winograd=(kernel_h == 3) & (kernel_w == 3) & (stride == 1) & (calls["dilation"] == 1) & (groups == 1),
    )


def _winograd(gpu: Gpu, kind: DType, sizes: Sizes, gemm: Work) -> Work:
    """36 products of tiles x channels by channels x filters. The transforms around them are not counted."""
    channels = sizes.k / 9
    work = matmul_work(gpu, kind, sizes.winograd_tiles, sizes.n, channels, batch=WINOGRAD_PRODUCTS)
    return dataclasses.replace(
        work,
        streamed_bytes=gemm.streamed_bytes,
        activation_bytes=gemm.activation_bytes,
        refetched_bytes=0.0,
        tile={**work.tile, "algorithm": 1.0},
    )


def _direct(gpu: Gpu, kind: DType, sizes: Sizes, gemm: Work) -> Work:
    """A thread an output pixel of one channel (PyTorch's conv_depthwise2d_forward): no padding to tiles.

    Neighbours share their patches through L1, so a CTA reads its part of one group's input once.
    """
    tasks = sizes.groups * sizes.n * ceil_div(sizes.m, DIRECT_THREADS)
    pixels = sizes.groups * sizes.n * sizes.m / tasks
    input_per_pixel = sizes.input_elements / (sizes.groups * sizes.m)
    l2_bytes = pixels * (input_per_pixel * kind.act_bytes + kind.out_bytes) + sizes.k * kind.weight_bytes
    return dataclasses.replace(
        gemm,
        tasks=tasks,
        tensor_flops=0.0,
        fma_flops=2 * pixels * sizes.k,
        smem_bytes=0.0,
        l2_bytes=l2_bytes,
        multicast_bytes=0.0,
        # every product loads its own operand, from L1
        other_warp_instructions=side_instructions(gpu, l2_bytes, pixels * sizes.k),
        refetched_bytes=0.0,
        threads=DIRECT_THREADS,
        registers_per_thread=40.0,
        smem_bytes_per_cta=0.0,
        serial_steps=sizes.k,
        tile={"tile_m": DIRECT_THREADS, "tile_n": 1.0, "tile_k": 1.0, "split_k": 1.0, "algorithm": 2.0},
    )


def with_candidates(works: Work, extra: Work, where: NDArray[np.bool_]) -> Work:
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
    return dataclasses.replace(works, **numbers, tile=tile)
