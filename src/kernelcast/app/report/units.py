"""Numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

_DECIMAL = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_BINARY = ((2**40, "Ti"), (2**30, "Gi"), (2**20, "Mi"), (2**10, "Ki"), (1, ""))
_JOULES = ((1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ"), (1.0, "J"), (1e-3, "mJ"), (1e-6, "µJ"))
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def digits(value: float, most: int = 4) -> str:
    """About four digits, never an exponent."""
    if value == 0:
        return "0"
    decimals = max(0, most - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 6)}f}"


def short(value: float) -> str:
    """As ``digits``, without zeros at the end: for specifications."""
    text = digits(value)
    return text.rstrip("0").rstrip(".") if "." in text else text


def time_text(seconds: float) -> str:
    unit, word = next(((u, w) for u, w in _TIMES if seconds >= u), _TIMES[-1])
    return f"{digits(seconds / unit)} {word}"


def micros(seconds: float) -> str:
    return digits(seconds * 1e6)


def rate_text(value: float, unit: str) -> str:
    """'3.35 TB/s'"""
    scale, prefix = next(((s, p) for s, p in _DECIMAL if abs(value) >= s), _DECIMAL[-1])
    return f"{short(value / scale)} {prefix}{unit}"


def joules_text(value: float) -> str:
    """'3.70 kJ', '0.55 J', '820 µJ'."""
    unit, word = next(((u, w) for u, w in _JOULES if value >= u), _JOULES[-1])
    return f"{digits(value / unit, 3)} {word}"


def bytes_text(value: float) -> str:
    return rate_text(value, "B")


def binary_bytes_text(value: float) -> str:
    """'50 MiB': for capacities, which are powers of two."""
    scale, prefix = next(((s, p) for s, p in _BINARY if value >= s), _BINARY[-1])
    return f"{short(value / scale)} {prefix}B"


def percent(share: float) -> str:
    return f"{share:.1%}" if 0 < share < 0.995 else f"{share:.0%}"


def bar(share: float, width: int = 20) -> str:
    """A bar of eighths of a block."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")


def field_text(name: str, value: Any) -> str:
    """A GPU's field with the unit that its name says."""
    if value is None:
        return "—"
    if isinstance(value, str | Sequence):
        return value if isinstance(value, str) else ", ".join(map(str, value)) or "—"
    if name.endswith(("_per_clk_sm", "_per_clk")):
        return f"{short(value)} {name.split('_per_clk')[0].split('_')[-1]}/clk"
    for ending, unit in (("flops_per_s", "FLOP/s"), ("bytes_per_s", "B/s"), ("_per_s", "/s"), ("_hz", "Hz")):
        if name.split(".")[0].endswith(ending):
            return rate_text(value, unit)
    if "bytes" in name:
        return binary_bytes_text(value)
    if name.endswith(("_fraction", "_fractions")):
        return percent(value)
    for ending, unit in (("_w", " W"), ("_usd", " USD")):
        if name.endswith(ending):
            return f"{short(value)}{unit}"
    return time_text(value) if name.endswith("_s") else f"{value:,}"


def value_text(value: Any) -> str:
    """A parameter's value; a long list is cut."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        shown = ", ".join(map(str, value[:6]))
        return f"[{shown}]" if len(value) <= 6 else f"[{shown}, … {len(value) - 6} more]"
    return f"{value:g}" if isinstance(value, float) else str(value)
