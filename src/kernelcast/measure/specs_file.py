"""A GPU file of what was measured: the base that it derives from, numbers with the text of where each is from.

No PyTorch here: what ``specs`` saw goes in, TOML comes out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kernelcast.errors import KernelcastError
from kernelcast.files import complete
from kernelcast.hardware import Gpu, fabrics, gpu, gpu_ids, load_gpu, parse_gpu
from kernelcast.hardware.gpu import INTEGERS, RATE_TABLES
from kernelcast.hardware.load import CATALOGUE, base_values

if TYPE_CHECKING:
    from kernelcast.measure.specs import Measured, Properties

CLOSE = 0.01  # what the driver says of a catalogued GPU and the catalogue has: the catalogue's number stays
_ROOM = 1.0001  # a peak above what was measured
_L2_SHARE = 0.85  # of L2's rate that a good kernel sustains, where nobody published the rate
_DRAM_SHARE = 0.92  # the same of DRAM's
_LEAST = 0.5  # of a 16-bit peak: below it the base's rate a clock is taken to be twice this GPU's
_HALVED = ("bf16", "fp16", "tf32", "fp8")  # what GeForce cards run at half the rate
_PCIE_LANE = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_NVLINK = {7: ("nvlink2", 25e9), 8: ("nvlink3", 25e9), 9: ("nvlink4", 25e9)}  # kind and bytes/s of one link, by major


@dataclass(frozen=True)
class Draft:
    """A GPU file in the making. ``numbers``: by field (``table.dtype`` of a table), with the text of the source."""

    path: Path
    base: str
    words: Mapping[str, str]
    numbers: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def given(self, source: str, **numbers: float | None) -> Draft:
        """With more numbers; None is left out."""
        return self.put({name: value for name, value in numbers.items() if value is not None}, source)

    def put(self, numbers: Mapping[str, float], source: str) -> Draft:
        return replace(self, numbers={**self.numbers, **{name: (value, source) for name, value in numbers.items()}})

    @property
    def text(self) -> str:
        keys: dict[str, str] = {}
        for _, source in self.numbers.values():
            keys.setdefault(source, f"s{len(keys) + 1}")
        plain = {name: entry for name, entry in self.numbers.items() if "." not in name}
        lines = [*(f"# {note}" for note in self.notes), f"base = {json.dumps(self.base)}"]
        lines += [f"{name} = {json.dumps(word)}" for name, word in self.words.items()]
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
    def gpu(self) -> Gpu:
        return parse_gpu(self.text, self.path)


def _digits(name: str, value: float) -> str:
    return str(int(value)) if name in INTEGERS else repr(float(f"{value:.5g}"))


def begun(told: Properties, path: Path) -> Draft:
    """What CUDA and the driver say: enough to know which sizes to measure."""
    if path.suffix != ".toml":
        raise KernelcastError(f"a GPU is written as TOML: give -o FILE.toml, not {path}")
    if path.stem in gpu_ids():
        raise KernelcastError(
            f"{path.stem} is a GPU of the catalogue: name the file of your own otherwise, as in my_{path.stem}.toml"
        )
    known = _catalogued(told.name)
    if known is not None and known.compute_capability == told.capability:
        return _unit(told, known, path)
    return _new(told, path)


def _catalogued(name: str) -> Gpu | None:
    try:
        return gpu(name)
    except KernelcastError:
        return None


def _unit(told: Properties, known: Gpu, path: Path) -> Draft:
    """Of a catalogued GPU only what differs."""
    made = Draft(path, known.id, {"name": f"{told.name}, measured", "unit_of": known.id})
    board = told.board
    said = {
        "sm_count": told.sm_count,
        "l2_bytes": told.l2_bytes,
        "dram_bytes": told.dram_bytes,
        "clock_boost_hz": board.sm_mhz and board.sm_mhz * 1e6,
        "power_w": board.power_limit_w,
    }
    others = {name: value for name, value in said.items() if value and abs(value / getattr(known, name) - 1) > CLOSE}
    made = made.put(others, f"measured by CUDA device properties and NVML ({told.software})")
    boost = others.get("clock_boost_hz", known.clock_boost_hz)
    lower = {name: boost for name in ("clock_base_hz", "clock_tensor_hz") if (getattr(known, name) or 0) > boost}
    return made.put(lower, "no higher than the highest clock that NVML gives")


def instruction_path(capability: str) -> str:
    """How its tensor cores are fed. A capability that nobody knows yet has mma.sync, as all do."""
    return {"9": "wgmma", "10": "tcgen05", "11": "tcgen05"}.get(capability.partition(".")[0], "mma.sync")


def base_of(capability: str) -> tuple[str, str]:
    """The catalogue's base of a capability, or of the nearest by instruction path; and its capability."""
    bases = {_capability(path): path.stem for path in CATALOGUE.glob("_sm*.toml")}
    alike = [one for one in bases if instruction_path(one) == instruction_path(capability)]
    nearest = min(alike, key=lambda one: (abs(float(one) - float(capability)), -float(one)))
    return bases[nearest], nearest


