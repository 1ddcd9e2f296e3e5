"""Import a user's own checkout of a public repository: canonical Parquet files and a summary, all or nothing.

``import_tables`` does the same for a folder of cleaned tables, so that later reads need no rules again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kernelcast.errors import KernelcastError, unknown
from kernelcast.measured.measurements import Measurements, empty
from kernelcast.measured.query import connect
from kernelcast.measured.store import write_canonical
from kernelcast_lab.data import aiconfigurator, aiconfigurator_files, neusight, pipeweave, shared, vidur
from kernelcast_lab.data.build import build
from kernelcast_lab.data.checkout import Part, counts, load
from kernelcast_lab.data.mapping import TableMap

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

SUMMARY = "summary.json"
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Importer:
    """Where the files of a source lie, and what its tables mean."""

    looks_for: str
    find: Callable[[Path], list[Part]]
    rows: Callable[[DuckDBPyConnection, Part], str]
    tables: Callable[[], dict[str, TableMap]]


def _importer(files: ModuleType, source: ModuleType) -> Importer:
    return Importer(files.LOOKS_FOR, files.find, files.rows, source.tables)


IMPORTERS = {
    "aiconfigurator": _importer(aiconfigurator_files, aiconfigurator),
    "neusight": _importer(neusight, neusight),
    "pipeweave": _importer(pipeweave, pipeweave),
    "vidur": _importer(vidur, vidur),
}


def import_checkout(
    source: str, path: Path, target: Path, *, replace: bool = False, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """Write ``target/source/TABLE.parquet`` for each table with a kernel family, and summary.json; return it.

    Everything is built beside the target and moved there when it is complete.
    """
    if source not in IMPORTERS:
        raise unknown("source", source, IMPORTERS)
    importer = IMPORTERS[source]
    if not path.is_dir():
        raise KernelcastError(f"no folder {path}")
    found = importer.find(path)
    if not found:
        raise KernelcastError(f"{path} is no checkout of {source}: no {importer.looks_for} in it")
    place = target / source
    if place.exists() and not replace:
        raise KernelcastError(f"{place} exists already; give another folder, or --replace")
    tables: list[dict[str, Any]] = []
    with _complete_or_nothing(place) as folder:
        for number, part in enumerate(found, start=1):
            progress(f"{source}: table {number} of {len(found)}, {part.table} ({len(part.files)} files)")
            tables.append(_written(_measurements(importer, source, part), f"{source}/{part.table}", folder))
        summary = {"source": source, "path": str(path), "tables": tables}
        _write_summary(summary, folder)
    return summary


def import_tables(
    root: Path, target: Path, *, replace: bool = False, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """The same for a folder of cleaned tables: canonical files of every table with times of kernels."""
    names = [name for name in shared.tables(root) if name in shared.kernel_tables()]
    if not names:
        raise KernelcastError(f"{root} has no tables of kernels: no SOURCE/TABLE.parquet of {', '.join(IMPORTERS)}")
    by_source: dict[str, list[str]] = {}
    for name in names:
        by_source.setdefault(name.split("/")[0], []).append(name)
    taken = [target / source for source in by_source if (target / source).exists()]
    if taken and not replace:
        raise KernelcastError(f"{taken[0]} exists already; give another folder, or --replace")
    tables: list[dict[str, Any]] = []
    for source, members in by_source.items():
        with _complete_or_nothing(target / source) as folder:
            for name in members:
                progress(f"table {len(tables) + 1} of {len(names)}, {name}")
                tables.append(_written(shared.read(root, name), name, folder))
            own = [line for line in tables if line["table"].startswith(f"{source}/")]
            _write_summary({"source": source, "path": str(root), "tables": own}, folder)
    return {"source": "tables", "path": str(root), "tables": tables}


def _write_summary(summary: dict[str, Any], folder: Path) -> None:
    (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def left_out_whole(root: Path) -> list[dict[str, Any]]:
    """Lines of the summaries in a folder for tables of which no row was kept."""
    summaries = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(root.glob(f"*/{SUMMARY}"))]
    return [line for summary in summaries for line in summary["tables"] if not line["rows"]]


def _written(result: Measurements, name: str, folder: Path) -> dict[str, Any]:
    """Write a table, when any row is left; its line in the summary."""
    file = folder / f"{name.split('/')[1]}.parquet"
    if len(result):
        write_canonical(result, file)
    return {
        "table": name,
        "rows": len(result),
        "ops": list(result.ops),
        "gpus": list(result.gpus),
        "dropped": result.dropped,
        "output": file.name if len(result) else None,
    }


def _measurements(importer: Importer, source: str, part: Part) -> Measurements:
    import duckdb

    name = f"{source}/{part.table}"
    mapping = importer.tables().get(part.table)
    try:
        with connect() as connection:
            load(connection, part)
            if mapping is None or not mapping.ops:
                return empty(source, {name: {"no_kernel_family": sum(counts(connection).values())}})
            return build(connection, importer.rows(connection, part), mapping, name)
    except duckdb.Error as error:
        said = str(error).splitlines()[0]
        raise KernelcastError(f"{part.files[0][0]} (or another file of {part.table}): {said}") from None


@contextmanager
def _complete_or_nothing(place: Path) -> Iterator[Path]:
    """A new folder that takes the name ``place`` when the block ends well."""
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(f".{place.name}.{os.getpid()}.part")
    old = place.with_name(f".{place.name}.{os.getpid()}.old")
    part.mkdir()
    try:
        yield part
        if place.exists():
            place.rename(old)
        part.rename(place)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
