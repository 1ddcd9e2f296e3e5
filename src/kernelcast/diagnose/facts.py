"""All that is known of one measured call, as plain values: what the rules of ``reasons`` look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kernelcast.diagnose.answers import Predicted
from kernelcast.diagnose.grid import Grid
from kernelcast.diagnose.kernel_names import MATRIX_KINDS, Kind

# of the tensor cores' formats, the wider first
WIDTH_BITS = {"fp64": 64, "fp32": 32, "tf32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "fp8_block": 8, "int8": 8,
              "nvfp4": 4, "int4": 4, "int8_wo": 8, "mxfp4": 4, "mxfp4_fp8": 4}  # fmt: skip
ALIGNED_BYTES = 16  # what TMA and the widest loads need of every row
_PRODUCTS = ("gemm", "bmm")


@dataclass(frozen=True)
class Facts:
    """One call. Times in microseconds; ``predicted`` is None where the call could not be matched."""

    op: str  # gemm; "" where it is not matched
    kind: Kind  # of the main kernel, by its name
    parameters: Mapping[str, Any]
    measured_us: float
    grid: Grid
    sm_count: int
    dram_bytes_per_s: float
    predicted: Predicted | None = None
    aligned: Predicted | None = None  # the same call with sizes that are multiples of 16 bytes
    narrow: Predicted | None = None  # the same call in the run's format
    vector: Predicted | None = None  # the same call over tensors of one layout
    run_dtype: str = "bf16"  # that the run's products are in
    fp32_is_meant: bool = False  # the user says so: it is no fallback then
    launches: int = 1
    idle_us: float = 0.0
    chain: float = 0.0
    chain_saved_us: float = 0.0
    counters: Mapping[str, float] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """That the arithmetic runs in: the kernel's name knows best."""
        given = str(self.parameters.get("dtype", ""))
        if self.grid.dtype is not None and WIDTH_BITS.get(self.grid.dtype, 0) > WIDTH_BITS.get(given, 0):
            return self.grid.dtype
        return given or self.grid.dtype or ""

    @property
    def is_product(self) -> bool:
        return self.op in _PRODUCTS or (not self.op and self.kind == "matmul")

    @property
    def is_matrix(self) -> bool:
        """Runs on tensor cores where the format allows."""
        return self.kind in MATRIX_KINDS or self.op in (*_PRODUCTS, "attention", "masked_attention", "conv2d", "mla")

    @property
    def gap_us(self) -> float:
        """What is beyond the best kernels of this kind."""
        return max(0.0, self.measured_us - self.predicted.ceiling_us) if self.predicted else 0.0

    @property
    def most_us(self) -> float:
        """No change of the kernel wins more than this."""
        return max(0.0, self.measured_us - (self.predicted.bound_us if self.predicted else 0.0))

    def won_us(self, share: float) -> float:
        """What it would win if it took this share of its time less."""
        return min(self.measured_us * share, self.most_us)

    @property
    def dram_bytes(self) -> float:
        """As counted, else the least."""
        return self.counters.get("dram_bytes", self.predicted.dram_bytes if self.predicted else 0.0)

    @property
    def dram_share(self) -> float:
        """Of DRAM's peak that the call reaches."""
        return self.dram_bytes / self.dram_bytes_per_s / (self.measured_us * 1e-6) if self.measured_us else 0.0

    @property
    def sm_bound(self) -> bool:
        """The SMs' own pipelines take longer than memory does: how work falls on SMs matters."""
        if self.predicted is None:
            return self.dram_share < 0.5
        limits = self.predicted.limits_us
        own_us = max(limits.get(name, 0.0) for name in ("tensor", "fma", "xu", "smem", "issue"))
        return own_us > limits.get("dram", 0.0)


def unaligned_sizes(op: str, parameters: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of a product whose rows in memory do not start at multiples of 16 bytes, and the multiple to pad to.

    By how the operands lie: a row of A is k long (m where it is transposed), one of B k or n, one of C n.
    """
    if op not in _PRODUCTS:
        return {}
    layout = parameters.get("layout") or ("tn" if op == "gemm" else "nn")
    names = {"m" if layout == "nt" else "k", "k" if layout == "tn" else "n", "n"}
    bits = WIDTH_BITS.get(str(parameters.get("dtype", "bf16")), 16)
    multiple = max(1, ALIGNED_BYTES * 8 // bits)
    return {name: multiple for name in ("m", "n", "k") if name in names and int(parameters[name]) % multiple}
