"""trace: any PyTorch model, inference or a training step, without a GPU."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kernelcast.cli.commands import Command, with_examples
from kernelcast.cli.options import CalibrationFile, Changes, GpuName, Json, chosen_conditions, chosen_gpu
from kernelcast.errors import KernelcastError


def register(app: typer.Typer) -> None:
    examples = (
        "kernelcast trace llama-3.1-8b --mode training --batch 4 --seq 512 --gpu h200_sxm",
        "kernelcast trace llama-3.1-8b --mode training --batch 1 --seq 4096 --gpu h100_sxm --dp 8 --zero 3 --json",
        "kernelcast trace model.py:build --mode training --batch 32 --dtype fp32 --gpu a100_sxm",
    )
    app.command("trace", cls=with_examples(Command, *examples))(trace)


def trace(
    what: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="FILE.py:function that gives (model, inputs), a config.json, or a name"),
    ],
    gpu: GpuName = None,
    mode: Annotated[str, typer.Option("--mode", metavar="MODE", help="inference or training")] = "inference",
    batch: Annotated[int, typer.Option("--batch", help="samples")] = 1,
    seq: Annotated[int, typer.Option("--seq", help="tokens of each")] = 512,
    dtype: Annotated[str, typer.Option("--dtype", metavar="FORMAT", help="bf16, fp16, fp32 or tf32")] = "bf16",
    optimizer: Annotated[
        str, typer.Option("--optimizer", metavar="NAME", help="adamw, adamw-foreach, adam, sgd, sgd-momentum, none")
    ] = "adamw",
    accumulate: Annotated[int, typer.Option("--accumulate", help="passes before the optimizer steps")] = 1,
    attention: Annotated[
        str, typer.Option("--attention", metavar="KIND", help="fused: one kernel; math: products and softmax")
    ] = "fused",
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="recompute activations in the backward pass (Hugging Face models)")
    ] = False,
    compile_: Annotated[
        bool, typer.Option("--compile", help="chains of element-wise ops and reductions fused, as torch.compile does")
    ] = False,
    graph: Annotated[bool, typer.Option("--graph", help="kernels replay from a CUDA graph")] = False,
    host: Annotated[str, typer.Option("--host", metavar="NAME", help="whose time to launch kernels")] = "server",
    dp: Annotated[int, typer.Option("--dp", help="data-parallel ranks; --batch is that of each")] = 1,
    tp: Annotated[int, typer.Option("--tp", help="GPUs that cut every layer")] = 1,
    pp: Annotated[int, typer.Option("--pp", help="pipeline stages")] = 1,
    ep: Annotated[int, typer.Option("--ep", help="data-parallel ranks that experts are dealt out to")] = 1,
    zero: Annotated[int, typer.Option("--zero", help="1: optimizer states, 2: gradients, 3: parameters dealt out")] = 0,
    micro_batches: Annotated[int, typer.Option("--micro-batches", help="passes of --batch before the step")] = 1,
    schedule: Annotated[str, typer.Option("--schedule", metavar="NAME", help="gpipe, 1f1b or interleaved")] = "1f1b",
    virtual_stages: Annotated[int, typer.Option("--virtual-stages", help="parts a stage, interleaved")] = 1,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="keep activations between cut layers in parts")
    ] = False,
    changes: Changes = None,
    predictor: Annotated[str, typer.Option("--predictor", metavar="NAME", help="learned, generic, …")] = "learned",
    calibration: CalibrationFile = None,
    timeline: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE.json", help="timeline of the step, for Perfetto")
    ] = None,
    as_json: Json = False,
) -> None:
    """How long a step of any PyTorch model takes, what takes the time, and whether it fits."""
    if gpu is None:
        raise KernelcastError("which GPU? give --gpu, as in --gpu h200_sxm")
    if importlib.util.find_spec("torch") is None:
        raise KernelcastError("tracing needs PyTorch (no GPU): pip install 'kernelcast[torch]'")
    chip = chosen_gpu(gpu, changes)
    from kernelcast.networks.fusion import fuse
    from kernelcast.report.trace import fields, print_step, write_timeline
    from kernelcast.tracing import trace as run
    from kernelcast.tracing.build import Asked, build
    from kernelcast.training.plan import Plan
    from kernelcast.training.step import STEP, run_step

    asked = chosen_conditions(None, "cold", predictor, calibration)
    conditions = replace(asked, input_rotation=STEP.input_rotation)
    built = build(Asked(what, batch, seq, dtype, mode, checkpointing))
    found = run(
        built.model, built.inputs, mode, optimizer=None if optimizer == "none" else optimizer,  # type: ignore[arg-type]
        loss=built.loss, accumulate=accumulate, attention=attention, graph=graph, name=built.name,
    )  # fmt: skip
    if compile_:
        found = fuse(found)
    plan = Plan(dp, tp, pp, ep, zero, sequence_parallel, micro_batches, schedule, virtual_stages)  # type: ignore[arg-type]
    if plan != Plan():
        if compile_:
            raise KernelcastError("--compile is for one GPU: leave out --dp, --tp, --pp, --ep, --zero, --micro-batches")
        _on_many(found, chip, plan, conditions, dtype == "tf32", graph, host, timeline, as_json)
        return
    step = run_step(found, chip, conditions, tf32=dtype == "tf32", graph=graph, on=host)
    if timeline:
        write_timeline(step, timeline)
    if as_json:
        typer.echo(json.dumps(fields(step)))
        return
    print_step(step)


def _on_many(
    found: Any, chip: Any, plan: Any, conditions: Any, tf32: bool, graph: bool, host: str, timeline: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """A training step dealt out to several GPUs."""
    from kernelcast.report.scale import fields, print_scaled, write_timeline
    from kernelcast.training.scale import scale

    step = scale(found, chip, plan, conditions, tf32=tf32, graph=graph, on=host)
    if timeline:
        write_timeline(step, timeline)
    if as_json:
        typer.echo(json.dumps(fields(step)))
        return
    print_scaled(step)
