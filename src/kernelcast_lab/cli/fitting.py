"""fit and evaluate: commands for those who make predictors. They need PyTorch (the extra ``torch``)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kernelcast.cli.commands import Command, with_examples
from kernelcast.cli.options import Json
from kernelcast.errors import KernelcastError, unknown

Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="folder of measured tables; default: the variable KERNELCAST_DATA"),
]


# Measured tables in small, so that the examples run as they stand.
_MAKE = (
    "mkdir -p pipeweave/dataset",
    'awk \'BEGIN {print "M,N,K,avg_duration,hardware"; for (i = 1; i <= 300; i++) '
    'print i * 8 ",4096,4096," 9 + i / 8 ",NVIDIA H100"}\' > pipeweave/dataset/gemm_fp8_test.csv',
    "kernelcast data import pipeweave pipeweave -o measured --replace",
)


def register(app: typer.Typer) -> None:
    fitting = "kernelcast fit --data measured -o weights --family gemm --epochs 2"
    app.command("fit", cls=with_examples(Command, *_MAKE, fitting))(fit)
    scoring = "kernelcast evaluate --data measured -o accuracy --split shapes --predictor roofline"
    app.command("evaluate", cls=with_examples(Command, *_MAKE, scoring))(evaluate)


def _needs_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise KernelcastError("this needs PyTorch: pip install 'kernelcast[torch]'") from None


def fit(
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="folder for the weights")],
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", metavar="DIR", help="measured tables; may be repeated; default: KERNELCAST_DATA"),
    ] = None,
    family: Annotated[list[str] | None, typer.Option("--family", help="only this family; may be repeated")] = None,
    rows: Annotated[int, typer.Option("--rows", min=0, help="rows of each family, 0: all")] = 0,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="passes over the rows")] = 40,
    seed: Annotated[int, typer.Option("--seed", help="the same seed, rows and machine give the same weights")] = 0,
    as_json: Json = False,
) -> None:
    """Fit the learned efficiency on measured tables. An interrupted run goes on where it stopped."""
    _needs_torch()
    from dataclasses import replace

    from kernelcast_lab.fit.families import FAMILIES, fitting_columns
    from kernelcast_lab.fit.fit import Settings, fit_family, save, save_about

    chosen = tuple(family or FAMILIES)
    for name in chosen:
        if name not in FAMILIES:
            raise unknown("family", name, FAMILIES)
    default = Settings()
    settings = replace(default, rows=rows, seed=seed, main=replace(default.main, epochs=epochs))
    abouts: dict[str, Any] = {}
    for name in chosen:
        if (out / f"{name}.safetensors").exists():
            typer.echo(f"kernelcast: {name} is in {out} already; remove it to fit again", err=True)
            continue
        columns = fitting_columns(data or None, name)
        if not len(columns["op"]) and not family:
            typer.echo(f"kernelcast: {name}: no measured call, left out", err=True)
            continue
        start = time.monotonic()
        with _Bar() as bar:
            weights = fit_family(columns, name, settings, bar.report, out / "partial")
        path = save(weights, out)
        abouts[name] = {"rows": weights.about["rows"], "seconds": round(time.monotonic() - start, 1), "file": str(path)}
        typer.echo(f"kernelcast: {name}: {weights.about['rows']:,} rows -> {path}", err=True)
    save_about(out, f"{time.strftime('%Y%m%d')}-{seed}", abouts)
    if as_json:
        typer.echo(json.dumps(abouts))


class _Bar:
    """A progress bar on stderr: which network, how far, its loss, time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("loss {task.fields[loss]:.4f}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )

    def __enter__(self) -> _Bar:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def report(self, name: str) -> Any:
        task = self.bar.add_task(name, total=None, loss=0.0)

        def progress(done: int, total: int, loss: float) -> None:
            self.bar.update(task, completed=done, total=total, loss=loss)

        return progress


def evaluate(
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="folder for scores, report and plots")],
    data: Data = None,
    split: Annotated[
        list[str] | None,
        typer.Option("--split", help="shapes, gpu, generation, stack; default: all, and the sources' own"),
    ] = None,
    predictor: Annotated[list[str] | None, typer.Option("--predictor", help="only this one; may be repeated")] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="rows of each fit")] = 200_000,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    workers: Annotated[int, typer.Option("--workers", min=1, help="processes")] = 1,
    as_json: Json = False,
) -> None:
    """Score the predictors on rows that they never saw. Writes scores.json, accuracy.md and plots; can be resumed."""
    _needs_torch()
    from dataclasses import asdict

    from kernelcast_lab.evaluate.report import write_report
    from kernelcast_lab.evaluate.run import PREDICTORS, evaluate_tables

    chosen = tuple(predictor or PREDICTORS)
    found = evaluate_tables(
        data, out, splits=tuple(split or ()), predictors=chosen, rows=rows, seed=seed, workers=workers,
        say=lambda text: typer.echo(f"kernelcast: {text}", err=True),
    )  # fmt: skip
    written = write_report(found, out)
    typer.echo(f"kernelcast: {len(found)} scores -> {written}", err=True)
    if as_json:
        typer.echo(json.dumps([asdict(score) for score in found]))
