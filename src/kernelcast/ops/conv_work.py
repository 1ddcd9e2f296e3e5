"""Sizes and kernels of convolutions: the implicit GEMM in tiles, kernels that transpose or pad tensors, and direct
kernels.

cuDNN's heuristics for tiles are not documented; the tiles are those seen in profiles (sm90_xmma and CUTLASS), and the
machine ranks them. Tensor-core kernels want channels last in whole vectors: cuDNN transposes other tensors, pads
channels, and transposes the result back, each in a separate kernel. Depthwise filters run on the vector units.
Instructions are from profiles of an H200 (PyTorch 2.11, cuDNN 9.19): time times the issue rate of its SMs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.hardware.gpu import WGMMA
from kernelcast.ops.base import Calls
from kernelcast.ops.dtypes import DType, matmul_pipe
from kernelcast.ops.gemm import MMA_SYNC, TASK_CYCLES, MatrixUnit, matrix_unit
from kernelcast.ops.vector import vector_kernel
from kernelcast.ops.work import Array, Number, Work, axis, ceil_div

Mask = NDArray[np.bool_]
_WINOGRAD_SIDE = 4.0  # of a tile of outputs
# What cuDNN 9.19 has kernels for, by the names in profiles.
_GROUPED = (2, 4, 8, 16, 32, 64)  # channels of a group
_LONGEST_GROUPED = 7  # side of a filter, of groups of 32 channels and more
_DEPTHWISE = (3, 5, 7)  # sides
_FRAMES = {"depth": 1, "kernel_d": 1, "stride_d": 1, "padding_d": 0, "dilation_d": 1}  # of two axes


@dataclass(frozen=True)
class Axis:
    """One axis of the image and of the filter: whole numbers, or arrays (calls,)."""

    length: Any
    kernel: Any
    stride: Any
    padding: Any
    dilation: Any

    @property
    def extent(self) -> Any:
        """Pixels that a filter covers."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def spare(self) -> Any:
        """Positions of the filter less one; negative: it does not fit."""
        return self.length + 2 * self.padding - self.extent

    @property
    def outputs(self) -> Any:
        return self.spare // self.stride + 1


def _or_else(value: Any, default: Any) -> Any:
    return default if value is None else value


def axes_of(call: Any) -> list[Axis]:
    """Rows and columns of one call, preceded by frames where it has any."""
    frames = Axis(*(_or_else(getattr(call, name), default) for name, default in _FRAMES.items()))
    rows = Axis(call.height, call.kernel_h, call.stride, call.padding, call.dilation)
    columns = Axis(
        call.width,
        call.kernel_w,
        _or_else(call.stride_w, call.stride),
        _or_else(call.padding_w, call.padding),
        _or_else(call.dilation_w, call.dilation),
    )
    flat = (frames.length, frames.kernel, frames.padding) == (1, 1, 0)
    return [rows, columns] if flat else [frames, rows, columns]


def columns_by_axis(calls: Calls) -> tuple[Axis, Axis, Axis]:
    """Frames, rows and columns of many calls."""
    frames = Axis(*(calls.given(name, default) for name, default in _FRAMES.items()))
    rows = Axis(*(calls[name] for name in ("height", "kernel_h", "stride", "padding", "dilation")))
    ways = (calls.given(f"{name}_w", calls[name]) for name in ("stride", "padding", "dilation"))
    return frames, rows, Axis(calls["width"], calls["kernel_w"], *ways)


