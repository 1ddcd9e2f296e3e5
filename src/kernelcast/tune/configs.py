"""What Triton lets one choose for a (grouped) GEMM: the configs, which of them fit a GPU, and what engines take."""

from __future__ import annotations

import itertools
from dataclasses import astuple, dataclass

from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu
from kernelcast.hardware.paths import WIDE
from kernelcast.ops.dtypes import dtype as number_format
from kernelcast.ops.moe_gemm import WIDE_ROWS

# The space of vLLM's own tuner (benchmark_moe.py) for 16-bit formats, less block_k 32, which never wins there.
BLOCK_M, BLOCK_N, BLOCK_K = (16, 32, 64, 128, 256), (32, 64, 128, 256), (64, 128, 256)
GROUP_M, WARPS, STAGES = (1, 16, 32, 64), (4, 8), (2, 3, 4, 5)
_MOST_SUMS = 256  # a thread's sums alone would fill its registers


@dataclass(frozen=True, order=True)
class Config:
    """One choice. ``group_m`` row blocks walk the columns together and share weights in L2."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return "{}x{}x{} g{} w{} s{}".format(*astuple(self))

    @property
    def named(self) -> dict[str, int]:
        """As vLLM and SGLang spell it in their files."""
        names = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
        return dict(zip(names, astuple(self), strict=True))


@dataclass(frozen=True)
class MoeProblem:
    """A mixture-of-experts layer on one GPU: ``inter`` and ``experts`` are this GPU's."""

    tokens: int
    hidden: int
    inter: int
    experts: int
    topk: int
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        if self.topk > self.experts:
            raise KernelcastError(f"topk {self.topk} is more than experts {self.experts}")

    @property
    def products(self) -> tuple[dict[str, int], ...]:
        """The layer's two grouped GEMMs, as parameters of ``moe_gemm``: one config serves both in the engines."""
        common = {"tokens": self.tokens, "experts": self.experts, "topk": self.topk}
        first = {"n": 2 * self.inter, "k": self.hidden, "second": 0}
        return {**common, **first}, {**common, "n": self.hidden, "k": self.inter, "second": 1}


@dataclass(frozen=True)
class GemmProblem:
    """C[m, n] = A[m, k] B[n, k]^T by the same Triton kernel: one expert that every token goes to."""

    m: int
    n: int
    k: int
    dtype: str = "bf16"

    @property
    def products(self) -> tuple[dict[str, int], ...]:
        return ({"tokens": self.m, "experts": 1, "topk": 1, "n": self.n, "k": self.k, "second": 0},)


Problem = MoeProblem | GemmProblem


def fits(config: Config, chip: Gpu, dtype: str) -> bool:
    """Whether a config can be compiled for this GPU: its sums fit the registers, its stages the shared memory."""
    if config.block_m * config.block_n / (config.warps * 32) >= _MOST_SUMS:
        return False
    kind = number_format(dtype)
    wide = chip.instruction_path in WIDE and config.block_m >= WIDE_ROWS
    buffers = config.stages if wide else max(config.stages - 1, 1)
    stage = (config.block_m * kind.act_bytes + config.block_n * kind.weight_bytes) * config.block_k
    return buffers * stage <= chip.smem_bytes_per_cta


def space(chip: Gpu, dtype: str = "bf16") -> list[Config]:
    """Every config of the space that fits this GPU; fp8_block is scaled by 128, so that its blocks are that or less."""
    every = itertools.product(BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, WARPS, STAGES)
    found = [config for config in itertools.starmap(Config, every) if fits(config, chip, dtype)]
    if dtype == "fp8_block":
        return [config for config in found if config.block_k <= 128 and config.block_n <= 128]
    return found


def vllm_default(tokens: int, experts: int) -> Config:
    """What vLLM (as of 0.17) runs 16-bit experts with when it has no file for them."""
    return Config(
        block_m=16 if tokens <= 32 else 32 if tokens <= 96 else 64 if tokens <= 512 else 128,
        block_n=64 if tokens <= 64 else 128,
        block_k=128 if tokens <= 64 else 64,
        group_m=16 if tokens // experts > 128 else 1,
        warps=4 if tokens <= 128 else 8,
        stages=4 if tokens <= 32 else 3,
    )


def sglang_default(tokens: int, experts: int) -> Config:
    """What SGLang runs 16-bit experts with when it has no file for them; older vLLMs did the same."""
    return Config(16, 32, 64, 1, 4, 3) if tokens <= experts else Config(64, 64, 32, 8, 4, 3)


DEFAULTS = {"vllm": vllm_default, "sglang": sglang_default}


def swift_default(tokens: int, experts: int, topk: int) -> Config:
    """For our own kernel (measure/fused_moe.py, ``swift``) on Hopper: the blocks by how many rows an expert gets.

    Its tiles of 16 and 32 rows use the wide matrix instruction too, so that columns can be many from the start. The
    limits are from sweeps of other models than those it is scored on.
    """
    rows = tokens * topk / experts
    if rows <= 12:
        return Config(16, 128, 64, 16, 8, 5)
    if rows <= 32:
        return Config(32, 256, 64, 16, 4, 3)
    return Config(64, 256, 64, 16, 8, 5) if rows <= 400 else Config(128, 256, 64, 16, 8, 4)


def variant(c: Config) -> tuple[int, ...]:
    """What is compiled by itself: group_m is an argument, not a constant."""
    return (c.block_m, c.block_n, c.block_k, c.warps, c.stages)
