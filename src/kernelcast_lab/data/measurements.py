"""Measured calls in canonical columns: in memory, and as Parquet files that say what was left out of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.collect.schema import VERSION, columns_of, connect, is_text, note_of, write_parquet
from kernelcast.errors import KernelcastError
from kernelcast.files import quoted, text
from kernelcast.hardware import gpu

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


Columns = dict[str, NDArray[Any]]
AGAIN = "_again"  # ends the name of a table of calls that another table has already


@dataclass(frozen=True)
class Measurements:
    """Rows that passed the rules. Numbers are float64 (NaN: not given), text is objects (None: not given)."""

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
    types = columns_of(())
    columns = {
        name: np.empty(0, dtype=object if sql_type == "VARCHAR" else np.float64) for name, sql_type in types.items()
    }
    return Measurements(columns, source, tables)


def merged(parts: Iterable[Measurements]) -> Measurements:
    """Tables one after the other; a column that a table lacks is not given there."""
    parts = list(parts)
    tables = {name: counts for part in parts for name, counts in part.tables.items()}
    sources = ", ".join(dict.fromkeys(part.source for part in parts))
    full = [part for part in parts if len(part)]
    if not full:
        return empty(sources, tables)
    types = {name: c.dtype for part in full for name, c in part.columns.items()}
    order = [name for name in columns_of() if name in types]
    columns = {
        name: np.concatenate([part.columns.get(name, _blank(len(part), types[name])) for part in full])
        for name in order
    }
    return Measurements(columns, sources, tables)


def _blank(count: int, sql_type: np.dtype[Any]) -> NDArray[Any]:
    return np.full(count, None, dtype=object) if sql_type.kind == "O" else np.full(count, np.nan)


def filled(column: NDArray[Any]) -> bool:
    """Whether any cell of a column is given."""
    if column.dtype == object:
        return any(cell is not None for cell in column)
    return bool((~np.isnan(column)).any())


def total(dropped: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Counts of rows left out, by rule, of several tables added up."""
    counts: Counter[str] = Counter()
    for part in dropped:
        counts.update(part)
    return dict(counts)


# ---- rows of a table, through DuckDB


@dataclass(frozen=True)
class Choice:
    """Which rows of a table are wanted.

    ``where``: SQL over canonical columns. ``sample``: a share below 1, or about how many rows; the same calls for
    the same ``seed``, whatever the order of the file.
    """

    ops: Collection[str] | None = None
    gpus: Collection[str] | None = None
    where: str | None = None
    sample: float | None = None
    seed: int = 0


EVERYTHING = Choice()


def sampled(choice: Choice, types: dict[str, str], count: int) -> str | None:
    """SQL condition that keeps a share of the calls, all repeats of one or none; None: keep all.

    Chosen by a hash of what identifies a call. Cells that are not given do not count, so that a new column changes
    nothing; MD5 is the same in every version of DuckDB.
    """
    share = choice.sample
    if share is None:
        return None
    if not share > 0:
        raise KernelcastError(f"sample must be a share above 0 or a number of rows, not {share!r}")
    share = share / max(count, 1) if share > 1 else share
    if share >= 1:
        return None
    cells = ", ".join(
        f"{text(name + '=')} || CAST({quoted(name) if is_text(sql) else f'CAST({quoted(name)} AS DOUBLE)'} AS VARCHAR)"
        for name, sql in sorted(types.items())
        if name != "latency_us"
    )
    return f"md5_number_lower(concat_ws('|', {text(str(choice.seed))}, {cells})) < {int(share * 2**64)}::UBIGINT"


