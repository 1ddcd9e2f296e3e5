"""A GPU as a small frozen value: what the vendor built, in SI units, with the source of each number."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kernelcast.errors import KernelcastError, unknown
from kernelcast.results import HtmlRepr

Rates = Mapping[str, float]

# The instruction path of a GPU: which instruction multiplies its matrices. Kernels are written for it, so that what is
# known of one capability holds for another of the same path. NVIDIA numbers capabilities by product, not by path: 12.0
# (GeForce and RTX PRO) has the mma.sync of 8.9, not the tcgen05 of 10.0.
FMA, MMA_SYNC, WGMMA, TCGEN05, MFMA = PATHS = ("fma", "mma.sync", "wgmma", "tcgen05", "mfma")
WIDE = (WGMMA, TCGEN05)  # operands from shared memory, many rows an instruction
_PATH_OF = {
    **dict.fromkeys(("5.0", "5.2", "5.3", "6.0", "6.1", "6.2"), FMA),
    **dict.fromkeys(("7.0", "7.2", "7.5", "8.0", "8.6", "8.7", "8.9", "12.0", "12.1"), MMA_SYNC),
    "9.0": WGMMA,
    **dict.fromkeys(("10.0", "10.3", "11.0"), TCGEN05),
    **dict.fromkeys(("gfx908", "gfx90a", "gfx940", "gfx941", "gfx942", "gfx950"), MFMA),
}
_DERIVED = ("follows from compute capability", "inherited")
_ISA = "PTX ISA: wgmma sm_90a; tcgen05 sm_100, sm_103, sm_110; AMD CDNA ISA: MFMA"


@dataclass(frozen=True, kw_only=True)
class Gpu(HtmlRepr):
    """One GPU as software sees it (one device). Rates per clock are for one SM (a CU on AMD).

    Link and PCIe rates are per direction. ``sources`` maps a field name to where its number is from.
    """

    # identity
    id: str
    name: str
    vendor: str
    architecture: str
    compute_capability: str
    instruction_path: str = ""  # of matrix products, one of PATHS; "": as its compute capability has it
    aliases: tuple[str, ...] = ()
    unit_of: str | None = None  # the catalogued GPU that this is a measured unit of: forecasts rest on it
    base: str | None = field(default=None, compare=False)  # the catalogued GPU that its file changes the numbers of
    # compute
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
    l2_bytes_per_clk: float  # whole GPU
    l2_bytes_per_clk_sm: float  # one SM's port
    l2_partitions: int = 1  # each caches what its SMs read, so that what all SMs read is cached as many times
    dram_bytes: int
    dram_bytes_per_s: float
    # links between GPUs, per direction
    link_kind: str
    link_bytes_per_s: float
    link_gpus: int = 1  # that the links join beyond a server: of a rack (NVL72); 1: the GPUs of a server
    pcie_bytes_per_s: float
    # what such a device sustains; None: estimated from its siblings
    sustained_tensor_fraction: float | None = None  # of large matrix products in 16 bits
    sustained_tensor_fractions: Rates = field(default_factory=dict)  # the same of other formats; by dtype
    long_tensor_fraction: float | None = None  # of matrix products that last: the power limit lowers the clock
    tensor_flops_per_j: float | None = None  # 16-bit, over seconds, where power is what limits
    sustained_flops_per_j: float | None = None  # the same over minutes, in training; None: as tensor_flops_per_j
    sustained_dram_fraction: float | None = None
    sustained_launch_s: float | None = None  # what the smallest GEMMs take
    launch_floor_s: float  # the shortest kernel of all
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
        """The instruction path follows from the compute capability where no file gives it."""
        source = self.sources.get("instruction_path", "")
        outdated = source.startswith(_DERIVED) and f"compute capability {self.compute_capability} " not in source
        if not self.instruction_path or outdated:
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
        """For pickle, which takes no MappingProxyType."""
        fields = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self)}
        plain: dict[str, Any] = {
            name: dict(value) if isinstance(value, Mapping) else value for name, value in fields.items()
        }
        return functools.partial(Gpu, **plain), ()

    def _check_number(self, name: str, value: object) -> None:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # link_bytes_per_s may be 0: no link but PCIe.
        if not number or not 0 <= float(value) < float("inf") or (value == 0 and name != "link_bytes_per_s"):  # type: ignore[arg-type]
            raise KernelcastError(f"gpu {self.id}: {name} must be a positive number, not {value!r}")
        if name.partition(".")[0] in FRACTIONS and float(value) > 1:  # type: ignore[arg-type]
            raise KernelcastError(f"gpu {self.id}: {name} is a share of the peak, at most 1, not {value!r}")

    @property
    def known_as(self) -> str:
        """The id that tables, prices and calibrations know it by: of a measured unit, that of the catalogued GPU."""
        return self.unit_of or self.id

    @property
    def allocatable_bytes(self) -> float:
        """Memory that programs can allocate, of what nvidia-smi lists (``dram_bytes``): PyTorch sees 23.55 GiB of the
        24,564 MiB of an RTX 4090, 79.19 of the 81,559 of an H100, 139.8 of the 143,771 of an H200."""
        return self.dram_bytes - (_CUDA_BYTES if self.vendor == "nvidia" else 0.0)

    # ---- derived rates, all per second ----
    @property
    def tensor_clock_hz(self) -> float:
        return self.clock_tensor_hz or self.clock_boost_hz

    def tensor_flops_per_s(self, dtype: str) -> float:
        """Dense tensor-core peak for ``dtype``; 0 when it has none."""
        return self.tensor_flops_per_clk_sm.get(dtype, 0.0) * self.sm_count * self.tensor_clock_hz

    def fma_flops_per_s(self, dtype: str) -> float:
        """Vector-unit peak for ``dtype``; 0 when it has none."""
        return self.fma_flops_per_clk_sm.get(dtype, 0.0) * self.sm_count * self.clock_boost_hz

    @property
    def mfu_flops_per_s(self) -> float:
        """The peak that MFU is relative to: bf16, fp16 where there is none (V100, T4), fp32 without tensor cores."""
        return self.tensor_flops_per_s("bf16") or self.tensor_flops_per_s("fp16") or self.fma_flops_per_s("fp32")

    def product_flops_per_s(self, dtype: str) -> float:
        """The peak of matrix products in a format, which MFU is relative to; of bf16 where there is none."""
        return self.tensor_flops_per_s(dtype) or self.fma_flops_per_s(dtype) or self.mfu_flops_per_s

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
        for name, value in changes.items():
            _check_plausible(origin, name, value)
        changed = dataclasses.replace(self, **values, origin=origin)
        effective = {k: v for k, v in {**self.changes, **changes}.items() if changed.number(k) != origin.number(k)}
        if not effective:  # every number is as it was
            return origin
        sources = {**origin.sources, **dict.fromkeys(effective, "what-if")}
        return dataclasses.replace(changed, sources=sources, changes=effective)

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


_FAR = 1000.0  # times more or less than the GPU has: a number in another unit
_UNITS = {"bytes_per_s": "bytes per second", "hz": "Hz", "bytes": "bytes", "flops_per_j": "FLOPs per joule",
          "s": "seconds", "w": "watts", "usd": "US dollars"}  # fmt: skip


def _check_plausible(gpu: Gpu, name: str, value: float) -> None:
    """Refuse a what-if in gigabytes, megahertz or milliseconds."""
    before = gpu.number(name)
    try:
        ratio = float(value) / before if before else 1.0
    except (TypeError, ValueError, OverflowError):
        return  # which the number itself is refused for
    if 1 / _FAR <= ratio <= _FAR or ratio <= 0:
        return
    unit = next((f", in {text}" for ending, text in _UNITS.items() if name.endswith(f"_{ending}")), "")
    raise KernelcastError(
        f"{name}={value:g} is {'less' if ratio < 1 else 'more'} than a thousand"
        f"{'th of' if ratio < 1 else ' times'} what {gpu.name} has: {before:g}{unit}; give it so, or a factor, as "
        f"{name}*1.5"
    )


RATE_TABLES = ("tensor_flops_per_clk_sm", "fma_flops_per_clk_sm", "sustained_tensor_fractions")
IDENTITY = (
    "id", "name", "vendor", "architecture", "compute_capability", "instruction_path", "aliases", "unit_of", "link_kind",
)  # fmt: skip
_NOT_NUMBERS = (*IDENTITY, *RATE_TABLES, "published_flops_per_s", "sources", "changes", "origin", "base")
NUMBERS = tuple(f.name for f in dataclasses.fields(Gpu) if f.name not in _NOT_NUMBERS)
INTEGERS = tuple(f.name for f in dataclasses.fields(Gpu) if f.type == "int")
_CUDA_BYTES = 4.7e8  # that the driver keeps, beyond what ECC takes
FRACTIONS = ("sustained_tensor_fraction", "sustained_tensor_fractions", "long_tensor_fraction",
             "sustained_dram_fraction")  # fmt: skip


def path_of(capability: str) -> tuple[str, str]:
    """The instruction path of a compute capability, and where that is from."""
    if not isinstance(capability, str):
        raise KernelcastError(f'compute_capability must be in quotes, as "9.0" or "gfx942", not {capability!r}')
    if capability in _PATH_OF:
        return _PATH_OF[capability], f"{_DERIVED[0]} {capability} ({_ISA})"
    path, rule = _inherited_path(capability)
    return path, f"{_DERIVED[1]}: compute capability {capability} is not known; {rule}"


def _inherited_path(capability: str) -> tuple[str, str]:
    """The path of an unknown capability: that of its generation, and of a later one that of the data-centre line, which
    has kept its instruction since 10.0. A GPU file that knows better says ``instruction_path``."""
    if capability.startswith("gfx"):
        return MFMA, "AMD's data-centre GPUs have MFMA"
    major = capability.partition(".")[0]
    if not major.isdigit():
        raise KernelcastError(
            f"compute_capability must be as 9.0 or gfx942, not {capability!r}; or say instruction_path = "
            f'"…": {", ".join(PATHS)}'
        )
    if int(major) < 7:
        return FMA, "below 7.0 no GPU has matrix units"
    latest = TCGEN05, "10.x, 11.x and what comes after 12.x are taken for data-centre GPUs, with tcgen05"
    return {
        **dict.fromkeys((7, 8), (MMA_SYNC, "7.x and 8.x have mma.sync")),
        9: (WGMMA, "9.x has wgmma"),
        12: (MMA_SYNC, "12.x has mma.sync, as 8.9"),
    }.get(int(major), latest)
