"""Metrics of a measured call that the rules of ``reasons`` look at: its launch, its counters, and its forecast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kernelcast.diagnose.kernel_names import MATRIX_CATEGORIES, KernelCategory
from kernelcast.diagnose.measured import LaunchGrid
from kernelcast.forecast.calls import Call, Launch, columns_of
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict import Predictions
from kernelcast.forecast.predict_table import predict_rows
from kernelcast.forecast.table import BadRows
from kernelcast.hardware import Gpu
from kernelcast.machine.analyse import PIPELINES
from kernelcast.results import LEVELS

# of the tensor cores' formats, the wider first
WIDTH_BITS = {"fp64": 64, "fp32": 32, "tf32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "fp8_block": 8, "int8": 8,
              "nvfp4": 4, "int4": 4, "int8_wo": 8, "mxfp4": 4, "mxfp4_fp8": 4, "w4a4_mxfp4": 4}  # fmt: skip
ALIGNED_BYTES = 16  # what TMA and the widest loads need of every row
_PRODUCTS = ("gemm", "bmm")
_SUMMED = ("time_us", "low_us", "high_us", "ceiling_us", "bound_us", "flops", "moved_bytes", "dram_bytes",
           "refetched_bytes")  # fmt: skip


@dataclass(frozen=True)
class CallForecast:
    """The forecast of a kernel call, or of a sequence of them: times, limits and bytes add up, the rest is of the
    longest."""

    time_us: float
    low_us: float
    high_us: float
    ceiling_us: float
    bound_us: float
    flops: float  # useful ones
    moved_bytes: float  # all operands once
    dram_bytes: float  # the least
    refetched_bytes: float
    limits_us: Mapping[str, float]
    support: str
    tile: Mapping[str, float]
    tasks: float
    padding: float

    @property
    def bound_by(self) -> str:
        return max(self.limits_us, key=lambda name: self.limits_us[name], default="launch")

    @property
    def work_us(self) -> float:
        """The largest limit except the launch."""
        return max((v for name, v in self.limits_us.items() if name != "launch"), default=0.0)

    @classmethod
    def at(cls, predictions: Predictions, row: int) -> CallForecast:
        works = [work for work in predictions.works if work.launches[row] > 0] or list(predictions.works[:1])
        main = max(works, key=lambda work: float(work.bound[row]))
        times = ("time", "low", "high", "ceiling", "bound")
        times_us: dict[str, Any] = {f"{name}_us": float(getattr(predictions, f"{name}_s")[row]) * 1e6 for name in times}
        limits_s = zip(PIPELINES, predictions.limits_s[:, row], strict=True)
        return cls(
            **times_us,
            flops=sum(float(work.useful_flops[row]) or float(work.flops[row]) for work in works),
            moved_bytes=float(predictions.footprint_bytes[row]),
            dram_bytes=sum(float(work.dram_bytes[row]) for work in works),
            refetched_bytes=sum(float(work.refetched_bytes[row]) for work in works),
            limits_us={name: float(limit) * 1e6 for name, limit in limits_s if limit > 0},
            support=LEVELS[predictions.support[row]],
            tile={name: float(side[row]) for name, side in main.tile.items()},
            tasks=float(main.tasks[row]),
            padding=float(main.padding[row]),
        )

    @classmethod
    def sum(cls, parts: Sequence[tuple[CallForecast, float]]) -> CallForecast:
        """Calls in sequence, each so many times."""
        longest = max(parts, key=lambda part: part[0].time_us * part[1])[0]
        names = dict.fromkeys(name for part, _ in parts for name in part.limits_us)
        sums: dict[str, Any] = {name: sum(float(getattr(part, name)) * n for part, n in parts) for name in _SUMMED}
        limits = {name: sum(part.limits_us.get(name, 0.0) * n for part, n in parts) for name in names}
        return replace(longest, **sums, limits_us=limits)


class CallForecasts:
    """Every distinct call forecast once; for a call that this GPU cannot run, a text that says why."""

    def __init__(self, calls: Iterable[Call], gpu: Gpu, conditions: Conditions) -> None:
        distinct, bad = list(dict.fromkeys(calls)), BadRows()
        self._forecasts: dict[Call, CallForecast | str] = {}
        for rows, positions, predictions in predict_rows(columns_of(distinct), gpu, conditions, bad, details=True):
            for row, position in zip(rows, positions, strict=True):
                self._forecasts[distinct[row]] = CallForecast.at(predictions, position)
        self._forecasts |= {distinct[row]: text for row, text in bad.messages.items()}

    def of(self, launches: Iterable[Launch]) -> CallForecast | str | None:
        """The forecast of launches in sequence; a text where one of them cannot run, None for no launches."""
        parts: list[tuple[CallForecast, float]] = []
        for launch in launches:
            forecast = self._forecasts[launch.call]
            if isinstance(forecast, str):
                return forecast
            parts.append((forecast, launch.count))
        return CallForecast.sum(parts) if parts else None


@dataclass(frozen=True)
class CallMetrics:
    """One measured call. Times in microseconds; ``forecast`` is None where the call could not be matched."""

    op: str  # gemm; "" where it is not matched
    category: KernelCategory  # of the main kernel, by its name
    parameters: Mapping[str, Any]
    measured_us: float
    grid: LaunchGrid
    sm_count: int
    dram_bytes_per_s: float
    forecast: CallForecast | None = None
    aligned: CallForecast | None = None  # the same call with sizes that are multiples of 16 bytes
    narrow: CallForecast | None = None  # the same call in the run's format
    vector: CallForecast | None = None  # the same call over tensors of one layout
    run_dtype: str = "bf16"  # of the run's matrix products
    fp32_is_meant: bool = False  # given by the user: not a fallback then
    launches: int = 1
    idle_us: float = 0.0
    chain: float = 0.0
    chain_saved_us: float = 0.0
    counters: Mapping[str, float] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """The format of the arithmetic: the wider of the call's and that in the kernel's name."""
        given = str(self.parameters.get("dtype", ""))
        if self.grid.dtype is not None and WIDTH_BITS.get(self.grid.dtype, 0) > WIDTH_BITS.get(given, 0):
            return self.grid.dtype
        return given or self.grid.dtype or ""

    @property
    def is_product(self) -> bool:
        return self.op in _PRODUCTS or (not self.op and self.category == "matmul")

    @property
    def is_matrix(self) -> bool:
        """Runs on tensor cores where the format allows."""
        ops = (*_PRODUCTS, "attention", "masked_attention", "conv2d", "mla")
        return self.category in MATRIX_CATEGORIES or self.op in ops

    @property
    def gap_us(self) -> float:
        """Time beyond the best kernels of this op."""
        return max(0.0, self.measured_us - self.forecast.ceiling_us) if self.forecast else 0.0

    @property
    def max_saving_us(self) -> float:
        """No change of the kernel saves more than this."""
        return max(0.0, self.measured_us - (self.forecast.bound_us if self.forecast else 0.0))

    def saving_us(self, share: float) -> float:
        """Time saved if the call took this share of its time less."""
        return min(self.measured_us * share, self.max_saving_us)

    @property
    def dram_bytes(self) -> float:
        """DRAM bytes: the counter, else the least of the forecast."""
        return self.counters.get("dram_bytes", self.forecast.dram_bytes if self.forecast else 0.0)

    @property
    def dram_share(self) -> float:
        """Share of DRAM's peak bandwidth that the call reaches."""
        return self.dram_bytes / self.dram_bytes_per_s / (self.measured_us * 1e-6) if self.measured_us else 0.0

    @property
    def sm_bound(self) -> bool:
        """The SMs' pipelines take longer than memory does: how work is spread over SMs matters."""
        if self.forecast is None:
            return self.dram_share < 0.5
        limits = self.forecast.limits_us
        sm_us = max(limits.get(name, 0.0) for name in ("tensor", "fma", "xu", "smem", "issue"))
        return sm_us > limits.get("dram", 0.0)


def unaligned_sizes(op: str, parameters: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of a product whose rows in memory do not start at multiples of 16 bytes, and the multiple to pad to.

    By the operands' layout: a row of A is k long (m where it is transposed), a row of B k or n, a row of C n.
    """
    if op not in _PRODUCTS:
        return {}
    layout = parameters.get("layout") or ("tn" if op == "gemm" else "nn")
    names = {"m" if layout == "nt" else "k", "k" if layout == "tn" else "n", "n"}
    bits = WIDTH_BITS.get(str(parameters.get("dtype", "bf16")), 16)
    multiple = max(1, ALIGNED_BYTES * 8 // bits)
    return {name: multiple for name in ("m", "n", "k") if name in names and int(parameters[name]) % multiple}
