"""sweep: very many settings of models on GPUs, into a folder of rows; query: rows by SQL, and the best of them."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kernelcast.app.cli.commands import add_command, progress_bar
from kernelcast.app.questions.shared import Json
from kernelcast.app.questions.sweep import QueryQuestion, RankingParameters, SweepQuestion
from kernelcast.app.report.json import print_json
from kernelcast.errors import KernelcastError

if TYPE_CHECKING:
    from kernelcast.search.sweep.engines import SweepEngine
    from kernelcast.search.sweep.query import SweepTable
    from kernelcast.search.sweep.rows import SweepJob
    from kernelcast.search.sweep.run import SweepOutcome
    from kernelcast.search.sweep.training import TrainingSweepJob


def register(app: typer.Typer) -> None:
    add_command(
        app, sweep,
        'echo \'model = "llama-3.1-8b"\n  gpu = ["h100_sxm", "l40s"]\n  batch = { from = 1, to = 64, factor = 4 }\n'
        '  where = ["batch * input_len <= 32768"]\' > small.toml',
        "kernelcast sweep small.toml --engine one --top 3 --by dollars_per_million_tokens",
        'kernelcast query small.sweep "SELECT gpu, max(tokens_per_s) FROM sweep GROUP BY gpu"',
    )  # fmt: skip
    add_command(
        app, query,
        'kernelcast query chat.sweep "SELECT gpu, min(dollars_per_million_tokens) FROM sweep GROUP BY gpu"',
        "kernelcast query chat.sweep --pareto tokens_per_s_per_gpu,tpot_s --where \"model = 'llama-3.1-8b'\"",
    )  # fmt: skip


def sweep(question: SweepQuestion, json: Json = False) -> None:
    """Predict every setting that a file describes. Run again after a stop, it continues there."""
    from kernelcast.app.report.sweep import outcome_fields, print_outcome
    from kernelcast.search.sweep.engines import sweep_engine
    from kernelcast.search.sweep.query import open_sweep
    from kernelcast.search.sweep.run import sweep_job

    question.objectives()
    if question.chunk_settings is not None and question.chunk_settings < 1:
        raise KernelcastError(f"`chunk_settings` must be 1 or more, not {question.chunk_settings}")
    engine = sweep_engine(question.engine, question.workers, question.address)
    work = sweep_job(question.file, question.conditions, question.prices, question.price or ())
    outcome = _run(work, question.out or Path(f"{question.file.stem}.sweep"), engine, question)
    with open_sweep(outcome.folder) as rows:
        statuses = rows.statuses()
        if json:
            print_json(outcome_fields(outcome, statuses) | best_fields(question, rows))
        else:
            print_outcome(outcome, statuses)
            print_best_rows(question, rows)


def _run(work: SweepJob | TrainingSweepJob, folder: Path, engine: SweepEngine, question: SweepQuestion) -> SweepOutcome:
    from kernelcast.search.sweep.run import run_sweep

    with progress_bar(transient=True) as task:
        bar, start = task("settings"), time.monotonic()

        def report(done: int, total: int, before: int) -> None:
            rate = (done - before) / max(time.monotonic() - start, 1e-9)
            bar(done, total, f"{rate:,.0f}/s" if done > before else "")

        try:
            return run_sweep(work, folder, engine, chunk_settings=question.chunk_settings, fresh=question.fresh,
                             on_progress=report)  # fmt: skip
        except KeyboardInterrupt:
            stopped = folder
    print(f"kernelcast: stopped; what is finished is in {stopped}, and the same command continues", file=sys.stderr)
    raise KeyboardInterrupt


def query(question: QueryQuestion, json: Json = False) -> None:
    """Query the rows of a sweep: SQL (DuckDB's) on the table sweep, which nothing can change; or the best of them."""
    from kernelcast.app.report.sweep import answer_fields, print_answer, write_csv
    from kernelcast.search.sweep.query import open_sweep

    ranked_by, front = question.objectives()
    ranked = ranked_by is not None or front is not None
    if (question.sql is None) != ranked:
        raise KernelcastError("what to query? give one SELECT, or `top` N `by` COLUMN, or `pareto` X,Y")
    if question.where and question.sql:
        raise KernelcastError("`where` belongs to `top` and `pareto`; a SELECT has a WHERE of its own")
    if question.csv and (json or ranked):
        raise KernelcastError("`csv` is of a SELECT, and without `json`")
    with open_sweep(question.folder) as rows:
        if rows.finished < rows.chunks:
            print(f"kernelcast: {rows.finished:,} of {rows.chunks:,} chunks are finished so far", file=sys.stderr)
        if question.sql is None:
            if json:
                print_json(best_fields(question, rows, question.where))
            else:
                print_best_rows(question, rows, question.where)
            return
        result = rows.sql(question.sql)
    if json:
        print_json(answer_fields(result), default=str)
    elif question.csv:
        write_csv(result)
    else:
        print_answer(result)


def best_fields(ranking: RankingParameters, rows: SweepTable, where: str | None = None) -> dict[str, Any]:
    from kernelcast.app.report.sweep import answer_fields

    ranked_by, front = ranking.objectives()
    fields = {}
    if ranking.top and ranked_by:
        fields["top"] = answer_fields(rows.top(ranking.top, ranked_by, where))
    if front:
        fields["pareto"] = answer_fields(rows.pareto(*front, where))
    return fields


def print_best_rows(ranking: RankingParameters, rows: SweepTable, where: str | None = None) -> None:
    from kernelcast.app.report.sweep import print_best

    ranked_by, front = ranking.objectives()
    if ranking.top and ranked_by:
        result = rows.top(ranking.top, ranked_by, where)
        print_best(result, f"best {len(result.rows)} by {ranked_by.column} ({ranked_by.better})", [ranked_by])
    if front:
        result = rows.pareto(*front, where)
        named = " against ".join(f"{objective.column} ({objective.better})" for objective in front)
        print_best(result, f"{len(result.rows)} on the Pareto front: {named}", front)
