"""Measured tables through DuckDB: which rows are wanted, and columns in memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.collect.measured.schema import is_word
from kernelcast.errors import KernelcastError
from kernelcast.files import quoted, text

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Columns = dict[str, NDArray[Any]]
_THREADS = 2


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


def connect() -> DuckDBPyConnection:
    import duckdb

    connection = duckdb.connect()
    connection.execute(f"SET threads = {_THREADS}")
    return connection


def sampled(choice: Choice, kinds: dict[str, str], count: int) -> str | None:
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
        f"{text(name + '=')} || CAST({quoted(name) if is_word(kind) else f'CAST({quoted(name)} AS DOUBLE)'} AS VARCHAR)"
        for name, kind in sorted(kinds.items())
        if name != "latency_us"
    )
    return f"md5_number_lower(concat_ws('|', {text(str(choice.seed))}, {cells})) < {int(share * 2**64)}::UBIGINT"


def fetch(connection: DuckDBPyConnection, query: str, kinds: dict[str, str], order: Collection[str] = ()) -> Columns:
    """Columns of a query in memory. Words travel as codes, so that equal ones are one object."""
    connection.execute(f"CREATE OR REPLACE TEMP VIEW wanted AS {query}")
    words: dict[str, list[str]] = {}
    select = []
    for name, kind in kinds.items():
        cell = quoted(name)
        if not is_word(kind):
            select.append(f"CAST({cell} AS DOUBLE) AS {cell}")
            continue
        rows = connection.execute(f"SELECT DISTINCT {cell} FROM wanted WHERE {cell} IS NOT NULL ORDER BY 1").fetchall()
        words[name] = [row[0] for row in rows]
        enum = f"ENUM({', '.join(map(text, words[name] or ['']))})"
        select.append(f"coalesce(CAST(enum_code(CAST({cell} AS {enum})) AS INTEGER), -1) AS {cell}")
    ordered_by = f" ORDER BY {', '.join(f'wanted.{key}' for key in order)}" if order else ""
    found = connection.execute(f"SELECT {', '.join(select)} FROM wanted{ordered_by}").fetchnumpy()
    return {name: _column(found[name], words.get(name)) for name in kinds}


def _column(values: Any, words: list[str] | None) -> NDArray[Any]:
    if words is not None:
        lookup = np.array([*words, None], dtype=object)  # code -1 is the last
        return lookup[np.asarray(values, dtype=np.int64)]
    return np.asarray(np.ma.filled(values, np.nan), dtype=np.float64)
