"""What-ifs in words: ``dram_bytes_per_s=7e12`` sets a number of a GPU, ``dram_bytes_per_s*1.5`` multiplies it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kernelcast.errors import KernelcastError, unknown
from kernelcast.hardware.gpu import INTEGERS, NUMBERS, RATE_TABLES, Gpu

_CHANGE = re.compile(r"\s*([a-z0-9_.]+)\s*([=*])\s*([0-9.eE+-]+)\s*", re.IGNORECASE)


def changed(chip: Gpu, changes: Iterable[str], flag: str = "--set") -> Gpu:
    """A what-if of ``chip``. A table with one number a dtype may be multiplied as a whole
    (``tensor_flops_per_clk_sm*2``); whole numbers are rounded where a factor leaves none."""
    numbers: dict[str, float] = {}
    for text in changes:
        name, sign, value = _parsed(text, flag)
        numbers |= {name: value} if sign == "=" else _multiplied(chip, name, value)
    return chip.replace(**numbers) if numbers else chip


def _parsed(text: str, flag: str) -> tuple[str, str, float]:
    found = _CHANGE.fullmatch(text)
    try:
        value = float(found[3]) if found else 0.0
    except ValueError:
        found = None
    if not found:
        raise KernelcastError(
            f"{flag} takes FIELD=NUMBER or FIELD*FACTOR, such as dram_bytes_per_s=7e12 or dram_bytes_per_s*1.5, "
            f"not {text!r}"
        )
    return found[1], found[2], value


def _multiplied(chip: Gpu, name: str, factor: float) -> dict[str, float]:
    if name in RATE_TABLES:
        return {f"{name}.{dtype}": rate * factor for dtype, rate in getattr(chip, name).items()}
    table = name.partition(".")[0]
    if name not in NUMBERS and table not in RATE_TABLES:
        raise unknown("GPU field", name, [*NUMBERS, *(f"{t}.<dtype>" for t in RATE_TABLES)])
    before = chip.number(name)
    if before is None:
        raise KernelcastError(f"{chip.id} has no {name} to multiply: set it with {name}=NUMBER")
    after = before * factor
    return {name: round(after) if name in INTEGERS else after}
