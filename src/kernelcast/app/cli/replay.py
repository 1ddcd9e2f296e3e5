"""replay: a server's own benchmark beside the simulation of the same load, and what it teaches of the server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernelcast.app.cli.commands import Command, with_examples
from kernelcast.app.cli.option_groups import takes
from kernelcast.app.cli.options import Json
from kernelcast.app.cli.progress import progress_bar
from kernelcast.app.questions.service import ServiceChoice, chosen_service
from kernelcast.errors import KernelcastError
from kernelcast.files import check_target

if TYPE_CHECKING:
    from kernelcast.serving.calibrate import CalibratedServer, CalibrationRequests
    from kernelcast.serving.metrics import BenchResult
    from kernelcast.serving.replay import Replay
    from kernelcast.serving.service import Service
    from kernelcast.serving.step_times import StepTimeTables

_MAKE = "kernelcast simulate llama-3.1-8b --gpu h100_sxm --request-rate 8 --num-prompts 200 --requests-out served.csv"
_NUMBERS = ("tp", "pp", "dp", "max_num_seqs", "max_num_batched_tokens")  # that a file may tell of its server
_STACKS = {"vllm": "vllm", "sglang": "sglang", "tensorrt": "trtllm", "trtllm": "trtllm"}  # how backends' names begin


def register(app: typer.Typer) -> None:
    examples = (
        _MAKE,
        "kernelcast replay served.csv --model llama-3.1-8b --gpu h100_sxm",
        "kernelcast replay served.csv --model llama-3.1-8b --gpu h100_sxm --calibrate-on 100 -o server.json",
    )
    app.command("replay", cls=with_examples(Command, *examples))(takes(service=ServiceChoice)(replay_file))


def replay_file(
    ctx: typer.Context,
    bench: Annotated[
        Path,
        typer.Argument(
            metavar="BENCH",
            help="results of `vllm bench serve`, SGLang's bench_serving, inference-perf; or a table of served requests",
        ),
    ],
    service: ServiceChoice,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="a name of `kernelcast models`; default: the file's")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="fit what the server takes beyond forecasts to the benchmark")
    ] = False,
    calibrate_on: Annotated[
        str | None,
        typer.Option("--calibrate-on", metavar="N|stage:N", help="fit to the first N requests or a stage only"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.json", help="what was fitted, for --server")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="distributions, measured and predicted")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="of a load that has to be made again")] = 0,
    intervals: Annotated[
        bool, typer.Option("--intervals/--no-intervals", help="run both ends of the doubt too")
    ] = True,
    as_json: Json = False,
) -> None:
    """A server's own benchmark beside the simulation of the same load: how far forecasts are off here.

    With --calibrate, what the server takes beyond forecasts is fitted to it; `simulate` takes the file by --server.
    """
    from kernelcast.serving.bench import read_bench
    from kernelcast.serving.calibrate import calibration_requests
    from kernelcast.serving.replay import replay
    from kernelcast.serving.step_times import step_time_tables

    fitting = calibrate or calibrate_on is not None
    _check_targets(bench, output, plot, fitting)
    found = read_bench(bench, seed=seed)
    part = calibration_requests(found, calibrate_on) if fitting else None
    name, choice, taken = from_file(found, model, service, given_options(ctx))
    place, tables = chosen_service(choice, name, found.load), step_time_tables(choice.conditions)
    parts = _split(part) if part and calibrate_on and not calibrate_on.startswith("stage") else ()
    before = replay(found, place, tables, seed=seed, intervals=intervals, parts=parts)
    fitted, after = None, None
    if part:
        fitted = _fitted(found, place, part, tables, seed)
        after = replay(found, fitted.service, tables, seed=seed, intervals=intervals, parts=parts)
    shown = replace(after or before, assumed=(*taken, *before.assumed))
    _tell(shown, before if fitted else None, fitted, output, plot, as_json)


def _check_targets(bench: Path, output: Path | None, plot: Path | None, fitting: bool) -> None:
    if output is not None and not fitting:
        raise KernelcastError("-o takes what was fitted: give --calibrate too")
    for target in filter(None, (output, plot)):
        check_target(bench, target, table=False)


def given_options(ctx: typer.Context) -> set[str]:
    """Options that were given, not left to their defaults."""
    return {name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") != "DEFAULT"}


def _split(part: CalibrationRequests) -> tuple[tuple[str, Any], ...]:
    if part.rows.all():
        return ()
    return (f"{part.name}, which were fitted", part.rows), (f"the other {int((~part.rows).sum()):,}", ~part.rows)


def _fitted(
    bench: BenchResult, service: Service, part: CalibrationRequests, tables: StepTimeTables, seed: int
) -> CalibratedServer:
    from kernelcast.serving.calibrate import calibrate

    with progress_bar(transient=True) as task:
        return calibrate(bench, service, part, tables, seed=seed, told=task("fitting"))


def from_file(bench: BenchResult, model: str | None, choice: ServiceChoice,
              given: set[str]) -> tuple[str, ServiceChoice, list[str]]:  # fmt: skip
    """The model, and the options with what the file says in place of those that were not given; what was assumed."""
    server, told = bench.server, []
    words: dict[str, Any] = {}
    for name in _NUMBERS:
        value = server.get(name)
        if name not in given and isinstance(value, int) and value > 0:
            words[name] = value
    if choice.gpu is None and isinstance(server.get("gpu"), str):
        words["gpu"] = server["gpu"]
    if choice.kv_dtype is None and str(server.get("kv_cache_dtype", "auto")).startswith("fp8"):
        words["kv_dtype"] = "fp8"
    if "stack" not in given:
        words["stack"], sure = _stack(bench)
        if not sure:
            told.append(f"the file does not say what served it: {words['stack']} (--stack)")
    said = [f"{name} {words[name]}" for name in _NUMBERS if name in words]
    name = model or _model(bench)
    said = [*([] if model else [name]), *said]
    if said:
        told.insert(0, f"as the file says: {', '.join(said)}")
    chosen = replace(choice, **words)
    unknown = [name for name in ("max_num_seqs", "max_num_batched_tokens") if getattr(chosen, name) is None]
    if unknown:
        told.append(f"the engine's defaults for {' and '.join(unknown)}: give the server's own where it has others")
    return name, chosen, told


def _stack(bench: BenchResult) -> tuple[str, bool]:
    """What served, and whether the file says it."""
    for word in (str(bench.server.get("backend", "")), bench.kind):
        for begins, name in _STACKS.items():
            if word.startswith(begins):
                return name, True
    return "vllm", False


def _model(bench: BenchResult) -> str:
    """The model that the file names: as it stands, by its tokenizer, or by the last part of a path."""
    from kernelcast import models

    names = [str(bench.server[word]) for word in ("model", "tokenizer") if bench.server.get(word)]
    for name in [*names, *(name.rstrip("/").rpartition("/")[2] for name in names if name.startswith(("/", ".", "~")))]:
        try:
            models.model(name)
        except KernelcastError:
            continue
        return name
    told = f"calls its model {names[0]!r}, which is not known" if names else "does not name its model"
    raise KernelcastError(f"{bench.path} {told}: give --model, as in --model llama-3.1-8b")


def _tell(found: Replay, before: Replay | None, fitted: CalibratedServer | None, output: Path | None, plot: Path | None,
          as_json: bool) -> None:  # fmt: skip
    from kernelcast.app.report.json import to_json
    from kernelcast.app.report.replay import fields, print_replay, write_plot
    from kernelcast.serving.service import write_overheads

    told = fields(found, before, fitted)
    if plot is not None:
        write_plot(found, plot, before)
    if fitted and output is not None:
        about = {name: told[name] for name in ("model", "gpu", "layout", "precision")} | told["calibration"]
        del about["terms"]  # which stand beside it
        write_overheads(output, fitted.stack, {**about, "bench": found.bench.path.name})
    if as_json:
        typer.echo(to_json(told))
    else:
        print_replay(found, before, fitted)
