"""A GPU file in the making: the base that it derives from, and numbers with the text of where each is from.

It begins with what CUDA and the driver say, which is enough to know the sizes to measure (``specs``); what is seen then
is put in by ``specs_file``. No PyTorch here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from kernelcast.collect.power_meter import BoardLimits
from kernelcast.errors import KernelcastError
from kernelcast.files import complete
from kernelcast.hardware import Gpu, fabrics, gpu, gpu_ids, load_gpu, parse_gpu
from kernelcast.hardware.gpu import INTEGERS, RATE_TABLES, path_of
from kernelcast.hardware.load import CATALOGUE, base_values

CLOSE = 0.01  # relative difference up to which the catalogue's number stays, not the driver's
_PCIE_LANE = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_NVLINK = {7: ("nvlink2", 25e9), 8: ("nvlink3", 25e9), 9: ("nvlink4", 25e9)}  # fabric and bytes/s of one link, by major


@dataclass(frozen=True)
class GpuDraft:
    """A GPU file in the making. ``numbers``: by field (``table.dtype`` of a table), with the text of the source."""

    path: Path
    base: str
    texts: Mapping[str, str]
    numbers: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def given(self, source: str, **numbers: float | None) -> GpuDraft:
        """The draft with more numbers; None is left out."""
        return self.put({name: value for name, value in numbers.items() if value is not None}, source)

    def put(self, numbers: Mapping[str, float], source: str) -> GpuDraft:
        return replace(self, numbers={**self.numbers, **{name: (value, source) for name, value in numbers.items()}})

    @property
    def text(self) -> str:
        keys: dict[str, str] = {}
        for _, source in self.numbers.values():
            keys.setdefault(source, f"s{len(keys) + 1}")
        plain = {name: entry for name, entry in self.numbers.items() if "." not in name}
        lines = [*(f"# {note}" for note in self.notes), f"base = {json.dumps(self.base)}"]
        lines += [f"{name} = {json.dumps(text)}" for name, text in self.texts.items()]
        lines += [
            "",
            *(f'{name} = [{_digits(name, value)}, "{keys[source]}"]' for name, (value, source) in plain.items()),
        ]
        for table in RATE_TABLES:
            rows = {name: entry for name, entry in self.numbers.items() if name.startswith(f"{table}.")}
            lines += ["", f"[{table}]"] if rows else []
            lines += [
                f'{name.partition(".")[2]} = [{_digits(name, value)}, "{keys[source]}"]'
                for name, (value, source) in rows.items()
            ]
        lines += ["", "[sources]", *(f"{key} = {json.dumps(source)}" for source, key in keys.items())]
        return "\n".join(lines) + "\n"

    @property
    def unit(self) -> bool:
        """Whether it is a unit of a catalogued GPU."""
        return "unit_of" in self.texts

    @property
    def borrowed(self) -> bool:
        """Whether its base is of another compute capability."""
        return not self.unit and capability_of(self.base) != self.texts["compute_capability"]

    @property
    def gpu(self) -> Gpu:
        return parse_gpu(self.text, self.path)


def _digits(name: str, value: float) -> str:
    return str(int(value)) if name in INTEGERS else repr(float(f"{value:.5g}"))


def write(draft: GpuDraft) -> Gpu:
    """Write the file atomically and read it back."""
    draft.gpu  # noqa: B018  refused before anything is written
    draft.path.parent.mkdir(parents=True, exist_ok=True)
    with complete(draft.path) as part:
        part.write_text(draft.text, encoding="utf-8")
    return load_gpu(draft.path)


def start_draft(properties: GpuProperties, path: Path, named: str | None = None) -> GpuDraft:
    """A draft from what CUDA and the driver report: enough to choose the sizes to measure. ``named``: its catalogue id,
    where the driver's name does not identify it."""
    if path.stem in gpu_ids():
        raise KernelcastError(
            f"{path.stem} is a GPU of the catalogue: name the file of your own otherwise, as in my_{path.stem}.toml"
        )
    known = gpu(named) if named else _catalogued(properties.name)
    if known is not None and known.known_as in gpu_ids() and known.compute_capability == properties.capability:
        return _unit(properties, known, path)
    return _new(properties, path)


def _catalogued(name: str) -> Gpu | None:
    try:
        return gpu(name)
    except KernelcastError:
        return None


def _unit(properties: GpuProperties, known: Gpu, path: Path) -> GpuDraft:
    """The draft of a catalogued GPU: only what differs."""
    draft = GpuDraft(path, known.known_as, {"name": f"{properties.name}, measured", "unit_of": known.known_as})
    board = properties.board
    numbers = {
        "sm_count": properties.sm_count,
        "l2_bytes": properties.l2_bytes,
        "dram_bytes": properties.dram_bytes,
        "clock_boost_hz": board.sm_mhz and board.sm_mhz * 1e6,
        "power_w": board.power_limit_w,
    }
    others = {name: value for name, value in numbers.items() if value and abs(value / getattr(known, name) - 1) > CLOSE}
    draft = draft.put(others, f"measured by CUDA device properties and NVML ({properties.software})")
    boost = others.get("clock_boost_hz", known.clock_boost_hz)
    lower = {name: boost for name in ("clock_base_hz", "clock_tensor_hz") if (getattr(known, name) or 0) > boost}
    if known.clock_max_hz and "clock_boost_hz" in others:
        lower["clock_max_hz"] = boost
    return draft.put(lower, "no higher than the highest clock that NVML gives")


