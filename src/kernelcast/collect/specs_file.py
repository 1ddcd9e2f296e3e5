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
_DRAM_SHARE = 0.95  # of DRAM's rate that a plain read reaches (an H200: 4.56 of 4.8 TB/s), without the driver's number
_LEAST = 0.5  # of a 16-bit peak: below it the base's rate a clock is taken to be twice this GPU's
_HALVED = ("bf16", "fp16", "tf32", "fp8")  # what GeForce cards run at half the rate


def complete_draft(begun: GpuDraft, properties: GpuProperties, results: Microbenchmarks) -> GpuDraft:
    """The file: what was measured as shares of peaks, and peaks that can hold it."""
    draft = begun
    for part in (_tensor, _dram, _l2, _vector, _launch):
        draft = part(draft, properties, results)
    return replace(draft, notes=(*_notes(draft.gpu, properties, results), *draft.notes))


@functools.cache
def reference_gpu() -> dict[str, Any]:
    """Microbenchmarks of a GPU that campaigns measured too."""
    return tomllib.loads((Path(__file__).parent / "reference.toml").read_text(encoding="utf-8"))


def campaign_ratio(name: str) -> tuple[float, str]:
    """The factor for a measured number, and its note: 1 where the reference was not measured both ways.
    Formats of cuBLAS that campaigns lack, and sustained runs, use the 16-bit ratio."""
    table, _, dtype = name.partition(".")
    measured = reference_gpu()[table].get(dtype) if dtype else reference_gpu()[name]
    known = gpu(reference_gpu()["gpu"]).number(name)
    if measured is None or known is None:
        like_bf16 = dtype in ("fp16", "tf32") or name == "long_tensor_fraction"
        return campaign_ratio("sustained_tensor_fraction") if like_bf16 else (1.0, "")
    return (
        known / measured,
        f"; times {known / measured:.3f}: {reference_gpu()['gpu']} has {known:g} in campaigns, {measured:g} so",
    )


def _tensor(draft: GpuDraft, properties: GpuProperties, results: Microbenchmarks) -> GpuDraft:
    if not results.bursts:
        return draft
    draft = _with_peaks(draft, properties, results)
    target = draft.gpu
    shares = {dtype: rate / _peak(target, dtype) for dtype, rate in results.bursts.items()}
    how = {
        dtype: f"measured {results.bursts[dtype] / 1e12:.4g} TFLOP/s: product of {results.shapes[dtype]} on random "
        f"numbers, the best of several large shapes, bursts of 2 ms after rests, median of 8 ({properties.software}); "
        "share of the peak"
        for dtype in shares
    }
    sixteen = "bf16" if "bf16" in shares else "fp16"
    if sixteen in shares:
        factor, note = campaign_ratio("sustained_tensor_fraction")
        share = min(1.0, shares[sixteen] * factor)
        lower = share if (target.long_tensor_fraction or 0.0) > share else None  # than the base's of sustained runs
        draft = draft.given(how[sixteen] + note, sustained_tensor_fraction=share, long_tensor_fraction=lower)
    for dtype, share in shares.items():
        if dtype != sixteen:
            name = f"sustained_tensor_fractions.{dtype}"
            factor, note = campaign_ratio(name)
            draft = draft.put({name: min(1.0, share * factor)}, how[dtype] + note)
    long = results.longs.get(sixteen)
    if long is None or sixteen not in shares:
        return draft
    lasting = min(long.flops_per_s, results.bursts[sixteen])  # noise must not put it above
    held = f"measured {long.flops_per_s / 1e12:.4g} TFLOP/s over 1.5 s after 1.5 s of the same, {sixteen}, at "
    held += (
        f"{long.power_w:.0f} W" + (f" and {long.sm_mhz:.0f} MHz" if long.sm_mhz else "") + f" ({properties.software})"
    )
    factor, note = campaign_ratio("long_tensor_fraction")
    most = draft.gpu.sustained_tensor_fraction or 1.0
    draft = draft.given(held + note, long_tensor_fraction=min(most, factor * lasting / _peak(target, sixteen)))
    clock = min(long.sm_mhz * 1e6, target.clock_boost_hz) if long.sm_mhz else None
    draft = draft.given(held, clock_sustained_hz=clock)
    if long.by_power and target.tensor_flops_per_j is None:  # where it was fitted to whole models, that number stays
        draft = draft.given(held, tensor_flops_per_j=lasting / target.power_w)
    return draft


