"""Measured power as one Parquet: the columns of a table of calls, and what was drawn."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kernelcast.collect.measured.schema import VERSION, columns_of, is_word
from kernelcast.collect.measured.store import write_parquet
from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu

# seconds: of a call while it repeats, rests between included (busy_s of work, rest_s of none). power_w: by the energy
# counter; instant_w: mean of the driver's readings of the moment. reasons: NVML's bits of why the clock is not higher.
POWER = {
    "family": "VARCHAR", "warm": "BOOLEAN", "zeros": "BOOLEAN", "busy_s": "DOUBLE", "rest_s": "DOUBLE",
    "seconds": "DOUBLE", "joules": "DOUBLE", "power_w": "DOUBLE", "instant_w": "DOUBLE", "sm_mhz": "DOUBLE",
    "memory_mhz": "DOUBLE", "temperature_c": "DOUBLE", "reasons": "INTEGER", "at_s": "DOUBLE", "alone_s": "DOUBLE",
}  # fmt: skip


def write_power(records: Iterable[Mapping[str, Any]], path: Path, target: Gpu, facts: Mapping[str, Any]) -> int:
    """A complete file or none; the number of rows. Jobs that could not run are left out."""
    rows = [_row(record, target) for record in records if record["status"] == "ok"]
    if not rows:
        raise KernelcastError(f"nothing was measured: {path} is not written")
    kinds = columns_of({row["op"] for row in rows if row["op"]}) | POWER
    columns = {
        name: np.array([row.get(name) for row in rows], dtype=object if is_word(kind) else np.float64)
        for name, kind in kinds.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    note = {"schema": VERSION, "source": "kernelcast", "dropped": {}, "measured": dict(facts)}
    write_parquet(columns, kinds, path, note, by="family, op, dtype")
    return len(rows)


def _row(record: Mapping[str, Any], target: Gpu) -> dict[str, Any]:
    call = {name: json.dumps(value) if isinstance(value, list) else value for name, value in record["call"].items()}
    seconds = record.get("seconds_per_call")
    kept = {name: record.get(name) for name in POWER}
    return {
        **kept, "op": None, **call, "gpu": target.known_as, "kernel_source": record.get("kernel_source"),
        "source": "kernelcast", "rotation": record.get("rotation"), "input_rotation": record.get("rotation"),
        "seconds": seconds, "joules": seconds * record["power_w"] if seconds else None,
        "latency_us": seconds * 1e6 if seconds else None,
    }  # fmt: skip
