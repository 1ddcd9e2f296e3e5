"""Import a user's own checkout of a public repository: canonical Parquet files and a summary, all or nothing.

``import_tables`` does the same for a folder of cleaned tables, so that later reads need no rules again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernelcast.collect.schema import connect
from kernelcast.errors import KernelcastError, unknown
from kernelcast_lab.data import shared
from kernelcast_lab.data.build import build
from kernelcast_lab.data.checkout import Part, counts, load
from kernelcast_lab.data.measurements import Measurements, empty, write_canonical
from kernelcast_lab.data.shared import SOURCES

SUMMARY = "summary.json"
Summary = dict[str, Any]
Progress = Callable[[str], None]


def import_checkout(
    source: str, path: Path, target: Path, *, replace: bool = False, progress: Progress = lambda _: None
) -> Summary:
    """Write ``target/source/TABLE.parquet`` for each table with a kernel family, and summary.json; return it.

    Everything is built beside the target and moved there when it is complete.
    """
    if source not in SOURCES:
        raise unknown("source", source, SOURCES)
    if not path.is_dir():
        raise KernelcastError(f"no folder {path}")
    result = SOURCES[source].find(path)
    if not result:
        raise KernelcastError(f"{path} is no checkout of {source}: no {SOURCES[source].LOOKS_FOR} in it")

    def tables() -> Iterator[tuple[str, Measurements]]:
        for number, part in enumerate(result, start=1):
            progress(f"{source}: table {number} of {len(result)}, {part.table} ({len(part.files)} files)")
            yield part.table, _measurements(source, part)

    _refuse_existing([target / source], replace)
    return _written(target / source, path, tables())


def import_tables(root: Path, target: Path, *, replace: bool = False, progress: Progress = lambda _: None) -> Summary:
    """The same for a folder of cleaned tables: canonical files of every table with times of kernels."""
    names = [name for name in shared.tables(root) if shared.mapping_of(name)]
    if not names:
        raise KernelcastError(f"{root} has no tables of kernels: no SOURCE/TABLE.parquet of {', '.join(SOURCES)}")
    by_source: dict[str, list[str]] = defaultdict(list)
    for name in names:
        by_source[name.split("/")[0]].append(name)

    def tables(source: str) -> Iterator[tuple[str, Measurements]]:
        for name in by_source[source]:
            progress(f"table {names.index(name) + 1} of {len(names)}, {name}")
            yield name.split("/")[1], shared.read(root, name)

    _refuse_existing([target / source for source in by_source], replace)
    summaries = [_written(target / source, root, tables(source)) for source in by_source]
    return {"source": "tables", "path": str(root), "tables": [line for each in summaries for line in each["tables"]]}


def left_out_whole(root: Path) -> list[dict[str, Any]]:
    """Lines of the summaries in a folder for tables of which no row was kept."""
    summaries = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(root.glob(f"*/{SUMMARY}"))]
    return [line for summary in summaries for line in summary["tables"] if not line["rows"]]


def _refuse_existing(folders: Iterable[Path], replace: bool) -> None:
    for folder in folders:
        if folder.exists() and not replace:
            raise KernelcastError(f"{folder} exists already; give another folder, or --replace")


def _written(target: Path, path: Path, tables: Iterable[tuple[str, Measurements]]) -> Summary:
    """Write the tables of a source of which any row is left, and the summary that is returned."""
    lines = []
    with _complete_or_nothing(target) as folder:
        for table, result in tables:
            file = folder / f"{table}.parquet"
            if len(result):
                write_canonical(result, file)
            line = {
                "table": f"{target.name}/{table}",
                "rows": len(result),
                "ops": list(result.ops),
                "gpus": list(result.gpus),
                "dropped": result.dropped,
                "output": file.name if len(result) else None,
            }
            lines.append(line)
        summary = {"source": target.name, "path": str(path), "tables": lines}
        (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def _measurements(source: str, part: Part) -> Measurements:
    import duckdb

    name = f"{source}/{part.table}"
    mapping = shared.mapping_of(name)
    try:
        with connect() as connection:
            load(connection, part)
            if mapping is None or not mapping.ops:
                return empty(source, {name: {"no_kernel_family": sum(counts(connection).values())}})
            return build(connection, SOURCES[source].rows(connection, part), mapping, name)
    except duckdb.Error as error:
        message = str(error).splitlines()[0]
        raise KernelcastError(f"{part.files[0][0]} (or another file of {part.table}): {message}") from None


@contextmanager
def _complete_or_nothing(target: Path) -> Iterator[Path]:
    """A new folder that is renamed to ``target`` when the block succeeds."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    part.mkdir()
    try:
        yield part
        if target.exists():
            target.rename(old)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