class ConvSizes:
    """A convolution as ``groups`` products of m x k by k x n; all arrays (calls,)."""

    def __init__(self, calls: Calls) -> None:
        self.axes = frames, rows, columns = columns_by_axis(calls)
        self.batch, self.groups = calls["batch"], calls["groups"]
        self.channels, self.n = calls["in_channels"] / self.groups, calls["out_channels"] / self.groups  # of a group
        self.m: Array = self.batch * frames.outputs * rows.outputs * columns.outputs
        self.k: Array = self.channels * (frames.kernel * rows.kernel * columns.kernel)
        self.taps = self.k / self.channels  # elements of one filter of one channel
        self.whole: Array = self.batch * calls["in_channels"] * frames.length * rows.length * columns.length
        # input elements that any output needs: a stride beyond the kernel skips some
        self.input_elements = np.minimum(self.whole, self.groups * self.m * self.k)
        self.filter_elements = self.groups * self.n * self.k
        self.output_elements = self.groups * self.m * self.n
        self.input_pixels = self.whole / (self.channels * self.groups)  # of all images
        self.input = Image(self.batch, self.input_pixels / self.batch, self.channels * self.groups)
        self.output = Image(self.batch, self.m / self.batch, self.n * self.groups)
        self.filters = Image(self.n * self.groups, self.taps, self.channels, is_filter=True)
        tiles = ceil_div(rows.outputs, _WINOGRAD_SIDE) * ceil_div(columns.outputs, _WINOGRAD_SIDE)
        self.winograd_tiles = self.batch * tiles  # of 4x4 outputs
        plain = np.logical_and.reduce([(x.kernel == 3) & (x.stride == 1) & (x.dilation == 1) for x in (rows, columns)])
        self.winograd: Mask = plain & (self.groups == 1) & (frames.kernel == 1) & (frames.length == 1)
        # a plain matrix product, in either memory format
        points = [(x.kernel == 1) & (x.stride == 1) & (x.padding == 0) for x in self.axes]
        self.pointwise: Mask = (self.groups == 1) & np.logical_and.reduce(points)
        self.depthwise: Mask = (self.groups > 1) & (self.channels == 1)  # no matrix product
        # groups that cuDNN has no grouped kernel for, so that it loops over them
        members = np.maximum(self.channels, self.n)
        long = np.maximum(rows.kernel, columns.kernel) > _LONGEST_GROUPED
        odd = ~np.isin(members, _GROUPED) | (long & (members >= 32))
        self.looped: Mask = (self.groups > 1) & ~self.depthwise & odd
        # depthwise filters that cuDNN has a channels-last kernel for: 3x3, 5x5 or 7x7, one filter per channel
        square = (rows.kernel == columns.kernel) & np.isin(columns.kernel, _DEPTHWISE)
        undilated = (rows.dilation == 1) & (columns.dilation == 1) & (frames.kernel == 1)
        self.ordinary: Mask = square & undilated & (self.n == 1)


def untransposed(calls: Calls, sizes: ConvSizes) -> NDArray[np.bool_]:
    """Channels-first images that are multiplied without a transpose: pointwise filters, rows of a multiple of 4 bytes
    (of odd ones half the measured calls were transposed)."""
    row_bytes = sizes.m / sizes.batch * calls.dtype.act_bytes
    whole = (np.mod(row_bytes, 4) == 0) | (sizes.m == sizes.batch)
    return sizes.pointwise & whole & (calls.choice("layout") == "nchw")


def depthwise_in_pytorch(calls: Calls, sizes: ConvSizes) -> NDArray[np.bool_]:
    """Whether ATen's depthwise kernels run rather than cuDNN's: channels first, except fp16 sizes where cuDNN is faster
    (``ConvParams::use_cudnn_depthwise`` in Convolution.cpp)."""
    if calls.choice("layout") != "nchw":
        return np.zeros(calls.count, dtype=bool)
    if calls.choice("dtype") != "fp16":
        return sizes.depthwise
    frames, rows, columns = sizes.axes
    channels, batch, width, side = sizes.groups, sizes.batch, columns.length, columns.kernel
    middle = (side == 3) | (side == 5)
    halved = np.where(
        batch == 1,
        middle | ((side == 1) & (width <= 28)),
        ((side == 1) & (batch <= 16) & (channels >= 128) & (width <= 7))
        | (middle & ((channels >= 512) | ((channels >= 256) & (width >= 28)))),
    )
    square = (rows.kernel == side) & (middle | (side == 1)) & (width >= 7)
    wide = square & ((columns.stride == 1) | ((columns.stride == 2) & halved))
    line = (rows.length == 1) & (columns.stride == 1)
    plain = (rows.dilation == 1) & (columns.dilation == 1) & (frames.kernel == 1) & (frames.length == 1)
    alike = (rows.stride == columns.stride) | (rows.length == 1)
    return sizes.depthwise & ~(plain & alike & (channels >= 32) & (line | wide))


