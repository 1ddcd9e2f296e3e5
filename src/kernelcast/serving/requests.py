"""Files of requests: input and output tokens of each, and when they arrive."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
        columns = source.named("input_tokens", "output_tokens", *optional)
    inputs, outputs = (_whole(path, name, columns[name]) for name in ("input_tokens", "output_tokens"))
    if not inputs:
        raise KernelcastError(f"{path} has no request")
    cached = _whole(path, "cached_tokens", columns["cached_tokens"]) if "cached_tokens" in optional else ()
    arrivals = _seconds(path, "arrival_s", columns["arrival_s"]) if "arrival_s" in optional else ()
    return Requests(inputs, outputs, cached, arrivals)


def _whole(path: Path, name: str, cells: NDArray[Any]) -> tuple[int, ...]:
    found = []
    for row, cell in enumerate(cells, 1):
        value = _number(cell)
        if not 0 <= value < np.inf or value != int(value):
            raise KernelcastError(f"{path}: row {row}: {name} must be a whole number of tokens, not {_shown(cell)}")
        found.append(int(value))
    return tuple(found)


def _seconds(path: Path, name: str, cells: NDArray[Any]) -> tuple[float, ...]:
    found = []
    for row, cell in enumerate(cells, 1):
        value = _number(cell)
        if not 0 <= value < np.inf:
            raise KernelcastError(f"{path}: row {row}: {name} must be a number of seconds, not {_shown(cell)}")
        found.append(value)
    return tuple(found)


def _number(cell: Any) -> float:
    """NaN where there is none."""
    if cell is np.ma.masked:  # which float() warns about
        return np.nan
    try:
        return float(cell)
    except (TypeError, ValueError):
        return np.nan


def _shown(cell: Any) -> str:
    """As the file has it."""
    if cell is None or cell is np.ma.masked or cell != cell:
        return "an empty cell"
    return repr(cell.item() if isinstance(cell, np.generic) else cell)
