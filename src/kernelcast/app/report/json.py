"""Results as strict JSON: plain values, null where a number has no value."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

from kernelcast.energy.power import Energy
from kernelcast.forecast.end_to_end import WholeSupport
from kernelcast.results import Interval
from kernelcast.schedule import Share


def to_json(value: Any) -> str:
    """``value`` as strict, indented JSON."""
    return json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)


def print_json(value: Any, **options: Any) -> None:
    """``value`` as JSON in one line."""
    print(json.dumps(value, **options))


def attributes(of: Any, *names: str, **paths: str) -> dict[str, Any]:
    """Fields that go by the names of attributes; ``paths``: by other names, as in ``model="deployment.model.name"``."""
    paths = {name: name for name in names} | paths
    return {name: attrgetter(path)(of) for name, path in paths.items()}


def support_fields(supports: WholeSupport | None) -> dict[str, Any]:
    """The level of a whole answer, and of each aspect of it."""
    if supports is None:
        return {"support": None, "support_by": None}
    return {"support": supports.level, "support_by": supports.to_dict()}


def plain(value: Any) -> Any:
    """Mappings, sequences and NumPy scalars as JSON's own types; NaN and infinity as None."""
    if value is None or type(value) in (str, int, bool):  # most of what there is
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def energy_fields(drawn: Energy | None) -> dict[str, Any]:
    """Joules and watts of a call or of a run on one GPU; null where nobody knows what the GPU draws."""
    return {
        **interval_fields("energy_j", drawn.joules if drawn else None),
        **interval_fields("power_w", drawn.watts if drawn else None),
        "sustained_s": drawn.joules.value / drawn.power_w if drawn else None,
        "clock_share": drawn.clock if drawn else None,
        "energy_support": drawn.support if drawn else None,
    }


def interval_fields(name: str, interval: Interval | None) -> dict[str, float | None]:
    """A value and its interval: NAME, NAME_low, NAME_high."""
    values = (interval.value, interval.low, interval.high) if interval else (None, None, None)
    pairs = zip((name, f"{name}_low", f"{name}_high"), values, strict=True)
    return {key: None if value is None else float(value) for key, value in pairs}


def run_energy_fields(energy: Interval | None, parts: Iterable[Energy | None], seconds: float, gpus: int,
                      tokens: float) -> dict[str, Any]:  # fmt: skip
    """Joules of a whole run on all its GPUs, the mean watts of one, and joules a million tokens."""
    known = [part for part in parts if part is not None]
    watts = energy.value / (seconds * gpus) if energy else None
    each = energy.value / tokens * 1e6 if energy and tokens else None
    return {
        **interval_fields("energy_j", energy), "power_w": None if watts is None else float(watts),
        "joules_per_million_tokens": None if each is None else float(each),
        "energy_support": known[0].support if known else None,
    }  # fmt: skip


def breakdown_fields(shares: Iterable[Share]) -> list[dict[str, Any]]:
    """Where the time goes, by phase and part."""
    return [
        {"phase": s.phase, "part": s.part, "time_s": float(s.time_s), "kernels": round(s.kernels),
         "bound_by": s.bound_by, "support": s.support}
        for s in shares
    ]  # fmt: skip
