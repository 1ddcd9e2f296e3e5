"""``kernelcast evidence``: what was measured, and how well it is forecast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernelcast.cli.commands import Command, with_examples
from kernelcast.cli.options import Json, WeightsFolder
from kernelcast.efficiency.evidence import Entry
from kernelcast.efficiency.learned import WEIGHTS, load
from kernelcast.errors import KernelcastError, refuse_unknown
from kernelcast.hardware import gpu as named_gpu
from kernelcast.kernels import REGISTRY
from kernelcast.report import json as as_json

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
    refuse_unknown("op", op, REGISTRY)
    refuse_unknown("--by", [by] if by else [], _BY)
    places = [named_gpu(name).id for name in gpu]
    entries = _entries(weights or WEIGHTS)
    refuse_unknown("stack", stack, sorted({str(entry.words["stack"]) for entry in entries}))
    pairs = [_pair(text, entries) for text in word]
    if runs:
        _show_runs(gpu, stack, op, entries, json)
        return
    found = [
        entry
        for entry in entries
        if (not op or entry.op in op)
        and (not places or entry.gpu in places)
        and (not stack or str(entry.words["stack"]) in stack)
        and all(str(entry.words.get(name)) == value for name, value in pairs)
    ]
    lines = by or ("kind" if len(found) <= LISTED else "op" if not op else "gpu")
    if json:
        print(as_json.to_json(as_json.evidence_fields(found, by or "kind")))
        return
    from kernelcast.report.evidence import print_evidence

    print_evidence(found, lines)


def _show_runs(gpus: list[str], stacks: list[str], ops: list[str], entries: list[Entry], json: bool) -> None:
    """What stacks/kernels.toml says, of each GPU that is named or in full, beside the backends that were measured."""
    from kernelcast.report.which import print_runs, runs_fields

    places: list[str | None] = [*gpus] or [None]
    lines = [line for name in places for line in runs_fields(name, stacks, ops, entries)]
    if json:
        print(as_json.to_json({"runs": lines}))
    else:
        print_runs(lines)


def _entries(folder: Path) -> list[Entry]:
    """All kinds of all families, by op, GPU and words."""
    loaded = [load(folder, path.stem) for path in sorted(folder.glob("*.safetensors"))]
    found = [entry for weights in loaded if weights for entry in weights.evidence.entries]
    if not found:
        raise KernelcastError(f"no evidence in {folder}: no FAMILY.safetensors, as `kernelcast fit -o DIR` writes")
    return sorted(found, key=lambda entry: (entry.op, entry.gpu, str(sorted(map(str, entry.words.items())))))


def _pair(text: str, entries: list[Entry]) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise KernelcastError(f"--where {text!r}: give WORD=VALUE, as dtype=fp8")
    refuse_unknown("word", [name], sorted({known for entry in entries for known in entry.words}))
    return name, value
