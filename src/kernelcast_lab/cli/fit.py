"""``kernelcast fit``: weights from measured tables. Needs PyTorch (the extra ``torch``)."""

from __future__ import annotations

import functools
import importlib.util
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kernelcast.cli.commands import Command, with_examples
from kernelcast.cli.options import Json
from kernelcast.cli.progress import Report, progress_bar
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


def needs_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise KernelcastError("this needs PyTorch: pip install 'kernelcast[torch]'")


def with_tables(folders: Sequence[Path] | None) -> list[Path]:
    """The folders, by argument or by KERNELCAST_DATA; one without measured tables is refused."""
    from kernelcast_lab.data.shared import root_path, tables

    found = [root_path(folder) for folder in folders] if folders else [root_path()]
    for folder in found:
        if not tables(folder):
            raise KernelcastError(f"{folder} has no SOURCE/TABLE.parquet files; `kernelcast data import` makes such")
    return found


def fit(
    out: Out,
    data: Folders = None,
    family: Families = [],  # noqa: B006  Typer copies it
    rows: Annotated[int, typer.Option("--rows", min=0, help="rows of each family, 0: all")] = 0,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="passes over the rows")] = 40,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Fit the learned efficiency on measured tables. An interrupted run goes on where it stopped.

    What it writes answers with --weights DIR of kernel, kernels, infer, trace and diagnose.
    """
    needs_torch()
    from kernelcast_lab.fit.families import FAMILIES, fitting_columns
    from kernelcast_lab.fit.fit import Settings, fit_family, save, save_about

    refuse_unknown("family", family, FAMILIES)
    folders = with_tables(data)
    default = Settings()
    settings = replace(default, rows=rows, seed=seed, main=replace(default.main, epochs=epochs))
    abouts: dict[str, Any] = {}
    for name in family or FAMILIES:
        if (out / f"{name}.safetensors").exists():
            typer.echo(f"kernelcast: {name} is in {out} already; remove it to fit again", err=True)
            continue
        columns = fitting_columns(folders, name)
        if not len(columns["op"]) and not family:
            typer.echo(f"kernelcast: {name}: no measured call, left out", err=True)
            continue
        start = time.monotonic()
        with progress_bar(transient=True) as bar:
            weights = fit_family(columns, name, settings, functools.partial(_report, bar), out / "partial")
        path = save(weights, out)
        abouts[name] = {"rows": weights.about["rows"], "seconds": round(time.monotonic() - start, 1), "file": str(path)}
        typer.echo(f"kernelcast: {name}: {weights.about['rows']:,} rows -> {path}", err=True)
    save_about(out, f"{time.strftime('%Y%m%d')}-{seed}", abouts)
    if as_json:
        typer.echo(json.dumps(abouts))


def _report(bar: Callable[[str], Report], name: str) -> Callable[[int, int, float], None]:
    """A network's line of the progress bar, with its loss."""
    report = bar(name)
    return lambda done, total, loss: report(done, total, f"loss {loss:.4f}")
