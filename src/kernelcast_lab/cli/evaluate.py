"""``kernelcast evaluate``: errors of forecasts, in percent of the measured time."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernelcast.app.cli.commands import Command, CommandGroup, Json, PredictorName, WeightsFolder, with_examples
from kernelcast.app.questions.shared import resolve_conditions
from kernelcast.app.report import json as as_json
from kernelcast.errors import KernelcastError, refuse_unknown
from kernelcast_lab.cli.fit import MAKE, Families, Folders, Out, Seed, needs_torch, say, with_tables
from kernelcast_lab.cli.public import public

if TYPE_CHECKING:
    from kernelcast_lab.evaluate.transfer import TransferSettings

Figures = Mapping[str, Sequence[Mapping[str, Any]]]  # lines by the name of their table
Names = list[str] | None
Data = Annotated[
    Path | None, typer.Option("--data", metavar="DIR", help="folder of measured tables; default: KERNELCAST_DATA")
]
Only = Annotated[Names, typer.Option("--only", metavar="TEXT", help="cases whose id contains this; may be repeated")]
_PARQUET = (
    "python -c \"import duckdb; [duckdb.sql(f\\\"COPY (FROM '{name}.csv') TO 'measured/SOURCE/{name}.parquet'\\\")"
    ' for name in NAMES]"'
)
_EXAMPLES = {
    "tables": (*MAKE, "kernelcast evaluate tables --data measured -o accuracy --predictor roofline"),
    "served": (
        "mkdir -p measured/pipeweave",
        "printf 'workload,request,num_prefill_tokens,output_tokens\\nshort,0,512,64\\n' > workloads.csv",
        "printf 'gpu,serving,model,workload,tp,pp,batch_size,input_len,output_len,total_prefill_tokens,"
        "total_decode_tokens,prefill_latency,median_decode_latency,total_latency\\n"
        "NVIDIA H100,sglang,Qwen2.5-14B,short,1,1,1,512,64,512,64,0.03,0.012,0.79\\n' > e2e_real.csv",
        _PARQUET.replace("SOURCE", "pipeweave").replace("NAMES", "('workloads', 'e2e_real')"),
        "kernelcast evaluate served --data measured",
    ),
    "load": (
        "mkdir -p measured/vllm_h100",
        "printf 'id,model,workload,gpu,tp,precision,max_num_seqs,max_num_batched_tokens,kv_blocks,block_tokens,"
        "system_prompts,users_per_prompt,system_prompt_tokens,question_tokens,output_tokens,stage,rates,durations_s,"
        "measured_ttft_mean_ms,measured_ttft_p90_ms,measured_itl_mean_ms,measured_e2e_mean_ms,measured_e2e_p90_ms\\n"
        "1,Qwen/Qwen2.5-7B-Instruct,chat,h100_sxm,1,bf16,128,2048,65352,16,10,5,150,600,251,-1,[6.0],[20],"
        "25,30,7,1750,1800\\n' > served.csv",
        _PARQUET.replace("SOURCE", "vllm_h100").replace("NAMES", "['served']"),
        "kernelcast evaluate load --data measured --source vllm_h100",
    ),
    "public": (
        "mkdir -p measured/public",
        "printf 'token,model_dim,inter_dim,expert,topk,q_type,us\\n64,4096,1536,128,8,QuantType.No,800\\n' >"
        " aiter_amd_moe.csv",
        _PARQUET.replace("SOURCE", "public").replace("NAMES", "['aiter_amd_moe']"),
        "kernelcast evaluate public --data measured --source aiter_moe",
    ),
    "energy": ("kernelcast evaluate energy --only gpt2-xl/l48/decode",),
    "traced": ("kernelcast evaluate traced --only bert-large/l24/prefill",),
    "neusight": (
        "mkdir -p measured/neusight",
        "printf 'model,mode,seq,batch,gpu_name,measured_ms,measured_fw_ms,measured_bw_ms,neusight_ms,fused,parallelism,"
        "num_gpus,vendor\\nbert_large,train,128,8,Tesla T4,900,300,600,990,false,none,1,nvidia\\n' > e2e.csv",
        _PARQUET.replace("SOURCE", "neusight").replace("NAMES", "['e2e']"),
        "kernelcast evaluate neusight --data measured",
    ),
    "tuning": ("kernelcast evaluate tuning --only qwen3-30b-a3b@6",),
    "tuning-gpus": (
        "mkdir -p pipeweave/pipetuning_test/moe_dse",
        "for gpu in A40 L40; do awk 'BEGIN {print \"M,E,topk,H,N,BLOCK_SIZE_M,BLOCK_SIZE_N,BLOCK_SIZE_K,GROUP_SIZE_M,"
        'num_warps,num_stages,avg_duration"; for (m = 1; m <= 2048; m *= 2) for (c = 0; c < 3; c++) '
        'print m ",8,2,2048,768," (m < 99 ? 16 : 64) ",64,64,1,4," 2 + c "," 90 + m / 9 + c / 9}\''
        " > pipeweave/pipetuning_test/moe_dse/moe_dse_${gpu}_all.csv; done",
        "kernelcast data import pipeweave pipeweave -o measured --replace",
        "kernelcast evaluate tuning-gpus --data measured --gpu l40",
    ),
    "words": (*MAKE, "kernelcast evaluate words --data measured --family gemm"),
    "learning-curve": (
        *MAKE,
        "kernelcast evaluate learning-curve --data measured -o curve --gpu h20 --family gemm --counts 0,30 --epochs 2",
    ),
    "transfer": (
        *MAKE,
        "kernelcast evaluate transfer --data measured -o left --source pipeweave --family gemm --left-out h20",
        "kernelcast evaluate transfer --report left",
    ),
}


class Evaluations(CommandGroup):
    """Options without the name of an evaluation are those of ``tables``."""

    noun = "evaluation"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        bare = args and args[0].startswith("-") and args[0] != "--help"
        return super().parse_args(ctx, ["tables", *args] if bare else args)


def register(app: typer.Typer) -> None:
    group = typer.Typer(cls=with_examples(Evaluations, *_EXAMPLES["tables"]), invoke_without_command=True)
    group.callback()(_evaluate)
    for command in (tables, public, served, load, unspecified, traced, energy, neusight, tuning, tuning_gpus,
                    learning_curve, transfer):  # fmt: skip
        name = "words" if command is unspecified else command.__name__.replace("_", "-")
        group.command(name, cls=with_examples(Command, *_EXAMPLES[name]))(command)
    app.add_typer(group, name="evaluate")


def _evaluate(ctx: typer.Context) -> None:
    """Errors of forecasts, in percent of the measured time.

    Options without the name of an evaluation are those of 'tables': kernelcast evaluate -o DIR.
    """
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def tables(
    out: Out,
    data: Folders = None,
    split: Annotated[
        Names, typer.Option("--split", help="shapes, gpu, generation, stack; default: all, and the sources' own")
    ] = None,
    task: Annotated[
        Names,
        typer.Option(
            "--task",
            help="GEMM bf16+fp8, attention prefill, attention decode, fused MoE; only where named: latent, DSA,"
            " compressed or block-sparse layer prefill or decode, parts of sparse layers, linear attention, DeepEP,"
            " NVLink all-to-all, wide experts",
        ),
    ] = None,
    predictor: Annotated[Names, typer.Option("--predictor", help="only this one; may be repeated")] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="rows of each fit")] = 200_000,
    seed: Seed = 0,
    workers: Annotated[int, typer.Option("--workers", min=1, help="processes")] = 1,
    json: Json = False,
) -> None:
    """Score the predictors on held-out measured kernels.

    Writes scores.json, accuracy.md and plots; an interrupted run goes on where it stopped.
    """
    needs_torch()
    from kernelcast_lab.evaluate.report import means, write_report
    from kernelcast_lab.evaluate.run import PREDICTORS, Evaluation, evaluate
    from kernelcast_lab.fit.families import family_columns

    evaluation = Evaluation(tuple(split or ()), tuple(task or ()), tuple(predictor or PREDICTORS), rows=rows, seed=seed)
    folders = with_tables(data)
    read = functools.cache(lambda family: family_columns(folders, family))
    scores = evaluate(read, evaluation, out / "scores.json", say, workers)
    say(f"{len(scores)} scores -> {write_report(scores, out)}")
    if json:
        print(as_json.to_json([asdict(score) for score in scores]))
    else:
        print_figures(means(scores))


def served(
    data: Data = None,
    source: Annotated[
        Names, typer.Option("--source", help="pipeweave (static batches), aiconfigurator (closed loops); default: both")
    ] = None,
    json: Json = False,
) -> None:
    """Whole models in serving engines: PipeWeave's static batches, AIConfigurator's measured deployments."""
    from kernelcast_lab.data.shared import tables as tables_in
    from kernelcast_lab.evaluate import served as batches
    from kernelcast_lab.evaluate import serving_points as points

    known = {"pipeweave": ("pipeweave/e2e_real", batches.figures), "aiconfigurator": ("aiconfigurator/e2e_silicon",
             points.figures)}  # fmt: skip
    refuse_unknown("source of served models", source or (), known)
    result: dict[str, Any] = {}
    for name, (table, figures) in known.items():
        if name in (source or ()) or (not source and table in tables_in(data)):
            result |= figures(data)
    if not result:
        raise KernelcastError(f"none of {', '.join(table for table, _ in known.values())} is in these tables")
    print_figures(result, json)


def load(
    data: Data = None,
    source: Annotated[Names, typer.Option("--source", help="vllm_h100, llmservingsim; default: all")] = None,
    json: Json = False,
) -> None:
    """Servers under load, simulated: runs of vLLM, requests one by one."""
    from kernelcast_lab.evaluate.under_load import SOURCES, figures

    refuse_unknown("source of servers under load", source or (), SOURCES)
    print_figures(figures(data, source or SOURCES), json)


def unspecified(
    data: Folders = None,
    family: Families = [],  # noqa: B006  Typer copies it
    without: Annotated[
        str | None, typer.Option("--without", metavar="GPU", help="on this GPU, left out of a fit")
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="rows of such a fit")] = 150_000,
    weights: WeightsFolder = None,
    as_json: Json = False,
) -> None:
    """Errors of calls without backend, page_size or stack, on held-out shapes."""
    from kernelcast_lab.evaluate.unspecified import FAMILIES, gpu_out, left_out
    from kernelcast_lab.fit.families import fitting_columns
    from kernelcast_lab.fit.recipes import recipe

    refuse_unknown("family", family, FAMILIES)
    folders = with_tables(data)
    conditions = resolve_conditions(None, "model", weights=weights)
    lines = []
    for name in family or FAMILIES:
        columns = fitting_columns(folders, name, recipe(name).data)
        lines += gpu_out(columns, name, without, rows) if without else left_out(columns, name, conditions)
    if not lines:
        raise KernelcastError("no measured call of a held-out shape in these tables")
    print_figures({"words": lines}, as_json)


def traced(
    measured: Annotated[
        Path | None, typer.Option("--measured", metavar="FILE", help="measured models; default: this project's own")
    ] = None,
    only: Only = None,
    predictor: PredictorName = "learned",
    weights: WeightsFolder = None,
    json: Json = False,
) -> None:
    """Whole PyTorch models that this project measured, traced again: the sum of kernels, and the wall time."""
    needs_torch()
    from kernelcast_lab.evaluate.traced import MEASURED, chosen_cases, figures

    chosen = resolve_conditions(None, "model", predictor, weights=weights).predictor
    shown = ("case", "kernels_ms", "kernels_error", "wall_ms", "wall_error", "launch_bound", "told")
    print_figures(figures(chosen_cases(measured or MEASURED, only or ()), chosen), json, {"cases": shown})


def energy(only: Only = None, json: Json = False) -> None:
    """Joules of whole models' steps that this project measured on an H200, against forecasts."""
    needs_torch()
    from kernelcast_lab.evaluate.traced import ENERGY_MEASURED, energy_cases, energy_figures

    shown = ("case", "joules", "joules_error", "watts", "watts_error", "time_error", "inside")
    print_figures(energy_figures(energy_cases(ENERGY_MEASURED, only or ())), json, {"cases": shown})


