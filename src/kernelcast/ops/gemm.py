"""gemm and bmm: C[m, n] = A[m, k] B[k, n] in output tiles.

Which tile cuBLAS or CUTLASS selects is not documented, so each generation lists the tiles that its libraries ship
(CUTLASS 2.x and 3.x defaults; kernel names seen in profiles), with and without split-K, and the machine ranks them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.hardware.gpu import TCGEN05, WGMMA
from kernelcast.ops.base import Calls, Configuration, Kernel, choice, grain, size, twos
from kernelcast.ops.dtypes import DType, find_dtype, matmul_pipe
from kernelcast.ops.quantize import quantised_rows
from kernelcast.ops.work import Array, Number, Work, Works, axis, ceil_div

# (tile_m, tile_n, threads). tile_k is fixed in bytes, so that a stage has one size whatever the dtype.
# mma.sync and vector kernels (CUTLASS 2.x); the small tiles stand for GEMV-like and skinny kernels.
_MMA = (
    (256, 128, 256), (128, 256, 256), (128, 128, 256), (128, 64, 128),
    (64, 128, 128), (64, 64, 128), (64, 32, 128), (32, 64, 128), (16, 64, 128),
)  # fmt: skip
# wgmma (CUTLASS 3.x, SM90): 64 rows an instruction, n free; skinny m runs with A and B swapped.
_WGMMA = (
    (256, 128, 384), (128, 256, 384), (128, 192, 384), (128, 128, 384), (64, 256, 256), (64, 128, 256),
    (64, 64, 256), (128, 64, 384), (32, 128, 256), (16, 128, 256), (16, 64, 256),
)  # fmt: skip
# tcgen05 (SM100): 128 rows an instruction, 256 with a pair of SMs (each SM holds 128 of them).
_TCGEN05 = (
    (128, 256, 192), (128, 192, 192), (128, 128, 192), (128, 64, 192), (64, 128, 192),
    (64, 64, 192), (32, 128, 192), (16, 128, 192), (16, 64, 192),
)  # fmt: skip
_COMMON_TILES = ((256, 128), (128, 256), (128, 192), (128, 128), (128, 64), (64, 128), (64, 64))
_COMMON = tuple(axis([tile[at] for tile in _COMMON_TILES]) for at in (0, 1))
_ONE = np.ones(1)
_STEPS = axis([8.0, 64.0, 128.0, 256.0])
_PRODUCT_FEATURES = (
    "log_m", "log_n", "log_k", "log_batch", "grain_m", "grain_n", "grain_k",
    *(f"{side}_mod_{step:.0f}" for side in "mn" for step in _STEPS[:, 0]), "k_mod_64",
    *(f"fill_{m}x{n}" for m, n in _COMMON_TILES), *(f"waves_{m}x{n}" for m, n in _COMMON_TILES),
)  # fmt: skip
_TILE_K_BYTES = 128.0  # one swizzle row: 64 bf16 elements
_MIN_STEPS_PER_SPLIT = 4  # a split shorter than this does not pay for its reduction
# cuBLAS names kernels by whether A and B are transposed, column by column: a Linear's forward (weight [n, k]) is tn,
# its input gradient nn, its weight gradient nt. Bytes and FLOPs are the same, what a library reaches is not quite.
LAYOUTS = ("tn", "nn", "nt")
_LAYOUT_HELP = "operand layout in cuBLAS terms: tn both K-major (forward), nn input gradient, nt weight gradient"


@dataclass(frozen=True)
class MatrixUnit:
    """How a generation's matrix instruction reads its operands, which sets tiles and shared-memory traffic."""

    tiles: tuple[tuple[int, int, int], ...]
    rows_per_b_read: float  # rows of C that share one read of B from shared memory
    columns_per_a_read: float
    stages: int
    cluster: float  # CTAs that share one read of B from L2 (TMA multicast)
    paired: bool = False  # two SMs work as one and hold half of B each (tcgen05, cta_group::2)

    def smem_bytes(self, a_bytes: Array, b_bytes: Array, tile_m: Array, tile_n: Array) -> Array:
        """Operands of a tile: written once, read once per instruction's worth of columns or rows."""
        a_reads, b_reads = tile_n / self.columns_per_a_read, tile_m / self.rows_per_b_read
        return a_bytes * (1 + np.maximum(1, a_reads)) + b_bytes * (1 + np.maximum(1, b_reads))


