"""Files of a source's own repository as one relation, with what their paths say as columns."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kernelcast.errors import KernelcastError
from kernelcast.files import quoted, text

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_LFS = b"version https://git-lfs"


@dataclass(frozen=True)
class Part:
    """The files of one table, each with its labels: columns that stand in the path."""

    table: str
    files: tuple[tuple[Path, Mapping[str, str]], ...]

    def __post_init__(self) -> None:
        for path, _ in self.files:
            with path.open("rb") as file:
                if file.read(len(_LFS)) == _LFS:
                    raise KernelcastError(f"{path} is a Git LFS pointer, not the data: run `git lfs pull` there first")


def parts(result: Iterable[tuple[str, Path, Mapping[str, str]]]) -> list[Part]:
    """(table, file, labels) triples by table."""
    tables: dict[str, list[tuple[Path, Mapping[str, str]]]] = defaultdict(list)
    for table, path, labels in result:
        tables[table].append((path, labels))
    return [Part(table, tuple(files)) for table, files in sorted(tables.items())]


def load(connection: DuckDBPyConnection, part: Part) -> None:
    """The rows of all files as the table ``scanned``: columns joined by name, and ``filename``."""
    scans = []
    for reader, endings in (("read_parquet", (".parquet",)), ("read_csv", (".csv", ".txt"))):
        names = [text(str(path)) for path, _ in part.files if path.suffix in endings]
        if names:
            options = "union_by_name = true, filename = true" + (", header = true" if reader == "read_csv" else "")
            scans.append(f"SELECT * FROM {reader}([{', '.join(names)}], {options})")
    connection.execute(f"CREATE OR REPLACE TEMP TABLE scanned AS {' UNION ALL BY NAME '.join(scans)}")


def columns(connection: DuckDBPyConnection) -> list[str]:
    """Names of the loaded columns, as the files spell them."""
    return sorted(row[0] for row in connection.execute("DESCRIBE scanned").fetchall())


def counts(connection: DuckDBPyConnection) -> dict[str, int]:
    """Loaded rows by file."""
    return dict(connection.execute("SELECT filename, count(*) FROM scanned GROUP BY 1").fetchall())


def relation(connection: DuckDBPyConnection, part: Part, renamed: Mapping[str, str], needed: Iterable[str] = ()) -> str:
    """SQL for the loaded rows with labels as columns; ``renamed``: new name -> SQL over the files' own columns.

    A label wins over a column of the same name. Files without a ``needed`` column are refused.
    """
    present = columns(connection)
    folded = {name.lower() for name in present}
    missing = [name for name in needed if name.lower() not in folded]
    if missing:
        raise KernelcastError(f"{part.files[0][0]}: no column {', '.join(missing)}; it has {', '.join(present)}")
    labels = list(part.files[0][1])
    new = {name.lower() for name in (*labels, *renamed)} | {"filename"}
    kept = f"r.* EXCLUDE ({', '.join(quoted(name) for name in present if name.lower() in new)})"
    values = ", ".join(
        f"({', '.join(text(value) for value in (str(path), *(members[n] for n in labels)))})"
        for path, members in part.files
    )
    select = [kept, *(f"f.{quoted(n)}" for n in labels), *(f"{sql} AS {quoted(new)}" for new, sql in renamed.items())]
    names = ", ".join(map(quoted, ("filename", *labels)))
    return (
        f"SELECT {', '.join(select)} FROM scanned AS r JOIN (VALUES {values}) AS f({names}) ON r.filename = f.filename"
    )


def medians(connection: DuckDBPyConnection) -> list[str]:
    """What the loaded rows have median times of, in Vidur's way to name columns; those are in ms."""
    return [name.split(".")[1] for name in columns(connection) if re.fullmatch(r"time_stats\..*\.median", name)]


def collectives(connection: DuckDBPyConnection, part: Part, size: str, latency: str) -> str:
    """Loaded collectives of Vidur's profiler, with world, and size and microseconds under these names."""
    cells = ", ".join(f'r."time_stats.{op}.median"' for op in medians(connection)) or "NULL"
    renamed = {size: "r.size", "world": "r.num_workers", latency: f"coalesce({cells}, NULL) * 1000"}
    return relation(connection, part, renamed, needed=("size", "num_workers", "devices_per_node"))
