"""calibrate: measurements of one GPU to a small file that every prediction takes."""

from __future__ import annotations

import sys

import typer

from kernelcast.app.cli.commands import add_command, given_options, progress_bar
from kernelcast.app.questions.calibrate import CalibrateQuestion
from kernelcast.app.questions.shared import Json
from kernelcast.files import check_target

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
    add_command(
        app, calibrate,
        *_MAKE,
        "kernelcast calibrate measured.csv --gpu h200_sxm -o my_h200.safetensors",
        "kernelcast kernel gemm --m 512 --n 4096 --k 4096 --gpu h200_sxm \\\n    --calibration my_h200.safetensors",
        *_RUN,
        "kernelcast calibrate run.json measured.csv --gpu h200_sxm -o both.safetensors",
        "kernelcast infer llama-3.1-8b --gpu h200_sxm --batch 32 --calibration both.safetensors",
    )  # fmt: skip


def calibrate(ctx: typer.Context, question: CalibrateQuestion, json: Json = False) -> None:
    """Learn from measurements of one GPU how its kernels differ from the forecast.

    Of single calls ten rows will do, hundreds are better: few rows correct little. The errors shown are of held-out
    calls (20-fold cross-validation). Whole runs scale the configurations of kernels that they ran, by their share of
    the time; options of a deployment and an engine are those of a benchmark's server.
    """
    from kernelcast.app.report.calibrate import fields, print_calibration
    from kernelcast.app.report.json import to_json
    from kernelcast.collect.calibrate.run_files import read_input

    output = question.output
    for path in question.measured:
        check_target(path, output, table=False)
    inputs = [read_input(path) for path in question.measured]
    with progress_bar(transient=True) as task:
        calibration, bad, seen = question.answer(inputs, given_options(ctx), task("tracing"))
    calibration.save(output)
    left_out = [f"left out: {file.path}: {what}" for file in inputs for what in file.left_out]
    for message in ([bad.text()] if bad is not None and bad.messages else []) + left_out:
        print("kernelcast: warning:", message, file=sys.stderr)
    if json:
        print(to_json({**fields(calibration, seen, len(bad.messages) if bad else 0), "output": str(output)}))
        return
    print_calibration(calibration, seen)
    parts = [f"{calibration.rows:,} measured calls"] if calibration.families else []
    parts += [f"{seen.runs:,} measured run{'s' if seen.runs > 1 else ''}"] if seen else []
    print(f"kernelcast: {' and '.join(parts)} -> {output}; use it: --calibration {output}", file=sys.stderr)
