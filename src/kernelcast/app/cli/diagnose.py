"""diagnose: where a measured run loses time, and what to try."""

from __future__ import annotations

import typer

from kernelcast.app.cli.commands import add_command, print_result
from kernelcast.app.questions.measure import DiagnoseQuestion
from kernelcast.app.questions.shared import Json, Plot


def register(app: typer.Typer) -> None:
    add_command(
        app, diagnose,
        "kernelcast diagnose validation/profiles/llama_8b_4_layers_prefill.json.gz --top 10",
        "kernelcast diagnose validation/profiles/ncu_metrics.csv --gpu h200_sxm --json",
        "kernelcast diagnose measured.parquet --gpu h200_sxm --plot roofline.png",
    )  # fmt: skip


def diagnose(question: DiagnoseQuestion, plot: Plot = None, json: Json = False) -> None:
    """Which kernels of a measured run could be faster, by how much, why, and what to try."""
    result = question.answer()
    from kernelcast.app.report.diagnose import fields, print_diagnosis, write_roofline

    if plot:  # first, as it may lack Matplotlib
        write_roofline(result, plot)
    print_result(result, json, fields, lambda diagnosis: print_diagnosis(diagnosis, question.file.name, question.top))
