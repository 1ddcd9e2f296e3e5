"""validate: replay the cases that the project measured itself."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from kernelcast.app.cli.commands import Command, Json, progress_bar, with_examples
from kernelcast.app.report.text import plain_table, show
from kernelcast.errors import KernelcastError
from kernelcast.forecast.conditions import Conditions


def register(app: typer.Typer) -> None:
    app.command("validate", cls=with_examples(Command, "kernelcast validate validation"))(validate)


def validate(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="folder of cases")] = Path("validation"),
    predictor: Annotated[str, typer.Option("--predictor", help="learned, generic, or a baseline")] = "learned",
    seen: Annotated[bool, typer.Option("--seen", help="also score shapes that the weights were fitted on")] = False,
    models: Annotated[bool, typer.Option("--models", help="whole models instead of kernels; needs PyTorch")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="TEXT", help="models whose case id contains this; may be repeated"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Forecast every call that was measured for this project, and print the errors."""
    from kernelcast_lab.validate import overall, validate

    if models:
        _models(folder, predictor, only or (), as_json)
        return
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


def _models(folder: Path, predictor: str, only: Sequence[str], as_json: bool) -> None:
    """Whole models: the sum of kernels, and the wall time with the host that ships and with the machine's own."""
    if importlib.util.find_spec("torch") is None:
        raise KernelcastError("replaying models needs PyTorch (no GPU): pip install 'kernelcast[torch]'")
    from kernelcast.training.step import STEP
    from kernelcast_lab.validate.models import FOLDER, replay, summary

    conditions = replace(STEP, predictor=predictor)
    with progress_bar() as start:
        progress = start("tracing")
        result = replay(folder / FOLDER, conditions, only, lambda done, total: progress(done, total, ""))
    if not result:
        wanted = f" whose case holds {' or '.join(only)}" if only else ""
        raise KernelcastError(f"{folder / FOLDER} has no measured model{wanted}")
    whole = summary(result)
    if as_json:
        typer.echo(json.dumps({"cases": [each.line for each in result], "summary": whole}))
        return
    several = len(whole["machines"]) > 1
    numbers = ("kernels ms", "error", "wall ms", "wall error", "own host")
    named = ("machine",) if several else ()
    table = plain_table("case", *named, *numbers, "inside", "launch-bound", right=numbers)
    table.columns[0].no_wrap = True
    for each in result:
        bound = ("yes" if each.launch_bound else "no") + ("" if each.launch_bound_right else ", forecast wrong")
        table.add_row(
            each.measured.case.id, *((each.machine,) if several else ()), f"{each.measured.kernel_ms:.2f}",
            f"{each.kernel_error:+.1f}", f"{each.measured.wall_ms:.2f}", f"{each.wall_error:+.1f}",
            f"{each.machine_host_error:+.1f}", "yes" if each.inside else "no", bound,
        )  # fmt: skip
    show(table)
    show(f"\n{whole['cases']} cases of {whole['models']} models: kernels {whole['kernels_error']:.1f}% error, at most "
         f"{whole['worst_kernels_error']:.0f}%")  # fmt: skip
    for name, of in whole["machines"].items():
        show(f"{name}: wall {of['wall_error']:.1f}% error, {of['wall_error_own_host']:.1f}% with its own host; "
             f"{of['inside']:.0%} inside the 80% interval; "
             f"launch-bound forecast right {of['launch_bound_told_right']:.0%}")  # fmt: skip
    show("own host: as collect --host measured it, or at the speed that the other half of the models had there")