# (tile_m, tile_n, threads) of cuDNN's kernels for Hopper
_HOPPER_TILES = (
    (256, 128, 384), (128, 256, 384), (128, 192, 384), (128, 128, 256), (256, 64, 256), (64, 192, 256), (128, 64, 256),
    (64, 128, 256), (64, 64, 256), (64, 32, 256), (256, 32, 256),
)  # fmt: skip
_TILE_K_BYTES = 128.0  # one swizzle row of shared memory
_LEAST_K_BYTES = 64.0  # of a k-step, where a tap has few channels: a first layer's three fill a tenth of it
_ALIGNED_BYTES = 16.0  # channels of a pixel, padded to what one load takes
# A k-step of a 64x64 tile took 0.117 us of an H200 (92 calls that ran as such), beyond its arithmetic of 0.066.
STEP_CYCLES = 210.0
_OLDER = 1.6  # times wgmma's, that mma.sync takes for the same product on Hopper
_MOST_SPLITS = 32.0
_MIN_STEPS_PER_SPLIT = 4.0


@dataclass(frozen=True)
class ConvProduct:
    """``count`` products of m x (taps · inner) by (taps · inner) x n; ``tap_columns``: n repeats for so many taps.

    All arrays (calls,). A tile never spans two taps, whose pixels are elsewhere in memory.
    """

    m: Array
    n: Array
    inner: Array
    taps: Array
    count: Array
    packed: Array | float = 1.0  # groups packed into a block-diagonal product
    narrow: NDArray[np.bool_] | bool = False  # rows in memory are no whole vectors: kernels without TMA and wgmma
    tap_columns: Array | float = 1.0
    splits: bool = False  # k may be shared among CTAs
    pixels_inner: bool = False  # k runs over pixels, so that channels, not k, are neighbours in memory

    @property
    def k(self) -> Array:
        return self.inner * self.taps

    @property
    def columns(self) -> Array:
        return self.n * self.tap_columns


def product_work(gpu: Gpu, dtype: DType, product: ConvProduct) -> Work:
    """Tiles of C on persistent CTAs; bytes in DRAM are left to the caller."""
    pipe = matmul_pipe(gpu, dtype.name)
    hopper = pipe == "tensor" and gpu.instruction_path == WGMMA
    unit = matrix_unit(gpu) if pipe == "tensor" else MMA_SYNC
    tiles = _HOPPER_TILES if hopper else unit.tiles
    tile_m, tile_n, threads = (axis([tile[i] for tile in tiles]) for i in range(3))
    tile_k = _tile_k(gpu, dtype, product) if pipe == "tensor" else np.full_like(product.inner, 16.0)
    steps = product.taps * ceil_div(product.inner, tile_k)
    tasks = product.count * ceil_div(product.m, tile_m) * _columns(dtype, product, tile_n)
    split: Number = 1.0
    if product.splits:
        tile_m, tile_n, threads, tasks = (np.concatenate([x, x]) for x in (tile_m, tile_n, threads, tasks))
        half = len(tiles)
        filled = np.floor(gpu.sm_count / tasks[half:])
        most = np.minimum(_MOST_SPLITS, np.floor(steps / _MIN_STEPS_PER_SPLIT))
        split = np.concatenate([np.ones_like(filled), np.maximum(1.0, np.minimum(filled, most))])
        steps, tasks = ceil_div(steps, split), tasks * split
    return _work(gpu, dtype, product, unit, pipe, tile_m, tile_n, threads, tile_k, steps, tasks, split)


def _work(
    gpu: Gpu, dtype: DType, product: ConvProduct, unit: MatrixUnit, pipe: str, tile_m: Array, tile_n: Array,
    threads: Array, tile_k: Array, steps: Array, tasks: Array, split: Number,
) -> Work:  # fmt: skip
    macs = tile_m * tile_n * steps * tile_k
    slower = np.where(product.narrow, _OLDER, 1.0) if gpu.instruction_path == WGMMA else 1.0
    a_bytes, b_bytes = tile_m * steps * tile_k * dtype.act_bytes, tile_n * steps * tile_k * dtype.weight_bytes
    c_bytes = tile_m * tile_n * np.where(np.asarray(split) > 1, 8.0, dtype.out_bytes)  # fp32 partials, written and read
    smem_bytes = unit.smem_bytes(a_bytes, b_bytes, tile_m, tile_n)
    if product.pixels_inner and pipe == "tensor" and dtype.act_bytes > 2:
        smem_bytes = smem_bytes + 2 * (a_bytes + b_bytes)  # matrix units take 4-byte operands along k: transposed first
    stages = unit.stages if pipe == "tensor" else 2
    stage = (tile_m * dtype.act_bytes + tile_n * dtype.weight_bytes) * tile_k
    return Work(
        tasks=tasks,
        tensor_flops=2 * macs * slower if pipe == "tensor" else 0.0,
        tensor_dtype=dtype.math,
        fma_flops=2 * macs if pipe == "fma" else 0.0,
        fma_dtype=dtype.math if pipe == "fma" else "fp32",
        smem_bytes=smem_bytes,
        l2_bytes=a_bytes + b_bytes + c_bytes,
        threads=threads,
        registers_per_thread=np.minimum(255, 40 + tile_m * tile_n / np.minimum(threads, 256)),
        smem_bytes_per_cta=np.minimum(stages * stage, gpu.smem_bytes_per_cta),
        serial_steps=steps,
        step_cycles=STEP_CYCLES * slower,
        task_cycles=TASK_CYCLES,
        launches=np.where(np.asarray(split) > 1, 2.0, 1.0),  # the sums of splits are added up by another kernel
        useful_flops=2 * product.count * product.m * product.columns * product.k / product.packed,
        tile={"tile_m": tile_m, "tile_n": tile_n, "tile_k": tile_k, "split_k": split, "algorithm": 0.0},
    )


