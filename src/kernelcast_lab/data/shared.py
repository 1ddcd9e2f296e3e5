"""Read tables of a folder: ``<source>/<table>.parquet``, as a source's cleaned table or as canonical measurements.

``tables(root)`` lists them, ``read`` gives measurements of kernels, ``read_table`` the plain columns of any table
(whole models, requests, hardware, predictions of others).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict, Unpack

from numpy.typing import NDArray

from kernelcast.collect.schema import connect
from kernelcast.errors import KernelcastError, unknown
from kernelcast.files import text
from kernelcast.hardware import gpu
from kernelcast.models import model, model_ids
from kernelcast_lab.data import aiconfigurator, neusight, pipeweave, vidur
from kernelcast_lab.data.build import build
from kernelcast_lab.data.mapping import TableMap
from kernelcast_lab.data.measurements import AGAIN, Choice, Measurements, fetch, is_canonical, merged, read_canonical

ROOT_VARIABLE = "KERNELCAST_DATA"
# Each says what its tables mean (``tables``), and where they lie in a checkout (``LOOKS_FOR``, ``find``, ``rows``).
SOURCES: dict[str, ModuleType] = {module.SOURCE: module for module in (aiconfigurator, neusight, pipeweave, vidur)}


class NotExpressibleError(Exception):
    """A published row needs a feature that kernelcast does not have, or that its table does not give."""


def kernel_tables() -> dict[str, TableMap]:
    """Every table that holds times of kernels, 'source/table'."""
    return {f"{name}/{table}": m for name, module in SOURCES.items() for table, m in module.tables().items()}


def mapping_of(name: str) -> TableMap | None:
    """How a table 'folder/table' is read, None where it has no times of kernels. A folder is a source, or a part of one
    that was released apart: aiconfigurator_gb300 is read as aiconfigurator."""
    folder, _, table = name.partition("/")
    source = next((each for each in SOURCES if folder == each or folder.startswith(f"{each}_")), folder)
    return kernel_tables().get(f"{source}/{table}")


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


class Chosen(TypedDict, total=False):
    """Which rows are read: the fields of a ``Choice``. Samples are the same for the same seed; counts of what was
    dropped then speak of the sample where a rule looks at calls rather than at the source's rows."""

    ops: Collection[str] | None
    gpus: Collection[str] | None
    where: str | None
    sample: float | None
    seed: int


def read(root: Path | str | None, name: str, **chosen: Unpack[Chosen]) -> Measurements:
    """The measurements of one table that pass every rule; what did not is counted in ``dropped``."""
    import duckdb

    path = _file(root, name)
    choice = Choice(**chosen)
    try:
        if is_canonical(path):
            return read_canonical(path, choice)
        mapping = mapping_of(name)
        if mapping is None:
            raise KernelcastError(f"{name} has no times of kernels; read_table gives its columns")
        with connect() as connection:
            return build(connection, f"SELECT * FROM read_parquet({text(str(path))})", mapping, name, choice)
    except duckdb.Error as error:
        raise KernelcastError(f"{path}: {str(error).splitlines()[0]}") from None


def read_all(root: Path | str | None = None, **chosen: Unpack[Chosen]) -> Measurements:
    """The measurements of every table with times of kernels, one table after the other; second ones are left out."""
    folder = root_path(root)
    names = [n for n in tables(folder) if not n.endswith(AGAIN) and _has_ops(folder, n, chosen.get("ops"))]
    return merged(read(folder, n, **chosen) for n in names)


def with_op(folder: Path, name: str, op: str) -> bool:
    """Whether a table may have times of this op; second ones are left out."""
    return not name.endswith(AGAIN) and _has_ops(folder, name, [op])


def _has_ops(folder: Path, name: str, ops: Collection[str] | None) -> bool:
    mapping = mapping_of(name)
    if mapping is None:
        return is_canonical(_file(folder, name))
    return ops is None or any(o.op in ops for o in mapping.ops)


def read_table(root: Path | str | None, name: str) -> dict[str, NDArray[Any]]:
    """The columns of any table as they are: numbers as float64, all else as text (None: empty)."""
    path = _file(root, name)
    with connect() as connection:
        query = f"SELECT * FROM read_parquet({text(str(path))})"
        described = connection.execute(f"DESCRIBE {query}").fetchall()
        types = {row[0]: "VARCHAR" if row[1] in ("VARCHAR", "DATE", "TIMESTAMP") else "DOUBLE" for row in described}
        return fetch(connection, query, types)


class Row(dict[str, Any]):
    """A row of a table, an empty cell as None; reading a column that the table lacks is refused."""

    def __init__(self, table: str, cells: Iterable[tuple[str, Any]]) -> None:
        super().__init__((name, None if cell != cell else cell) for name, cell in cells)
        self.table = table

    def __missing__(self, name: str) -> Any:
        raise KernelcastError(f"table {self.table} has no column {name}; it has {', '.join(sorted(self))}")


def read_rows(root: Path | str | None, name: str) -> list[Row]:
    """The rows of any table."""
    columns = read_table(root, name)
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [Row(name, zip(columns, row, strict=True)) for row in rows]


@functools.cache
def known_model(name: str) -> tuple[str, str | None]:
    """A name of the catalogue, and the format of a quantised checkpoint that the catalogue has in bf16 only."""
    text = name.rpartition("/")[2].removeprefix("Meta-")
    spellings = name.replace("DeepSeek-v", "DeepSeek-V"), text.lower().replace(" ", "-")
    for tried, dtype in (*((each, None) for each in spellings), (text.removesuffix("-FP8"), "fp8_block")):
        try:
            found = model(tried).name
        except KernelcastError:
            continue
        if found in model_ids():
            return found, dtype if tried != name else None
    raise NotExpressibleError(f"the model {name}")


@functools.cache
def known_gpu(name: str) -> str:
    try:
        return gpu(name).id
    except KernelcastError:
        raise NotExpressibleError(f"the GPU {name}") from None
