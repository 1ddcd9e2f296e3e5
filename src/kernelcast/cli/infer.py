"""infer: how fast a language model runs, what takes the time, and whether it fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kernelcast.cli.commands import Command, with_examples
from kernelcast.cli.options import CalibrationFile, Changes, GpuName, Json, chosen_conditions, chosen_gpu
from kernelcast.errors import KernelcastError

_USUAL = {"--batch": 1, "--input-len": 1024, "--output-len": 128, "--cached": 0}


def register(app: typer.Typer) -> None:
    examples = (
        "kernelcast infer llama-3.1-8b --gpu h200_sxm --batch 8 --input-len 2048 --output-len 256",
        "kernelcast infer qwen3-30b-a3b --gpu h100_sxm --tp 2 --stack sglang --dtype fp8 --json",
    )
    app.command("infer", cls=with_examples(Command, *examples))(infer)
    app.command("models", cls=with_examples(Command, "kernelcast models --json"))(models)


def infer(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="a name of `kernelcast models`, or a config.json")],
    gpu: GpuName = None,
    stack: Annotated[str, typer.Option("--stack", metavar="NAME", help="vllm, sglang, trtllm, torch")] = "vllm",
    batch: Annotated[int | None, typer.Option("--batch", help="requests that start together (1)")] = None,
    input_len: Annotated[int | None, typer.Option("--input-len", help="tokens of each prompt (1024)")] = None,
    output_len: Annotated[int | None, typer.Option("--output-len", help="tokens of each answer (128)")] = None,
    requests: Annotated[
        Path | None,
        typer.Option("--requests", metavar="FILE", help="CSV, JSONL or Parquet with input_tokens, output_tokens"),
    ] = None,
    cached: Annotated[
        int | None, typer.Option("--cached", help="tokens of each prompt that the cache has already (0)")
    ] = None,
    chunk: Annotated[int, typer.Option("--chunk", help="prefill in steps of so many tokens; 0: at once")] = 0,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="FORMAT", help="of weights; default: as the checkpoint is"),
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option("--kv-dtype", metavar="FORMAT", help="of the KV cache")] = None,
    tp: Annotated[int, typer.Option("--tp", help="GPUs that cut every layer")] = 1,
    pp: Annotated[int, typer.Option("--pp", help="pipeline stages")] = 1,
    ep: Annotated[int, typer.Option("--ep", help="parts that experts are dealt out to")] = 1,
    dp: Annotated[int, typer.Option("--dp", help="attention-DP ranks that share the experts")] = 1,
    skew: Annotated[float, typer.Option("--skew", help="of tokens over experts: 0 balanced, 1.2 as measured")] = 0.0,
    micro_batches: Annotated[int, typer.Option("--micro-batches", help="parts of the batch in a pipeline")] = 1,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="keep activations between cut layers in parts")
    ] = False,
    draft_tokens: Annotated[int, typer.Option("--draft-tokens", help="speculative decoding: guesses a step")] = 0,
    acceptance: Annotated[float, typer.Option("--acceptance", help="probability that a guess is right")] = 0.7,
    draft_model: Annotated[str | None, typer.Option("--draft-model", metavar="MODEL", help="that guesses")] = None,
    changes: Changes = None,
    predictor: Annotated[str, typer.Option("--predictor", metavar="NAME", help="learned, generic, …")] = "learned",
    calibration: CalibrationFile = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE.json", help="timeline of one step, for Perfetto")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="picture of the breakdown")] = None,
    as_json: Json = False,
) -> None:
    """How fast a language model runs on a GPU, what takes the time, and whether it fits: one static batch."""
    from kernelcast import networks
    from kernelcast.networks.forward import Deployment
    from kernelcast.networks.precision import Precision
    from kernelcast.networks.stack import stack as named_stack
    from kernelcast.parallel import Layout
    from kernelcast.report.infer import fields, print_inference, write_plot, write_trace
    from kernelcast.serving.infer import infer as run
    from kernelcast.serving.workload import Speculation

    if gpu is None:
        raise KernelcastError("which GPU? give --gpu, as in --gpu h200_sxm")
    chip, layout = chosen_gpu(gpu, changes), Layout(tp, pp, dp, ep, sequence_parallel, micro_batches)
    engine = named_stack(stack)

    def deployed(name: str) -> Deployment:
        found = networks.model(name)
        return Deployment(found, chip, engine, Precision.of(found, dtype, kv_dtype), layout, skew)

    speculation = None
    if draft_tokens:
        speculation = Speculation(draft_tokens, acceptance, deployed(draft_model) if draft_model else None)
    elif draft_model:
        raise KernelcastError("--draft-model needs --draft-tokens, as in --draft-tokens 4")
    place = deployed(model)
    if place.model.kind == "encoder" and requests is None and output_len is None:
        output_len = 1  # it writes none: one pass
    sizes = {"--batch": batch, "--input-len": input_len, "--output-len": output_len, "--cached": cached}
    workload = _workload(requests, sizes, chunk, speculation)
    conditions = chosen_conditions(None, "cold", predictor, calibration)
    result = run(place, workload, conditions)
    if plot:  # first, as it may lack Matplotlib
        write_plot(result, plot)
    if trace:
        write_trace(result, trace, conditions)
    if as_json:
        typer.echo(json.dumps(fields(result)))
        return
    print_inference(result)


def _workload(requests: Path | None, sizes: dict[str, int | None], chunk: int, speculation: Any) -> Any:
    from kernelcast.serving.requests import read_requests
    from kernelcast.serving.workload import Workload

    given = {option: value for option, value in sizes.items() if value is not None}
    if requests is None:
        batch, inputs, outputs, cached = (given.get(option, usual) for option, usual in _USUAL.items())
        return Workload.equal(batch, inputs, outputs, cached, chunk, speculation)
    if given:
        raise KernelcastError(f"--requests lists every request with its sizes; leave out {', '.join(given)}")
    listed = read_requests(requests)
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
