"""Canonical measurements as Parquet files: every column of the schema, and what was left out, in the metadata."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.hardware import gpu
from kernelcast.measured.measurements import Measurements, total
from kernelcast.measured.query import EVERYTHING, Choice, connect, fetch, quoted, sampled, text
from kernelcast.measured.schema import VERSION, columns_of

METADATA_KEY = "kernelcast_measurements"
AGAIN = "_again"  # ends the name of a table of calls that another table has already


def write_canonical(measurements: Measurements, path: Path) -> None:
    """Write a complete file or none: to a temporary name beside it, then moved."""
    part = path.with_name(f".{path.stem}.{os.getpid()}.part")
    note = json.dumps({"schema": VERSION, "source": measurements.source, "dropped": measurements.tables})
    with connect() as connection:
        encoded: dict[str, NDArray[Any]] = {}
        select = [
            f"CAST({_cell(name, measurements, encoded)} AS {kind}) AS {quoted(name)}"
            for name, kind in columns_of().items()
        ]
        connection.register("rows", encoded)
        try:
            connection.execute(
                f"COPY (SELECT {', '.join(select)} FROM rows) TO {text(str(part))} "
                f"(FORMAT parquet, COMPRESSION zstd, KV_METADATA {{{METADATA_KEY}: {text(note)}}})"
            )
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def _cell(name: str, measurements: Measurements, into: dict[str, NDArray[Any]]) -> str:
    """Put a column where DuckDB can scan it, words as codes, and say how to read it."""
    column = measurements.columns.get(name)
    if column is None:
        return "NULL"
    key = f"c{len(into)}"
    if column.dtype != object:
        into[key] = np.asarray(column, dtype=np.float64)
        return f"CASE WHEN isnan({key}) THEN NULL ELSE {key} END"
    codes: dict[Any, int] = {None: 0}
    into[key] = np.fromiter((codes.setdefault(v, len(codes)) for v in column), dtype=np.int32, count=len(column))
    words = ", ".join("NULL" if word is None else text(str(word)) for word in codes)
    return f"list_extract([{words}], {key} + 1)"


def note_of(path: Path) -> dict[str, Any] | None:
    """What a canonical file says of itself; None for any other file."""
    with connect() as connection:
        import duckdb

        try:
            found = connection.execute(
                f"SELECT decode(value) FROM parquet_kv_metadata({text(str(path))}) "
                f"WHERE decode(key) = {text(METADATA_KEY)}"
            ).fetchone()
        except duckdb.Error as error:
            raise KernelcastError(f"{path}: not readable as Parquet: {str(error).splitlines()[0]}") from None
    return json.loads(found[0]) if found else None


def is_canonical(path: Path) -> bool:
    return note_of(path) is not None


def read_canonical(path: Path, choice: Choice = EVERYTHING) -> Measurements:
    """A file of ``write_canonical`` or ``kernelcast collect``: its calls that were timed. Rules are not applied."""
    note = note_of(path)
    if note is None:
        raise KernelcastError(f"{path} has no canonical measurements; `kernelcast data import` makes such files")
    conditions = ["latency_us IS NOT NULL", *([f"({choice.where})"] if choice.where else [])]
    chips = None if choice.gpus is None else [gpu(word).id for word in choice.gpus]
    for column, words in (("op", choice.ops), ("gpu", chips)):
        if words is not None:
            conditions.append(f"{column} IN ({', '.join(map(text, words)) or 'NULL'})")
    with connect() as connection:
        source = f"read_parquet({text(str(path))})"
        present = {row[0] for row in connection.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()}
        query = f"SELECT * FROM {source} WHERE {' AND '.join(conditions)}"
        ops = [row[0] for row in connection.execute(f"SELECT DISTINCT op FROM ({query})").fetchall()]
        kinds = {n: k for n, k in columns_of(ops).items() if n in present}
        counted = connection.execute(f"SELECT count(*) FROM ({query})").fetchone() or (0,)
        condition = sampled(choice, kinds, counted[0])
        query += f" AND {condition}" if condition else ""
        columns = fetch(connection, query, kinds)
    return Measurements(columns, note["source"], note["dropped"])


def describe(path: Path) -> dict[str, Any]:
    """What a Parquet file holds: rows; of a canonical one also its ops, GPUs, campaigns and what was left out."""
    note = note_of(path)
    with connect() as connection:
        source = f"read_parquet({text(str(path))})"
        counted = connection.execute(f"SELECT count(*) FROM {source}").fetchone() or (0,)
        found: dict[str, Any] = {"file": str(path), "rows": int(counted[0]), "canonical": note is not None}
        if note is None:
            return found
        for key, column in (("ops", "op"), ("gpus", "gpu"), ("campaigns", "campaign")):
            query = f"SELECT {column}, count(*) FROM {source} GROUP BY 1 ORDER BY 1"
            found[key] = dict(connection.execute(query).fetchall())
    return {**found, "source": note["source"], "dropped": total(note["dropped"].values())}
