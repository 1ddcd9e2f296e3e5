"""infer: how fast a language model runs, what takes the time, and whether it fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernelcast.app.cli.commands import Command, with_examples
from kernelcast.app.cli.option_groups import takes
from kernelcast.app.cli.options import Json, TimelineFile
from kernelcast.app.questions.pools import PoolsQuestion
from kernelcast.errors import KernelcastError

if TYPE_CHECKING:
    from kernelcast.inference.infer import Inference


def register(app: typer.Typer) -> None:
    examples = (
        "kernelcast infer llama-3.1-8b --gpu h200_sxm --batch 8 --input-len 2048 --output-len 256",
        "kernelcast infer qwen3-30b-a3b --gpu h100_sxm --tp 2 --stack sglang --dtype fp8 --json",
        "kernelcast infer llama-3.1-8b --gpu h100_sxm --batch 64 --prefill-workers 2 --prefill-batch 4",
    )
    app.command("infer", cls=with_examples(Command, *examples))(takes(question=PoolsQuestion)(infer))
    app.command("models", cls=with_examples(Command, "kernelcast models --json"))(models)


def infer(
    question: PoolsQuestion,
    trace: TimelineFile = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="picture of the breakdown")] = None,
    as_json: Json = False,
) -> None:
    """How fast a language model runs on a GPU, what takes the time, and whether it fits: one static batch."""
    if not question.apart:
        _told(question.answer(), trace, plot, as_json)
        return
    if trace or plot:
        raise KernelcastError("--trace and --plot are of one batch: leave them out, or --prefill-workers")
    from kernelcast.app.report.pools import fields, print_pools

    found = question.answer_apart()
    if as_json:
        typer.echo(json.dumps(fields(found)))
    else:
        print_pools(found)


def _told(result: Inference, trace: Path | None, plot: Path | None, as_json: bool) -> None:
    from kernelcast.app.report.chrome import write_timeline
    from kernelcast.app.report.infer import fields, print_inference, write_plot

    if plot:  # first, as it may lack Matplotlib
        write_plot(result, plot)
    if trace:
        write_timeline(result.timeline(), trace)
    if as_json:
        typer.echo(json.dumps(fields(result)))
    else:
        print_inference(result)


def models(as_json: Json = False) -> None:
    """List the bundled models."""
    from kernelcast.app.report.text import plain_table, show
    from kernelcast.models import model, model_ids

    found = {name: model(name) for name in model_ids()}
    if as_json:
        told = {
            name: {"parameters": m.parameters.total, "active_parameters": m.active_parameters.total,
                   "layers": m.layer_count, "hidden": m.hidden, "vocab": m.vocab, "max_context": m.max_context}
            for name, m in found.items()
        }  # fmt: skip
        typer.echo(json.dumps(told))
        return
    table = plain_table("model", "weights", "active", "layers", "hidden", "context",
                        right=("weights", "active", "layers", "hidden", "context"))  # fmt: skip
    for name, m in found.items():
        active = m.active_parameters.total
        table.add_row(name, f"{m.parameters.total / 1e9:.2f} B", f"{active / 1e9:.2f} B", str(m.layer_count),
                      f"{m.hidden:,}", f"{m.max_context:,}")  # fmt: skip
    show(table)
