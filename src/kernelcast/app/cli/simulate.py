"""simulate: what users of a served model feel under load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernelcast.app.cli.commands import Command, with_examples
from kernelcast.app.cli.option_groups import takes
from kernelcast.app.cli.options import Json
from kernelcast.app.cli.progress import progress_bar
from kernelcast.app.questions.simulate import SimulateQuestion
from kernelcast.errors import KernelcastError
from kernelcast.files import check_target

if TYPE_CHECKING:
    from kernelcast.serving.simulate import Simulation

_SHOWN_FROM = 5000  # requests from which a bar tells how far a run is


def register(app: typer.Typer) -> None:
    examples = (
        "kernelcast simulate llama-3.1-8b --gpu h100_sxm --request-rate 8 --num-prompts 500 --input-len 1024 "
        "--output-len 256",
        "kernelcast simulate llama-3.1-70b --gpu h100_sxm --tp 4 --stack sglang --max-concurrency 64 --num-prompts 256 "
        "--goodput ttft:500 --goodput tpot:30 --json",
    )
    app.command("simulate", cls=with_examples(Command, *examples))(takes(question=SimulateQuestion)(simulate))


def simulate(
    question: SimulateQuestion,
    requests_out: Annotated[
        Path | None, typer.Option("--requests-out", metavar="FILE", help="one row a request: .parquet, .csv, .jsonl")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="picture over time")] = None,
    timeline: Annotated[
        Path | None, typer.Option("--timeline", metavar="FILE.json", help="steps and requests, for Perfetto")
    ] = None,
    window: Annotated[
        str | None, typer.Option("--window", metavar="FROM:TO", help="seconds that --timeline shows (0:10)")
    ] = None,
    as_json: Json = False,
) -> None:
    """What users of a served model feel: time to first token and between tokens, under real arrivals, with the
    scheduler of vLLM, SGLang or TensorRT-LLM."""
    shown = _window(window)
    if requests_out is not None:
        check_target(question.trace or Path(), requests_out)
    with progress_bar(transient=True) as task:
        bars = {name: task(told) for name, told in
                (("likely", "simulating"), ("low", "fastest steps"), ("high", "slowest steps"))}  # fmt: skip

        def told(variant: str, done: int, requests: int) -> None:
            if requests >= _SHOWN_FROM and done % 64 == 0:
                bars[variant](done, requests)

        found = question.answer(told)
    _tell(found, requests_out, plot, timeline, shown, as_json)
    if not found.complete:
        raise typer.Exit(130)


def _tell(found: Simulation, requests_out: Path | None, plot: Path | None, timeline: Path | None,
          shown: tuple[float, float], as_json: bool) -> None:  # fmt: skip
    from kernelcast.app.report.chrome import write_timeline
    from kernelcast.app.report.simulate import fields, print_simulation, window, write_plot, write_requests

    if requests_out is not None:
        write_requests(found, requests_out)
    if plot is not None:
        write_plot(found, plot)
    if timeline is not None:
        write_timeline(window(found, *shown), timeline)
    if as_json:
        typer.echo(json.dumps(fields(found)))
    else:
        print_simulation(found)


def _window(text: str | None) -> tuple[float, float]:
    if text is None:
        return 0.0, 10.0
    start, colon, end = text.partition(":")
    try:
        found = float(start), float(end)
    except ValueError:
        colon = ""
    if not colon or not 0 <= found[0] < found[1]:
        raise KernelcastError(f"--window takes FROM:TO in seconds, as in 5:10, not {text!r}")
    return found