def base_of(capability: str) -> tuple[str, str]:
    """The catalogue's base of a capability, or of the nearest by instruction path; and its capability."""
    bases = {capability_of(path.stem): path.stem for path in CATALOGUE.glob("_sm*.toml")}
    alike = [base for base in bases if path_of(base)[0] == path_of(capability)[0]]
    nearest = min(alike, key=lambda base: (abs(float(base) - float(capability)), -float(base)))
    return bases[nearest], nearest


def capability_of(base: str) -> str:
    digits = base.removeprefix("_sm")
    return f"{digits[:-1]}.{digits[-1]}"


def _new(properties: GpuProperties, path: Path) -> GpuDraft:
    """The draft of a GPU that is not in the catalogue: everything that a file needs."""
    if not properties.capability.replace(".", "").isdigit():
        raise KernelcastError(f"{properties.name}: `specs` measures NVIDIA GPUs, which have a compute capability")
    base, nearest = base_of(properties.capability)
    board = properties.board
    draft = GpuDraft(path, base, {"name": properties.name, "compute_capability": properties.capability})
    if nearest != properties.capability:
        runs = path_of(properties.capability)[0]
        draft = replace(draft, notes=(
            f"No base of compute capability {properties.capability}: what is not below comes from {nearest}, the "
            f"nearest that runs {runs}; rates a clock were doubled or halved where measurements say so.",
        ))  # fmt: skip
    source = f"measured by CUDA device properties ({properties.software})"
    draft = draft.given(
        source, sm_count=properties.sm_count, l2_bytes=properties.l2_bytes, dram_bytes=properties.dram_bytes,
        smem_bytes_per_sm=properties.smem_bytes_per_sm, smem_bytes_per_cta=properties.smem_bytes_per_cta,
        registers_per_sm=properties.registers_per_sm, max_threads_per_sm=properties.max_threads_per_sm,
    )  # fmt: skip
    if board.sm_mhz is None or board.power_limit_w is None:
        raise KernelcastError("NVIDIA's driver reports no highest clock and power limit here: a GPU file needs them")
    by_driver = f"measured by NVML ({properties.software})"
    draft = draft.given(by_driver, clock_boost_hz=board.sm_mhz * 1e6, power_w=board.power_limit_w)
    draft = draft.given("not reported by the driver: as the boost clock", clock_base_hz=board.sm_mhz * 1e6)
    if board.memory_mhz and board.memory_bits:
        rate = 2 * board.memory_mhz * 1e6 * board.memory_bits / 8
        memory_bus = f"{by_driver}: {board.memory_bits} bits at {board.memory_mhz:g} MHz, double data rate"
        draft = draft.given(memory_bus, dram_bytes_per_s=rate)
    else:
        draft = draft.given("not reported by the driver: to be replaced by a measurement", dram_bytes_per_s=1e12)
    ports = base_values(base)["l2_bytes_per_clk_sm"] * properties.sm_count
    draft = draft.given("estimate: the ports of all SMs", l2_bytes_per_clk=ports)
    draft = draft.given("estimate: to be replaced by what is measured", launch_floor_s=1e-6)
    return _linked(draft, properties, by_driver)


def _linked(draft: GpuDraft, properties: GpuProperties, by_driver: str) -> GpuDraft:
    board, major = properties.board, int(properties.capability.partition(".")[0])
    generation = min(max(board.pcie_generation or 4, min(_PCIE_LANE)), max(_PCIE_LANE))
    lanes = board.pcie_lanes or 16
    # GeForce cards have no peer access: by way of the host's memory, which all share
    pcie = f"pcie{max(4, min(generation, 5))}_shared" if "GeForce" in properties.name else f"pcie{min(generation, 5)}"
    link, each = _NVLINK.get(major, ("nvlink5", 50e9)) if board.nvlinks else (pcie, 0.0)
    draft = replace(draft, texts={**draft.texts, "link_kind": link if link in fabrics() else "pcie5"})
    links = f"{by_driver}: {board.nvlinks} NVLinks are up; PCIe {generation} x{lanes}; not timed (collect --link does)"
    return draft.put(
        {"link_bytes_per_s": each * board.nvlinks, "pcie_bytes_per_s": _PCIE_LANE[generation] * lanes}, links
    )


@dataclass(frozen=True)
class GpuProperties:
    """The GPU's properties from CUDA and the driver."""

    name: str
    capability: str
    sm_count: int
    l2_bytes: int
    smem_bytes_per_sm: int
    smem_bytes_per_cta: int
    registers_per_sm: int
    max_threads_per_sm: int
    dram_bytes: int
    board: BoardLimits
    software: str  # of driver and libraries


@dataclass(frozen=True)
class SustainedRun:
    """A product that was repeated for seconds."""

    flops_per_s: float
    power_w: float
    sm_mhz: float | None
    by_power: bool  # the driver held the clock down for it


@dataclass
class Microbenchmarks:
    """Measured rates; None or absent: not measured, and ``skipped`` says why."""

    bursts: dict[str, float] = field(default_factory=dict)  # FLOP/s of the best shape, by format
    shapes: dict[str, str] = field(default_factory=dict)
    longs: dict[str, SustainedRun] = field(default_factory=dict)
    dram_read: float | None = None  # bytes/s
    dram_copy: float | None = None
    dram_decode: float | None = None  # by products with few rows, best shape
    l2_read: dict[float, float] = field(default_factory=dict)  # by share of L2 that is read again and again
    smem: float | None = None
    exponentials: float | None = None  # a second
    fma: float | None = None  # FLOP/s
    launch_floor_s: float | None = None
    gap_s: float | None = None
    smallest_gemm_s: float | None = None
    skipped: dict[str, str] = field(default_factory=dict)