MMA_SYNC = MatrixUnit(_MMA, 64, 64, 3, 1)  # a warp computes 64x64 of C at best
_VECTOR_UNIT = replace(MMA_SYNC, stages=2)
_WGMMA_UNIT = MatrixUnit(_WGMMA, 64, 256, 4, 2)
_TCGEN05_UNIT = MatrixUnit(_TCGEN05, 128, 256, 4, 1, paired=True)
_UNITS = {WGMMA: _WGMMA_UNIT, TCGEN05: _TCGEN05_UNIT}


def matrix_unit(gpu: Gpu) -> MatrixUnit:
    """By the GPU's instruction path; others count as mma.sync."""
    return _UNITS.get(gpu.instruction_path, MMA_SYNC)


# What a tile waits for beside its arithmetic: about three trips to DRAM for barriers, first operands and write-back;
# and a trip of about 1,000 cycles a k-step, shared by the two or three stages in flight.
TASK_CYCLES = 2000.0
STEP_CYCLES = 400.0
# A linear layer of a serving engine takes activations of 16 bits: for a narrower product it quantises them first.
QUANTISING_KERNELS = {"vllm": 1.0, "sglang": 1.0, "trtllm": 4.0}


class Gemm(Kernel):
    """Matrix product with a weight matrix: C[m, n] = A[m, k] B[k, n] (a Linear layer).

    With a serving engine as its stack and a dtype under 16 bits it is the engine's layer, which quantises activations
    too.
    """

    op = "gemm"
    batch_parameter = "m"
    examples = ({"m": 4096, "n": 4096, "k": 4096},)

    m: int = size("rows of A and C (tokens)")
    n: int = size("columns of B and C (output features)")
    k: int = size("inner dimension (input features)")
    layout: str | None = choice(_LAYOUT_HELP, LAYOUTS, default=None, unset="tn")
    inputs: str | None = choice("ready: A is quantised already; else the layer does it", ("ready",), default=None)

    @classmethod
    def with_defaults(cls, configuration: Configuration, gpu: Gpu) -> dict[str, str | None]:
        narrow = find_dtype(str(configuration["dtype"])).act_bytes < 2
        quantises = narrow and configuration["stack"] in QUANTISING_KERNELS
        inputs = configuration["inputs"] if quantises else None
        return super().with_defaults({**configuration, "inputs": inputs}, gpu)

    @classmethod
    def with_choices(cls, calls: Calls, configuration: Configuration) -> Calls:
        """``inputs`` stays as given: it decides which kernels run."""
        return super().with_choices(calls, {**configuration, "inputs": calls.choice("inputs")})

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        dtype, rows, cols = calls.dtype, calls["m"], calls["k"]
        product = matmul_work(gpu, dtype, rows, calls["n"], cols)
        kernels = QUANTISING_KERNELS.get(calls.choice("stack") or "")
        if kernels is None or dtype.act_bytes >= 2 or calls.choice("inputs") == "ready":
            return (product,)
        return replace(quantised_rows(gpu, dtype, rows, cols), launches=kernels), product

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        return _layout_features(gpu, calls, calls["m"], calls["n"], np.ones(calls.count), "tn")


class Bmm(Kernel):
    """Batched matrix product: C[b] = A[b] B[b] for each of ``batch`` pairs."""

    op = "bmm"
    batch_parameter = "batch"
    family = "gemm"
    examples = ({"batch": 32, "m": 512, "n": 512, "k": 64},)

    batch: int = size("matrix pairs")
    m: int = size("rows of each A and C")
    n: int = size("columns of each B and C")
    k: int = size("inner dimension")
    layout: str | None = choice(_LAYOUT_HELP, LAYOUTS, default=None, unset="nn")

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        m, n = _cublas_shape(calls)
        return (matmul_work(gpu, calls.dtype, m, n, calls["k"], batch=calls["batch"], weights=False),)

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        m, n = _cublas_shape(calls)
        return _layout_features(gpu, calls, m, n, calls["batch"], "nn")


def _cublas_shape(calls: Calls) -> tuple[Array, Array]:
    """Rows and columns as cuBLAS runs them: matrix times vector runs as vector times the transposed matrix (51 calls on
    an H200: error 12% so, 159% otherwise)."""
    m, n = calls["m"], calls["n"]
    return np.where(n == 1, 1.0, m), np.where(n == 1, m, n)


