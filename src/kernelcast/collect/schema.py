"""The one schema of a measurement table: what was called, where it ran, and how long it took.

The columns of parameters are made from the registered kernel families, so a new kernel file needs no edit here.
In a file a number that was not given is NULL; in memory it is NaN, and a text that was not given is None.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.files import complete, encoded, quoted, text
from kernelcast.ops import REGISTRY, kernel_class, parameters_of

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

SOURCE = "kernelcast"  # of what this project measures
VERSION = 1  # of the schema, kept in each file
METADATA_KEY = "kernelcast_measurements"  # of a Parquet file
_THREADS = 2
SQL_TYPES = {"size": "BIGINT", "real": "DOUBLE", "flag": "BOOLEAN", "choice": "VARCHAR", "lengths": "VARCHAR"}

# Beside the parameters of the ops, dtype and stack among them.
# gpu: id in the catalogue. version: of the stack. kernel_source: the kernel as the source names it.
# source: the publisher. campaign: source/gpu/stack/version, one measurement run of one stack on one GPU.
# split: train or test, as the source has it. rotation: how many sets of weights passed between two uses
# of one (1: the same call again and again); not given: weights came from DRAM. input_rotation: the same of activations;
# not given: the kernel before had just made them, or the same were used again.
IDENTITY = {
    "gpu": "VARCHAR",
    "version": "VARCHAR",
    "kernel_source": "VARCHAR",
    "source": "VARCHAR",
    "campaign": "VARCHAR",
    "split": "VARCHAR",
}
NUMBERS = {"rotation": "DOUBLE", "input_rotation": "DOUBLE", "latency_us": "DOUBLE"}


def parameter_types(ops: Iterable[str] | None = None) -> dict[str, str]:
    """SQL type of each parameter of these ops (default: all), dtype and stack first."""
    types = {"dtype": "VARCHAR", "stack": "VARCHAR"}
    for op in sorted(REGISTRY) if ops is None else sorted(set(ops)):
        for name, spec in parameters_of(kernel_class(op)).items():
            types[name] = _joined(name, types.get(name), SQL_TYPES[spec.type])
    return types


def _joined(name: str, known: str | None, new: str) -> str:
    """One type for a name that several ops use."""
    if known in (None, new):
        return new
    if {known, new} <= {"BIGINT", "DOUBLE"}:
        return "DOUBLE"
    raise KernelcastError(f"parameter {name} is {known} in one op and {new} in another: rename one of them")


def columns_of(ops: Iterable[str] | None = None) -> dict[str, str]:
    """Every column of a table of these ops and its SQL type, in order."""
    return {"op": "VARCHAR", **parameter_types(ops), **IDENTITY, **NUMBERS}


def is_text(sql_type: str) -> bool:
    return sql_type == "VARCHAR"


def connect() -> DuckDBPyConnection:
    import duckdb

    connection = duckdb.connect()
    connection.execute(f"SET threads = {_THREADS}")
    return connection


def write_parquet(
    columns: Mapping[str, NDArray[Any]], types: Mapping[str, str], path: Path, note: Mapping[str, Any], by: str = ""
) -> None:
    """Write a file atomically: every column of ``types`` (its SQL type; one that is not there is empty), rows in the
    order of the columns ``by``, and ``note`` in the metadata."""
    cells: dict[str, NDArray[Any]] = {}
    select = [
        f"CAST({encoded(columns[name], cells) if name in columns else 'NULL'} AS {sql}) AS {quoted(name)}"
        for name, sql in types.items()
    ]
    query = f"SELECT {', '.join(select)} FROM encoded{f' ORDER BY {by}' if by else ''}"
    with connect() as connection, complete(path) as part:
        connection.register("encoded", cells)
        connection.execute(
            f"COPY ({query}) TO {text(str(part))} (FORMAT parquet, COMPRESSION zstd, "
            f"KV_METADATA {{{METADATA_KEY}: {text(json.dumps(note))}}})"
        )


def write_rows(
    rows: Sequence[Mapping[str, Any]], types: Mapping[str, str], path: Path, facts: Mapping[str, Any], by: str
) -> int:
    """Write rows that this project measured as such a file; returns their number."""
    if not rows:
        raise KernelcastError(f"nothing was measured: {path} is not written")
    columns = {
        name: np.array([row.get(name) for row in rows], dtype=object if is_text(sql) else np.float64)
        for name, sql in types.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    note = {"schema": VERSION, "source": SOURCE, "dropped": {}, "measured": dict(facts)}
    write_parquet(columns, types, path, note, by)
    return len(rows)


def note_of(path: Path) -> dict[str, Any] | None:
    """The metadata of a canonical file; None for any other file."""
    with connect() as connection:
        import duckdb

        try:
            row = connection.execute(
                f"SELECT decode(value) FROM parquet_kv_metadata({text(str(path))}) "
                f"WHERE decode(key) = {text(METADATA_KEY)}"
            ).fetchone()
        except duckdb.Error as error:
            raise KernelcastError(f"{path}: not readable as Parquet: {str(error).splitlines()[0]}") from None
    return json.loads(row[0]) if row else None
