"""What was measured as numbers of a GPU file: shares of peaks, and peaks that can hold them. No PyTorch here.

Forecasts were fitted with numbers of campaigns: what engines reached with their libraries and data. A microbenchmark of
the same GPU differs from them by a few per cent, the smallest products by more. An H200 was measured both ways
(reference.toml): the ratio of the two turns what was measured into what campaigns would have shown.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernelcast.collect.specs_draft import CLOSE, GpuDraft, GpuProperties, Microbenchmarks
from kernelcast.hardware import Gpu, gpu

_ROOM = 1.0001  # a peak above what was measured
_DRAM_SHARE = 0.95  # of DRAM's rate that a plain read reaches (an H200: 4.56 of 4.8 TB/s), where the driver tells none
_LEAST = 0.5  # of a 16-bit peak: below it the base's rate a clock is taken to be twice this GPU's
_HALVED = ("bf16", "fp16", "tf32", "fp8")  # what GeForce cards run at half the rate


def complete_draft(begun: GpuDraft, told: GpuProperties, found: Microbenchmarks) -> GpuDraft:
    """The file: what was measured as shares of peaks, and peaks that can hold it."""
    made = begun
    for part in (_tensor, _dram, _l2, _vector, _launch):
        made = part(made, told, found)
    return replace(made, notes=(*_notes(made.gpu, told, found), *made.notes))


@functools.cache
def reference_gpu() -> dict[str, Any]:
    """What microbenchmarks saw of a GPU that campaigns measured too."""
    return tomllib.loads((Path(__file__).parent / "reference.toml").read_text(encoding="utf-8"))


def campaign_ratio(name: str) -> tuple[float, str]:
    """What to multiply a measured number with, and how to say so: 1 where the reference was not measured both ways.
    Formats of cuBLAS that campaigns lack, and runs that last, go with 16 bits."""
    table, _, dtype = name.partition(".")
    seen = reference_gpu()[table].get(dtype) if dtype else reference_gpu()[name]
    known = gpu(reference_gpu()["gpu"]).number(name)
    if seen is None or known is None:
        like_bf16 = dtype in ("fp16", "tf32") or name == "long_tensor_fraction"
        return campaign_ratio("sustained_tensor_fraction") if like_bf16 else (1.0, "")
    return known / seen, f"; times {known / seen:.3f}: {reference_gpu()['gpu']} has {known:g} in campaigns, {seen:g} so"


def _tensor(made: GpuDraft, told: GpuProperties, found: Microbenchmarks) -> GpuDraft:
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
        factor, told_as = campaign_ratio("sustained_tensor_fraction")
        share = min(1.0, shares[sixteen] * factor)
        lower = share if (chip.long_tensor_fraction or 0.0) > share else None  # than the base's of runs that last
        made = made.given(how[sixteen] + told_as, sustained_tensor_fraction=share, long_tensor_fraction=lower)
    for dtype, share in shares.items():
        if dtype != sixteen:
            name = f"sustained_tensor_fractions.{dtype}"
            factor, told_as = campaign_ratio(name)
            made = made.put({name: min(1.0, share * factor)}, how[dtype] + told_as)
    long = found.longs.get(sixteen)
    if long is None or sixteen not in shares:
        return made
    lasting = min(long.flops_per_s, found.bursts[sixteen])  # noise must not put it above
    held = f"measured {long.flops_per_s / 1e12:.4g} TFLOP/s over 1.5 s after 1.5 s of the same, {sixteen}, at "
    held += f"{long.power_w:.0f} W" + (f" and {long.sm_mhz:.0f} MHz" if long.sm_mhz else "") + f" ({told.software})"
    factor, told_as = campaign_ratio("long_tensor_fraction")
    most = made.gpu.sustained_tensor_fraction or 1.0
    made = made.given(held + told_as, long_tensor_fraction=min(most, factor * lasting / _peak(chip, sixteen)))
    clock = min(long.sm_mhz * 1e6, chip.clock_boost_hz) if long.sm_mhz else None
    made = made.given(held, clock_sustained_hz=clock)
    if long.by_power and chip.tensor_flops_per_j is None:  # where whole models told it, theirs stays
        made = made.given(held, tensor_flops_per_j=lasting / chip.power_w)
    return made


def _peak(chip: Gpu, dtype: str) -> float:
    return chip.tensor_flops_per_s("fp8" if dtype == "fp8_block" else dtype)


def _with_peaks(made: GpuDraft, told: GpuProperties, found: Microbenchmarks) -> GpuDraft:
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
    new = not made.unit
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


def _dram(made: GpuDraft, told: GpuProperties, found: Microbenchmarks) -> GpuDraft:
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
    if found.dram_decode is None:
        return made
    factor, told_as = campaign_ratio("sustained_dram_fraction")
    share = min(1.0, factor * found.dram_decode / peak)
    return made.given(f"{how}; the last, as a share of the peak{told_as}", sustained_dram_fraction=share)


def _l2(made: GpuDraft, told: GpuProperties, found: Microbenchmarks) -> GpuDraft:
    if not found.l2_read:
        return made
    chip = made.gpu
    at, rate = min(found.l2_read.items())
    each = ", ".join(f"{share:.0%}: {one / 1e12:.4g}" for share, one in found.l2_read.items())
    how = f"measured in TB/s, reading a share of L2 again and again, past L1: {each} ({told.software})"
    per_clk, usual = rate / chip.clock_boost_hz, float(reference_gpu()["l2_share"])
    peak = per_clk / usual
    if not made.unit:
        peak = max(per_clk * _ROOM, min(made.numbers["l2_bytes_per_clk"][0], peak))
    elif abs(peak / chip.l2_bytes_per_clk - 1) <= CLOSE:
        return made
    taken = f"taken to be {usual:.1%} of the peak, as it is of {reference_gpu()['gpu']}, and ports hold no more"
    return made.given(f"{how}; that of {at:.0%} {taken}", l2_bytes_per_clk=peak)


def _vector(made: GpuDraft, told: GpuProperties, found: Microbenchmarks) -> GpuDraft:
    """Rates a clock of what is no tensor core: doubled where measurements are above the base's, halved on a capability
    of no base where they are below half."""
    chip = made.gpu
    clocks = chip.sm_count * chip.clock_boost_hz
    new = made.borrowed
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


def _launch(made: GpuDraft, told: GpuProperties, found: Microbenchmarks) -> GpuDraft:
    """The floor bounds what any kernel takes, so it stays as it was seen."""
    factor, told_as = campaign_ratio("sustained_launch_s")
    floor, least = found.launch_floor_s, found.smallest_gemm_s and found.smallest_gemm_s * factor
    if least:
        floor = min(floor or made.gpu.launch_floor_s, least)
    made = made.given(
        f"measured: the shortest kernel, one after another in a CUDA graph, median of 5 replays ({told.software})",
        launch_floor_s=floor,
    )
    return made.given(
        "measured: median of 18 products of 1 or 16 by 32 to 128 by 32 to 128, one after another in a CUDA graph "
        f"({told.software}){told_as}",
        sustained_launch_s=least,
    )


def _notes(chip: Gpu, told: GpuProperties, found: Microbenchmarks) -> Iterator[str]:
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