def neusight(
    data: Data = None, predictor: PredictorName = "learned", weights: WeightsFolder = None, json: Json = False
) -> None:
    """Whole models as NeuSight measured them, beside NeuSight's own predictions."""
    needs_torch()
    from kernelcast_lab.data.neusight import model_cases
    from kernelcast_lab.evaluate.neusight import figures

    chosen = resolve_conditions(None, "model", predictor, weights=weights).predictor
    print_figures(figures(model_cases(data), chosen), json)


def tuning(
    sweeps: Annotated[
        Path | None, typer.Argument(metavar="[FILE.npz]", help="swept configs; default: this project's own")
    ] = None,
    only: Only = None,
    top: Annotated[int, typer.Option("--top", min=1, help="configs that are measured")] = 16,
    more: Annotated[int, typer.Option("--more", min=0, help="configs beyond them")] = 0,
    predictor: PredictorName = "learned",
    json: Json = False,
) -> None:
    """How good `kernelcast tune` is, against sweeps of all configs of held-out shapes.

    Regrets are shares of the best config's time; over_vllm and over_sglang: speed-ups over the engines' defaults.
    """
    from kernelcast_lab.evaluate.tuning import SWEEPS, chosen_sweeps, figures

    conditions = resolve_conditions(None, "model", predictor)
    result = figures(*chosen_sweeps(sweeps or SWEEPS, only or ()), top, more, conditions)
    shown = ("kernel", "shape", "spearman", "tuned", "tuned_us", "regret_finals", "over_vllm", "over_sglang")
    print_figures(result, json, {"shapes": shown, "kernels": ()})