def _capability(path: Path) -> str:
    digits = path.stem.removeprefix("_sm")
    return f"{digits[:-1]}.{digits[-1]}"


def _new(told: Properties, path: Path) -> Draft:
    """Of a GPU that the catalogue does not know all that a file needs."""
    if not told.capability.replace(".", "").isdigit():
        raise KernelcastError(f"{told.name}: --specs measures NVIDIA GPUs, which have a compute capability")
    base, nearest = base_of(told.capability)
    board = told.board
    made = Draft(path, base, {"name": told.name, "compute_capability": told.capability})
    if nearest != told.capability:
        path_of = instruction_path(told.capability)
        made = replace(made, notes=(
            f"No base of compute capability {told.capability}: what is not below comes from {nearest}, the nearest "
            f"that runs {path_of}; rates a clock were doubled or halved where measurements say so.",
        ))  # fmt: skip
    said = f"measured by CUDA device properties ({told.software})"
    made = made.given(
        said, sm_count=told.sm_count, l2_bytes=told.l2_bytes, dram_bytes=told.dram_bytes,
        smem_bytes_per_sm=told.smem_bytes_per_sm, smem_bytes_per_cta=told.smem_bytes_per_cta,
        registers_per_sm=told.registers_per_sm, max_threads_per_sm=told.max_threads_per_sm,
    )  # fmt: skip
    if board.sm_mhz is None or board.power_limit_w is None:
        raise KernelcastError("NVIDIA's driver tells no highest clock and power limit here: a file cannot do without")
    by_driver = f"measured by NVML ({told.software})"
    made = made.given(by_driver, clock_boost_hz=board.sm_mhz * 1e6, power_w=board.power_limit_w)
    made = made.given("not told by the driver: as the boost clock", clock_base_hz=board.sm_mhz * 1e6)
    if board.memory_mhz and board.memory_bits:
        rate = 2 * board.memory_mhz * 1e6 * board.memory_bits / 8
        told_bus = f"{by_driver}: {board.memory_bits} bits at {board.memory_mhz:g} MHz, double data rate"
        made = made.given(told_bus, dram_bytes_per_s=rate)
    else:
        made = made.given("not told by the driver: to be replaced by what is read", dram_bytes_per_s=1e12)
    ports = base_values(base)["l2_bytes_per_clk_sm"] * told.sm_count
    made = made.given("estimate: the ports of all SMs", l2_bytes_per_clk=ports)
    made = made.given("estimate: to be replaced by what is measured", launch_floor_s=1e-6)
    return _linked(made, told, by_driver)


def _linked(made: Draft, told: Properties, by_driver: str) -> Draft:
    board, major = told.board, int(told.capability.partition(".")[0])
    generation = min(max(board.pcie_generation or 4, min(_PCIE_LANE)), max(_PCIE_LANE))
    lanes = board.pcie_lanes or 16
    kind, each = _NVLINK.get(major, ("nvlink5", 50e9)) if board.nvlinks else (f"pcie{min(generation, 5)}", 0.0)
    made = replace(made, words={**made.words, "link_kind": kind if kind in fabrics() else "pcie5"})
    links = f"{by_driver}: {board.nvlinks} NVLinks are up; PCIe {generation} x{lanes}; not timed (collect --link does)"
    return made.put(
        {"link_bytes_per_s": each * board.nvlinks, "pcie_bytes_per_s": _PCIE_LANE[generation] * lanes}, links
    )


def finished(begun: Draft, told: Properties, found: Measured) -> Draft:
    """The file: what was measured as shares of peaks, and peaks that can hold it."""
    made = begun
    for part in (_tensor, _dram, _l2, _vector, _started):
        made = part(made, told, found)
    return replace(made, notes=(*_told(made.gpu, told, found), *made.notes))


