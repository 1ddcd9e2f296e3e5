"""validate: replay the cases that the project measured itself."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kernelcast.cli.commands import Command, with_examples
from kernelcast.cli.options import Json
from kernelcast.predict import Conditions
from kernelcast.report.text import plain_table, show


def register(app: typer.Typer) -> None:
    app.command("validate", cls=with_examples(Command, "kernelcast validate validation"))(validate)


def validate(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="folder of cases")] = Path("validation"),
    predictor: Annotated[str, typer.Option("--predictor", help="learned, generic, or a baseline")] = "learned",
    seen: Annotated[bool, typer.Option("--seen", help="score shapes too that the weights were fitted on")] = False,
    as_json: Json = False,
) -> None:
    """Predict every call that was measured for this project, and print how far off that is."""
    from kernelcast.validate import overall, validate

    lines = validate(folder, Conditions(predictor=predictor), seen=seen)
    if as_json:
        typer.echo(json.dumps([asdict(line) for line in lines]))
        return
    numbers = ("calls", "mean", "median", "p90", "bias", "inside", "noise")
    table = plain_table("gpu", "family", "dtype", *numbers, right=numbers)
    for line in lines:
        table.add_row(
            line.gpu, line.family, line.dtype, f"{line.rows:,}", f"{line.mean:.1f}", f"{line.median:.1f}",
            f"{line.p90:.1f}", f"{line.bias:+.1f}", f"{line.coverage:.0%}",
            "" if line.noise is None else f"{line.noise:.1f}",
        )  # fmt: skip
    show(table)
    which = "all calls" if seen else "calls of shapes that no fit saw"
    show(f"\nmean error {overall(lines):.1f}% over {sum(line.rows for line in lines):,} {which}")
    show("errors in % of the measured time; inside: the 80% interval; noise: two measurements of one call")
