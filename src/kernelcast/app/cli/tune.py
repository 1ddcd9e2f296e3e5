"""tune: the best Triton config of an MoE layer or a GEMM, predicted, and measured where there is a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernelcast.app.cli.commands import Command, CommandGroup, with_examples
from kernelcast.app.cli.options import Changes, GpuName, Json
from kernelcast.app.questions.shared import chosen_gpu
from kernelcast.errors import KernelcastError, unknown

if TYPE_CHECKING:
    from kernelcast.hardware import Gpu
    from kernelcast.tune.configs import MoeProblem
    from kernelcast.tune.tune import Measure, TuneResult

# Token counts of the engines' own files; at run time the nearest counts.
_TOKENS = "1,2,4,8,16,24,32,48,64,96,128,256,512,1024,1536,2048,3072,4096"
_DTYPES = ("bf16", "fp16", "fp8", "fp8_block")
_TRITON = "3.6.0"  # that the bundled measurements were made with

Top = Annotated[int, typer.Option("--top", min=1, help="configs to measure: the most promising by prediction")]
More = Annotated[
    int, typer.Option("--more", min=0, help="measure so many beyond them; on a GPU not seen by Optuna, if installed")
]
Tokens = Annotated[str, typer.Option("--tokens", metavar="N,N,…", help="token counts to tune for")]
Stacks = Annotated[
    list[str] | None, typer.Option("--stack", metavar="NAME", help="vllm, sglang: whose files; default: both")
]
Out = Annotated[Path | None, typer.Option("-o", "--out", metavar="DIR", help="folder for the files")]
NoGpu = Annotated[bool, typer.Option("--no-measure", help="predict only, even where there is a GPU")]
Dtype = Annotated[str, typer.Option("--dtype", metavar="FORMAT", help="bf16, fp16, fp8, fp8_block")]


def register(app: typer.Typer) -> None:
    moe_example = "kernelcast tune moe qwen3-30b-a3b --gpu h200_sxm --tokens 1,64,1024 -o configs"
    gemm_example = "kernelcast tune gemm --m 4096 --n 4096 --k 4096 --gpu h200_sxm"
    group = typer.Typer(cls=with_examples(CommandGroup, moe_example, gemm_example), no_args_is_help=True)
    group.command("moe", cls=with_examples(Command, moe_example))(moe)
    group.command("gemm", cls=with_examples(Command, gemm_example))(gemm)
    app.add_typer(group, name="tune", help="Find the best Triton config of a kernel.")


def moe(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="a name of `kernelcast models`")] = None,
    gpu: GpuName = None,
    tokens: Tokens = _TOKENS,
    hidden: Annotated[int | None, typer.Option("--hidden", min=1, help="model width, without a MODEL")] = None,
    inter: Annotated[int | None, typer.Option("--inter", min=1, help="width of an expert, without a MODEL")] = None,
    experts: Annotated[int | None, typer.Option("--experts", min=1, help="experts, without a MODEL")] = None,
    topk: Annotated[int | None, typer.Option("--topk", min=1, help="experts a token, without a MODEL")] = None,
    tp: Annotated[int, typer.Option("--tp", min=1, help="GPUs that cut every expert")] = 1,
    dtype: Dtype = "bf16",
    top: Top = 16,
    more: More = 0,
    stack: Stacks = None,
    out: Out = None,
    triton: Annotated[str | None, typer.Option("--triton", help="version that SGLang's folder is named by")] = None,
    no_measure: NoGpu = False,
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Tune the grouped GEMMs of a mixture-of-experts layer, and write the files that vLLM and SGLang look up."""
    from kernelcast.tune.configs import STACKS, write_config_file
    from kernelcast.tune.tune import tune

    for name in stack or ():
        if name not in STACKS:
            raise unknown("stack", name, STACKS)
    sizes = _sizes(model, {"--hidden": hidden, "--inter": inter, "--experts": experts, "--topk": topk}, tp)
    problems = _problems(sizes, tokens, dtype)
    chip, measure, why_not = _machine(gpu, changes, dtype, no_measure)
    device, version = _here() if measure else (None, _TRITON)
    found: list[TuneResult] = []
    files: list[str] = []
    for problem in problems:
        found.append(tune(problem, chip, measure, top=top, more=more))
        if out is not None and (measure or len(found) == len(problems)):  # measured ones are kept, come what may
            chosen = dict(zip(problems, (one.config for one in found), strict=False))
            files = [
                str(write_config_file(out, name, chip, chosen, triton or version, device)) for name in stack or STACKS
            ]
        if measure:
            told = f"{len(found)} of {len(problems)}: {problem.tokens} tokens, {found[-1].config}"
            typer.echo(f"kernelcast: {told}, {found[-1].configs_measured} configs measured", err=True)
    _tell(found, chip, why_not, as_json, files=files)
    for file in files if not as_json else ():
        typer.echo(f"{'measured' if measure else 'predicted'} -> {file}")


