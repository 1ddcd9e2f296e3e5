"""sweep: very many settings of models on GPUs, into a folder of rows."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernelcast.app.cli.commands import Command, with_examples
from kernelcast.app.cli.options import CalibrationFile, Json, PredictorName, WeightsFolder
from kernelcast.app.cli.progress import progress_bar
from kernelcast.app.cli.query import Best, By, Pareto, Top, best_of
from kernelcast.app.questions.shared import chosen_conditions
from kernelcast.errors import KernelcastError

if TYPE_CHECKING:
    from kernelcast.search.sweep.engines import SweepEngine
    from kernelcast.search.sweep.rows import SweepJob
    from kernelcast.search.sweep.run import SweepOutcome


def register(app: typer.Typer) -> None:
    examples = (
        'echo \'model = "llama-3.1-8b"\n  gpu = ["h100_sxm", "l40s"]\n  batch = { from = 1, to = 64, factor = 4 }\n'
        '  where = ["batch * input_len <= 32768"]\' > small.toml',
        "kernelcast sweep small.toml --engine one --top 3 --by dollars_per_million_tokens",
        'kernelcast query small.sweep "SELECT gpu, max(tokens_per_s) FROM sweep GROUP BY gpu"',
    )
    app.command("sweep", cls=with_examples(Command, *examples))(sweep)


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="models, GPUs, layouts, sizes, formats, stacks")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="of the rows; default: FILE.sweep")
    ] = None,
    engine: Annotated[
        str, typer.Option("--engine", metavar="processes|ray|one", help="who works: the rows are the same")
    ] = "processes",
    workers: Annotated[int | None, typer.Option("--workers", help="processes; default: one a core")] = None,
    address: Annotated[
        str | None, typer.Option("--address", metavar="HOST:PORT", help="of a Ray cluster; default: a local one")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="throw away the rows of another sweep in the folder")] = False,
    chunk_settings: Annotated[
        int | None, typer.Option("--chunk-settings", help="settings a file of rows; default: by their number")
    ] = None,
    top: Top = None,
    by: By = None,
    pareto: Pareto = None,
    prices: Annotated[
        Path | None, typer.Option("--prices", metavar="FILE.toml", help="USD per GPU-hour; default: those that ship")
    ] = None,
    price: Annotated[
        list[str] | None, typer.Option("--price", metavar="GPU=USD", help="one price per GPU-hour; may be repeated")
    ] = None,
    predictor: PredictorName = "learned",
    calibration: CalibrationFile = None,
    weights: WeightsFolder = None,
    as_json: Json = False,
) -> None:
    """Predict every setting that a file describes. Run again after a stop, it goes on where it was."""
    from kernelcast.search.sweep.engines import sweep_engine
    from kernelcast.search.sweep.file import read_sweep
    from kernelcast.search.sweep.rows import SweepJob, hourly_prices

    best = best_of(top, by, pareto)
    if chunk_settings is not None and chunk_settings < 1:
        raise KernelcastError(f"--chunk-settings is a number of 1 or more, not {chunk_settings}")
    chosen = sweep_engine(engine, workers, address)
    asked = read_sweep(file)
    conditions = chosen_conditions(None, "model", predictor, calibration, weights)
    work = SweepJob(asked, conditions, hourly_prices(asked.gpus, prices, price or ()))
    found = _run(work, out or Path(f"{file.stem}.sweep"), chosen, chunk_settings, fresh)
    _tell(found, best, as_json)


def _run(work: SweepJob, folder: Path, engine: SweepEngine, chunk_settings: int | None, fresh: bool) -> SweepOutcome:
    from kernelcast.search.sweep.run import run_sweep

    with progress_bar(transient=True) as task:
        bar, start = task("settings"), time.monotonic()

        def told(done: int, total: int, before: int) -> None:
            rate = (done - before) / max(time.monotonic() - start, 1e-9)
            bar(done, total, f"{rate:,.0f}/s" if done > before else "")

        try:
            return run_sweep(work, folder, engine, chunk_settings=chunk_settings, fresh=fresh, on_progress=told)
        except KeyboardInterrupt:
            stopped = folder
    print(f"kernelcast: stopped; what is finished is in {stopped}, and the same command goes on there", file=sys.stderr)
    raise KeyboardInterrupt


def _tell(found: SweepOutcome, best: Best, as_json: bool) -> None:
    from kernelcast.app.report.sweep import outcome_fields, print_outcome
    from kernelcast.search.sweep.query import open_sweep

    with open_sweep(found.folder) as rows:
        statuses = rows.statuses()
        if as_json:
            typer.echo(json.dumps(outcome_fields(found, statuses) | best.fields(rows)))
        else:
            print_outcome(found, statuses)
            best.show(rows)
