"""trace: any PyTorch model, inference or a training step, without a GPU."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernelcast.app.cli.commands import Command, with_examples
from kernelcast.app.cli.options import (
    CalibrationFile,
    Changes,
    GpuName,
    Json,
    PowerCap,
    Pp,
    PredictorName,
    SequenceParallel,
    TimelineFile,
    Tp,
    WeightsFolder,
)
from kernelcast.app.questions.shared import chosen_conditions, chosen_gpu
from kernelcast.errors import KernelcastError

if TYPE_CHECKING:
    from kernelcast.forecast.conditions import Conditions
    from kernelcast.hardware import Gpu
    from kernelcast.tracing.build import TraceRequest
    from kernelcast.tracing.traced import Trace
    from kernelcast.training.layout import TrainingLayout
    from kernelcast.training.tensor_parallel import Roles

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="FILE.py:function that gives (model, inputs), a config.json, or a name")
]
Optimizer = Annotated[
    str, typer.Option("--optimizer", metavar="NAME", help="adamw, adamw-foreach, adam, sgd, sgd-momentum, none")
]
AttentionKind = Annotated[
    str, typer.Option("--attention", metavar="KIND", help="fused: one kernel; math: products and softmax")
]
Checkpointing = Annotated[
    bool, typer.Option("--checkpointing", help="recompute activations in the backward pass (Hugging Face models)")
]
Compile = Annotated[
    bool, typer.Option("--compile", help="chains of element-wise ops and reductions fused, as torch.compile does")
]
Precision = Annotated[
    str | None,
    typer.Option("--precision", metavar="NAME", help="pure, mixed (fp32 master weights and moments) or autocast"),
]
Format = Annotated[
    str | None, typer.Option("--dtype", metavar="FORMAT", help="bf16, fp16, fp32 or tf32; else the model's own")
]
Cache = Annotated[bool | None, typer.Option("--cache/--no-cache", help="a prefill that fills a KV cache, or none")]
Logits = Annotated[
    str | None, typer.Option("--logits", metavar="WHICH", help="all or last; of causal inference the last")
]
ImageSize = Annotated[int | None, typer.Option("--image-size", help="pixels of an image's side; else the config's")]
TpPlan = Annotated[
    str | None,
    typer.Option(
        "--tp-plan", metavar="FILE", help="TOML or JSON: module -> colwise, rowwise, ...; hf: the model's own"
    ),
]
Seq = Annotated[int | None, typer.Option("--seq", help="tokens of each (512), or samples of sound (160000)")]


def register(app: typer.Typer) -> None:
    examples = (
        "kernelcast trace llama-3.1-8b --mode training --batch 4 --seq 512 --gpu h200_sxm",
        "kernelcast trace llama-3.1-8b --mode training --batch 1 --seq 4096 --gpu h100_sxm --dp 8 --zero 3 --json",
        "kernelcast trace model.py:build --mode training --batch 32 --dtype fp32 --gpu a100_sxm",
    )
    app.command("trace", cls=with_examples(Command, *examples))(trace)


def trace(
    what: Model,
    gpu: GpuName = None,
    mode: Annotated[str, typer.Option("--mode", metavar="MODE", help="inference or training")] = "inference",
    batch: Annotated[int, typer.Option("--batch", help="samples")] = 1,
    seq: Seq = None,
    dtype: Format = None,
    precision: Precision = None,
    cache: Cache = None,
    logits: Logits = None,
    image_size: ImageSize = None,
    optimizer: Optimizer = "adamw",
    accumulate: Annotated[int, typer.Option("--accumulate", help="passes before the optimizer steps")] = 1,
    attention: AttentionKind = "fused",
    checkpointing: Checkpointing = False,
    compile_: Compile = False,
    graph: Annotated[bool, typer.Option("--graph", help="kernels replay from a CUDA graph")] = False,
    host: Annotated[str, typer.Option("--host", metavar="NAME", help="whose time to launch kernels")] = "server",
    dp: Annotated[int, typer.Option("--dp", help="data-parallel ranks; --batch is that of each")] = 1,
    tp: Tp = 1,
    tp_plan: TpPlan = None,
    pp: Pp = 1,
    ep: Annotated[int, typer.Option("--ep", help="data-parallel ranks that experts are dealt out to")] = 1,
    zero: Annotated[int, typer.Option("--zero", help="1: optimizer states, 2: gradients, 3: parameters dealt out")] = 0,
    micro_batches: Annotated[int, typer.Option("--micro-batches", help="passes of --batch before the step")] = 1,
    schedule: Annotated[str, typer.Option("--schedule", metavar="NAME", help="gpipe, 1f1b or interleaved")] = "1f1b",
    virtual_stages: Annotated[int, typer.Option("--virtual-stages", help="parts a stage, interleaved")] = 1,
    sequence_parallel: SequenceParallel = False,
    changes: Changes = None,
    power_cap: PowerCap = None,
    predictor: PredictorName = "learned",
    calibration: CalibrationFile = None,
    weights: WeightsFolder = None,
    timeline: TimelineFile = None,
    as_json: Json = False,
) -> None:
    """How long a step of any PyTorch model takes, what takes the time, and whether it fits."""
    if gpu is None:
        raise KernelcastError("which GPU? give --gpu, as in --gpu h200_sxm")
    if importlib.util.find_spec("torch") is None:
        raise KernelcastError("tracing needs PyTorch (no GPU): pip install 'kernelcast[torch]'")
    chip = chosen_gpu(gpu, changes, power_cap)
    from kernelcast.tracing.build import TraceRequest
    from kernelcast.training.layout import TrainingLayout
    from kernelcast.training.step import STEP

    asked = chosen_conditions(None, "model", predictor, calibration, weights)
    conditions = replace(asked, input_rotation=STEP.input_rotation)
    wanted = TraceRequest(what, batch, seq, dtype, mode, checkpointing, precision, cache, logits, image_size)
    found = traced(wanted, optimizer, accumulate, attention, graph)
    layout = TrainingLayout(dp, tp, pp, ep, zero, sequence_parallel, micro_batches, schedule, virtual_stages)  # type: ignore[arg-type]
    many = layout != TrainingLayout()
    if compile_ and many:
        raise KernelcastError("--compile is for one GPU: leave out --dp, --tp, --pp, --ep, --zero, --micro-batches")
    how = {"tf32": dtype == "tf32", "graph": graph, "on": host}
    if many:
        _on_many(found, chip, layout, conditions, how | {"roles": _roles(tp_plan, found)}, timeline, as_json)
    else:
        _on_one(found, chip, conditions, how, compile_, timeline, as_json)


def traced(asked: TraceRequest, optimizer: str, accumulate: int, attention: str, graph: bool) -> Trace:
    """The step of a model that is built as asked."""
    from kernelcast.tracing import trace as run
    from kernelcast.tracing.build import build

    built = build(asked)
    found = run(
        built.model, built.inputs, asked.mode, optimizer=None if optimizer == "none" else optimizer,  # type: ignore[arg-type]
        loss=built.loss, accumulate=accumulate, attention=attention, graph=graph, name=built.name,
        precision=built.precision, dtype=built.dtype if built.precision == "autocast" else "bf16",
    )  # fmt: skip
    return replace(found, built=built.told)


def _roles(plan: str | None, found: Trace) -> Roles | None:
    """Which module is cut how; None: by the names that public models have, and by the model's own plan."""
    from kernelcast.training.tensor_parallel import Roles, read_plan

    if plan is None:
        return None
    if plan == "hf" and not found.tp_plan:
        raise KernelcastError(f"--tp-plan hf: {found.name} has no plan of its own; give a file")
    return Roles.of_plan(found.tp_plan if plan == "hf" else read_plan(Path(plan)))


def _on_one(
    found: Trace, chip: Gpu, conditions: Conditions, how: dict[str, Any], compiled: bool, timeline: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    from kernelcast.app.report.trace import fields, print_step
    from kernelcast.tracing.fusion import fuse
    from kernelcast.training.step import run_step

    step = run_step(fuse(found) if compiled else found, chip, conditions, **how)
    _told(step, timeline, fields if as_json else None, print_step)


def _on_many(
    found: Trace, chip: Gpu, layout: TrainingLayout, conditions: Conditions, how: dict[str, Any],
    timeline: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """A training step dealt out to several GPUs."""
    from kernelcast.app.report.scale import fields, print_scaled
    from kernelcast.training.scale import scale

    step = scale(found, chip, layout, conditions, **how)
    _told(step, timeline, fields if as_json else None, print_scaled)


def _told(step: Any, timeline: Path | None, fields: Callable[[Any], Any] | None, show: Callable[[Any], None]) -> None:
    if timeline:
        from kernelcast.app.report.chrome import write_timeline

        write_timeline(step.timeline(), timeline)
    if fields:
        typer.echo(json.dumps(fields(step)))
    else:
        show(step)
