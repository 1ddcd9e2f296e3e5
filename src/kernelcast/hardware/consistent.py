"""Whether the numbers of a GPU file can all be true of one chip."""

from __future__ import annotations

from collections.abc import Iterator

from kernelcast.errors import KernelcastError
from kernelcast.hardware.gpu import Gpu

TOLERANCE = 0.03  # vendors round clocks and peaks
_ORDERED = (
    ("clock_base_hz", "clock_boost_hz"),
    ("clock_tensor_hz", "clock_boost_hz"),
    ("clock_sustained_hz", "clock_boost_hz"),
    ("l2_bytes", "dram_bytes"),
    ("long_tensor_fraction", "sustained_tensor_fraction"),
    ("launch_floor_s", "sustained_launch_s"),
)


def check_consistent(chip: Gpu, where: str) -> None:
    """Refuse a file whose numbers contradict one another, with the numbers."""
    for told in contradictions(chip):
        raise KernelcastError(f"{where}: {told}")


def contradictions(chip: Gpu) -> Iterator[str]:
    """What cannot be true at once, a line each."""
    for less, more in _ORDERED:
        low, high = getattr(chip, less), getattr(chip, more)
        if low is not None and high is not None and low > high:
            yield f"{less} {low:g} is more than {more} {high:g}"
    if chip.l2_bytes_per_s < chip.dram_bytes_per_s:
        yield (
            f"l2_bytes_per_clk {chip.l2_bytes_per_clk:g} at {chip.clock_boost_hz / 1e6:g} MHz is "
            f"{chip.l2_bytes_per_s:.4g} B/s, less than dram_bytes_per_s {chip.dram_bytes_per_s:g}"
        )
    yield from _peaks(chip)
    for dtype in chip.sustained_tensor_fractions:
        if not chip.tensor_flops_per_clk_sm.get("fp8" if dtype == "fp8_block" else dtype):
            known = ", ".join(chip.tensor_flops_per_clk_sm) or "none"
            yield f"sustained_tensor_fractions.{dtype}, but tensor_flops_per_clk_sm has no {dtype} (it has {known})"


def derived_peak(chip: Gpu, key: str) -> float:
    """The peak of one device that ``published_flops_per_s[key]`` is about; 0 when it has no such units."""
    if key.endswith("_vector"):
        return chip.fma_flops_per_s(key.removesuffix("_vector"))
    return chip.tensor_flops_per_s(key) or chip.fma_flops_per_s(key)


def _peaks(chip: Gpu) -> Iterator[str]:
    for key, published in chip.published_flops_per_s.items():
        own, peak = published / chip.devices_per_package, derived_peak(chip, key)
        if abs(peak / own - 1) <= TOLERANCE:
            continue
        vector = key.endswith("_vector") or not chip.tensor_flops_per_s(key)
        table = "fma_flops_per_clk_sm" if vector else "tensor_flops_per_clk_sm"
        rate = getattr(chip, table).get(key.removesuffix("_vector"), 0.0)
        clock = chip.clock_boost_hz if vector else chip.tensor_clock_hz
        yield (
            f"published_flops_per_s.{key} is {own:.4g}, but {chip.sm_count} SMs x {clock / 1e6:g} MHz x {rate:g} "
            f"({table}) give {peak:.4g}"
        )