def tuning_gpus(
    data: Folders = None,
    gpu: Annotated[Names, typer.Option("--gpu", metavar="ID", help="left out; default: each in turn")] = None,
    json: Json = False,
) -> None:
    """How well configs are ranked on a GPU that was left out of the fit, by PipeWeave's swept configs.

    1: every config that PipeWeave lists is ranked before those that it does not; 0: by chance.
    """
    needs_torch()
    from kernelcast_lab.evaluate.tuning_gpus import figures

    print_figures(figures(with_tables(data), gpu or (), say), json)


def learning_curve(
    out: Out,
    gpu: Annotated[list[str], typer.Option("--gpu", metavar="ID", help="left out of the fit; may be repeated")],
    family: Families,
    data: Folders = None,
    source: Annotated[str | None, typer.Option("--source", help="only its calls calibrate and test")] = None,
    by: Annotated[Names, typer.Option("--by", metavar="COLUMN", help="a curve for each op, dtype, …")] = None,
    counts: Annotated[str, typer.Option("--counts", metavar="INT,…", help="calls measured")] = "0,10,30,100,300,1000",
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="draws of the calls")] = 5,
    rows: Annotated[int, typer.Option("--rows", min=1, help="rows of the fit")] = 60_000,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="passes over them")] = 15,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """How fast `kernelcast calibrate` learns a GPU that the weights never saw: error against calls measured.

    Writes learning_curve.md, .json and .png.
    """
    needs_torch()
    from kernelcast.hardware import gpu as find_gpu
    from kernelcast_lab.evaluate import learning_curve as curves
    from kernelcast_lab.fit.families import family_columns
    from kernelcast_lab.fit.recipes import FAMILIES

    refuse_unknown("family", family, FAMILIES)
    gpu_ids = [find_gpu(name).id for name in gpu]
    if not all(text.isdecimal() for text in counts.split(",")):
        raise KernelcastError(f"--counts takes numbers such as 0,30,100, not {counts!r}")
    settings = curves.CurveSettings(tuple(map(int, counts.split(","))), repeats, rows=rows, epochs=epochs)
    folders = with_tables(data)
    points = []
    for name in family:
        columns = family_columns(folders, name)
        for gpu_id in gpu_ids:
            points += curves.learning_curve(
                columns, name, gpu_id, settings, source=source, by=by or (), seed=seed, say=say
            )
            say(f"{len(points)} points -> {curves.write_curves(points, out)}")
    result = {"points": [asdict(point) for point in points], "mean_error": curves.curve_lines(points)}
    print_figures(result, json, {"points": ()})