def _tensor(made: Draft, told: Properties, found: Measured) -> Draft:
    if not found.bursts:
        return made
    made = _with_peaks(made, told, found)
    chip = made.gpu
    shares = {dtype: rate / _peak(chip, dtype) for dtype, rate in found.bursts.items()}
    how = {
        dtype: f"measured {found.bursts[dtype] / 1e12:.4g} TFLOP/s: product of {found.shapes[dtype]} on random "
        f"numbers, the best of several large shapes, bursts of 2 ms after rests, median of 8 ({told.software}); "
        "share of the peak"
        for dtype in shares
    }
    sixteen = "bf16" if "bf16" in shares else "fp16"
    if sixteen in shares:
        made = made.given(how[sixteen], sustained_tensor_fraction=min(1.0, shares[sixteen]))
    for dtype, share in shares.items():
        if dtype != sixteen:
            made = made.put({f"sustained_tensor_fractions.{dtype}": min(1.0, share)}, how[dtype])
    long = found.longs.get(sixteen)
    if long is None or sixteen not in shares:
        return made
    held = f"measured {long.flops_per_s / 1e12:.4g} TFLOP/s over 1.5 s after 1.5 s of the same, {sixteen}, at "
    held += f"{long.power_w:.0f} W" + (f" and {long.sm_mhz:.0f} MHz" if long.sm_mhz else "") + f" ({told.software})"
    made = made.given(
        held,
        long_tensor_fraction=min(shares[sixteen], long.flops_per_s / _peak(chip, sixteen), 1.0),
        clock_sustained_hz=min(long.sm_mhz * 1e6, chip.clock_boost_hz) if long.sm_mhz else None,
    )
    if long.by_power and chip.tensor_flops_per_j is None:  # where whole models told it, theirs stays
        made = made.given(held, tensor_flops_per_j=long.flops_per_s / chip.power_w)
    return made


def _peak(chip: Gpu, dtype: str) -> float:
    return chip.tensor_flops_per_s("fp8" if dtype == "fp8_block" else dtype)


def _with_peaks(made: Draft, told: Properties, found: Measured) -> Draft:
    """Peaks that no burst is above. A catalogued GPU's tensor clock moves first, up to the boost clock: published peaks
    are at a lower one. A rate a clock moves where that is not enough."""
    chip = made.gpu
    shares = {dtype: rate / _peak(chip, dtype) for dtype, rate in found.bursts.items() if dtype != "fp8_block"}
    if not shares:
        return made
    top = max(shares.values())
    if top > 1 and chip.tensor_clock_hz < chip.clock_boost_hz:
        clock = min(chip.clock_boost_hz, chip.tensor_clock_hz * top * _ROOM)
        how = (
            f"measured: bursts reach {top:.3f} of the published peak, which is at {chip.tensor_clock_hz / 1e6:.0f} MHz"
        )
        made = made.given(f"{how} ({told.software})", clock_tensor_hz=clock)
        shares = {dtype: share * chip.tensor_clock_hz / clock for dtype, share in shares.items()}
    new = "unit_of" not in made.words
    halved = new and max(shares.get("bf16", 0.0), shares.get("fp16", 0.0)) < _LEAST
    for dtype, share in shares.items():
        rate = chip.tensor_flops_per_clk_sm[dtype]
        if share > 1:
            other = rate * (2 ** math.ceil(math.log2(share)) if new else share * _ROOM)
        elif halved and dtype in _HALVED and share < _LEAST:
            other = rate / 2
        else:
            continue
        source = f"measured: {found.bursts[dtype] / 1e12:.4g} TFLOP/s is {share:.3f} of what the base's {rate:g} give"
        made = made.put({f"tensor_flops_per_clk_sm.{dtype}": other}, f"{source} ({told.software})")
    return made


def _dram(made: Draft, told: Properties, found: Measured) -> Draft:
    rates = {"read": found.dram_read, "copy": found.dram_copy, "products with few rows": found.dram_decode}
    seen = {name: rate for name, rate in rates.items() if rate}
    if not seen:
        return made
    best = max(seen.values())
    peak = made.gpu.dram_bytes_per_s
    each = ", ".join(f"{name} {rate / 1e12:.4g}" for name, rate in seen.items())
    how = f"measured in TB/s: {each}; footprints far above L2, median of 5 or more replays ({told.software})"
    if "dram_bytes_per_s" in made.numbers and made.numbers["dram_bytes_per_s"][1].startswith("not told"):
        peak = best / _DRAM_SHARE
        made = made.given(f"{how}; taken to be {_DRAM_SHARE:.0%} of the peak", dram_bytes_per_s=peak)
    elif best > peak:
        peak = best * _ROOM
        made = made.given(f"{how}; above the peak that was told", dram_bytes_per_s=peak)
    share = (found.dram_decode or best) / peak
    return made.given(f"{how}; the last, as a share of the peak", sustained_dram_fraction=min(1.0, share))