def matmul_work(
    gpu: Gpu, dtype: DType, m: Array, n: Array, k: Array, *, batch: Number = 1.0, weights: bool = True
) -> Work:
    """``batch`` products of m x k by k x n. ``weights``: B is streamed from DRAM rather than just computed.

    Candidates are every tile twice: whole k, and k split so that the tiles fill the SMs once. What split-K does not
    change is computed once per tile; (ways, tiles, calls) become (candidates, calls) at the end.
    """
    pipe = matmul_pipe(gpu, dtype.name)
    unit = matrix_unit(gpu) if pipe == "tensor" else _VECTOR_UNIT
    tile = _tiles(unit, dtype, pipe, gpu.smem_bytes_per_cta)
    rows, columns = ceil_div(m, tile.m), ceil_div(n, tile.n)
    tiles = batch * rows * columns
    split = _split(gpu, dtype, k, tiles)
    whole_steps = ceil_div(k, tile.k)
    steps = _both(whole_steps, ceil_div(whole_steps, split))  # k-steps of one task
    neighbours = np.minimum(2.0, rows)  # tiles below one another use the same B
    b_bytes = tile.b_bytes / neighbours if unit.paired else tile.b_bytes
    smem_bytes = unit.smem_bytes(tile.a_bytes, b_bytes, tile.m, tile.n) if unit.paired else tile.smem_bytes
    multicast = b_bytes * (1 - 1 / np.minimum(unit.cluster, neighbours)) if unit.cluster > 1 else 0.0
    c_bytes = _both(tile.c_bytes, np.where(split > 1, tile.partial_bytes, tile.c_bytes))
    flops = _flat(tile.flops * steps)
    return Work(
        tasks=_flat(_both(tiles, tiles * split)),
        tensor_flops=flops if pipe == "tensor" else 0.0,
        tensor_dtype=dtype.math,
        fma_flops=flops if pipe == "fma" else _flat(dequantise_flops(dtype, tile.m, tile.n, steps * tile.k)),
        fma_dtype=dtype.math if pipe == "fma" else "fp32",
        smem_bytes=_flat(smem_bytes * steps),
        l2_bytes=_flat((tile.a_bytes + b_bytes - multicast) * steps + c_bytes),
        multicast_bytes=_flat(multicast * steps) if unit.cluster > 1 else 0.0,
        streamed_bytes=(batch * n * k * dtype.weight_bytes if weights else 0.0),
        activation_bytes=batch * (m * k * dtype.act_bytes + m * n * dtype.out_bytes)
        + (0.0 if weights else batch * n * k * dtype.weight_bytes),
        refetched_bytes=_refetched(gpu, dtype, m, n, k, tile, rows, columns) * batch,
        threads=tile.threads,
        registers_per_thread=tile.registers,
        smem_bytes_per_cta=tile.smem_bytes_per_cta,
        serial_steps=_flat(steps),
        step_cycles=STEP_CYCLES,
        task_cycles=TASK_CYCLES,
        useful_flops=2 * batch * m * n * k,
        tile={**tile.names, "split_k": _flat(_both(_ONE, split))},
    )


class _Tiles:
    """What all calls share: (tiles, 1) each, of one k-step; for the CTA (candidates, 1)."""

    def __init__(self, unit: MatrixUnit, dtype: DType, pipe: str, smem_bytes_per_cta: float) -> None:
        m, n, threads = (axis([tile[at] for tile in unit.tiles]) for at in range(3))
        k = float(2 ** round(math.log2(_TILE_K_BYTES / dtype.act_bytes))) if pipe == "tensor" else 16.0
        self.m, self.n, self.k, self.flops = m, n, k, 2 * m * n * k
        self.a_bytes, self.b_bytes = m * k * dtype.act_bytes, n * k * dtype.weight_bytes
        self.smem_bytes = unit.smem_bytes(self.a_bytes, self.b_bytes, m, n)
        self.c_bytes, self.partial_bytes = m * n * dtype.out_bytes, m * n * 8.0  # partial sums: fp32, written and read
        self.threads = _twice(threads)
        self.registers = _twice(np.minimum(255, 40 + m * n / np.minimum(threads, 256)))
        stages_bytes = unit.stages * (self.a_bytes + self.b_bytes)
        self.smem_bytes_per_cta = _twice(np.minimum(stages_bytes, smem_bytes_per_cta))
        self.names: dict[str, Number] = {"tile_m": _twice(m), "tile_n": _twice(n), "tile_k": k}


_tiles = functools.cache(_Tiles)