def transfer(
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", file_okay=False, help="folder of the pieces")
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="DIR", help="only report the pieces of a folder")
    ] = None,
    data: Folders = None,
    family: Families = [],  # noqa: B006  Typer copies it
    left_out: Annotated[
        Names,
        typer.Option(
            "--left-out",
            metavar="NAME",
            help="A100, L40S, Hopper, Blackwell, RTX Blackwell, or a GPU; may be repeated; "
            "default: these five, h200_sxm and gb300",
        ),
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="rows of each fit")] = 400_000,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="passes over them")] = 20,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="draws of the calls")] = 3,
    source: Annotated[str, typer.Option("--source", help="its calls calibrate and test")] = "aiconfigurator",
    weights: Annotated[
        Path | None, typer.Option("--weights", metavar="DIR", help="score these, which did not see the GPU; no fit")
    ] = None,
    seed: Seed = 0,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="processes; default: one a core")] = None,
    json: Json = False,
) -> None:
    """How well a held-out GPU is forecast: by its datasheet, with measured specs, and after calibration calls.

    A piece is a family and what is left out; those in the folder are not made again, so that a run may be interrupted,
    and machines may share the work. Writes transfer.md and transfer.png.
    """
    needs_torch()
    from kernelcast.app.report.text import show
    from kernelcast_lab.evaluate.transfer import TransferSettings
    from kernelcast_lab.evaluate.transfer_report import as_table, lines, read_pieces, write_transfer

    folder = report or out
    if folder is None or (report and out):
        raise KernelcastError("give -o DIR to make pieces, or --report DIR to read those that are there")
    if report is None:
        settings = TransferSettings(
            rows=rows, epochs=epochs, repeats=repeats, source=source, seed=seed, weights=weights,
            workers=workers or os.cpu_count() or 1,
        )  # fmt: skip
        _make_pieces(folder, data, family, left_out, settings)
    points = read_pieces(folder)
    say(f"{len(points)} points -> {write_transfer(points, folder)}")
    if json:
        print_figures({"mean_error": lines(points), "points": [asdict(point) for point in points]}, json)
    else:
        show(as_table(points))


