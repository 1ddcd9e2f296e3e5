"""How a table of a source becomes calls: SQL expressions over the source's columns, shared by readers and importers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from kernelcast.files import text
from kernelcast.hardware import gpu, gpu_ids

Rules = tuple[tuple[str, str], ...]
"""(rule, SQL condition) pairs, the first that holds counts."""


@dataclass(frozen=True)
class OpMap:
    """The rows of a table that are calls of one op. ``where`` and ``parameters`` are SQL over the source's columns."""

    op: str
    parameters: Mapping[str, str]
    dtype: str  # SQL; NULL drops the row by the rule unknown_dtype
    where: str = "true"
    stack: str | None = None  # SQL; default: the table's
    latency_us: str | None = None  # SQL; default: the table's


@dataclass(frozen=True)
class TableMap:
    """One table of a source. ``_gpu`` in an expression is the catalogue id.

    ``optional``: columns that some files lack, and the SQL that stands in.
    """

    source: str
    ops: tuple[OpMap, ...] = ()
    gpu: str = "gpu"
    stack: str = "NULL"
    version: str = "NULL"
    kernel_source: str = "NULL"
    latency_us: str = "latency_us"
    split: str = "NULL"
    rotation: str = "NULL"
    drops: Rules = ()
    optional: Mapping[str, str] = field(default_factory=dict)


def case(column: str, names: Mapping[str, str], otherwise: str = "NULL") -> str:
    """SQL that translates names; others become ``otherwise``."""
    arms = " ".join(f"WHEN {text(value)} THEN {text(new)}" for value, new in names.items())
    return f"(CASE {column} {arms} ELSE {otherwise} END)"


@functools.cache
def l2_bytes() -> str:
    """SQL: the size of the GPU's L2."""
    return f"CAST({case('_gpu', {name: str(gpu(name).l2_bytes) for name in gpu_ids()})} AS DOUBLE)"


def hopper() -> str:
    """SQL condition: the GPU is of compute capability 9."""
    return _of_generation("9.")


def blackwell() -> str:
    """SQL condition: the GPU is of compute capability 10."""
    return _of_generation("10.")


@functools.cache
def _of_generation(starts: str) -> str:
    ids = [name for name in gpu_ids() if gpu(name).compute_capability.startswith(starts)]
    return f"_gpu IN ({', '.join(map(text, ids))})"