def fetch(connection: DuckDBPyConnection, query: str, types: dict[str, str], order: Collection[str] = ()) -> Columns:
    """Columns of a query in memory. Text travels as codes, so that equal cells are the same object."""
    connection.execute(f"CREATE OR REPLACE TEMP VIEW wanted AS {query}")
    vocabularies: dict[str, list[str]] = {}
    select = []
    for name, sql_type in types.items():
        cell = quoted(name)
        if not is_text(sql_type):
            select.append(f"CAST({cell} AS DOUBLE) AS {cell}")
            continue
        rows = connection.execute(f"SELECT DISTINCT {cell} FROM wanted WHERE {cell} IS NOT NULL ORDER BY 1").fetchall()
        vocabularies[name] = [row[0] for row in rows]
        enum = f"ENUM({', '.join(map(text, vocabularies[name] or ['']))})"
        select.append(f"coalesce(CAST(enum_code(CAST({cell} AS {enum})) AS INTEGER), -1) AS {cell}")
    ordered_by = f" ORDER BY {', '.join(f'wanted.{key}' for key in order)}" if order else ""
    result = connection.execute(f"SELECT {', '.join(select)} FROM wanted{ordered_by}").fetchnumpy()
    return {name: _column(result[name], vocabularies.get(name)) for name in types}


def _column(values: Any, vocabulary: list[str] | None) -> NDArray[Any]:
    if vocabulary is not None:
        lookup = np.array([*vocabulary, None], dtype=object)  # code -1 is the last
        return lookup[np.asarray(values, dtype=np.int64)]
    return np.asarray(np.ma.filled(values, np.nan), dtype=np.float64)


# ---- Parquet files


def write_canonical(measurements: Measurements, path: Path) -> None:
    note = {"schema": VERSION, "source": measurements.source, "dropped": measurements.tables}
    write_parquet(measurements.columns, columns_of(), path, note)


def is_canonical(path: Path) -> bool:
    return note_of(path) is not None


def read_canonical(path: Path, choice: Choice = EVERYTHING, more: Mapping[str, str] | None = None) -> Measurements:
    """A file of ``write_canonical`` or ``kernelcast collect``: its calls that were timed. Rules are not applied.

    ``more``: columns beside the canonical ones, with their SQL types.
    """
    note = note_of(path)
    if note is None:
        raise KernelcastError(f"{path} has no canonical measurements; `kernelcast data import` makes such files")
    conditions = ["latency_us IS NOT NULL", *([f"({choice.where})"] if choice.where else [])]
    gpu_ids = None if choice.gpus is None else [gpu(name).id for name in choice.gpus]
    for column, allowed in (("op", choice.ops), ("gpu", gpu_ids)):
        if allowed is not None:
            conditions.append(f"{column} IN ({', '.join(map(text, allowed)) or 'NULL'})")
    with connect() as connection:
        source = f"read_parquet({text(str(path))})"
        present = {row[0] for row in connection.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()}
        query = f"SELECT * FROM {source} WHERE {' AND '.join(conditions)}"
        ops = [row[0] for row in connection.execute(f"SELECT DISTINCT op FROM ({query})").fetchall()]
        types = {name: sql_type for name, sql_type in columns_of(ops).items() if name in present}
        counted = connection.execute(f"SELECT count(*) FROM ({query})").fetchone() or (0,)
        condition = sampled(choice, types, counted[0])
        query += f" AND {condition}" if condition else ""
        columns = fetch(connection, query, {**types, **(more or {})})
    return Measurements(columns, note["source"], note["dropped"])


def describe(path: Path) -> dict[str, Any]:
    """What a Parquet file holds: rows; of a canonical one also its ops, GPUs, campaigns and what was left out."""
    note = note_of(path)
    with connect() as connection:
        source = f"read_parquet({text(str(path))})"
        counted = connection.execute(f"SELECT count(*) FROM {source}").fetchone() or (0,)
        result: dict[str, Any] = {"file": str(path), "rows": int(counted[0]), "canonical": note is not None}
        if note is None:
            return result
        for key, column in (("ops", "op"), ("gpus", "gpu"), ("campaigns", "campaign")):
            query = f"SELECT {column}, count(*) FROM {source} GROUP BY 1 ORDER BY 1"
            result[key] = dict(connection.execute(query).fetchall())
    return {**result, "source": note["source"], "dropped": total(note["dropped"].values())}