def _make_pieces(
    folder: Path, data: Sequence[Path] | None, family: Names, left_out: Sequence[str] | None, settings: TransferSettings
) -> None:
    from kernelcast.hardware import gpu as find_gpu
    from kernelcast_lab.evaluate import transfer as transfers
    from kernelcast_lab.evaluate.splits import GENERATIONS
    from kernelcast_lab.fit.families import fitting_columns

    refuse_unknown("family", family or (), transfers.COLUMNS)
    names = [name if name in GENERATIONS else find_gpu(name).id for name in left_out or transfers.LEFT_OUT]
    if settings.weights is not None:
        resolve_conditions(None, "model", weights=settings.weights)  # refuses a folder that has none
    read = functools.partial(fitting_columns, with_tables(data))
    transfers.transfer(read, family or list(transfers.COLUMNS), names, settings, folder, say)


def print_figures(result: Figures, json: bool = False, shown: Mapping[str, Sequence[str]] | None = None) -> None:
    """As JSON, or a table each; ``shown``: the columns of a table that a terminal has room for."""
    if not any(result.values()):
        raise KernelcastError("no scores: no measured case matches")
    if json:
        print(as_json.to_json(result))
        return
    from kernelcast.app.report.text import plain_table, show

    for title, lines in result.items():
        known = dict.fromkeys(name for line in lines for name, value in line.items() if value is not None)
        names = (shown or {}).get(title, list(known))
        if not lines or not names:
            continue
        heads = {name: name.replace("_", "\n") for name in names}  # numbers are narrower than their names
        numbers = [heads[n] for n in names if any(isinstance(line.get(n), int | float) for line in lines)]
        table = plain_table(*heads.values(), right=numbers)
        for line in lines:
            table.add_row(*(_cell(line.get(name)) for name in names))
        show(title.replace("_", " "), table, "")


def _cell(value: Any) -> str:
    from kernelcast.app.report.text import digits

    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, float):
        return digits(value, 3) if math.isfinite(value) else "–"
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
