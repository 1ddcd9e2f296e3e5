"""Measured calls in memory: canonical columns, where they are from, and what was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.collect.measured.query import Columns
from kernelcast.collect.measured.schema import columns_of


@dataclass(frozen=True)
class Measurements:
    """Rows that passed the rules. Numbers are float64 (NaN: not given), words are objects (None: not given)."""

    columns: Columns
    source: str
    tables: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # dropped rows by table and rule

    def __len__(self) -> int:
        return len(self.columns["op"]) if self.columns else 0

    @property
    def dropped(self) -> dict[str, int]:
        """Rows left out, by rule, over all tables."""
        return total(self.tables.values())

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(sorted(set(self.columns["op"].tolist()))) if len(self) else ()

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(sorted(set(self.columns["gpu"].tolist()))) if len(self) else ()

    def select(self, keep: NDArray[Any]) -> Measurements:
        """The rows of a mask or of an array of row numbers."""
        return Measurements({name: c[keep] for name, c in self.columns.items()}, self.source, self.tables)


def empty(source: str, tables: Mapping[str, Mapping[str, int]]) -> Measurements:
    kinds = columns_of(())
    columns = {name: np.empty(0, dtype=object if kind == "VARCHAR" else np.float64) for name, kind in kinds.items()}
    return Measurements(columns, source, tables)


def merged(parts: Iterable[Measurements]) -> Measurements:
    """Tables one after the other; a column that a table lacks is not given there."""
    parts = list(parts)
    tables = {name: counts for part in parts for name, counts in part.tables.items()}
    sources = ", ".join(dict.fromkeys(part.source for part in parts))
    full = [part for part in parts if len(part)]
    if not full:
        return empty(sources, tables)
    kinds = {name: c.dtype for part in full for name, c in part.columns.items()}
    order = [name for name in columns_of() if name in kinds]
    columns = {
        name: np.concatenate([part.columns.get(name, _blank(len(part), kinds[name])) for part in full])
        for name in order
    }
    return Measurements(columns, sources, tables)


def _blank(count: int, kind: np.dtype[Any]) -> NDArray[Any]:
    return np.full(count, None, dtype=object) if kind.kind == "O" else np.full(count, np.nan)


def total(dropped: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Counts of rows left out, by rule, of several tables added up."""
    counts: Counter[str] = Counter()
    for part in dropped:
        counts.update(part)
    return dict(counts)