def _l2(made: Draft, told: Properties, found: Measured) -> Draft:
    if not found.l2_read:
        return made
    chip = made.gpu
    at, rate = min(found.l2_read.items(), key=lambda entry: abs(entry[0] - 0.25))
    each = ", ".join(f"{share:.0%}: {one / 1e12:.4g}" for share, one in found.l2_read.items())
    how = f"measured in TB/s, reading a share of L2 again and again, past L1: {each} ({told.software})"
    per_clk = rate / chip.clock_boost_hz
    if "l2_bytes_per_clk" in made.numbers:
        peak = min(made.numbers["l2_bytes_per_clk"][0], per_clk / _L2_SHARE)
        peak = max(peak, per_clk * _ROOM)
        made = made.given(f"{how}; {at:.0%} taken to be {_L2_SHARE:.0%} of the peak", l2_bytes_per_clk=peak)
    else:
        peak = max(chip.l2_bytes_per_clk, per_clk * _ROOM)
        if peak > chip.l2_bytes_per_clk:
            made = made.given(f"{how}; above what was known", l2_bytes_per_clk=peak)
    return made.given(f"{how}; that of {at:.0%}, as a share of the peak", sustained_l2_fraction=per_clk / peak)


def _vector(made: Draft, told: Properties, found: Measured) -> Draft:
    """Rates a clock of what is no tensor core: doubled where measurements are above the base's, halved on a capability
    of no base where they are below half."""
    chip = made.gpu
    clocks = chip.sm_count * chip.clock_boost_hz
    new = _borrowed(made)
    seen = {
        "xu_ops_per_clk_sm": (found.exponentials, chip.xu_ops_per_clk_sm),
        "fma_flops_per_clk_sm.fp32": (found.fma, chip.fma_flops_per_clk_sm["fp32"]),
        "smem_bytes_per_clk_sm": (found.smem, chip.smem_bytes_per_clk_sm),
    }
    for name, (rate, known) in seen.items():
        share = rate / clocks / known if rate else 1.0
        if share > 1 + CLOSE or (new and share < _LEAST):
            other = known * 2.0 ** math.ceil(math.log2(share))
            how = f"measured {share * known:.4g} a clock and SM at the boost clock; the base's {known:g}"
            made = made.put({name: other}, f"{how} ({told.software})")
    return made


def _borrowed(made: Draft) -> bool:
    """Whether its base is of another compute capability."""
    return made.base.startswith("_") and _capability(Path(made.base)) != made.words["compute_capability"]


def _started(made: Draft, told: Properties, found: Measured) -> Draft:
    floor, least = found.launch_floor_s, found.smallest_gemm_s
    if floor and least:
        floor = min(floor, least)
    made = made.given(
        f"measured: the shortest kernel, one after another in a CUDA graph, median of 5 replays ({told.software})",
        launch_floor_s=floor,
    )
    return made.given(
        "measured: median of 18 products of 1 or 16 by 32 to 128 by 32 to 128, one after another in a CUDA graph "
        f"({told.software})",
        sustained_launch_s=least,
    )


def _told(chip: Gpu, told: Properties, found: Measured) -> Iterator[str]:
    """What was seen and is no number of a GPU file, for who reads it."""
    yield f"Measured on {told.name} by `kernelcast collect --specs`; {told.software}."
    clocks = chip.sm_count * chip.clock_boost_hz
    rates = (
        ("exponentials", found.exponentials, chip.xu_ops_per_clk_sm, "/clk/SM"),
        ("fp32 FMA", found.fma, chip.fma_flops_per_clk_sm["fp32"], " FLOP/clk/SM"),
        ("shared memory", found.smem, chip.smem_bytes_per_clk_sm, " B/clk/SM"),
    )
    for name, rate, known, unit in rates:
        if rate:
            yield f"{name}: {rate / clocks:.4g}{unit} at the boost clock, {rate / clocks / known:.0%} of {known:g}"
    if found.gap_s is not None:
        yield f"a kernel takes {found.gap_s * 1e6:.2f} us beside its work, one after another in a CUDA graph"
    for dtype, long in found.longs.items():
        clock = f", {long.sm_mhz:.0f} MHz" if long.sm_mhz else ""
        limit = ", held down by the power limit" if long.by_power else ""
        yield f"{dtype} for seconds: {long.flops_per_s / 1e12:.4g} TFLOP/s, {long.power_w:.0f} W{clock}{limit}"
    for name, why in found.skipped.items():
        yield f"not measured: {name}: {why}"


def write(made: Draft) -> Gpu:
    """The file, whole or none, after it was read back."""
    made.gpu  # noqa: B018  refused before anything is written
    made.path.parent.mkdir(parents=True, exist_ok=True)
    with complete(made.path) as part:
        part.write_text(made.text, encoding="utf-8")
    return load_gpu(made.path)
