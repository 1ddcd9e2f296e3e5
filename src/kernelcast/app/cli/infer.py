"""infer: how fast a language model runs, what takes the time, and whether it fits."""

from __future__ import annotations

import typer

from kernelcast.app.cli.commands import add_command, print_result
from kernelcast.app.questions.infer import InferQuestion
from kernelcast.app.questions.shared import Json, Plot, TimelineFile
from kernelcast.errors import KernelcastError


def register(app: typer.Typer) -> None:
    add_command(
        app, infer,
        "kernelcast infer llama-3.1-8b --gpu h200_sxm --batch 8 --input-len 2048 --output-len 256",
        "kernelcast infer qwen3-30b-a3b --gpu h100_sxm --tp 2 --stack sglang --dtype fp8 --json",
        "kernelcast infer llama-3.1-8b --gpu h100_sxm --batch 64 --prefill-workers 2 --prefill-batch 4",
    )  # fmt: skip


def infer(question: InferQuestion, trace: TimelineFile = None, plot: Plot = None, json: Json = False) -> None:
    """How fast a language model runs on a GPU, what takes the time, and whether it fits: one static batch.

    Exit code: 0 where it fits, 3 where it does not fit in memory, 2 where the input is wrong."""
    from kernelcast.app.report.infer import fields, print_inference, write_plot
    from kernelcast.app.report.plot import write_timeline
    from kernelcast.inference.infer import Inference

    if question.disaggregated and (trace or plot):
        raise KernelcastError("`trace` and `plot` are of one batch: leave them out, or `prefill_workers`")
    result = question.answer()
    if isinstance(result, Inference):
        if plot:  # first, as it may lack Matplotlib
            write_plot(result, plot)
        if trace:
            write_timeline(result.timeline(), trace)
    print_result(result, json, fields, print_inference)
