"""plan: which GPUs, how many, and how to run them, for a load and its latency goals."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import typer

from kernelcast.app.cli.commands import add_command, print_result, progress_bar
from kernelcast.app.questions.plan import PlanQuestion
from kernelcast.app.questions.shared import Json, Plot
from kernelcast.errors import NOT_MET


def register(app: typer.Typer) -> None:
    add_command(
        app, plan,
        "kernelcast plan llama-3.1-8b --ttft-p99 500ms --tpot-p99 30ms --request-rate 20 --input-len 1024 "
        "--output-len 256",
        "kernelcast plan llama-3.1-70b --tpot-p99 25ms --request-rate 8 --gpus h100_sxm,h200_sxm --max-gpus 16 "
        "--stack vllm,sglang --price h100_sxm=2.5",
    )  # fmt: skip


def plan(question: PlanQuestion, plot: Plot = None, json: Json = False) -> None:
    """The cheapest GPUs, and how to run a model on them, that keep latency goals under a load: how surely, what more
    money buys, what breaks first when load grows, and the command that starts it.

    Exit code: 0 where a setting meets the goals, 3 where none does, 2 where the input is wrong."""
    from kernelcast import models

    with progress_bar(transient=True) if sys.stderr.isatty() else nullcontext() as task:  # a file gets a blank line
        result = question.answer(task("engines") if task else None)
    from kernelcast.app.report.plan import fields, print_plan, write_plot

    if plot is not None:
        write_plot(result, plot)
    print_result(result, json, fields, print_plan, models.hub_name(question.model), question.unpriced)
    if not result.complete:
        raise typer.Exit(130)
    if result.choice is None:
        raise typer.Exit(NOT_MET)
