"""Measured rows in as few bytes as Parquet allows, so that a fit can run where the tables are not.

A pack is a folder that ``--data`` reads: ``measured/FAMILY.parquet``, canonical, rows in the order that a fit reads
them, and the sweeps of configs beside them. A fit on it has the rows that it would have on the tables.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.collect.schema import IDENTITY, METADATA_KEY, VERSION, columns_of, connect
from kernelcast.errors import KernelcastError
from kernelcast.files import complete, encoded, quoted, text
from kernelcast_lab.data.config_sweeps import SWEEPS
from kernelcast_lab.data.measurements import AGAIN, Measurements, filled
from kernelcast_lab.fit.families import Roots, family_rows, folders_of, may_be_fitted
from kernelcast_lab.fit.recipes import recipe

SOURCE = "measured"  # the folder inside of a pack
_ALWAYS = ("op", "dtype", "stack", *IDENTITY)  # columns that readers need, even where no row has any
_SMALL = "FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 19, ROW_GROUP_SIZE 1000000"


def pack(
    roots: Roots, target: Path, families: Sequence[str], progress: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Write the rows of these families; a line a file: its name, rows and bytes."""
    folder = target / SOURCE
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for family in families:
        result = family_rows(roots, family)
        if not len(result):
            progress(f"{family}: no measured call, left out")
            continue
        result = result.select(may_be_fitted(result.columns, recipe(family).data))
        path = folder / f"{family}.parquet"
        write_small(result, path)
        lines.append({"file": str(path), "family": family, "rows": len(result), "bytes": path.stat().st_size})
        progress(f"{family}: {len(result):,} rows, {path.stat().st_size / 1e6:.1f} MB -> {path}")
    swept = _sweeps(roots, target) if any(recipe(family).data.sweeps for family in families) else []
    return [*lines, *swept, *_repeated(roots, folder)]


def _repeated(roots: Roots, folder: Path) -> list[dict[str, Any]]:
    """Calls that were measured a second time, as they are."""
    lines = []
    for file in (file for root in folders_of(roots) for file in sorted(root.glob(f"*/*{AGAIN}.parquet"))):
        path = folder / file.name
        shutil.copyfile(file, path)
        lines.append({"file": str(path), "family": "all", "bytes": path.stat().st_size})
    return lines


def _sweeps(roots: Roots, target: Path) -> list[dict[str, Any]]:
    """Sweeps are packed as they are: they say which of their models are for testing."""
    lines: list[dict[str, Any]] = []
    for file in (file for root in folders_of(roots) for file in sorted(root.glob(SWEEPS))):
        path = target / file.name
        if any(line["file"] == str(path) for line in lines):
            raise KernelcastError(f"{file.name} is in more than one of the folders; rename one")
        shutil.copyfile(file, path)
        lines.append({"file": str(path), "family": "moe_gemm", "bytes": path.stat().st_size})
    return lines


def write_small(measurements: Measurements, path: Path) -> None:
    """A canonical file without the columns that no row fills, its numbers of the narrowest type that holds them."""
    cells: dict[str, NDArray[Any]] = {}
    select = []
    for name, sql_type in columns_of().items():
        column = measurements.columns.get(name)
        if column is not None and (name in _ALWAYS or filled(column)):
            select.append(f"CAST({encoded(column, cells)} AS {_narrow(column, sql_type)}) AS {quoted(name)}")
    note = {"schema": VERSION, "source": measurements.source, "dropped": measurements.tables}
    with connect() as connection, complete(path) as part:
        connection.register("encoded", cells)
        connection.execute(
            f"COPY (SELECT {', '.join(select)} FROM encoded) TO {text(str(part))} "
            f"({_SMALL}, KV_METADATA {{{METADATA_KEY}: {text(json.dumps(note))}}})"
        )


def _narrow(column: NDArray[Any], sql_type: str) -> str:
    """Sizes mostly fit in 32 bits; all else stays what it is."""
    return "INTEGER" if sql_type == "BIGINT" and np.nanmax(np.abs(column)) < 2**31 else sql_type
