"""tune: the best Triton config of an MoE layer or a GEMM, predicted, and measured where there is a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from kernelcast.app.cli.commands import CommandGroup, add_command, with_examples
from kernelcast.app.questions.measure import TuneGemmQuestion, TuneMoeQuestion, TuneQuestion
from kernelcast.app.questions.shared import Json, resolve_gpu
from kernelcast.app.report.json import print_json
from kernelcast.errors import KernelcastError, refuse_unknown

if TYPE_CHECKING:
    from kernelcast.hardware import Gpu
    from kernelcast.tune.configs import MoeProblem
    from kernelcast.tune.tune import Measure, TuneResult

_DTYPES = ("bf16", "fp16", "fp8", "fp8_block")
_TRITON = "3.6.0"  # that the bundled measurements were made with


def register(app: typer.Typer) -> None:
    moe_example = "kernelcast tune moe qwen3-30b-a3b --gpu h200_sxm --tokens 1,64,1024 -o configs"
    gemm_example = "kernelcast tune gemm --m 4096 --n 4096 --k 4096 --gpu h200_sxm"
    group = typer.Typer(cls=with_examples(CommandGroup, moe_example, gemm_example), no_args_is_help=True)
    add_command(group, moe, moe_example)
    add_command(group, gemm, gemm_example)
    app.add_typer(group, name="tune", help="Find the best Triton config of a kernel.")


def moe(question: TuneMoeQuestion, json: Json = False) -> None:
    """Tune the grouped GEMMs of a mixture-of-experts layer, and write the files that vLLM and SGLang look up."""
    from kernelcast.tune.configs import STACKS, write_config_file
    from kernelcast.tune.tune import tune

    refuse_unknown("stack", question.stack or (), STACKS)
    problems = _problems(_sizes(question), question.tokens, question.dtype)
    target, measure, why_not = _machine(question)
    device, version = _here() if measure else (None, _TRITON)
    results: list[TuneResult] = []
    files: list[str] = []
    for problem in problems:
        results.append(tune(problem, target, measure, top=question.top, more=question.more))
        if question.out is not None and (measure or len(results) == len(problems)):  # what is measured is kept
            configs = dict(zip(problems, (result.config for result in results), strict=False))
            files = [
                str(write_config_file(question.out, name, target, configs, question.triton or version, device))
                for name in question.stack or STACKS
            ]
        if measure:
            done = f"{len(results)} of {len(problems)}: {problem.tokens} tokens, {results[-1].config}"
            typer.echo(f"kernelcast: {done}, {results[-1].configs_measured} configs measured", err=True)
    _print(results, target, why_not, json, files=files)
    for file in files if not json else ():
        typer.echo(f"{'measured' if measure else 'predicted'} -> {file}")


def gemm(question: TuneGemmQuestion, json: Json = False) -> None:
    """Tune a Triton matrix product: C[m, n] = A[m, k] B[n, k]^T."""
    from kernelcast.tune.configs import GemmProblem
    from kernelcast.tune.tune import tune

    target, measure, why_not = _machine(question)
    problem = GemmProblem(question.m, question.n, question.k, question.dtype)
    _print([tune(problem, target, measure, top=question.top, more=question.more)], target, why_not, json)


def _print(results: list[TuneResult], target: Gpu, note: str, json: bool, **more: Any) -> None:
    from kernelcast.app.report.tune import fields, print_tuned

    if json:
        print_json({"tuned": fields(results, target), **more, "note": note})
    else:
        print_tuned(results, target, note)


def _sizes(question: TuneMoeQuestion) -> dict[str, int]:
    """hidden, inter, experts and topk of one GPU's shard of a layer."""
    names, tp = ("hidden", "inter", "experts", "topk"), question.tp
    if question.model is not None:
        question.refuse(names, f"{question.model} has its own sizes")
        sizes = _of_model(question.model)
    else:
        missing = [f"`{name}`" for name in names if getattr(question, name) is None]
        if missing:
            raise KernelcastError(f"give a MODEL, or its sizes: {', '.join(missing)} missing")
        sizes = {name: getattr(question, name) for name in names}
    if sizes["inter"] % tp:
        raise KernelcastError(f"an expert of intermediate size {sizes['inter']} cannot be sharded over {tp} GPUs")
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
        raise KernelcastError(f"`tokens` takes counts like 1,64,1024, not {tokens!r}")
    return [MoeProblem(tokens=count, dtype=dtype, **sizes) for count in counts]


def _machine(question: TuneQuestion) -> tuple[Gpu, Measure | None, str]:
    """The GPU to tune for, and what measures on it; else None, and why."""
    target, dtype = resolve_gpu(question.gpu, question.set), question.dtype
    refuse_unknown("dtype", [dtype], _DTYPES)
    if question.no_measure:
        return target, None, "Not measured, as requested: these are the predicted best."
    try:
        import torch
        import triton  # noqa: F401
    except ImportError:
        return target, None, ""
    if not torch.cuda.is_available():
        return target, None, ""
    from kernelcast.collect.device import identified

    here = identified(None)
    if here.id != target.known_as or target.changes:
        note = f"This machine has a {here.name}, not a {target.label}: these are the predicted best, not measured."
        return target, None, note
    if dtype not in ("bf16", "fp16"):
        return target, None, f"Our kernel does not run {dtype}: these are the predicted best, not measured."
    from kernelcast.collect.fused_moe import Measurer

    return target, Measurer(), ""


def _here() -> tuple[str, str]:
    """The device as its driver names it, and Triton's version."""
    import torch
    import triton

    return str(torch.cuda.get_device_name()), str(triton.__version__)
