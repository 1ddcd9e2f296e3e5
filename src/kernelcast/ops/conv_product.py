"""A convolution's product in tiles, as cuDNN runs it: each tap of a filter a run of k-steps, k whole or split.

Which tile runs is chosen by cuDNN's heuristics, which nobody has written down; the tiles are those whose names stand
in profiles (sm90_xmma and CUTLASS), and the machine ranks them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.hardware.paths import WGMMA
from kernelcast.ops.dtypes import DType, matmul_pipe
from kernelcast.ops.gemm import MMA_SYNC, TASK_CYCLES, MatrixUnit, matrix_unit
from kernelcast.ops.work import Array, Number, Work, axis, ceil_div

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
class Product:
    """``count`` products of m x (taps · inner) by (taps · inner) x n; ``tap_columns``: n is made of as many taps.

    All arrays (calls,). A tile never spans two taps: their pixels lie elsewhere.
    """

    m: Array
    n: Array
    inner: Array
    taps: Array
    count: Array
    tap_columns: Array | float = 1.0
    splits: bool = False  # k may be shared among CTAs
    packed: Array | float = 1.0  # groups that lie beside one another in a product, which is zero between them
    narrow: NDArray[np.bool_] | bool = False  # rows in memory are no whole vectors: kernels without TMA and wgmma
    pixels_inner: bool = False  # k runs over pixels, so that channels, not k, are neighbours in memory

    @property
    def k(self) -> Array:
        return self.inner * self.taps

    @property
    def columns(self) -> Array:
        return self.n * self.tap_columns


def product_work(gpu: Gpu, kind: DType, product: Product) -> Work:
    """Tiles of C, one after another on CTAs that stay; bytes in memory are left to the caller."""
    pipe = matmul_pipe(gpu, kind.name)
    hopper = pipe == "tensor" and gpu.instruction_path == WGMMA
    unit = matrix_unit(gpu) if pipe == "tensor" else MMA_SYNC
    tiles = _HOPPER_TILES if hopper else unit.tiles
    tile_m, tile_n, threads = (axis([tile[i] for tile in tiles]) for i in range(3))
    tile_k = _tile_k(kind, product) if pipe == "tensor" else np.full_like(product.inner, 16.0)
    steps = product.taps * ceil_div(product.inner, tile_k)
    tasks = product.count * ceil_div(product.m, tile_m) * _columns(kind, product, tile_n)
    split: Number = 1.0
    if product.splits:
        tile_m, tile_n, threads, tasks = (np.concatenate([x, x]) for x in (tile_m, tile_n, threads, tasks))
        half = len(tiles)
        filled = np.floor(gpu.sm_count / tasks[half:])
        most = np.minimum(_MOST_SPLITS, np.floor(steps / _MIN_STEPS_PER_SPLIT))
        split = np.concatenate([np.ones_like(filled), np.maximum(1.0, np.minimum(filled, most))])
        steps, tasks = ceil_div(steps, split), tasks * split
    return _work(gpu, kind, product, unit, pipe, tile_m, tile_n, threads, tile_k, steps, tasks, split)


def _work(
    gpu: Gpu, kind: DType, product: Product, unit: MatrixUnit, pipe: str, tile_m: Array, tile_n: Array, threads: Array,
    tile_k: Array, steps: Array, tasks: Array, split: Number,
) -> Work:  # fmt: skip
    macs = tile_m * tile_n * steps * tile_k
    slower = np.where(product.narrow, _OLDER, 1.0) if gpu.instruction_path == WGMMA else 1.0
    a_bytes, b_bytes = tile_m * steps * tile_k * kind.act_bytes, tile_n * steps * tile_k * kind.weight_bytes
    c_bytes = tile_m * tile_n * np.where(np.asarray(split) > 1, 8.0, kind.out_bytes)  # fp32 partials, written and read
    smem_bytes = unit.smem_bytes(a_bytes, b_bytes, tile_m, tile_n)
    if product.pixels_inner and pipe == "tensor" and kind.act_bytes > 2:
        smem_bytes = smem_bytes + 2 * (a_bytes + b_bytes)  # matrix units take 4-byte operands along k: turned first
    stages = unit.stages if pipe == "tensor" else 2
    stage = (tile_m * kind.act_bytes + tile_n * kind.weight_bytes) * tile_k
    return Work(
        tasks=tasks,
        tensor_flops=2 * macs * slower if pipe == "tensor" else 0.0,
        tensor_dtype=kind.math,
        fma_flops=2 * macs if pipe == "fma" else 0.0,
        fma_dtype=kind.math if pipe == "fma" else "fp32",
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


def _tile_k(kind: DType, product: Product) -> Array:
    """Elements of a k-step: a swizzle row, or less where a tap has less."""
    bytes_of_tap = np.maximum(_LEAST_K_BYTES, 2 ** np.ceil(np.log2(product.inner * kind.act_bytes)))
    return np.minimum(_TILE_K_BYTES, bytes_of_tap) / kind.act_bytes


def _columns(kind: DType, product: Product, tile_n: Array) -> Array:
    """Tiles beside one another: those of a tap, then of the next; taps of a few channels lie in one tile together."""
    grain = _ALIGNED_BYTES / kind.act_bytes
    together = ceil_div(product.tap_columns * ceil_div(product.n, grain) * grain, tile_n)
    return np.where(product.n < 2 * grain, together, product.tap_columns * ceil_div(product.n, tile_n))
