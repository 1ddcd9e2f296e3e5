"""Files of requests: input and output tokens of each, and when they arrive."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.files import open_table
from kernelcast.serving.load.cells import numbers, shown, whole


@dataclass(frozen=True)
class Requests:
    """One entry a request, in the file's order."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cached: tuple[int, ...] = ()
    arrivals_s: tuple[float, ...] = ()


def read_requests(path: Path) -> Requests:
    """CSV, JSONL or Parquet with input_tokens and output_tokens; cached_tokens and arrival_s where given.

    Unlike ``load.read_trace`` it takes one static batch: times are optional and in any order, tokens may be cached.
    """
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
    found = numbers(cells)
    _refuse_first(path, ~whole(found, 0), cells, f"{name} must be a whole number of tokens")
    return tuple(found.astype(np.int64).tolist())


def _seconds(path: Path, name: str, cells: NDArray[Any]) -> tuple[float, ...]:
    found = numbers(cells)
    _refuse_first(path, ~((found >= 0) & (found < np.inf)), cells, f"{name} must be a number of seconds")
    return tuple(found.tolist())


def _refuse_first(path: Path, bad: NDArray[np.bool_], cells: NDArray[Any], rule: str) -> None:
    if bad.any():
        row = int(np.argmax(bad))
        raise KernelcastError(f"{path}: row {row + 1}: {rule}, not {shown(cells[row])}")
