"""What GPUs cost, as a sweep needs it: the one place that knows where prices are kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kernelcast.hardware import Gpu
from kernelcast.hardware.prices import read_prices


def hourly(gpus: Sequence[Gpu], path: Path | None = None, given: Sequence[str] = ()) -> dict[str, float]:
    """USD per GPU-hour by id, of those that have a price; a what-if or a file of one's own has that of its name."""
    known = read_prices(path, given)
    return {one.id: float(known[one.id].usd_per_hour) for one in gpus if one.id in known}
