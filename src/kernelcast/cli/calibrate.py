"""``kernelcast calibrate``: measurements of one GPU to a small file that every prediction takes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kernelcast.cli.commands import Command, with_examples
from kernelcast.cli.options import Cache, Json, PredictorName, chosen_conditions
from kernelcast.efficiency import Calibration
from kernelcast.errors import KernelcastError
from kernelcast.files import check_target
from kernelcast.report import json as as_json

# Measurements in small, so that the example runs as it stands.
_MAKE = (
    'awk \'BEGIN {print "op,m,n,k,dtype,latency_us"; for (i = 1; i <= 40; i++) '
    'print "gemm," i * 64 ",4096,4096,bf16," 9 + i * 2.6}\' > measured.csv',
)


def register(app: typer.Typer) -> None:
    examples = (
        *_MAKE,
        "kernelcast calibrate measured.csv --gpu h200_sxm -o my_h200.safetensors",
        "kernelcast kernel gemm --m 512 --n 4096 --k 4096 --gpu h200_sxm \\\n    --calibration my_h200.safetensors",
    )
    app.command("calibrate", cls=with_examples(Command, *examples))(calibrate_file)


def calibrate_file(
    measured: Annotated[
        Path,
        typer.Argument(
            metavar="MEASURED", help="A .csv, .parquet or .jsonl file: op, its parameters, dtype, stack, latency_us."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the calibration.")],
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="ID", help="GPU that was measured; without it, the table's gpu column."),
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad rows out instead of stopping.")] = False,
    cache: Cache = "model",
    predictor: PredictorName = "learned",
    json: Json = False,
) -> None:
    """Learn from measurements of one GPU how its kernels differ from the forecast.

    Ten rows will do, hundreds are better: few rows correct little. The errors shown are of calls that the correction
    did not see (five-fold cross-validation).
    """
    from kernelcast.calibrate import calibrate, read_measured

    check_target(measured, output, table=False)
    conditions = chosen_conditions(None, cache, predictor)
    try:
        found, bad = calibrate(read_measured(measured), gpu, conditions, skip_bad=skip_bad)
    except KernelcastError as error:
        more = " (--skip-bad leaves them out)" if " bad row" in str(error) else ""
        raise KernelcastError(f"{measured}: {str(error).removeprefix(f'{measured}: ')}{more}") from None
    found.save(output)
    if bad.found:
        print("kernelcast: warning:", bad.text(), file=sys.stderr)
    if json:
        print(as_json.to_json(_fields(found, output, len(bad.found))))
        return
    _show(found)
    print(f"kernelcast: {found.rows:,} measured calls -> {output}; use it: --calibration {output}", file=sys.stderr)


def _fields(found: Calibration, output: Path, bad_rows: int) -> dict[str, object]:
    told = ("rows", "error_before", "error_after", "biases")
    families = {name: {key: getattr(family, key) for key in told} for name, family in found.families.items()}
    return {
        "gpu": found.gpu,
        "predictor": found.predictor,
        "rows": found.rows,
        "bad_rows": bad_rows,
        "families": families,
        "output": str(output),
    }


def _show(found: Calibration) -> None:
    from kernelcast.report.text import plain_table, show

    table = plain_table("family", "rows", "error before", "error after", right=("rows", "error before", "error after"))
    for name, family in found.families.items():
        table.add_row(name, f"{family.rows:,}", f"{family.error_before:.1f}%", f"{family.error_after:.1f}%")
    show(f"{found.gpu}, {found.predictor}: mean error of calls that the correction did not see\n", table)
