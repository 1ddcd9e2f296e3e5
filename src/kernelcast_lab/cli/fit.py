"""``kernelcast fit``: weights from measured tables. Needs PyTorch (the extra ``torch``)."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kernelcast.app.cli.commands import Command, Json, progress_bar, with_examples
from kernelcast.errors import KernelcastError, refuse_unknown

Folders = Annotated[
    list[Path] | None,
    typer.Option("--data", metavar="DIR", help="measured tables; may be repeated; default: KERNELCAST_DATA"),
]
Families = Annotated[list[str], typer.Option("--family", help="only this family; may be repeated")]
Seed = Annotated[int, typer.Option("--seed", help="the same seed, rows and machine give the same weights")]
Out = Annotated[Path, typer.Option("-o", "--out", metavar="DIR", file_okay=False, help="folder to write to")]
# Measured tables in small, so that the examples run as they stand.
MAKE = (
    "mkdir -p pipeweave/dataset",
    'awk \'BEGIN {print "M,N,K,avg_duration,hardware"; for (i = 1; i <= 600; i++) '
    'print i * 8 ",4096,4096," 9 + i / 8 (i % 2 ? ",NVIDIA H100" : ",NVIDIA H20")}\''
    " > pipeweave/dataset/gemm_fp8_test.csv",
    "kernelcast data import pipeweave pipeweave -o measured --replace",
)


def register(app: typer.Typer) -> None:
    examples = (
        "kernelcast fit --data measured -o weights --family gemm --epochs 2",
        "kernelcast kernel gemm --m 512 --n 4096 --k 4096 --dtype fp8_block --gpu h100_sxm --weights weights",
    )
    app.command("fit", cls=with_examples(Command, *MAKE, *examples))(fit)
    app.command("fit-power", cls=with_examples(Command))(fit_power)


def needs_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise KernelcastError("this needs PyTorch: pip install 'kernelcast[torch]'")


def with_tables(folders: Sequence[Path] | None) -> list[Path]:
    """The folders, by argument or by KERNELCAST_DATA; one without measured tables is refused."""
    from kernelcast_lab.data.shared import root_path, tables

    result = [root_path(folder) for folder in folders] if folders else [root_path()]
    for folder in result:
        if not tables(folder):
            raise KernelcastError(f"{folder} has no SOURCE/TABLE.parquet files; `kernelcast data import` makes such")
    return result


def fit(
    out: Out,
    data: Folders = None,
    family: Families = [],  # noqa: B006  Typer copies it
    recipe: Annotated[
        list[Path],
        typer.Option("--recipe", metavar="FILE", help="instead of a family's own; may be repeated; fits its family"),
    ] = [],  # noqa: B006
    rows: Annotated[int | None, typer.Option("--rows", min=0, help="rows of each family, 0: all")] = None,
    epochs: Annotated[int | None, typer.Option("--epochs", min=1, help="passes of main networks over the rows")] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="the same seed, rows and machine: the same weights")
    ] = None,
    version: Annotated[str | None, typer.Option("--version", help="of the weights; default: the day and seed")] = None,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="processes; default: one a core")] = None,
    as_json: Json = False,
) -> None:
    """Fit the learned efficiency on measured tables. An interrupted run goes on where it stopped.

    Each family by its recipe, with which the shipped weights were made; --rows, --epochs and --seed change it.
    Forecast with the result by --weights DIR of kernel, kernels, infer, trace and diagnose.
    """
    needs_torch()
    from kernelcast_lab.fit.evidence import repeated_columns
    from kernelcast_lab.fit.families import fitting_columns
    from kernelcast_lab.fit.fit import fit_family, save, save_about
    from kernelcast_lab.fit.recipes import FAMILIES, changed, recipes_of

    refuse_unknown("family", family, FAMILIES)
    folders = with_tables(data)
    named = version or f"{time.strftime('%Y%m%d')}-{seed or 0}"
    done: dict[str, Any] = {}
    for name, members in recipes_of(family, recipe).items():
        if (out / f"{name}.safetensors").exists():
            say(f"{name} is in {out} already; remove it to fit again")
            continue
        start = time.monotonic()
        columns = fitting_columns(folders, name, members.data)
        if not len(columns["op"]) and not (family or recipe):
            say(f"{name}: no measured call, left out")
            continue
        settings = changed(
            members.settings, epochs=epochs, rows=rows, seed=seed, workers=workers or os.cpu_count() or 1
        )
        with progress_bar(transient=True) as bar:
            again = repeated_columns(folders, name)
            weights = fit_family(columns, name, settings, bar, out / "partial", again)
        path = save(weights, out, named)
        save_about(out, named)
        done[name] = {"rows": weights.about["rows"], "seconds": round(time.monotonic() - start, 1), "file": str(path)}
        say(f"{name}: {weights.about['rows']:,} rows -> {path}")
    other = save_about(out, named)
    if other:
        say(f"warning: {', '.join(other)} in {out} are of other versions than {named}")
    if as_json:
        typer.echo(json.dumps(done))


def say(text: str) -> None:
    typer.echo(f"kernelcast: {text}", err=True)


def fit_power(
    table: Annotated[Path, typer.Argument(metavar="TABLE.parquet", help="of `kernelcast collect --power`")],
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE.toml", help="write the coefficients")] = None,
    as_json: Json = False,
) -> None:
    """Fit the power model of a GPU on measured joules, and print its errors on held-out calls."""
    from kernelcast_lab.fit import power

    rows = power.read_power(table)
    joules, watts = power.left_out(rows)
    lines = power.errors(rows, joules, watts)
    result = power.widened(power.fitted(rows), rows, joules, watts)
    held = power.inside_of_others(rows, joules, watts)
    if out is not None:
        power.write(result, out, power.notes(rows, table, lines, held))
    if as_json:
        typer.echo(json.dumps({"rows": len(joules), "errors": lines, "inside": held, "idle_w": result.idle_w,
                               "busy_w": result.busy_w, "joules": dict(result.joules)}))  # fmt: skip
        return
    typer.echo("mean error on left-out calls     joules    watts    rows")
    for line in lines:
        message = f"{100 * line['joules_error']:8.1f}% {100 * line['watts_error']:7.1f}% {line['rows']:7,}"
        typer.echo(f"{line['calls']:30}{message}")
    typer.echo(f"80% intervals hold {100 * held:.0f}% of calls that did not set them")
