"""Triton configs of a (grouped) GEMM: the search space, which of them fit a GPU, the engines' defaults and files.

Engines look files up by experts, width of an expert and device; the entry with the nearest token count is taken. vLLM
reads ``$VLLM_TUNED_CONFIG_FOLDER/NAME``; SGLang ``$SGLANG_MOE_CONFIG_DIR/configs/triton_X_Y_Z/NAME``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

from kernelcast.errors import KernelcastError, unknown
from kernelcast.files import complete
from kernelcast.hardware import Gpu
from kernelcast.hardware.gpu import WIDE
from kernelcast.ops.dtypes import find_dtype as number_format
from kernelcast.ops.moe_gemm import WIDE_ROWS

# The space of vLLM's tuner (benchmark_moe.py) for 16-bit formats, less block_k 32, which never wins there.
BLOCK_M, BLOCK_N, BLOCK_K = (16, 32, 64, 128, 256), (32, 64, 128, 256), (64, 128, 256)
GROUP_M, WARPS, STAGES = (1, 16, 32, 64), (4, 8), (2, 3, 4, 5)
_MAX_SUMS = 256  # a thread's sums alone would fill its registers
STACKS = ("vllm", "sglang")
# Of kernelcast's formats: what the engines' file names say. 16-bit formats share the file without a dtype.
_DTYPES = {"bf16": "", "fp16": "", "fp8": ",dtype=fp8_w8a8", "fp8_block": ",dtype=fp8_w8a8"}
_BLOCK_SHAPE = {"vllm": ",block_shape=[128,128]", "sglang": ",block_shape=[128, 128]"}  # a space in SGLang's


@dataclass(frozen=True, order=True)
class Config:
    """``group_m`` row blocks walk the columns together and share weights in L2."""

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
        """The keys of vLLM's and SGLang's files."""
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


def fits(config: Config, gpu: Gpu, dtype: str) -> bool:
    """Whether a config can be compiled for this GPU: its sums fit the registers, its stages the shared memory."""
    if config.block_m * config.block_n / (config.warps * 32) >= _MAX_SUMS:
        return False
    numbers = number_format(dtype)
    wide = gpu.instruction_path in WIDE and config.block_m >= WIDE_ROWS
    buffers = config.stages if wide else max(config.stages - 1, 1)
    stage = (config.block_m * numbers.act_bytes + config.block_n * numbers.weight_bytes) * config.block_k
    return buffers * stage <= gpu.smem_bytes_per_cta


def space(gpu: Gpu, dtype: str = "bf16") -> list[Config]:
    """Every config of the space that fits this GPU; fp8_block is scaled by 128, so its blocks are at most that."""
    product = itertools.product(BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, WARPS, STAGES)
    configs = [config for config in itertools.starmap(Config, product) if fits(config, gpu, dtype)]
    if dtype == "fp8_block":
        return [config for config in configs if config.block_k <= 128 and config.block_n <= 128]
    return configs


def vllm_default(tokens: int, experts: int) -> Config:
    """vLLM's default config (as of 0.17) for 16-bit experts without a file."""
    return Config(
        block_m=16 if tokens <= 32 else 32 if tokens <= 96 else 64 if tokens <= 512 else 128,
        block_n=64 if tokens <= 64 else 128,
        block_k=128 if tokens <= 64 else 64,
        group_m=16 if tokens // experts > 128 else 1,
        warps=4 if tokens <= 128 else 8,
        stages=4 if tokens <= 32 else 3,
    )


def sglang_default(tokens: int, experts: int) -> Config:
    """SGLang's default config for 16-bit experts without a file; older vLLM versions had the same."""
    return Config(16, 32, 64, 1, 4, 3) if tokens <= experts else Config(64, 64, 32, 8, 4, 3)


DEFAULTS = {"vllm": vllm_default, "sglang": sglang_default}


def swift_default(tokens: int, experts: int, topk: int) -> Config:
    """For the kernel ``swift`` (benchmarks/swift_moe.py) on Hopper: the blocks by how many rows an expert gets.

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
    """The compile-time constants of a config: group_m is an argument."""
    return (c.block_m, c.block_n, c.block_k, c.warps, c.stages)


def file_name(stack: str, experts: int, inter: int, device: str, dtype: str = "bf16") -> str:
    """``device``: as the driver prints it. ``inter``: columns of the second weights on one GPU."""
    if stack not in STACKS:
        raise unknown("stack", stack, STACKS)
    if dtype not in _DTYPES:
        raise KernelcastError(f"no config file for dtype {dtype}: engines have them for {', '.join(_DTYPES)}")
    name = device.replace(" ", "_")
    if stack == "vllm" and "H200" in name.split("_"):
        name = "NVIDIA_H200"  # vLLM uses one file for the whole family
    shape = _BLOCK_SHAPE[stack] if dtype == "fp8_block" else ""
    return f"E={experts},N={inter},device_name={name}{_DTYPES[dtype]}{shape}.json"


def write_config_file(
    folder: Path, stack: str, gpu: Gpu, configs: Mapping[MoeProblem, Config], triton: str, device: str | None = None
) -> Path:
    """One file with an entry for each problem's tokens; problems differ in nothing else.

    Entries of other token counts that the file has already stay in it.
    """
    first, *others = configs
    if any((p.experts, p.inter, p.dtype) != (first.experts, first.inter, first.dtype) for p in others):
        raise KernelcastError("a config file is of one layer: experts, width and dtype are the same for all tokens")
    name = file_name(stack, first.experts, first.inter, device or gpu.name, first.dtype)
    subfolder = folder if stack == "vllm" else folder / "configs" / f"triton_{triton.replace('.', '_')}"
    path = subfolder / name
    entries = _entries(path) | {p.tokens: config.named for p, config in configs.items()}
    subfolder.mkdir(parents=True, exist_ok=True)
    with complete(path) as part:
        part.write_text(json.dumps({str(tokens): entries[tokens] for tokens in sorted(entries)}, indent=4) + "\n")
    return path


def _entries(path: Path) -> dict[int, dict[str, int]]:
    """The entries of a file, by tokens. Other keys (vLLM adds the version of Triton) go: they may no longer be true."""
    if not path.exists():
        return {}
    try:
        return {int(key): entry for key, entry in json.loads(path.read_text(encoding="utf-8")).items() if key.isdigit()}
    except (ValueError, AttributeError):
        raise KernelcastError(
            f"{path} exists and is not a config file; move it away, or write to another folder"
        ) from None
