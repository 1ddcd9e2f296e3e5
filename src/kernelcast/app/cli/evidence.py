"""``kernelcast evidence``: what was measured, and how well it is forecast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from kernelcast.app.cli.commands import Command, with_examples
from kernelcast.app.cli.options import Json, WeightsFolder
from kernelcast.app.questions.evidence import all_entries
from kernelcast.app.questions.evidence import evidence as find
from kernelcast.app.report import json as as_json
from kernelcast.errors import refuse_unknown
from kernelcast.forecast.evidence import MeasuredConfiguration
from kernelcast.forecast.learned import WEIGHTS

LISTED = 40
_BY = ("kind", "op", "gpu", "stack")


def register(app: typer.Typer) -> None:
    examples = (
        "kernelcast evidence",
        "kernelcast evidence --op attention --gpu b200_sxm --stack vllm",
        "kernelcast evidence --by gpu --json",
        "kernelcast evidence --runs --gpu rtx_5090 --stack vllm",
    )
    app.command("evidence", cls=with_examples(Command, *examples))(evidence)


def evidence(
    op: Annotated[list[str], typer.Option("--op", help="only this op; may be repeated")] = [],  # noqa: B006  Typer copies it
    gpu: Annotated[list[str], typer.Option("--gpu", metavar="ID", help="only this GPU; may be repeated")] = [],  # noqa: B006
    stack: Annotated[list[str], typer.Option("--stack", help="only this stack; may be repeated")] = [],  # noqa: B006
    word: Annotated[
        list[str],
        typer.Option("--where", metavar="WORD=VALUE", help="only kinds with this word (dtype=fp8); may be repeated"),
    ] = [],  # noqa: B006
    by: Annotated[str | None, typer.Option("--by", metavar="|".join(_BY), help="lines; default: as fits")] = None,
    runs: Annotated[
        bool, typer.Option("--runs", help="instead: which kernel runs, by stack, op and format, and what was measured")
    ] = False,
    weights: WeightsFolder = None,
    json: Json = False,
) -> None:
    """What was measured, by kind of call, and how far off forecasts of it are.

    A kind is an op on a GPU and all its words together: stack, backend, number formats, prefill or decode, … For each:
    how many calls, the ranges of their numbers, and on calls that no fit saw the error and the share in the interval.
    """
    refuse_unknown("--by", [by] if by else [], _BY)
    found = find(op, gpu, stack, word, weights)
    if runs:
        _show_runs(gpu, stack, op, all_entries(weights or WEIGHTS), json)
        return
    lines = by or ("kind" if len(found) <= LISTED else "op" if not op else "gpu")
    if json:
        print(as_json.to_json(as_json.evidence_fields(found, by or "kind")))
        return
    from kernelcast.app.report.evidence import print_evidence

    print_evidence(found, lines)


def _show_runs(
    gpus: list[str], stacks: list[str], ops: list[str], entries: Sequence[MeasuredConfiguration], json: bool
) -> None:
    """What stacks/kernels.toml says, of each GPU that is named or in full, beside the backends that were measured."""
    from kernelcast.app.report.which import print_runs, runs_fields

    places: list[str | None] = [*gpus] or [None]
    lines = [line for name in places for line in runs_fields(name, stacks, ops, entries)]
    if json:
        print(as_json.to_json({"runs": lines}))
    else:
        print_runs(lines)