def _peak(target: Gpu, dtype: str) -> float:
    return target.tensor_flops_per_s("fp8" if dtype == "fp8_block" else dtype)


def _with_peaks(draft: GpuDraft, properties: GpuProperties, results: Microbenchmarks) -> GpuDraft:
    """Peaks that no burst is above. A catalogued GPU's tensor clock moves first, up to the boost clock: published peaks
    are at a lower one. A rate a clock moves where that is not enough."""
    target = draft.gpu
    shares = {dtype: rate / _peak(target, dtype) for dtype, rate in results.bursts.items() if dtype != "fp8_block"}
    if not shares:
        return draft
    top = max(shares.values())
    if top > 1 and target.tensor_clock_hz < target.clock_boost_hz:
        clock = min(target.clock_boost_hz, target.tensor_clock_hz * top * _ROOM)
        how = f"measured: bursts reach {top:.3f} of the published peak, at {target.tensor_clock_hz / 1e6:.0f} MHz"
        draft = draft.given(f"{how} ({properties.software})", clock_tensor_hz=clock)
        shares = {dtype: share * target.tensor_clock_hz / clock for dtype, share in shares.items()}
    new = not draft.unit
    halved = new and max(shares.get("bf16", 0.0), shares.get("fp16", 0.0)) < _LEAST
    for dtype, share in shares.items():
        rate = target.tensor_flops_per_clk_sm[dtype]
        if share > 1:
            other = rate * (2 ** math.ceil(math.log2(share)) if new else share * _ROOM)
        elif halved and dtype in _HALVED and share < _LEAST:
            other = rate / 2
        else:
            continue
        source = f"measured: {results.bursts[dtype] / 1e12:.4g} TFLOP/s is {share:.3f} of what the base's {rate:g} give"
        draft = draft.put({f"tensor_flops_per_clk_sm.{dtype}": other}, f"{source} ({properties.software})")
    return draft


def _dram(draft: GpuDraft, properties: GpuProperties, results: Microbenchmarks) -> GpuDraft:
    rates = {"read": results.dram_read, "copy": results.dram_copy, "products with few rows": results.dram_decode}
    measured = {name: rate for name, rate in rates.items() if rate}
    if not measured:
        return draft
    best = max(measured.values())
    peak = draft.gpu.dram_bytes_per_s
    each = ", ".join(f"{name} {rate / 1e12:.4g}" for name, rate in measured.items())
    how = f"measured in TB/s: {each}; footprints far above L2, median of 5 or more replays ({properties.software})"
    if "dram_bytes_per_s" in draft.numbers and draft.numbers["dram_bytes_per_s"][1].startswith("not reported"):
        peak = best / _DRAM_SHARE
        draft = draft.given(f"{how}; taken to be {_DRAM_SHARE:.0%} of the peak", dram_bytes_per_s=peak)
    elif best > peak:
        peak = best * _ROOM
        draft = draft.given(f"{how}; above the peak that was given", dram_bytes_per_s=peak)
    if results.dram_decode is None:
        return draft
    factor, note = campaign_ratio("sustained_dram_fraction")
    share = min(1.0, factor * results.dram_decode / peak)
    return draft.given(f"{how}; the last, as a share of the peak{note}", sustained_dram_fraction=share)


