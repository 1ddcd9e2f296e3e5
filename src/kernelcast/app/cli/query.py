"""query: rows of a sweep by SQL, the best of them, and those that no other beats."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernelcast.app.cli.commands import Command, with_examples
from kernelcast.app.cli.options import Json
from kernelcast.errors import KernelcastError

if TYPE_CHECKING:
    from kernelcast.search.sweep.query import Objective, SweepTable

Top = Annotated[int | None, typer.Option("--top", metavar="N", help="the best rows by --by")]
By = Annotated[
    str | None,
    typer.Option("--by", metavar="COLUMN", help="of --top; add :min or :max where better is not plain (batch:max)"),
]
Pareto = Annotated[
    str | None,
    typer.Option("--pareto", metavar="X,Y", help="rows that no other beats in both, as tokens_per_s_per_gpu,tpot_s"),
]
_USUAL = "tokens_per_s_per_gpu"


def register(app: typer.Typer) -> None:
    examples = (
        'kernelcast query chat.sweep "SELECT gpu, min(dollars_per_million_tokens) FROM sweep GROUP BY gpu"',
        "kernelcast query chat.sweep --pareto tokens_per_s_per_gpu,tpot_s --where \"model = 'llama-3.1-8b'\"",
    )
    app.command("query", cls=with_examples(Command, *examples))(query)


@dataclass(frozen=True)
class Best:
    """Which of the rows are wanted."""

    top: int | None
    by: Objective | None
    pareto: tuple[Objective, Objective] | None
    where: str | None = None

    def fields(self, rows: SweepTable) -> dict[str, Any]:
        from kernelcast.app.report.sweep import answer_fields

        found = {}
        if self.top and self.by:
            found["top"] = answer_fields(rows.top(self.top, self.by, self.where))
        if self.pareto:
            found["pareto"] = answer_fields(rows.pareto(*self.pareto, self.where))
        return found

    def show(self, rows: SweepTable) -> None:
        from kernelcast.app.report.sweep import print_best

        if self.top and self.by:
            found = rows.top(self.top, self.by, self.where)
            print_best(found, f"best {len(found.rows)} by {self.by.column} ({self.by.better})", [self.by])
        if self.pareto:
            found = rows.pareto(*self.pareto, self.where)
            named = " against ".join(f"{wish.column} ({wish.better})" for wish in self.pareto)
            print_best(found, f"{len(found.rows)} that no other beats: {named}", self.pareto)


def best_of(top: int | None, by: str | None, pareto: str | None, where: str | None = None) -> Best:
    """Refuses columns that are not, before any work."""
    from kernelcast.search.sweep.query import Objective, read_pareto

    if by is not None and top is None:
        raise KernelcastError(f"--by needs --top, as in --top 10 --by {by}")
    if top is not None and top < 1:
        raise KernelcastError(f"--top is a number of rows of 1 or more, not {top}")
    chosen = Objective.read(by or _USUAL) if top is not None else None
    return Best(top, chosen, read_pareto(pareto) if pareto is not None else None, where)


def query(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="rows of `kernelcast sweep`, finished or running")],
    sql: Annotated[str | None, typer.Argument(metavar="SQL", help="one SELECT from the table sweep")] = None,
    top: Top = None,
    by: By = None,
    pareto: Pareto = None,
    where: Annotated[
        str | None, typer.Option("--where", metavar="SQL", help="only such rows, of --top and --pareto")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="print CSV")] = False,
    as_json: Json = False,
) -> None:
    """Ask the rows of a sweep: SQL (DuckDB's) on the table sweep, which nothing can change; or the best of them."""
    best = best_of(top, by, pareto, where)
    wanted = best.top is not None or best.pareto is not None
    if (sql is None) != wanted:
        raise KernelcastError("what is asked? give one SELECT, or --top N --by COLUMN, or --pareto X,Y")
    if where and sql:
        raise KernelcastError("--where belongs to --top and --pareto; a SELECT has a WHERE of its own")
    if as_csv and (as_json or wanted):
        raise KernelcastError("--csv is of a SELECT, and without --json")
    _tell(folder, sql, best, as_csv, as_json)


def _tell(folder: Path, sql: str | None, best: Best, as_csv: bool, as_json: bool) -> None:
    from kernelcast.app.report.sweep import answer_fields, print_answer, write_csv
    from kernelcast.search.sweep.query import open_sweep

    with open_sweep(folder) as rows:
        if rows.finished < rows.chunks:
            print(f"kernelcast: {rows.finished:,} of {rows.chunks:,} chunks are finished so far", file=sys.stderr)
        if sql is None:
            if as_json:
                typer.echo(json.dumps(best.fields(rows)))
            else:
                best.show(rows)
            return
        found = rows.sql(sql)
    if as_json:
        typer.echo(json.dumps(answer_fields(found), default=str))
    elif as_csv:
        write_csv(found)
    else:
        print_answer(found)
