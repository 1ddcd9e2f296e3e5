"""train: a training step of a transformer on many GPUs, and what a run costs."""

from __future__ import annotations

from contextlib import nullcontext

import typer

from kernelcast.app.cli.commands import add_command, print_result, progress_bar
from kernelcast.app.questions.shared import Json
from kernelcast.app.questions.train import TrainQuestion
from kernelcast.errors import NOT_MET


def register(app: typer.Typer) -> None:
    add_command(
        app, train,
        "kernelcast train llama-3.1-405b --gpus 1024xH100 --tp 8 --pp 8 --cp 2 --virtual-stages 8 --global-batch 512 "
        "--seq 8192 --precision fp8 --tp-overlap",
        "kernelcast train qwen3-30b-a3b --gpus 8xB200 --ep 8 --micro-batch 4 --global-batch 512 --precision mxfp8",
        "kernelcast train llama-3.1-8b --gpus 8xH200 --zero 3 --recompute full --seq 8192 --tokens 1e11 --json",
    )  # fmt: skip


def train(question: TrainQuestion, json: Json = False) -> None:
    """How long a training step of a transformer takes on many GPUs, where the time goes, whether it fits, and what a
    run of so many tokens costs.

    Names of Megatron-LM, Megatron-Bridge and torchtitan are taken too. Exit code: 0 where it fits, 3 where it does not
    fit in memory, 2 where the input is wrong."""
    from kernelcast.app.report.train import fields, print_run

    with progress_bar(transient=True) if question.search else nullcontext() as task:
        run = question.answer(task("layouts") if task else None)
    print_result(run, json, fields, print_run)
    if not run.step.fits:
        raise typer.Exit(NOT_MET)
