"""Queries on the rows of a sweep, finished or not: SQL, the best rows, and the Pareto front of two columns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelcast.errors import KernelcastError, refuse_unknown
from kernelcast.files import quoted, text
from kernelcast.search.sweep.rows import BETTER, COLUMNS, STATUSES, TRAINING_COLUMNS
from kernelcast.search.sweep.run import CHUNKS, SweepFolder

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

TABLE = "sweep"


@dataclass(frozen=True)
class Objective:
    """A column, and whether less (min) or more (max) of it is better."""

    column: str
    better: str

    @classmethod
    def read(cls, text: str) -> Objective:
        """'tpot_s', or 'batch:max' where the direction is not plain (or the other one is wanted)."""
        name, colon, better = text.strip().partition(":")
        kinds = {**COLUMNS, **TRAINING_COLUMNS}
        refuse_unknown("column", [name], kinds)
        if colon and better not in ("min", "max"):
            raise KernelcastError(f"{text!r}: after the colon is min or max, as in {name}:min")
        if kinds[name] == "VARCHAR":
            raise KernelcastError(f"{name} is text: use a column of numbers, such as tokens_per_s_per_gpu")
        if not better and name not in BETTER:
            raise KernelcastError(f"is less or more {name} better? write {name}:min or {name}:max")
        return cls(name, better or BETTER[name])

    @property
    def ascending(self) -> str:
        """An expression of which less is better."""
        return f"{'-' if self.better == 'max' else ''}{quoted(self.column)}"


def read_pareto(given: str) -> tuple[Objective, Objective]:
    """'tokens_per_s_per_gpu,tpot_s', each with :min or :max where that is not plain."""
    objectives = [Objective.read(part) for part in given.split(",")]
    if len(objectives) != 2 or objectives[0].column == objectives[1].column:
        raise KernelcastError(f"`pareto` takes two columns, as in tokens_per_s_per_gpu,tpot_s, not {given!r}")
    return objectives[0], objectives[1]


@dataclass(frozen=True)
class QueryResult:
    """Rows by the names of their columns."""

    names: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    def fields(self) -> list[dict[str, Any]]:
        return [dict(zip(self.names, row, strict=True)) for row in self.rows]


class SweepTable:
    """The rows that are there when it is opened, as the table ``sweep``; read-only. ``finished`` of ``chunks`` are
    there."""

    def __init__(self, connection: DuckDBPyConnection, finished: int, chunks: int) -> None:
        self._connection, self.finished, self.chunks = connection, finished, chunks

    def sql(self, query: str) -> QueryResult:
        """One query, which may only read."""
        import duckdb

        with _plain_errors():
            statements = duckdb.extract_statements(query)
        allowed = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
        if len(statements) != 1 or statements[0].type not in allowed:
            raise KernelcastError(
                f'a query is one SELECT, as in "SELECT gpu, max(tokens_per_s) FROM {TABLE} GROUP BY gpu"'
            )
        with _plain_errors():
            cursor = self._connection.execute(query)
            return QueryResult(tuple(column[0] for column in cursor.description or ()), cursor.fetchall())

    def top(self, count: int, by: Objective, where: str | None = None) -> QueryResult:
        """The best rows that run; of equal ones those of smaller numbers."""
        if count < 1:
            raise KernelcastError(f"`top` is a number of rows of 1 or more, not {count}")
        order = f"ORDER BY {quoted(by.column)} {'DESC' if by.better == 'max' else 'ASC'}, setting LIMIT {count}"
        return self.sql(f"SELECT * FROM {TABLE} WHERE {_running(where, by)} {order}")

    def pareto(self, first: Objective, second: Objective, where: str | None = None) -> QueryResult:
        """The Pareto front: rows that run and that no other row dominates, by the first; of equal ones the first."""
        x, y = first.ascending, second.ascending
        before = "ORDER BY x, y, setting ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING"
        pairs = f"SELECT setting, {x} AS x, {y} AS y FROM {TABLE} WHERE {_running(where, first, second)}"
        best = f"SELECT setting, y, min(y) OVER ({before}) AS best FROM ({pairs})"
        kept = f"SELECT setting FROM ({best}) WHERE best IS NULL OR y < best"
        return self.sql(f"SELECT * FROM {TABLE} WHERE setting IN ({kept}) ORDER BY {x}, {y}, setting")

    def statuses(self) -> dict[str, int]:
        counts = dict(self.sql(f"SELECT status, count(*) FROM {TABLE} GROUP BY status").rows)
        return {status: counts.get(status, 0) for status in STATUSES}


def _running(where: str | None, *objectives: Objective) -> str:
    known = [f"{quoted(objective.column)} IS NOT NULL" for objective in objectives]
    return " AND ".join(["status = 'ok'", *known, *([f"({where})"] if where else [])])


@contextmanager
def open_sweep(path: Path) -> Iterator[SweepTable]:
    import duckdb

    total = SweepFolder(path).manifest["chunks"]  # refuses what is no folder of a sweep
    root = path.resolve()
    files = [str(root / file.name) for file in sorted(path.glob(CHUNKS))]
    if not files:
        raise KernelcastError(f"none of the {total:,} chunks of {path} is finished yet")
    with duckdb.connect() as connection:
        with _plain_errors():
            connection.execute(f"CREATE VIEW {TABLE} AS SELECT * FROM read_parquet({_sql_list(files)})")
            connection.execute(f"SET allowed_directories = {_sql_list([str(root)])}")
            connection.execute("SET enable_external_access = false")
            connection.execute("SET lock_configuration = true")
        yield SweepTable(connection, len(files), total)


def _sql_list(paths: Sequence[str]) -> str:
    return f"[{', '.join(map(text, paths))}]"


@contextmanager
def _plain_errors() -> Iterator[None]:
    """DuckDB's errors in one line, without its drawing of the query."""
    import duckdb

    try:
        yield
    except duckdb.Error as error:
        lines = [line.strip() for line in str(error).splitlines()]
        end = next((at for at, line in enumerate(lines) if line.startswith("LINE ")), len(lines))
        message = " ".join(line for line in lines[:end] if line)
        raise KernelcastError(re.sub(r"^[A-Z][\w ]* Error: ", "", message)[:300].rstrip()) from None
