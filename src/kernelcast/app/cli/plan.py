"""plan: which GPUs, how many, and how to run them, for a load and its latency goals."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernelcast.app.cli.commands import Command, with_examples
from kernelcast.app.cli.option_groups import takes
from kernelcast.app.cli.options import Json
from kernelcast.app.cli.progress import progress_bar
from kernelcast.app.questions.plan import PlanQuestion

if TYPE_CHECKING:
    from kernelcast.search.plan.plan import Plan


def register(app: typer.Typer) -> None:
    examples = (
        "kernelcast plan llama-3.1-8b --ttft-p99 500ms --tpot-p99 30ms --request-rate 20 --input-len 1024 "
        "--output-len 256",
        "kernelcast plan llama-3.1-70b --tpot-p99 25ms --request-rate 8 --gpus h100_sxm,h200_sxm --max-gpus 16 "
        "--stack vllm,sglang --price h100_sxm=2.5",
    )
    app.command("plan", cls=with_examples(Command, *examples))(takes(question=PlanQuestion)(plan))


def plan(
    question: PlanQuestion,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="cost against latency")] = None,
    as_json: Json = False,
) -> None:
    """The cheapest GPUs, and how to run a model on them, that keep latency goals under a load: how surely, what more
    money buys, what breaks first when load grows, and the command that starts it."""
    from kernelcast import models

    with progress_bar(transient=True) if sys.stderr.isatty() else nullcontext() as task:  # a file gets a blank line
        found = question.answer(task("engines") if task else None)
    _tell(found, models.hub_name(question.model), question.unpriced, plot, as_json)
    if not found.complete:
        raise typer.Exit(130)


def _tell(found: Plan, hub_name: str, unpriced: list[str], plot: Path | None, as_json: bool) -> None:
    from kernelcast.app.report.plan import fields, print_plan, write_plot

    if plot is not None:
        write_plot(found, plot)
    if as_json:
        typer.echo(json.dumps(fields(found, hub_name, unpriced)))
    else:
        print_plan(found, hub_name, unpriced)