def _layout_features(gpu: Gpu, calls: Calls, m: Array, n: Array, batch: Array, usual_layout: str) -> dict[str, Array]:
    """Features of a product, and the alignment of its rows."""
    features = product_features(gpu, m, n, calls["k"], batch)
    return features | _alignment(calls.dtype, m, n, calls["k"], calls.choice("layout") or usual_layout)


def product_features(gpu: Gpu, m: Array, n: Array, k: Array, batch: Array) -> dict[str, Array]:
    """Shape, and how well common tiles would fill this GPU's waves."""
    sizes = np.array([m, n, k])
    tile_m, tile_n = _COMMON
    tiles = batch * ceil_div(m, tile_m) * ceil_div(n, tile_n)
    share = tiles / gpu.sm_count
    fill = batch * m * n / (tile_m * tile_n * np.ceil(share) * gpu.sm_count)
    parts = _fraction(sizes[:2, None] / _STEPS).reshape(-1, len(m))  # of a step that are left over
    logs, waves = np.log2(sizes), np.minimum(share, 8.0)
    rows = (*logs, np.log2(batch), *grain(sizes), *parts, _fraction(k / 64), *fill, *waves)
    return dict(zip(_PRODUCT_FEATURES, rows, strict=True))


def _fraction(sizes: Array) -> Array:
    """The fractional part."""
    return sizes - np.floor(sizes)


def _alignment(dtype: DType, m: Array, n: Array, k: Array, layout: str) -> dict[str, Array]:
    """log2 of the alignment of rows in bytes, up to 16, which TMA and the widest loads need."""
    rows = np.array([
        (m if layout == "nt" else k) * dtype.act_bytes,
        (k if layout == "tn" else n) * dtype.weight_bytes,
        n * dtype.out_bytes,
    ])  # fmt: skip
    aligned = twos(np.rint(2 * rows), 32)
    features = dict(zip(("align_a", "align_b", "align_c"), aligned, strict=True))
    return features | {"align": np.minimum.reduce(aligned)}


def _split(gpu: Gpu, dtype: DType, k: Array, tiles: Array) -> Array:
    """Split-K factor with which the tiles fill the SMs once."""
    most = np.floor(k * dtype.act_bytes / (_TILE_K_BYTES * _MIN_STEPS_PER_SPLIT))
    return np.maximum(1, np.minimum(np.floor(gpu.sm_count / tiles), np.minimum(most, 32)))


def _both(whole: Array, split: Array) -> Array:
    """(2, tiles, calls): of whole k, and of k split."""
    both = np.empty((2, *split.shape))
    both[0], both[1] = whole, split
    return both


def _flat(both: Number) -> Number:
    """(ways, tiles, calls) as (candidates, calls)."""
    return both.reshape(-1, both.shape[-1]) if isinstance(both, np.ndarray) else both


def _twice(tiles: Array) -> Array:
    """What split-K does not change, for both ways."""
    return np.concatenate([tiles, tiles])


def dequantise_flops(dtype: DType, tile_m: Array, tile_n: Array, k: Array) -> Number:
    """Work of the vector units: fp8_block rescales its sums every 128, narrow weights are unpacked."""
    if dtype.name == "fp8_block":
        return 2 * tile_m * tile_n * k / 128
    return 2 * tile_n * k if dtype.weight_bytes < 0.75 * dtype.act_bytes else 0.0


def _refetched(
    gpu: Gpu, dtype: DType, m: Array, n: Array, k: Array, tile: _Tiles, rows: Array, columns: Array
) -> Number:
    """Operand bytes read from DRAM more than once: what the tiles of a wave share is read once per wave.

    A wave of S tiles covers at best a square of sqrt(S) x sqrt(S) tiles, so it reads sqrt(S) row panels and as many
    column panels. Nothing is read again while both operands fit in L2.
    """
    operands = (m * dtype.act_bytes + n * dtype.weight_bytes) * k
    missing = np.clip(operands / gpu.l2_bytes - 1, 0, 1)
    if not missing.any():
        return 0.0
    high = np.minimum(rows, math.sqrt(gpu.sm_count))
    wide = np.minimum(columns, gpu.sm_count / high)
    waves = np.maximum(1, rows * columns / gpu.sm_count)
    per_wave = (high * (tile.m * dtype.act_bytes) + wide * (tile.n * dtype.weight_bytes)) * k
    return _twice(missing * np.maximum(0, waves * per_wave - operands))
