"""A GPU as a small frozen value: what the vendor built, in SI units, with the source of each number."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kernelcast.errors import KernelcastError, unknown
from kernelcast.hardware.paths import PATHS, is_of_another, path_of
from kernelcast.results import Shown

Rates = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Gpu(Shown):
    """One GPU as software sees it (one device). Rates per clock are for one SM (a CU on AMD).

    Link and PCIe rates are per direction. ``sources`` maps a field name to where its number is from.
    """

    # identity
    id: str
    name: str
    vendor: str
    architecture: str
    compute_capability: str
    instruction_path: str = ""  # of matrix products, see paths.py; "": as its compute capability has it
    aliases: tuple[str, ...] = ()
    unit_of: str | None = None  # the catalogued GPU that this is a measured unit of: forecasts rest on it
    # the chip
    sm_count: int
    clock_base_hz: float
    clock_boost_hz: float
    clock_tensor_hz: float | None = None  # the clock behind the published tensor peak, when it differs
    clock_sustained_hz: float | None = None
    tensor_flops_per_clk_sm: Rates  # dense, fp32 accumulate (int32 for int8); by dtype
    fma_flops_per_clk_sm: Rates  # vector units, 2 FLOPs an FMA; by dtype
    xu_ops_per_clk_sm: float  # special functions (exp, rsqrt, sin, …)
    issue_warps_per_clk_sm: float  # warp instructions issued
    warp_threads: int = 32
    registers_per_sm: int
    max_threads_per_sm: int
    max_ctas_per_sm: int
    # memory
    smem_bytes_per_sm: int
    smem_bytes_per_cta: int
    smem_bytes_per_clk_sm: float
    l2_bytes: int
    l2_bytes_per_clk: float  # whole chip
    l2_bytes_per_clk_sm: float  # one SM's port
    l2_partitions: int = 1  # each keeps what its own SMs read, so that what all SMs read is there as many times
    dram_bytes: int
    dram_bytes_per_s: float
    # links between GPUs, per direction
    link_kind: str
    link_bytes_per_s: float
    pcie_bytes_per_s: float
    # what a device of this kind sustains; None: guessed from its siblings
    sustained_tensor_fraction: float | None = None  # of large matrix products in 16 bits
    sustained_tensor_fractions: Rates = field(default_factory=dict)  # the same of other formats; by dtype
    long_tensor_fraction: float | None = None  # of matrix products that last: the power limit lowers the clock
    tensor_flops_per_j: float | None = None  # 16-bit, over seconds, where power is what limits
    sustained_dram_fraction: float | None = None
    sustained_launch_s: float | None = None  # what the smallest GEMMs take
    launch_floor_s: float  # the shortest kernel of any kind
    power_w: float
    devices_per_package: int = 1  # MI250 shows one package as two devices
    price_usd: float | None = None
    published_flops_per_s: Rates = field(default_factory=dict)  # per package, dense
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    changes: Mapping[str, float] = field(default_factory=dict)  # what-if: what replace() changed
    origin: Gpu | None = field(default=None, compare=False, repr=False)  # what-if: the GPU that was changed

    def __post_init__(self) -> None:
        self._take_path()
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, Mapping):
                object.__setattr__(self, spec.name, MappingProxyType(dict(value)))
                if spec.name not in ("sources", "changes"):
                    for key, rate in value.items():
                        self._check_number(f"{spec.name}.{key}", rate)
            elif spec.name in NUMBERS and value is not None:
                self._check_number(spec.name, value)
        if self.smem_bytes_per_cta > self.smem_bytes_per_sm:
            raise KernelcastError(
                f"gpu {self.id}: smem_bytes_per_cta {self.smem_bytes_per_cta} "
                f"exceeds smem_bytes_per_sm {self.smem_bytes_per_sm}"
            )

    def _take_path(self) -> None:
        """What no file says of the instruction path follows from the compute capability."""
        before = self.sources.get("instruction_path", "")
        if not self.instruction_path or is_of_another(before, self.compute_capability):
            path, source = path_of(self.compute_capability)
            object.__setattr__(self, "instruction_path", path)
            object.__setattr__(self, "sources", {**self.sources, "instruction_path": source})
        elif self.instruction_path not in PATHS:
            raise KernelcastError(f"gpu {self.id}: {unknown('instruction_path', self.instruction_path, PATHS)}")

    @property
    def path_inherited(self) -> bool:
        """Whether nobody knows the instruction path of this compute capability, so that a rule gave it."""
        return self.sources.get("instruction_path", "").startswith("inherited")

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process: read-only tables do not travel, so it is made again there."""
        held = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self)}
        return _made, ({name: dict(value) if isinstance(value, Mapping) else value for name, value in held.items()},)

    def _check_number(self, name: str, value: object) -> None:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # link_bytes_per_s may be 0: no link but PCIe.
        if not number or not 0 <= float(value) < float("inf") or (value == 0 and name not in MAY_BE_ZERO):  # type: ignore[arg-type]
            raise KernelcastError(f"gpu {self.id}: {name} must be a positive number, not {value!r}")
        if name.partition(".")[0] in FRACTIONS and float(value) > 1:  # type: ignore[arg-type]
            raise KernelcastError(f"gpu {self.id}: {name} is a share of the peak, at most 1, not {value!r}")

    @property
    def known_as(self) -> str:
        """The id that tables, prices and calibrations have it by: a unit's is that of the GPU that it is one of."""
        return self.unit_of or self.id

    # ---- derived rates, all per second ----
    @property
    def tensor_clock_hz(self) -> float:
        return self.clock_tensor_hz or self.clock_boost_hz

    def tensor_flops_per_s(self, dtype: str) -> float:
        """Dense tensor-core peak of the chip for ``dtype``; 0 when it has none."""
        return self.tensor_flops_per_clk_sm.get(dtype, 0.0) * self.sm_count * self.tensor_clock_hz

    def fma_flops_per_s(self, dtype: str) -> float:
        """Vector-unit peak of the chip for ``dtype``; 0 when it has none."""
        return self.fma_flops_per_clk_sm.get(dtype, 0.0) * self.sm_count * self.clock_boost_hz

    @property
    def mfu_flops_per_s(self) -> float:
        """The peak that MFU is told of: bf16, fp16 where there is none (V100, T4), fp32 without tensor cores."""
        return self.tensor_flops_per_s("bf16") or self.tensor_flops_per_s("fp16") or self.fma_flops_per_s("fp32")

    @property
    def xu_ops_per_s(self) -> float:
        return self.xu_ops_per_clk_sm * self.sm_count * self.clock_boost_hz

    @property
    def issue_warps_per_s(self) -> float:
        return self.issue_warps_per_clk_sm * self.sm_count * self.clock_boost_hz

    @property
    def smem_bytes_per_s(self) -> float:
        return self.smem_bytes_per_clk_sm * self.sm_count * self.clock_boost_hz

    @property
    def l2_bytes_per_s(self) -> float:
        return self.l2_bytes_per_clk * self.clock_boost_hz

    def replace(self, **changes: float) -> Gpu:
        """A what-if copy. Per-dtype rates are named with a dot: ``**{"tensor_flops_per_clk_sm.bf16": 8192}``."""
        values: dict[str, Any] = {}
        for name, value in changes.items():
            table, _, dtype = name.partition(".")
            if table in RATE_TABLES and dtype:
                values[table] = {**getattr(self, table), **values.get(table, {}), dtype: value}
            elif name in RATE_TABLES:
                raise KernelcastError(f"{name} has one number per dtype: set {name}.bf16, for example")
            elif name not in NUMBERS:
                raise unknown("GPU field", name, [*NUMBERS, *(f"{t}.<dtype>" for t in RATE_TABLES)])
            else:
                if name in INTEGERS and float(value) != int(value):
                    raise KernelcastError(f"{name} must be a whole number, not {value!r}")
                values[name] = int(value) if name in INTEGERS else value
        origin = self.origin or self
        found = dataclasses.replace(self, **values, origin=origin)
        kept = {k: v for k, v in {**self.changes, **changes}.items() if found.number(k) != origin.number(k)}
        if not kept:  # every number is its own again
            return origin
        sources = {**origin.sources, **dict.fromkeys(kept, "what-if")}
        return dataclasses.replace(found, sources=sources, changes=kept)

    def number(self, name: str) -> float | None:
        """A field by the name that ``replace`` takes."""
        table, _, dtype = name.partition(".")
        return getattr(self, table).get(dtype) if dtype else getattr(self, name)

    @property
    def label(self) -> str:
        """The name, with what replace() changed."""
        if not self.changes:
            return self.name
        return f"{self.name} with " + ", ".join(f"{k}={v:g}" for k, v in self.changes.items())


RATE_TABLES = ("tensor_flops_per_clk_sm", "fma_flops_per_clk_sm", "sustained_tensor_fractions")
IDENTITY = (
    "id", "name", "vendor", "architecture", "compute_capability", "instruction_path", "aliases", "unit_of", "link_kind",
)  # fmt: skip
_NOT_NUMBERS = (*IDENTITY, *RATE_TABLES, "published_flops_per_s", "sources", "changes", "origin")
NUMBERS = tuple(f.name for f in dataclasses.fields(Gpu) if f.name not in _NOT_NUMBERS)
INTEGERS = tuple(f.name for f in dataclasses.fields(Gpu) if f.type == "int")
FRACTIONS = ("sustained_tensor_fraction", "sustained_tensor_fractions", "long_tensor_fraction",
             "sustained_dram_fraction")  # fmt: skip
MAY_BE_ZERO = ("link_bytes_per_s",)


def _made(fields: dict[str, Any]) -> Gpu:
    return Gpu(**fields)
