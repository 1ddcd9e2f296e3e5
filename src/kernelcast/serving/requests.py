"""Files of requests: input and output tokens of each, and when they arrive."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kernelcast.errors import KernelcastError
from kernelcast.files import open_table


@dataclass(frozen=True)
class Requests:
    """One entry a request, in the file's order."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cached: tuple[int, ...] = ()
    arrivals_s: tuple[float, ...] = ()


def read_requests(path: Path) -> Requests:
    """CSV, JSONL or Parquet with input_tokens and output_tokens; cached_tokens and arrival_s where given."""
    with open_table(path) as source:
        have = list(source.types)
        for name in ("input_tokens", "output_tokens"):
            if name not in have:
                raise KernelcastError(f"{path}: a file of requests needs a column '{name}'; this has {', '.join(have)}")
        optional = [name for name in ("cached_tokens", "arrival_s") if name in have]
        columns = source.columns("input_tokens", "output_tokens", *optional)
    inputs, outputs = (_whole(path, name, columns[name]) for name in ("input_tokens", "output_tokens"))
    if not inputs:
        raise KernelcastError(f"{path} has no request")
    cached = _whole(path, "cached_tokens", columns["cached_tokens"]) if "cached_tokens" in optional else ()
    arrivals = tuple(float(cell) for cell in columns["arrival_s"]) if "arrival_s" in optional else ()
    return Requests(inputs, outputs, cached, arrivals)


def _whole(path: Path, name: str, cells: np.ndarray[tuple[int], np.dtype[np.generic]]) -> tuple[int, ...]:
    found = []
    for row, cell in enumerate(cells, 1):
        try:
            value = float(cell)
        except (TypeError, ValueError):
            value = np.nan
        if not value >= 0 or value != int(value):
            raise KernelcastError(f"{path}: row {row}: {name} must be a whole number of tokens, not {cell!r}")
        found.append(int(value))
    return tuple(found)
