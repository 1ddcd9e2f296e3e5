"""Read tables of a folder: ``<source>/<table>.parquet``, as a source's cleaned table or as canonical measurements.

``tables(root)`` lists them, ``read`` gives measurements of kernels, ``read_table`` the plain columns of any table
(whole models, requests, hardware, predictions of others).
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from kernelcast.errors import KernelcastError, unknown
from kernelcast.files import text
from kernelcast.measured.measurements import Measurements, merged
from kernelcast.measured.query import Choice, connect, fetch
from kernelcast.measured.store import AGAIN, is_canonical, read_canonical
from kernelcast_lab.data import aiconfigurator, neusight, pipeweave, vidur
from kernelcast_lab.data.build import build
from kernelcast_lab.data.mapping import TableMap

ROOT_VARIABLE = "KERNELCAST_DATA"
SOURCES = {module.SOURCE: module for module in (aiconfigurator, neusight, pipeweave, vidur)}


def kernel_tables() -> dict[str, TableMap]:
    """Every table that holds times of kernels, 'source/table'."""
    return {f"{name}/{table}": m for name, module in SOURCES.items() for table, m in module.tables().items()}


def root_path(root: Path | str | None = None) -> Path:
    """The folder, by argument or by the environment variable KERNELCAST_DATA."""
    given = root if root is not None else os.environ.get(ROOT_VARIABLE)
    if not given:
        raise KernelcastError(f"which folder has the tables? give it, or set {ROOT_VARIABLE}")
    path = Path(given)
    if not path.is_dir():
        raise KernelcastError(f"no folder {path}")
    return path


def tables(root: Path | str | None = None) -> list[str]:
    """Names of the tables in a folder: 'source/table' of each Parquet file one level down."""
    return sorted(f"{p.parent.name}/{p.stem}" for p in root_path(root).glob("*/*.parquet") if p.parent.name != "raw")


def _file(root: Path | str | None, name: str) -> Path:
    folder = root_path(root)
    path = folder / f"{name}.parquet"
    if not path.is_file():
        raise unknown("table", name, tables(folder) or ["none: the folder has no source/table.parquet"])
    return path


def read(
    root: Path | str | None,
    name: str,
    *,
    ops: Collection[str] | None = None,
    gpus: Collection[str] | None = None,
    where: str | None = None,
    sample: float | None = None,
    seed: int = 0,
) -> Measurements:
    """The measurements of one table that pass every rule; what did not is counted in ``dropped``.

    ``where``: SQL over the canonical columns. ``sample``: a share below 1 or about how many rows, the same for the
    same ``seed``; counts then speak of the sample where a rule looks at calls rather than at the source's rows.
    """
    import duckdb

    path = _file(root, name)
    choice = Choice(ops, gpus, where, sample, seed)
    try:
        if is_canonical(path):
            return read_canonical(path, choice)
        mapping = kernel_tables().get(name)
        if mapping is None:
            raise KernelcastError(f"{name} has no times of kernels; read_table gives its columns")
        with connect() as connection:
            return build(connection, f"SELECT * FROM read_parquet({text(str(path))})", mapping, name, choice)
    except duckdb.Error as error:
        raise KernelcastError(f"{path}: {str(error).splitlines()[0]}") from None


def read_all(
    root: Path | str | None = None,
    *,
    ops: Collection[str] | None = None,
    gpus: Collection[str] | None = None,
    where: str | None = None,
    sample: float | None = None,
    seed: int = 0,
) -> Measurements:
    """The measurements of every table with times of kernels, one table after the other; second ones are left out."""
    folder = root_path(root)
    names = [n for n in tables(folder) if not n.endswith(AGAIN) and _has_ops(folder, n, ops)]
    return merged(read(folder, n, ops=ops, gpus=gpus, where=where, sample=sample, seed=seed) for n in names)


def _has_ops(folder: Path, name: str, ops: Collection[str] | None) -> bool:
    mapping = kernel_tables().get(name)
    if mapping is None:
        return is_canonical(_file(folder, name))
    return ops is None or any(o.op in ops for o in mapping.ops)


def read_table(root: Path | str | None, name: str) -> dict[str, NDArray[Any]]:
    """The columns of any table as they are: numbers as float64, all else as text (None: empty)."""
    path = _file(root, name)
    with connect() as connection:
        query = f"SELECT * FROM read_parquet({text(str(path))})"
        described = connection.execute(f"DESCRIBE {query}").fetchall()
        kinds = {row[0]: "VARCHAR" if row[1] in ("VARCHAR", "DATE", "TIMESTAMP") else "DOUBLE" for row in described}
        return fetch(connection, query, kinds)
