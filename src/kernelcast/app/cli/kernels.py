"""``kernelcast kernels TABLE``: many calls at once, from a file to a file."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kernelcast.app.cli.commands import Command, with_examples
from kernelcast.app.cli.options import Cache, CalibrationFile, Changes, Json, PredictorName, WeightsFolder, Without
from kernelcast.app.questions.shared import chosen_conditions, chosen_gpu
from kernelcast.app.report import json as as_json
from kernelcast.errors import KernelcastError
from kernelcast.files import TableFile, check_target, open_table
from kernelcast.forecast.calls import ROTATIONS
from kernelcast.forecast.predict_table import predict_columns
from kernelcast.forecast.table import BadRows
from kernelcast.hardware import Gpu

PREVIEW_ROWS = 20


def register(app: typer.Typer) -> None:
    examples = (
        "printf 'op,m,n,k,dtype\\ngemm,4096,4096,4096,bf16\\n' > calls.csv",
        "kernelcast kernels calls.csv --gpu h200_sxm -o times.csv",
    )
    app.command("kernels", cls=with_examples(Command, *examples))(predict_file)


def predict_file(
    table: Annotated[
        Path,
        typer.Argument(metavar="TABLE", help="A .csv, .parquet or .jsonl file with a column op and its parameters."),
    ],
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="ID", help="GPU for every row; without it, the table's gpu column."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Where to write the table with the results (same endings)."
        ),
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave the results of bad rows empty instead of stopping.")
    ] = False,
    changes: Changes = None,
    without: Without = None,
    cache: Cache = "model",
    predictor: PredictorName = "learned",
    calibration: CalibrationFile = None,
    weights: WeightsFolder = None,
    json: Json = False,
) -> None:
    """Predict every call of a table.

    Adds predicted_us, low_us, high_us, ceiling_us, bound_us, bound_by and support; all other columns and the
    order of the rows stay. Ops may be mixed: an empty cell means not given.
    """
    started = time.perf_counter()
    chip = _chip(gpu, changes)
    conditions = chosen_conditions(without, cache, predictor, calibration, weights)
    if output is not None:
        check_target(table, output)
    with open_table(table) as source:
        columns = source.columns(*ROTATIONS)
        results, bad = predict_columns(columns, chip, conditions)
        if chip is not None and "gpu" in source.types:  # what was answered, not what the table had
            results["gpu"] = np.full(source.count, chip.id, dtype=object)
        if bad.messages and not skip_bad:
            raise KernelcastError(f"{table}: {bad.text()} (--skip-bad leaves their results empty)")
        if output is not None:
            source.write(results, output)
        else:
            _show(source, columns, results, json)
    _tell(source, output, bad, time.perf_counter() - started, json)


def _chip(name: str | None, changes: list[str] | None) -> Gpu | None:
    if name is None:
        if changes:
            raise KernelcastError("--set changes one GPU: give it with --gpu")
        return None
    return chosen_gpu(name, changes)


def _show(source: TableFile, columns: dict[str, Any], results: dict[str, Any], json: bool) -> None:
    if json:
        for index, row in enumerate(source.json_rows(results)):
            print(",\n" if index else "[\n", row, sep="", end="")
        print("\n]" if source.count else "[]")
        return
    from kernelcast.app.report.text import print_calls

    print_calls(columns, results, PREVIEW_ROWS)


def _tell(source: TableFile, output: Path | None, bad: BadRows, seconds: float, json: bool) -> None:
    """A warning for bad rows, and the summary."""
    if bad.messages:
        print("kernelcast: warning:", bad.text(), file=sys.stderr)
    if json and output is not None:
        summary = {
            "rows": source.count,
            "bad_rows": len(bad.messages),
            "problems": [{"row": row + 1, "message": text} for row, text in sorted(bad.messages.items())[:100]],
            "seconds": seconds,
            "rows_per_s": source.count / seconds,
            "output": str(output),
        }
        print(as_json.to_json(summary))
        return
    place = f" -> {output}" if output is not None else ""
    rate = f"{seconds:.2f} s, {source.count / seconds:,.0f} rows/s"
    print(f"kernelcast: {source.count:,} rows, {len(bad.messages):,} bad, {rate}{place}", file=sys.stderr)
