"""compare: a model on many GPUs, each at its best; served or trained."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from kernelcast.app.cli.commands import add_command, print_result
from kernelcast.app.questions.compare import (
    CompareQuestion,
    CompareTrainingQuestion,
    GpusAndPrices,
    ServedModel,
    TrainedModel,
)
from kernelcast.app.questions.parameters import argument, option
from kernelcast.app.questions.shared import Json, Plot, model_names
from kernelcast.errors import NOT_MET, KernelcastError

Model = Annotated[
    str,
    argument("MODEL", "a name of `kernelcast models` or config.json; to train, FILE.py:name", values=model_names),
]
Batch = Annotated[int | None, option(help="requests of one static batch; of training: samples of a step")]
Training = Annotated[bool, option(help="a training step, traced once (needs PyTorch); see Training step")]


def register(app: typer.Typer) -> None:
    add_command(
        app, compare,
        "kernelcast compare llama-3.3-70b --gpus h100_sxm,h200_sxm,b200_sxm --tpot 50ms --ttft 1s",
        "kernelcast compare llama-3.1-8b --gpus h100_sxm --batch 8 --what-if dram_bytes_per_s*1.5 --sensitivity",
        "kernelcast compare --training llama-3.2-1b --gpus h100_sxm,h200_sxm --batch 4 --seq 512 --tokens 1e12",
    )  # fmt: skip


def compare(
    model: Model, gpus: GpusAndPrices, served: ServedModel, trained: TrainedModel, batch: Batch = None,
    training: Training = False, plot: Plot = None, json: Json = False,
) -> None:  # fmt: skip
    """Every GPU at its best way to run a model (layout, batch, format), in order: latency, throughput, dollars and
    joules, whether it fits, what binds and how sure that is.

    Exit code: 0 where one meets the limits, 3 where none does or the model fits on none, 2 where the input is wrong."""
    if gpus.gpus is None:
        raise KernelcastError("which GPUs? give `gpus`, as in h100_sxm,h200_sxm, or all")
    if training:
        served.refuse(asdict(served), "`training` does not serve")
        from kernelcast.app.report import compare_training as report

        trained_by = CompareTrainingQuestion(model=model, batch=batch or 1, **asdict(gpus), **asdict(trained))
        result: Any = trained_by.answer()
        if plot:
            report.write_plot(result, plot)
        print_result(result, json, report.fields, report.print_training, gpus.price_kind)
        return
    trained.refuse(("dtype",), "a row each format is asked for by `formats`, as in bf16,fp8; `dtype` is of `training`")
    trained.refuse(asdict(trained), "these are of `training`")
    from kernelcast.app.report.compare import fields, print_comparison, write_plot

    question = CompareQuestion(model=model, batch=batch, **asdict(gpus), **asdict(served))
    result = question.answer()
    gains = question.gains(result)
    if plot:
        write_plot(result, gains, plot)
    print_result(result, json, fields, print_comparison, gains, gpus.price_kind)
    if not any(row.meets for row in result.rows):
        raise typer.Exit(NOT_MET)
