"""simulate: what users of a served model see under load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernelcast.app.cli.commands import add_command, print_result, progress_bar
from kernelcast.app.questions.parameters import option
from kernelcast.app.questions.shared import Json, Plot
from kernelcast.app.questions.simulate import SimulateQuestion
from kernelcast.errors import NOT_MET, KernelcastError
from kernelcast.files import check_target

_SHOWN_FROM = 5000  # requests from which a bar shows how far a run is
_RUNS = {"likely": "simulating", "low": "fastest steps", "high": "slowest steps"}

RequestsFile = Annotated[Path | None, option(metavar="FILE", help="one row a request: .parquet, .csv, .jsonl")]
Timeline = Annotated[Path | None, option(metavar="FILE.json", help="steps and requests, for Perfetto")]
Window = Annotated[str | None, option(metavar="FROM:TO", help="seconds that --timeline shows (0:10)")]


def register(app: typer.Typer) -> None:
    add_command(
        app, simulate,
        "kernelcast simulate llama-3.1-8b --gpu h100_sxm --request-rate 8 --num-prompts 500 --input-len 1024 "
        "--output-len 256",
        "kernelcast simulate llama-3.1-70b --gpu h100_sxm --tp 4 --stack sglang --max-concurrency 64 --num-prompts 256 "
        "--goodput ttft:5000 --goodput tpot:60 --json",
    )  # fmt: skip


def simulate(
    question: SimulateQuestion, requests_out: RequestsFile = None, plot: Plot = None, timeline: Timeline = None,
    window: Window = None, json: Json = False,
) -> None:  # fmt: skip
    """What users of a served model see: time to first token and between tokens, under real arrivals, with the
    scheduler of vLLM, SGLang or TensorRT-LLM.

    Exit code: 0 where it holds the load and the goals are met (--goodput: by 90% of the requests), 3 where not or
    where the model does not fit in memory, 2 where the input is wrong."""
    seconds = _seconds(window)
    if requests_out is not None:
        check_target(question.trace or Path(), requests_out)
    with progress_bar(transient=True) as task:
        bars = {run: task(name) for run, name in _RUNS.items()}

        def report(run: str, done: int, requests: int) -> None:
            if requests >= _SHOWN_FROM and done % 64 == 0:
                bars[run](done, requests)

        result = question.answer(report)
    from kernelcast.app.report import simulate as shown
    from kernelcast.app.report.plot import write_timeline

    if requests_out is not None:
        shown.write_requests(result, requests_out)
    if plot is not None:
        shown.write_plot(result, plot)
    if timeline is not None:
        write_timeline(shown.window(result, *seconds), timeline)
    print_result(result, json, shown.fields, shown.print_simulation)
    if not result.complete:
        raise typer.Exit(130)
    if not result.meets:
        raise typer.Exit(NOT_MET)


def _seconds(window: str | None) -> tuple[float, float]:
    if window is None:
        return 0.0, 10.0
    start, colon, end = window.partition(":")
    try:
        seconds = float(start), float(end)
    except ValueError:
        colon = ""
    if not colon or not 0 <= seconds[0] < seconds[1]:
        raise KernelcastError(f"`window` takes FROM:TO in seconds, as in 5:10, not {window!r}")
    return seconds
