"""collect --engine: steps of a serving engine, timed one by one; or, with --plan, which ones."""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kernelcast.app.cli.commands import progress_bar
from kernelcast.app.questions.measure import CollectQuestion
from kernelcast.app.report.json import print_json
from kernelcast.errors import KernelcastError

if TYPE_CHECKING:
    from kernelcast.collect.step_plan import PlannedStep

_ENDING = ".jsonl"
_OTHERS = ("family", "without", "warm", "for_calibration", "next", "again", "calls")  # of single kernels


def collect_engine(question: CollectQuestion, seconds: float | None, json: bool) -> None:
    """All that can be wrong is looked at before the engine starts, which takes a minute."""
    from kernelcast.models import model as find_model
    from kernelcast.serving.step_table import ENGINES

    out = question.out
    if question.engine not in ENGINES:
        raise KernelcastError(
            f"`engine` {question.engine!r}: steps of {', '.join(ENGINES)} can be measured; of others `replay` takes "
            "benchmarks"
        )
    question.refuse(_OTHERS, "steps of an engine are no calls of kernels")
    if out is not None and out.suffix != _ENDING:
        raise KernelcastError(f"`out` {out}: steps are written as lines of JSON; end its name in {_ENDING}")
    if question.model is None:
        raise KernelcastError("which model shall the engine run? give `model`, as in llama-3.1-8b")
    find_model(question.model)
    if question.plan:
        _show(question, json)
        return
    if out is None:
        raise KernelcastError(f"where should the steps go? give -o FILE{_ENDING}")
    _measure(question, out, seconds, json)


def _measure(question: CollectQuestion, out: Path, seconds: float | None, json: bool) -> None:
    from kernelcast.app.cli.collect import needs_cuda

    needs_cuda()
    from kernelcast.collect.device import facts, identified
    from kernelcast.collect.step_file import earlier_steps, how_to_go_on, message_of, progress_of, write_steps
    from kernelcast.collect.vllm_engine import installed_release, measured_engine

    installed_release()
    target = identified(question.gpu)
    about = {"gpu": target.id, "model": question.model, "engine_args": question.engine_args, **facts()}
    out.parent.mkdir(parents=True, exist_ok=True)
    earlier_steps(out, about)
    start = partial(measured_engine, str(question.model), question.engine_args)
    try:
        with progress_bar() as bar:
            done = write_steps(out, about, start, seconds, bar("steps"))
    except KeyboardInterrupt:
        if progress_of(out).exists():
            print(f"kernelcast: {how_to_go_on(progress_of(out))}", file=sys.stderr)
        raise
    except KernelcastError:
        raise
    except Exception as error:  # of an engine that does not start, which may be anything
        raise KernelcastError(f"the engine does not start: {message_of(error)}") from error
    if json:
        print_json({"file": str(out), "steps": done.records, "left": done.left})
        return
    typer.echo(f"{done.records:,} steps in {out}; kernelcast replay {out} shows them beside their forecasts")
    if done.left:
        typer.echo(f"{done.left:,} steps of the plan are left: run the same command again to continue")


def _show(question: CollectQuestion, json: bool) -> None:
    """The plan, by the forecast of the engine's limits."""
    from kernelcast.collect.step_plan import planned_steps

    limits = question.engine_limits()
    planned = planned_steps(limits)
    if json:
        for step in planned:
            print_json({"kind": step.step_type, **{k: v for k, v in asdict(step).items() if k != "step_type"}})
        return
    typer.echo(f"{question.model}: max_num_seqs {limits.max_num_seqs:,}, max_num_batched_tokens "
               f"{limits.max_num_batched_tokens:,},\nmax_model_len {limits.max_model_len:,}, KV cache of "
               f"{limits.kv_tokens:,} tokens")  # fmt: skip
    typer.echo(f"\n{'step':40} steps  prompt tokens")
    rows: dict[str, list[str]] = {}
    for step in planned:
        rows.setdefault(_name(step), []).append(f"{step.prompt_tokens // step.prompts:,}" if step.prompts else "none")
    for name, prompts in rows.items():
        typer.echo(f"{name:40} {len(prompts):5}  {', '.join(prompts)}")
    typer.echo(f"{'all':40} {len(planned):5}")


def _name(step: PlannedStep) -> str:
    if step.step_type == "alone":
        return "a prompt alone" if step.prompts == 1 else f"{step.prompts} prompts alone"
    sequences = f"{step.decodes:,} sequence{'s' if step.decodes > 1 else ''} of {step.context:,} tokens"
    return f"kernels of {sequences}" if step.step_type == "kernels" else sequences
