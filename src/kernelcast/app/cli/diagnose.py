"""diagnose: where a measured run loses time, and what to try."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kernelcast.app.cli.commands import Command, with_examples
from kernelcast.app.cli.options import Cache, CalibrationFile, Changes, Json, PredictorName, WeightsFolder
from kernelcast.app.questions.shared import chosen_conditions, chosen_gpu
from kernelcast.errors import KernelcastError, unknown


def register(app: typer.Typer) -> None:
    examples = (
        "kernelcast diagnose validation/profiles/llama_8b_4_layers_prefill.json.gz --top 10",
        "kernelcast diagnose validation/profiles/ncu_metrics.csv --gpu h200_sxm --json",
        "kernelcast diagnose measured.parquet --gpu h200_sxm --plot roofline.png",
    )
    app.command("diagnose", cls=with_examples(Command, *examples))(diagnose)


def diagnose(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="a torch.profiler trace (.json, .json.gz), a CSV of ncu, or a table of calls with measured_us",
        ),
    ],
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="ID", help="GPU that it ran on; default: the one that the file names"),
    ] = None,
    top: Annotated[int, typer.Option("--top", help="calls to show")] = 20,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="FORMAT", help="that the run's products should be in; default: most of them"),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="a roofline with the kernels on it")
    ] = None,
    changes: Changes = None,
    cache: Cache = "model",
    predictor: PredictorName = "learned",
    calibration: CalibrationFile = None,
    weights: WeightsFolder = None,
    as_json: Json = False,
) -> None:
    """Which kernels of a measured run could be faster, by how much, why, and what to try."""
    from kernelcast.app.report.diagnose import fields, print_diagnosis
    from kernelcast.diagnose.diagnose import diagnose as run
    from kernelcast.diagnose.metrics import WIDTH_BITS
    from kernelcast.diagnose.read import read_measured

    if top < 1:
        raise KernelcastError(f"--top must be 1 or more, not {top}")
    if dtype is not None and dtype not in WIDTH_BITS:
        raise unknown("dtype", dtype, WIDTH_BITS)
    conditions = chosen_conditions(None, cache, predictor, calibration, weights)
    named = chosen_gpu(gpu, changes) if gpu is not None else None
    profile, chip = read_measured(file, named)
    if gpu is None and changes:
        chip = chosen_gpu(chip.id, changes)
    found = run(profile, chip, conditions, run_dtype=dtype)
    if plot:  # first, as it may lack Matplotlib
        from kernelcast.app.report.roofline import write_roofline

        write_roofline(found, plot)
    if as_json:
        typer.echo(json.dumps(fields(found)))
        return
    print_diagnosis(found, file.name, top)
