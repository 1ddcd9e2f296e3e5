"""``kernelcast calibrate``: measurements of one GPU to a small file that every prediction takes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from kernelcast.app.cli.commands import Command, with_examples
from kernelcast.app.cli.option_groups import takes
from kernelcast.app.cli.options import Cache, Json
from kernelcast.app.cli.replay import given_options
from kernelcast.app.questions.service import ServiceChoice
from kernelcast.app.questions.shared import chosen_conditions, chosen_gpu
from kernelcast.errors import KernelcastError
from kernelcast.files import check_target

if TYPE_CHECKING:
    from kernelcast.collect.calibrate.run_files import CalibrationInput
    from kernelcast.collect.calibrate.scales import RunErrors
    from kernelcast.forecast import Calibration
    from kernelcast.forecast.conditions import Conditions
    from kernelcast.forecast.table import BadRows
    from kernelcast.hardware import Gpu

# Measurements in small, so that the example runs as it stands.
_MAKE = (
    'awk \'BEGIN {print "op,m,n,k,dtype,latency_us"; for (i = 1; i <= 40; i++) '
    'print "gemm," i * 64 ",4096,4096,bf16," 9 + i * 2.6}\' > measured.csv',
)
_RUN = (
    'echo \'{"model": "llama-3.1-8b", "stack": "vllm", "batch": 8, "input_len": 2048, "output_len": 256, '
    '"ttft_s": 0.40, "tpot_s": 0.0071}\' > run.json',
)


def register(app: typer.Typer) -> None:
    examples = (
        *_MAKE,
        "kernelcast calibrate measured.csv --gpu h200_sxm -o my_h200.safetensors",
        "kernelcast kernel gemm --m 512 --n 4096 --k 4096 --gpu h200_sxm \\\n    --calibration my_h200.safetensors",
        *_RUN,
        "kernelcast calibrate run.json measured.csv --gpu h200_sxm -o both.safetensors",
        "kernelcast infer llama-3.1-8b --gpu h200_sxm --batch 32 --calibration both.safetensors",
    )
    app.command("calibrate", cls=with_examples(Command, *examples))(takes(service=ServiceChoice)(calibrate_file))


def calibrate_file(
    ctx: typer.Context,
    measured: Annotated[
        list[Path],
        typer.Argument(
            metavar="MEASURED...",
            help="tables of calls (.csv, .parquet, .jsonl: op, its parameters, dtype, stack, latency_us); runs (.json, "
            ".jsonl: the words of infer or trace, and ttft_s, tpot_s, …); results of servers' benchmarks",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the calibration.")],
    service: ServiceChoice,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="that a benchmark served; default: the file's")
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad rows out instead of stopping.")] = False,
    cache: Cache = "model",
    json: Json = False,
) -> None:
    """Learn from measurements of one GPU how its kernels differ from the forecast.

    Of single calls ten rows will do, hundreds are better: few rows correct little. The errors shown are of calls that
    the correction did not see (twenty parts, each told by the others). Whole runs scale the kinds of kernels that they
    ran, by how much of their time those took; options of a deployment and an engine are those of a benchmark's server.
    """
    from kernelcast.app.cli.calibrate_shown import fields, print_calibration
    from kernelcast.app.report.json import to_json
    from kernelcast.collect.calibrate.run_files import read_input

    for path in measured:
        check_target(path, output, table=False)
    if service.calibration is not None:
        raise KernelcastError("a calibration is made of a predictor without one")
    inputs = [read_input(path) for path in measured]
    conditions = chosen_conditions(None, cache, service.predictor, None, service.weights)
    found, bad, seen = _made(inputs, service, model, given_options(ctx), conditions, skip_bad)
    found.save(output)
    left_out = [f"{one.path}: {what}" for one in inputs for what in one.left_out]
    for said in ([bad.text()] if bad is not None and bad.messages else []) + [f"left out: {text}" for text in left_out]:
        print("kernelcast: warning:", said, file=sys.stderr)
    if json:
        print(to_json({**fields(found, seen, len(bad.messages) if bad else 0), "output": str(output)}))
        return
    print_calibration(found, seen)
    parts = [f"{found.rows:,} measured calls"] if found.families else []
    parts += [f"{seen.runs:,} measured run{'s' if seen.runs > 1 else ''}"] if seen else []
    print(f"kernelcast: {' and '.join(parts)} -> {output}; use it: --calibration {output}", file=sys.stderr)


def _made(
    inputs: list[CalibrationInput], service: ServiceChoice, model: str | None, given: set[str], conditions: Conditions,
    skip_bad: bool,
) -> tuple[Calibration, BadRows | None, RunErrors | None]:  # fmt: skip
    """Single calls first; runs scale what these leave."""
    from kernelcast.app.cli.calibrate_runs import forecast, measured_gpu
    from kernelcast.collect.calibrate.scales import calibrate_runs, empty_calibration
    from kernelcast.serving.bench import read_bench

    tables = [one.path for one in inputs if one.kind == "calls"]
    benches = [read_bench(one.path) for one in inputs if one.kind == "bench"]
    wanted = chosen_gpu(service.gpu, service.set) if service.gpu is not None else None
    chip = measured_gpu(inputs, benches, wanted)
    found, bad = _of_calls(tables, chip, conditions, skip_bad) if tables else (None, None)
    if len(tables) == len(inputs):
        assert found is not None
        return found, bad, None
    if chip is None:
        if found is None:
            raise KernelcastError("which GPU was measured? give it with --gpu, or as 'gpu' of a run")
        chip = chosen_gpu(found.gpu, None)
    before = found or empty_calibration(chip, conditions)
    # in a run L2 is as a model leaves it, however single calls were measured
    as_run = replace(chosen_conditions(None, "model", service.predictor, None, service.weights), calibration=found)
    runs = forecast(inputs, benches, chip, as_run, service, model, given)
    scaled, seen = calibrate_runs(before, runs)
    return scaled, bad, seen


def _of_calls(
    tables: list[Path], chip: Gpu | None, conditions: Conditions, skip_bad: bool
) -> tuple[Calibration, BadRows]:
    from kernelcast.collect.calibrate import calibrate, read_measured

    named = str(tables[0]) if len(tables) == 1 else f"{len(tables)} tables"
    try:
        return calibrate(_joined([read_measured(path) for path in tables]), chip, conditions, skip_bad=skip_bad)
    except KernelcastError as error:
        more = " (--skip-bad leaves them out)" if " bad row" in str(error) else ""
        raise KernelcastError(f"{named}: {str(error).removeprefix(f'{named}: ')}{more}") from None


def _joined(tables: list[dict[str, Any]]) -> dict[str, Any]:
    """One table after another; a cell of a column that a table lacks is empty."""
    if len(tables) == 1:
        return tables[0]
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for table in tables for name in table):
        cells = [table.get(name, np.full(len(table["op"]), None, dtype=object)) for table in tables]
        found[name] = np.concatenate([_plain(column) for column in cells])
    return found


def _plain(column: Any) -> Any:
    """Cells as objects; what is masked or no number is empty."""
    values = np.array(column, dtype=object)
    values[[cell is None or cell is np.ma.masked or cell != cell for cell in column]] = None
    return values
