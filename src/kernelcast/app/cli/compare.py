"""compare: a model on many kinds of GPU, each at its best; served or trained."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kernelcast.app.cli.commands import Command, with_examples
from kernelcast.app.cli.option_groups import takes
from kernelcast.app.cli.options import Json
from kernelcast.app.questions.compare import CompareQuestion, GpuChoice, ServedChoice, TrainedChoice, refuse_others
from kernelcast.errors import KernelcastError


def register(app: typer.Typer) -> None:
    examples = (
        "kernelcast compare llama-3.3-70b --gpus h100_sxm,h200_sxm,b200_sxm --tpot 50ms --ttft 1s",
        "kernelcast compare llama-3.1-8b --gpus h100_sxm --batch 8 --what-if dram_bytes_per_s*1.5 --sensitivity",
        "kernelcast compare --training llama-3.2-1b --gpus h100_sxm,h200_sxm --batch 4 --seq 512 --tokens 1e12",
    )
    app.command("compare", cls=with_examples(Command, *examples))(
        takes(gpus=GpuChoice, served=ServedChoice, trained=TrainedChoice)(compare)
    )


def compare(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="a name of `kernelcast models` or config.json; to train, FILE.py:name"),
    ],
    gpus: GpuChoice,
    served: ServedChoice,
    trained: TrainedChoice,
    batch: Annotated[
        int | None, typer.Option("--batch", help="requests of one static batch; of training: samples of a step")
    ] = None,
    training: Annotated[bool, typer.Option("--training", help="a training step, traced once (needs PyTorch)")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="picture of the comparison")] = None,
    as_json: Json = False,
) -> None:
    """Every GPU at its best way to run a model (layout, batch, format), in order: latency, throughput, dollars and
    joules, whether it fits, what binds and how sure that is."""
    if gpus.gpus is None:
        raise KernelcastError("which GPUs? give --gpus, as in --gpus h100_sxm,h200_sxm, or --gpus all")
    if training:
        refuse_others(served, "is of a served model: leave it out with --training")
        _training(model, gpus, trained, batch or 1, plot, as_json)
    else:
        refuse_others(trained, "is of --training: give that too, or leave it out")
        _serving(model, gpus, served, batch, plot, as_json)


def _serving(
    model: str, gpus: GpuChoice, served: ServedChoice, batch: int | None, plot: Path | None, as_json: bool
) -> None:
    from kernelcast.app.report.compare import fields, print_comparison

    question = CompareQuestion(model=model, batch=batch, **vars(gpus), **vars(served))
    found = question.answer()
    gains = question.gains(found)
    if plot:
        from kernelcast.app.report.compare_plot import write_plot

        write_plot(found, gains, plot)
    if as_json:
        typer.echo(json.dumps(fields(found, gains, gpus.price_kind)))
    else:
        print_comparison(found, gains, gpus.price_kind)


def _training(
    model: str, gpus: GpuChoice, trained: TrainedChoice, batch: int, plot: Path | None, as_json: bool
) -> None:
    if importlib.util.find_spec("torch") is None:
        raise KernelcastError("tracing needs PyTorch (no GPU): pip install 'kernelcast[torch]'")
    words = gpus.compared  # refused before a model is traced
    from kernelcast.app.cli.trace import traced
    from kernelcast.app.report.compare_training import fields, print_training, write_plot
    from kernelcast.hardware.prices import read_prices
    from kernelcast.search.compare.candidates import chosen_gpus
    from kernelcast.search.compare.training import compare_training
    from kernelcast.tracing.build import TraceRequest
    from kernelcast.training.layout import TrainingLayout
    from kernelcast.training.step import STEP

    chosen_gpus(words["gpus"], gpus.what_if or ())
    read_prices(gpus.prices, gpus.price or (), gpus.price_kind)
    layout = TrainingLayout(**trained.cut)  # type: ignore[arg-type]
    wanted = TraceRequest(model, batch, trained.seq, trained.dtype, "training", trained.checkpointing,
                          trained.precision, None, None, trained.image_size)  # fmt: skip
    step = traced(wanted, trained.optimizer, trained.accumulate, trained.attention, trained.graph)
    found = compare_training(
        step, **words, layout=None if layout == TrainingLayout() else layout, tokens=trained.tokens,
        samples=trained.samples, conditions=replace(gpus.conditions, input_rotation=STEP.input_rotation),
        how={"tf32": trained.dtype == "tf32", "graph": trained.graph, "on": trained.host},
    )  # fmt: skip
    if plot:
        write_plot(found, plot)
    if as_json:
        typer.echo(json.dumps(fields(found, gpus.price_kind)))
    else:
        print_training(found, gpus.price_kind)
