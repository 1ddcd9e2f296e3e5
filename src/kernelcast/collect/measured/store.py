"""Canonical measurements as Parquet files: every column of the schema, and what was left out, in the metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from kernelcast.collect.measured.measurements import Measurements, total
from kernelcast.collect.measured.query import EVERYTHING, Choice, Columns, connect, fetch, sampled
from kernelcast.collect.measured.schema import VERSION, columns_of
from kernelcast.errors import KernelcastError
from kernelcast.files import complete, encoded, quoted, text
from kernelcast.hardware import gpu

METADATA_KEY = "kernelcast_measurements"
AGAIN = "_again"  # ends the name of a table of calls that another table has already


def write_canonical(measurements: Measurements, path: Path) -> None:
    note = {"schema": VERSION, "source": measurements.source, "dropped": measurements.tables}
    write_parquet(measurements.columns, columns_of(), path, note)


def write_parquet(
    columns: Columns, kinds: Mapping[str, str], path: Path, note: Mapping[str, Any], by: str = ""
) -> None:
    """A complete file or none: every column of ``kinds`` (its SQL type; one that is not there is empty), rows in the
    order of the columns ``by``, and ``note`` in the metadata."""
    cells: dict[str, NDArray[Any]] = {}
    select = [
        f"CAST({encoded(columns[name], cells) if name in columns else 'NULL'} AS {kind}) AS {quoted(name)}"
        for name, kind in kinds.items()
    ]
    query = f"SELECT {', '.join(select)} FROM encoded{f' ORDER BY {by}' if by else ''}"
    with connect() as connection, complete(path) as part:
        connection.register("encoded", cells)
        connection.execute(
            f"COPY ({query}) TO {text(str(part))} (FORMAT parquet, COMPRESSION zstd, "
            f"KV_METADATA {{{METADATA_KEY}: {text(json.dumps(note))}}})"
        )


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


def read_canonical(path: Path, choice: Choice = EVERYTHING, more: Mapping[str, str] | None = None) -> Measurements:
    """A file of ``write_canonical`` or ``kernelcast collect``: its calls that were timed. Rules are not applied.

    ``more``: columns beside the canonical ones, with their SQL types.
    """
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
        kinds = {name: kind for name, kind in columns_of(ops).items() if name in present}
        counted = connection.execute(f"SELECT count(*) FROM ({query})").fetchone() or (0,)
        condition = sampled(choice, kinds, counted[0])
        query += f" AND {condition}" if condition else ""
        columns = fetch(connection, query, {**kinds, **(more or {})})
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