def _l2(draft: GpuDraft, properties: GpuProperties, results: Microbenchmarks) -> GpuDraft:
    if not results.l2_read:
        return draft
    target = draft.gpu
    at, rate = min(results.l2_read.items())
    each = ", ".join(f"{share:.0%}: {rate_ / 1e12:.4g}" for share, rate_ in results.l2_read.items())
    how = f"measured in TB/s, reading a share of L2 again and again, past L1: {each} ({properties.software})"
    per_clk, usual = rate / target.clock_boost_hz, float(reference_gpu()["l2_share"])
    peak = per_clk / usual
    if not draft.unit:
        peak = max(per_clk * _ROOM, min(draft.numbers["l2_bytes_per_clk"][0], peak))
    elif abs(peak / target.l2_bytes_per_clk - 1) <= CLOSE:
        return draft
    taken = f"taken to be {usual:.1%} of the peak, as it is of {reference_gpu()['gpu']}, and ports hold no more"
    return draft.given(f"{how}; that of {at:.0%} {taken}", l2_bytes_per_clk=peak)


def _vector(draft: GpuDraft, properties: GpuProperties, results: Microbenchmarks) -> GpuDraft:
    """Rates per clock of units other than tensor cores: doubled where measurements are above the base's, halved on a
    capability of no base where they are below half."""
    target = draft.gpu
    clocks = target.sm_count * target.clock_boost_hz
    new = draft.borrowed
    measured = {
        "xu_ops_per_clk_sm": (results.exponentials, target.xu_ops_per_clk_sm),
        "fma_flops_per_clk_sm.fp32": (results.fma, target.fma_flops_per_clk_sm["fp32"]),
        "smem_bytes_per_clk_sm": (results.smem, target.smem_bytes_per_clk_sm),
    }
    for name, (rate, known) in measured.items():
        share = rate / clocks / known if rate else 1.0
        if share > 1 + CLOSE or (new and share < _LEAST):
            other = known * 2.0 ** math.ceil(math.log2(share))
            how = f"measured {share * known:.4g} a clock and SM at the boost clock; the base's {known:g}"
            draft = draft.put({name: other}, f"{how} ({properties.software})")
    return draft


def _launch(draft: GpuDraft, properties: GpuProperties, results: Microbenchmarks) -> GpuDraft:
    """The launch floor bounds the time of any kernel, so it stays as measured."""
    factor, note = campaign_ratio("sustained_launch_s")
    floor, least = results.launch_floor_s, results.smallest_gemm_s and results.smallest_gemm_s * factor
    if least:
        floor = min(floor or draft.gpu.launch_floor_s, least)
    draft = draft.given(
        f"measured: the shortest kernel, repeated in a CUDA graph, median of 5 replays ({properties.software})",
        launch_floor_s=floor,
    )
    return draft.given(
        "measured: median of 18 products of 1 or 16 by 32 to 128 by 32 to 128, one after another in a CUDA graph "
        f"({properties.software}){note}",
        sustained_launch_s=least,
    )


def _notes(target: Gpu, properties: GpuProperties, results: Microbenchmarks) -> Iterator[str]:
    """Measurements that are not part of a GPU file, for the report."""
    yield f"Measured on {properties.name} by `kernelcast collect --specs`; {properties.software}."
    clocks = target.sm_count * target.clock_boost_hz
    rates = (
        ("exponentials", results.exponentials, target.xu_ops_per_clk_sm, "/clk/SM"),
        ("fp32 FMA", results.fma, target.fma_flops_per_clk_sm["fp32"], " FLOP/clk/SM"),
        ("shared memory", results.smem, target.smem_bytes_per_clk_sm, " B/clk/SM"),
    )
    for name, rate, known, unit in rates:
        if rate:
            yield f"{name}: {rate / clocks:.4g}{unit} at the boost clock, {rate / clocks / known:.0%} of {known:g}"
    if results.gap_s is not None:
        yield f"a kernel takes {results.gap_s * 1e6:.2f} us beside its work, one after another in a CUDA graph"
    for dtype, long in results.longs.items():
        clock = f", {long.sm_mhz:.0f} MHz" if long.sm_mhz else ""
        limit = ", held down by the power limit" if long.by_power else ""
        yield f"{dtype} for seconds: {long.flops_per_s / 1e12:.4g} TFLOP/s, {long.power_w:.0f} W{clock}{limit}"
    for name, why in results.skipped.items():
        yield f"not measured: {name}: {why}"