def _tile_k(gpu: Gpu, dtype: DType, product: ConvProduct) -> Array:
    """Elements of a k-step: a swizzle row, or less where a tap has fewer channels. Kernels of mma.sync gather a vector
    of channels at a time in 16 bits (cuDNN's and CUTLASS's "few channels"), without TMA's boxes."""
    gathers = gpu.instruction_path != WGMMA and dtype.act_bytes == 2
    least = _ALIGNED_BYTES if gathers else _LEAST_K_BYTES
    bytes_of_tap = np.maximum(least, 2 ** np.ceil(np.log2(product.inner * dtype.act_bytes)))
    return np.minimum(_TILE_K_BYTES, bytes_of_tap) / dtype.act_bytes


def _columns(dtype: DType, product: ConvProduct, tile_n: Array) -> Array:
    """Tiles along n: those of a tap, then of the next; taps of few channels share a tile."""
    grain = _ALIGNED_BYTES / dtype.act_bytes
    together = ceil_div(product.tap_columns * ceil_div(product.n, grain) * grain, tile_n)
    return np.where(product.n < 2 * grain, together, product.tap_columns * ceil_div(product.n, tile_n))


VECTOR_BYTES = 16.0  # channels of a pixel that one load takes
_SQUARE = 32.0  # pixels and channels transposed at once: few of either fill a part of it
_EMPTY = 0.8  # of an element's instructions, for padding in a square: 2.4 million of 3x3 in 12 us
_TRANSPOSE_INSTRUCTIONS = 40.0  # of a thread per element: 6.4 million in 11 us beside the start
_PAD_INSTRUCTIONS = 24.0  # 12.8 million in 13 us
_THREADS, _ELEMENTS = 256.0, 1024.0  # of a CTA


@dataclass(frozen=True)
class Image:
    """A tensor of images (or filters) with pixels (or taps) and channels."""

    count: Array
    pixels: Array
    channels: Array
    is_filter: bool = False


def transposed(calls: Calls, sizes: ConvSizes, gpu: Gpu) -> NDArray[np.bool_]:
    """Calls whose tensors are transposed: channels first, on tensor cores, and not pointwise."""
    if calls.choice("layout") != "nchw" or matmul_pipe(gpu, calls.dtype.name) != "tensor":
        return np.zeros(calls.count, dtype=bool)
    return ~untransposed(calls, sizes) & ~sizes.depthwise


def layout_kernels(calls: Calls, sizes: ConvSizes, gpu: Gpu, images: Sequence[Image]) -> tuple[Work, ...]:
    """A kernel for each tensor that is transposed or padded, in order."""
    if matmul_pipe(gpu, calls.dtype.name) != "tensor":
        return ()
    converts = transposed(calls, sizes, gpu)
    last = calls.choice("layout") != "nchw"
    works = []
    for image in images:
        grain = VECTOR_BYTES / calls.dtype.act_bytes
        padded = ceil_div(image.channels, grain) * grain
        short = (padded > image.channels) & (sizes.groups == 1) & last
        transposes = converts & ~(image.is_filter & (sizes.taps == 1))  # a filter of one tap has both formats
        if not (transposes | short).any():
            continue
        squares = ceil_div(image.channels, _SQUARE) * ceil_div(image.pixels, _SQUARE)
        real = image.pixels * image.channels
        elements = image.count * np.where(
            transposes, real + _EMPTY * (squares * _SQUARE**2 - real), image.pixels * padded
        )
        each = np.where(transposes, _TRANSPOSE_INSTRUCTIONS, _PAD_INSTRUCTIONS)
        works.append(
            vector_kernel(
                gpu,
                tasks=ceil_div(elements, _ELEMENTS),
                threads=_THREADS,
                moved_bytes=image.count * image.pixels * (image.channels + padded) * calls.dtype.act_bytes,
                warp_instructions=each * elements / gpu.warp_threads,
                runs=transposes | short,
            )
        )
    return tuple(works)


