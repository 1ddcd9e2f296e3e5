"""Small sweeps that tests share, and their rows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernelcast.forecast.conditions import Conditions
from kernelcast.search.sweep.file import sweep_of
from kernelcast.search.sweep.rows import SweepJob

# 2 places that cannot be (tp 3), some batches that do not fit; decoded in two steps, to be quick
SMALL: dict[str, Any] = {
    "model": ["llama-3.1-8b"],
    "gpu": ["h100_sxm", "l40s"],
    "tp": [1, 3],
    "batch": {"from": 1, "to": 4096, "factor": 8},
    "input_len": {"from": 64, "to": 1024, "steps": 4, "scale": "log"},
    "output_len": [1, 3],
    "where": ["batch * input_len <= 600000"],
}


def work(asked: Mapping[str, Any] = SMALL, **changes: Any) -> SweepJob:
    return SweepJob(sweep_of({**asked, **changes}), Conditions(predictor="generic"), {"h100_sxm": 4.0})


def digests(folder: Path) -> dict[str, str]:
    """Of every file of rows."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("[!.]*.parquet"))}
