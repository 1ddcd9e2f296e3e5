"""Questions to a folder of rows, finished or not: SQL, the best rows, and those that no other beats in both of two."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelcast.errors import KernelcastError, unknown
from kernelcast.files import quoted, text
from kernelcast.search.sweep.rows import COLUMNS, MAX, MIN, STATUSES
from kernelcast.search.sweep.run import CHUNKS, Folder

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

TABLE = "sweep"


@dataclass(frozen=True)
class Wish:
    """A column, and which way is better."""

    column: str
    better: str

    @classmethod
    def read(cls, text: str) -> Wish:
        """'tpot_s', or 'batch:max' where the column does not tell by itself (or the other way is asked for)."""
        name, colon, better = text.strip().partition(":")
        if name not in COLUMNS:
            raise unknown("column", name, COLUMNS)
        if colon and better not in (MIN, MAX):
            raise KernelcastError(f"{text!r}: after the colon is min or max, as in {name}:min")
        chosen = better or COLUMNS[name].better
        if COLUMNS[name].type == "VARCHAR":
            raise KernelcastError(f"{name} holds words: take a column of numbers, such as tokens_per_s_per_gpu")
        if chosen is None:
            raise KernelcastError(f"is less or more {name} better? write {name}:min or {name}:max")
        return cls(name, chosen)

    @property
    def order(self) -> str:
        return "DESC" if self.better == MAX else "ASC"

    @property
    def sign(self) -> str:
        """That makes less better."""
        return "-" if self.better == MAX else ""


@dataclass(frozen=True)
class Answer:
    """Rows by the names of their columns."""

    names: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    def fields(self) -> list[dict[str, Any]]:
        return [dict(zip(self.names, row, strict=True)) for row in self.rows]


class Rows:
    """The rows that are there when it is opened, as the table ``sweep``; nothing can be written. ``finished`` of
    ``chunks`` are there."""

    def __init__(self, connection: DuckDBPyConnection, finished: int, chunks: int) -> None:
        self._connection, self.finished, self.chunks = connection, finished, chunks

    def sql(self, query: str) -> Answer:
        """One query, which may only read."""
        import duckdb

        with _plain_errors():
            statements = duckdb.extract_statements(query)
        if len(statements) != 1 or statements[0].type not in (
            duckdb.StatementType.SELECT,
            duckdb.StatementType.EXPLAIN,
        ):
            raise KernelcastError(
                f'a query is one SELECT, as in "SELECT gpu, max(tokens_per_s) FROM {TABLE} GROUP BY gpu"'
            )
        with _plain_errors():
            found = self._connection.execute(query)
            names = tuple(column[0] for column in found.description or ())
            return Answer(names, found.fetchall())

    def top(self, count: int, by: Wish, where: str | None = None) -> Answer:
        """The best rows that run; of equal ones those of smaller numbers."""
        if count < 1:
            raise KernelcastError(f"--top is a number of rows of 1 or more, not {count}")
        order = f"ORDER BY {quoted(by.column)} {by.order}, setting LIMIT {count}"
        return self.sql(f"SELECT * FROM {TABLE} WHERE {_running(where, by)} {order}")

    def front(self, one: Wish, other: Wish, where: str | None = None) -> Answer:
        """The rows that run and that no other row is better than in one and at least as good in the other, by the
        first; of equal ones the first."""
        x, y = (f"{wish.sign}{quoted(wish.column)}" for wish in (one, other))
        before = "ORDER BY x, y, setting ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING"
        pairs = f"SELECT setting, {x} AS x, {y} AS y FROM {TABLE} WHERE {_running(where, one, other)}"
        best = f"SELECT setting, y, min(y) OVER ({before}) AS best FROM ({pairs})"
        kept = f"SELECT setting FROM ({best}) WHERE best IS NULL OR y < best"
        return self.sql(f"SELECT * FROM {TABLE} WHERE setting IN ({kept}) ORDER BY {x}, {y}, setting")

    def statuses(self) -> dict[str, int]:
        found = dict(self.sql(f"SELECT status, count(*) FROM {TABLE} GROUP BY status").rows)
        return {status: found.get(status, 0) for status in STATUSES}


def _running(where: str | None, *wishes: Wish) -> str:
    given = [f"({where})"] if where else []
    return " AND ".join(["status = 'ok'", *(f"{quoted(wish.column)} IS NOT NULL" for wish in wishes), *given])


def wishes(given: str) -> tuple[Wish, Wish]:
    """'tokens_per_s_per_gpu,tpot_s', each with :min or :max where that is not plain."""
    found = [Wish.read(part) for part in given.split(",")]
    if len(found) != 2 or found[0].column == found[1].column:
        raise KernelcastError(f"--pareto takes two columns, as in tokens_per_s_per_gpu,tpot_s, not {given!r}")
    return found[0], found[1]


@contextmanager
def opened(path: Path) -> Iterator[Rows]:
    import duckdb

    folder = Folder(path)
    total = folder.manifest["chunks"]  # refuses what is no folder of a sweep
    files = [str(path.resolve() / file.name) for file in sorted(path.glob(CHUNKS))]
    if not files:
        raise KernelcastError(f"none of the {total:,} chunks of {path} is finished yet")
    root = path.resolve()
    with duckdb.connect() as connection:
        names = ", ".join(map(quoted, COLUMNS))
        with _plain_errors():
            connection.execute(f"CREATE VIEW {TABLE} AS SELECT {names} FROM read_parquet({_listed(files)})")
            connection.execute(f"SET allowed_directories = {_listed([str(root)])}")
            for setting in ("enable_external_access = false", "lock_configuration = true"):
                connection.execute(f"SET {setting}")
        yield Rows(connection, len(files), total)


def _listed(paths: Sequence[str]) -> str:
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
        said = " ".join(line for line in lines[:end] if line)
        raise KernelcastError(re.sub(r"^[A-Z][\w ]* Error: ", "", said)[:300].rstrip()) from None