# Instructions of a thread: for an output, and for each tap of it (of filters: for each product of a pixel).
Instructions = Mapping[str, tuple[float, float]]
FORWARD: Instructions = {"pytorch": (110.0, 14.5), "nhwc": (0.0, 4.0), "nchw": (10.0, 6.5)}
OF_INPUT: Instructions = {"pytorch": (150.0, 20.0), "nhwc": (0.0, 8.5), "nchw": (10.0, 6.5)}
OF_FILTERS: Instructions = {"pytorch": (0.0, 36.0), "nhwc": (0.0, 3.5), "nchw": (10.0, 13.0)}
_GENERAL = 60.0  # a tap of a filter without a specialised cuDNN kernel (conv2d_grouped_direct_kernel): 37 to 135
_APART = 1.5  # of a tap's instructions, with a stride, where outputs share less
# PyTorch's gradient of depthwise filters: one CTA per filter element, a warp per image, a lane per pixel.
_IMAGE_INSTRUCTIONS = 100.0  # of a warp, to begin an image
_PIXEL_CYCLES = 290.0  # of a warp, for the next 32 pixels, where few CTAs leave nothing else to do
_WARPS = 8.0


@dataclass(frozen=True)
class Direct:
    """A pass without a matrix product: ``outputs`` that each sum over ``taps``."""

    outputs: Array
    taps: Array
    instructions: Instructions


def direct_work(calls: Calls, sizes: ConvSizes, gpu: Gpu, direct: Direct, moved_bytes: Array) -> Work:
    """One thread per output; neighbours share what they read through L1."""
    in_pytorch, layout = depthwise_in_pytorch(calls, sizes), calls.choice("layout") or "nhwc"
    (pytorch_base, pytorch_tap), (base, tap) = direct.instructions["pytorch"], direct.instructions[layout]
    step = sizes.axes[1].stride * sizes.axes[2].stride
    cudnns = np.where(sizes.ordinary | (layout == "nchw"), tap * np.where(step > 1, _APART, 1.0), _GENERAL)
    each = np.where(in_pytorch, pytorch_base + pytorch_tap * direct.taps, base + cudnns * direct.taps)
    work = vector_kernel(
        gpu,
        tasks=ceil_div(direct.outputs, _THREADS),
        threads=_THREADS,
        moved_bytes=moved_bytes,
        flops=2 * direct.outputs * direct.taps,
        warp_instructions=direct.outputs * each / gpu.warp_threads,
        registers=40.0,
    )
    if direct.instructions is OF_FILTERS:
        work = _by_filter(gpu, sizes, work, in_pytorch)
    return replace(work, tile={"tile_m": _THREADS, "tile_n": 1.0, "tile_k": 1.0, "split_k": 1.0, "algorithm": 2.0})


def _by_filter(gpu: Gpu, sizes: ConvSizes, work: Work, in_pytorch: NDArray[np.bool_]) -> Work:
    """ATen's gradient of depthwise filters: one CTA per filter element, with idle lanes for small images."""
    tasks, rows = sizes.filter_elements, ceil_div(sizes.m / sizes.batch, gpu.warp_threads)  # of 32 pixels
    each = np.asarray(work.tasks) / tasks  # from one of the general CTAs to one of these
    instructions = sizes.batch * (rows * OF_FILTERS["pytorch"][1] + _IMAGE_INSTRUCTIONS)

    def chosen(mine: Array, other: Any) -> Array:
        return np.where(in_pytorch, mine, other)

    return replace(
        work,
        tasks=chosen(tasks, work.tasks),
        fma_flops=chosen(work.fma_flops * each, work.fma_flops),
        l2_bytes=chosen(work.l2_bytes * each, work.l2_bytes),
        other_warp_instructions=chosen(instructions, work.other_warp_instructions),
        serial_steps=chosen(ceil_div(sizes.batch, _WARPS) * rows, 1.0),
        step_cycles=chosen(np.full_like(tasks, _PIXEL_CYCLES), 0.0),
    )
