"""kernels: many calls at once, from a file to a file."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import typer

from kernelcast.app.cli.commands import add_command
from kernelcast.app.questions.kernel import KernelsQuestion
from kernelcast.app.questions.shared import Json, resolve_gpu
from kernelcast.app.report.json import to_json
from kernelcast.errors import KernelcastError
from kernelcast.files import TableFile, check_target, open_table
from kernelcast.forecast.calls import ROTATIONS
from kernelcast.forecast.predict_table import predict_columns
from kernelcast.forecast.table import BadRows

PREVIEW_ROWS = 20


def register(app: typer.Typer) -> None:
    add_command(
        app, kernels,
        "printf 'op,m,n,k,dtype\\ngemm,4096,4096,4096,bf16\\n' > calls.csv",
        "kernelcast kernels calls.csv --gpu h200_sxm -o times.csv",
    )  # fmt: skip


def kernels(question: KernelsQuestion, json: Json = False) -> None:
    """Predict every call of a table.

    Adds predicted_us, low_us, high_us, ceiling_us, bound_us, bound_by and support; all other columns and the
    order of the rows stay. Ops may be mixed: an empty cell means not given.
    """
    started = time.perf_counter()
    if question.gpu is None and question.set:
        raise KernelcastError("`set` changes one GPU: give it with `gpu`")
    gpu = resolve_gpu(question.gpu, question.set) if question.gpu is not None else None
    conditions, table, output = question.conditions, question.table, question.output
    if output is not None:
        check_target(table, output)
    with open_table(table) as source:
        columns = source.columns(*ROTATIONS)
        results, bad = predict_columns(columns, gpu, conditions)
        if gpu is not None and "gpu" in source.types:  # what was forecast, not what the table had
            results["gpu"] = np.full(source.count, gpu.id, dtype=object)
        if bad.messages and not question.skip_bad:
            raise KernelcastError(f"{table}: {bad.text()} (`skip_bad` leaves their results empty)")
        if output is not None:
            source.write(results, output)
        else:
            _show(source, columns, results, json)
    _summarise(source, question, bad, time.perf_counter() - started, json)


def _show(source: TableFile, columns: dict[str, Any], results: dict[str, Any], json: bool) -> None:
    if json:
        for index, row in enumerate(source.json_rows(results)):
            print(",\n" if index else "[\n", row, sep="", end="")
        print("\n]" if source.count else "[]")
        return
    from kernelcast.app.report.kernel import print_calls

    print_calls(columns, results, PREVIEW_ROWS)


def _summarise(source: TableFile, question: KernelsQuestion, bad: BadRows, seconds: float, json: bool) -> None:
    """A warning for bad rows, and the summary."""
    output = question.output
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
        print(to_json(summary))
        return
    written = f" -> {output}" if output is not None else ""
    rate = f"{seconds:.2f} s, {source.count / seconds:,.0f} rows/s"
    print(f"kernelcast: {source.count:,} rows, {len(bad.messages):,} bad, {rate}{written}", file=sys.stderr)