def gemm(
    m: Annotated[int, typer.Option("--m", min=1, help="rows (tokens)")],
    n: Annotated[int, typer.Option("--n", min=1, help="output features")],
    k: Annotated[int, typer.Option("--k", min=1, help="input features")],
    gpu: GpuName = None,
    dtype: Dtype = "bf16",
    top: Top = 16,
    more: More = 0,
    no_measure: NoGpu = False,
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Tune a Triton matrix product: C[m, n] = A[m, k] B[n, k]^T."""
    from kernelcast.tune.configs import GemmProblem
    from kernelcast.tune.tune import tune

    chip, measure, why_not = _machine(gpu, changes, dtype, no_measure)
    found = tune(GemmProblem(m, n, k, dtype), chip, measure, top=top, more=more)
    _tell([found], chip, why_not, as_json)


def _tell(found: list[TuneResult], chip: Gpu, note: str, as_json: bool, **more: Any) -> None:
    from kernelcast.app.report.tune import fields, print_tuned

    if as_json:
        typer.echo(json.dumps({"tuned": fields(found, chip), **more, "note": note}))
    else:
        print_tuned(found, chip, note)


def _sizes(model: str | None, given: dict[str, int | None], tp: int) -> dict[str, int]:
    """hidden, inter, experts and topk of one GPU's share of a layer."""
    if model is not None:
        extra = [option for option, value in given.items() if value is not None]
        if extra:
            raise KernelcastError(f"{model} says its own sizes; leave out {', '.join(extra)}")
        sizes = _of_model(model)
    else:
        missing = [option for option, value in given.items() if value is None]
        if missing:
            raise KernelcastError(f"give a MODEL, or its sizes: {', '.join(missing)} missing")
        sizes = {option.removeprefix("--"): value for option, value in given.items() if value is not None}
    if sizes["inter"] % tp:
        raise KernelcastError(f"an expert of width {sizes['inter']} cannot be cut into {tp} equal parts")
    return {**sizes, "inter": sizes["inter"] // tp}


def _of_model(name: str) -> dict[str, int]:
    from kernelcast import models
    from kernelcast.models.layers import Experts

    model = models.model(name)
    for run in model.layers:
        if isinstance(run.layer.mlp, Experts):
            block = run.layer.mlp
            return {"hidden": model.hidden, "inter": block.inter, "experts": block.experts, "topk": block.topk}
    raise KernelcastError(f"{name} has no experts; tune gemm is for its matrix products")


def _problems(sizes: dict[str, int], tokens: str, dtype: str) -> list[MoeProblem]:
    from kernelcast.tune.configs import MoeProblem

    try:
        counts = sorted({int(text) for text in tokens.split(",")})
    except ValueError:
        counts = []
    if not counts or counts[0] < 1:
        raise KernelcastError(f"--tokens takes counts like 1,64,1024, not {tokens!r}")
    return [MoeProblem(tokens=count, dtype=dtype, **sizes) for count in counts]


def _machine(
    name: str | None, changes: list[str] | None, dtype: str, unwanted: bool
) -> tuple[Gpu, Measure | None, str]:
    """The GPU to tune for, and what measures on it; else None, and why."""
    if name is None:
        raise KernelcastError("which GPU? give --gpu, as in --gpu h200_sxm")
    if dtype not in _DTYPES:
        raise unknown("dtype", dtype, _DTYPES)
    chip = chosen_gpu(name, changes)
    if unwanted:
        return chip, None, "Not measured, as asked: these are the predicted best."
    try:
        import torch
        import triton  # noqa: F401
    except ImportError:
        return chip, None, ""
    if not torch.cuda.is_available():
        return chip, None, ""
    from kernelcast.collect.device import identified

    here = identified(None)
    if here.id != chip.known_as or chip.changes:
        told = f"This machine has a {here.name}, not a {chip.label}: these are the predicted best, not measured."
        return chip, None, told
    if dtype not in ("bf16", "fp16"):
        return chip, None, f"Our kernel does not run {dtype}: these are the predicted best, not measured."
    from kernelcast.collect.fused_moe import Measurer

    return chip, Measurer(), ""


def _here() -> tuple[str, str]:
    """The device as its driver names it, and Triton's version."""
    import torch
    import triton

    return str(torch.cuda.get_device_name()), str(triton.__version__)
