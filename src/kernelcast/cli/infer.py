"""infer: how fast a language model runs, what takes the time, and whether it fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernelcast.cli.cluster_options import ClusterChoice
from kernelcast.cli.commands import Command, with_examples
from kernelcast.cli.drafts import DraftModel, speculation
from kernelcast.cli.option_groups import takes
from kernelcast.cli.options import (
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
    chosen_conditions,
    chosen_gpu,
)
from kernelcast.errors import KernelcastError

if TYPE_CHECKING:
    from kernelcast.networks.architecture import Architecture
    from kernelcast.networks.deployment import Deployment
    from kernelcast.serving.result import Inference
    from kernelcast.serving.workload import Speculation, Workload

RequestsFile = Annotated[
    Path | None,
    typer.Option("--requests", metavar="FILE", help="CSV, JSONL or Parquet with input_tokens, output_tokens"),
]
Cached = Annotated[int | None, typer.Option("--cached", help="tokens of each prompt that the cache has already (0)")]
WeightFormat = Annotated[
    str | None, typer.Option("--dtype", metavar="FORMAT", help="of weights; default: as the checkpoint is")
]

_USUAL = {"--batch": 1, "--input-len": 1024, "--output-len": 128, "--cached": 0}


def register(app: typer.Typer) -> None:
    examples = (
        "kernelcast infer llama-3.1-8b --gpu h200_sxm --batch 8 --input-len 2048 --output-len 256",
        "kernelcast infer qwen3-30b-a3b --gpu h100_sxm --tp 2 --stack sglang --dtype fp8 --json",
    )
    app.command("infer", cls=with_examples(Command, *examples))(takes(cluster=ClusterChoice)(infer))
    app.command("models", cls=with_examples(Command, "kernelcast models --json"))(models)


def infer(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="a name of `kernelcast models`, or a config.json")],
    gpu: GpuName = None,
    stack: Annotated[str, typer.Option("--stack", metavar="NAME", help="vllm, sglang, trtllm, torch")] = "vllm",
    batch: Annotated[int | None, typer.Option("--batch", help="requests that start together (1)")] = None,
    input_len: Annotated[int | None, typer.Option("--input-len", help="tokens of each prompt (1024)")] = None,
    output_len: Annotated[int | None, typer.Option("--output-len", help="tokens of each answer (128)")] = None,
    requests: RequestsFile = None,
    cached: Cached = None,
    chunk: Annotated[
        int | None, typer.Option("--chunk", help="prefill in steps of so many tokens; 0: at once; default: the stack's")
    ] = None,
    dtype: WeightFormat = None,
    kv_dtype: Annotated[str | None, typer.Option("--kv-dtype", metavar="FORMAT", help="of the KV cache")] = None,
    tp: Tp = 1,
    pp: Pp = 1,
    ep: Annotated[int, typer.Option("--ep", help="parts that experts are dealt out to")] = 1,
    dp: Annotated[int, typer.Option("--dp", help="attention-DP ranks that share the experts")] = 1,
    cluster: ClusterChoice = ClusterChoice(),  # noqa: B008  frozen
    images: Annotated[int, typer.Option("--images", min=0, help="that each prompt has, beside its tokens (0)")] = 0,
    image_size: Annotated[int, typer.Option("--image-size", min=1, help="pixels of a side of each (1024)")] = 1024,
    micro_batches: Annotated[int, typer.Option("--micro-batches", help="parts of the batch in a pipeline")] = 1,
    sequence_parallel: SequenceParallel = False,
    draft_tokens: Annotated[int, typer.Option("--draft-tokens", help="speculative decoding: guesses a step")] = 0,
    acceptance: Annotated[float, typer.Option("--acceptance", help="probability that a guess is right")] = 0.7,
    draft_model: DraftModel = None,
    changes: Changes = None,
    power_cap: PowerCap = None,
    predictor: PredictorName = "learned",
    calibration: CalibrationFile = None,
    weights: WeightsFolder = None,
    trace: TimelineFile = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="picture of the breakdown")] = None,
    as_json: Json = False,
) -> None:
    """How fast a language model runs on a GPU, what takes the time, and whether it fits: one static batch."""
    from kernelcast import networks
    from kernelcast.networks.precision import Precision
    from kernelcast.serving.images import with_images
    from kernelcast.serving.infer import infer as run
    from kernelcast.stacks import stack as named_stack

    if gpu is None:
        raise KernelcastError("which GPU? give --gpu, as in --gpu h200_sxm")
    layout = cluster.layout(tp, pp, dp, ep, sequence_parallel=sequence_parallel, micro_batches=micro_batches)

    def deployed(found: Architecture) -> Deployment:
        formats = Precision.of(found, dtype, kv_dtype)
        return cluster.place(found, chosen_gpu(gpu, changes, power_cap), named_stack(stack), formats, layout)

    place = deployed(networks.model(model))
    if place.model.kind == "encoder" and requests is None and output_len is None:
        output_len = 1  # it writes none: one pass
    sizes = {"--batch": batch, "--input-len": input_len, "--output-len": output_len, "--cached": cached}
    guesses = speculation(draft_tokens, acceptance, draft_model, place, deployed)
    workload = _workload(requests, sizes, chunk, guesses)
    if images:
        workload = with_images(workload, place, images, image_size)
    _told(run(place, workload, chosen_conditions(None, "model", predictor, calibration, weights)), trace, plot, as_json)


def _told(result: Inference, trace: Path | None, plot: Path | None, as_json: bool) -> None:
    from kernelcast.report.chrome import write_timeline
    from kernelcast.report.infer import fields, print_inference, write_plot

    if plot:  # first, as it may lack Matplotlib
        write_plot(result, plot)
    if trace:
        write_timeline(result.timeline(), trace)
    if as_json:
        typer.echo(json.dumps(fields(result)))
    else:
        print_inference(result)


def _workload(
    requests: Path | None, sizes: dict[str, int | None], chunk: int | None, speculation: Speculation | None
) -> Workload:
    from kernelcast.serving.requests import read_requests
    from kernelcast.serving.workload import Workload

    given = {option: value for option, value in sizes.items() if value is not None}
    if requests is None:
        batch, inputs, outputs, cached = (given.get(option, usual) for option, usual in _USUAL.items())
        return Workload.equal(batch, inputs, outputs, cached, chunk, speculation)
    if given:
        raise KernelcastError(f"--requests lists every request with its sizes; leave out {', '.join(given)}")
    listed = read_requests(requests)
    if len(set(listed.arrivals_s)) > 1:
        raise KernelcastError(
            f"{requests} says when requests arrive (arrival_s), and infer runs one batch that starts together: "
            f"give it to `kernelcast simulate --trace`, or leave the column out"
        )
    return Workload(listed.inputs, listed.outputs, listed.cached, chunk, speculation)


def models(as_json: Json = False) -> None:
    """List the bundled models."""
    from kernelcast import networks
    from kernelcast.report.text import plain_table, show

    found = {name: networks.model(name) for name in networks.model_ids()}
    if as_json:
        told = {
            name: {"parameters": m.parameters.total, "active_parameters": m.active_parameters.total,
                   "layers": m.layer_count, "hidden": m.hidden, "vocab": m.vocab, "max_context": m.max_context}
            for name, m in found.items()
        }  # fmt: skip
        typer.echo(json.dumps(told))
        return
    table = plain_table("model", "weights", "active", "layers", "hidden", "context",
                        right=("weights", "active", "layers", "hidden", "context"))  # fmt: skip
    for name, m in found.items():
        active = m.active_parameters.total
        table.add_row(name, f"{m.parameters.total / 1e9:.2f} B", f"{active / 1e9:.2f} B", str(m.layer_count),
                      f"{m.hidden:,}", f"{m.max_context:,}")  # fmt: skip
    show(table)
