"""gemm and bmm: C[m, n] = A[m, k] B[k, n], in output tiles of a library's choosing.

Which tile cuBLAS or CUTLASS picks is not documented, so each generation names the tiles that its libraries
ship (CUTLASS 2.x and 3.x default configurations; kernel names seen in profiles), with and without split-K, and
the machine ranks them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, Kernel, Words, choice, grain, size
from kernelcast.kernels.dtypes import DType, dtype, matmul_pipe
from kernelcast.kernels.quantize import quantised_rows
from kernelcast.kernels.work import Array, Number, Work, Works, axis, ceil_div

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
_TILE_K_BYTES = 128.0  # one swizzle row: 64 bf16 elements
_MIN_STEPS_PER_SPLIT = 4  # a split shorter than this does not pay for its reduction
# cuBLAS names kernels by whether A and B are transposed, column by column: a Linear's forward (weight [n, k]) is tn,
# its input gradient nn, its weight gradient nt. Bytes and FLOPs are the same, what a library reaches is not quite.
LAYOUTS = ("tn", "nn", "nt")
_LAYOUT_HELP = "operands as cuBLAS names them: tn both K-major (a forward), nn input gradient, nt weight gradient"


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
        """Operands of a tile: written once, read once for as many columns or rows as an instruction takes."""
        a_reads, b_reads = tile_n / self.columns_per_a_read, tile_m / self.rows_per_b_read
        return a_bytes * (1 + np.maximum(1, a_reads)) + b_bytes * (1 + np.maximum(1, b_reads))


MMA_SYNC = MatrixUnit(_MMA, 64, 64, 3, 1)  # a warp computes 64x64 of C at best


def matrix_unit(gpu: Gpu) -> MatrixUnit:
    capability = gpu.compute_capability
    if capability.startswith("9."):
        return MatrixUnit(_WGMMA, 64, 256, 4, 2)
    if capability.startswith("10."):
        return MatrixUnit(_TCGEN05, 128, 256, 4, 1, paired=True)
    return MMA_SYNC


# What a tile waits for beside its arithmetic: about three trips to DRAM for barriers, first operands and write-back;
# and a trip of about 1,000 cycles a k-step, shared by the two or three stages in flight.
TASK_CYCLES = 2000.0
STEP_CYCLES = 400.0
# A linear layer of a serving engine takes activations of 16 bits: for a narrower product it quantises them first.
QUANTISING_KERNELS = {"vllm": 1.0, "sglang": 1.0, "trtllm": 4.0}


class Gemm(Kernel):
    """Matrix product of one weight matrix: C[m, n] = A[m, k] B[k, n] (a Linear layer).

    With a serving engine as its stack and a dtype under 16 bits it is the engine's layer: it quantises activations too.
    """

    op = "gemm"
    grows = "m"
    examples = ({"m": 4096, "n": 4096, "k": 4096},)

    m: int = size("rows of A and C (tokens)")
    n: int = size("columns of B and C (output features)")
    k: int = size("inner dimension (input features)")
    layout: str | None = choice(_LAYOUT_HELP, LAYOUTS, default=None)
    inputs: str | None = choice("ready: A comes quantised; else an engine's layer does it", ("ready",), default=None)

    @classmethod
    def usual(cls, words: Words, gpu: Gpu) -> dict[str, str | None]:
        quantises = words["stack"] in QUANTISING_KERNELS and dtype(str(words["dtype"])).act_bytes < 2
        return {**words, "layout": words["layout"] or "tn", "inputs": words["inputs"] if quantises else None}

    @classmethod
    def spoken(cls, calls: Calls, words: Words) -> Calls:
        """Whether A comes quantised stays as it is: other kernels run, not the same ones otherwise."""
        return super().spoken(calls, {**words, "inputs": calls.choice("inputs")})

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        kind, rows, cols = calls.dtype, calls["m"], calls["k"]
        product = matmul_work(gpu, kind, rows, calls["n"], cols)
        kernels = QUANTISING_KERNELS.get(calls.choice("stack") or "")
        if kernels is None or kind.act_bytes >= 2 or calls.choice("inputs") == "ready":
            return (product,)
        return replace(quantised_rows(gpu, kind, rows, cols), launches=kernels), product

    @classmethod
    def hints(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        return _hints(gpu, calls, calls["m"], calls["n"], np.ones(calls.count), "tn")


class Bmm(Kernel):
    """Batched matrix product: C[b] = A[b] B[b] for each of ``batch`` pairs."""

    op = "bmm"
    grows = "batch"
    family = "gemm"
    examples = ({"batch": 32, "m": 512, "n": 512, "k": 64},)

    batch: int = size("matrix pairs")
    m: int = size("rows of each A and C")
    n: int = size("columns of each B and C")
    k: int = size("inner dimension")
    layout: str | None = choice(_LAYOUT_HELP, LAYOUTS, default=None)

    @classmethod
    def usual(cls, words: Words, gpu: Gpu) -> dict[str, str | None]:
        return {**words, "layout": words["layout"] or "nn"}

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        m, n = _upright(calls)
        return (matmul_work(gpu, calls.dtype, m, n, calls["k"], batch=calls["batch"], weights=False),)

    @classmethod
    def hints(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        m, n = _upright(calls)
        return _hints(gpu, calls, m, n, calls["batch"], "nn")


def _upright(calls: Calls) -> tuple[Array, Array]:
    """Rows and columns as cuBLAS runs them: a matrix with a vector is the vector with the transposed matrix, in the
    same kernels (51 calls on an H200: 12% off so, 159% as they stand)."""
    m, n = calls["m"], calls["n"]
    return np.where(n == 1, 1.0, m), np.where(n == 1, m, n)


def matmul_work(
    gpu: Gpu, kind: DType, m: Array, n: Array, k: Array, *, batch: Number = 1.0, weights: bool = True
) -> Work:
    """``batch`` products of m x k by k x n. ``weights``: B is streamed from DRAM rather than just computed."""
    pipe = matmul_pipe(gpu, kind.name)
    unit = matrix_unit(gpu) if pipe == "tensor" else replace(MMA_SYNC, stages=2)
    tile_m, tile_n, threads, split = _candidates(unit, gpu, kind, m, n, k, batch)
    tile_k = _TILE_K_BYTES / kind.act_bytes if pipe == "tensor" else 16.0
    tile_k = float(2 ** round(np.log2(tile_k)))

    steps = ceil_div(ceil_div(k, tile_k), split)  # k-steps of one task
    tasks = batch * ceil_div(m, tile_m) * ceil_div(n, tile_n) * split
    macs = tile_m * tile_n * steps * tile_k
    a_bytes, b_bytes = tile_m * steps * tile_k * kind.act_bytes, tile_n * steps * tile_k * kind.weight_bytes
    c_bytes = tile_m * tile_n * np.where(split > 1, 8.0, kind.out_bytes)  # fp32 partials, written and read
    neighbours = np.minimum(2.0, ceil_div(m, tile_m))  # tiles below one another use the same B
    b_bytes = b_bytes / (neighbours if unit.paired else 1)
    multicast = b_bytes * (1 - 1 / np.minimum(unit.cluster, neighbours))
    stage = (tile_m * kind.act_bytes + tile_n * kind.weight_bytes) * tile_k
    return Work(
        tasks=tasks,
        tensor_flops=2 * macs if pipe == "tensor" else 0.0,
        tensor_dtype=kind.math,
        fma_flops=2 * macs if pipe == "fma" else dequantise_flops(kind, tile_m, tile_n, steps * tile_k),
        fma_dtype=kind.math if pipe == "fma" else "fp32",
        smem_bytes=unit.smem_bytes(a_bytes, b_bytes, tile_m, tile_n),
        l2_bytes=a_bytes + b_bytes - multicast + c_bytes,
        multicast_bytes=multicast,
        streamed_bytes=(batch * n * k * kind.weight_bytes if weights else 0.0),
        activation_bytes=batch * (m * k * kind.act_bytes + m * n * kind.out_bytes)
        + (0.0 if weights else batch * n * k * kind.weight_bytes),
        refetched_bytes=_refetched(gpu, kind, m, n, k, tile_m, tile_n) * batch,
        threads=threads,
        registers_per_thread=np.minimum(255, 40 + tile_m * tile_n / np.minimum(threads, 256)),
        smem_bytes_per_cta=np.minimum(unit.stages * stage, gpu.smem_bytes_per_cta),
        serial_steps=steps,
        step_cycles=STEP_CYCLES,
        task_cycles=TASK_CYCLES,
        useful_flops=2 * batch * m * n * k,
        tile={"tile_m": tile_m, "tile_n": tile_n, "tile_k": tile_k, "split_k": split},
    )


def _hints(gpu: Gpu, calls: Calls, m: Array, n: Array, batch: Array, usual_layout: str) -> dict[str, Array]:
    """Of a product, and the alignment of its rows."""
    found = product_hints(gpu, m, n, calls["k"], batch)
    return found | _alignment(calls.dtype, m, n, calls["k"], calls.choice("layout") or usual_layout)


def product_hints(gpu: Gpu, m: Array, n: Array, k: Array, batch: Array) -> dict[str, Array]:
    """Shape, and how well common tiles would fill this GPU whole waves at a time."""
    found = {"log_m": np.log2(m), "log_n": np.log2(n), "log_k": np.log2(k), "log_batch": np.log2(batch)}
    found |= {"grain_m": grain(m), "grain_n": grain(n), "grain_k": grain(k)}
    for step in (8, 64, 128, 256):
        found |= {f"m_mod_{step}": np.mod(m, step) / step, f"n_mod_{step}": np.mod(n, step) / step}
    found["k_mod_64"] = np.mod(k, 64) / 64
    for tile_m, tile_n in _COMMON_TILES:
        tiles = batch * ceil_div(m, tile_m) * ceil_div(n, tile_n)
        waves = ceil_div(tiles, gpu.sm_count)
        found[f"fill_{tile_m}x{tile_n}"] = batch * m * n / (tile_m * tile_n * waves * gpu.sm_count)
        found[f"waves_{tile_m}x{tile_n}"] = np.minimum(tiles / gpu.sm_count, 8.0)
    return found


def _alignment(kind: DType, m: Array, n: Array, k: Array, layout: str) -> dict[str, Array]:
    """log2 of the bytes that divide the rows in memory, of up to 16: TMA (and the widest loads) need all 16."""
    rows = {
        "a": (m if layout == "nt" else k) * kind.act_bytes,
        "b": (k if layout == "tn" else n) * kind.weight_bytes,
        "c": n * kind.out_bytes,
    }
    found = {f"align_{name}": np.log2(np.gcd(np.rint(2 * row).astype(np.int64), 32)) for name, row in rows.items()}
    return found | {"align": np.minimum(np.minimum(found["align_a"], found["align_b"]), found["align_c"])}


def _candidates(
    unit: MatrixUnit, gpu: Gpu, kind: DType, m: Array, n: Array, k: Array, batch: Number
) -> tuple[Array, Array, Array, Array]:
    """Every tile twice: whole k, and k split so that the tiles fill the SMs once."""
    tile_m, tile_n, threads = (axis([t[i] for t in unit.tiles]) for i in range(3))
    tiles = batch * ceil_div(m, tile_m) * ceil_div(n, tile_n)
    most = np.floor(k * kind.act_bytes / (_TILE_K_BYTES * _MIN_STEPS_PER_SPLIT))
    split = np.maximum(1, np.minimum(np.floor(gpu.sm_count / tiles), np.minimum(most, 32)))
    twice = [np.concatenate([x, x]) for x in (tile_m, tile_n, threads)]
    return twice[0], twice[1], twice[2], np.concatenate([np.ones_like(split), split])


def dequantise_flops(kind: DType, tile_m: Array, tile_n: Array, k: Array) -> Number:
    """Vector work beside the matrix units: fp8_block rescales its sums every 128, int4 unpacks its weights."""
    if kind.name == "fp8_block":
        return 2 * tile_m * tile_n * k / 128
    return 2 * tile_n * k if kind.name == "int4" else 0.0


def _refetched(gpu: Gpu, kind: DType, m: Array, n: Array, k: Array, tile_m: Array, tile_n: Array) -> Array:
    """Operand bytes read from DRAM more than once: what one wave of tiles shares is read once a wave.

    A wave of S tiles covers at best a square of sqrt(S) x sqrt(S) tiles, so it reads sqrt(S) row panels and as
    many column panels. Nothing is read again while both operands fit in L2.
    """
    rows, columns = ceil_div(m, tile_m), ceil_div(n, tile_n)
    high = np.minimum(rows, np.sqrt(gpu.sm_count))
    wide = np.minimum(columns, gpu.sm_count / high)
    waves = np.maximum(1, rows * columns / gpu.sm_count)
    per_wave = (high * tile_m * kind.act_bytes + wide * tile_n * kind.weight_bytes) * k
    operands = (m * kind.act_bytes + n * kind.weight_bytes) * k
    missing = np.clip(operands / gpu.l2_bytes - 1, 0, 1)
    return missing * np.maximum(0, waves * per_wave - operands)
