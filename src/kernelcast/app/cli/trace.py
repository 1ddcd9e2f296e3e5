"""trace: any PyTorch model, inference or a training step, without a GPU."""

from __future__ import annotations

import typer

from kernelcast.app.cli.commands import add_command, print_result
from kernelcast.app.questions.shared import Json, TimelineFile
from kernelcast.app.questions.trace import TraceQuestion
from kernelcast.errors import NOT_MET


def register(app: typer.Typer) -> None:
    add_command(
        app, trace_model,
        "kernelcast trace llama-3.1-8b --mode training --batch 4 --seq 512 --gpu h200_sxm",
        "kernelcast trace llama-3.1-8b --mode training --batch 1 --seq 4096 --gpu h100_sxm --dp 8 --zero 3 --json",
        "kernelcast trace model.py:build --mode training --batch 32 --dtype fp32 --gpu a100_sxm",
        name="trace",
    )  # fmt: skip


def trace_model(question: TraceQuestion, trace: TimelineFile = None, json: Json = False) -> None:
    """How long a step of any PyTorch model takes, what takes the time, and whether it fits.

    Exit code: 0 where it fits, 3 where it does not fit in memory, 2 where the input is wrong."""
    result = question.answer()
    from kernelcast.app.report.plot import write_timeline
    from kernelcast.app.report.trace import fields, print_step

    if trace:
        write_timeline(result.timeline(), trace)
    print_result(result, json, fields, print_step)
    if not result.memory.fits:
        raise typer.Exit(NOT_MET)
