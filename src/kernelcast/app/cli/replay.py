"""replay: a server's benchmark beside the simulation of the same load, or an engine's steps beside their forecasts; and
what they teach of the server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kernelcast.app.cli.commands import add_command, given_options, progress_bar
from kernelcast.app.questions.replay import ReplayQuestion, engine_service, with_server
from kernelcast.app.questions.shared import Json, Plot
from kernelcast.errors import KernelcastError
from kernelcast.files import check_target

if TYPE_CHECKING:
    from kernelcast.serving.calibrate import CalibrationRequests


def register(app: typer.Typer) -> None:
    add_command(
        app, replay,
        "kernelcast simulate llama-3.1-8b --gpu h100_sxm --request-rate 8 --num-prompts 200 --requests-out served.csv",
        "kernelcast replay served.csv --model llama-3.1-8b --gpu h100_sxm",
        "kernelcast replay served.csv --model llama-3.1-8b --gpu h100_sxm --calibrate-on 100 -o server.json",
    )  # fmt: skip


def replay(ctx: typer.Context, question: ReplayQuestion, plot: Plot = None, json: Json = False) -> None:
    """A server's benchmark beside the simulation of the same load: how far forecasts are off here.

    Steps that `kernelcast collect --engine` timed are shown each beside its forecast. With --calibrate, the server's
    overheads beyond the forecast are fitted; `simulate` takes the file by --server.
    """
    from kernelcast.serving.bench import read_bench
    from kernelcast.serving.calibrate import calibrate, calibration_requests
    from kernelcast.serving.replay import replay
    from kernelcast.serving.step_table import UNFINISHED, is_steps
    from kernelcast.serving.step_times import step_time_tables

    fitting = question.calibrate or question.calibrate_on is not None
    if question.output is not None and not fitting:
        raise KernelcastError("-o takes what was fitted: give `calibrate` too")
    for target in filter(None, (question.output, plot)):
        check_target(question.bench, target, table=False)
    if is_steps(question.bench) or question.bench.name.endswith(UNFINISHED):
        _replay_steps(ctx, question, plot, json)
        return
    bench, seed = read_bench(question.bench, seed=question.seed), question.seed
    part = calibration_requests(bench, question.calibrate_on) if fitting else None
    name, server, assumed = with_server(bench, question.model, question, given_options(ctx))
    service, tables = server.service(name, bench.load), step_time_tables(server.conditions)
    parts = _split(part) if part and question.calibrate_on and not question.calibrate_on.startswith("stage") else ()
    before = replay(bench, service, tables, seed=seed, intervals=question.intervals, parts=parts)
    fitted, after = None, None
    if part:
        with progress_bar(transient=True) as task:
            fitted = calibrate(bench, service, part, tables, seed=seed, progress=task("fitting"))
        after = replay(bench, fitted.service, tables, seed=seed, intervals=question.intervals, parts=parts)
    result = replace(after or before, assumed=(*assumed, *before.assumed))
    from kernelcast.app.report.json import to_json
    from kernelcast.app.report.replay import fields, print_replay, write_plot
    from kernelcast.serving.service import write_overheads

    earlier = before if fitted else None
    figures = fields(result, earlier, fitted)
    if plot is not None:
        write_plot(result, plot, earlier)
    if fitted and question.output is not None:
        about = {name: figures[name] for name in ("model", "gpu", "layout", "precision")} | figures["calibration"]
        del about["terms"]  # which stand beside it
        write_overheads(question.output, fitted.stack, {**about, "bench": bench.path.name})
    if json:
        typer.echo(to_json(figures))
    else:
        print_replay(result, earlier, fitted)


def _replay_steps(ctx: typer.Context, question: ReplayQuestion, plot: Path | None, json: bool) -> None:
    """Steps that were timed one by one inside an engine."""
    from kernelcast.app.report.json import to_json
    from kernelcast.app.report.replay_steps import calibration_fields, fields, print_steps, write_plot
    from kernelcast.diagnose.step_kernels import step_kernels
    from kernelcast.serving.service import write_overheads
    from kernelcast.serving.step_calibration import calibrate_steps
    from kernelcast.serving.step_replay import StepForecasts, replay_steps
    from kernelcast.serving.step_table import read_steps
    from kernelcast.serving.step_times import step_time_tables

    question.refuse(("calibrate_on",), "steps are fitted together, and scored on those left out")
    table = read_steps(question.bench)
    service, assumed = engine_service(table, question, question.model, given_options(ctx))
    forecasts = StepForecasts(service.pool, table, step_time_tables(question.conditions))
    result, before, fitted = replay_steps(service, forecasts, tuple(assumed)), None, None
    if question.calibrate:
        with progress_bar(transient=True) as task:
            fitted = calibrate_steps(forecasts, task("fitting"))
        before, result = result, result.calibrated(forecasts, fitted.stack, fitted.host)
    kernels = step_kernels(table.profiled, forecasts.pool.deployment, question.conditions)
    figures = fields(result, kernels, before, fitted)
    if plot is not None:
        write_plot(result, plot)
    if fitted and question.output is not None:
        about = {name: figures[name] for name in ("model", "gpu", "layout", "precision")} | calibration_fields(fitted)
        del about["terms"]  # which stand beside it
        about |= {"steps_file": table.path.name, "release": table.engine["release"], "cuda_graphs": table.graph_mode}
        write_overheads(question.output, fitted.stack, about, fitted.host)
    if json:
        typer.echo(to_json(figures))
    else:
        print_steps(result, kernels, before, fitted)


def _split(part: CalibrationRequests) -> tuple[tuple[str, Any], ...]:
    if part.rows.all():
        return ()
    return (f"{part.name}, which were fitted", part.rows), (f"the other {int((~part.rows).sum()):,}", ~part.rows)
